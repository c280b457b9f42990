"""Hold what is sent, and how long that takes, by hand."""

from __future__ import annotations

import pytest

from tracedoc.planner.hardware import Cluster, Gpu, LinkKind
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters
from tracedoc.planner.strategies import STRATEGIES
from tracedoc.planner.traffic import predict, seconds, step_flops, transfers

P = 1_000_000_000
LINK = LinkKind("link", "a link", False, gbps=100, efficiency=0.5, latency_us=0, source="test")
SLOW = LinkKind("network", "a network", True, gbps=10, efficiency=1, latency_us=0, source="test")
GPU = Gpu("GPU", 80, half_tflops=100, hbm_gbps=1000, link="nvlink", source="test", fp32_tflops=10)


def question(gpus: int = 8, nodes: int = 1, **training: object) -> Question:
    return Question(shape_from_parameters(P), Training(**training), gpus, nodes, 80e9)


def sent(strategy: str, **where: object) -> float:
    return sum(t.sent for t in transfers(question(**where), STRATEGIES[strategy]))


@pytest.mark.parametrize(
    ("strategy", "elements"),
    [("ddp", 2), ("zero-1", 2), ("zero-2", 2), ("shard-grad-op", 2), ("full-shard", 3), ("zero-3", 3)],
)
def test_elements_sent_by_each_gpu(strategy: str, elements: int) -> None:
    """In fp32 all elements have 4 bytes; a ring of 8 sends 7/8 of each pass."""
    assert sent(strategy, precision="fp32") / 4 == pytest.approx(elements * P * 7 / 8)


def test_pytorchs_zero_1_sends_the_parameters_as_well() -> None:
    assert sent("zero-redundancy", precision="fp32") / 4 == pytest.approx(3 * P * 7 / 8)


def test_hybrid_sharding_sends_its_share_across_nodes() -> None:
    """3 P inside groups of 8, and an all-reduce of P / 8 over 2 nodes."""
    found = sent("hsdp", gpus=16, nodes=2, precision="fp32")
    assert found / 4 == pytest.approx(3 * P * 7 / 8 + 2 * (P / 8) * 1 / 2)


def test_lora_sends_adapters_under_ddp_and_the_model_under_fsdp() -> None:
    assert sent("ddp", lora_rank=8) < 1e8
    assert sent("full-shard", lora_rank=8) > 2 * 2 * P * 7 / 8


def test_time_is_bytes_over_what_the_link_reaches() -> None:
    """DDP in fp32: 2 x 4e9 x 7/8 = 7e9 bytes at 50 GB/s are 140 ms."""
    asked = question(precision="fp32")
    (reduce,) = transfers(asked, STRATEGIES["ddp"])
    assert seconds(reduce, asked, Cluster(GPU, LINK, None)) == pytest.approx(0.140)


def test_a_ring_over_nodes_is_as_fast_as_the_network_of_a_node() -> None:
    """2 x 4e9 x 15/16 = 7.5e9 bytes at 10 GB/s."""
    asked = question(16, 2, precision="fp32")
    (reduce,) = transfers(asked, STRATEGIES["ddp"])
    assert seconds(reduce, asked, Cluster(GPU, LINK, SLOW)) == pytest.approx(0.750)


def test_each_call_costs_its_latency() -> None:
    slow_start = LinkKind("link", "a link", False, gbps=1e9, efficiency=1, latency_us=100, source="test")
    asked = question()
    gather = transfers(asked, STRATEGIES["full-shard"])[0]
    assert gather.calls == asked.model.blocks + 1
    assert seconds(gather, asked, Cluster(GPU, slow_start, None)) == pytest.approx(
        gather.calls * 100e-6, rel=1e-3
    )


def test_arithmetic_is_6_flops_a_parameter_and_token() -> None:
    asked = question(sequence=1000)
    forward, backward = step_flops(asked, checkpointing=False)
    model = asked.model
    attention = 12 * model.blocks * model.hidden * 1000 * 1000
    assert forward + backward == pytest.approx(6 * P * 1000 + attention)
    again, more = step_flops(asked, checkpointing=True)
    assert again + more == pytest.approx((6 + 2) * P * 1000 + attention * 4 / 3)


def test_a_step_lies_between_all_hidden_and_nothing_hidden() -> None:
    step = predict(
        question(), STRATEGIES["full-shard"], Cluster(GPU, LINK, None), checkpointing=False, utilisation=0.5
    )
    assert step is not None
    assert step.worst_ms == pytest.approx(step.compute_ms + step.comm_ms + step.optimizer_ms)
    assert step.compute_ms + step.optimizer_ms < step.best_ms < step.worst_ms
    assert step.middle_ms == pytest.approx(step.best_ms / 2 + step.worst_ms / 2)


