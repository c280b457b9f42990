"""Take from a captured run what a plan needs: parameters, GPUs, and the bandwidth that was measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tracedoc.cli.captured_training import Present, link_curve, number, present, whole
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json
from tracedoc.errors import InputError
from tracedoc.planner.shape import ModelShape, shape_from_parameters
from tracedoc.run.declared_training import BLOCK_CLASS, BLOCK_PARAMETERS, BLOCKS, PARAMETERS

_ITEM_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "float": 4, "bfloat16": 2, "half": 2}


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
    """Return what a plan needs from a diagnosis in JSON, or from the traces of a run.

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
        memory_bytes=number(diagnosis, "device_memory_bytes"),
        present=now,
        notes=tuple(notes),
    )


def _model(diagnosis: Diagnosis) -> tuple[ModelShape | None, str]:
    if (shape := _recorded_model(diagnosis.run.settings)) is not None:
        return shape, "recorded by its hook"
    record = diagnosis.facts.get("estimated_parameters")
    if record is not None and isinstance(record.value, int | float) and record.value >= 100_000:
        return shape_from_parameters(int(record.value)), "sum of the gathered units"
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
