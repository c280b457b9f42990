"""Both readers make the same of everything: whole traces, damaged ones, and values of unusual types."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace import test_kineto_hostile
from tests.trace.both_readers import assert_alike, read
from tests.trace.test_kineto_layouts import documents
from tests.trace.test_kineto_mutations import mutated
from tests.trace.test_kineto_real import real_traces
from tracedoc.errors import InputError
from tracedoc.testing import TraceBuilder
from tracedoc.trace import chunks, reader
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace
from tracedoc.trace.reader import ChunkScanner

BEGINNING = 4_000_000
"""So many bytes of a real trace have all that it has; four of them are longer, and are cut off there."""

OPTIONS: list[dict[str, Any]] = [{}, {"long_frames": True}, {"python_functions": True}]


def built() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(reader.VARIABLE, "")
        return reader.scanner_type() is not None


needs_scanner = pytest.mark.skipif(not built(), reason="the native scanner is not built here")


def event(**fields: Any) -> dict[str, Any]:
    """Return a plain kernel with some fields replaced; ``None`` leaves one out."""
    plain = {
        "ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10.5, "dur": 2.25,
        "args": {"External id": 3, "device": 0, "stream": 7, "correlation": 12, "grid": [1, 2, 3]},
    }  # fmt: skip
    return {key: value for key, value in (plain | fields).items() if value is not None}


def text_of(*events: dict[str, Any]) -> bytes:
    return json.dumps({"traceEvents": [event(), *events, event(ts=99)]}).encode()


@needs_scanner
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_real_trace(shared_traces: Path, whole: bool) -> None:
    one_of_each, others = real_traces(shared_traces)
    for path in [*one_of_each, *others] if whole else one_of_each:
        text = gzip.decompress(path.read_bytes())
        assert_alike(text if whole else text[:BEGINNING], long_frames=True)


@needs_scanner
def test_plain_traces_are_scanned(
    shared_traces: Path, sample_traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = []
    part = ChunkScanner.part

    def counted(self: ChunkScanner, buffer: bytearray, begin: int, end: int) -> Any:
        scanned.append(found := part(self, buffer, begin, end))
        return found

    monkeypatch.setattr(ChunkScanner, "part", counted)
    a100 = shared_traces / "ddp_resnet_a100_2rank_r0" / "nccl_data.json.gz"
    for path in (a100, *sorted(sample_traces.rglob("rank*.json.gz"))[:3]):
        scanned.clear()
        assert isinstance(read(gzip.decompress(path.read_bytes()), "native"), Trace)
        assert scanned
        assert all(found is not None for found in scanned)


ODD_VALUES: list[Any] = [
    True, False, [], {}, "", "7", "-7", "07", "stream 7", "0x0", "é", 'a"b\\', "\ud7ff", 7.0, 7.5, -1, 0,
    2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**18, 10**19, 10**400, 1e300, 1e-7, "1e3", "null", "a{b", "}",
]  # fmt: skip
FIELDS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]
ARGUMENTS = [
    "External id", "external id", "correlation", "device", "stream", "bytes", "grid", "Collective name",
    "Input Dims", "Input type", "Input Strides", "wait_on_stream", "wait_on_cuda_event_record_corr_id",
    "Device Type", "note",
]  # fmt: skip


@needs_scanner
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("field", [*FIELDS, *ARGUMENTS])
def test_odd_values(field: str, every: int) -> None:
    """Every third value is in an event of one category: each is in all of them somewhere."""
    for place, value in enumerate(ODD_VALUES, [*FIELDS, *ARGUMENTS].index(field)):
        for turn, category in enumerate(("kernel", "cuda_sync", "python_function")):
            if (place + turn) % every:
                continue
            args = {"args": event()["args"] | {field: value}} if field in ARGUMENTS else {field: value}
            text = text_of(event(**({"cat": category, "name": "aten::mm"} | args)))
            assert_alike(text, long_frames=True)
            assert_alike(text.replace(b"10.5", b"1712195495519689.047"), long_frames=True)


@needs_scanner
@pytest.mark.parametrize("field", [*FIELDS, *ARGUMENTS])
def test_null_missing_and_doubled_keys(field: str) -> None:
    for category in ("kernel", "python_function"):
        with_all = event(cat=category, args=dict.fromkeys(ARGUMENTS, 5))
        plain = json.dumps(with_all)
        key = json.dumps(field)
        missing = json.loads(plain)
        (missing["args"] if field in ARGUMENTS else missing).pop(field)
        value = json.dumps(with_all["args"][field] if field in ARGUMENTS else with_all[field])
        once = f"{key}: {value}"
        variants = [
            json.dumps(missing),
            plain.replace(once, f"{key}: null"),
            plain.replace(once, f"{once}, {once}"),
            plain.replace(once, f"{once}, {key}: 3"),
            plain.replace(key, key.replace(field[0], f"\\u00{ord(field[0]):02x}", 1)),
        ]
        for variant in variants:
            for options in OPTIONS:
                assert_alike(f"[{variant},{plain},{plain}]".encode(), **options)
                exact = plain.replace("10.5", "1712195495519689.047")
                assert_alike(f"[{exact},{variant},{plain}]".encode(), **options)


NUMBERS = [
    "0", "-0", "00", "01", "1.", ".5", "+1", "-", "1.2345", "-1.5", "0.0005", "1e3", "1E-2", "9" * 15,
    "9" * 16, "9" * 17, "4000000000000000", "3999999999999999.999", "8796093022207.999", "8796093022208.001",
    "-8796093022208.001", "8796093022208", "1712195495519689.0475", "12.", "inf", "-inf", "NaN",
    "N/A", "null",
]  # fmt: skip


@needs_scanner
@pytest.mark.parametrize("number", NUMBERS)
def test_spellings_of_times(number: str) -> None:
    for field in ("ts", "dur"):
        text = json.dumps([event(), event(**{field: "@"}), event(name="l", ts=5)]).replace('"@"', number)
        assert_alike(text.encode())
        assert_alike(text.replace("10.5", "1712195495519689.047").encode())


JUNK = [
    b"[,]", b"[{},]", b'{"ph":"X",}', b'{"a":1,"ph":"X"}}', b"\xff", b'"\x01"', b"\xc0\x80", b"\xed\xa0\x80",
    b'"\\ud800"', b'"\\u12"', b'"\\x"', b"[" * 100 + b"]" * 100, b'"', b"tru", b"nul", b"[1 2]", b'{"a" 1}',
    b'{"a":}', b"\xf4\x90\x80\x80", "é".encode(), b"\x7f", b'"\\ud83d\\ude00"', b"",
]  # fmt: skip


@needs_scanner
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("junk", JUNK)
def test_junk_anywhere(junk: bytes, every: int) -> None:
    """Each kind of junk begins at another place, so that with every eleventh one all places have some."""
    whole = text_of(event(name="middle", args={"note": [1, "x"], "correlation": 5}))
    for at in range(whole.index(b"[") - 2 + JUNK.index(junk) % every, len(whole), every):
        assert_alike(whole[:at] + junk + whole[at:])


@needs_scanner
def test_every_prefix_of_a_trace() -> None:
    whole = text_of(event(cat="cpu_op", args={"Collective name": "allreduce", "dtype": "Float"}))
    for length in range(len(whole)):
        assert_alike(whole[:length], 64)


@needs_scanner
def test_braces_in_the_arguments_of_collectives() -> None:
    frame = event(cat="python_function", name="train.py(3): wait", dur=500)
    for note in ("{", "}", "{}", "}{", "plain"):
        args = {"note": note, "Collective name": "allreduce", "inner": {"x": 1}, "dtype": "Float"}
        assert_alike(text_of(event(args=args), frame), long_frames=True)


@needs_scanner
def test_new_names_in_every_chunk() -> None:
    """Names, places and shapes that are new, known, refused and known again, chunk by chunk."""
    chance = random.Random(5)
    events = []
    for i in range(600):
        pick = chance.randrange(i // 3 + 1)
        events.append(
            chance.choice(
                [
                    event(name=f"k{pick}", ts=i, args={"stream": pick % 5, "grid": [i % 3], "bytes": 9}),
                    event(cat="python_function", name=f"train.py({pick}): f", ts=i, dur=pick),
                    event(cat="python_function", name=f"torch/nn.py({pick}): f", ts=i, dur=200),
                    event(cat="cpu_op", name="aten::mm", ts=i, args={"Input Dims": [pick], "Input type": []}),
                    event(cat="cpu_op", name=f"op{pick}", ts=i, args={"Input Dims": [[pick]]}),
                    event(cat="cuda_sync", name="Stream Wait Event", ts=i,
                          args={"wait_on_stream": pick, "wait_on_cuda_event_record_corr_id": i}),
                    event(ph="i", name="[memory]", cat="cpu_instant_event", ts=i, dur=None,
                          args={"Device Type": 1, "Device Id": 0, "Total Allocated": i, "Total Reserved": 9}),
                    event(ph="M", cat=None, name="thread_name", tid=pick, args={"name": f"t{pick}"}),
                    event(name=f"k{pick}", ts=i, pid=str(pick)),
                    event(ph="i", name="[memory]", cat="cpu_op", ts=i, args=chance.choice([None, {}])),
                    event(name="odd", ts=str(i)),
                ]
            )
        )  # fmt: skip
    text = json.dumps(events).encode()
    for chunk_bytes in (512, 2048, 20_000):
        for options in OPTIONS:
            assert isinstance(assert_alike(text, chunk_bytes, **options), Trace)


@needs_scanner
def test_a_chunk_of_which_nothing_is_kept_is_read() -> None:
    """A Python frame that is left out, before any event that is kept."""
    flow = '{"ph": "s", "name": "aten::mm", "pid": 0, "tid": 1, "args": {}, "ts": 0}'
    frame = (
        '{"ph": "X", "name": "aten::mm", "pid": 0, "tid": 1, "cat": "python_function", "dur": 100, "ts": 0}'
    )
    last = '{"ph": "X", "cat": "cpu_op", "name": "last", "pid": 1, "tid": 1, "ts": 5, "dur": 1}'
    assert_alike(f"[{','.join([flow, flow, flow, frame, last])}]".encode(), 64, long_frames=True)


@needs_scanner
@settings(max_examples=40)
@given(documents(), st.sampled_from([64, 200, 1000, chunks.CHUNK_BYTES]), st.sampled_from(OPTIONS))
def test_layouts(document: tuple[str, int], chunk_bytes: int, options: dict[str, Any]) -> None:
    assert_alike(document[0].encode(), chunk_bytes, **options)


@needs_scanner
@pytest.mark.parametrize("chunk_bytes", [512, chunks.CHUNK_BYTES])
def test_mutations_of_a_real_trace(shared_traces: Path, chunk_bytes: int) -> None:
    path = shared_traces / "ddp_resnet_a100_2rank_r0" / "nccl_data.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    whole = json.dumps({"traceEvents": document["traceEvents"][2000:2040]}, indent=1).encode()
    for seed in range(200):
        assert_alike(mutated(whole, seed), chunk_bytes, **OPTIONS[seed % 3])


@needs_scanner
@pytest.mark.parametrize("case", ["nesting in an event", "empty objects", "boundaries in text", "names"])
def test_hostile_files(case: str) -> None:
    assert_alike(test_kineto_hostile.PLAIN[case][0](test_kineto_hostile.MB // 4))


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reader.VARIABLE, "python")
    assert reader.reader_name() == "python"
    monkeypatch.setenv(reader.VARIABLE, "fast")
    with pytest.raises(InputError, match="TRACEDOC_READER is 'fast'"):
        reader.reader_name()


def test_a_scanner_of_another_version_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LAYOUT", -1)
    monkeypatch.setenv(reader.VARIABLE, "")
    assert reader.reader_name() == "python"
    monkeypatch.setenv(reader.VARIABLE, "native")
    with pytest.raises(InputError, match="not built"):
        reader.reader_name()


@pytest.mark.parametrize("choice", ["python", pytest.param("native", marks=needs_scanner)])
def test_values_are_kept_of_sends_and_receives_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """Their third value is the other rank; those of other operators differ from call to call."""
    monkeypatch.setenv(reader.VARIABLE, choice)
    builder = TraceBuilder(0, 3, device=None)
    builder.collective("send", 0, 1, nbytes=64, peer=2)
    builder.host("aten::mm", 2, 3, dims=[[2, 2], [2, 2]], values=["", ""])
    trace = read_trace(builder.write(tmp_path / "rank-0.json"))
    values = {trace.row_name(row): shapes.values for row, shapes in trace.shapes.items()}
    assert values == {"c10d::send": ("", "", "2", "0"), "gloo:send": (), "aten::mm": ()}
