"""The value of a measurement: a number, a text, or Unknown with its reason; what is measured once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import msgspec

Scalar = float | int | str | bool


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A measurement that this capture does not allow, and why. Never 0, never NaN."""

    reason: str


class Failed(Unknown, frozen=True):
    """A measurement whose function raised: a defect of tracedoc. ``traceback`` says where."""

    traceback: str = ""


Value = Scalar | Unknown | Failed


class NotKnownError(Exception):
    """What a fact asks for is not known: then it is not known itself, for the same reason."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.reason)
        self.unknown = unknown


Known = TypeVar("Known")
Function = TypeVar("Function", bound=Callable[..., Any])


def needed(value: Known | Unknown | Failed) -> Known:
    """A value, where it is known. Else the fact that asks, or what is measured :func:`once`, is Unknown."""
    if isinstance(value, Unknown):
        raise NotKnownError(value)
    return value


def needed_number(value: Value) -> float:
    """A number, where it is known; else as :func:`needed`."""
    if isinstance(value, Unknown):
        raise NotKnownError(value)
    return float(value)


def answering(measure: Function) -> Function:
    """A function that returns Unknown where something that it asks for is not :func:`needed`."""

    @wraps(measure)
    def answered(*arguments: Any) -> Any:
        try:
            return measure(*arguments)
        except NotKnownError as missing:
            return missing.unknown

    return cast(Function, answered)


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
            subject.kept[measure] = answering(measure)(subject)
        result: Result = subject.kept[measure]
        return result

    return asked
