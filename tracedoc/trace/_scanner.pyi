"""The native scanner of native/, where it is built."""

import numpy as np
import numpy.typing as npt

LAYOUT: int

def longest(
    times: npt.NDArray[np.int64],
    sources: npt.NDArray[np.intp],
    begins: npt.NDArray[np.intp],
    weights: npt.NDArray[np.int64],
) -> None:
    """Let the last nodes, in their order, begin no earlier than their edges allow."""

class Scanner:
    """Reads chunks of plain events into tables; what it numbers is numbered in order of appearance."""

    def __init__(self, seed: int, factor: int, frames: int) -> None: ...
    def scan(
        self, buffer: bytearray, begin: int, end: int
    ) -> (
        tuple[
            int,  # elements
            bytes,  # int64: start, duration, correlation, external id
            bytes,  # int32: head
            bytes,  # int32: row, place
            bytes,  # int64: row, bytes
            bytes,  # int64: row, device type, device, allocated, reserved
            bytes,  # int64: row, stream waited for, correlation of the record
            bytes,  # int32: row, shapes
            bytes,  # int64: row, where in the chunk the collective's name begins
            bytes,  # int64: where in the chunk a metadata event begins and ends
            list[tuple[bytes, bytes, bytes, bytes]],  # new heads: category, name, pid, tid
            list[tuple[bytes, bytes, bytes, bytes]],  # new places: device, stream, grid, head
            list[tuple[bytes, bytes]],  # new shapes: dimensions, types
        ]
        | None
    ):
        """Return the tables of a chunk of plain events, ``None`` where anything in it is odd."""

    def classify(self, traits: bytes) -> None:
        """Keep what was new in the last chunk; one byte for each new head."""
