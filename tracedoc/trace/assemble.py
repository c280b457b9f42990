"""Assemble decoded events into the columns of a Trace."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.errors import InputError, TraceLimit
from tracedoc.trace.chunks import Outcome
from tracedoc.trace.columns import (
    CollectiveArgs,
    Kind,
    MemoryCounters,
    NarrowColumn,
    ShapeTable,
    SyncRecords,
    Thread,
    Trace,
)
from tracedoc.trace.compact import NO_ID, Coded, Growing, GrowingIds, Sparse, narrowest
from tracedoc.trace.distinct import distinct
from tracedoc.trace.events import IMPOSSIBLE, CollectiveFields, Metadata
from tracedoc.trace.horizon import check_unit, cut_at, first_of_each, without_length
from tracedoc.trace.metadata import (
    as_int,
    as_text,
    base_ns_of,
    element_count,
    rank_count,
    rank_list,
    read_info,
    vendor_of_calls,
)
from tracedoc.trace.part import COUNTED, DROPPED, Ids, Part, Tables, category_text, number_of, shapes_of
from tracedoc.trace.reader import PythonReader
from tracedoc.trace.vocabulary import kind_of

_ABSOLUTE_NS = 1_000_000_000_000_000_000  # 1e15 us: no relative time is that large
# Beyond these, differences and sums of times would overflow: 126 years, and twelve days.
_LATEST_NS = 4_000_000_000_000_000_000
_LONGEST_NS = 1_000_000_000_000_000
_HOST_MEMORY = 0  # c10::DeviceType::CPU

_COLUMNS: dict[str, type[np.generic]] = {
    "ts": np.int64,
    "dur": np.int64,
    "head": np.int32,
    # What few events carry: the rows of the events, and what they say.
    "placed.row": np.int64,
    "placed.place": np.int32,
    "sized.row": np.int64,
    "sized.nbytes": np.int64,
    "counted.row": np.int64,
    "counted.type": np.int64,
    "counted.device": np.int64,
    "counted.allocated": np.int64,
    "counted.reserved": np.int64,
    "waits.row": np.int64,
    "waits.wait_on_stream": np.int64,
    "waits.recorded_by": np.int64,
    "shaped.row": np.int32,
    "shaped.shape": np.int32,
}


class Columns:
    """The columns of a trace while it is read; ``descriptions`` counts its metadata events."""

    def __init__(self, tables: Tables) -> None:
        self._heads, self._places, self._shapes = tables.heads, tables.places, tables.shapes
        self._columns = {name: Growing(dtype) for name, dtype in _COLUMNS.items()}
        self._columns |= {name: GrowingIds() for name in ("correlation", "external_id")}
        self._rows = 0
        self._collectives: dict[int, CollectiveArgs] = {}
        self.descriptions = 0
        self._process_names: dict[str, str] = {}
        self._thread_names: dict[tuple[str, str], str] = {}

    @property
    def categories(self) -> Collection[Any]:
        """The categories of all events so far, as the file holds them."""
        return self._heads.categories.keys()

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the processes of all events so far: their ids, and what metadata calls them."""
        ids = (category_text(pid) for pid, _ in self._heads.threads)
        return (*ids, *self._process_names.values())

    def append(self, part: Part) -> None:
        """Append the columns of one chunk."""
        self.descriptions += len(part.metadata)
        for item in part.metadata:
            self._add_metadata(item)
        for name, values in part.events.items():
            self._columns[name].extend(values)
        for table in ("placed", "sized", "counted", "waits", "shaped"):
            columns = getattr(part, table)
            if columns["row"].size:
                for name, values in columns.items():
                    self._columns[f"{table}.{name}"].extend(values + self._rows if name == "row" else values)
        for row, fields in part.collectives.items():
            self._collectives[self._rows + row] = _collective(fields)
        self._rows += part.events["ts"].size

    def trace(self, path: str, outcome: Outcome, reader: PythonReader, limits: list[TraceLimit]) -> Trace:
        """Return the finished trace, sorted by start time."""
        info = read_info(path, outcome.metadata)
        heads, names = self._take("head"), tuple(category_text(name) for name in self._heads.names)
        kind = np.array(self._heads.kind, dtype=np.uint8)[heads]
        ts, dur = self._take("ts"), self._take("dur")
        kernels = np.flatnonzero(kind == int(Kind.KERNEL))
        named = np.array(self._heads.name, dtype=np.int32)[heads[kernels]]
        dur[kernels[without_length(dur[kernels], named)]] = IMPOSSIBLE
        impossible = (ts < -_ABSOLUTE_NS) | (ts > _LATEST_NS) | (dur == IMPOSSIBLE) | (dur > _LONGEST_NS)
        negative = (dur < 0) & ~impossible
        kept = (kind != DROPPED) & ~impossible
        broken = int((impossible & (kind != DROPPED)).sum())
        clamped = int((negative & (kind != DROPPED)).sum())
        if broken or clamped:
            limits.append(
                TraceLimit(
                    "impossible-times",
                    path,
                    f"events without a possible time or length: {broken:,}; of negative length: {clamped:,}",
                    "the former are left out, the latter count as instants",
                )
            )
        if not kept.any():
            raise InputError(f"{path} holds no event that can be used", "record it again with torch.profiler")
        ts = since_the_epoch(ts, base_ns_of(outcome.metadata))
        known_until = None
        if not outcome.closed:
            thread = np.array(self._heads.thread, dtype=np.int32)[heads[kept]]
            peers = bool(info.backend) or (info.world_size or 1) > 1
            known_until = cut_at(kind[kept], ts[kept], thread, peers=peers, named=self._names_more_threads())
        keep = np.argsort(ts, kind="stable")
        if not kept.all():
            keep = keep[kept[keep]]
        correlation, external_id = self._take("correlation"), self._take("external_id")
        ts = ts[keep]
        first = first_of_each(ts, keep, said=(heads, dur), ids=(correlation, external_id))
        if not first.all():
            limits.append(_doubled(path, int((~first).sum())))
            keep, ts = keep[first], ts[first]
        del impossible, negative, kept, first
        row_of = np.full(self._rows, NO_ID, dtype=np.int32)
        row_of[keep] = np.arange(keep.size, dtype=np.int32)
        collectives = {int(row_of[i]): value for i, value in self._collectives.items() if row_of[i] >= 0}
        shapes = self._shape_table(row_of)
        memory, syncs, nbytes = self._memory(row_of), self._syncs(row_of), self._nbytes(row_of)
        del row_of
        # One column after the other, so that only one exists twice.
        dur = dur[keep]
        np.maximum(dur, 0, out=dur)
        kind = kind[keep]
        check_unit(path, kind, ts, dur)
        correlation = correlation[keep]
        correlation[correlation <= 0] = NO_ID  # 0 is how CUPTI and roctracer say "none"
        limits.extend(self._device_limits(path, kind))
        codes, values, grids = self._where(heads)
        codes = codes[keep]
        name = np.array(self._heads.name, dtype=narrowest(NO_ID, len(names)))[heads[keep]]
        called = distinct(name[kind == int(Kind.RUNTIME)])
        return Trace(
            info=replace(
                info,
                has_shapes=info.has_shapes or any(shape.dims for shape in shapes.kinds),
                has_memory=info.has_memory or any(traits & COUNTED for traits in self._heads.traits),
                vendor=info.vendor or vendor_of_calls(names[one] for one in called.tolist()),
                reader=reader.name,
                truncated=outcome.truncated,
                known_until_ns=known_until,
            ),
            ts_ns=ts,
            dur_ns=dur,
            name=name,
            kind=kind,
            **{column: Coded(codes, of_code) for column, of_code in values.items()},
            correlation=correlation,
            external_id=external_id[keep],
            nbytes=nbytes,
            names=names,
            threads=self._thread_table(),
            collectives=collectives,
            shapes=shapes,
            limits=tuple(limits),
            grids=grids,
            memory=memory,
            syncs=syncs,
        )

    # Adding.

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

    def _where(
        self, heads: npt.NDArray[np.int32]
    ) -> tuple[NarrowColumn, dict[str, npt.NDArray[Any]], tuple[tuple[int, ...], ...]]:
        """Return a code for where each event was; what each column holds for it, and the launch grids.

        Where the arguments do not say, process and thread are device and stream.
        """
        known, grids, wheres = list(self._heads), Ids(), Ids()
        on_host = [wheres[thread, NO_ID, NO_ID, NO_ID] for thread in range(len(self._heads.threads))]
        on_gpu = []
        for device, stream, raw, head in self._places:
            _, _, pid, tid = known[head]
            grid = _grid(raw)
            on_gpu.append(
                wheres[
                    self._heads.thread[head],
                    _device_number(pid if device is None else device),
                    number_of(tid if stream is None else stream),
                    grids[grid] if grid else NO_ID,
                ]
            )
        dtype = narrowest(0, len(wheres))
        codes = np.array(on_host, dtype=dtype)[self._heads.thread][heads]
        codes[self._take("placed.row")] = np.array(on_gpu, dtype=dtype)[self._take("placed.place")]
        columns = zip(("thread", "device", "stream", "grid"), zip(*wheres, strict=True), strict=True)
        types = {"stream": np.int64}
        values = {name: np.array(listed, dtype=types.get(name, np.int32)) for name, listed in columns}
        return codes, values, tuple(grids)

    def _nbytes(self, row_of: npt.NDArray[np.int32]) -> Sparse:
        rows, sizes = row_of[self._take("sized.row")], self._take("sized.nbytes")
        kept = _in_order(rows, rows >= 0)
        return Sparse(rows[kept], sizes[kept], int((row_of >= 0).sum()))

    def _memory(self, row_of: npt.NDArray[np.int32]) -> MemoryCounters | None:
        rows = row_of[self._take("counted.row")]
        types, device, allocated, reserved = (
            self._take(f"counted.{name}") for name in ("type", "device", "allocated", "reserved")
        )
        kept = _in_order(rows, (rows >= 0) & (types != _HOST_MEMORY))
        if kept.size == 0:
            return None
        return MemoryCounters(rows[kept].astype(np.intp), device[kept], allocated[kept], reserved[kept])

    def _syncs(self, row_of: npt.NDArray[np.int32]) -> SyncRecords | None:
        rows = row_of[self._take("waits.row")]
        streams, recorded_by = self._take("waits.wait_on_stream"), self._take("waits.recorded_by")
        kept = _in_order(rows, rows >= 0)
        if kept.size == 0:
            return None
        streams, recorded_by = (np.where(ids[kept] < 0, NO_ID, ids[kept]) for ids in (streams, recorded_by))
        return SyncRecords(rows[kept].astype(np.intp), streams, recorded_by)

    def _shape_table(self, row_of: npt.NDArray[np.int32]) -> ShapeTable:
        rows, shape = row_of[self._take("shaped.row")], self._take("shaped.shape")
        kept = _in_order(rows, rows >= 0)
        used = distinct(shape[kept])
        texts = list(self._shapes)
        kinds = tuple(shapes_of(*texts[number]) for number in used.tolist())
        return ShapeTable(rows[kept], np.searchsorted(used, shape[kept]).astype(np.int32), kinds)

    def _take(self, column: str) -> npt.NDArray[Any]:
        return self._columns.pop(column).values()

    def _thread_table(self) -> tuple[Thread, ...]:
        texts = [(category_text(pid), category_text(tid)) for pid, tid in self._heads.threads]
        return tuple(Thread(pid, tid, self._thread_names.get((pid, tid), "").strip()) for pid, tid in texts)

    def _names_more_threads(self) -> bool:
        """True if a thread of the host has a name and no event; threads of devices are their streams."""
        seen = {(category_text(pid), category_text(tid)) for pid, tid in self._heads.threads}
        return any(one not in seen and name[:6] != "stream" for one, name in self._thread_names.items())

    def _device_limits(self, path: str, kind: npt.NDArray[np.uint8]) -> list[TraceLimit]:
        if not (kind == int(Kind.ACCELERATOR)).any() or (kind == int(Kind.KERNEL)).any():
            return []
        present = sorted(
            category_text(c) for c in self.categories if kind_of(category_text(c)) is Kind.ACCELERATOR
        )
        return [
            TraceLimit(
                "unknown-device",
                path,
                f"the device activity is of a kind that is not understood ({', '.join(present)})",
                "nothing is said about this rank's device time",
            )
        ]


