"""Hold what a plan makes of a script's first step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from tracedoc.cli import main
from tracedoc.cli.plan.sources import from_step
from tracedoc.firststep.estimate import FirstStep
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.memory import peak_memory
from tracedoc.planner.setup import Question
from tracedoc.planner.timing import step_flops

STEP = FirstStep(
    model="Net",
    path="module.layers",
    parameters=1_000_000,
    trained=1_000_000,
    dtype="float32",
    autocast="bf16",
    sharded="",
    compiled=False,
    optimizer="Lion",
    states=1.0,
    rounds=2,
    blocks=10,
    block="Layer",
    block_parameters=90_000,
    block_bytes=50_000_000,
    input_bytes=10_000_000,
    output_bytes=10_000_000,
    activation_bytes=70_000_000,
    peak_bytes=80_000_000,
    matmul_flops=3_000,
    attention_flops=300,
    batch=(8, 100),
    whole_numbers=True,
)


def asked(step: FirstStep, **changes: object) -> Question:
    found = from_step(step, "train.py")
    return Question(found.model, found.training, 2, 1, 80e9).changed(optimizer="adamw", **changes)


def test_the_peak_is_what_was_counted_beside_the_states_of_each_strategy() -> None:
    """DDP in mixed precision: 16 bytes a parameter and 2 of a copy; blocks keep 50 MB, the rest is 20 MB."""
    memory = peak_memory(asked(STEP), data_parallel(asked(STEP), "ddp"))
    assert memory.states.states + memory.states.copies == 18e6
    assert (memory.activations, memory.working) == (50e6, 20e6)


def test_with_checkpointing_blocks_keep_what_goes_into_them() -> None:
    memory = peak_memory(asked(STEP, checkpointing="on"), data_parallel(asked(STEP), "ddp"))
    assert (memory.activations, memory.working) == (10e6, 20e6)


def test_twice_the_micro_batch_takes_twice_the_activations() -> None:
    memory = peak_memory(asked(STEP, micro_batch=16), data_parallel(asked(STEP, micro_batch=16), "ddp"))
    assert (memory.activations, memory.working) == (100e6, 40e6)


def test_checkpointing_repeats_the_forward_third_of_the_arithmetic() -> None:
    forward, backward, again = step_flops(asked(STEP, checkpointing="on"))
    assert (forward.total, backward.total, again.total) == (1100, 2200, 1100)


def test_a_script_that_checkpoints_repeats_nothing_twice() -> None:
    step = replace(STEP, block_bytes=11_000_000)
    _, _, again = step_flops(asked(step, checkpointing="on"))
    assert again.total == 0
    assert any("already" in note for note in from_step(step, "train.py").notes)


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "bf16-mixed"),
        ({"autocast": ""}, "fp32"),
        ({"autocast": "fp16"}, "fp16-mixed"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "bfloat16", "sharded": "bf16"}, "bf16-mixed"),
    ],
)
def test_precision_is_what_the_script_computes_in(changes: dict[str, str], precision: str) -> None:
    assert from_step(replace(STEP, **changes), "train.py").training.precision == precision  # type: ignore[arg-type]


def test_an_unknown_optimizer_counts_by_its_states() -> None:
    assert from_step(STEP, "train.py").training.optimizer == "sgd-momentum"
    assert from_step(replace(STEP, states=2.0), "train.py").training.optimizer == "adamw"


def test_frozen_parameters_get_no_gradients() -> None:
    question = asked(replace(STEP, trained=100_000))
    assert (question.trainable, question.frozen) == (100_000, 900_000)


def test_pictures_are_samples_and_no_tokens() -> None:
    found = from_step(replace(STEP, batch=(8, 3, 32, 32), whole_numbers=False), "train.py").training
    assert (found.micro_batch, found.sequence) == (8, 1)


@pytest.mark.parametrize("option", [("--seq", "512"), ("--params", "7B"), ("--precision", "bf16")])
def test_what_the_script_decides_is_not_asked_for(option: tuple[str, str]) -> None:
    done = CliRunner().invoke(main, ["plan", "--script", "train.py", *option])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
