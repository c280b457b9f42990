"""Cut the JSON text of a trace into chunks of whole events, trusting no layout.

A chunk begins at an element of the event array. If ``[`` + chunk + ``]`` decodes, its end was between
two elements: a cut inside a string or a nested value cannot balance. So the end may be guessed from
the bytes between neighbouring events, and a wrong guess costs time, never an event.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

CHUNK_BYTES = 2 * 1024 * 1024  # of half as many, reading takes 5 % longer: much is done once a chunk
_WINDOW_BYTES = 64 * 1024

# What hostile text may cost. Real metadata takes kilobytes, as does the largest event.
_HEADER_LIMIT = 8 * 1024 * 1024
_MOST_KEYS = 10_000
_MOST_ARRAYS = 8
_ELEMENT_LIMIT = 8 * 1024 * 1024
_MOST_FRUITLESS = 100_000  # elements in a row that give no event
_SMALL_REACH = 4 * 1024
LONGEST_PATIENCE = 64

_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
# Inside damaged text a boundary counts only where an event seems to begin.
_EVENT_BEGINS = re.compile(rb'\}\s*(,)\s*\{\s*"(?:ph|name|cat|pid|tid|ts|id|s|args)"\s*:')
_ARRAY_CLOSES = re.compile(rb"\}\s*\]")
_TRACE_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_ELEMENT = re.compile(rb"[^ \t\r\n,]")
_ERROR_OFFSET = re.compile(r"\((?:byte|char) (\d+)\)")  # never more bytes than characters before it
_SCANNER = json.JSONDecoder(strict=False)


class ByteSource(Protocol):
    """Where the bytes come from."""

    def readinto(self, target: memoryview) -> int:
        """Fill the front of ``target``; return how many bytes came, 0 at the end."""
        ...


class MalformedJson(Exception):  # noqa: N818 - a signal between the cutter and the decoder
    """The decoder met bytes that are not JSON, at ``offset`` of its input if it is known."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        match = _ERROR_OFFSET.search(message)
        self.offset = int(match.group(1)) if match else None


class NotJson(Exception):  # noqa: N818 - the reader turns it into words for the user
    """The first byte begins neither an object nor an array; ``head`` is how the text begins."""

    def __init__(self, head: bytes) -> None:
        super().__init__(repr(head))
        self.head = head


class Outcome(msgspec.Struct):
    """What the cutter met beside whole events. Offsets count decompressed bytes."""

    metadata: dict[str, object] = msgspec.field(default_factory=dict)
    has_events: bool = False
    truncated: bool = False
    closed: bool = False  # the end of the events was read
    raw_bytes: int = 0
    skipped: int = 0
    first_skipped: int | None = None
    gave_up_at: int | None = None
    second_at: int | None = None  # where another JSON text begins, which is not read


def cut(
    source: ByteSource,
    decode_chunk: Callable[[bytearray, int, int], None],
    decode_one: Callable[[bytes], bool],
    *,
    stop_at: frozenset[str] = frozenset(),
    chunk_bytes: int | None = None,
) -> Outcome:
    """Pass every event of a trace to a decoder; return the metadata and what was wrong.

    ``decode_chunk(buffer, begin, end)`` gets a JSON array of whole events in ``buffer[begin:end]``, to be
    used before it returns, or raises :class:`MalformedJson`. ``decode_one`` gets the text of a single
    event that may need mending, and says whether it could use it. A top-level key in ``stop_at`` ends the
    reading, for then the file is something else.
    """
    return _Cutter(source, decode_chunk, decode_one, stop_at, chunk_bytes or CHUNK_BYTES).run()


