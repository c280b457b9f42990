"""Read what a plan is told: sizes as people type them, a captured run, or the first step of a script."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json
from tracedoc.errors import InputError
from tracedoc.planner.setup import Training
from tracedoc.planner.shape import ModelShape, OneStep, shape_from_parameters
from tracedoc.predicted import Predicted
from tracedoc.run.job import (
    BLOCK_CLASS,
    BLOCK_PARAMETERS,
    BLOCKS,
    CHECKPOINTING,
    HELD_DTYPE,
    MICRO_BATCH,
    MIXED_PRECISION,
    OPTIMIZER,
    PARAMETERS,
    SEQUENCE,
    TRAINED,
)
from tracedoc.tables import CollectiveRow
from tracedoc.units import format_gb

if TYPE_CHECKING:
    from tracedoc.firststep.estimate import FirstStep

_SIZES = {
    f"{prefix}{binary}B": (1024.0 if binary else 1000.0) ** power
    for power, prefix in enumerate(("k", "M", "G", "T"), start=1)
    for binary in ("", "i")
}
_COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LARGEST_COUNT = 1e15


def parse_size(text: str, option: str) -> float:
    """Return the bytes of ``24GB`` (1e9 each) or ``24GiB``; an :class:`InputError` names the nearest size."""
    match = re.fullmatch(r"\s*([-+]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InputError(f"{option} {text!r} is no size", f"write it as {option} 24GB")
    number, unit = match[1], match[2]
    if float(number) <= 0:
        raise InputError(f"{option} {text!r} is not positive", f"write it as {option} 24GB")
    known = {name.lower(): name for name in _SIZES}
    if unit.lower() in known:
        return float(number) * _SIZES[known[unit.lower()]]
    if not unit:
        raise InputError(f"{option} {text!r} has no unit", f"did you mean: {option} {number}GB")
    near = difflib.get_close_matches(unit.lower(), known, n=1, cutoff=0.0)
    raise InputError(
        f"{option} {text!r}: no unit is called {unit!r}", f"did you mean: {option} {number}{known[near[0]]}"
    )


def parse_count(text: str, option: str) -> int:
    """Return the number in ``7e9``, ``7B``, ``350M`` or ``124439808``, or raise :class:`InputError`."""
    match = re.fullmatch(r"\s*([-+]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InputError(f"{option} {text!r} is no number", f"write it as {option} 7e9 or {option} 7B")
    number, unit = match[1].replace("_", ""), match[2]
    factor = 1.0 if not unit else _COUNTS.get(unit.upper() if unit != "k" else "k", 0.0)
    if not factor:
        raise InputError(
            f"{option} {text!r}: no multiple is called {unit!r}", f"did you mean: {option} {number}B"
        )
    value = float(number) * factor
    if not 0 < value <= LARGEST_COUNT:
        what = "not positive" if value <= 0 else "more than any model has"
        raise InputError(f"{option} {text!r} is {what}", f"write it as {option} 7e9 or {option} 7B")
    return round(value)


_ITEM_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "float": 4, "bfloat16": 2, "half": 2}


class Present(msgspec.Struct, frozen=True):
    """How a run trains now; ``None`` and "" where that is not known.

    ``strategy`` is an id of the planner. ``tokens_known`` says that micro-batch and sequence are the run's
    own. ``replayed`` are steps after changes, as ``tracedoc whatif`` names them: low, likely and high.
    """

    strategy: str = ""
    step_ms: float | None = None
    compute_ms: float | None = None
    peak_bytes: float | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    trained: int | None = None
    checkpointing: bool | None = None
    replayed: tuple[tuple[str, tuple[float, float, float]], ...] = ()

    @property
    def tokens_known(self) -> bool:
        """Whether the run tells how many tokens a GPU sees at a time."""
        return bool(self.micro_batch and self.sequence)


class Captured(msgspec.Struct, frozen=True):
    """What is known from a run; ``None`` and "" where it is not. ``notes`` give the source of each number."""

    model: ModelShape | None
    gpus: int | None
    nodes: int
    device: str
    busbw_gbps: float | None
    latency_us: float | None
    memory_bytes: float | None
    present: Present
    notes: tuple[str, ...]


def captured(path: str) -> Captured:
    """The part of a diagnosis in JSON, or of a run's traces, that a plan needs.

    Raises :class:`InputError` if the path is neither.
    """
    from tracedoc.cli.reading import is_diagnosis, run_pipeline
    from tracedoc.pipeline import Options

    if os.path.isfile(path) and is_diagnosis(path):
        diagnosis = from_json(Path(path).read_bytes())
    else:
        diagnosis = run_pipeline((path,), Options(cache=True))
    model, source = _model(diagnosis)
    notes = []
    if model is not None:
        notes.append(f"From the run: {model.parameters:,} parameters ({source}).")
    link = link_curve(diagnosis)
    if link is not None:
        gbps, latency_us, row = link
        calls = f" and {latency_us:.3g} us a call" if latency_us else ""
        notes.append(
            f"From the run: {gbps:.3g} GB/s bus bandwidth{calls} in its {row.op.replace('_', '-')} of"
            f" {(row.bytes_median or 0) / 1e6:.3g} MB."
        )
    now = present(diagnosis)
    if now.tokens_known:
        notes.append(f"From the run: {now.micro_batch} x {now.sequence} tokens of a GPU at a time.")
    else:
        notes.append("The run does not tell its sequences: activations are those of --seq and --micro-batch.")
    hosts = {rank.host for rank in diagnosis.ranks if rank.host}
    seen = diagnosis.run.world_size or len(diagnosis.run.ranks_seen) or None
    return Captured(
        model=model,
        gpus=seen,
        nodes=max(1, len(hosts)),
        device=diagnosis.run.device,
        busbw_gbps=link[0] if link else None,
        latency_us=link[1] if link else None,
        memory_bytes=diagnosis.number("device_memory_bytes") or None,
        present=now,
        notes=tuple(notes),
    )


def _model(diagnosis: Diagnosis) -> tuple[ModelShape | None, str]:
    if (shape := _recorded_model(diagnosis.run.settings)) is not None:
        return shape, "recorded by its hook"
    gathered = diagnosis.number("estimated_parameters") or 0.0
    if gathered >= 100_000:
        return shape_from_parameters(int(gathered)), "sum of the gathered units"
    elements = _reduced_elements(diagnosis)
    if elements >= 100_000:
        return shape_from_parameters(elements), "gradients that are reduced in a step"
    return None, ""


def _recorded_model(settings: Mapping[str, str]) -> ModelShape | None:
    """Return the model that the run recorded, with its real blocks; ``None`` where it recorded none."""
    total = whole(settings, PARAMETERS)
    if total is None or total < 100_000:
        return None
    shape = shape_from_parameters(total)
    count, size = whole(settings, BLOCKS), whole(settings, BLOCK_PARAMETERS)
    name = settings.get(BLOCK_CLASS, "")
    if count and size and count * size < total:
        shape = replace(shape, blocks=count, block_parameters=size, outside_parameters=total - count * size)
    if name.isidentifier():
        shape = replace(shape, wrap_classes=(name,))
    return shape


def _reduced_elements(diagnosis: Diagnosis) -> int:
    """Return the elements that the whole world all-reduces in a step, as DDP does with every gradient."""
    if diagnosis.run.strategy.name != "DDP":
        return 0
    world = diagnosis.run.world_size
    return sum(
        row.bytes_per_step // _ITEM_BYTES[row.dtype]
        for row in diagnosis.detail.collectives
        if row.op == "all_reduce"
        and row.group_size == world
        and row.bytes_per_step
        and row.dtype in _ITEM_BYTES
    )


def require_model(found: Captured, path: str) -> ModelShape:
    """Return the model of a run, or raise :class:`InputError` where the run does not record its size."""
    if found.model is None:
        raise InputError(
            f"{path} does not tell how many parameters its model has",
            "add --params 7e9 or --model config.json",
        )
    return found.model


def present(diagnosis: Diagnosis) -> Present:
    """The run's training: from its facts, and from the settings that its ranks recorded."""
    settings, on_gpu = diagnosis.run.settings, diagnosis.run.backend != "gloo"
    samples, tokens = diagnosis.number("samples_per_s"), diagnosis.number("tokens_per_s")
    batch, rounds = diagnosis.number("micro_batch_samples"), diagnosis.number("micro_batches")
    trained, every = whole(settings, TRAINED), whole(settings, PARAMETERS)
    return Present(
        strategy=_STRATEGIES.get((_kind(diagnosis), diagnosis.run.strategy.sharding), ""),
        step_ms=diagnosis.number("step_ms") or None if on_gpu else None,
        compute_ms=diagnosis.budget.compute_ms if diagnosis.budget and on_gpu else None,
        peak_bytes=diagnosis.number("peak_reserved_bytes") or None,
        micro_batch=int(batch) if batch else whole(settings, MICRO_BATCH),
        sequence=round(tokens / samples) if tokens and samples else whole(settings, SEQUENCE),
        accumulation=int(rounds) if rounds and rounds >= 1 else None,
        precision=_precision(diagnosis),
        optimizer=_OPTIMIZERS.get(settings.get(OPTIMIZER, "").lower()),
        trained=trained if trained and every and trained < every else None,
        checkpointing={"yes": True, "no": False}.get(settings.get(CHECKPOINTING, "")),
        replayed=_replayed(diagnosis) if on_gpu else (),
    )


