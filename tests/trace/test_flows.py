"""Which operators a backward pass goes back to, by the arrows of a file."""

from __future__ import annotations

from pathlib import Path

from tracedoc.trace.flows import differentiated

ARROW = b'{"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "ts": %s}'


def test_arrows_begin_at_their_operators(tmp_path: Path) -> None:
    """In order, in ns; the end of an arrow and what is no text are left out."""
    end = b'{"ph": "f", "id": 1, "cat": "fwdbwd", "ts": 9.5}'
    damaged = b'{"ph": "X", "cat": "cpu_\xe3p", "ts": 5, "dur": 1}'
    events = b", ".join([ARROW % b"7.250", end, damaged, ARROW % b"3.5"])
    file = tmp_path / "source.json"
    file.write_bytes(b'{"baseTimeNanoseconds": 1000000, "traceEvents": [' + events + b"]}")
    assert differentiated(str(file)).tolist() == [1_003_500, 1_007_250]
