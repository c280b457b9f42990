"""The value of a measurement: a number, a text, or Unknown with its reason."""

from __future__ import annotations

import msgspec

Scalar = float | int | str | bool


class Unknown(msgspec.Struct, frozen=True):
    """A measurement that this capture does not allow, and why. Never 0, never NaN."""

    reason: str


Value = Scalar | Unknown
