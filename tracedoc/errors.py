"""The two kinds of bad news that cross module borders: errors and limits.

The third kind, ``Unknown``, belongs to a single fact and lives in :mod:`tracedoc.facts.catalog`.
"""

from __future__ import annotations

from dataclasses import dataclass


class TracedocError(Exception):
    """Say what cannot be answered, and what the user can do about it.

    ``message`` is one line without a full stop; ``hint`` is the next action. The command line prints
    both and exits with 2, without a traceback.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[TracedocError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class InputError(TracedocError):
    """A path cannot be read as a trace or a run."""


class RuleError(TracedocError):
    """A rule file is wrong; the message starts with ``file:line:column``."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A part that this capture cannot answer, while the rest stands.

    ``code`` is stable and has a page in ``tracedoc explain``; ``message`` says what was seen, and
    ``effect`` which answers it takes away.
    """

    code: str
    message: str
    effect: str = ""
