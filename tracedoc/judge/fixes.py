"""Put the fixes first that fit the job, in the names that users give their frameworks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracedoc.diagnosis import Fix, RunInfo, Strategy

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
    """Return a framework or strategy as its users write it."""
    return FRAMEWORKS.get(_normal(name), name)


def fitting_first(fixes: tuple[Fix, ...], run: RunInfo) -> tuple[Fix, ...]:
    """Return the fixes with those first that fit the job: its trainer, its strategy, then any framework.

    Those of other frameworks are left out where the job's is known. A fix that saves nothing by replay comes
    after all others.

    Where a trainer such as Lightning makes the wrappers, its users cannot paste a change to the wrapper.
    """
    distances = misfits(fixes, run.strategy.name, run.frameworks)
    known = _knows_framework(run.strategy) and min(distances, default=FOREIGN) < FOREIGN
    fitting = [n for n in range(len(fixes)) if distances[n] < FOREIGN or not known]
    order = sorted(fitting, key=lambda n: (_saves_nothing(fixes[n]), distances[n]))
    return tuple(fixes[n] for n in order)


def _knows_framework(strategy: Strategy) -> bool:
    """Tell whether a strategy names who built it: a pipeline without annotations may be of any framework."""
    anybody = strategy.family == "pipeline" and strategy.confidence != "high"
    return strategy.family != "unknown" and not anybody


def _saves_nothing(fix: Fix) -> bool:
    return fix.predicted is not None and fix.predicted.gain_ms[1] <= 0


def misfits(fixes: Sequence[Fix], strategy: str, frameworks: Sequence[str]) -> list[int]:
    """Return of each fix how far it is from fitting a job of this strategy and these frameworks."""
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
        if framework and (wanted.startswith(framework) or (framework == "deepspeed" and "zero" in wanted)):
            return 1
        return 2 if framework in ("any", "pytorch") else FOREIGN

    return [distance(fix) for fix in fixes]


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
