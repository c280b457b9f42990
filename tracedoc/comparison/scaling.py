"""Whether more GPUs do the same work each, or share it, and how efficient they are."""

from __future__ import annotations

import msgspec

from tracedoc.comparison.waterfall import step_lengths
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import InputError

KINDS = ("weak", "strong")

_SAME_WORK = 0.1
"""How far the arithmetic of a GPU may be from that of a kind of scaling."""


class Scaling(msgspec.Struct, frozen=True):
    """From ``base_gpus`` to ``head_gpus``: ``kind`` is "weak", "strong" or "other", ``evidence`` says why.

    ``efficiency`` is the ideal step over the measured one, ``speed_up`` how much more work is done in a
    second, at most ``head_gpus / base_gpus`` if nothing is lost. ``gpu_time_ratio`` is how much more GPU time
    a unit of work takes than on BASE's GPUs. Samples per second, and GPU-hours for a million samples, are
    known where samples were given.
    """

    base_gpus: int
    head_gpus: int
    kind: str
    evidence: str
    work_frac: float
    efficiency: float
    speed_up: float
    gpu_time_ratio: float
    base_samples_per_s: float | None = None
    head_samples_per_s: float | None = None
    base_gpu_hours: float | None = None
    head_gpu_hours: float | None = None


def gpus(diagnosis: Diagnosis) -> int:
    """The number of ranks of the job, as far as the capture tells."""
    return diagnosis.run.world_size or len(diagnosis.run.ranks_seen)


def scaling_of(
    base: Diagnosis,
    head: Diagnosis,
    *,
    kind: str | None = None,
    samples: tuple[float, float] | None = None,
) -> Scaling | None:
    """The scaling of the work; ``None`` for runs on the same number of GPUs without a word about it.

    Raises :class:`InputError` where the sides are swapped, or nothing tells whether the GPUs share the work.
    """
    before, after = gpus(base), gpus(head)
    if before == after and kind is None and samples is None:
        return None
    if before > after:
        raise InputError(
            f"BASE has {before} GPUs and HEAD {after}: the sides are swapped",
            "name the run on fewer GPUs first",
        )
    if samples is not None:
        work, evidence = (samples[1] / after) / (samples[0] / before), "samples per step were given"
    elif kind is not None:
        work, evidence = (1.0 if kind == "weak" else before / after), "as told"
    else:
        work, evidence = _from_captures(base, head)
    steps = step_lengths(base, head)
    faster = steps[0] / steps[1] if steps[1] > 0 else 0.0
    return Scaling(
        base_gpus=before,
        head_gpus=after,
        kind=_name_of(work, before / after),
        evidence=evidence,
        work_frac=work,
        efficiency=faster * work,
        speed_up=faster * work * after / before,
        gpu_time_ratio=1 / (faster * work) if faster * work > 0 else 0.0,
        base_samples_per_s=_samples_per_s(samples[0], steps[0]) if samples else None,
        head_samples_per_s=_samples_per_s(samples[1], steps[1]) if samples else None,
        base_gpu_hours=_gpu_hours(samples[0], steps[0], before) if samples else None,
        head_gpu_hours=_gpu_hours(samples[1], steps[1], after) if samples else None,
    )


def _samples_per_s(samples: float, step_ms: float) -> float | None:
    """Return the samples that all GPUs train in a second."""
    return 1000 * samples / step_ms if step_ms > 0 else None


def _gpu_hours(samples: float, step_ms: float, gpus: int) -> float:
    """Return the hours of one GPU that a million samples take."""
    return gpus * step_ms / 3.6e6 * 1e6 / samples


def _name_of(work: float, shared: float) -> str:
    if abs(work - 1.0) <= _SAME_WORK:
        return "weak"
    return "strong" if abs(work / shared - 1.0) <= _SAME_WORK else "other"


def _from_captures(base: Diagnosis, head: Diagnosis) -> tuple[float, str]:
    """Return the work of a GPU of HEAD as a share of one of BASE: by arithmetic, else by the loaders."""
    before, after = flop_of(base), flop_of(head)
    if before is not None and after is not None:
        ratio = after / before
        return _work(ratio, base, head), f"a GPU does {ratio:.2f} times the arithmetic of a step"
    before, after = _batch(base), _batch(head)
    if before is None or after is None:
        raise InputError(
            "nothing in these captures tells whether the GPUs share one batch or have one each",
            "add --scaling weak (the same batch per GPU), --scaling strong (the same global batch), or"
            " --samples-per-step BASE,HEAD",
        )
    return _work(after / before, base, head), f"batches of {before:.0f} and {after:.0f} samples on a GPU"


def _work(ratio: float, base: Diagnosis, head: Diagnosis) -> float:
    """Return a ratio as exactly that of weak or strong scaling where it is near one of them."""
    shared = gpus(base) / gpus(head)
    if abs(ratio - 1.0) <= _SAME_WORK:
        return 1.0
    return shared if abs(ratio / shared - 1.0) <= _SAME_WORK else ratio


def _batch(diagnosis: Diagnosis) -> float | None:
    """Return the samples of a GPU's step: the batch of its loader, in each of its micro-batches."""
    batch = diagnosis.run.settings.get("batch size of the loader", "")
    if not batch.isdecimal() or not 0 < int(batch) < 10**9:
        return None
    parts = diagnosis.number("micro_batches")
    return float(batch) * (parts if parts is not None and parts > 0 else 1)


def flop_of(diagnosis: Diagnosis) -> float | None:
    """The arithmetic of the model in a step of one GPU, in TFLOP; ``None`` where it is not known."""
    rate, step_ms = diagnosis.number("model_tflops") or 0.0, diagnosis.number("step_ms") or 0.0
    return rate * step_ms / 1000 if rate > 0 and step_ms > 0 else None
