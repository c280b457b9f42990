"""The two kinds of bad news that cross module borders, errors and limits, and what contains faults of ours.

A part of the answer that fails by a fault of ours is missing, and the rest stands. The third kind of bad
news, ``Unknown``, belongs to a single fact and lives in :mod:`tracedoc.values`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word most like ``word``, or nothing if none is alike."""
    import difflib

    alike = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {alike[0]!r}?)" if alike else ""


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


class ChangeError(TracedocError):
    """A change that was asked for is not known, or its parameters are wrong."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A part that this capture cannot answer, while the rest stands.

    ``code`` is stable and has a page in ``tracedoc explain``; ``message`` says what was seen, and
    ``effect`` which answers it takes away.
    """

    code: str
    message: str
    effect: str = ""


@dataclass(frozen=True, slots=True)
class TraceLimit:
    """A limit of one trace, to be shown once with the ranks that share it.

    ``words`` say what was seen in the file ``source``, which is empty where the words name the file.
    """

    code: str
    source: str
    words: str
    effect: str = ""

    @property
    def message(self) -> str:
        """What was seen, with the file's name."""
        return f"{self.source}: {self.words}" if self.source else self.words


def how_to_install(extra: str) -> str:
    """Return the hint for an optional part of tracedoc that is not installed."""
    return f"in a checkout of tracedoc: pip install '.[{extra}]'"


Part = TypeVar("Part")
Other = TypeVar("Other")

INTERNAL_ERROR = "internal-error"
LOG = logging.getLogger("tracedoc.failure")
"""Told the traceback of every failure, which ``--debug`` shows."""

_LONGEST_FAULT = 200


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
                    INTERNAL_ERROR,
                    f"{what} failed: {failure(what, error)}",
                    "the rest of the answer stands without it; --debug shows where, for a report",
                )
            )
            return instead


def failure(what: str, error: Exception) -> str:
    """Log that a part failed, and return the error in a line."""
    LOG.debug("%s failed", what, exc_info=error)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST_FAULT]
