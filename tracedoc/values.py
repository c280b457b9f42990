"""The value of a measurement: a number, a text, or Unknown with its reason; what is measured once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import msgspec

Scalar = float | int | str | bool


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A measurement that this capture does not allow, and why. Never 0, never NaN."""

    reason: str


class Failed(Unknown, frozen=True):
    """A measurement whose function raised: a defect of tracedoc. ``traceback`` says where."""

    traceback: str = ""


Value = Scalar | Unknown | Failed


class Keeps(Protocol):
    """What keeps results of functions."""

    @property
    def kept(self) -> dict[Any, Any]:
        """The results by the functions."""


Subject = TypeVar("Subject", bound=Keeps)
Result = TypeVar("Result")


def once(measure: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Call a function once for each run, or timeline: nobody may change its result."""

    @wraps(measure)
    def asked(subject: Subject) -> Result:
        if measure not in subject.kept:
            subject.kept[measure] = measure(subject)
        result: Result = subject.kept[measure]
        return result

    return asked
