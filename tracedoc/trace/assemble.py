"""Assemble decoded events into the columns of a Trace."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import InputError, Limit
from tracedoc.trace.chunks import Outcome
from tracedoc.trace.columns import (
    NO_ID,
    CollectiveArgs,
    Kind,
    MemoryCounters,
    Shapes,
    SyncRecords,
    Thread,
    Trace,
    TraceInfo,
)
from tracedoc.trace.distinct import distinct
from tracedoc.trace.events import IMPOSSIBLE, Decoded, EventDecoder, Int64Array
from tracedoc.trace.growing import Growing
from tracedoc.trace.metadata import (
    Header,
    as_int,
    as_text,
    element_count,
    rank_count,
    rank_list,
    read_header,
    vendor_of_calls,
)
from tracedoc.trace.records import Args, CollectiveFields, InstantArgs, Metadata
from tracedoc.trace.vocabulary import event_kind, kind_of

_ABSOLUTE_NS = 1_000_000_000_000_000_000  # 1e15 us: no relative time is that large
# Beyond these, differences and sums of times would overflow: 126 years, and twelve days.
_LATEST_NS = 4_000_000_000_000_000_000
_LONGEST_NS = 1_000_000_000_000_000
_GPU_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC, Kind.GPU_ANNOTATION, Kind.ACCELERATOR)
_DROPPED = 255
# Belongs to a device and a stream; has shapes; allocator's counters; a wait for an event.
_ON_GPU, _SHAPED, _COUNTED, _WAITS = 1, 2, 4, 8
_MEMORY = "[memory]"
_HOST_MEMORY = 0  # c10::DeviceType::CPU
_TRAILING_NUMBER = re.compile(r"(-?\d{1,18})\s*$")

# Shapes are kept where batch sizes, FLOPs or collective sizes are read from them; all of them would
# double the memory of a trace.
_SHAPED_OPS = re.compile(
    r"aten::(?:mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|_scaled_grouped_mm|_grouped_mm|embedding|"
    r"_?convolution\w*|conv\w+|cudnn_convolution\w*|miopen_convolution\w*|\w*_attention\w*)$"
    r"|flash_attn\w*::|aten::_flash_attention|(?:gloo|nccl):|c10d::|_c10d_functional::"
)


class _Ids(dict[Any, int]):
    """Gives each distinct key the next number, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Heads(_Ids):
    """Numbers what many events have in common: their category, name, process and thread.

    The lists tell of each number the kind, and which name and thread it is; ``traits[number]`` tells what
    else is kept of such events: ``_ON_GPU``, ``_SHAPED``, ``_COUNTED`` and ``_WAITS``.
    """

    def __init__(self) -> None:
        self.categories, self.names, self.threads = _Ids(), _Ids(), _Ids()
        self.kind: list[int] = []
        self.name: list[int] = []
        self.thread: list[int] = []
        self.traits = bytearray()

    def __missing__(self, key: tuple[Any, Any, Any, Any]) -> int:
        number = super().__missing__(key)
        category, name, pid, tid = key
        self.categories[category]
        self.name.append(self.names[name])
        self.thread.append(self.threads[pid, tid])
        kind = event_kind(category_text(category), category_text(name))
        self.kind.append(_DROPPED if kind is None else kind)
        self.traits.append(
            _ON_GPU * (kind in _GPU_KINDS)
            | _SHAPED * (_SHAPED_OPS.match(category_text(name)) is not None)
            | _COUNTED * (name == _MEMORY)
            | _WAITS * (kind is Kind.SYNC)
        )
        return number


_COLUMNS: dict[str, type[np.generic]] = {
    "ts": np.int64,
    "dur": np.int64,
    "head": np.int32,
    "correlation": np.int64,
    "external_id": np.int64,
    # What few events carry: the rows of the events, and what they say.
    "gpu_row": np.int64,
    "place": np.int32,
    "sized_row": np.int64,
    "nbytes": np.int64,
    "memory_row": np.int64,
    "memory_type": np.int64,
    "memory_device": np.int64,
    "allocated": np.int64,
    "reserved": np.int64,
    "sync_row": np.int64,
    "wait_on_stream": np.int64,
    "recorded_by": np.int64,
}


