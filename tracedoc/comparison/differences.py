"""What else differs between two runs: settings, counts, kernels, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import Limit

MOST_KERNELS = 5
"""Kernels shown: those whose time changed most."""

COUNTS = (
    "kernels_per_step",
    "collectives_per_step",
    "comm_bytes_per_step",
    "median_collective_bytes",
    "gradient_buckets",
    "gradient_bytes",
    "micro_batches",
    "reductions_per_micro_batch",
    "gathers_per_micro_batch",
    "offloaded_bytes_per_step",
)
"""Counts and sizes that follow from the script: unlike times they do not vary from step to step."""

_LEAST_SHARE = 0.01
_LEAST_COUNT_CHANGE = 0.05


class Setting(msgspec.Struct, frozen=True):
    """Something that is not a measurement, and differs."""

    name: str
    base: str
    head: str


class KernelChange(msgspec.Struct, frozen=True):
    """A kernel whose time in the analysed step changed; no calls where the side does not have it."""

    name: str
    base_calls: int
    head_calls: int
    base_ms: float
    head_ms: float


class FactChange(msgspec.Struct, frozen=True):
    """A count or size that differs."""

    name: str
    unit: str
    base: float
    head: float


def settings_that_differ(base: Diagnosis, head: Diagnosis) -> tuple[Setting, ...]:
    """Return device, ranks, backend, strategy, frameworks, and texts among the facts that differ."""
    pairs = [
        ("device", base.run.device, head.run.device),
        ("GPUs", str(base.run.world_size), str(head.run.world_size)),
        ("backend", base.run.backend, head.run.backend),
        ("strategy", base.run.strategy.name, head.run.strategy.name),
        ("frameworks", ", ".join(base.run.frameworks), ", ".join(head.run.frameworks)),
        ("tracedoc", base.tool_version, head.tool_version),
    ]
    return tuple(Setting(name, before, after) for name, before, after in pairs if before != after)


def kernels_that_changed(base: Diagnosis, head: Diagnosis) -> tuple[KernelChange, ...]:
    """Return the kernels whose time changed most, from a hundredth of the shorter step on."""
    before = {row.name: row for row in base.detail.kernels}
    after = {row.name: row for row in head.detail.kernels}
    step = min((side.budget.step_ms for side in (base, head) if side.budget), default=0.0)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        change = KernelChange(
            name,
            old.calls if old else 0,
            new.calls if new else 0,
            old.time_ms if old else 0.0,
            new.time_ms if new else 0.0,
        )
        if abs(change.head_ms - change.base_ms) > _LEAST_SHARE * step:
            changes.append(change)
    return tuple(sorted(changes, key=lambda one: -abs(one.head_ms - one.base_ms))[:MOST_KERNELS])


def facts_that_moved(base: Diagnosis, head: Diagnosis) -> tuple[FactChange, ...]:
    """Return those of :data:`COUNTS` that differ by a twentieth or more."""
    found = []
    for name in COUNTS:
        old, new = _number(base, name), _number(head, name)
        if old is None or new is None or abs(new - old) <= _LEAST_COUNT_CHANGE * max(abs(old), abs(new)):
            continue
        found.append(FactChange(name, base.facts[name].unit, old, new))
    return tuple(found)


def _number(diagnosis: Diagnosis, name: str) -> float | None:
    record = diagnosis.facts.get(name)
    value = record.value if record is not None else None
    return float(value) if isinstance(value, int | float) else None


def limits_of(base: Diagnosis, head: Diagnosis) -> Iterator[Limit]:
    """Yield what makes the two runs hard to compare."""
    if base.run.device != head.run.device:
        yield Limit(
            "other-device",
            f"BASE ran on {base.run.device or 'an unknown device'}, HEAD on {head.run.device or 'another'}",
            "the change is that of the device and of everything else together",
        )
    if base.run.strategy.name != head.run.strategy.name:
        yield Limit(
            "other-strategy",
            f"BASE uses {base.run.strategy.name}, HEAD {head.run.strategy.name}",
            "parts of the step compare; collectives of one kind do not",
        )
    if _other_work(base, head):
        yield Limit(
            "other-work",
            "fewer than half of the kernels' time has the same names on both sides",
            "these may be different models, batches or versions: compare the parts with care",
        )
    for side, diagnosis in (("BASE", base), ("HEAD", head)):
        ranks, world = len(diagnosis.run.ranks_seen), diagnosis.run.world_size
        if world is not None and ranks < world:
            yield Limit(
                "missing-ranks",
                f"{side} has {ranks} of {world} ranks",
                "waiting for the others cannot be told from transfer",
            )


def _other_work(base: Diagnosis, head: Diagnosis) -> bool:
    sides = [{row.name: row.time_ms for row in side.detail.kernels} for side in (base, head)]
    if not all(sides):
        return False
    common = sides[0].keys() & sides[1].keys()
    return any(sum(side[name] for name in common) < 0.5 * sum(side.values()) for side in sides)
