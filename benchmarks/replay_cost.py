"""Measure what replaying costs: twenty fixes in three scenarios, of runs of many ranks, after reading."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from tracedoc.play.run_replay import RunReplay, replay_run
from tracedoc.ranks.run_view import RunView, build_run_view
from tracedoc.step.program import EncodedProgram
from tracedoc.step.rank_digest import RankDigest
from tracedoc.testing import TraceBuilder
from tracedoc.whatif.changes.registry import parse_request
from tracedoc.whatif.predictions import Prediction, predict
from tracedoc.worker import digest_file

KERNELS = 5_000
"""GPU events of a rank and step."""

BUCKETS = 30
STEPS = 4

FIXES = (
    "no-sync",
    "faster-host by=0.5",
    "faster-host by=0",
    "capture-graph",
    "fuse-optimizer",
    "feed-input",
    "faster-link by=2",
    "faster-link by=4",
    "faster-link by=100",
    "scale-bytes of=gradients by=0.5",
    "scale-bytes of=gradients by=0.25",
    "cap-buckets mib=50",
    "cap-buckets mib=100",
    "faster-kernels by=2",
    "faster-kernels of=matrix by=1.5",
    "faster-kernels of=pointwise by=2",
    "even-ranks",
    "even-rank rank=1",
    "share-work",
    "double-batch",
)


def write_rank(path: Path) -> Path:
    """Write a rank of a data-parallel job: kernels of 10 us on one stream, gradients reduced beside them."""
    builder = TraceBuilder(0, 256)
    kernel_ms, host_ms = 0.010, 0.006
    step_ms = KERNELS * kernel_ms + 4
    every = KERNELS // 2 // BUCKETS
    for step in range(STEPS):
        begin = step * step_ms
        builder.step(step, begin, begin + step_ms)
        builder.loader(begin, begin + 1)
        at = free = link = begin + 1
        for kernel in range(KERNELS - BUCKETS):
            at += host_ms
            free = max(free, at + 0.008)
            if kernel == KERNELS // 2:
                builder.backward(at, begin + step_ms - 3, thread="main")
            builder.kernel(f"sgemm_{kernel % 9}", free, free + kernel_ms - 0.001, launch_ms=at)
            free += kernel_ms
            if kernel > KERNELS // 2 and kernel % every == 0:
                link = max(link, free)
                builder.collective(
                    "allreduce", link + 0.006, link + 0.5, nbytes=25 << 20, stream=20, launch_ms=at + 0.003
                )
                link += 0.5
        builder.runtime("cudaDeviceSynchronize", at + 0.01, max(free, link) + 0.02)
    builder.write(path)
    return path


def view_of(ranks: int, folder: Path) -> RunView:
    """Return a run of ranks that do the same in somewhat other times."""
    # In another process, whose memory is not counted.
    with ProcessPoolExecutor(1) as other:
        digest = other.submit(_digest, folder / "rank-0.json").result()
    rng = np.random.default_rng(0)
    return build_run_view([_of_rank(digest, rank, ranks, rng) for rank in range(ranks)], ranks)


def _digest(path: Path) -> RankDigest:
    return digest_file(str(write_rank(path)))


def _of_rank(digest: RankDigest, rank: int, ranks: int, rng: np.random.Generator) -> RankDigest:
    programs = []
    for packed in digest.programs:
        program = packed.decoded()
        jitter = {name: _jittered(getattr(program, name), rng) for name in ("lag", "dur")}
        programs.append(EncodedProgram.of(replace(program, **jitter)))
    table, everyone = digest.collectives, tuple(range(ranks))
    kinds = tuple(replace(kind, group=everyone, group_size=ranks) for kind in table.kinds)
    late = int(rng.integers(0, 10_000))
    moved = type(table)(*(getattr(table, name) for name in table.__slots__))
    for name, value in {
        "kinds": kinds,
        "start_ns": table.start_ns - 10_000 + late,
    }.items():
        object.__setattr__(moved, name, value)
    return replace(digest, rank=rank, world_size=ranks, programs=tuple(programs), collectives=moved)


def _jittered(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.rint(column * rng.normal(1, 0.02, column.size).clip(0.9, 1.1)).astype(column.dtype)


def measure(ranks: int) -> dict[str, float]:
    """Return what replaying costs in this process."""
    with tempfile.TemporaryDirectory() as folder:
        view = view_of(ranks, Path(folder))
    before = _peak_mb()
    began, busy = time.perf_counter(), time.process_time()
    replay = replay_run(view)
    assert isinstance(replay, RunReplay), replay
    made = time.perf_counter()
    answers = predict(replay, [[parse_request(text)] for text in FIXES])
    done = time.perf_counter()
    return {
        "ranks": ranks,
        "events": sum(one.programs[0].decoded().events for one in view.digests),
        "read_mb": before,
        "peak_mb": _peak_mb(),
        "made_s": made - began,
        "fixes_s": done - made,
        "processor_s": time.process_time() - busy,
        "predicted": sum(isinstance(one, Prediction) for one in answers),
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def costs(sizes: tuple[int, ...] = (8, 64, 256)) -> list[dict[str, float]]:
    """Return the costs of runs of several sizes, each in a process of its own."""
    found = []
    for ranks in sizes:
        shown = subprocess.run(
            [sys.executable, __file__, str(ranks)], check=True, capture_output=True, text=True
        )
        found.append(json.loads(shown.stdout))
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
