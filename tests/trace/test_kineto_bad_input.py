"""Bad input is a clear error or a limit, and what is whole in it is read."""

from __future__ import annotations

import gc
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.trace.reference import reference_rows, rows_of
from tracedoc.errors import InputError
from tracedoc.trace import source
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace


def event(name: str, ts: Any, dur: Any = 10, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}


def read(text: str | bytes, **options: Any) -> Trace:
    data = text.encode() if isinstance(text, str) else text
    return read_trace("t.json", stream=io.BytesIO(data), **options)


def names(trace: Trace) -> list[str]:
    return [trace.names[i] for i in trace.name.tolist()]


def codes(trace: Trace) -> list[str]:
    return [limit.code for limit in trace.limits]


EVENTS = [event(f"op{i}", 100 * i) for i in range(5)]
WHOLE = json.dumps({"distributedInfo": {"rank": 3, "world_size": 8}, "traceEvents": EVENTS}, indent=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"hello", "not JSON"),
        (b"\x00\x01\x02", "not JSON"),
        (b"PK\x03\x04rest", "zip archive"),
        ("[]".encode("utf-16"), "UTF-16"),
        (gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0), "gzipped twice"),
        (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94K\x01a.", "is a pickle"),
        (b"{}", "no traceEvents"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": []}', "no events"),
        (b"[]", "no events"),
        (b"[1, 2]", "no events"),
        (b'{"schema": "1.1", "pid": 1, "nodes": [1]}', "execution trace"),
        (b'{"traceEv', "cut off before its first"),
        (b'{"traceEvents": [{"ph": "X", ', "cut off before its first whole event"),
        (b'[{"ph": "X", "cat": "forward", "name": "f", "ts": 1, "dur": 2}]', "not one of PyTorch's profiler"),
        (b'[{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]', "holds no events"),
        (
            b'[{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},'
            b'{"ph": "b", "cat": "f", "name": "1", "id": 1, "pid": 0, "tid": 0, "ts": 1},'
            b'{"ph": "e", "cat": "f", "name": "1", "id": 1, "pid": 0, "tid": 0, "ts": 9}]',
            "none of its 2 events is complete",
        ),
        (b'[{"ph": "B", "name": "f", "pid": 0, "tid": 0, "ts": 1}]', "none of its 1 events is complete"),
        (
            b'[{"ph": "X", "name": "aten::mm", "pid": "CPU functions", "tid": 1, "ts": 1, "dur": 2}]',
            "legacy torch.autograd profiler",
        ),
        (
            b'[{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},'
            b'{"ph": "X", "pid": 1, "tid": 14, "ts": 10.5, "dur": 2.1, "name": "fusion_1"}]',
            "JAX or TensorFlow",
        ),
        (
            b'{"traceEvents": [{"ph": "M", "pid": 0, "name": "process_name",'
            b'"args": {"name": "/job:localhost/replica:0/task:0/device:GPU:0 Compute"}},'
            b'{"cat": "Op", "ph": "X", "pid": 0, "tid": 0, "ts": 10, "dur": 2, "name": "MatMul"}]}',
            "JAX or TensorFlow",
        ),
    ],
)
def test_what_is_no_trace_is_called_by_its_name(text: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(text)
    assert caught.value.hint


def test_every_prefix_gives_its_whole_events_or_an_error() -> None:
    ends = [WHOLE.index(f'"op{i}"') for i in range(5)]
    refused = 0
    for length in range(len(WHOLE) - 1):
        try:
            trace = read(WHOLE[:length])
        except InputError:
            refused = length
            continue
        assert trace.info.truncated or length >= len(WHOLE) - 2
        assert names(trace) == [f"op{i}" for i in range(len(trace))]
        assert len(trace) >= sum(end < length for end in ends) - 1
    assert refused < ends[1]


def test_prefixes_of_a_real_trace_keep_all_whole_events(shared_traces: Path) -> None:
    path = shared_traces / "format_variants" / "torch_compile_triton.json.gz"
    text = gzip.decompress(path.read_bytes())
    rows = reference_rows(text.decode())
    sizes = []
    for length in range(len(text) // 3, len(text), len(text) // 60):
        trace = read(text[:length])
        assert codes(trace) == ["truncated-trace"]
        assert set(rows_of(trace)) <= set(rows)
        sizes.append(len(trace))
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 0.9 * len(rows)


def test_a_truncated_trace_is_a_limit_and_with_strict_an_error() -> None:
    cut = WHOLE[: WHOLE.index('"op3"')]
    trace = read(cut)
    assert names(trace) == ["op0", "op1", "op2"]
    assert trace.info.truncated
    assert trace.info.rank == 3
    assert f"byte {len(cut)}" in trace.limits[0].message
    assert "3 whole events" in trace.limits[0].message
    with pytest.raises(InputError, match="ends in the middle"):
        read(cut, strict=True)


@pytest.fixture(params=["isal", "the standard library"])
def inflater(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "isal":
        pytest.importorskip("isal", reason="isal is not installed")
    else:
        monkeypatch.setattr(source, "_inflate", zlib)


@pytest.mark.usefixtures("inflater")
def test_truncated_gzip_is_read_as_far_as_it_goes() -> None:
    events = [event(f"op{i}", i, random=str(i * 7919 % 104729)) for i in range(20000)]
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    trace = read(packed[: len(packed) // 2])
    assert codes(trace) == ["truncated-trace"]
    assert 5000 < len(trace) < 20000
    assert names(trace) == [f"op{i}" for i in range(len(trace))]
    with pytest.raises(InputError, match="cut off before its first"):
        read(packed[:12])


@pytest.mark.usefixtures("inflater")
def test_gzip_of_several_members_and_padding_is_one_file() -> None:
    data = WHOLE.encode()
    packed = gzip.compress(data[:100]) + gzip.compress(data[100:]) + b"\0" * 512
    assert names(read(packed)) == ["op0", "op1", "op2", "op3", "op4"]
    assert codes(read(packed)) == []


@pytest.mark.usefixtures("inflater")
def test_corrupt_gzip_is_read_up_to_the_damage() -> None:
    events = [event(f"op{i}", i, random=str(i * 7919 % 104729)) for i in range(20000)]
    packed = bytearray(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    packed[len(packed) // 2 :] = b"\xff" * (len(packed) - len(packed) // 2)
    trace = read(bytes(packed))
    # What stands behind the damage may inflate to anything.
    assert "truncated-trace" in codes(trace)
    assert names(trace)[:5000] == [f"op{i}" for i in range(5000)]


@pytest.mark.parametrize("token", ["NaN", "inf", "-inf", "Infinity", "N/A"])
def test_bare_tokens_in_arguments_lose_no_event(token: str) -> None:
    trace = read(WHOLE.replace('"args": {}', f'"args": {{"blocks per SM": {token}, "correlation": 7}}'))
    assert names(trace) == ["op0", "op1", "op2", "op3", "op4"]
    assert trace.correlation.tolist() == [7] * 5
    assert codes(trace) == []


@pytest.mark.parametrize(
    "damage",
    ['"op2": "x', '"a "quoted" name"', '"back\\slash"', '"op2", "args": {"x": }, "y": "'],
)
def test_a_damaged_event_is_skipped_and_counted(damage: str) -> None:
    trace = read(WHOLE.replace('"op2"', damage))
    assert names(trace) == ["op0", "op1", "op3", "op4"]
    assert codes(trace) == ["damaged-events"]
    assert f"byte {WHOLE.rindex('{', 0, WHOLE.index('op2')):,}" in trace.limits[0].message


def test_damage_in_the_last_event_does_not_hide_the_metadata_behind_it() -> None:
    text = json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 5}}).replace('"op4"', '"o"p4"')
    trace = read(text)
    assert names(trace) == ["op0", "op1", "op2", "op3"]
    assert trace.info.rank == 5
    assert not trace.info.truncated


@pytest.mark.parametrize("between", ["", "\n", "\n\n "])
def test_a_second_text_behind_the_first_is_told_and_not_read(between: str) -> None:
    trace = read(WHOLE + between + WHOLE)
    assert names(trace) == ["op0", "op1", "op2", "op3", "op4"]
    assert codes(trace) == ["damaged-events"]
    assert f"another JSON text begins at byte {len(WHOLE + between):,}" in trace.limits[0].message
    bare = json.dumps(EVENTS)
    assert codes(read(bare + between + bare)) == ["damaged-events"]
    assert codes(read(WHOLE + between + "\0\0")) == []


def test_events_in_several_lists_are_all_read() -> None:
    first, second = json.dumps(EVENTS[:2]), json.dumps(EVENTS[2:])
    text = f'{{"traceEvents": {first}, "a": 1, "traceEvents": [], "traceEvents": {second}, "host_name": "h"}}'
    trace = read(text)
    assert names(trace) == ["op0", "op1", "op2", "op3", "op4"]
    assert (trace.info.host, codes(trace)) == ("h", [])


@pytest.mark.parametrize("whole", [0, 70_000], ids=["at once", "later"])
def test_a_disk_that_fails_is_an_error(whole: int) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= whole:
                raise OSError(5, "Input/output error")
            return super().read(size)

        def readinto(self, target: Any) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(InputError, match=r"t\.json cannot be read: Input/output error"):
        read_trace("t.json", stream=Failing(WHOLE.encode() * 200))


def test_bytes_that_are_not_utf8_cost_nothing_but_their_character() -> None:
    trace = read(WHOLE.encode().replace(b'"op2"', b'"op\xff2"'))
    assert names(trace) == ["op0", "op1", "op\ufffd2", "op3", "op4"]


@pytest.mark.parametrize(
    "bad",
    ["1e300", "-1e300", "NaN", '"soon"', "null", "9223372036854775807", "[]", '"1e30"', "1E+999999999"],
)
def test_events_at_impossible_times_are_left_out(bad: str) -> None:
    trace = read(WHOLE.replace('"ts": 200,', f'"ts": {bad},'))
    assert names(trace) == ["op0", "op1", "op3", "op4"]
    assert codes(trace) == ["impossible-times"]
    assert "without a possible time or length: 1;" in trace.limits[0].message
    with pytest.raises(InputError, match="without a possible time or length"):
        read(WHOLE.replace('"ts": 200,', f'"ts": {bad},'), strict=True)


@pytest.mark.parametrize(
    ("ts", "dur"),
    [("-3.9e15", 10), ("9.1e15", 10), ("9999999999999999", 10), ("9999999999999999.999", 10), ("200", 1e13)],
)
def test_times_whose_differences_would_overflow_are_impossible(ts: str, dur: float) -> None:
    events = [event("a", 1), event("b", "@", dur), event("c", 3.9e15), event("d", -0.9e15)]
    trace = read(json.dumps({"traceEvents": events}).replace('"@"', ts))
    assert names(trace) == ["d", "a", "c"]
    assert codes(trace) == ["impossible-times"]
    assert int(trace.end_ns.max()) - int(trace.ts_ns.min()) < 2**63


def test_an_event_without_a_duration_is_no_instant() -> None:
    lacking = {name: value for name, value in event("b", 2).items() if name != "dur"}
    instant = {**lacking, "ph": "i", "name": "c"}
    trace = read(json.dumps({"traceEvents": [event("a", 1, 5), lacking, instant]}))
    assert (names(trace), trace.dur_ns.tolist()) == (["a", "c"], [5000, 0])
    assert "without a possible time or length: 1;" in trace.limits[0].message


def test_negative_durations_count_as_instants() -> None:
    trace = read(json.dumps({"traceEvents": [event("a", 1, -5), event("b", 2, 3)]}))
    assert trace.dur_ns.tolist() == [0, 3000]
    assert codes(trace) == ["impossible-times"]


def test_hostile_names_are_just_names() -> None:
    hostile = ['"},{"', "\u0000", "<script>alert(1)</script>", "🔥", "},\n  {", '"traceEvents": [', "]", ""]
    trace = read(json.dumps([event(name, i) for i, name in enumerate(hostile)]))
    assert names(trace) == hostile


def test_deep_nesting_and_huge_integers_break_nothing() -> None:
    deep: Any = {"x": 1}
    for _ in range(100):
        deep = [{"d": deep}]
    odd = event(
        "odd", 2, cat="gpu_memcpy", deep=deep, big=10**30, correlation=10**25, stream=2**70, bytes="64"
    )
    trace = read(json.dumps({"traceEvents": [event("a", 1), odd, event("b", 3)]}))
    assert names(trace) == ["a", "odd", "b"]
    assert trace.correlation.tolist() == [-1, -1, -1]
    assert trace.stream.tolist() == [-1, -1, -1]
    assert trace.nbytes.tolist() == [-1, 64, -1]


COMMS = {"Collective name": "allreduce", "In msg nelems": 7, "dtype": "Float", "Process Group Name": "1"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"Process Group Description": "a { b"},
        {"Process Group Description": "a } b"},
        {"Process Group Description": '{"Collective name": "other"}'},
        {"config": {"depth": {"x": 1}}},
        {"config": [{}, {}]},
        {f"config {i}": {} for i in range(100)},
    ],
    ids=lambda more: str(more)[:50],
)
@pytest.mark.parametrize("first", [True, False])
def test_what_collectives_say_may_hold_braces(more: dict[str, Any], first: bool) -> None:
    args = {**more, **COMMS, "Seq": 5} if first else {**COMMS, "Seq": 5, **more}
    events = [
        event("a", 1),
        event("record_param_comms", 2, **args),
        event("b", 3, **{"Collective name": None}),
    ]
    trace = read(json.dumps({"traceEvents": events}))
    assert names(trace) == ["a", "record_param_comms", "b"]
    assert list(trace.collectives) == [1]
    said = trace.collectives[1]
    assert (said.name, said.in_elements, said.dtype, said.group_name, said.seq) == (
        "allreduce", 7, "Float", "1", 5,
    )  # fmt: skip


def test_braces_in_texts_around_the_name_of_a_collective_do_not_hide_it() -> None:
    args = {"before": "}", **COMMS, "after": "{"}
    trace = read(json.dumps({"traceEvents": [event("a", 1), event("c", 2, **args), event("b", 3)]}))
    assert {row: said.name for row, said in trace.collectives.items()} == {1: "allreduce"}


def test_counts_that_cannot_be_are_unknown() -> None:
    args = {**COMMS, "In msg nelems": 2**62, "Out msg nelems": -1, "Group size": 2**31}
    trace = read(json.dumps({"traceEvents": [event("record_param_comms", 2, **args)]}))
    said = trace.collectives[0]
    assert (said.in_elements, said.out_elements, said.group_size) == (None, None, None)


def test_lists_and_objects_for_names_are_texts() -> None:
    odd = event("x", 1) | {"name": ["a", 1], "tid": {"b": 2}}
    trace = read(json.dumps({"traceEvents": [odd, odd | {"ts": 1.5}, event("c", 2)]}))
    assert names(trace) == ["['a', 1]", "['a', 1]", "c"]
    assert [trace.threads[i].tid for i in trace.thread.tolist()] == ["{'b': 2}", "{'b': 2}", "2"]


def test_numbers_with_huge_exponents_are_no_ids() -> None:
    text = json.dumps([event("a", 1, stream="@", correlation="@"), event("b", "2")])
    trace = read(text.replace('"@"', "3.1E+999999999"))
    assert names(trace) == ["a", "b"]
    assert trace.correlation.tolist() == [-1, -1]


def test_keys_that_are_not_text_are_damage(tmp_path: Path) -> None:
    trace = read('{"traceEvents": ' + json.dumps(EVENTS) + ', {"a": 1}: 2}')
    assert len(trace) == 5


def test_nesting_beyond_the_parser_is_damage() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = json.dumps([event("a", 1), event("b", 2, x="@"), event("c", 3)]).replace('"@"', deep)
    trace = read(text)
    assert names(trace) == ["a", "c"]
    assert codes(trace) == ["damaged-events"]


def test_values_of_unexpected_types_are_read_loosely() -> None:
    events = [
        {**event("a", "1.5", "2.25"), "pid": "Spans", "tid": "stream 7"},
        {**event("k", 3, 1, "kernel"), "pid": "0", "tid": "stream 7", "args": []},
        {**event("b", 4), "args": None},
    ]
    trace = read(json.dumps(events))
    assert trace.ts_ns.tolist() == [1500, 3000, 4000]
    assert trace.dur_ns.tolist() == [2250, 1000, 10000]
    assert (trace.device.tolist(), trace.stream.tolist()) == ([-1, 0, -1], [-1, 7, -1])


@pytest.mark.parametrize("rest", [b"\0" * 700, b"x", b"and then some"])
def test_what_follows_a_gzip_member_and_is_none_is_ignored(rest: bytes) -> None:
    trace = read(gzip.compress(WHOLE.encode()) + rest)
    assert (len(trace), trace.info.truncated, codes(trace)) == (5, False, [])


def test_the_garbage_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(InputError):
        read(b"nonsense")
    assert gc.isenabled()
    gc.disable()
    try:
        read(WHOLE)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_progress_counts_the_stored_bytes() -> None:
    seen: list[int] = []
    packed = gzip.compress(WHOLE.encode())
    read(packed, on_bytes=seen.append)
    assert sum(seen) == len(packed)


def test_a_path_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)


def test_a_gzip_bomb_is_refused_and_the_limit_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    one = json.dumps(event("a", 1)).encode()
    path.write_bytes(gzip.compress(b"[" + one + b"," + b" " * 150_000_000 + one + b"]", 6))
    with pytest.raises(InputError, match="more than 100 times its size") as caught:
        read_trace(path)
    assert "--max-bytes" in caught.value.hint
    assert len(read_trace(path, max_bytes=200_000_000)) == 2


def test_max_bytes_bounds_plain_files_too() -> None:
    assert len(read(WHOLE, max_bytes=len(WHOLE))) == 5
    with pytest.raises(InputError, match=f"more than {len(WHOLE) - 1:,} bytes of JSON") as caught:
        read(WHOLE, max_bytes=len(WHOLE) - 1)
    assert caught.value.hint == "raise --max-bytes to read it"


def test_a_file_of_blanks_is_empty_and_quickly_so(tmp_path: Path) -> None:
    path = tmp_path / "blank.json.gz"
    path.write_bytes(gzip.compress(b" \n" * 20_000_000, 1))
    with pytest.raises(InputError, match="is empty"):
        read_trace(path)


def test_blanks_between_events_are_skipped_quickly(tmp_path: Path) -> None:
    one = json.dumps(event("a", 1)).encode()
    path = tmp_path / "blank.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + one + b"," + b" \n" * 20_000_000 + one + b"]}", 1))
    assert len(read_trace(path)) == 2


