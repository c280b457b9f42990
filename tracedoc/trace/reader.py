"""Read the events of a trace, chunk by chunk, natively where that is possible and in Python otherwise."""

from __future__ import annotations

import os
from typing import Any

from tracedoc.errors import InputError
from tracedoc.trace.chunks import LONGEST_PATIENCE
from tracedoc.trace.events import EventDecoder, Frames
from tracedoc.trace.part import Part, decoded_part
from tracedoc.trace.scan import ChunkScanner
from tracedoc.trace.tables import Tables


class PythonReader:
    """Reads chunks with a typed JSON decoder; every event and every damage is its business."""

    name = "python"

    def __init__(self, tables: Tables, frames: Frames) -> None:
        self._tables = tables
        self._decoder = EventDecoder(frames)

    @property
    def read(self) -> int:
        """How many elements of the array were read, of every phase."""
        return self._decoder.read

    def chunk(self, buffer: bytearray, begin: int, end: int) -> Part:
        """Return the events of the JSON array in ``buffer[begin:end]``.

        Raises :class:`tracedoc.trace.chunks.MalformedJson` where the bytes are no JSON array.
        """
        return decoded_part(self._decoder.chunk(buffer, begin, end), self._tables)

    def single(self, text: bytes) -> Part | None:
        """Return one event, mended if need be; ``None`` if it cannot be read."""
        decoded = self._decoder.single(text)
        return None if decoded is None else decoded_part(decoded, self._tables)


class NativeReader(PythonReader):
    """Reads plain chunks with the native scanner, and leaves the others to the decoder."""

    name = "native"

    def __init__(self, scanner: Any, tables: Tables, frames: Frames) -> None:
        super().__init__(tables, frames)
        self._scanner = ChunkScanner(scanner, tables, self._decoder, frames)
        self._patience = 0  # chunks to decode before the scanner is tried again
        self._setback = 0

    def chunk(self, buffer: bytearray, begin: int, end: int) -> Part:
        """Return the events of the JSON array in ``buffer[begin:end]``, as :class:`PythonReader` does."""
        if self._patience:
            self._patience -= 1
            return super().chunk(buffer, begin, end)
        part = self._scanner.part(buffer, begin, end)
        if part is not None:
            self._setback = 0
            return part
        # A file that is odd throughout need not be scanned in vain throughout.
        self._patience = self._setback
        self._setback = min(2 * self._setback + 1, LONGEST_PATIENCE)
        return super().chunk(buffer, begin, end)


def make_reader(tables: Tables, frames: Frames) -> PythonReader:
    """Return the reader of this installation, or the one that the environment asks for."""
    scanner = scanner_type()
    return PythonReader(tables, frames) if scanner is None else NativeReader(scanner, tables, frames)


VARIABLE = "TRACEDOC_READER"
"""The environment variable that chooses the reader: ``python``, ``native``, or nothing for the faster one."""

LAYOUT = 4
"""What the scanner must return to be understood here; an older build is passed over."""


def scanner_type() -> Any | None:
    """Return the type of native scanners, ``None`` where events are read in Python.

    Raises :class:`InputError` where the native one is asked for and not there.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "python", "native"):
        raise InputError(f"{VARIABLE} is {asked!r}", "set it to python or native, or leave it out")
    if asked == "python":
        return None
    try:
        from tracedoc.trace import _scanner

        if _scanner.LAYOUT == LAYOUT:
            return _scanner.Scanner
    except ImportError:
        pass
    if asked == "native":
        raise InputError(
            f"{VARIABLE} asks for the native reader, which is not built",
            "install tracedoc again where there is a C compiler, or leave the variable out",
        )
    return None


def reader_name() -> str:
    """Name of the reader that serves: "native" or "python"."""
    return "python" if scanner_type() is None else "native"
