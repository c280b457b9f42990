"""The kept events of one chunk as columns; what many events share stands once, by its number."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.columns import Kind, Shapes
from tracedoc.trace.compact import NO_ID
from tracedoc.trace.events import Args, CollectiveFields, Decoded, InstantArgs, Int64Array, Metadata
from tracedoc.trace.metadata import as_int
from tracedoc.trace.vocabulary import event_kind

DROPPED = 255
"""Stands among the kinds for events that a trace does not keep."""

ON_GPU, SHAPED, COUNTED, WAITS = 1, 2, 4, 8
"""Traits of events: on a device and a stream; with shapes; allocator's counters; a wait for an event."""

_GPU_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC, Kind.GPU_ANNOTATION, Kind.ACCELERATOR)
_MEMORY = "[memory]"

WITH_VALUES = frozenset({"c10d::send", "c10d::recv_", "aten::convolution", "aten::convolution_backward"})
"""Operators whose values are kept: they name the other rank, or how a convolution goes over its input."""

# Shapes are kept where work, batch sizes or collective sizes are read from them, but not those of views,
# allocations and changes of type, which compute nothing themselves.
_SHAPED_OPS = re.compile(
    r"aten::(?!(?:empty\w*|view\w*|_?reshape\w*|_unsafe_view|t|transpose|permute|expand\w*|as_strided|select|slice|"
    r"split\w*|unbind|chunk|narrow|unsqueeze|squeeze|detach|alias|item|_local_scalar_dense|to|_to_copy|clone|"
    r"contiguous|result_type|resize_|set_|is_\w+|lift_fresh|zeros\w*|ones\w*|\w+_like|record_stream)$)\w+$"
    r"|flash_attn\w*::|triton_|(?:gloo|nccl):|c10d::|_c10d_functional::"
)


class Ids(dict[Any, int]):
    """Gives each distinct key the next number, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class Heads(Ids):
    """Numbers what many events have in common: their category, name, process and thread.

    The lists give the kind, name and thread of each number, and whether values are kept;
    ``traits[number]`` says what else is kept of such events: ``ON_GPU``, ``SHAPED``, ``COUNTED``, ``WAITS``.
    """

    def __init__(self) -> None:
        self.categories, self.names, self.threads = Ids(), Ids(), Ids()
        self.kind: list[int] = []
        self.name: list[int] = []
        self.thread: list[int] = []
        self.with_values: list[bool] = []
        self.traits = bytearray()

    def __missing__(self, key: tuple[Any, Any, Any, Any]) -> int:
        number = super().__missing__(key)
        category, name, pid, tid = key
        self.categories[category]
        self.name.append(self.names[name])
        self.thread.append(self.threads[pid, tid])
        kind = event_kind(category_text(category), category_text(name))
        self.kind.append(DROPPED if kind is None else kind)
        self.with_values.append(name in WITH_VALUES)
        self.traits.append(
            ON_GPU * (kind in _GPU_KINDS)
            | SHAPED * (_SHAPED_OPS.match(category_text(name)) is not None)
            | COUNTED * (name == _MEMORY)
            | WAITS * (kind is Kind.SYNC)
        )
        return number


class Tables:
    """What all chunks of a trace share.

    A head is a category, a name, a process and a thread; a place is a device, a stream, the text of a grid,
    and the number of a head; shapes are the texts of dimensions, types, values and strides.
    """

    def __init__(self) -> None:
        self.heads = Heads()
        self.places, self.shapes = Ids(), Ids()

    def traits_of(self, heads: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Return the traits of events by the numbers of their heads; a negative number has none."""
        traits = np.zeros(heads.size, dtype=np.uint8)
        known = heads >= 0
        traits[known] = np.frombuffer(self.heads.traits, dtype=np.uint8)[heads[known]]
        return traits


def interned(table: Ids, keys: list[Any]) -> npt.NDArray[np.int32]:
    """Return the numbers of keys."""
    try:
        return np.fromiter(map(table.__getitem__, keys), np.int32, len(keys))
    except TypeError:  # a list or an object stands where a name should
        texts = (tuple(part if _is_plain(part) else str(part) for part in key) for key in keys)
        return np.fromiter((table[key] for key in texts), np.int32, len(keys))


def category_text(value: Any) -> str:
    """Return a category or name as text, whatever the file holds in its place."""
    return value if isinstance(value, str) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float))


def shapes_of(*texts: bytes) -> Shapes:
    """The shapes that the JSON texts of dimensions, types, values and strides spell; none without lists."""
    try:
        found = [msgspec.json.decode(text) if text else [] for text in texts]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shapes((), ())
    dims, types, values, strides = (tuple(one) if isinstance(one, list) else () for one in found)
    return Shapes(dims, tuple(map(category_text, types)), tuple(map(category_text, values)), strides)


_TRAILING_NUMBER = re.compile(r"(-?\d{1,18})\s*$")

Table = Mapping[str, npt.NDArray[Any]]
"""Columns of one length; "row" is the position of the event in its chunk."""


