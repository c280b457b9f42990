"""The collectives of one rank: each communication kernel joined to its record on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.spans import Int64Array, in_order
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, GpuEvents, collective_records
from tracedoc.timeline.collective_table import (
    NO_TIME,
    START_DELAYS,
    CollectiveOp,
    CollectiveTable,
    StartDelay,
)
from tracedoc.timeline.lags import RELEASE_NS
from tracedoc.timeline.launches import NO_ROW, Rows, enclosing_rows, match_ids
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import CollectiveArgs, Kind, ProcessGroup, Shapes, Trace, TraceInfo
from tracedoc.trace.distinct import difference, distinct, places_by_value
from tracedoc.trace.metadata import element_count

LONG_AGO_NS: Final = 1 << 60
"""Longer than any trace, in nanoseconds."""


def gpu_collectives(
    trace: Trace, events: GpuEvents, device: int, step_numbers: np.ndarray
) -> CollectiveTable:
    """Return the communication kernels and copies of ``device`` in time order.

    ``step_numbers[i]`` is the number of the step of ``events.rows[i]``, below 0 where it has none.
    """
    wanted = np.flatnonzero((events.classes == COMMUNICATION) & (events.device == device))
    rows, launch_rows = events.rows[wanted], events.launch_rows[wanted]
    arguments = _join_records(trace, rows, launch_rows)
    ranges = trace.rows_named(vocabulary.nccl_annotation, Kind.ANNOTATION)
    annotations = enclosing_rows(trace, ranges, launch_rows)
    group_ranks = {group.name: group.ranks for group in reversed(trace.info.groups) if group.name}
    columns = (
        events.stream[wanted],
        events.start_ns[wanted],
        events.end_ns[wanted],
        np.where(events.linked[wanted], events.launch_ns[wanted], NO_TIME),
        step_numbers[wanted],
        _held(events, device, wanted),
    )
    return CollectiveTable.of(
        [
            _operation(trace, row, own, None if around == NO_ROW else around, group_ranks, when)
            for row, own, around, *when in zip(
                rows.tolist(), arguments, annotations.tolist(), *(c.tolist() for c in columns), strict=True
            )
        ]
    )


def gloo_collectives(trace: Trace, step_of_time: np.ndarray, rows: Rows) -> CollectiveTable:
    """Return the ``gloo:*`` ranges in ``rows`` as collectives; ``step_of_time`` holds their step numbers.

    gloo runs reduce-scatter as an all-reduce: the c10d operator that called it has the real name, and of a
    send or receive the other rank. gloo records no group; a job whose groups all have the same ranks has
    that one.
    """
    asked = gloo_calls(trace, rows)
    single = _only_group(trace.info)
    found = []
    for position, row in enumerate(rows.tolist()):
        op = vocabulary.collective_op(trace.row_name(asked.get(row, row))) or "unknown"
        found.append(
            CollectiveOp(
                op=op,
                group=single.ranks if single else (),
                group_name=single.name if single else "",
                group_size=single.size if single else None,
                nbytes=input_payload(op, trace.shapes.get(row), single.size if single else None),
                dtype=_dims_dtype(trace.shapes.get(row)),
                seq=None,
                stream=int(trace.thread[row]),
                start_ns=int(trace.ts_ns[row]),
                end_ns=int(trace.ts_ns[row] + trace.dur_ns[row]),
                launch_ns=None,
                step=int(step_of_time[position]) if step_of_time[position] >= 0 else None,
                peer=_peer_of_call(op, trace.shapes.get(asked.get(row, row))),
                held=StartDelay.LAUNCH,
            )
        )
    return CollectiveTable.of(found)


def _held(events: GpuEvents, device: int, wanted: Rows) -> npt.NDArray[np.uint8]:
    """The reason why each communication kernel, ``wanted`` of the events, did not start earlier."""
    starts, ends, streams = events.start_ns[wanted], events.end_ns[wanted], events.stream[wanted]
    compute = (events.classes == COMPUTE) & (events.device == device)
    after_compute = _since(in_order(events.end_ns[compute]), starts)
    after_comm = np.full(wanted.size, LONG_AGO_NS, dtype=np.int64)
    for _, mine in places_by_value(streams):
        after_comm[mine] = _since(in_order(ends[mine]), starts[mine])
    launched = np.where(events.linked[wanted], starts - events.launch_ns[wanted], LONG_AGO_NS)
    held = np.full(wanted.size, StartDelay.UNKNOWN, dtype=np.uint8)
    held[after_compute <= RELEASE_NS] = StartDelay.COMPUTE
    held[(after_comm <= RELEASE_NS) & (after_comm <= after_compute)] = StartDelay.COMMUNICATION
    held[launched <= RELEASE_NS] = StartDelay.LAUNCH
    return held


def _since(ends: Int64Array, times: Int64Array) -> Int64Array:
    """Return the time since the last of the sorted ``ends`` at or before each of ``times``."""
    place = np.searchsorted(ends, times, side="right")
    padded = np.concatenate(([times.min(initial=0) - LONG_AGO_NS], ends))
    return np.asarray(times - padded[place], dtype=np.int64)


def _join_records(trace: Trace, rows: Rows, launch_rows: Rows) -> list[CollectiveArgs | None]:
    """Return each kernel's arguments: its own, else those of the record that holds its launch.

    The External id is the last resort: old traces write the kernel's own correlation id there.
    """
    records = collective_records(trace)
    records = records[[row in trace.collectives for row in records.tolist()]] if records.size else records
    holders = enclosing_rows(trace, records, launch_rows)
    order = np.argsort(trace.external_id[records], kind="stable")
    by_id = match_ids(trace.external_id[rows], trace.external_id[records][order], records[order])
    by_id[trace.external_id[rows] == trace.correlation[rows]] = NO_ROW
    joined: list[CollectiveArgs | None] = []
    for position, row in enumerate(rows.tolist()):
        own = trace.collectives.get(row)
        holder = int(holders[position]) if holders[position] != NO_ROW else int(by_id[position])
        joined.append(own or (trace.collectives.get(holder) if holder != NO_ROW else None))
    holding = distinct(np.concatenate((holders, by_id)))
    _join_batches(trace, rows, launch_rows, difference(records, holding), joined)
    return joined


def _join_batches(
    trace: Trace, rows: Rows, launch_rows: Rows, free: Rows, joined: list[CollectiveArgs | None]
) -> None:
    """Fill in the arguments of kernels that run a batch of sends and receives.

    The batch (``batch_isend_irecv``) is launched when it ends, outside of the records of what it consists of:
    those on the launching thread since the launch of the collective before.
    """
    batches = [
        place
        for place, row in enumerate(rows.tolist())
        if joined[place] is None
        and launch_rows[place] != NO_ROW
        and vocabulary.collective_op(trace.row_name(row)) == "send_recv"
    ]
    sent = [
        row
        for row in free.tolist()
        if vocabulary.collective_op(trace.collectives[row].name) in vocabulary.P2P_OPS
    ]
    if not batches or not sent:
        return
    for thread in distinct(trace.thread[sent]).tolist():
        mine = np.flatnonzero((launch_rows != NO_ROW) & (trace.thread[np.maximum(launch_rows, 0)] == thread))
        mine = mine[np.argsort(trace.ts_ns[launch_rows[mine]], kind="stable")]
        own = [row for row in sent if trace.thread[row] == thread]
        following = np.searchsorted(trace.ts_ns[launch_rows[mine]], trace.ts_ns[own])
        parts: dict[int, list[CollectiveArgs]] = defaultdict(list)
        for row, place in zip(own, following.tolist(), strict=True):
            if place < mine.size and int(mine[place]) in batches:
                parts[int(mine[place])].append(trace.collectives[row])
        for place, found in parts.items():
            joined[place] = _batch(found)


def _batch(parts: Sequence[CollectiveArgs]) -> CollectiveArgs:
    """The arguments of several sends and receives as one, with its peer where they are all with one rank."""
    elements: dict[str, int] = defaultdict(int)
    peers = set()
    for one in parts:
        op = vocabulary.collective_op(one.name) or ""
        elements[op] += one.in_elements or 0
        peers.add(_peer(op, one))
    peer = peers.pop() if len(peers) == 1 else None
    most = max(elements.values()) or None
    return replace(
        parts[0],
        name=parts[0].name if len(elements) == 1 else "send_recv",
        in_elements=most,
        out_elements=most,
        seq=None,
        src_rank=peer,
        dst_rank=peer,
    )


def _operation(
    trace: Trace,
    row: int,
    arguments: CollectiveArgs | None,
    annotation: int | None,
    group_ranks: Mapping[str, tuple[int, ...]],
    when: Sequence[int],
) -> CollectiveOp:
    """Return one collective; ``when`` are its stream, start, end, launch, step and what held it."""
    stream, start_ns, end_ns, launch_ns, step, held = when
    said = arguments or _NOTHING_SAID
    op, dtype = vocabulary.collective_op(said.name), said.dtype
    nbytes = vocabulary.payload_bytes(op or "unknown", said.in_elements, said.out_elements, dtype)
    if annotation is not None:
        named = vocabulary.nccl_annotation(trace.row_name(annotation))
        # NCCL has no barrier: c10d reduces one number, and says so in the range around it only.
        op = named if named == "barrier" else op or named
        if nbytes is None:
            nbytes = input_payload(op or "unknown", trace.shapes.get(annotation), trace.info.world_size)
            dtype = dtype or _dims_dtype(trace.shapes.get(annotation))
    if op in (None, "unknown"):
        # A coalesced group is recorded without its operation; its kernel has a name.
        op = vocabulary.collective_op(trace.row_name(row)) or "unknown"
    return CollectiveOp(
        op=op,
        group=said.group_ranks or group_ranks.get(said.group_name, ()),
        group_name=said.group_name,
        group_size=said.group_size,
        nbytes=nbytes,
        dtype=dtype,
        seq=said.seq,
        stream=stream,
        start_ns=start_ns,
        end_ns=end_ns,
        launch_ns=None if launch_ns == NO_TIME else launch_ns,
        step=step if step >= 0 else None,
        peer=_peer(op, said),
        held=START_DELAYS[held],
    )


_NOTHING_SAID = CollectiveArgs("")


def _peer(op: str, arguments: CollectiveArgs) -> int | None:
    """Return the other end of a send or receive, the root of a broadcast, where it is recorded."""
    peer = arguments.dst_rank if op == "send" else arguments.src_rank
    return (
        peer if peer is not None and peer >= 0 and (op in vocabulary.P2P_OPS or op == "broadcast") else None
    )


def _peer_of_call(op: str, shapes: Shapes | None) -> int | None:
    """Return the other rank of a send or receive by c10d's arguments: tensors, group, rank within it, tag."""
    if op not in ("send", "recv") or shapes is None or len(shapes.values) < 3:
        return None
    rank = shapes.values[2]
    return int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 8 else None