def _replayed(diagnosis: Diagnosis) -> tuple[tuple[str, tuple[float, float, float]], ...]:
    """Return the replayed steps that a plan asks about: on more ranks, or with parameters kept gathered."""
    found = [fix.predicted for finding in diagnosis.findings for fix in finding.fixes if fix.predicted]
    more = diagnosis.replay.more_ranks if diagnosis.replay else ()
    steps = [*(one for one in more if isinstance(one, Predicted)), *found]
    asked = ("more-ranks", "keep-gathered")
    sure = [one for one in steps if one.change.startswith(asked) and one.confidence != "low"]
    return tuple(dict.fromkeys((one.change, one.step_ms) for one in sure))


def whole(settings: Mapping[str, str], name: str) -> int | None:
    """Return a setting that is a positive whole number, ``None`` where it is none."""
    value = settings.get(name, "")
    return int(value) or None if value.isascii() and value.isdigit() and len(value) < 20 else None


def link_curve(diagnosis: Diagnosis) -> tuple[float, float, CollectiveRow] | None:
    """The link that the run's collectives reached: GB/s, microseconds a call, the operation with most bytes.

    With several sizes, a call's time is a latency and its bytes over a bandwidth, fitted to them; with one,
    its bandwidth has the latency in it, and none is added. ``None`` where arrivals were not known.
    """
    moving = ("all_reduce", "all_gather", "reduce_scatter")
    rows = [
        row
        for row in diagnosis.detail.collectives
        if row.busbw_gbps and row.bytes_median and row.bytes_per_step and row.op in moving
    ]
    if not rows or diagnosis.run.backend == "gloo":
        return None
    largest = max(rows, key=lambda row: row.bytes_per_step or 0)
    # Messages of a few bytes say nothing of a bandwidth.
    sizes = ((row.bytes_median or 0, row.busbw_gbps or 0.0) for row in rows)
    points = sorted((size / 1e9, rate) for size, rate in sizes if size >= 1 << 16)
    gbps, latency_us = largest.busbw_gbps or 0.0, 0.0
    if len(points) > 1 and points[-1][0] > 4 * points[0][0]:
        (small, slow), (large, fast) = points[0], points[-1]
        seconds = large / fast - small / slow
        if seconds > 0 and (large - small) / seconds >= fast:
            gbps = (large - small) / seconds
            latency_us = max(0.0, (small / slow - small / gbps) * 1e6)
    return gbps, latency_us, largest