class Columns:
    """The columns of a trace while it is read."""

    def __init__(self) -> None:
        self._heads = _Heads()
        self._columns = {name: Growing(dtype) for name, dtype in _COLUMNS.items()}
        self._rows = 0
        self._collectives: dict[int, CollectiveArgs] = {}
        self._shapes: dict[int, Shapes] = {}
        self._places = _Ids()
        self._shape_cache: dict[tuple[bytes, bytes], Shapes] = {}
        self._process_names: dict[str, str] = {}
        self._thread_names: dict[tuple[str, str], str] = {}

    @property
    def categories(self) -> Collection[Any]:
        """The categories of all events so far, as the file holds them."""
        return self._heads.categories.keys()

    def add(self, decoded: Decoded) -> None:
        """Append one decoded chunk."""
        for item in decoded.metadata:
            self._add_metadata(item)
        events, args = decoded.events, decoded.args
        if not events:
            return
        heads = _interned(self._heads, [(event.cat, event.name, event.pid, event.tid) for event in events])
        self._put("head", heads)
        self._put("ts", decoded.starts)
        self._put("dur", decoded.durations)
        self._put("correlation", _numbers([a.correlation for a in args]))
        self._put("external_id", _external_ids(args))
        for position, fields in decoded.collectives.items():
            self._collectives[self._rows + position] = _collective(fields)
        traits = np.frombuffer(self._heads.traits, dtype=np.uint8)[heads]
        self._add_gpu(np.flatnonzero(traits & _ON_GPU), heads, args)
        self._add_shapes(np.flatnonzero(traits & _SHAPED), args)
        self._add_memory(np.flatnonzero(traits & _COUNTED), args)
        self._add_syncs(np.flatnonzero(traits & _WAITS), args)
        self._rows += len(events)

    def trace(self, path: str, outcome: Outcome, decoder: EventDecoder, limits: list[Limit]) -> Trace:
        """Return the finished trace, sorted by start time."""
        header = read_header(outcome.metadata)
        heads, names = self._take("head"), tuple(category_text(name) for name in self._heads.names)
        kind = np.array(self._heads.kind, dtype=np.uint8)[heads]
        ts, dur = self._take("ts"), self._take("dur")
        impossible = (ts < -_ABSOLUTE_NS) | (ts > _LATEST_NS) | (dur == IMPOSSIBLE) | (dur > _LONGEST_NS)
        negative = (dur < 0) & ~impossible
        keep = np.flatnonzero((kind != _DROPPED) & ~impossible)
        broken = int((impossible & (kind != _DROPPED)).sum())
        clamped = int((negative & (kind != _DROPPED)).sum())
        if broken or clamped:
            limits.append(
                Limit(
                    "impossible-times",
                    f"{path}: events without a possible time: {broken:,}; of negative length: {clamped:,}",
                    "the former are left out, the latter count as instants",
                )
            )
        if keep.size == 0:
            raise InputError(f"{path} holds no event that can be used", "record it again with torch.profiler")
        ts = ts[keep]
        ts = np.where(np.abs(ts) >= _ABSOLUTE_NS, ts, ts + header.base_ns)
        order = np.argsort(ts, kind="stable")
        ts, keep = ts[order], keep[order]
        del order, impossible, negative
        row_of = np.full(self._rows, NO_ID, dtype=np.int32)
        row_of[keep] = np.arange(keep.size, dtype=np.int32)
        collectives = {int(row_of[i]): value for i, value in self._collectives.items() if row_of[i] >= 0}
        shapes = {int(row_of[i]): value for i, value in self._shapes.items() if row_of[i] >= 0}
        memory, syncs = self._memory(row_of), self._syncs(row_of)
        del row_of
        # One column after the other, so that only one exists twice.
        dur = dur[keep]
        np.maximum(dur, 0, out=dur)
        kind = kind[keep]
        correlation = self._take("correlation")[keep]
        correlation[correlation <= 0] = NO_ID  # 0 is how CUPTI and roctracer say "none"
        limits.extend(self._device_limits(path, kind))
        heads, gpu_rows = heads[keep], self._take("gpu_row")
        name = np.array(self._heads.name, dtype=np.int32)[heads]
        device, stream, grid, grids = self._gpu_columns(gpu_rows, keep)
        return Trace(
            info=self._info(path, header, outcome, decoder, names, kind, name),
            ts_ns=ts,
            dur_ns=dur,
            name=name,
            kind=kind,
            device=device,
            stream=stream,
            thread=np.array(self._heads.thread, dtype=np.int32)[heads],
            correlation=correlation,
            external_id=self._take("external_id")[keep],
            nbytes=self._nbytes()[keep],
            names=names,
            threads=self._thread_table(),
            collectives=collectives,
            shapes=shapes,
            limits=tuple(limits),
            grid=grid,
            grids=grids,
            memory=memory,
            syncs=syncs,
        )

    # Adding.

    def _put(self, column: str, part: npt.NDArray[Any]) -> None:
        self._columns[column].extend(part)

    def _add_gpu(
        self, positions: npt.NDArray[np.intp], heads: npt.NDArray[np.int32], args: list[Args]
    ) -> None:
        """Keep where the events at ``positions`` ran on a GPU, and how many bytes they moved."""
        if not positions.size:
            return
        found = [args[i] for i in positions.tolist()]
        places = [
            (a.device, a.stream, bytes(a.grid), head)
            for a, head in zip(found, heads[positions].tolist(), strict=True)
        ]
        self._put("gpu_row", positions + self._rows)
        self._put("place", _interned(self._places, places))
        sized = [i for i, a in enumerate(found) if a.nbytes is not None]
        self._put("sized_row", positions[sized] + self._rows)
        self._put("nbytes", _numbers([found[i].nbytes for i in sized]))

    def _add_memory(self, positions: npt.NDArray[np.intp], args: list[Args]) -> None:
        """Keep the allocator's counters of the instants at ``positions``."""
        if not positions.size:
            return
        counters = [(i, a) for i in positions.tolist() if isinstance(a := args[i], InstantArgs)]
        self._put("memory_row", np.array([i for i, _ in counters], dtype=np.int64) + self._rows)
        self._put("memory_type", _numbers([a.device_type for _, a in counters]))
        self._put("memory_device", _numbers([a.device_id for _, a in counters]))
        self._put("allocated", _numbers([a.allocated for _, a in counters]))
        self._put("reserved", _numbers([a.reserved for _, a in counters]))

    def _add_syncs(self, positions: npt.NDArray[np.intp], args: list[Args]) -> None:
        """Keep what the synchronisation records at ``positions`` wait for."""
        waits = [i for i in positions.tolist() if args[i].recorded_by is not None]
        if waits:
            self._put("sync_row", np.array(waits, dtype=np.int64) + self._rows)
            self._put("wait_on_stream", _numbers([args[i].wait_on_stream for i in waits]))
            self._put("recorded_by", _numbers([args[i].recorded_by for i in waits]))

    def _add_shapes(self, positions: npt.NDArray[np.intp], args: list[Args]) -> None:
        for position in positions.tolist():
            dims, types = bytes(args[position].input_dims), bytes(args[position].input_types)
            if dims:
                shapes = self._shape_cache.get((dims, types))
                if shapes is None:
                    shapes = self._shape_cache[dims, types] = _shapes(dims, types)
                self._shapes[self._rows + position] = shapes

    def _add_metadata(self, item: Metadata) -> None:
        label = category_text(item.args.name)
        pid, tid = category_text(item.pid), category_text(item.tid)
        if item.name == "process_name":
            self._process_names[pid] = label
        elif item.name == "thread_name":
            known = self._thread_names.get((pid, tid))
            process = self._process_names.get(pid, "")
            # Kineto may name a thread twice, once after the process: "thread 7 (python3)".
            if known is None or (process and f"({process})" in known):
                self._thread_names[pid, tid] = label

    # Finishing.

    def _gpu_columns(
        self, gpu_rows: npt.NDArray[np.int64], keep: npt.NDArray[np.intp]
    ) -> tuple[
        npt.NDArray[np.int32],
        npt.NDArray[np.int64],
        npt.NDArray[np.int32],
        tuple[tuple[int, ...], ...],
    ]:
        """Return the devices and streams of the events at ``keep``, and their launch grids, if any has one.

        Where the arguments do not say, process and thread are device and stream.
        """
        heads, grids = list(self._heads), _Ids()
        devices, streams, numbers = [], [], []
        for device, stream, raw, head in self._places:
            _, _, pid, tid = heads[head]
            devices.append(_number(pid if device is None else device))
            streams.append(_number(tid if stream is None else stream))
            grid = _grid(raw)
            numbers.append(grids[grid] if grid else NO_ID)
        place = np.full(self._rows, NO_ID, dtype=np.int32)
        place[gpu_rows] = self._take("place")
        place = place[keep]
        return (
            _of_place(devices, np.int32)[place],
            _of_place(streams, np.int64)[place],
            _of_place(numbers, np.int32)[place] if grids else np.empty(0, dtype=np.int32),
            tuple(grids),
        )

    def _nbytes(self) -> Int64Array:
        spread = np.full(self._rows, NO_ID, dtype=np.int64)
        spread[self._take("sized_row")] = self._take("nbytes")
        return spread

    def _memory(self, row_of: npt.NDArray[np.int32]) -> MemoryCounters | None:
        rows = row_of[self._take("memory_row")]
        types, device, allocated, reserved = (
            self._take(name) for name in ("memory_type", "memory_device", "allocated", "reserved")
        )
        kept = np.flatnonzero((rows >= 0) & (types != _HOST_MEMORY))
        if kept.size == 0:
            return None
        kept = kept[np.argsort(rows[kept], kind="stable")]
        return MemoryCounters(rows[kept].astype(np.intp), device[kept], allocated[kept], reserved[kept])

    def _syncs(self, row_of: npt.NDArray[np.int32]) -> SyncRecords | None:
        rows = row_of[self._take("sync_row")]
        streams, recorded_by = self._take("wait_on_stream"), self._take("recorded_by")
        kept = np.flatnonzero(rows >= 0)
        if kept.size == 0:
            return None
        kept = kept[np.argsort(rows[kept], kind="stable")]
        streams, recorded_by = (np.where(ids[kept] < 0, NO_ID, ids[kept]) for ids in (streams, recorded_by))
        return SyncRecords(rows[kept].astype(np.intp), streams, recorded_by)

    def _take(self, column: str) -> npt.NDArray[Any]:
        return self._columns.pop(column).values()

    def _thread_table(self) -> tuple[Thread, ...]:
        texts = [(category_text(pid), category_text(tid)) for pid, tid in self._heads.threads]
        return tuple(Thread(pid, tid, self._thread_names.get((pid, tid), "").strip()) for pid, tid in texts)

    def _device_limits(self, path: str, kind: npt.NDArray[np.uint8]) -> list[Limit]:
        counts = np.bincount(kind, minlength=len(Kind))
        if not counts[Kind.ACCELERATOR] or counts[Kind.KERNEL]:
            return []
        present = sorted(
            category_text(c) for c in self.categories if kind_of(category_text(c)) is Kind.ACCELERATOR
        )
        return [
            Limit(
                "unknown-device",
                f"{path}: the device activity is of a kind that is not understood ({', '.join(present)})",
                "nothing is said about this rank's device time",
            )
        ]

    def _info(
        self,
        path: str,
        header: Header,
        outcome: Outcome,
        decoder: EventDecoder,
        names: tuple[str, ...],
        kind: npt.NDArray[np.uint8],
        name: npt.NDArray[np.int32],
    ) -> TraceInfo:
        vendor = header.vendor
        if not vendor:
            called = distinct(name[kind == Kind.RUNTIME])
            vendor = vendor_of_calls(names[i] for i in called.tolist())
        return TraceInfo(
            source=path,
            rank=header.rank,
            world_size=header.world_size,
            backend=header.backend,
            host=header.host,
            devices=header.devices,
            groups=header.groups,
            group_count=header.group_count,
            has_shapes=header.has_shapes or any(shape.dims for shape in self._shapes.values()),
            has_memory=header.has_memory or any(traits & _COUNTED for traits in self._heads.traits),
            vendor=vendor,
            nccl_version=header.nccl_version,
            raw_bytes=outcome.raw_bytes,
            events_read=decoder.read,
            truncated=outcome.truncated,
        )


