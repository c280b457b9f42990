"""Put the fixes first that fit the job, in the names that users give their frameworks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracedoc.diagnosis import Finding, Fix, RunInfo, Strategy
from tracedoc.predicted import LARGER_BATCH, enlarges_batch

FRAMEWORKS = {
    "any": "any framework",
    "pytorch": "PyTorch",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "accelerate": "Accelerate",
    "trainer": "Trainer",
    "lightning": "Lightning",
    "megatron": "Megatron",
    "unknown": "",
}

FOREIGN = 3
"""The distance of a fix in the words of a framework that the job does not use."""

_TRAINERS = frozenset({"trainer", "lightning", "accelerate"})


def framework_name(name: str) -> str:
    """A framework or strategy as its users write it."""
    return FRAMEWORKS.get(_normal(name), name)


def fitting_first(fixes: tuple[Fix, ...], run: RunInfo) -> tuple[Fix, ...]:
    """The fixes with those first that fit the job: its trainer, its strategy, then any framework.

    Those of other frameworks are left out where the job's is known: of ``no_sync`` ZeRO-2 makes an error. Of
    those that fit alike the one with the largest predicted gain is first; one that changes the batch comes
    after those that keep what is trained, and one that saves next to nothing by replay after all others.

    Where a trainer such as Lightning makes the wrappers, its users cannot paste a change to the wrapper.
    """
    distances = misfits(fixes, run.strategy.name, run.frameworks)
    known = _knows_framework(run.strategy)
    fitting = [n for n in range(len(fixes)) if distances[n] < FOREIGN or not known]
    order = sorted(
        fitting,
        key=lambda n: (
            saves_nothing(fixes[n]),
            distances[n],
            changes_training(fixes[n]),
            -_predicted_gain(fixes[n]),
        ),
    )
    return tuple(fixes[n] for n in order)


def _knows_framework(strategy: Strategy) -> bool:
    """True if a strategy names who built it: a pipeline without annotations may be of any framework."""
    anybody = strategy.family == "pipeline" and strategy.confidence != "high"
    return strategy.family != "unknown" and not anybody


LONGEST_PLAN = 5
"""A plan has at most this many fixes: what comes later rests on ever more assumptions."""

FEWER_BITS = "fewer-bits"
NOT_PLANNED = (*LARGER_BATCH, FEWER_BITS)
"""Changes of what is trained, its batch or its precision, which a plan leaves as they are."""


def changes_training(fix: Fix) -> bool:
    """True for a fix that changes what is trained: the number of samples in a step."""
    return enlarges_batch(fix.replays)


def change_of_batch(finding: Finding, run: RunInfo) -> Fix | None:
    """The first fix of a finding that was played and changes what is trained; ``None`` for none."""
    found = [one for one in fitting_first(finding.fixes, run) if changes_training(one)]
    return next((one for one in found if one.predicted is not None), None)


def saves_nothing(fix: Fix) -> bool:
    """True for a fix that was played, and does not help."""
    return fix.predicted is not None and not fix.predicted.helps


def _predicted_gain(fix: Fix) -> float:
    return 0.0 if fix.predicted is None else fix.predicted.gain_ms[1]


def misfits(fixes: Sequence[Fix], strategy: str, frameworks: Sequence[str]) -> list[int]:
    """The distance of each fix from fitting a job of this strategy and these frameworks."""
    wanted = _normal(strategy)
    trainers = {_normal(one) for one in frameworks} & _TRAINERS
    if len(trainers) > 1:
        trainers -= {"accelerate"}  # Trainer works through Accelerate, which is then not the user's own.

    def distance(fix: Fix) -> int:
        framework = _normal(fix.framework)
        if framework in trainers:
            return -1
        if framework == wanted:
            return 0
        if framework and (
            wanted.startswith(framework) or (framework == "deepspeed" and wanted.startswith("zero"))
        ):
            return 1
        return 2 if framework in ("any", "pytorch") else FOREIGN

    return [distance(fix) for fix in fixes]


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
