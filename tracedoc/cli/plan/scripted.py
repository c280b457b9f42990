"""Take from the first step of a script, under fake tensors, what a plan needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from tracedoc.planner.setup import Training
from tracedoc.planner.shape import ModelShape, OneStep
from tracedoc.units import format_gb

if TYPE_CHECKING:
    from tracedoc.firststep.launch import FirstStep


class Scripted(msgspec.Struct, frozen=True):
    """The model of a script, and how it trains."""

    model: ModelShape
    training: Training
    notes: tuple[str, ...]


def scripted(command: str) -> Scripted:
    """The model of a script and how it trains, found by running it to its first update."""
    from tracedoc.firststep.launch import first_step

    return from_step(first_step(command), command)


def from_step(step: FirstStep, script: str) -> Scripted:
    """Return the model and training that a first step shows."""
    micro_batch = step.batch[0] if step.batch else 1
    reads_tokens = step.whole_numbers and len(step.batch) == 2
    sequence = step.batch[1] if reads_tokens else 1
    counted = msgspec.convert({**asdict(step), "tokens": micro_batch * sequence}, OneStep)
    return Scripted(
        model=_shape(step, counted),
        training=Training(
            micro_batch=micro_batch,
            sequence=sequence,
            accumulation=step.rounds,
            precision=_precision(step),
            optimizer=_OPTIMIZERS.get(step.optimizer.lower()) or _by_states(step.states),
            compiled=step.compiled,
        ),
        notes=_notes(step, counted, script),
    )


def _shape(step: FirstStep, counted: OneStep) -> ModelShape:
    blocks = max(1, step.blocks)
    block = step.block_parameters or step.parameters
    path = step.path.removeprefix("module.")
    hidden = max(1, round((block / 12) ** 0.5))
    return ModelShape(
        name=f"{step.model}, estimated from its first step under fake tensors",
        parameters=step.parameters,
        active_parameters=step.parameters,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=max(0, step.parameters - blocks * block),
        hidden=hidden,
        heads=1,
        q_width=hidden,
        kv_width=hidden,
        mlp_width=hidden,
        vocabulary=1,
        linears=(),
        has_logits=False,
        wrap_classes=(step.block,) if step.block else (),
        layers_path=f"model.{path}" if path else "model.children()",
        step=counted,
    )


def _precision(step: FirstStep) -> str:
    if step.sharded:
        return f"{step.sharded}-mixed"
    if step.dtype in ("bfloat16", "float16"):
        return "bf16"
    return f"{step.autocast}-mixed" if step.autocast else "fp32"


_OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "adafactor": "adafactor", "muon": "muon"}


def _by_states(states: float) -> str:
    """Return the optimizer of as many numbers for each parameter."""
    return ("sgd", "sgd-momentum", "adamw")[min(2, round(states))]


def _notes(step: FirstStep, counted: OneStep, script: str) -> tuple[str, ...]:
    shape = " x ".join(str(n) for n in step.batch) or "unknown"
    notes = [
        f"Estimate: the first step of {script}, run under fake tensors up to its first update, with the CPU's"
        " kernels for those of a GPU; nothing was measured. Other micro-batches are scaled from it.",
        f"From the script: {step.parameters:,} parameters, a batch of shape {shape}, {step.optimizer};"
        f" {format_gb(step.peak_bytes)} at the peak of its step on one GPU, before the optimizer has states.",
    ]
    if counted.checkpointed:
        notes.append("The script checkpoints the activations of its blocks already.")
    if not step.blocks:
        notes.append("No list of equal blocks was found in the model: it is one unit.")
    if step.dtype == "float16" and not step.sharded:
        notes.append("Pure fp16 is counted as pure bf16.")
    return tuple(notes)
