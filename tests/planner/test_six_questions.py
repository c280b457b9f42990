"""Questions that were answered wrongly once, and their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracedoc.planner.families import read_model_config
from tracedoc.planner.hardware import Cluster, find_gpu, find_link, link_of
from tracedoc.planner.plan import Plan, plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import ModelShape, shape_from_parameters


def ask(
    model: float | ModelShape, gpus: int, gpu: str, *, nodes: int = 1, network: str = "", **given: object
) -> Plan:
    """Plan for GPUs by name; what a request has is given beside what training has."""
    named = find_gpu(gpu)
    across = find_link(network or named.network, across=True) if nodes > 1 else None
    own = ("framework", "search", "batch", "layout")
    request = PlanRequest(
        Cluster(named, link_of(named), across), **{name: given.pop(name) for name in own if name in given}
    )  # type: ignore[arg-type]
    shape = model if isinstance(model, ModelShape) else shape_from_parameters(int(model))
    memory = float(given.pop("memory", named.memory_bytes))  # type: ignore[arg-type]
    return plan(Question(shape, Training(**given), gpus, nodes, memory), request)  # type: ignore[arg-type]


def qwen3_30b(folder: Path) -> ModelShape:
    """Return the shape of Qwen3-30B-A3B, with 128 experts."""
    file = folder / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
                "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "intermediate_size": 6144, "tie_word_embeddings": False, "max_position_embeddings": 40960,
            }
        )
    )  # fmt: skip
    return read_model_config(file)


def test_13b_on_8_a100_takes_the_row_that_is_faster_smaller_and_does_not_recompute() -> None:
    answer = ask(13e9, 8, "A100 80GB")
    assert answer.summary == (
        "FSDP FULL_SHARD: 53.5 GB of the 85 GB on each of 8 GPUs, 0.97 to 1.45 s a step predicted."
    )
    passed_over = next(one for one in answer.strategies if one.strategy == "shard-grad-op")
    assert answer.strategies[0].dominates(passed_over)


def test_a_model_of_experts_spreads_them_though_that_is_one_way_more(tmp_path: Path) -> None:
    answer = ask(
        qwen3_30b(tmp_path), 64, "H100", nodes=8, framework="megatron", sequence=4096, batch=512, loss="fused"
    )
    first = answer.strategies[0]
    assert answer.summary == (
        "EP 16 x DP 64: 54.8 GB of the 84.9 GB on each of 64 GPUs, 3.21 to 4.81 s a step predicted."
    )
    assert not any(one.dominates(first) for one in answer.strategies)


def test_a_search_keeps_its_winner_though_a_rival_is_unlikely_to_fit() -> None:
    """FSDP of half a node wins; FULL_SHARD, which may not fit there, is no rival."""
    answer = ask(7e9, 64, "A100 80GB", nodes=8, network="roce-100g", search=True, sequence=4096)
    assert answer.found
    assert answer.recommended == answer.found[0].strategy
    assert answer.strategies[0].strategy == answer.recommended


def test_one_node_is_named_first_where_the_network_is_too_slow() -> None:
    answer = ask(8e9, 16, "A100 80GB", nodes=2, network="ethernet-10g", sequence=4096, micro_batch=2)
    assert answer.summary == (
        "8 GPUs in one node are predicted 6.5 times as fast: FSDP SHARD_GRAD_OP with activation"
        " checkpointing (--gpus 8 --nodes 1). FSDP HYBRID_SHARD with activation checkpointing: 27.1 GB of"
        " the 85 GB on each of 16 GPUs, 33.5 to 45.4 s a step predicted."
    )
    (first, *_) = answer.alternatives
    assert first.option == "--gpus 8 --nodes 1"
    assert first.times > 4


def test_fewer_gpus_are_held_against_the_best_row_and_not_against_what_was_asked_for() -> None:
    """Over PCIe TP 4 is slower than 4 GPUs in a pipeline, but not so the pipelines of 8."""
    answer = ask(8e9, 8, "A100 PCIe 80GB", framework="megatron", layout="tp4-dp2", batch=32)
    assert answer.faster is not None
    assert answer.alternatives == ()


def test_another_framework_is_named_first_where_it_is_faster() -> None:
    answer = ask(70e9, 128, "A100 80GB", nodes=16, network="100Gbit/s")
    assert answer.summary == (
        "torchtitan is predicted 5.8 times as fast: TP 8 x PP 16 (--framework torchtitan). FSDP"
        " FULL_SHARD, resharded to a node with activation checkpointing: 47 GB of the 85 GB on each of 128"
        " GPUs, 38.4 to 54.8 s a step predicted."
    )
    assert [one.option for one in answer.alternatives][-1] == "--framework torchtitan"


def test_nothing_fits_considers_every_row_of_the_table() -> None:
    answer = ask(13e9, 4, "A100 40GB", memory=41e9, optimizer="adamw-8bit", micro_batch=2)
    maybe = [one for one in answer.strategies if one.doubt == 1]
    assert answer.recommended is None
    assert {one.family for one in maybe} == {"deepspeed"}
    assert answer.changes[0].option == "--framework deepspeed"
    assert answer.summary == (
        "Nothing of PyTorch's is predicted to fit: each of 4 GPUs has 41 GB, and FSDP FULL_SHARD takes"
        " 42.3 GB (nine of ten published peaks lie within 8 % of what is predicted). The smallest change"
        " that may: DeepSpeed instead (DeepSpeed ZeRO-3 with activation checkpointing, 40.7 GB)."
    )


def test_a_frozen_model_on_the_host_is_not_said_to_be_too_large_for_a_gpu() -> None:
    answer = ask(7e9, 2, "RTX 4090", lora_rank=16, offload="all")
    assert answer.rule == "adapters-offloaded"
    assert answer.because == (
        "You asked for states in host memory: 14.1 GB of it in each node leave 13.2 GB of 25.3 GB on each"
        " GPU."
    )


@pytest.mark.parametrize(("gpu", "printed"), [("A100 PCIe 80GB", False), ("A100 80GB", True)])
def test_products_overlap_what_they_send_over_nvlink_alone(gpu: str, *, printed: bool) -> None:
    answer = ask(13e9, 8, gpu, framework="megatron", layout="tp4-dp2", batch=16)
    assert ("--tp-comm-overlap" in answer.configurations[0].text) == printed
    assert "--overlap-grad-reduce" in answer.configurations[0].text


def test_a_long_sequence_that_no_change_alone_lets_fit_is_helped_by_two() -> None:
    """The logits of 128k tokens are larger than any GPU; with a chunked loss something fits."""
    answer = ask(8e9, 1, "H100", sequence=1 << 17)
    assert answer.recommended is None
    assert {one.option.partition(" --")[0] for one in answer.changes} == {"--loss chunked"}
    assert answer.changes[0].what.startswith("a chunked loss and ")


def test_ranges_of_experts_are_wide_where_no_run_is_published(tmp_path: Path) -> None:
    answer = ask(qwen3_30b(tmp_path), 8, "H100", sequence=4096)
    step = answer.strategies[0].step
    assert step is not None
    assert step.worst_ms / step.best_ms > 1.5
    assert any(
        "is wide: no run of experts under DDP, FSDP or ZeRO is published" in text
        for text in answer.assumptions
    )


def test_torchtitan_recomputes_selectively_where_that_fits() -> None:
    """A line of its settings; PyTorch's own code for it is long, and found by a search."""
    answer = ask(70e9, 64, "H100", framework="torchtitan", layout="tp4-dp16", sequence=8192, batch=16)
    (chosen,) = (one for one in answer.strategies if one.strategy == answer.recommended)
    assert chosen.selective
    assert 'mode = "selective"' in answer.configurations[0].text
