"""Decode chunks of event text into typed events with exact nanosecond times."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.chunks import MalformedJson

Int64Array = npt.NDArray[np.int64]

IMPOSSIBLE = np.iinfo(np.int64).min
"""Stands for a time that cannot be: missing, not a number, or beyond 126 years."""

_LARGEST_NS = 4_000_000_000_000_000_000
# Below 2^43 us a float64 is less than half a nanosecond from the decimal text it was read from.
_EXACT_BELOW_US = float(2**43)
# Both roundings, of the text and of the product, are then less than half a nanosecond together.
_EXACT_PRODUCT_BELOW_US = float(2**40)
_LARGE_FRACTION = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.')
_THREE_DECIMALS = re.compile(rb"(?:\d{1,16}\.\d{3}\n)*\d{1,16}\.\d{3}")
_WHOLE = re.compile(rb"(?:\d{1,16}\n)*\d{1,16}")
# Kineto prints C++ floats as they come ("blocks per SM": inf), which JSON does not know.
_WORD = 64
_BARE_TOKEN = re.compile(rb'("\s*:\s*)-?(?:inf|nan|NaN|Infinity|N/A)(?=\s*[,}\]])')

LONG_FRAME_US = 100.0
_OWN_FRAME = re.compile(
    r"(?:.*/)?(?:torch|(?:site|dist)-packages/torch|runpy\.py|threading\.py|contextlib\.py|importlib|"
    r"lib/python3\.\d+/\w+\.py)(?:/|\(|$)|<|nn\.Module: "
)

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that columns and collectives need; values are whatever the file holds."""

    correlation: Any = -1
    external_id: Any = msgspec.field(name="External id", default=-1)
    old_external_id: Any = msgspec.field(name="external id", default=-1)
    device: Any = None
    stream: Any = None
    nbytes: Any = msgspec.field(name="bytes", default=None)
    grid: msgspec.Raw = NOTHING
    collective: Any = msgspec.field(name="Collective name", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    dtype: Any = None
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    in_split: Any = msgspec.field(name="In split size", default=None)
    out_split: Any = msgspec.field(name="Out split size", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_id: Any = msgspec.field(name="Process Group ID", default=None)
    group_description: Any = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    comms_id: Any = msgspec.field(name="Comms Id", default=None)
    src_rank: Any = msgspec.field(name="Src Rank", default=None)
    dst_rank: Any = msgspec.field(name="Dst Rank", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)
    device_id: Any = msgspec.field(name="Device Id", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)


NO_ARGS = Args()
_ARG_KEYS = {field.encode_name: field.name for field in msgspec.structs.fields(Args)}
_RAW_ARGS = ("input_dims", "input_types", "grid")


# The fields stand in the order in which Kineto writes them: msgspec looks for a key behind the last one.


class _Head(msgspec.Struct, gc=False):
    cat: Any = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1


class Event(_Head, gc=False):
    """What complete events and instants have in common; times are in microseconds."""

    ts: float = float("nan")
    dur: float = 0.0
    args: Args = NO_ARGS


class Complete(Event, gc=False, tag_field="ph", tag="X"):
    """``"ph": "X"``."""


class Instant(Event, gc=False, tag_field="ph", tag="i"):
    """``"ph": "i"``."""


class ExactEvent(_Head, gc=False):
    """An event whose start is kept as text, because a float would round it."""

    ts: msgspec.Raw = NOTHING
    dur: float = 0.0
    args: Args = NO_ARGS


class ExactComplete(ExactEvent, gc=False, tag_field="ph", tag="X"):
    """``"ph": "X"``."""


class ExactInstant(ExactEvent, gc=False, tag_field="ph", tag="i"):
    """``"ph": "i"``."""


class MetadataArgs(msgspec.Struct, gc=False, frozen=True):
    """The names that metadata events give to processes and threads."""

    name: Any = ""


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """``"ph": "M"``."""

    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    args: MetadataArgs = MetadataArgs()


class FlowStart(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    """``"ph": "s"``: redundant with correlation ids."""


class FlowEnd(msgspec.Struct, gc=False, tag_field="ph", tag="f"):
    """``"ph": "f"``."""


class FlowStep(msgspec.Struct, gc=False, tag_field="ph", tag="t"):
    """``"ph": "t"``."""


class Counter(msgspec.Struct, gc=False, tag_field="ph", tag="C"):
    """``"ph": "C"``."""


class OldInstant(msgspec.Struct, gc=False, tag_field="ph", tag="I"):
    """``"ph": "I"``: the deprecated spelling, which Kineto does not use."""


AnyEvent = Event | ExactEvent
_Other = Metadata | FlowStart | FlowEnd | FlowStep | Counter | OldInstant
_DECODE_FLOAT: Any = msgspec.json.Decoder(list[Complete | Instant | _Other]).decode
_DECODE_EXACT: Any = msgspec.json.Decoder(list[ExactComplete | ExactInstant | _Other]).decode


class EventDecoder:
    """Turns event text into events with times; counts what is in the file and what could not be.

    ``read`` counts elements of every phase. Python frames are left out unless asked for; with
    ``long_frames`` those are kept that can be where a person's code waits (:func:`_is_long_frame`).
    """

    def __init__(self, *, python_functions: bool, long_frames: bool = False) -> None:
        self.read = 0
        self.python_functions = 0
        self._keep_python = python_functions
        self._keep_long = long_frames
        self._exact = False
        self._last_count = 0

    def chunk(
        self, buffer: bytearray, begin: int, end: int
    ) -> tuple[list[AnyEvent], list[Metadata], Int64Array, Int64Array]:
        """Decode a JSON array in ``buffer[begin:end]``: events kept, metadata, starts and durations in ns.

        Raises :class:`MalformedJson` where the bytes are not a JSON array.
        """
        view = memoryview(buffer)[begin:end]
        try:
            if not self._exact:
                events, metadata = self._sort(_DECODE_FLOAT(view), Complete, Instant)
                starts_us = np.fromiter([event.ts for event in events], np.float64, len(events))
                # NaN and infinities fail the comparison too, and are sorted out below.
                if not (starts_us >= _EXACT_BELOW_US).any() or not _LARGE_FRACTION.search(buffer, begin, end):
                    self.read += self._last_count
                    return events, metadata, _float_ns(starts_us), _durations(events)
                self._exact = True
            events, metadata = self._sort(_DECODE_EXACT(view), ExactComplete, ExactInstant)
            starts = _text_ns([bytes(event.ts) for event in events])
            self.read += self._last_count
            return events, metadata, starts, _durations(events)
        except msgspec.ValidationError:
            return self._loose(bytes(view).decode("utf-8", "replace"))
        except UnicodeDecodeError:
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

    def single(self, text: bytes) -> tuple[list[AnyEvent], list[Metadata], Int64Array, Int64Array] | None:
        """Decode one event, mending Kineto's own invalid JSON; ``None`` if it cannot be mended."""
        mended = _BARE_TOKEN.sub(rb"\1null", text).decode("utf-8", "replace")
        try:
            return self._loose(f"[{mended}]")
        except MalformedJson:
            return None

    def _sort(
        self, decoded: list[Any], complete: type[AnyEvent], instant: type[AnyEvent]
    ) -> tuple[list[Any], list[Metadata]]:
        self._last_count = len(decoded)
        events = [e for e in decoded if e.__class__ is complete or e.__class__ is instant]
        if not self._keep_python:
            timed = len(events)
            if self._keep_long:
                events = [e for e in events if e.cat != "python_function" or _is_long_frame(e.name, e.dur)]
            else:
                events = [e for e in events if e.cat != "python_function"]
            self.python_functions += timed - len(events)
        # Only a few chunks hold metadata, and to look at the types alone is twice as fast.
        named = Metadata in map(type, decoded)
        return events, [e for e in decoded if e.__class__ is Metadata] if named else []

    def _loose(self, text: str) -> tuple[list[AnyEvent], list[Metadata], Int64Array, Int64Array]:
        """Decode a chunk whose values have unexpected types, slowly and exactly."""
        try:
            decoded = json.loads(text, parse_float=Decimal, strict=False)
        except (ValueError, RecursionError) as error:
            raise MalformedJson(str(error)) from None
        made: list[Any] = []
        starts: list[int] = []
        durations: list[int] = []
        metadata: list[Metadata] = []
        for item in decoded:
            if not isinstance(item, dict):
                continue
            phase = item.get("ph")
            if phase == "M":
                args = item.get("args")
                name = args.get("name", "") if isinstance(args, dict) else ""
                metadata.append(
                    Metadata(
                        item.get("name", ""), item.get("pid", -1), item.get("tid", -1), MetadataArgs(name)
                    )
                )
            if phase not in ("X", "i"):
                continue
            if item.get("cat") == "python_function" and not self._keep_python:
                self.python_functions += 1
                continue
            kind = Complete if phase == "X" else Instant
            made.append(
                kind(
                    item.get("cat", ""),
                    item.get("name", ""),
                    _plain(item.get("pid", -1)),
                    _plain(item.get("tid", -1)),
                    args=_loose_args(item.get("args")),
                )
            )
            starts.append(_decimal_ns(item.get("ts")))
            durations.append(_decimal_ns(item.get("dur", 0)))
        self.read += sum(isinstance(item, dict) for item in decoded)
        return made, metadata, np.array(starts, dtype=np.int64), np.array(durations, dtype=np.int64)


def _is_long_frame(name: Any, dur: float) -> bool:
    """Tell whether a Python frame took 0.1 ms or more, and is neither torch's nor Python's own."""
    return dur >= LONG_FRAME_US and isinstance(name, str) and ".py(" in name and not _OWN_FRAME.match(name)


def _loose_args(args: object) -> Args:
    if not isinstance(args, dict):
        return NO_ARGS
    known: dict[str, Any] = {_ARG_KEYS[key]: _plain(value) for key, value in args.items() if key in _ARG_KEYS}
    for key in _RAW_ARGS:
        if key in known:
            known[key] = msgspec.Raw(json.dumps(known[key], default=float).encode())
    return Args(**known)


def _plain(value: Any) -> Any:
    # The int of Decimal("1E+999999999") would have a billion digits; the float is infinity.
    return float(value) if isinstance(value, Decimal) else value


def _float_ns(microseconds: npt.NDArray[np.float64]) -> Int64Array:
    """Return nanoseconds of microseconds with three decimals, exactly if the floats are (see above)."""
    sizes = np.abs(microseconds)
    if microseconds.size and sizes.max() < _EXACT_PRODUCT_BELOW_US:
        return np.rint(microseconds * 1000.0).astype(np.int64)
    possible = sizes < _LARGEST_NS / 1000
    clean = microseconds if possible.all() else np.where(possible, microseconds, 0.0)
    whole = np.floor(clean)
    result = whole.astype(np.int64) * 1000 + np.rint((clean - whole) * 1000.0).astype(np.int64)
    result[~possible] = IMPOSSIBLE
    return result


def _durations(events: list[Any]) -> Int64Array:
    return _float_ns(np.fromiter([event.dur for event in events], np.float64, len(events)))


def _text_ns(texts: list[bytes]) -> Int64Array:
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
