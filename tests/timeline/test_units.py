"""Sharded units: names or places, sizes, passes, and the idle time that each gather ended."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tracedoc import load
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline, build_timeline
from tracedoc.timeline.shards.shard_units import FORWARD, NO_TIME, PHASES, block_of
from tracedoc.timeline.shards.times import UnitTable, small_table

MIB = 1 << 20


def table_of(timeline: RankTimeline) -> UnitTable:
    assert timeline.units is not None
    return timeline.units


def passes(table: UnitTable, step: int) -> dict[str, int]:
    """Return the number of gathers of a step by pass."""
    calls = table.units.gathers
    return dict(Counter(PHASES[phase] for phase in calls.phase[calls.step == step].tolist()))


# 2 ranks, five units: a root of 2570 and four blocks of 526080 elements (HSDP: 4 ranks).
@pytest.mark.parametrize(
    ("run", "framework", "names", "expected"),
    [
        ("fsdp1", "FSDP1", ("unit 0", "unit 1"), {"forward": 5, "backward": 4}),
        ("fsdp1_sgo", "FSDP1", ("unit 0", "unit 1"), {"forward": 5}),
        ("fsdp2", "FSDP2", ("(root)", "layers.0"), {"forward": 5, "backward": 4}),
        ("fsdp2_norsh", "FSDP2", ("(root)", "layers.0"), {"forward": 5}),
        ("fsdp2_mp", "FSDP2", ("(root)", "layers.0"), {"forward": 10, "backward": 8}),
        ("hsdp", "FSDP2", ("(root)", "layers.0"), {"forward": 5, "backward": 4}),
    ],
)
def test_real_fsdp_runs_have_five_units(
    shared_traces: Path, run: str, framework: str, names: tuple[str, ...], expected: dict[str, int]
) -> None:
    for path in sorted((shared_traces / "cpu_gloo" / run).iterdir()):
        table = table_of(build_timeline(load(path)))
        units, calls = table.units, table.units.gathers
        assert (units.framework, len(units.names), units.names[:2]) == (framework, 5, names)
        assert calls.elements[:2].tolist() == [2570, 526080]
        for step in np.unique(calls.step).tolist():
            assert passes(table, step) == expected
            forward = calls.unit[(calls.step == step) & (calls.phase == FORWARD)].tolist()
            again = calls.unit[(calls.step == step) & (calls.phase != FORWARD)].tolist()
            assert forward[:5] == [0, 1, 2, 3, 4]
            assert again[:4] == ([4, 3, 2, 1] if "backward" in expected else [])
            reduced = units.reductions.unit[units.reductions.step == step]
            assert sorted(reduced.tolist()) == [0, 1, 2, 3, 4]


def test_zero3_keeps_small_parameters_and_gathers_them_once_a_step(shared_traces: Path) -> None:
    # Every parameter is below the persistence threshold: one gather of all of them in each micro-batch.
    table = table_of(build_timeline(load(shared_traces / "cpu_gloo" / "ds3" / "rank0.json.gz")))
    assert (table.units.framework, len(table.units.names)) == ("ZeRO-3", 1)
    assert set(table.units.gathers.elements.tolist()) == {2_106_890}


@pytest.mark.parametrize("run", ["ddp", "tp", "pp", "ds1", "ds2", "ac"])
def test_runs_that_do_not_shard_parameters_have_no_units(shared_traces: Path, run: str) -> None:
    assert build_timeline(load(shared_traces / "cpu_gloo" / run / "rank0.json.gz")).units is None


# GPU traces by hand ---------------------------------------------------------------------------------


class Step:
    """A step of FSDP2 by hand: hooks on the host, gathers on stream 20, compute on stream 7; ms."""

    def __init__(self, steps: int = 2, length: float = 50.0) -> None:
        self.builder = TraceBuilder(0, 2)
        self.starts = [index * length for index in range(steps)]
        for index, start in enumerate(self.starts):
            self.builder.step(index, start - 5, start - 5 + length)

    def gather(
        self, unit: str, start: float, end: float, *, launch: float, hook: str = "pre_forward"
    ) -> None:
        thread = "main" if hook == "pre_forward" else "autograd"
        for at in self.starts:
            for name in (f"FSDP::{hook} ({unit})", f"FSDP::all_gather ({unit})"):
                self.range(name, at + launch - 0.01, at + launch + 0.03, thread)
            self.builder.collective(
                "allgather", at + start, at + end, nbytes=64 * MIB, launch_ms=at + launch, thread=thread
            )

    def compute(self, start: float, end: float, *, launch: float, thread: str = "main") -> None:
        for at in self.starts:
            self.builder.kernel("gemm", at + start, at + end, launch_ms=at + launch, thread=thread)

    def range(self, name: str, start: float, end: float, thread: str = "main") -> None:
        self.builder.host(name, start, end, thread=thread, category="user_annotation")

    def table(self, folder: Path) -> UnitTable:
        return table_of(build_timeline(load(self.builder.write(folder / "rank-0.json"))))


def test_stall_is_the_gap_that_the_gather_ended(tmp_path: Path) -> None:
    step = Step()
    step.compute(0, 10, launch=-3)
    step.gather("layers.0", 10, 14, launch=-2)
    step.compute(14, 24, launch=-1.9)
    step.gather("layers.1", 16, 20, launch=-1)
    step.compute(24, 34, launch=-0.9)
    table = step.table(tmp_path)
    times = table.gather_times
    assert times is not None
    assert [table.units.names[u] for u in table.units.gathers.unit[:2]] == ["layers.0", "layers.1"]
    assert times.stall_ns[:2].tolist() == [4_000_000, 0]
    assert times.depth[:2].tolist() == [0, 1]
    # The first gather of a step has nothing to hide behind; the second has the compute of layers.0.
    assert times.beside_ns[:2].tolist() == [0, 10_000_000]
    # Launched at -2 and -1; the compute before ended at 10 and 24.
    assert times.lag_ns[:2].tolist() == [-12_000_000, -25_000_000]


def test_time_in_which_the_next_kernel_was_not_launched_is_not_the_gathers(tmp_path: Path) -> None:
    step = Step()
    step.compute(0, 10, launch=-3)
    step.gather("layers.0", 12, 16, launch=11.9)
    step.compute(16, 20, launch=13)  # from 10 to 13 the host is late
    times = step.table(tmp_path).gather_times
    assert times is not None
    assert times.stall_start_ns[0] + 3_000_000 == times.stall_end_ns[0]
    assert times.stall_ns[0] == 3_000_000
    assert times.lag_ns[0] == 1_900_000


def test_gap_that_something_else_ended_is_not_the_gathers(tmp_path: Path) -> None:
    step = Step()
    step.compute(0, 10, launch=-3)
    step.gather("layers.0", 10, 12, launch=-2)
    step.compute(15, 20, launch=-1.9)  # 3 ms after the gather: it waited for something else
    times = step.table(tmp_path).gather_times
    assert times is not None
    assert times.stall_ns[0] == 0


def test_copy_out_on_a_third_stream_passes_the_release_on(tmp_path: Path) -> None:
    step = Step()
    step.compute(0, 10, launch=-3)
    step.gather("layers.0", 10, 14, launch=-2)
    for at in step.starts:
        step.builder.kernel("split_with_sizes_copy_out", at + 14, at + 15, stream=9, launch_ms=at - 1.9)
    step.compute(15, 24, launch=-1.8)
    times = step.table(tmp_path).gather_times
    assert times is not None
    # Idle for 4 ms; the copy-out on the other stream is compute.
    assert times.stall_ns[0] == 4_000_000


def test_forward_hook_inside_the_backward_pass_is_recomputation(tmp_path: Path) -> None:
    step = Step()
    step.gather("layers.0", 1, 2, launch=0.5)
    step.compute(2, 10, launch=0.6)
    for at in step.starts:
        step.builder.backward(at + 20, at + 30)
        for name in ("FSDP::pre_forward (layers.0)", "FSDP::all_gather (layers.0)"):
            step.range(name, at + 21, at + 21.1, "autograd")
        step.builder.collective("allgather", at + 22, at + 23, launch_ms=at + 21.02, thread="autograd")
    step.gather("layers.1", 26, 27, launch=25, hook="pre_backward")
    step.compute(30, 40, launch=26, thread="autograd")
    assert passes(step.table(tmp_path), 0) == {"forward": 1, "recompute": 1, "backward": 1}


def test_gathers_outside_the_hooks_are_not_parameters(tmp_path: Path) -> None:
    step = Step()
    step.gather("layers.0", 1, 2, launch=0.5)
    step.compute(2, 10, launch=0.6)
    for at in step.starts:
        step.builder.collective("allgather", at + 12, at + 13, launch_ms=at + 11, nbytes=1 * MIB)
    assert len(step.table(tmp_path).units.gathers) == 2


def test_units_without_names_are_places_in_the_forward_pass(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 2)
    sizes = (8 * MIB, 64 * MIB, 32 * MIB)
    for index in range(2):
        at = 50.0 * index
        builder.step(index, at - 5, at + 45).backward(at + 20, at + 40)
        for k, size in enumerate(sizes):
            builder.host(
                "FullyShardedDataParallel._pre_forward", at + k, at + k + 0.1, category="user_annotation"
            )
            builder.collective("allgather", at + k + 0.2, at + k + 0.4, nbytes=size, launch_ms=at + k + 0.05)
            builder.kernel("gemm", at + k + 0.4, at + k + 0.9, launch_ms=at + k + 0.2)
        for k, size in enumerate((32 * MIB, 64 * MIB)):
            start = at + 25 + k
            builder.host(
                "FullyShardedDataParallel._pre_backward_hook", start, start + 0.1,
                thread="autograd", category="user_annotation",
            )  # fmt: skip
            builder.collective(
                "allgather", start + 0.2, start + 0.4, nbytes=size, launch_ms=start + 0.05, thread="autograd"
            )
    table = table_of(build_timeline(load(builder.write(tmp_path / "rank-0.json"))))
    mine = table.units.gathers.step == 0
    assert table.units.names == ("unit 0", "unit 1", "unit 2")
    assert table.units.gathers.unit[mine].tolist() == [0, 1, 2, 2, 1]


def test_table_that_travels_keeps_whole_steps_and_is_small(
    sample_traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = build_timeline(load(sample_traces / "synthetic_fsdp2_fine_wrapping" / "rank-0.json.gz"))
    table = table_of(timeline)
    assert len(pickle.dumps(small_table(table, 2))) < 100_000  # five steps of 141 gathers
    monkeypatch.setattr("tracedoc.timeline.shards.times.MAX_CALLS", 300)
    small = small_table(table, 2)
    assert small is not None
    assert small.gather_times is not None
    assert Counter(small.units.gathers.step.tolist()) == {1: 141, 2: 141}
    assert small.gather_times.stall_ns.size == 282
    assert len(small.units.hooks) == 0


def test_calls_in_columns_agree_in_length(sample_traces: Path) -> None:
    timeline = build_timeline(load(sample_traces / "synthetic_zero3_gather_stall" / "rank-0.json.gz"))
    table = table_of(timeline)
    assert table.gather_times is not None
    assert table.gather_times.stall_ns.size == len(table.units.gathers) == 160
    # Stalls are disjoint gaps of one stream.
    order = np.argsort(table.gather_times.stall_start_ns)
    starts, ends = table.gather_times.stall_start_ns[order], table.gather_times.stall_end_ns[order]
    assert (starts[1:] >= ends[:-1]).all()
    assert (table.gather_times.lag_ns[1:] != NO_TIME).all()


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers.3"),
        ("layers.0", "layers.0"),
        ("lm_head", "lm_head"),
        ("blocks.2.experts.7", "blocks.2"),
    ],
)
def test_block_of_a_unit_ends_with_the_first_number(name: str, block: str) -> None:
    assert block_of(name) == block
