"""Hold the model states to the figures that papers and guides publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracedoc.planner.families import read_model_config
from tracedoc.planner.layouts import Layout, data_parallel, in_framework
from tracedoc.planner.memory import model_states, peak_memory
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters

GB = 1e9


def states(parameters: float, gpus: int, strategy: str, nodes: int = 1, **training: object):
    question = Question(shape_from_parameters(int(parameters)), Training(**training), gpus, nodes, 80e9)
    return model_states(question, data_parallel(question, strategy))


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("ddp", 120), ("zero-1", 31.4), ("zero-2", 16.6), ("zero-3", 1.875)]
)
def test_zero_paper_figure_1(strategy: str, gigabytes: float) -> None:
    assert states(7.5e9, 64, strategy).states / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [("ddp", 112), ("zero-1", 70), ("zero-2", 49), ("zero-3", 28), ("full-shard", 28)],
)
def test_7b_in_fp32_on_4_gpus(strategy: str, gigabytes: float) -> None:
    assert states(7e9, 4, strategy, precision="fp32").states / GB == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer", "gradients"),
    [
        ("ddp", 700, 1400, 700),
        ("zero-1", 700, 175, 700),
        ("zero-2", 700, 175, 87.5),
        ("zero-3", 87.5, 175, 87.5),
    ],
)
def test_175b_in_fp32_on_8_gpus(strategy: str, parameters: float, optimizer: float, gradients: float) -> None:
    found = states(175e9, 8, strategy, precision="fp32")
    assert found.parameters / GB == pytest.approx(parameters)
    assert found.optimizer / GB == pytest.approx(optimizer)
    assert found.gradients / GB == pytest.approx(gradients)


def test_63m_on_4_gpus_under_fsdp() -> None:
    found = states(63e6, 4, "full-shard", precision="fp32")
    assert found.parameters / 4 == 15.75e6
    assert found.gradients / 4 == 15.75e6
    assert found.optimizer / 4 == 2 * 15.75e6


@pytest.mark.parametrize(
    ("parameters", "gpus", "strategy", "gigabytes"),
    [
        (7e9, 4, "zero-2", 38.5),
        (7e9, 4, "full-shard", 28),
        (13e9, 4, "full-shard", 52),
        (13e9, 8, "full-shard", 26),
        (70e9, 8, "full-shard", 140),
        (70e9, 32, "full-shard", 35),
    ],
)
def test_worked_cases_in_mixed_precision(
    parameters: float, gpus: int, strategy: str, gigabytes: float
) -> None:
    assert states(parameters, gpus, strategy).states / GB == pytest.approx(gigabytes)


def test_shard_grad_op_holds_16_bit_parameters_beside_its_shards() -> None:
    found = states(7e9, 4, "shard-grad-op")
    assert (found.states + found.copies) / GB == pytest.approx(42)


def test_8_bit_adam_takes_10_bytes_a_parameter() -> None:
    assert states(13e9, 4, "full-shard", optimizer="adamw-8bit").states / GB == pytest.approx(32.5)


def test_pure_bf16_adamw_takes_8_bytes_a_parameter() -> None:
    assert states(1e9, 2, "ddp", precision="bf16").states / GB == pytest.approx(8)


def test_hybrid_sharding_splits_inside_the_node_only() -> None:
    assert states(8e9, 16, "hsdp", nodes=2).states / GB == pytest.approx(16)


def test_lora_on_7b_is_the_frozen_weights_and_little_more() -> None:
    found = states(7e9, 2, "ddp", lora_rank=16)
    assert found.states / GB == pytest.approx(14, abs=0.2)


def test_qlora_weights_take_4_127_bits() -> None:
    """65e9 at 4.127 bits are 33.5 GB; embeddings and head stay in 16 bits."""
    found = states(65e9, 1, "single", lora_rank=16, base_bits=4)
    assert 33.5 <= found.parameters / GB <= 36


def test_offload_moves_states_to_the_host() -> None:
    moved = states(7e9, 4, "zero-2", offload="optimizer")
    assert moved.parameters / GB == pytest.approx(14)
    assert moved.gradients == moved.optimizer == 0
    assert moved.host / GB == pytest.approx(24.5)
    assert states(7e9, 4, "full-shard", offload="all").host / GB == pytest.approx(28)


def test_zero_1_keeps_gradients_on_the_gpu_and_offloads_its_part_of_the_optimizer() -> None:
    moved = states(7e9, 4, "zero-1", offload="optimizer")
    assert moved.parameters / GB == moved.gradients / GB == pytest.approx(14)
    assert moved.optimizer == 0
    assert moved.host / GB == pytest.approx(12 * 7 / 4)


def test_resharded_to_a_node_each_gpu_keeps_its_part_of_the_gathered_weights() -> None:
    """16 bytes a parameter over 16 GPUs, and 2 over the 8 of a node."""
    found = states(8e9, 16, "full-shard-node", nodes=2)
    assert found.states / GB == pytest.approx(8)
    assert found.copies / GB == pytest.approx(2)


@pytest.mark.parametrize(("strategy", "gigabytes"), [("hsdp-half", 32), ("hsdp", 16), ("hsdp-2", 8)])
def test_hybrid_sharding_splits_over_its_part(strategy: str, gigabytes: int) -> None:
    assert states(8e9, 32, strategy, nodes=4).states / GB == pytest.approx(gigabytes)


def test_deepseek_v3_of_megatron_cores_report(tmp_path: Path) -> None:
    """PP 4 of 4 parts and EP 64 on 256 GPUs: 36.4, 32.1 and 131.0 GB, 199.5 in all (2603.07685, table 3).

    The report does not say of which stage; here it is the first, which has the embedding as well.
    """
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
                "num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
                "q_lora_rank": 1536, "kv_lora_rank": 512, "first_k_dense_replace": 3, "vocab_size": 129280,
            }
        )
    )  # fmt: skip
    training = Training(sequence=4096, loss="fused", accumulation=64)
    question = Question(read_model_config(file), training, 256, 32, 192e9)
    layout = Layout("megatron", 64, pipeline=4, expert=64, chunks=4, rounds=64)
    memory = peak_memory(in_framework(question, layout), layout)
    assert memory.states.states / GB == pytest.approx(36.4 + 32.1, rel=0.10)
    assert memory.activations / GB == pytest.approx(131.0, rel=0.10)
    allocated = memory.total - memory.reserve - memory.context
    assert allocated / GB == pytest.approx(199.5, rel=0.05)
