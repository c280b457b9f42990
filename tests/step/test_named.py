"""The names of the longest kernels, collectives and gaps in a picture."""

from __future__ import annotations

from pathlib import Path

import tracedoc
from tracedoc.step.drawn import NAMED_KERNELS
from tracedoc.tables import Picture
from tracedoc.testing import TraceBuilder, parse_lanes


def named(picture: Picture, rank: int) -> list[tuple[float, float, str]]:
    row = next(one for one in picture.rows if one.rank == rank)
    return sorted((start, end, picture.names[number]) for start, end, number in row.named)


def test_kernels_gaps_and_collectives_of_a_step_have_names(tmp_path: Path) -> None:
    """Steps of 100 ms: a kernel of 40 ms, an all-reduce of 20, and 30 ms in which the host saves samples."""
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 100).backward(start + 45, start + 60)
            builder.kernel("gemm", start, start + 40, launch_ms=start - 0.01)
            builder.collective("allreduce", start + 40, start + 60, nbytes=64 << 20)
            builder.host("train.py(12): save_samples", start + 61, start + 92, category="python_function")
        builder.write(tmp_path / f"rank-{rank}.json")
    picture = tracedoc.diagnose([tmp_path]).detail.picture
    assert picture is not None
    assert named(picture, 1) == [
        (0.0, 40.0, "gemm"),
        (40.0, 60.0, "all-reduce of 64 MiB, 2 ranks"),
        (60.0, 100.0, "train.py(12): save_samples"),
    ]


def test_operators_of_a_cpu_run_have_names(tmp_path: Path) -> None:
    for builder in parse_lanes("step: 100\ncompute 0-60 x2\nhost 70-90 name=evaluate", ranks=1, device=None):
        builder.write(tmp_path / "rank-0.json")
    picture = tracedoc.diagnose([tmp_path]).detail.picture
    assert picture is not None
    assert {name for _, _, name in named(picture, 0)} >= {"evaluate"}


def test_of_many_kernels_the_longest_have_names(tmp_path: Path) -> None:
    """Of 40 kernels of 0.85 ms and 60 of 0.1 ms in a step, the longest; gaps have no name without a range."""
    builder = TraceBuilder()
    for index in (1, 2, 3):
        start = 100.0 * index
        builder.step(index, start, start + 100)
        for number in range(100):
            name, ms = ("long", 0.85) if number % 5 < 2 else ("short", 0.1)
            at = start + 0.9 * number
            builder.kernel(name, at, at + ms, launch_ms=at - 0.005)
    builder.write(tmp_path / "rank-0.json")
    picture = tracedoc.diagnose([tmp_path]).detail.picture
    assert picture is not None
    kernels = [name for _, _, name in named(picture, 0) if name in ("long", "short")]
    assert kernels == NAMED_KERNELS * ["long"]