class Part(msgspec.Struct, frozen=True):
    """The kept events of one chunk.

    ``events`` has one row for each: "ts" and "dur" in ns, "head", "correlation" and "external_id". What few
    events carry is in tables of their own: on which GPU and stream ("place"), how many bytes were copied,
    the allocator's counters, which event was waited for, and shapes. ``collectives`` are keyed by row.
    """

    events: Mapping[str, npt.NDArray[Any]]
    placed: Table
    sized: Table
    counted: Table
    waits: Table
    shaped: Table
    collectives: Mapping[int, CollectiveFields]
    metadata: Sequence[Metadata]


def decoded_part(decoded: Decoded, tables: Tables) -> Part:
    """Return the columns of decoded events."""
    events, args = decoded.events, decoded.args
    heads = interned(tables.heads, [(event.cat, event.name, event.pid, event.tid) for event in events])
    traits = tables.traits_of(heads)
    placed, sized = _on_gpu(np.flatnonzero(traits & ON_GPU), heads, args, tables)
    return Part(
        events={
            "head": heads,
            "ts": decoded.starts,
            "dur": decoded.durations,
            "correlation": _numbers([a.correlation for a in args]),
            "external_id": _external_ids(args),
        },
        placed=placed,
        sized=sized,
        counted=_counters(np.flatnonzero(traits & COUNTED), args),
        waits=_waits(np.flatnonzero(traits & WAITS), args),
        shaped=_shaped(np.flatnonzero(traits & SHAPED), heads, args, tables),
        collectives=decoded.collectives,
        metadata=decoded.metadata,
    )


def number_of(value: Any) -> int:
    """Return an id as int64: "stream 7" is 7; what is no number, or too large, is ``NO_ID``."""
    number = as_int(value)
    if number is None and isinstance(value, str):
        match = _TRAILING_NUMBER.search(value)
        number = int(match.group(1)) if match else None
    return NO_ID if number is None else number


def _on_gpu(
    positions: npt.NDArray[np.intp], heads: npt.NDArray[np.int32], args: list[Args], tables: Tables
) -> tuple[Table, Table]:
    """The stream of the events at ``positions`` on a GPU, and the bytes that they moved."""
    found = [args[i] for i in positions.tolist()]
    places = [
        (a.device, a.stream, bytes(a.grid), head)
        for a, head in zip(found, heads[positions].tolist(), strict=True)
    ]
    sized = [i for i, a in enumerate(found) if a.nbytes is not None]
    return (
        {"row": positions, "place": interned(tables.places, places)},
        {"row": positions[sized], "nbytes": _numbers([found[i].nbytes for i in sized])},
    )


def _counters(positions: npt.NDArray[np.intp], args: list[Args]) -> Table:
    """Return the allocator's counters of the instants at ``positions``."""
    counters = [(i, a) for i in positions.tolist() if isinstance(a := args[i], InstantArgs)]
    return {
        "row": _numbers([i for i, _ in counters]),
        "type": _numbers([a.device_type for _, a in counters]),
        "device": _numbers([a.device_id for _, a in counters]),
        "allocated": _numbers([a.allocated for _, a in counters]),
        "reserved": _numbers([a.reserved for _, a in counters]),
    }


def _waits(positions: npt.NDArray[np.intp], args: list[Args]) -> Table:
    """The events that the synchronisation records at ``positions`` wait for."""
    waits = [i for i in positions.tolist() if args[i].recorded_by is not None]
    return {
        "row": _numbers(waits),
        "wait_on_stream": _numbers([args[i].wait_on_stream for i in waits]),
        "recorded_by": _numbers([args[i].recorded_by for i in waits]),
    }


def _shaped(
    positions: npt.NDArray[np.intp], heads: npt.NDArray[np.int32], args: list[Args], tables: Tables
) -> Table:
    """The numbers of the shapes of the events at ``positions`` that carry some."""
    texts = [
        (
            bytes(one.input_dims),
            bytes(one.input_types),
            bytes(one.input_values) if kept else b"",
            bytes(one.input_strides),
        )
        for one, kept in (
            (args[i], tables.heads.with_values[head])
            for i, head in zip(positions.tolist(), heads[positions].tolist(), strict=True)
        )
    ]
    found = [place for place, (dims, *_) in enumerate(texts) if dims]
    return {
        "row": positions[found],
        "shape": interned(tables.shapes, [texts[place] for place in found]),
    }


def _external_ids(args: list[Args]) -> Int64Array:
    """Return the ids that link launches to operators; old traces spell their key in lower case."""
    ids = _numbers([a.external_id for a in args])
    old = [i for i in np.flatnonzero(ids == NO_ID).tolist() if args[i].old_external_id != NO_ID]
    if old:
        ids = ids.copy()
        ids[old] = _numbers([args[i].old_external_id for i in old])
    return ids


def _numbers(values: list[Any]) -> Int64Array:
    try:
        return np.frombuffer(
            struct.pack(f"{len(values)}q", *values), np.int64
        )  # half the time of np.fromiter
    except struct.error:
        return np.fromiter((number_of(value) for value in values), np.int64, len(values))