def _interned(table: _Ids, keys: list[Any]) -> npt.NDArray[np.int32]:
    try:
        return np.fromiter(map(table.__getitem__, keys), np.int32, len(keys))
    except TypeError:  # a list or an object stands where a name should
        texts = (tuple(part if _is_plain(part) else str(part) for part in key) for key in keys)
        return np.fromiter((table[key] for key in texts), np.int32, len(keys))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float))


def _of_place(values: list[int], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    """Return the values of all places as an array, whose last is for no place; too large ones are no id."""
    exact = np.array([*values, NO_ID], dtype=np.int64)
    return np.where(exact.astype(dtype) == exact, exact, NO_ID).astype(dtype)


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
        return np.fromiter((_number(value) for value in values), np.int64, len(values))


def _number(value: Any) -> int:
    """Return an id as int64: "stream 7" is 7; what is no number, or too large, is ``NO_ID``."""
    number = as_int(value)
    if number is None and isinstance(value, str):
        match = _TRAILING_NUMBER.search(value)
        number = int(match.group(1)) if match else None
    return NO_ID if number is None else number


def category_text(value: Any) -> str:
    """Return a category or name as text, whatever the file holds in its place."""
    return value if isinstance(value, str) else str(value)


def _collective(args: CollectiveFields) -> CollectiveArgs:
    group = args.group_name if args.group_name is not None else args.group_id
    return CollectiveArgs(
        name=as_text(args.name),
        in_elements=element_count(args.in_elements),
        out_elements=element_count(args.out_elements),
        dtype=as_text(args.dtype),
        group_name=as_text(group),
        group_description=as_text(args.group_description),
        group_ranks=rank_list(args.group_ranks),
        group_size=rank_count(args.group_size, least=0),
        seq=as_int(args.seq),
        comms_id=as_text(args.comms_id),
        src_rank=as_int(args.src_rank),
        dst_rank=as_int(args.dst_rank),
        in_split=as_text(args.in_split),
        out_split=as_text(args.out_split),
    )


def _grid(raw: bytes) -> tuple[int, ...]:
    """Return a launch grid as three numbers, ``()`` for anything else."""
    try:
        return tuple(msgspec.json.decode(raw, type=tuple[int, int, int])) if raw else ()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()


def _shapes(dims: bytes, types: bytes) -> Shapes:
    try:
        sizes = msgspec.json.decode(dims)
        kinds = msgspec.json.decode(types) if types else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shapes((), ())
    return Shapes(
        tuple(sizes) if isinstance(sizes, list) else (),
        tuple(category_text(kind) for kind in kinds) if isinstance(kinds, list) else (),
    )