def _only_group(info: TraceInfo) -> ProcessGroup | None:
    """Return the group of a job that has one, or several with the same ranks; else ``None``."""
    groups = info.groups
    complete = info.group_count in (None, len(groups))
    return groups[0] if groups and complete and len({group.ranks for group in groups}) == 1 else None


def input_payload(op: str, shapes: Shapes | None, group_size: int | None) -> int | None:
    """Return the payload of an operation from its first input tensor, e.g. ``[[394241]]`` and ``float``.

    The input of an all-gather is one rank's shard, its payload the full output.
    """
    if shapes is None or not shapes.dims or not shapes.types:
        return None
    dims, size = shapes.dims[0], vocabulary.dtype_bytes(shapes.types[0])
    if not isinstance(dims, (list, tuple)) or size is None:
        return None
    extents = [extent for extent in dims if isinstance(extent, int) and extent >= 0]
    if len(extents) < len(dims):
        return None
    elements = element_count(prod(extents))
    if elements is None:
        return None
    nbytes = elements * size
    if op != "all_gather":
        return nbytes
    return None if group_size is None else nbytes * group_size


def _dims_dtype(shapes: Shapes | None) -> str:
    return shapes.types[0] if shapes is not None and shapes.types else ""


def gloo_calls(trace: Trace, rows: Rows) -> dict[int, int]:
    """Return, for each ``gloo:*`` range in ``rows``, the row of the c10d operator that issued it.

    They are matched by order, within each kind whose counts agree; a range of another kind is left out.
    gloo runs a reduce-scatter as an all-reduce.
    """
    calls: dict[str, list[int]] = defaultdict(list)
    for row in trace.rows_named(lambda name: name.startswith("c10d::"), Kind.CPU_OP).tolist():
        op = vocabulary.collective_op(trace.row_name(row))
        if op is not None:
            calls["all_reduce" if op == "reduce_scatter" else op].append(row)
    shown: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        shown[vocabulary.gloo_op(trace.row_name(row)) or "unknown"].append(row)
    return {
        row: call
        for name, listed in shown.items()
        if len(calls[name]) == len(listed)
        for row, call in zip(listed, calls[name], strict=True)
    }