def test_what_a_run_computed_replaces_the_estimate_and_is_partly_repeated_by_checkpointing() -> None:
    """300 ms, of which forward is a third: 400 ms with recomputation; nothing is sent by one GPU."""
    cluster = Cluster(GPU, LINK, None)
    steps = [
        predict(
            question(1),
            STRATEGIES["single"],
            cluster,
            checkpointing=checkpointing,
            utilisation=0.4,
            measured_compute_ms=300.0,
        )
        for checkpointing in (False, True)
    ]
    assert [step.best_ms for step in steps if step] == pytest.approx([300.0, 400.0])


def test_no_time_is_predicted_without_gpu_or_link() -> None:
    for cluster in (Cluster(None, LINK, None), Cluster(GPU, None, None)):
        assert predict(question(), STRATEGIES["ddp"], cluster, checkpointing=False, utilisation=0.4) is None


def test_one_gpu_sends_nothing() -> None:
    assert transfers(question(1), STRATEGIES["single"]) == ()


def test_rings_of_replicas_share_the_adapters_of_their_node() -> None:
    """P/8 x 4 bytes x 2 x 1/2 = 0.5e9 bytes at 10/8 GB/s are 400 ms; inside, 3.5e9 at 50 are 70."""
    asked = question(16, 2, precision="fp32")
    forward, _, _, reduce = transfers(asked, STRATEGIES["hsdp"])
    cluster = Cluster(GPU, LINK, SLOW)
    assert seconds(reduce, asked, cluster) == pytest.approx(0.400)
    assert seconds(forward, asked, cluster) == pytest.approx(0.070)


@pytest.mark.parametrize(("nodes", "hops"), [(8, 2.0), (4, 1.0), (2, 0.5)])
def test_the_latency_of_a_ring_over_nodes_grows_with_its_ranks(nodes: int, hops: float) -> None:
    """The table tells that of 32 ranks, here 40 us a call; 4e9 bytes are 153 buckets of 25 MiB."""
    network = LinkKind("network", "a network", True, gbps=1e9, efficiency=1, latency_us=40, source="test")
    asked = question(8 * nodes, nodes, precision="fp32")
    (reduce,) = transfers(asked, STRATEGIES["ddp"])
    assert reduce.calls == 153
    fast = LinkKind("link", "a link", False, gbps=1e9, efficiency=1, latency_us=0, source="test")
    assert seconds(reduce, asked, Cluster(GPU, fast, network)) == pytest.approx(153 * 40e-6 * hops, rel=0.01)


def test_without_a_network_nothing_is_predicted_over_nodes() -> None:
    cluster = Cluster(GPU, LINK, None)
    asked = question(16, 2)
    assert predict(asked, STRATEGIES["hsdp"], cluster, checkpointing=False, utilisation=0.4) is None


def test_the_best_step_shows_what_cannot_hide_and_the_worst_shows_all() -> None:
    """ZeRO-3 of P in bf16 on 8: each pass takes 7/8 x 2e9 / 50e9 = 35 ms in units + 1 calls.

    By measure, a step computes 300 ms, forward a third of it.
    """
    asked = question(8)
    units = asked.model.blocks + 1
    step = predict(
        asked, STRATEGIES["zero-3"], Cluster(GPU, LINK, None),
        checkpointing=False, utilisation=0.5, measured_compute_ms=300.0,
    )  # fmt: skip
    assert step is not None
    assert step.comm_ms == pytest.approx(3 * 35)
    assert step.best_ms == pytest.approx(300 + 3 * 35 / units)
    assert step.worst_ms == pytest.approx(300 + 3 * 35)
    short = predict(
        asked, STRATEGIES["zero-3"], Cluster(GPU, LINK, None),
        checkpointing=False, utilisation=0.5, measured_compute_ms=30.0,
    )  # fmt: skip
    assert short is not None
    assert short.best_ms == pytest.approx(35 + 70)  # both passes wait for the link


@pytest.mark.parametrize(
    ("strategy", "precision", "milliseconds"),
    [
        # Adam's 8 bytes and 4 of the parameter, read and written; 4 of the gradient read: 28 bytes.
        ("ddp", "fp32", 28.0),
        ("full-shard", "fp32", 28.0 / 8),
        ("zero-1", "fp32", 28.0 / 8),
    ],
)
def test_the_update_is_bound_by_the_memory_of_the_gpu(
    strategy: str, precision: str, milliseconds: float
) -> None:
    step = predict(
        question(precision=precision), STRATEGIES[strategy], Cluster(GPU, LINK, None),
        checkpointing=False, utilisation=0.5,
    )  # fmt: skip
    assert step is not None
    assert step.optimizer_ms == pytest.approx(milliseconds)
    assert step.host_ms == 0


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
    step = predict(
        question(precision="fp32", offload=offload), STRATEGIES[strategy], Cluster(GPU, LINK, None),
        checkpointing=False, utilisation=0.5,
    )  # fmt: skip
    assert step is not None
    assert step.optimizer_ms == 0
    assert step.host_ms == pytest.approx(milliseconds)
