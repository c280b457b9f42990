"""Programs of steps as digests hold them: encoded until a replay asks for one of them."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tracedoc.digest.codec import decode, encode
from tracedoc.replay.rank.program import RankProgram, narrow

NARROWED = (
    "lag", "own", "ready_lag", "held", "rejoin_lag", "launch_lag", "gap", "dur", "delay", "began",
    "cause_lag",
)  # fmt: skip


class EncodedProgram(msgspec.Struct, frozen=True):
    """The program of one step of a rank, as bytes; ``step`` is its number."""

    step: int
    data: bytes

    @classmethod
    def of(cls, program: RankProgram) -> EncodedProgram:
        """Return a program encoded."""
        columns = {name: narrow(getattr(program, name)) for name in NARROWED}
        return cls(program.step, encode(replace(program, **columns)))

    def decoded(self) -> RankProgram:
        """Return the program; raises :class:`ValueError` where its columns do not fit together."""
        program = decode(self.data, RankProgram)
        if not program.fits_together:
            raise ValueError("the columns of this program do not fit together")
        return program
