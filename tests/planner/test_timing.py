"""Hold how long a step takes against sums by hand; the constants are held by published runs."""

from __future__ import annotations

import pytest

from tracedoc.planner.activations import block_activations
from tracedoc.planner.hardware import Cluster, Gpu, LinkKind
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters
from tracedoc.planner.timing import (
    NARROW_SPREAD,
    WIDE_SPREAD,
    WIDEST_RANGE,
    Step,
    exposed_share,
    predict,
    step_flops,
)

P = 1_000_000_000
LINK = LinkKind("link", "a link", False, gbps=100, efficiency=0.5, latency_us=0, source="test")
SLOW = LinkKind("network", "a network", True, gbps=10, efficiency=1, latency_us=0, source="test")
GPU = Gpu("GPU", 80, half_tflops=100, hbm_gbps=1000, link="nvlink", source="test", fp32_tflops=10)


def question(gpus: int = 8, nodes: int = 1, **training: object) -> Question:
    return Question(shape_from_parameters(P), Training(**training), gpus, nodes, 80e9)


def step(asked: Question, strategy: str, **how: object) -> Step:
    how = {"utilisation": 0.5} | how
    found = predict(asked, data_parallel(asked, strategy), Cluster(GPU, LINK, None), **how)
    assert found is not None
    return found


def test_arithmetic_is_6_flops_a_parameter_and_token() -> None:
    asked = question(sequence=1000)
    forward, backward, again = step_flops(asked)
    model = asked.model
    attention = 12 * model.blocks * model.hidden * 1000 * 1000
    multiplied = P - model.outside_parameters + model.vocabulary * model.hidden  # the embedding is looked up
    assert forward.total + backward.total == pytest.approx(6 * multiplied * 1000 + attention)
    assert again.total == 0
    # Blocks are computed again, the head is not.
    again = step_flops(asked.changed(checkpointing="on"))[2]
    assert again.total == pytest.approx(2 * (P - model.outside_parameters) * 1000 + attention / 3)


def test_selective_checkpointing_computes_every_second_product_again() -> None:
    """A Llama block of width h: q, k, v, o of h^2, gate, up, down of 8/3 h^2; k, o and up of 12 h^2 again."""
    asked = question(sequence=1000, checkpointing="selective")
    again = step_flops(asked)[2]
    inside = 2 * (P - asked.model.outside_parameters) * 1000
    assert again.attention == 0
    assert again.matmul == pytest.approx(inside * (1 + 1 + 8 / 3) / 12, rel=1e-3)


def test_what_a_run_computed_replaces_the_estimate_and_is_partly_repeated_by_checkpointing() -> None:
    """300 ms, of which forward is a third, and embeddings and head a small part of that."""
    cluster = Cluster(GPU, LINK, None)
    layout = data_parallel(question(1), "single")
    once, again = (question(1, checkpointing=on) for on in ("off", "on"))
    flops = step_flops(again)
    steps = [predict(asked, layout, cluster, measured_compute_ms=300.0) for asked in (once, again)]
    repeated = 300 * flops[2].total / (flops[0].total + flops[1].total)
    assert 80 < repeated < 100
    assert [one.compute_ms for one in steps if one] == pytest.approx([300, 300 + repeated])


def test_what_a_run_computed_is_that_of_all_its_micro_batches() -> None:
    assert step(question(8, accumulation=4), "ddp", measured_compute_ms=300.0).compute_ms == 300


def test_no_time_is_predicted_without_gpu_or_link() -> None:
    for cluster in (Cluster(None, LINK, None), Cluster(GPU, None, None)):
        assert predict(question(), data_parallel(question(), "ddp"), cluster) is None
    layout = data_parallel(question(16, 2), "hsdp")
    assert predict(question(16, 2), layout, Cluster(GPU, LINK, None)) is None