def test_ranks_that_cannot_be_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '{"distributedInfo": {"rank": -1, "world_size": -5}, "traceEvents": ['
        '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}]}'
    )
    info = read_trace(path).info
    assert (info.rank, info.world_size) == (None, None)


@pytest.mark.parametrize("ranks", ["[0, " + "9" * 5000 + "]", "[0, 99999999999999999999]", "[0, 1, ..., 7]"])
def test_a_list_of_ranks_that_cannot_be_costs_no_event(ranks: str) -> None:
    args = {"Collective name": "allreduce", "Process Group Ranks": ranks, "Group size": 8}
    trace = read(json.dumps({"traceEvents": [event("record_param_comms", 1, **args)]}))
    (collective,) = trace.collectives.values()
    assert (collective.group_ranks, collective.group_size) == ((), 8)


def test_an_event_without_a_time_beside_exact_ones_is_left_out():
    exact = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "a",
        "pid": 1,
        "tid": 1,
        "ts": 1712195495519689.047,
        "dur": 1,
    }
    timeless = {"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "dur": 1}
    trace = read(json.dumps([exact, timeless, exact]).encode())
    assert [trace.row_name(row) for row in range(len(trace))] == ["a", "a"]
    assert [limit.code for limit in trace.limits] == ["impossible-times"]
