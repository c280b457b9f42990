"""Programs as they travel from a worker: narrow columns, compressed."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.replay.rank.program import RankProgram

_WIDE = frozenset(
    {"lag", "own", "ready_lag", "rejoin_lag", "launch_lag", "gap", "dur", "delay", "cause_lag"}
)  # fmt: skip
_FAST = 1


class PackedProgram(msgspec.Struct, frozen=True):
    """A program in few bytes; ``step`` and ``step_ns`` are those of the program."""

    step: int
    step_ns: int
    periodic: bool
    events: int
    data: bytes

    @classmethod
    def of(cls, program: RankProgram) -> PackedProgram:
        """Return a program packed."""
        fields: dict[str, Any] = {}
        for name in RankProgram.__struct_fields__:
            value = getattr(program, name)
            fields[name] = _packed(value) if isinstance(value, np.ndarray) else value
        data = zlib.compress(msgspec.msgpack.encode(fields), _FAST)
        return cls(program.step, program.step_ns, program.periodic, program.events, data)

    def unpack(self) -> RankProgram:
        """Return the program."""
        fields = msgspec.msgpack.decode(zlib.decompress(self.data))
        for name, value in fields.items():
            if isinstance(value, dict):
                fields[name] = _unpacked(value, wide=name in _WIDE)
        fields["labels"] = tuple(fields["labels"])
        return RankProgram(**fields)


def _packed(values: npt.NDArray[Any]) -> dict[str, Any]:
    if values.dtype.kind != "i" or values.size == 0:
        return {"type": values.dtype.str, "data": values.tobytes()}
    least = int(values.min())
    more = (values.astype(np.int64) - least).astype(np.min_scalar_type(int(values.max()) - least))
    return {"type": more.dtype.str, "data": more.tobytes(), "least": least}


def _unpacked(column: dict[str, Any], *, wide: bool) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.frombuffer(column["data"], dtype=column["type"])
    if "least" in column:
        values = values.astype(np.int64) + column["least"]
        return np.asarray(values if wide else values.astype(np.int32))
    return values
