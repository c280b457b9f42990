"""Contain what fails by a fault of ours: that part of the answer is missing, and the rest stands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tracedoc.errors import Limit, TracedocError, TraceLimit

Part = TypeVar("Part")
Other = TypeVar("Other")

CODE = "internal-error"
LOG = logging.getLogger("tracedoc.failure")
"""Told the traceback of every failure, which ``--debug`` shows."""

_LONGEST = 200


@dataclass(slots=True)
class Failures:
    """The parts of an answer that failed; ``limits`` say which."""

    limits: list[Limit] = field(default_factory=list)

    def of_trace(self) -> tuple[TraceLimit, ...]:
        """Return the limits as those of a trace."""
        return tuple(TraceLimit(limit.code, "", limit.message, limit.effect) for limit in self.limits)

    def contain(self, what: str, make: Callable[[], Part], instead: Other) -> Part | Other:
        """The result of ``make``, or ``instead`` where it fails; ``what`` names the part.

        Errors meant for users, and a lack of memory, pass.
        """
        try:
            return make()
        except (TracedocError, MemoryError):
            raise
        except Exception as error:
            self.limits.append(
                Limit(
                    CODE,
                    f"{what} failed: {failure(what, error)}",
                    "the rest of the answer stands without it; --debug shows where, for a report",
                )
            )
            return instead


def failure(what: str, error: Exception) -> str:
    """Log that a part failed, and return the error in a line."""
    LOG.debug("%s failed", what, exc_info=error)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST]
