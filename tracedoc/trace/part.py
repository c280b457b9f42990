"""The kept events of one chunk as columns, and how they are made of decoded events."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.compact import NO_ID
from tracedoc.trace.events import Args, CollectiveFields, Decoded, InstantArgs, Int64Array, Metadata
from tracedoc.trace.metadata import as_int
from tracedoc.trace.tables import COUNTED, ON_GPU, SHAPED, WAITS, Tables, interned

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