class _Cutter:
    """A window on the text: ``buffer[start:end]``, which begins ``offset`` bytes into the stream."""

    def __init__(
        self,
        source: ByteSource,
        decode_chunk: Callable[[bytearray, int, int], None],
        decode_one: Callable[[bytes], bool],
        stop_at: frozenset[str],
        chunk_bytes: int,
    ) -> None:
        self._source = source
        self._decode_chunk = decode_chunk
        self._decode_one = decode_one
        self._stop_at = stop_at
        self._buffer = bytearray(chunk_bytes)
        self._start = 0
        self._end = 0
        self._offset = 0
        self._eof = False
        self._bare = False
        self._separator = b""
        self._barren = 0  # how far the stream is known to hold no boundary
        self._reach = sys.maxsize  # how much of the window may be decoded at once
        self._patience = 0  # elements to take alone before bulk is tried again
        self._setback = 1
        self._fruitless = 0
        self._arrays = 1
        self._outcome = Outcome()

    def run(self) -> Outcome:
        if self._find_array():
            self._outcome.has_events = True
            self._read_array()
        self._outcome.raw_bytes = self._offset + self._end
        return self._outcome

    # The window.

    def _fill(self) -> bool:
        """Read more text behind what is left; return false at the end of the stream."""
        if self._eof:
            return False
        left = self._end - self._start
        if left > len(self._buffer) // 2:
            larger = bytearray(2 * len(self._buffer))
            larger[:left] = memoryview(self._buffer)[self._start : self._end]
            self._buffer = larger
        elif self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
        self._offset += self._start
        self._start, self._end = 0, left
        with memoryview(self._buffer) as view:
            while self._end < len(view):
                count = self._source.readinto(view[self._end :])
                if not count:
                    self._eof = True
                    break
                self._end += count
        return self._end > left

    def _skip_space(self, position: int) -> int:
        found = _NO_SPACE.search(self._buffer, position, self._end)
        return found.start() if found else self._end

    # What stands before and after the array.

    def _find_array(self) -> bool:
        """Move to the ``[`` of the event array; keep the metadata before it."""
        self._fill()
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._start = 3
        position = self._skip_space(self._start)
        while position == self._end:
            self._start = position
            if not self._fill():
                break
            position = self._skip_space(self._start)
        if position == self._end:
            raise NotJson(b"")
        if self._buffer[position] == ord("["):
            self._start = position
            self._bare = True
            return True
        if self._buffer[position] != ord("{"):
            raise NotJson(bytes(self._buffer[position : min(self._end, position + 256)]))
        self._start = position
        while True:
            found = self._scan_object(self._start + 1, closes_at_end=self._eof)
            if found is not None:
                return found
            if self._eof or self._end - self._start > _HEADER_LIMIT:
                return self._jump_to_array()
            self._fill()

    def _jump_to_array(self) -> bool:
        match = _TRACE_EVENTS.search(self._buffer, self._start, self._end)
        if match is None:
            self._outcome.truncated = True
            return False
        self._note_skipped(self._start)
        self._start = match.end() - 1
        return True

    def _scan_object(self, position: int, *, closes_at_end: bool) -> bool | None:
        """Read ``"key": value`` pairs; return true at the event array, false at the closing brace.

        ``None`` means that the text ended first, or is damaged.
        """
        # One byte is one character in Latin-1, so offsets in the text are offsets in the buffer.
        text = self._buffer[position : self._end].decode("latin-1")
        at = keys = 0
        metadata: dict[str, object] = {}
        try:
            while True:
                while text[at] in " \t\r\n,":
                    at += 1
                if text[at] == "}":
                    self._outcome.metadata.update(metadata)
                    self._start = position + at + 1
                    return False
                key, at = _SCANNER.raw_decode(text, at)
                keys += 1
                if not isinstance(key, str) or keys > _MOST_KEYS:
                    raise ValueError("a key is text, and there are few")
                while text[at] in " \t\r\n:":
                    at += 1
                if key in self._stop_at:
                    self._outcome.metadata.update(metadata, **{key: None})
                    return False
                if key == "traceEvents" and text[at] == "[":
                    self._outcome.metadata.update(metadata)
                    self._start = position + at
                    return True
                stop = _SCANNER.raw_decode(text, at)[1]
                metadata[key] = json.loads(
                    text[at:stop].encode("latin-1").decode("utf-8", "replace"), strict=False
                )
                at = stop
        except (IndexError, ValueError, RecursionError):
            if closes_at_end:
                self._outcome.metadata.update(metadata)
            return None

    def _read_tail(self) -> bool:
        """Read the metadata behind the array; return true where a further array of events begins.

        A file that is cut off there lacks only metadata.
        """
        position = self._skip_space(self._start)
        while self._end - self._start < _HEADER_LIMIT and self._fill():
            pass
        position = self._skip_space(self._start)
        if position == self._end:
            self._outcome.truncated = True
            return False
        before = len(self._outcome.metadata)
        found = self._scan_object(position, closes_at_end=True)
        if found is None:
            last = self._buffer[position : self._end].rstrip()
            if last.endswith(b"}") and len(self._outcome.metadata) > before:
                self._note_skipped(position)
            else:
                self._outcome.truncated = True
        self._arrays += 1
        return found is True and self._arrays <= _MOST_ARRAYS

    def _note_second(self) -> None:
        """Note where another text begins behind the first, as in files that were joined."""
        position = self._skip_space(self._start)
        if position < self._end and self._buffer[position] in b"{[":
            self._outcome.second_at = self._offset + position

    # The array.

    def _read_array(self) -> None:
        """Decode chunk after chunk. ``buffer[start]`` is always the byte before the next element."""
        while True:
            if self._decode_bulk():
                if not self._eof:
                    self._fill()
                continue
            step = self._decode_single()
            if self._fruitless > _MOST_FRUITLESS:
                self._outcome.gave_up_at = self._offset + self._start
                return
            if step == "closed":
                self._outcome.closed = True
                if not self._bare and self._read_tail():
                    continue
                self._note_second()
                return
            if step == "more":
                giant = self._end - self._start > _ELEMENT_LIMIT
                if not (self._step_over_giant() if giant else self._fill()):
                    self._outcome.truncated = True
                    return

    def _decode_bulk(self) -> bool:
        """Decode up to the last boundary in the window that proves right; return whether any did."""
        if self._patience:
            self._patience -= 1
            return False
        buffer, start = self._buffer, self._start
        limit = min(self._end, start + self._reach)
        failures = 0
        while True:
            comma = self._last_boundary(start + 1, limit)
            if comma < 0:
                if failures:
                    self._patience = self._setback
                    self._setback = min(2 * self._setback, LONGEST_PATIENCE)
                else:
                    self._reach = min(2 * self._reach, sys.maxsize)
                return False
            buffer[start] = ord("[")
            buffer[comma] = ord("]")
            try:
                self._decode_chunk(buffer, start, comma + 1)
            except MalformedJson as problem:
                buffer[comma] = ord(",")
                failures += 1
                if problem.offset is not None or failures > 3:
                    # Else each of many damaged events would cost a whole window.
                    self._reach = _SMALL_REACH
                if problem.offset is not None and problem.offset < comma - start:
                    limit = start + problem.offset
                elif failures > 3:
                    limit = start + (comma - start) // 2
                else:
                    limit = comma
                continue
            self._start = comma
            if not failures:
                self._reach = min(2 * self._reach, sys.maxsize)
            self._setback = 1
            self._fruitless = 0
            return True

    def _last_boundary(self, begin: int, end: int) -> int:
        """The place of the comma of the last likely boundary, -1 if there is none."""
        if self._offset + end <= self._barren:
            return -1
        if self._separator:
            at = self._buffer.rfind(self._separator, begin, end)
            if at >= 0:
                return at + self._separator.index(b",")
        match = self._last_match(max(begin, end - _WINDOW_BYTES), end) or self._last_match(begin, end)
        if match is None:
            self._barren = self._offset + end
            return -1
        self._separator = match.group()
        return match.start() + self._separator.index(b",")

    def _last_match(self, begin: int, end: int) -> re.Match[bytes] | None:
        matches = deque(_BOUNDARY.finditer(self._buffer, begin, end), maxlen=1)
        return matches[0] if matches else None

    def _decode_single(self) -> str:
        """Take the next element alone; return "taken", "closed" at the array's end, or "more"."""
        found = _ELEMENT.search(self._buffer, self._start + 1, self._end)
        if found is None:
            # Nothing but separators: keep one, so that a file full of them needs no memory.
            self._start = max(self._start, self._end - 1)
            self._buffer[self._start] = ord(",")
            return "more"
        position = found.start()
        if self._buffer[position] == ord("]"):
            self._start = position + 1
            return "closed"
        stop = self._element_end(position)
        if stop is not None:
            after = self._skip_space(stop)
            if after == self._end and not self._eof:
                return "more"
            self._take(position, stop)
            return "taken"
        return self._step_over_damage(position)

    def _element_end(self, position: int) -> int | None:
        for size in (_SMALL_REACH, _WINDOW_BYTES, _ELEMENT_LIMIT):
            text = self._buffer[position : min(self._end, position + size)].decode("latin-1")
            try:
                return position + int(_SCANNER.raw_decode(text)[1])
            except RecursionError:
                return None
            except json.JSONDecodeError as error:
                # Only an error at the end, or text without one, may go away with more text.
                if error.pos < len(text) - 16 and not error.msg.startswith("Unterminated"):
                    return None
            except ValueError:  # more digits than Python converts
                return None
        return None

    def _take(self, position: int, stop: int) -> None:
        """Decode one element, or note that it cannot be, and go behind it."""
        fruitful = self._buffer[position] == ord("{")
        if fruitful and not self._decode_one(bytes(self._buffer[position:stop])):
            self._note_skipped(position)
            fruitful = False
        self._fruitless = 0 if fruitful else self._fruitless + 1
        self._go_behind(stop)

    def _step_over_giant(self) -> bool:
        """Skip an element that no event can be, without keeping it; return false if the text ends first."""
        self._note_skipped(self._start)
        while True:
            begins = _EVENT_BEGINS.search(self._buffer, self._start + 1, self._end)
            if begins is not None:
                self._start = begins.start(1)
                return True
            self._start = max(self._start, self._end - 256)  # the boundary may be cut in two
            if not self._fill():
                return False

    def _step_over_damage(self, position: int) -> str:
        """Mend or skip an element that is no JSON, up to where the next event begins."""
        begins = _EVENT_BEGINS.search(self._buffer, position, self._end)
        if begins is not None:
            stop = begins.start() + 1
        elif not self._eof:
            return "more"
        else:
            closes = _ARRAY_CLOSES.search(self._buffer, position, self._end)
            if closes is None:
                return "more"
            stop = closes.start() + 1
        self._take(position, stop)
        return "taken"

    def _go_behind(self, stop: int) -> None:
        after = self._skip_space(stop)
        comma = after < self._end and self._buffer[after] == ord(",")
        self._start = after if comma else after - 1

    def _note_skipped(self, position: int) -> None:
        self._outcome.skipped += 1
        if self._outcome.first_skipped is None:
            self._outcome.first_skipped = self._offset + position