_STRATEGIES = {
    ("single", "none"): "single",
    ("ddp", "none"): "ddp",
    ("zero", "optimizer"): "zero-1",
    ("zero", "gradients"): "zero-2",
    ("zero", "full"): "zero-3",
    ("fsdp", "gradients"): "shard-grad-op",
    ("fsdp", "full"): "full-shard",
    ("fsdp", "hybrid-full"): "hsdp",
    ("fsdp", "none"): "ddp",
}
"""The planner's strategy for a family and what it shards."""


def _kind(diagnosis: Diagnosis) -> str:
    family = diagnosis.run.strategy.family
    return next((kind for kind in ("fsdp", "zero") if family.startswith(kind)), family)


def _precision(diagnosis: Diagnosis) -> str | None:
    """The run's precision: what its trainer says, else what it gathers, multiplies or holds."""
    half = {"bfloat16": "bf16", "float16": "fp16"}
    said = diagnosis.run.settings.get(MIXED_PRECISION, "")
    if said in half.values():
        return f"{said}-mixed"
    held = diagnosis.run.settings.get(HELD_DTYPE, "").rpartition(".")[2]
    gathered, multiplied = diagnosis.value("parameter_dtype"), diagnosis.value("matrix_dtype")
    if gathered in half:
        reduced = {r.dtype for r in diagnosis.detail.collectives if r.op == "reduce_scatter"}
        pure = held in half or (not held and "Float" not in reduced)
        return "bf16" if pure and gathered == "bfloat16" else f"{half[gathered]}-mixed"
    if held == "float32" and multiplied in half:
        return f"{half[multiplied]}-mixed"
    return "bf16" if held == "bfloat16" else None


_OPTIMIZERS = {
    "adamw": "adamw",
    "fusedadam": "adamw",
    "adam": "adam",
    "sgd": "sgd-momentum",
    "adafactor": "adafactor",
    "muon": "muon",
    "adamw8bit": "adamw-8bit",
    "pagedadamw8bit": "paged-adamw-8bit",
    "pagedadamw32bit": "paged-adamw",
}


class Scripted(msgspec.Struct, frozen=True):
    """The model of a script, and how it trains."""

    model: ModelShape
    training: Training
    notes: tuple[str, ...]


def scripted(command: str) -> Scripted:
    """The model of a script and how it trains, found by running it to its first update."""
    from tracedoc.firststep.estimate import first_step

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
            precision=_scripted_precision(step),
            optimizer=_optimizer(step),
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


def _scripted_precision(step: FirstStep) -> str:
    if step.sharded:
        return f"{step.sharded}-mixed"
    if step.dtype in ("bfloat16", "float16"):
        return "bf16"
    return f"{step.autocast}-mixed" if step.autocast else "fp32"


def _optimizer(step: FirstStep) -> str:
    """The optimizer by its name, or one of as many numbers for each parameter."""
    name = step.optimizer.lower()
    by_states = ("sgd", "sgd-momentum", "adamw")[min(2, round(step.states))]
    return name if name in ("adamw", "adam", "adafactor", "muon") else by_states


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
