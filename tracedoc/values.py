"""The value of a measurement: a number, a text, or Unknown with its reason."""

from __future__ import annotations

import msgspec

Scalar = float | int | str | bool


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A measurement that this capture does not allow, and why. Never 0, never NaN."""

    reason: str


class Failed(Unknown, frozen=True):
    """A measurement whose function raised: a defect of tracedoc. ``traceback`` says where."""

    traceback: str = ""


Value = Scalar | Unknown | Failed
