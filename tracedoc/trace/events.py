"""Decode chunks of event text into typed events with exact nanosecond times."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from functools import cache, reduce
from operator import or_
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.chunks import MalformedJson
from tracedoc.trace.vocabulary import KINDS

NOTHING = msgspec.Raw(b"")
LEFT_OUT = object()
"""The category of what is of no use, whatever the file says: by its category an element is kept or not."""


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments of any event; values are whatever the file holds."""

    external_id: Any = msgspec.field(name="External id", default=-1)
    wait_on_stream: Any = None
    recorded_by: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    device: Any = None
    stream: Any = None
    correlation: Any = -1
    nbytes: Any = msgspec.field(name="bytes", default=None)
    grid: msgspec.Raw = NOTHING
    collective: msgspec.Raw = msgspec.field(name="Collective name", default=NOTHING)
    input_values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=NOTHING)
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    input_strides: msgspec.Raw = msgspec.field(name="Input Strides", default=NOTHING)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    old_external_id: Any = msgspec.field(name="external id", default=-1)


class InstantArgs(Args, gc=False, frozen=True):
    """The arguments of an instant, which may hold the allocator's totals, in bytes."""

    device_type: Any = msgspec.field(name="Device Type", default=None)
    device_id: Any = msgspec.field(name="Device Id", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)