def _doubled(path: str, count: int) -> TraceLimit:
    what = f"{count:,} events stand twice in the file, and count once"
    return TraceLimit(
        "doubled-events", path, what, "files may have been joined: what the steps lack is not known"
    )


def _in_order(rows: npt.NDArray[np.int32], kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """The places of rows that are kept, in the order of the rows."""
    places = np.flatnonzero(kept)
    return places[np.argsort(rows[places], kind="stable")]


def since_the_epoch(ts: npt.NDArray[np.int64], base_ns: int) -> npt.NDArray[np.int64]:
    """Return times with the file's base added, in place, but for those that are absolute already."""
    if base_ns:
        relative = (ts > -_ABSOLUTE_NS) & (ts < _ABSOLUTE_NS)
        np.add(ts, base_ns, out=ts, where=relative)
    return ts


def _device_number(value: Any) -> int:
    number = number_of(value)
    return number if -(2**31) <= number < 2**31 else NO_ID


def _collective(args: CollectiveFields) -> CollectiveArgs:
    group = args.group_name if args.group_name is not None else args.group_id
    return CollectiveArgs(
        name=as_text(args.name),
        in_elements=element_count(args.in_elements),
        out_elements=element_count(args.out_elements),
        dtype=as_text(args.dtype),
        group_name=as_text(group),
        group_ranks=rank_list(args.group_ranks),
        group_size=rank_count(args.group_size, least=0),
        seq=as_int(args.seq),
        src_rank=as_int(args.src_rank),
        dst_rank=as_int(args.dst_rank),
    )


def _grid(raw: bytes) -> tuple[int, ...]:
    """Return a launch grid as three numbers, ``()`` for anything else."""
    try:
        return tuple(msgspec.json.decode(raw, type=tuple[int, int, int])) if raw else ()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()
