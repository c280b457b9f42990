"""Read the events of a trace, chunk by chunk, natively where that is possible and in Python otherwise."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import InputError
from tracedoc.trace.chunks import LONGEST_PATIENCE
from tracedoc.trace.compact import Growing
from tracedoc.trace.events import FRAME, EventDecoder, Frames, Metadata, collective_fields, tells_whose
from tracedoc.trace.part import COUNTED, ON_GPU, SHAPED, WAITS, Part, Tables, decoded_part, interned

_REFUSED = 16
_NO_HEAD = -1
_ABSENT = ("", "", -1, -1)  # category, name, process and thread of an event that does not say
_METADATA: Any = msgspec.json.Decoder(list[Metadata]).decode

_Rows = npt.NDArray[Any]


class ChunkScanner:
    """Reads chunks of plain events; what they share gets the numbers that the decoder would give.

    The scanner numbers heads and places by the bytes that spell them. What is new in a chunk is looked up
    here once, in order of appearance, so that both readers can take turns on one file.
    """

    def __init__(self, scanner_type: Any, tables: Tables, decoder: EventDecoder, frames: Frames) -> None:
        # Random, so that nobody can write names that collide.
        seed, factor = (int.from_bytes(os.urandom(8), "little") for _ in range(2))
        self._scanner = scanner_type(seed, factor, int(frames))
        self._tables = tables
        self._decoder = decoder
        self._judges_frames = frames is Frames.LONG
        self._head_of, self._place_of, self._shape_of = (Growing(np.int32) for _ in range(3))

    def part(self, buffer: bytearray, begin: int, end: int) -> Part | None:
        """Return the events of a chunk, ``None`` where anything in it is not plain."""
        found = self._scanner.scan(buffer, begin, end)
        if found is None:
            return None
        elements, times, heads, placed, sized, counted, waits, shaped, collectives, spans, *new = found
        new_heads, new_places, new_shapes = new
        try:
            keys = [
                tuple(
                    msgspec.json.decode(text) if text else absent
                    for text, absent in zip(head, _ABSENT, strict=True)
                )
                for head in new_heads
            ]
            metadata = _metadata(buffer, begin, _rows(spans, np.int64, 2))
            named = _rows(collectives, np.int64, 2)
            fields = collective_fields((named[:, 1] + begin).tolist(), buffer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        self._add_heads(keys)
        self._add_places(new_places)
        self._shape_of.extend(interned(self._tables.shapes, new_shapes))
        self._decoder.read += elements
        table = _Positions(self._head_of.values()[np.frombuffer(heads, np.int32)], self._tables, bool(keys))
        events = table.kept(_rows(times, np.int64, 4))
        self._decoder.note_starts(events[:, 0], buffer, begin, end)
        places, sizes = (
            table.having(ON_GPU, _rows(placed, np.int32, 2)),
            table.having(ON_GPU, _rows(sized, np.int64, 2)),
        )
        counters, waited = (
            table.having(COUNTED, _rows(counted, np.int64, 5)),
            table.having(WAITS, _rows(waits, np.int64, 3)),
        )
        shapes = table.having(SHAPED, _rows(shaped, np.int32, 2))
        rows = table.positions(named[:, 0])
        return Part(
            events={
                "head": table.heads,
                "ts": events[:, 0],
                "dur": events[:, 1],
                "correlation": events[:, 2],
                "external_id": events[:, 3],
            },
            placed={"row": places[:, 0], "place": self._place_of.values()[places[:, 1]]},
            sized=_named(sizes, "row", "nbytes"),
            counted=_named(counters, "row", "type", "device", "allocated", "reserved"),
            waits=_named(waited, "row", "wait_on_stream", "recorded_by"),
            shaped={"row": shapes[:, 0], "shape": self._shape_of.values()[shapes[:, 1]]},
            collectives={row: one for row, one in zip(rows, fields, strict=True) if row >= 0},
            metadata=metadata,
        )

    def _add_heads(self, keys: list[tuple[Any, ...]]) -> None:
        """Look up what new heads are, and set what the scanner keeps of their events."""
        numbers, traits = [], bytearray()
        for key in keys:
            if self._judges_frames and key[0] == FRAME and not tells_whose(key[1]):
                numbers.append(_NO_HEAD)
                traits.append(_REFUSED)
            else:
                number = self._tables.heads[key]
                numbers.append(number)
                traits.append(self._tables.heads.traits[number])
        self._head_of.extend(np.array(numbers, dtype=np.int32))
        self._scanner.classify(bytes(traits))

    def _add_places(self, places: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
        heads, traits = self._head_of.values(), self._tables.heads.traits
        numbers = []
        for device, stream, grid, head_number in places:
            head = int(heads[int.from_bytes(head_number, sys.byteorder)])
            on_gpu = head != _NO_HEAD and traits[head] & ON_GPU
            key = _id(device), _id(stream), grid, head
            numbers.append(self._tables.places[key] if on_gpu else _NO_HEAD)
        self._place_of.extend(np.array(numbers, dtype=np.int32))


class _Positions:
    """Which of the events that the scanner kept are kept indeed, now that new heads are known.

    Where none is new, all are: the scanner knows what to keep of events by their heads.
    """

    def __init__(self, heads: npt.NDArray[np.int32], tables: Tables, has_new: bool) -> None:
        self.heads = heads
        self._kept: _Rows | None = None
        self._traits: _Rows | None = None
        if has_new:
            self._traits = tables.traits_of(heads)
            if (heads == _NO_HEAD).any():
                self._kept = heads != _NO_HEAD
                self._position = np.where(self._kept, np.cumsum(self._kept) - 1, -1)
                self.heads = heads[self._kept]

    def kept(self, events: _Rows) -> _Rows:
        """Return the rows of events that are kept."""
        return events if self._kept is None else events[self._kept]

    def positions(self, rows: _Rows) -> list[int]:
        """The places of rows among those that are kept, -1 for others."""
        found: list[int] = (rows if self._kept is None else self._position[rows]).tolist()
        return found

    def having(self, trait: int, table: _Rows) -> _Rows:
        """Return the rows of a table whose events have a trait; the first column is the event."""
        if self._traits is None or not table.size:
            return table
        table = table[self._traits[table[:, 0]] & trait != 0]
        if self._kept is not None:
            table[:, 0] = self._position[table[:, 0]]
        return table


def _rows(data: bytes, dtype: type[np.generic], columns: int) -> _Rows:
    return np.frombuffer(data, dtype).reshape(-1, columns)


def _named(table: _Rows, *names: str) -> dict[str, _Rows]:
    return {name: table[:, i] for i, name in enumerate(names)}


def _metadata(buffer: bytearray, begin: int, spans: _Rows) -> list[Metadata]:
    texts = [buffer[begin + start : begin + stop] for start, stop in spans.tolist()]
    found: list[Metadata] = _METADATA(b"[%b]" % b",".join(texts)) if texts else []
    return found


def _id(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


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