def test_what_travels_once_an_update_hides_beside_one_micro_batch() -> None:
    """DDP reduces P gradients in fp32 on 2 GPUs, 4e9 bytes at 50 GB/s, in the last of 8 backward passes."""
    asked = question(2).changed(accumulation=8, precision="fp32")
    slow = step(asked, "ddp", measured_compute_ms=8 * 10.0)  # 10 ms of them beside the last micro-batch
    fast = step(asked, "ddp", measured_compute_ms=8 * 1000.0)
    first = 80 / -(-4_000_000_000 // (25 << 20))
    rest = 80 - first
    assert slow.comm_ms == pytest.approx(80, rel=0.01)
    assert slow.expected_ms == pytest.approx(80 + first + rest - 10, rel=0.01)
    shown = 0.30 + 0.45 * 50 / 160
    assert fast.expected_ms == pytest.approx(8000 + first + shown * rest, rel=0.01)


def test_the_range_shows_a_part_or_all_and_adds_the_spread() -> None:
    """ZeRO-3 of P in bf16 on 8: each pass takes 7/8 x 2e9 / 50e9 = 35 ms, of which one call cannot hide."""
    asked = question(8)
    found = step(asked, "zero-3", measured_compute_ms=300.0)
    first = 3 * 35 / (asked.model.blocks + 1)
    rest = 3 * 35 - first
    low, high = NARROW_SPREAD
    assert found.comm_ms == pytest.approx(3 * 35)
    shown = 0.30 + 0.45 * 50 / 160
    assert found.best_ms == pytest.approx(low * (300 + first + 2 / 3 * shown * rest))
    assert found.expected_ms == pytest.approx(300 + first + shown * rest)
    assert found.worst_ms == pytest.approx(WIDEST_RANGE * found.best_ms)
    assert found.worst_ms < high * (300 + 3 * 35)  # all of it


def test_a_step_is_never_shorter_than_its_link_needs() -> None:
    found = step(question(8), "zero-3", measured_compute_ms=3.0)
    assert found.expected_ms == pytest.approx(3 * 35, rel=0.01)


def test_accumulation_repeats_all_but_the_update() -> None:
    once, four = (step(question(8, accumulation=n), "full-shard") for n in (1, 4))
    assert four.optimizer_ms == once.optimizer_ms
    assert four.expected_ms - four.optimizer_ms == pytest.approx(4 * (once.expected_ms - once.optimizer_ms))


def test_what_no_product_does_runs_at_the_speed_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no arithmetic: 9.2 passes over what blocks keep, 48 bytes a logit, over 1000 GB/s."""
    monkeypatch.setattr("tracedoc.planner.timing.NARROW_TRAFFIC", 0.0)
    fast = Gpu("GPU", 80, 1e9, 1000, "nvlink", "test", matmul=1.0, attention=1.0)
    asked = question(1)
    found = predict(asked, data_parallel(asked, "single"), Cluster(fast, None, None))
    assert found is not None
    kept = asked.model.blocks * block_activations(asked, data_parallel(asked, "single"))
    moved = 9.2 * kept + 48 * asked.training.tokens * asked.model.vocabulary
    assert found.compute_ms == pytest.approx(moved / 1e9)
    half = asked.changed(compiled=True)
    compiled = predict(half, data_parallel(half, "single"), Cluster(fast, None, None))
    assert compiled is not None
    assert compiled.compute_ms < found.compute_ms


def test_a_gpu_without_published_runs_has_a_wider_range() -> None:
    found = step(question(1), "single")
    low, high = WIDE_SPREAD
    assert found.best_ms == pytest.approx(low * found.expected_ms)
    assert found.worst_ms == pytest.approx(high * found.expected_ms)


@pytest.mark.parametrize(
    ("strategy", "precision", "milliseconds"),
    [
        # Adam's 8 bytes and 4 of the parameter, read and written; 4 of the gradient read: 28 bytes.
        ("ddp", "fp32", 28.0),
        ("full-shard", "fp32", 28.0 / 8),
        ("zero-1", "fp32", 28.0 / 8),
        # Mixed, PyTorch keeps gradients in fp32, DeepSpeed in 16 bits.
        ("ddp", "bf16-mixed", 28.0),
        ("zero-1", "bf16-mixed", 26.0 / 8),
    ],
)
def test_the_update_is_bound_by_the_memory_of_the_gpu(
    strategy: str, precision: str, milliseconds: float
) -> None:
    found = step(question(precision=precision), strategy)
    assert found.optimizer_ms == pytest.approx(milliseconds)
    assert found.host_ms == 0


@pytest.mark.parametrize(
    ("strategy", "offload", "milliseconds"),
    [
        # P/8 gradients and parameters of 4 bytes over PCIe: 1e9 bytes at 16 GB/s; the CPUs of the node touch
        # 28 P bytes at 100 GB/s.
        ("zero-2", "optimizer", 62.5 + 280),
        # Both passes fetch the shard of the parameters again: 2 x 4 P / 8 bytes more.
        ("full-shard", "all", 62.5 + 62.5 + 280),
        # The node's 16 P bytes of states are read from NVMe and written back at 6 GB/s.
        ("zero-3", "nvme", 62.5 + 62.5 + 280 + 2 * 16 / 6 * 1000),
    ],
)
def test_an_update_on_the_host_takes_its_copies_and_its_memory(
    strategy: str, offload: str, milliseconds: float
) -> None:
    found = step(question(precision="fp32", offload=offload), strategy)
    assert found.optimizer_ms == 0
    assert found.host_ms == pytest.approx(milliseconds)


@pytest.mark.parametrize(("gbps", "share"), [(0.0, 0.30), (80.0, 0.525), (160.0, 0.75), (400.0, 0.75)])
def test_a_faster_link_takes_more_from_computation(gbps: float, share: float) -> None:
    assert exposed_share(gbps) == pytest.approx(share)
