"""Diagnose a small run beside mutants of its manifest and step logs: no traceback, no hang.

python soak/fuzz_manifests.py [--count 2000] [--from 0]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz_traces import diagnose, odd
from trial import repeat

from tracedoc.run.manifest import PART_SUFFIX
from tracedoc.run.steplog import CAPACITY, COLLECTION, HEADER, MAGIC, RECORD, STEP, WINDOW
from tracedoc.testing import TraceBuilder, parse_lanes
from tracedoc.testing.cases import draw_log

LANES = "compute 0-60\nallreduce 60-100 256MiB"
NAMES = ("..", "../x", "/dev/zero", "a\0b", "\ud800", "x" * 5000, "pipe", "link", "folder", "rank-1.json", "")


def manifest(ranks: int) -> dict[str, Any]:
    """Return a manifest with something in every field that is read."""
    time = {"median_ms": 100.0, "steps": 10}
    entry = {
        "host": "node",
        "pid": 5,
        "world_size": ranks,
        "state": "complete",
        "reason": "",
        "level": "full",
        "restart": 0,
        "steps": {"first": 6, "recorded": 6, "asked": 6, "total": 60},
        "step_ms": {"before": time, "during": time, "after": time},
        "environment": {
            "gpu": {"name": "NVIDIA H100"},
            "variables": {"NCCL_DEBUG": "TRACE", "NCCL_IB_DISABLE": "1"},
            "host": {"cpus": 8, "cpus_allowed": 4, "cgroup_cpus": 2.5, "affinity": "0-3"},
        },
        "framework": {
            "loaders": [{"batch_size": 8, "num_workers": 2, "prefetch_factor": 2, "pin_memory": True}],
            "ddp": [{"bucket_bytes_cap": 26214400, "find_unused_parameters": True, "static_graph": False}],
            "deepspeed": [{"zero_optimization_stage": 2}],
            "model": {"parameters": 10**7, "block": {"count": 4, "parameters": 10**6, "class": "Block"}},
        },
        "nccl": {"transports": {"P2P/CUMEM": 4, "NET/IB": 2}, "network": "IB"},
        "memory": {"total_bytes": 10**11, "peak_reserved_bytes": 10**10, "peak_allocated_bytes": 10**10},
        "window": {
            "clocks": {"throttled_frac": {"power": 0.5}},
            "counters": {"cgroup.cpu.nr_periods": 10, "cgroup.cpu.nr_throttled": 5},
            "training_thread": {"steps": 6, "ran_us": 5000, "waited_us": 700},
        },
        "json_bytes": 10**6,
        "end": "the job ended",
        "ended": "2026-01-01T00:00:00+00:00",
    }
    entries = {
        str(rank): {
            **json.loads(json.dumps(entry)),
            "file": f"rank-{rank}.json",
            "step_log": f"rank-{rank}.steps",
            "source": f"rank-{rank}.source.gz",
        }
        for rank in range(ranks)
    }
    node = {"schema": 1, "part": "node", "host": "node", "ended": "now", "exit_code": 1, "pid": 7}
    return {"schema": 1, "run": "r", "state": "complete", "attempt": 0, "nodes": [node], "ranks": entries}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value: its container and key."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        found.append((value, key))
        found += places(inside)
    return found


def change(dice: random.Random, content: dict[str, Any]) -> None:
    """Give some places other values, take some away, put some where they do not belong."""
    for _ in range(dice.choice([1, 1, 2, 5, 20])):
        everywhere = places(content)
        if not everywhere:
            return
        container, key = dice.choice(everywhere)
        what = dice.random()
        if what < 0.15 and isinstance(container, dict):
            del container[key]
        elif what < 0.3:
            other, other_key = dice.choice(everywhere)
            container[key] = json.loads(json.dumps(other[other_key]))
        elif key in ("file", "step_log", "source") or what < 0.4:
            container[key] = dice.choice(NAMES)
        elif what < 0.5 and isinstance(container, dict):
            container[dice.choice(["0", "1", "999999", "-1", "x", "1" * 5000, "\u0663"])] = container[key]
        else:
            container[key] = odd(dice)


def log(dice: random.Random) -> bytes:
    """Return a step log that is drawn well, or of any records, or of any bytes."""
    what = dice.random()
    if what < 0.3:
        return draw_log(dice.choice(["100 x50", "100 x30 400 gc 300 100 x30", "0 x40", "50 x20 90 50 x20"]))
    if what < 0.4:
        return dice.randbytes(dice.choice([0, 5, 24, 60, 5000]))
    records = [HEADER.pack(MAGIC, dice.choice([0, 1, 2**32 - 1]), CAPACITY, dice.choice([0, -1, 2**62]))]
    end = 1_700_000_000_000_000_000
    for number in range(dice.choice([0, 1, 30, 200])):
        end += dice.choice([10**8, 10**8, 0, -(10**9), 10**15])
        length = dice.choice([10**8, 10**8, 0, 1, 10**13, -5, 2**62])
        kind = dice.choice([STEP, STEP, STEP, COLLECTION, WINDOW, 0, 9, 2**32 - 1])
        index = dice.choice([number, number, number, 0, 2**32 - 1])
        records.append(RECORD.pack(index, kind, dice.choice([end, end, end, -1, 2**63 - 1]), length))
    content = b"".join(records)
    return content[: dice.randint(0, len(content))] if dice.random() < 0.2 else content


def source(dice: random.Random) -> bytes:
    """Return a step with Python stacks, sometimes with frames of odd times, or damaged."""
    builder = TraceBuilder(rank=0, device=None)
    for number in range(dice.choice([1, 30, 300])):
        name = dice.choice(
            ["train.py(40): main", "<built-in method item of Tensor object at 0x7f>", "torch/x.py(1): f"]
        )
        begin = dice.choice([0.0, 1.0 * number, dice.uniform(0, 100)])
        thread = dice.choice(["main", "main", "other"])
        end = begin + dice.choice([0.0, 1.0, 50.0])
        builder.host(name, begin, end, category="python_function", thread=thread)
    packed = gzip.compress(builder.to_json().encode())
    return packed if dice.random() < 0.8 else packed[: dice.randint(0, len(packed))]


def write(number: int, folder: Path) -> Path:
    """Write mutant ``number`` into a folder of its own, and return that."""
    dice = random.Random(number)
    run = folder / str(number)
    run.mkdir()
    ranks = dice.choice([2, 2, 3])
    for rank, builder in enumerate(parse_lanes(LANES, ranks=ranks)):
        if dice.random() < 0.95:
            builder.write(run / f"rank-{rank}.json")
        (run / f"rank-{rank}.steps").write_bytes(log(dice))
        if rank == 0:
            (run / "rank-0.source.gz").write_bytes(source(dice))
    os.mkfifo(run / "pipe")
    (run / "folder").mkdir()
    (run / "link").symlink_to(dice.choice(["/dev/zero", "link", "..", "pipe", "/etc/hostname"]))
    content = manifest(ranks)
    change(dice, content)
    if dice.random() < 0.25:
        # No launcher lived to merge what the ranks wrote.
        listed = content.get("ranks")
        parts = list(listed.items()) if isinstance(listed, dict) else []
        for place, (rank, part) in enumerate(parts):
            if isinstance(part, dict):
                part = {"schema": 1, "part": "rank", "rank": int(rank[:9]) if rank.isdecimal() else 0, **part}
                name = f"part-{place}{PART_SUFFIX}"
                (run / name).write_text(json.dumps(part))
        if dice.random() < 0.3:
            os.mkfifo(run / f"other{PART_SUFFIX}")
        return run
    text = json.dumps(content).encode()
    if dice.random() < 0.1:
        text = text[: dice.randint(0, len(text))]
    if dice.random() < 0.1:
        text = text.replace(b'"schema"', b'"schema": 1, "ranks": 5, "schema"', 1)
    (run / "manifest.json").write_bytes(text)
    return run


def main() -> int:
    """Try the mutants that the command line names; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:

        def trial(number: int) -> str:
            folder = write(number, Path(scratch))
            try:
                return diagnose(folder, number)
            finally:
                shutil.rmtree(folder)

        return repeat("manifests", range(given.first, given.first + given.count), trial)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
