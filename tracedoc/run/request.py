"""The request for a capture that lies in the run directory of a running job. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tracedoc.run.untrusted import UnusableError, read_bounded

VARIABLE = "TRACEDOC_LIVE"
"""Set to 1, it has the ranks of a collected job watch for requests."""

REQUEST_NAME = "again.request"
SECONDS_BETWEEN_LOOKS, LEAST_SECONDS_BETWEEN_LOOKS = 1.0, 0.05
"""A rank looks for a request once a step, but no less often and no more often than this."""

STEPS_SAMPLED = 4
"""What a rank does is sampled over so many steps before it answers."""

_MAX_REQUEST_BYTES = 10_000
_STEP_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Request:
    """The capture that is asked for: from step ``at`` on, into the folder ``again-<number>`` of the run's.

    Without ``active`` steps ranks only write what their flight recorders hold.
    """

    number: int
    at: int
    warmup: int = 1
    active: int = 5

    @property
    def folder(self) -> str:
        """The name of the folder that the ranks write into."""
        return f"again-{self.number}"


def read_request(folder: Path) -> Request | None:
    """The request that lies in a run directory, ``None`` where there is none that can be understood."""
    try:
        content = json.loads(read_bounded(folder / REQUEST_NAME, _MAX_REQUEST_BYTES))
        request = Request(**content)
    except (UnusableError, ValueError, TypeError, RecursionError):
        return None
    values = asdict(request).values()
    return request if all(type(one) is int and 0 <= one < _STEP_LIMIT for one in values) else None
