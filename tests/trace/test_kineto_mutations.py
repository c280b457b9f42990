"""Whatever happens to the bytes of a trace, it is read as far as it is whole, or refused with an error."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.trace.reference import reference_rows, rows_of
from tracedoc.errors import InputError
from tracedoc.trace import chunks
from tracedoc.trace.columns import Trace
from tracedoc.trace.kineto import read_trace

MUTATIONS = 300


def read(data: bytes, **options: Any) -> Trace:
    return read_trace("runs/rank-0.json.tmp", stream=io.BytesIO(data), **options)


@pytest.fixture(scope="module")
def real(shared_traces: Path) -> bytes:
    """About 60 kB of a real trace: its metadata and the first events."""
    text = gzip.decompress((shared_traces / "format_variants" / "torch_compile_triton.json.gz").read_bytes())
    document = json.loads(text)
    document["traceEvents"] = document["traceEvents"][:150]
    return json.dumps(document, indent=2).encode()


@pytest.mark.parametrize("every", [pytest.param(17, marks=pytest.mark.soak), 101])
def test_every_prefix_of_a_real_trace_is_read_or_refused(real: bytes, every: int) -> None:
    rows = reference_rows(real.decode())
    most = 0
    for length in [*range(0, len(real) - 2, every), len(real) - 3]:
        try:
            trace = read(real[:length])
        except InputError:
            assert most == 0
            continue
        assert [limit.code for limit in trace.limits] == ["truncated-trace"]
        assert set(rows_of(trace)) <= set(rows)
        assert len(trace) >= most
        most = len(trace)
    assert most == len(rows)


def mutated(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed))
        size = chance.choice((1, 1, 4, 60))
        kind = chance.randrange(5)
        if kind == 0:
            changed[at : at + size] = chance.randbytes(size)
        elif kind == 1:
            del changed[at : at + size]
        elif kind == 2:
            changed[at:at] = chance.choice((b'"', b"\\", b"{", b"}", b"]", b",", b"inf", b"NaN", b"},\n  {"))
        elif kind == 3:
            changed[at:at] = changed[at : at + size * 20]
        else:
            changed[at : at + size] = b"9" * size
    return bytes(changed)


@pytest.mark.parametrize("chunk_bytes", [512, chunks.CHUNK_BYTES])
def test_mutations_are_read_or_refused(
    real: bytes, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    start = real.index(b'"traceEvents"')
    data = real[:start] + real[start : start + 12_000]
    whole = len(read(data))
    lost = []
    for seed in range(MUTATIONS // 2):
        try:
            trace = read(mutated(data, seed))
        except InputError:
            continue
        lost.append(whole - len(trace))
    # Most mutations break one event, or none.
    assert sorted(lost)[len(lost) // 2] <= 2
    assert len(lost) > 0.8 * MUTATIONS // 2


EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": f"op{i}", "pid": 1, "tid": 2, "ts": i, "dur": 1, "args": {}}
    for i in range(6)
]
TEXT = json.dumps({"traceEvents": EVENTS}).encode()


@pytest.mark.parametrize(
    ("data", "code", "kept", "says"),
    [
        (TEXT[:-50], "truncated-trace", 5, f"byte {len(TEXT) - 50:,}"),
        (gzip.compress(TEXT)[:-14], "truncated-trace", None, "byte "),
        (
            TEXT.replace(b'"op3"', b'"o"p3"'),
            "damaged-events",
            5,
            "byte " + str(TEXT.index(json.dumps(EVENTS[3]).encode())),
        ),
        (TEXT.replace(b'"op3"', b'"op3", "x": nope'), "damaged-events", 5, "1 place"),
        (TEXT.replace(b'"op2"', b'"o"p2"').replace(b'"op4"', b'"o"p4"'), "damaged-events", 4, "2 places"),
    ],
)
def test_salvage_names_file_place_and_events_and_strict_refuses(
    data: bytes, code: str, kept: int | None, says: str
) -> None:
    trace = read(data)
    assert [limit.code for limit in trace.limits] == [code]
    message = trace.limits[0].message
    assert message.startswith("runs/rank-0.json.tmp")
    assert says in message
    assert f"{len(trace)} whole events were read" in message
    assert kept is None or len(trace) == kept
    with pytest.raises(InputError) as caught:
        read(data, strict=True)
    assert caught.value.message == message
