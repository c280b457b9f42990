"""Hold what is sent, and how long that takes, by hand."""

from __future__ import annotations

import pytest

from tracedoc.planner.hardware import Cluster, Gpu, LinkKind
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters
from tracedoc.planner.traffic import Transfer, bandwidth, sent_in_an_update, transfers

P = 1_000_000_000
LINK = LinkKind("link", "a link", False, gbps=100, efficiency=0.5, latency_us=0, source="test")
SLOW = LinkKind("network", "a network", True, gbps=10, efficiency=1, latency_us=0, source="test")
GPU = Gpu("GPU", 80, half_tflops=100, hbm_gbps=1000, link="nvlink", source="test", fp32_tflops=10)


def question(gpus: int = 8, nodes: int = 1, **training: object) -> Question:
    return Question(shape_from_parameters(P), Training(**training), gpus, nodes, 80e9)


def sent(strategy: str, **where: object) -> float:
    return sum(t.sent for t in transfers(question(**where), data_parallel(question(**where), strategy)))


def seconds(transfer: Transfer, asked: Question, cluster: Cluster) -> float:
    link = bandwidth(transfer, asked, cluster)
    assert link is not None
    return transfer.seconds(*link)


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
    (reduce,) = transfers(asked, data_parallel(asked, "ddp"))
    assert seconds(reduce, asked, Cluster(GPU, LINK, None)) == pytest.approx(0.140)


def test_a_ring_over_nodes_is_as_fast_as_the_network_of_a_node() -> None:
    """2 x 4e9 x 15/16 = 7.5e9 bytes at 10 GB/s."""
    asked = question(16, 2, precision="fp32")
    (reduce,) = transfers(asked, data_parallel(asked, "ddp"))
    assert seconds(reduce, asked, Cluster(GPU, LINK, SLOW)) == pytest.approx(0.750)


def test_each_call_costs_its_latency() -> None:
    slow_start = LinkKind("link", "a link", False, gbps=1e9, efficiency=1, latency_us=100, source="test")
    asked = question()
    gather = transfers(asked, data_parallel(asked, "full-shard"))[0]
    assert gather.calls == asked.model.blocks + 1
    assert seconds(gather, asked, Cluster(GPU, slow_start, None)) == pytest.approx(
        gather.calls * 100e-6, rel=1e-3
    )


def test_one_gpu_sends_nothing() -> None:
    assert transfers(question(1), data_parallel(question(1), "single")) == ()


def test_rings_of_replicas_share_the_adapters_of_their_node() -> None:
    """P/8 x 4 bytes x 2 x 1/2 = 0.5e9 bytes at 10/8 GB/s are 400 ms; inside, 3.5e9 at 50 are 70."""
    asked = question(16, 2, precision="fp32")
    forward, _, _, reduce = transfers(asked, data_parallel(asked, "hsdp"))
    cluster = Cluster(GPU, LINK, SLOW)
    assert seconds(reduce, asked, cluster) == pytest.approx(0.400)
    assert seconds(forward, asked, cluster) == pytest.approx(0.070)


@pytest.mark.parametrize(("nodes", "hops"), [(8, 2.0), (4, 1.0), (2, 0.5)])
def test_the_latency_of_a_ring_over_nodes_grows_with_its_ranks(nodes: int, hops: float) -> None:
    """The table tells that of 32 ranks, here 40 us a call; 4e9 bytes are 153 buckets of 25 MiB."""
    network = LinkKind("network", "a network", True, gbps=1e9, efficiency=1, latency_us=40, source="test")
    asked = question(8 * nodes, nodes, precision="fp32")
    (reduce,) = transfers(asked, data_parallel(asked, "ddp"))
    assert reduce.calls == 153
    fast = LinkKind("link", "a link", False, gbps=1e9, efficiency=1, latency_us=0, source="test")
    assert seconds(reduce, asked, Cluster(GPU, fast, network)) == pytest.approx(153 * 40e-6 * hops, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [("ddp", 1), ("zero-1", 1 + 1), ("zero-2", 4 + 1), ("full-shard", 4 * 3)],
)
def test_what_gradient_accumulation_sends_again(strategy: str, passes: int) -> None:
    """Of four micro-batches DDP and ZeRO-1 reduce the last one, ZeRO-2 and FSDP each; in fp32."""
    asked = question(precision="fp32", accumulation=4)
    each = (2 if strategy == "ddp" else 1) * 4 * P * 7 / 8
    layout = data_parallel(asked, strategy)
    assert sent_in_an_update(asked, layout) == pytest.approx(passes * each)


@pytest.mark.parametrize(
    ("strategy", "groups", "gigabytes_a_second"),
    [("hsdp", 4, 10 / 8), ("hsdp-half", 8, 10 / 4), ("hsdp-2", 2, 10 / 8)],
)
def test_parts_of_other_sizes_have_rings_of_their_own(
    strategy: str, groups: int, gigabytes_a_second: float
) -> None:
    """4 nodes of 8: as many rings as a part has GPUs share the adapters of a node, 8 at most."""
    asked = question(32, 4, precision="fp32")
    reduce = transfers(asked, data_parallel(asked, strategy))[-1]
    assert reduce.group == groups
    assert reduce.size == pytest.approx(4 * P * groups / 32)
    rate = bandwidth(reduce, asked, Cluster(GPU, LINK, SLOW))
    assert rate is not None
    assert rate[0] == pytest.approx(gigabytes_a_second)


def test_what_stays_split_over_the_node_is_gathered_inside_it() -> None:
    asked = question(16, 2)
    forward, backward, _ = transfers(asked, data_parallel(asked, "full-shard-node"))
    assert (forward.group, backward.group, backward.phase) == (16, 8, "backward")
    rates = [bandwidth(one, asked, Cluster(GPU, LINK, SLOW)) for one in (forward, backward)]
    assert [rate[0] for rate in rates if rate] == [10, 50]
