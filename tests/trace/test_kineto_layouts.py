"""Whatever the layout of the JSON, the columns are the same."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.reference import reference_rows, rows_of
from tracedoc.trace import chunks
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace

BASE = 1_711_964_646_000_000_000
NAMES = st.sampled_from(
    [
        "aten::mm",
        "ProfilerStep#3",
        "cudaLaunchKernel",
        "ncclDevKernel_AllReduce",
        '},{"ph":"X"',
        "a\\b\n",
        "é🔥",
        "]}",
    ]
)
KINDS = [
    "cpu_op",
    "kernel",
    "cuda_runtime",
    "user_annotation",
    "gpu_memcpy",
    "Operator",
    "Kernel",
    "python_function",
]


@st.composite
def microseconds(draw: st.DrawFn, largest: int) -> str:
    whole = draw(st.integers(0, largest))
    return f"{whole}.{draw(st.integers(0, 999)):03d}" if draw(st.booleans()) else str(whole)


@st.composite
def events(draw: st.DrawFn, largest: int) -> str:
    phase = draw(st.sampled_from(["X", "X", "X", "s", "f", "M", "i"]))
    args = draw(
        st.dictionaries(
            st.sampled_from(
                ["correlation", "External id", "external id", "stream", "device", "bytes", "note", "nested"]
            ),
            st.integers(0, 2**31 - 1),
            max_size=4,
        )
    )
    fields: dict[str, Any] = {
        "ph": phase,
        "name": draw(NAMES),
        "pid": draw(st.sampled_from([0, 4711, "7", "Spans"])),
        "tid": draw(st.sampled_from([1, 2, 4711, "stream 7", "PyTorch Profiler"])),
        "args": args,
    }
    if "nested" in args:
        args["nested"] = [{"a": [1, {"b": "},{"}]}, {"c": {}}]
    if phase == "X":
        fields["cat"] = draw(st.sampled_from(KINDS))
        fields["dur"] = "@dur"
    fields["ts"] = "@ts"
    keys = draw(st.sampled_from([list(fields), sorted(fields), sorted(fields, reverse=True)]))
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, None, 0, 4]))
    separators = draw(st.sampled_from([None, (",", ":"), (" , ", " :\t")]))
    ordered = {key: fields[key] for key in keys}
    text = json.dumps(ordered, ensure_ascii=ascii_only, indent=indent, separators=separators)
    dur = draw(microseconds(10**6))
    # Kernels of no length are lost ones, which test_kineto_bad_input is about.
    return text.replace('"@ts"', draw(microseconds(largest))).replace('"@dur"', dur if float(dur) else "1")


@st.composite
def documents(draw: st.DrawFn) -> str:
    absolute = draw(st.booleans())
    listed = draw(st.lists(events(1_790_000_000_000_000 if absolute else 2**43 - 1), min_size=1, max_size=30))
    listed.append('{"ph": "X", "cat": "cpu_op", "name": "last", "pid": 1, "tid": 1, "ts": 5, "dur": 1}')
    between = draw(st.sampled_from([",", ", ", ",\n  ", "\n,\n\n", " ,\t"]))
    body = (
        "["
        + draw(st.sampled_from(["", "\n\n", " "]))
        + between.join(listed)
        + draw(st.sampled_from(["", "\n  "]))
        + "]"
    )
    if draw(st.integers(0, 4)) == 0:
        return str(body)
    meta = (
        '"deviceProperties": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}], "distributedInfo": {"rank": 4}'
    )
    if not absolute:
        meta += f', "baseTimeNanoseconds": {BASE}'
    parts = [meta, f'"traceEvents": {body}', '"other": {"traceEvents": [1, {}, {}]}']
    begin = draw(st.sampled_from(["{", "\n {\n", "\ufeff{", "\r\n{\r\n"]))
    return begin + ", ".join(draw(st.permutations(parts))) + "}"


def read(text: str, chunk_bytes: int, *, packed: bool = False) -> Trace:
    data = gzip.compress(text.encode(), 1) if packed else text.encode()
    before = chunks.CHUNK_BYTES
    chunks.CHUNK_BYTES = chunk_bytes
    try:
        return read_trace("t.json", stream=io.BytesIO(data))
    finally:
        chunks.CHUNK_BYTES = before


@settings(max_examples=100)
@given(documents(), st.sampled_from([64, 200, 1000, chunks.CHUNK_BYTES]), st.booleans())
def test_columns_do_not_depend_on_layout_or_chunk_size(text: str, chunk_bytes: int, packed: bool) -> None:
    trace = read(text, chunk_bytes, packed=packed)
    text = text.removeprefix("\ufeff")
    assert rows_of(trace) == reference_rows(text)
    assert trace.limits == ()
    if text.lstrip().startswith("{"):
        assert trace.info.rank == 4
        assert [device.name for device in trace.info.devices] == ["a", "b"]


def test_starts_beyond_the_precision_of_floats_are_exact() -> None:
    text = json.dumps(
        [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": "@", "dur": 0.001}] * 2
    )
    first, second = "1712195495519689.047", "1712195495519689.048"
    trace = read(text.replace('"@"', first, 1).replace('"@"', second, 1), chunks.CHUNK_BYTES)
    assert trace.ts_ns.tolist() == [1712195495519689047, 1712195495519689048]
    assert trace.dur_ns.tolist() == [1, 1]
