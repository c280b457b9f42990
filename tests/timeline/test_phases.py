"""Phases come from the host's ranges; GPU events have the phase in which they were launched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline, build_timeline
from tracedoc.timeline.phases import Phase
from tracedoc.topics import load_facts
from tracedoc.trace.kineto import read_trace
from tracedoc.values import Unknown

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


def timeline_of(builder: TraceBuilder, folder: Path) -> RankTimeline:
    path = folder / "rank-0.json"
    path.write_text(builder.to_json(), encoding="utf-8")
    return build_timeline(read_trace(str(path)))


def two_steps(device: str | None = "NVIDIA H100 80GB HBM3") -> TraceBuilder:
    """Two steps of 100 ms: loader 0-10, forward 10-40, backward 40-80, optimizer 80-95, zero_grad 95-99."""
    trace = TraceBuilder(device=device)
    for index in range(2):
        at = 100.0 * index
        trace.step(index, at, at + 100)
        trace.loader(at, at + 10)
        trace.host("aten::linear", at + 12, at + 20)
        trace.backward(at + 40, at + 55)
        trace.backward(at + 60, at + 80)
        trace.optimizer(at + 80, at + 95)
        trace.host("Optimizer.zero_grad#AdamW.zero_grad", at + 95, at + 99, category="user_annotation")
    return trace


def host_ms(timeline: RankTimeline, phase: Phase) -> list[tuple[float, float]]:
    assert timeline.phases is not None
    origin = int(timeline.trace.ts_ns[0])
    spans = timeline.phases.host_spans(phase)
    return [((start - origin) / 1e6, (end - origin) / 1e6) for start, end in spans.pairs()]


def test_a_step_is_forward_then_backward_then_optimizer(tmp_path: Path) -> None:
    timeline = timeline_of(two_steps(), tmp_path)
    assert host_ms(timeline, Phase.FORWARD) == [(10, 40), (110, 140)]
    # Between two nodes of one pass the engine does its bookkeeping.
    assert host_ms(timeline, Phase.BACKWARD) == [(40, 80), (140, 180)]
    assert host_ms(timeline, Phase.OPTIMIZER) == [(80, 95), (180, 195)]
    assert host_ms(timeline, Phase.RECOMPUTE) == []


def test_what_follows_the_last_mark_begins_no_forward_pass_inside_the_step(tmp_path: Path) -> None:
    """A third step from 200 has no mark: its forward pass begins there, not behind the optimizer at 195."""
    trace = two_steps().host("aten::linear", 212, 220).backward(240, 280).optimizer(280, 295)
    forward = host_ms(timeline_of(trace, tmp_path), Phase.FORWARD)
    assert forward == [(10, 40), (110, 140), (200, 240)]


def test_time_between_backward_and_optimizer_is_neither(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).host("aten::linear", 5, 10).backward(20, 50)
    trace.host("aten::linalg_vector_norm", 52, 60).optimizer(70, 90)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.phases is not None
    origin = int(timeline.trace.ts_ns[0])
    labels = timeline.phases.at([origin + ms * 1_000_000 for ms in (8, 30, 55, 80, 95)])
    assert [Phase(label) for label in labels.tolist()] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OTHER,
        Phase.OPTIMIZER,
        Phase.OTHER,
    ]


def test_a_forward_operator_between_nodes_begins_another_micro_batch(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100)
    trace.host("aten::linear", 5, 10).backward(20, 40).host("aten::linear", 45, 50).backward(60, 80)
    trace.optimizer(85, 95)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.phases is not None
    assert len(timeline.phases.passes) == 2
    assert host_ms(timeline, Phase.FORWARD) == [(0, 20), (40, 60)]


def test_what_a_node_calls_as_it_ends_in_whole_microseconds_is_no_other_micro_batch(tmp_path: Path) -> None:
    trace = two_steps(device=None).host("aten::linear", 55, 55.001).host("aten::linear", 155, 156)
    backward = host_ms(timeline_of(trace, tmp_path), Phase.BACKWARD)
    assert backward == [(40, 80), (140, 155), (160, 180)]


def test_what_the_engine_does_on_its_own_thread_stays_in_the_pass(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).host("aten::linear", 5, 10).backward(20, 40)
    trace.host("FSDP::pre_backward (layers.0)", 42, 46, thread="autograd", category="user_annotation")
    trace.backward(50, 60).host("aten::rms_norm", 61, 62, thread="autograd").optimizer(80, 90)
    trace.kernel(GEMM, 70, 75, launch_ms=61.5, thread="autograd")
    timeline = timeline_of(trace, tmp_path)
    assert timeline.phases is not None
    assert host_ms(timeline, Phase.BACKWARD) == [(20, 62)]
    assert len(timeline.phases.passes) == 1
    assert timeline.phases.of_events.tolist() == [Phase.BACKWARD]


def test_forward_operators_inside_a_backward_node_are_recomputation(tmp_path: Path) -> None:
    trace = TraceBuilder(device=None).step(0, 0, 100).host("aten::linear", 5, 10)
    trace.backward(20, 60).host("aten::linear", 22, 30).host("aten::layer_norm", 30, 38)
    trace.host("aten::mm", 40, 58).optimizer(70, 90)
    timeline = timeline_of(trace, tmp_path)
    assert host_ms(timeline, Phase.RECOMPUTE) == [(22, 38)]
    assert host_ms(timeline, Phase.BACKWARD) == [(20, 22), (38, 60)]


def test_a_closure_inside_the_optimizer_keeps_its_own_phases(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).optimizer(10, 95)
    trace.host("aten::linear", 15, 20).backward(30, 60)
    timeline = timeline_of(trace, tmp_path)
    assert host_ms(timeline, Phase.FORWARD) == [(0, 30)]
    assert host_ms(timeline, Phase.OPTIMIZER) == [(60, 95)]


def test_each_closure_keeps_its_own_phases(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for index in range(3):
        at = 100.0 * index
        trace.step(index, at, at + 100).optimizer(at + 10, at + 95)
        trace.host("aten::linear", at + 15, at + 20).backward(at + 30, at + 60)
    assert host_ms(timeline_of(trace, tmp_path), Phase.OPTIMIZER) == [(60, 95), (160, 195), (260, 295)]


def test_parameters_gathered_after_the_optimizer_belong_to_it(tmp_path: Path) -> None:
    trace = TraceBuilder(device=None, world_size=2)
    for index in range(2):
        at = 100.0 * index
        trace.step(index, at, at + 100).host("aten::linear", at + 30, at + 40)
        trace.backward(at + 40, at + 60).optimizer(at + 60, at + 80)
    trace.host("c10d::_allgather_base_", 105, 110)
    timeline = timeline_of(trace, tmp_path)
    assert host_ms(timeline, Phase.OPTIMIZER) == [(60, 110), (160, 180)]
    assert host_ms(timeline, Phase.FORWARD) == [(0, 40), (110, 140)]


def test_a_gather_that_rounding_begins_inside_the_optimizer_belongs_to_it(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).host("aten::linear", 5, 10).backward(20, 50).optimizer(70, 90)
    trace.host("c10d::_allgather_base_", 90 - 1e-6, 95)  # a nanosecond before the optimizer has ended
    timeline = timeline_of(trace, tmp_path)
    assert host_ms(timeline, Phase.OPTIMIZER) == [(70, 95)]


def test_a_receive_between_two_nodes_divides_micro_batches(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100)
    trace.host("aten::linear", 5, 10).backward(20, 40)
    trace.host("c10d::recv_", 40 - 2e-4, 44).backward(50, 60)
    trace.backward(62, 80).optimizer(85, 95)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.phases is not None
    assert len(timeline.phases.passes) == 2


def test_a_kernel_has_the_phase_of_its_launch_and_not_of_its_time(tmp_path: Path) -> None:
    trace = two_steps()
    trace.kernel(GEMM, 45, 50, launch_ms=15)  # runs while the host is in backward
    trace.kernel(GEMM, 90, 120, launch_ms=65, thread="autograd")
    trace.kernel(GEMM, 120, 130, launch_ms=85)
    trace.kernel(GEMM, 130, 140, linked=False)
    trace.kernel(GEMM, 141, 150, launch_ms=115)
    timeline = timeline_of(trace, tmp_path)
    assert timeline.phases is not None
    assert [Phase(p) for p in timeline.phases.of_events.tolist()] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.FORWARD,  # unlinked: as the next one on its stream
        Phase.FORWARD,
    ]


def test_without_a_backward_pass_there_are_no_phases(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).host("aten::linear", 5, 10).kernel(GEMM, 10, 20)
    assert timeline_of(trace, tmp_path).phases is None


def overlapped_step() -> TraceBuilder:
    """Three steps: forward 0-30, backward 30-70, reduction 50-90 (20 ms alone), optimizer 90-100."""
    trace = TraceBuilder(world_size=2)
    for index in range(3):
        at = 100.0 * index
        trace.step(index, at - 20, at + 80).host("aten::linear", at - 15, at - 10)
        trace.backward(at + 20, at + 60).optimizer(at + 65, at + 75)
        trace.kernel(GEMM, at, at + 30, launch_ms=at - 12)
        trace.kernel(GEMM, at + 30, at + 70, launch_ms=at + 25, thread="autograd")
        trace.collective("allreduce", at + 50, at + 90, launch_ms=at + 45, thread="autograd")
        trace.kernel(GEMM, at + 90, at + 100, launch_ms=at + 70)
    return trace


def test_a_step_splits_by_phase_and_adds_up(tmp_path: Path) -> None:
    budgets = timeline_of(overlapped_step(), tmp_path).phase_budgets
    shown = [
        (b.phase, b.span_ns / 1e6, b.compute_ns / 1e6, b.comm_ns / 1e6, b.exposed_comm_ns / 1e6)
        for b in budgets
    ]
    assert shown == [
        (Phase.FORWARD, 30, 30, 0, 0),
        (Phase.BACKWARD, 60, 40, 40, 20),
        (Phase.OPTIMIZER, 10, 10, 0, 0),
    ]


def test_on_a_cpu_a_phase_lasts_as_long_as_the_host_is_in_it(tmp_path: Path) -> None:
    timeline = timeline_of(two_steps(device=None).step(2, 200, 300), tmp_path)
    shown = [(b.phase, b.span_ns / 1e6, b.compute_ns / 1e6, b.comm_ns / 1e6) for b in timeline.phase_budgets]
    # The operator of the forward pass takes 8 ms, the nodes of the backward pass 15 and 20 ms. The loader
    # and zero_grad are in no pass.
    assert shown == [
        (Phase.FORWARD, 30, 8, 0),
        (Phase.BACKWARD, 40, 35, 0),
        (Phase.OPTIMIZER, 15, 0, 0),
        (Phase.OTHER, 15, 0, 0),
    ]


PHASE_FACTS = {
    "backward_compute_ms": 40,
    "optimizer_compute_ms": 10,
    "recompute_ms": 0,
    "micro_batches": 1,
    "reducing_micro_batches": 1,
    "reductions_per_micro_batch": 1,
    "gathers_per_micro_batch": 0,
}


def test_facts_of_phases(tmp_path: Path) -> None:
    timeline = timeline_of(overlapped_step(), tmp_path)
    assert {name: load_facts()[name].compute(timeline) for name in PHASE_FACTS} == PHASE_FACTS


@pytest.mark.parametrize(("optimizer", "micro_batches"), [("LBFGS", 1), ("AdamW", 3)])
def test_evaluations_of_a_line_search_are_no_micro_batches(
    tmp_path: Path, optimizer: str, micro_batches: int
) -> None:
    """The optimizer calls its closure three times: another gradient each time, or parts of one sum."""
    trace = TraceBuilder(device=None, world_size=2)
    for step in range(3):
        begin = 100.0 * step
        trace.step(step, begin, begin + 100).optimizer(begin + 5, begin + 95, optimizer)
        for at in (begin + 10, begin + 40, begin + 70):
            trace.host("aten::linear", at, at + 5).backward(at + 5, at + 20)
            trace.collective("allreduce", at + 15, at + 19, launch_ms=at + 14)
    timeline = timeline_of(trace, tmp_path)
    for name in ("micro_batches", "reducing_micro_batches"):
        assert load_facts()[name].compute(timeline) == micro_batches


def test_phase_facts_are_unknown_without_a_backward_pass(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100).host("aten::linear", 5, 10).kernel(GEMM, 10, 20)
    timeline = timeline_of(trace, tmp_path)
    assert all(isinstance(load_facts()[name].compute(timeline), Unknown) for name in PHASE_FACTS)


COLLECTIVES = {
    "ddp": {("all_reduce", Phase.BACKWARD): 9},
    "fsdp2": {
        ("all_gather", Phase.FORWARD): 5,
        ("all_gather", Phase.BACKWARD): 4,
        ("reduce_scatter", Phase.BACKWARD): 5,
    },
    "fsdp2_norsh": {("all_gather", Phase.FORWARD): 5, ("reduce_scatter", Phase.BACKWARD): 5},
    "fsdp2_mp": {
        ("all_gather", Phase.FORWARD): 10,
        ("all_gather", Phase.BACKWARD): 8,
        ("reduce_scatter", Phase.BACKWARD): 5,
        ("all_reduce", Phase.OTHER): 1,  # the gradient norm
    },
    "fsdp1": {
        ("all_gather", Phase.FORWARD): 5,
        ("all_gather", Phase.BACKWARD): 4,
        ("reduce_scatter", Phase.BACKWARD): 5,
    },
    "fsdp1_sgo": {("all_gather", Phase.FORWARD): 5, ("reduce_scatter", Phase.BACKWARD): 5},
    "tp": {("all_reduce", Phase.FORWARD): 4, ("all_reduce", Phase.BACKWARD): 4},
    # Bucket, overflow flag and norm; the updated parameters come back after the optimizer.
    "ds1": {
        ("all_reduce", Phase.BACKWARD): 1,
        ("all_reduce", Phase.OTHER): 2,
        ("all_gather", Phase.OPTIMIZER): 1,
    },
    "ds2": {
        ("all_reduce", Phase.BACKWARD): 2,
        ("all_reduce", Phase.OTHER): 2,
        ("all_gather", Phase.OPTIMIZER): 1,
    },
}
PASSES = {"ddp": 1, "nw_acc": 4, "fsdp2_mp": 2, "acc": 2, "pp": 4, "ds1": 2, "ds3": 2, "tp": 1, "comp": 1}


def real(shared_traces: Path, name: str) -> RankTimeline:
    return build_timeline(read_trace(str(shared_traces / "cpu_gloo" / name / "rank0.json.gz")))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_a_real_step_by_phase(shared_traces: Path, name: str) -> None:
    timeline = real(shared_traces, name)
    assert timeline.phases is not None
    assert timeline.judged is not None
    found = Counter(
        (operation.op, Phase(phase))
        for operation, phase in zip(
            timeline.collectives, timeline.phases.of_collectives.tolist(), strict=True
        )
        if operation.step == timeline.judged.index
    )
    assert found == COLLECTIVES[name]


@pytest.mark.parametrize("name", PASSES)
def test_backward_passes_of_a_real_step(shared_traces: Path, name: str) -> None:
    timeline = real(shared_traces, name)
    assert timeline.phases is not None
    step = timeline.host.steps[0]
    inside = [start for start, _ in timeline.phases.passes if step.start_ns <= start < step.end_ns]
    assert len(inside) == PASSES[name]


def test_recomputation_of_a_real_run_lies_inside_backward(shared_traces: Path) -> None:
    phases = real(shared_traces, "ac").phases
    assert phases is not None
    recomputed = phases.host_spans(Phase.RECOMPUTE)
    assert len(recomputed) == 9  # 3 blocks in each of 3 steps
    assert (recomputed & phases.nodes) == recomputed
    assert len(real(shared_traces, "ddp").phases.host_spans(Phase.RECOMPUTE)) == 0  # type: ignore[union-attr]


def test_a_phase_ends_with_its_own_work_and_never_computes_longer_than_it_lasts(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for index in range(2):
        at = 100.0 * index
        trace.step(index, at, at + 100).backward(at + 20, at + 40).optimizer(at + 40, at + 46)
        trace.kernel(GEMM, at + 10, at + 20, launch_ms=at + 5)
        trace.kernel(GEMM, at + 25, at + 45, launch_ms=at + 22)
        # Launched by the optimizer: 2 ms on the compute stream, 5 ms on another beside the backward pass.
        trace.kernel("adam", at + 48, at + 50, launch_ms=at + 45)
        trace.kernel("cast", at + 41, at + 46, launch_ms=at + 40.5, stream=9)
        trace.loader(at + 50, at + 95)
    timeline = timeline_of(trace, tmp_path)
    shown = {b.phase: (b.span_ns / 1e6, b.compute_ns / 1e6) for b in timeline.phase_budgets}
    # The loader's 60 ms until the next step's first kernel are nobody's phase.
    assert shown == {
        Phase.FORWARD: (10, 10),
        Phase.BACKWARD: (20, 20),
        Phase.OPTIMIZER: (7, 7),
        Phase.OTHER: (68, 0),
    }