class CollectiveFields(msgspec.Struct, gc=False, frozen=True):
    """The arguments that describe a collective; values are whatever the file holds."""

    name: Any = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_id: Any = msgspec.field(name="Process Group ID", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    src_rank: Any = msgspec.field(name="Src Rank", default=None)
    dst_rank: Any = msgspec.field(name="Dst Rank", default=None)


NO_ARGS = Args()
NO_INSTANT_ARGS = InstantArgs()


Category = TypeVar("Category")
Time = TypeVar("Time")


class Complete(msgspec.Struct, Generic[Category, Time], gc=False, tag_field="ph", tag="X"):
    """``"ph": "X"``; times are in microseconds, the start a float or, where that would round it, raw text."""

    cat: Category = ""  # type: ignore[assignment]
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Time = float("nan")  # type: ignore[assignment]
    dur: float = float("nan")  # without one, the event has no possible length
    args: Args = NO_ARGS


class Instant(msgspec.Struct, Generic[Category, Time], gc=False, tag_field="ph", tag="i"):
    """``"ph": "i"``; otherwise like :class:`Complete`."""

    cat: Category = ""  # type: ignore[assignment]
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Time = float("nan")  # type: ignore[assignment]
    dur: float = 0.0
    args: InstantArgs = NO_INSTANT_ARGS


AnyEvent = Complete[Any, Any] | Instant[Any, Any]


class MetadataArgs(msgspec.Struct, gc=False, frozen=True):
    """The names that metadata events give to processes and threads."""

    name: Any = ""


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """``"ph": "M"``."""

    cat: ClassVar[str] = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    args: MetadataArgs = MetadataArgs()


def _left_out(phase: str) -> Any:
    """The type of events of a phase that is of no use."""
    namespace = {"cat": LEFT_OUT}
    return msgspec.defstruct(f"LeftOut_{phase}", (), gc=False, tag_field="ph", tag=phase, namespace=namespace)


Untimed: Any = reduce(or_, map(_left_out, "sftCI"), Metadata)
"""Events without a time: metadata, flows (redundant with correlation ids), counters, and instants in a
deprecated spelling, which Kineto does not use."""


Int64Array = npt.NDArray[np.int64]

IMPOSSIBLE = np.iinfo(np.int64).min
"""Stands for a time that cannot be: missing, not a number, or beyond 126 years."""

_LARGEST_NS = 4_000_000_000_000_000_000
# Below 2^43 us a float64 is less than half a nanosecond from the decimal text it was read from.
_EXACT_BELOW_US = float(2**43)
_EXACT_BELOW_NS = 2**43 * 1000
# Both roundings, of the text and of the product, are then less than half a nanosecond together.
_EXACT_PRODUCT_BELOW_US = float(2**40)
_LARGE_FRACTION = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.')
_THREE_DECIMALS = re.compile(rb"(?:\d{1,16}\.\d{3}\n)*\d{1,16}\.\d{3}")
_WHOLE = re.compile(rb"(?:\d{1,16}\n)*\d{1,16}")
# Kineto prints C++ floats as they come ("blocks per SM": inf), which JSON does not know.
_WORD = 64
_BARE_TOKEN = re.compile(rb'("\s*:\s*)-?(?:inf|nan|NaN|Infinity|N/A)(?=\s*[,}\]])')

FRAME = "python_function"
"""The category of Python frames."""

LONG_FRAME_US = 10.0
"""A frame that tells whose code runs is kept from this length on: one call of many may be as short."""
_OWN_FRAME = re.compile(
    r"(?:.*/)?(?:runpy\.py|threading\.py|contextlib\.py|importlib|"
    r"lib/python3\.\d+/\w+\.py)(?:/|\(|$)|<|nn\.Module: "
)
_DECODE_COLLECTIVES: Any = msgspec.json.Decoder(list[CollectiveFields]).decode
# Kineto puts one, "occupancy", into the arguments of a kernel.
_MOST_OBJECTS = 64
_RAW_ARGS = ("input_dims", "input_types", "input_values", "input_strides", "grid", "collective")

_Fields = TypeVar("_Fields", Args, InstantArgs, CollectiveFields)


# A category that is known beforehand is no new text for each event.
_KNOWN: Any = Literal[tuple(KINDS)]


@cache
def _decoder(*, known: bool, exact: bool) -> Callable[[memoryview], list[Any]]:
    """The decoder of an array of events; ``known`` ones have no other category than the vocabulary's."""
    category: Any = _KNOWN if known else Any
    time: Any = msgspec.Raw if exact else float
    events: Any = list[Complete[category, time] | Instant[category, time] | Untimed]
    return msgspec.json.Decoder(events).decode


class Decoded(msgspec.Struct, frozen=True):
    """The events of a chunk that have a time, in ns, their arguments, and its metadata events.

    ``collectives`` is what events say of a collective, by their position in ``events``.
    """

    events: Sequence[AnyEvent]
    args: list[Args]
    metadata: list[Metadata]
    starts: Int64Array
    durations: Int64Array
    collectives: dict[int, CollectiveFields]


class Frames(IntEnum):
    """Which Python frames are kept: ``LONG`` are those that can be where a person's code waits."""

    NONE = 0
    LONG = 1
    ALL = 2


class EventDecoder:
    """Turns event text into events with times; ``read`` counts the elements of every phase."""

    def __init__(self, frames: Frames) -> None:
        self.read = 0
        self._left_out = {LEFT_OUT} if frames is Frames.ALL else {LEFT_OUT, FRAME}
        self._keep_long = frames is Frames.LONG
        self._known = True
        self._exact = False

    def chunk(self, buffer: bytearray, begin: int, end: int) -> Decoded:
        """Decode a JSON array in ``buffer[begin:end]``.

        Raises :class:`MalformedJson` where the bytes are not a JSON array.
        """
        view = memoryview(buffer)[begin:end]
        try:
            if not self._exact:
                elements = _decoder(known=self._known, exact=False)(view)
                events, metadata, times = self._sorted_out(elements)
                starts_us = _floats(times)
                # NaN and infinities fail the comparison too, and are sorted out below.
                if (starts_us >= _EXACT_BELOW_US).any() and _LARGE_FRACTION.search(buffer, begin, end):
                    self._exact = True
                else:
                    starts = _float_ns(starts_us)
            if self._exact:
                elements = _decoder(known=self._known, exact=True)(view)
                events, metadata, times = self._sorted_out(elements)
                starts = text_ns([b"" if type(time) is float else bytes(time) for time in times])
            decoded = _decoded(events, metadata, starts, buffer)
            self.read += len(elements)
            return decoded
        except (msgspec.ValidationError, UnicodeDecodeError):
            if self._known:
                self._known = False
                return self.chunk(buffer, begin, end)
            return self._loose(bytes(view).decode("utf-8", "replace"))
        except RecursionError:
            raise MalformedJson("nested too deeply") from None
        except msgspec.DecodeError as error:
            problem = MalformedJson(str(error))
            near = begin + (problem.offset or 0)
            # Only where a bare token is to blame: to look for others in vain costs more than the decoding.
            if _BARE_TOKEN.search(buffer, max(begin, near - _WORD), min(end, near + _WORD)):
                mended = _BARE_TOKEN.sub(rb"\1null", bytes(view))
                return self.chunk(bytearray(mended), 0, len(mended))
            raise problem from None

    def note_starts(self, starts: Int64Array, buffer: bytearray, begin: int, end: int) -> None:
        """Take note of a chunk that was read elsewhere: whether starts need exact decimals from here on."""
        if not self._exact and (starts >= _EXACT_BELOW_NS).any():
            self._exact = _LARGE_FRACTION.search(buffer, begin, end) is not None

    def single(self, text: bytes) -> Decoded | None:
        """Decode one event, mending Kineto's own invalid JSON; ``None`` if it cannot be mended."""
        mended = _BARE_TOKEN.sub(rb"\1null", text).decode("utf-8", "replace")
        try:
            return self._loose(f"[{mended}]")
        except MalformedJson:
            return None

    def _sorted_out(self, elements: list[Any]) -> tuple[list[Any], list[Metadata], list[Any]]:
        """Return the events that have a time, without Python frames that nobody asked for; the metadata
        events; and the times as the decoder gave them.
        """
        # A category that is none of the known ones need not be hashable.
        left_out: Any = self._left_out if self._known else tuple(self._left_out)
        if self._keep_long:
            kept = [
                e
                for e in elements
                if e.cat not in left_out
                or (type(e) is Complete and e.cat == FRAME and e.dur >= LONG_FRAME_US and tells_whose(e.name))
            ]
        else:
            kept = [e for e in elements if e.cat not in left_out]
        try:
            return kept, [], [e.ts for e in kept]
        except AttributeError:  # only a few chunks hold metadata, and to look at all types would take longer
            events = [e for e in kept if type(e) is not Metadata]
            return events, [e for e in kept if type(e) is Metadata], [e.ts for e in events]

    def _loose(self, text: str) -> Decoded:
        """Decode a chunk whose values have unexpected types, slowly and exactly."""
        try:
            elements = json.loads(text, parse_float=Decimal, strict=False)
        except (ValueError, RecursionError) as error:
            raise MalformedJson(str(error)) from None
        items = [item for item in elements if isinstance(item, dict)]
        timed = [item for item in items if item.get("ph") in ("X", "i")]
        kept = [item for item in timed if item.get("cat") != FRAME or FRAME not in self._left_out]
        self.read += len(items)
        events = [_loose_event(item) for item in kept]
        collectives = {row: _loose_args(item, CollectiveFields) for row, item in enumerate(kept)}
        return Decoded(
            events,
            [event.args for event in events],
            [_loose_metadata(item) for item in items if item.get("ph") == "M"],
            np.array([_decimal_ns(item.get("ts")) for item in kept], dtype=np.int64),
            np.array(
                [_decimal_ns(item.get("dur", 0 if item["ph"] == "i" else None)) for item in kept],
                dtype=np.int64,
            ),
            {row: fields for row, fields in collectives.items() if fields.name is not None},
        )


def _decoded(events: list[Any], metadata: list[Metadata], starts: Int64Array, buffer: bytearray) -> Decoded:
    args = [event.args for event in events]
    durations = _float_ns(_floats([event.dur for event in events]))
    return Decoded(events, args, metadata, starts, durations, _collectives(args, buffer))


def _collectives(args: list[Args], buffer: bytearray) -> dict[int, CollectiveFields]:
    """The collectives that events describe, by position.

    Few events do, so their arguments are decoded once more for it: the object around the name of the
    collective, whose place in ``buffer`` msgspec tells by where its raw value lies. Raises
    :class:`msgspec.ValidationError` where that is not found, as when texts hold braces.
    """
    names = [arg.collective for arg in args]
    if names.count(NOTHING) == len(names):
        return {}
    none = NOTHING
    rows = [row for row, name in enumerate(names) if name is not none and bytes(name) != b"null"]
    first = _address(buffer)
    fields = collective_fields([_address(names[row]) - first for row in rows], buffer)
    return dict(zip(rows, fields, strict=True))


def collective_fields(positions: list[int], buffer: bytearray) -> list[CollectiveFields]:
    """Return the arguments around the names of collectives, which stand at ``positions``.

    Raises :class:`msgspec.ValidationError` where they are not found, as when texts hold braces.
    """
    if not positions:
        return []
    try:
        decoded: list[CollectiveFields] = _DECODE_COLLECTIVES(
            b"[%b]" % b",".join(_object_around(position, buffer) for position in positions)
        )
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(str(error)) from None
    if len(decoded) != len(positions) or any(fields.name is None for fields in decoded):
        raise msgspec.ValidationError("the arguments of collectives hold braces")
    return decoded


def _object_around(position: int, buffer: bytearray) -> bytearray:
    """Return the JSON object around a position; other objects within it may precede and follow.

    Raises :class:`msgspec.ValidationError` where it holds too many. Braces in texts mislead it: what is
    returned is then no object.
    """
    begin = end = position
    for _ in range(_MOST_OBJECTS):
        begin = buffer.rfind(b"{", 0, begin)
        if begin < 0 or buffer.count(b"{", begin, position) > buffer.count(b"}", begin, position):
            break
    else:
        raise msgspec.ValidationError("too many objects before the name of a collective")
    for _ in range(_MOST_OBJECTS):
        end = buffer.find(b"}", end) + 1
        if end == 0 or buffer.count(b"}", position, end) > buffer.count(b"{", position, end):
            return buffer[begin:end]
    raise msgspec.ValidationError("too many objects after the name of a collective")


def _address(data: bytearray | msgspec.Raw) -> int:
    # Reading the address of a buffer through ctypes would cost its import.
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _loose_event(item: dict[str, Any]) -> AnyEvent:
    head = item.get("cat", ""), item.get("name", ""), _plain(item.get("pid", -1)), _plain(item.get("tid", -1))
    if item["ph"] == "X":
        return Complete(*head, args=_loose_args(item, Args))
    return Instant(*head, args=_loose_args(item, InstantArgs))


def _loose_metadata(item: dict[str, Any]) -> Metadata:
    args = item.get("args")
    name = args.get("name", "") if isinstance(args, dict) else ""
    return Metadata(item.get("name", ""), item.get("pid", -1), item.get("tid", -1), MetadataArgs(name))


def tells_whose(name: Any) -> bool:
    """True for a Python frame of a script or a library, torch among them: not for one of Python's own."""
    return isinstance(name, str) and ".py(" in name and not _OWN_FRAME.match(name)


def _loose_args(item: dict[str, Any], kind: type[_Fields]) -> _Fields:
    """Return the fields of ``kind`` that the arguments of an event hold."""
    args = item.get("args")
    if not isinstance(args, dict):
        return kind()
    known = {
        field: _plain(args[key])
        for field, key in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        if key in args
    }
    for name in _RAW_ARGS:
        if name in known:
            known[name] = msgspec.Raw(json.dumps(known[name], default=float).encode())
    return kind(**known)


def _plain(value: Any) -> Any:
    # The int of Decimal("1E+999999999") would have a billion digits; the float is infinity.
    return float(value) if isinstance(value, Decimal) else value


def _floats(values: list[float]) -> npt.NDArray[np.float64]:
    # Half the time of np.fromiter.
    return np.frombuffer(struct.pack(f"{len(values)}d", *values))


def _float_ns(microseconds: npt.NDArray[np.float64]) -> Int64Array:
    """Return nanoseconds of microseconds with three decimals, exactly if the floats are (see above)."""
    sizes = np.abs(microseconds)
    largest = sizes.max(initial=0.0)
    if largest < _EXACT_PRODUCT_BELOW_US:
        return np.rint(microseconds * 1000.0).astype(np.int64)
    if not largest < _LARGEST_NS / 1000:
        possible = sizes < _LARGEST_NS / 1000
        result = _float_ns(np.where(possible, microseconds, 0.0))
        result[~possible] = IMPOSSIBLE
        return result
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000.0).astype(np.int64)


def text_ns(texts: list[bytes]) -> Int64Array:
    """Return nanoseconds of microseconds given as decimal text."""
    if not texts:
        return np.empty(0, dtype=np.int64)
    joined = b"\n".join(texts)
    if _THREE_DECIMALS.fullmatch(joined):
        return np.fromstring(joined.replace(b".", b"").decode(), dtype=np.int64, sep="\n")
    if _WHOLE.fullmatch(joined):
        return np.fromstring(joined.decode(), dtype=np.int64, sep="\n") * 1000
    return np.array(
        [_decimal_ns(text.decode("utf-8", "replace").strip('"')) for text in texts], dtype=np.int64
    )


def _decimal_ns(value: object) -> int:
    """Return nanoseconds of a number or numeric text in microseconds, :data:`IMPOSSIBLE` for others."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
        return IMPOSSIBLE
    try:
        nanoseconds = Decimal(value) * 1000
        if not nanoseconds.is_finite() or abs(nanoseconds) >= _LARGEST_NS:
            return IMPOSSIBLE
        return int(nanoseconds.to_integral_value())
    except (InvalidOperation, ValueError, ArithmeticError):
        return IMPOSSIBLE
