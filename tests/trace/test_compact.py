"""Compact columns are read like the arrays that they stand for, also at the ends of what types hold."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.both_readers import assert_alike
from tracedoc.trace.columns import Trace
from tracedoc.trace.compact import NO_ID, Coded, Growing, GrowingIds, Sparse, narrowest

EDGES = [-(2**63), -(2**31) - 1, -(2**31), -129, -128, -1, 0, 127, 128, 2**31 - 1, 2**31, 2**53, 2**63 - 1]


@pytest.mark.parametrize(
    ("least", "most", "dtype"),
    [
        (0, 127, np.int8), (-128, 0, np.int8), (0, 128, np.int16), (-129, 0, np.int16), (-1, 2**15, np.int32),
        (0, 2**31 - 1, np.int32), (0, 2**31, np.int64), (-(2**31), 0, np.int32), (-(2**31) - 1, 0, np.int64),
    ],
)  # fmt: skip
def test_the_narrowest_type_holds_both_ends(least: int, most: int, dtype: type) -> None:
    assert narrowest(least, most) is dtype


@given(st.lists(st.lists(st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1), max_size=3), max_size=4))
def test_ids_are_what_they_were_whatever_came_before(parts: list[list[int]]) -> None:
    column = GrowingIds()
    for part in parts:
        column.extend(np.array(part, dtype=np.int64))
    ids = [one for part in parts for one in part]
    assert column.values().tolist() == ids
    assert column.values().dtype == (np.int32 if all(-(2**31) <= one < 2**31 for one in ids) else np.int64)


def test_ids_outgrow_their_room_and_their_type() -> None:
    column = GrowingIds()
    column.extend(np.arange(20_000))
    column.extend(np.arange(20_000) + 2**40)
    column.extend(np.arange(200_000))
    expected = [*range(20_000), *range(2**40, 2**40 + 20_000), *range(200_000)]
    assert column.values().tolist() == expected


def test_no_room_for_a_column_is_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    column = Growing(np.int64)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="no room for 1,048,576 bytes"):
        column.extend(np.zeros(1 << 15, dtype=np.int64))


ROWS = [0, -1, 3, [1, 3, 0], [], slice(None), slice(1, 3), np.array([True, False, True, False])]


@pytest.mark.parametrize("rows", ROWS, ids=repr)
def test_columns_are_indexed_as_arrays_are(rows: Any) -> None:
    whole = np.array([2**40, NO_ID, 2**40, 7])
    sizes = np.array([NO_ID, 2**53, NO_ID, 5])
    rows = np.array(rows, dtype=np.intp) if isinstance(rows, list) else rows
    coded = Coded(np.array([1, 2, 1, 0], dtype=np.int8), np.array([7, 2**40, NO_ID]))
    sparse = Sparse(np.array([1, 3]), np.array([2**53, 5]), 4)
    for column, plain in ((coded, whole), (sparse, sizes)):
        found = column[rows]
        assert np.array_equal(found, plain[rows])
        assert found.dtype == np.int64
        assert np.array_equal(column == plain[3], plain == plain[3])
        assert np.array_equal(column != plain[3], plain != plain[3])
        assert column.tolist() == np.asarray(column).tolist() == plain.tolist()
        assert len(column) == 4


def test_a_column_in_which_nothing_has_a_value() -> None:
    empty = Sparse(np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int64), 3)
    assert empty[np.array([0, 2])].tolist() == [NO_ID, NO_ID]
    assert empty.tolist() == [NO_ID] * 3
    assert empty[1] == NO_ID


def event(
    ts: int, args: dict[str, Any], *, cat: str = "kernel", name: str = "k", pid: int = 0, tid: int = 7
) -> dict[str, Any]:
    row = {"cat": cat, "name": name, "pid": pid, "tid": tid}
    return {"ph": "X", "ts": ts, "dur": 1, "args": args} | row


IDS = st.sampled_from([*EDGES, "7", "stream 7", 2**63, 10**30, None]) | st.integers(-5, 300)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(IDS, IDS, IDS, IDS, IDS, st.sampled_from(["kernel", "gpu_memcpy", "cpu_op"])), max_size=8
    )
)
def test_both_readers_keep_extreme_values(events: list[tuple[Any, ...]]) -> None:
    """What columns say is what the file says, whatever type it takes."""
    keys = ("correlation", "External id", "device", "stream", "bytes")
    listed = [
        event(ts, dict(zip(keys, values, strict=False)), cat=values[-1]) for ts, values in enumerate(events)
    ]
    plain = event(-1, {}, cat="cpu_op")
    trace = assert_alike(json.dumps([plain, *listed]).encode())
    assert isinstance(trace, Trace)
    for name, key, least, most in (
        ("correlation", "correlation", 1, 2**63),
        ("external_id", "External id", -(2**63), 2**63),
    ):
        expected = [one["args"][key] for one in listed]
        column = getattr(trace, name)[1:]
        assert column.dtype in (np.int32, np.int64)
        for value, found in zip(expected, column.tolist(), strict=True):
            if isinstance(value, int):
                assert found == (value if least <= value < most else NO_ID)
    for one, device, stream, size in zip(
        listed, trace.device.tolist()[1:], trace.stream.tolist()[1:], trace.nbytes.tolist()[1:], strict=True
    ):
        args = one["args"]
        on_gpu = one["cat"] != "cpu_op"
        if isinstance(args["device"], int):
            assert device == (args["device"] if on_gpu and -(2**31) <= args["device"] < 2**31 else NO_ID)
        if isinstance(args["stream"], int):
            assert stream == (args["stream"] if on_gpu and -(2**63) <= args["stream"] < 2**63 else NO_ID)
        if isinstance(args["bytes"], int):
            assert size == (args["bytes"] if on_gpu and -(2**63) <= args["bytes"] < 2**63 else NO_ID)


@pytest.mark.parametrize("count", [100, 200, 33_000])
def test_many_names_threads_and_places(count: int) -> None:
    """Codes and names go over to wider types where there are many."""
    events = [event(i, {"stream": i}, name=f"k{i}", pid=i % 5, tid=i) for i in range(count)]
    trace = assert_alike(json.dumps(events).encode())
    assert isinstance(trace, Trace)
    assert [trace.names[name] for name in trace.name.tolist()] == [f"k{i}" for i in range(count)]
    assert trace.stream.tolist() == list(range(count))
    assert trace.device.tolist() == [i % 5 for i in range(count)]
    assert [trace.threads[thread].tid for thread in trace.thread.tolist()] == [str(i) for i in range(count)]
    wide = np.int16 if count < 2**15 else np.int32
    assert trace.name.dtype == (np.int8 if count < 128 else wide)
    assert trace.thread.codes.dtype == (
        np.int8 if 2 * count < 128 else np.int16 if 2 * count < 2**15 else np.int32
    )
