"""A small hostile file costs seconds and a few hundred megabytes at most.

The bounds are about ten times what such a file costs; without them it would take hours or all memory.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="resource limits are Unix's")

MB = 1_000_000
EVENT = json.dumps(
    {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 1, "dur": 2, "args": {}}
).encode()
BROKEN = b'{"ph": "X" "a"}'
LAST = b"," + EVENT + b"]"

Plain = tuple[Callable[[int], bytes], Callable[[int], int] | int | None]


def damaged(good: bytes) -> Plain:
    """One event of two is broken, 142 bytes or so for both."""
    return (
        lambda size: b"[" + (good + b"," + BROKEN + b",") * (size // 142) + EVENT + b"]",
        lambda size: size // 142 + 1,
    )


def keys(size: int) -> bytes:
    return b",".join(b'"%x":1' % i for i in range(size // 9))


# Plain files of so many bytes, and how many events must be read from each; None is an error.
PLAIN: dict[str, Plain] = {
    "nesting": (lambda size: b"[" * size, None),
    "nested objects": (lambda size: b'{"a":' * (size // 5), None),
    "nesting in an event": (lambda size: b"[" + EVENT + b',{"ph":"X","args":' + b"[" * size, 1),
    "numbers": (lambda size: b"[" + b"1," * (size // 2) + EVENT + b"]", None),
    "empty objects": (lambda size: b"[" + b"{}," * (size // 3) + EVENT + b"]", 1),
    # In these too many places are damaged to read on; of a quarter of the places more would be read.
    "damage only": (lambda _: b"[" + b'{"ph":x},' * (MB // 9) + EVENT + b"]", None),
    "boundaries in text": (lambda _: b"[" + EVENT + b"," + b'"},\n  {",' * (MB // 9) + EVENT + b"]", 1),
    "damage in every second": damaged(EVENT),
    "damage and bare tokens": damaged(EVENT.replace(b"{}", b'{"x": inf}')),
    "damage and odd types": damaged(EVENT.replace(b'"ts": 1', b'"ts": "1"')),
    "quotes": (lambda size: b"[" + EVENT + b"," + b'"' * size, 1),
    "commas": (lambda size: b"[" + EVENT + b"," * size + EVENT + b"]", 2),
    "digits": (lambda size: b"[" + EVENT.replace(b'"ts": 1', b'"ts": ' + b"9" * size) + LAST, 1),
    "keys before": (lambda size: b"{" + keys(size) + b',"traceEvents":[' + EVENT + b"]}", 1),
    "keys behind": (lambda size: b'{"traceEvents":[' + EVENT + b"]," + keys(size) + b"}", 1),
    "names": (
        lambda size: (
            b"["
            + b",".join(
                b'{"ph":"X","cat":"cpu_op","ts":1,"dur":1,"name":"%x"}' % i for i in range(size // 50)
            )
            + b"]"
        ),
        lambda size: size // 50,
    ),
}

# What gzip makes small: (begin, repeated, how often, end), and the events that must be read. A quarter of it
# has a quarter of the time and memory.
PACKED: dict[str, tuple[tuple[bytes, bytes, int, bytes], Callable[[int], int] | int | None]] = {
    "tiny events": (
        (b"[", b'{"ph":"X","cat":"cpu_op","ts":1,"dur":1},' * 30_000, 100, EVENT + b"]"),
        lambda times: 30_000 * times + 1,
    ),
    "one text": ((b"[" + EVENT + b',{"ph":"X","name":"', b"x" * MB, 120, b'"}' + LAST), 2),
    "one list": (
        (b"[" + EVENT + b',{"ph":"X","args":{"a":[', b"[]," * (MB // 3), 100, b"1]}}" + LAST),
        2,
    ),
    "metadata": ((b'{"a":[', b"[]," * (MB // 3), 100, b'1],"traceEvents":[' + EVENT + b"]}"), None),
    "metadata behind": (
        (b'{"traceEvents":[' + EVENT + b'],"a":[', b"[]," * (MB // 3), 100, b"1]}"),
        1,
    ),
    "keys": ((b"{", b'"":1,' * (MB // 5), 100, b'"traceEvents":[' + EVENT + b"]}"), None),
    "numbers": ((b"[", b"1," * (MB // 2), 100, EVENT + b"]"), None),
    "bomb": ((b"[" + EVENT + b",", b" " * MB, 1000, EVENT + b"]"), None),
}

QUARTER = pytest.param(4, id="quarter")
WHOLE = pytest.param(1, id="whole", marks=pytest.mark.soak)

# Reads each file that is named on its input in a fork of its own, so that Python starts once.
READER = """
import os, resource, sys
from tracedoc.errors import InputError
from tracedoc.trace.kineto import read_trace
for line in iter(sys.stdin.readline, ""):
    part, path = line.rstrip().split(" ", 1)
    if os.fork() == 0:
        seconds, size = 40 // int(part), 500_000_000 + 2_000_000_000 // int(part)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        try:
            print(len(read_trace(path)), flush=True)
        except InputError as error:
            assert error.hint
            print(None, flush=True)
        os._exit(0)
    print("ended with", os.wait()[1], flush=True)
"""

Check = Callable[[Path, "int | None", int], None]


@pytest.fixture(scope="module")
def check(repository: Path) -> Iterator[Check]:
    """Hold how many events are read of a file that is a ``part`` of the whole; None is an error."""
    child = subprocess.Popen(
        [sys.executable, "-c", READER],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )

    def ask(path: Path, expected: int | None, part: int) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{part} {path}\n")
        child.stdin.flush()
        said = [child.stdout.readline().strip()]
        while said[-1] and not said[-1].startswith("ended with"):
            said.append(child.stdout.readline().strip())
        assert said == [str(expected), "ended with 0"]

    with child:
        yield ask
        child.communicate()


@pytest.mark.parametrize("part", [QUARTER, WHOLE])
@pytest.mark.parametrize("case", PLAIN)
def test_a_small_hostile_file_costs_seconds(case: str, part: int, tmp_path: Path, check: Check) -> None:
    text, expected = PLAIN[case]
    path = tmp_path / "trace.json"
    path.write_bytes(text(MB // part))
    check(path, expected(MB // part) if callable(expected) else expected, part)


@pytest.mark.parametrize("part", [QUARTER, WHOLE])
@pytest.mark.parametrize("case", PACKED)
def test_a_small_hostile_archive_costs_seconds(case: str, part: int, tmp_path: Path, check: Check) -> None:
    (begin, repeated, times, end), expected = PACKED[case]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", 6) as file:
        file.write(begin)
        for _ in range(times // part):
            file.write(repeated)
        file.write(end)
    assert path.stat().st_size < 1.1 * MB
    check(path, expected(times // part) if callable(expected) else expected, part)
