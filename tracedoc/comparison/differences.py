"""What else differs between two runs: work, findings, kernels, collectives, counts, settings, and limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tracedoc.diagnosis import Diagnosis, Finding
from tracedoc.errors import Limit
from tracedoc.run.job import PARAMETERS
from tracedoc.tables import CollectiveRow


def gpus(diagnosis: Diagnosis) -> int:
    """The number of ranks of the job, as far as the capture tells."""
    return diagnosis.run.world_size or len(diagnosis.run.ranks_seen)


def flop_of(diagnosis: Diagnosis) -> float | None:
    """The arithmetic of the model in a step of one GPU, in TFLOP; ``None`` where it is not known."""
    rate, step_ms = diagnosis.number("model_tflops") or 0.0, diagnosis.number("step_ms") or 0.0
    return rate * step_ms / 1000 if rate > 0 and step_ms > 0 else None


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


class KernelChange(msgspec.Struct, frozen=True):
    """A kernel whose time in the analysed step changed; no calls where the side does not have it."""

    name: str
    base_calls: int
    head_calls: int
    base_ms: float
    head_ms: float


class CollectiveChange(msgspec.Struct, frozen=True):
    """A kind of collective whose calls, bytes or time in the analysed step differ; 0 where a side has none.

    ``group_size`` is HEAD's where both have one; bytes are ``None`` where they are not known.
    """

    op: str
    dtype: str
    base_calls: float
    head_calls: float
    base_bytes: int | None
    head_bytes: int | None
    base_ms: float
    head_ms: float


class FactChange(msgspec.Struct, frozen=True):
    """A count or size that differs."""

    name: str
    unit: str
    base: float
    head: float


def kernels_that_changed(base: Diagnosis, head: Diagnosis) -> tuple[KernelChange, ...]:
    """Return the kernels whose time changed most, from a hundredth of the shorter step on."""
    before = {row.name: row for row in base.detail.kernels}
    after = {row.name: row for row in head.detail.kernels}
    step = _shorter_step(base, head)
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


def collectives_that_changed(base: Diagnosis, head: Diagnosis) -> tuple[CollectiveChange, ...]:
    """Return the kinds of collectives (operation and type) of which calls, bytes or time differ."""
    before, after = _by_kind(base), _by_kind(head)
    step = _shorter_step(base, head)
    found = []
    for op, dtype in dict.fromkeys((*before, *after)):
        old, new = before.get((op, dtype), ()), after.get((op, dtype), ())
        change = CollectiveChange(
            op,
            dtype,
            sum(row.calls_per_step for row in old),
            sum(row.calls_per_step for row in new),
            _bytes(old),
            _bytes(new),
            sum(row.time_ms for row in old),
            sum(row.time_ms for row in new),
        )
        if (
            _differs(change.base_calls, change.head_calls)
            or _differs(change.base_bytes or 0, change.head_bytes or 0)
            or abs(change.head_ms - change.base_ms) > _LEAST_SHARE * step
        ):
            found.append(change)
    return tuple(sorted(found, key=lambda one: -abs(one.head_ms - one.base_ms))[:MOST_KERNELS])


def _by_kind(side: Diagnosis) -> dict[tuple[str, str], tuple[CollectiveRow, ...]]:
    found: dict[tuple[str, str], tuple[CollectiveRow, ...]] = {}
    for row in side.detail.collectives:
        found[row.op, row.dtype] = (*found.get((row.op, row.dtype), ()), row)
    return found


def _bytes(rows: Iterable[CollectiveRow]) -> int | None:
    sizes = [row.bytes_per_step for row in rows]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _differs(old: float, new: float) -> bool:
    return abs(new - old) > _LEAST_COUNT_CHANGE * max(abs(old), abs(new))


def _shorter_step(base: Diagnosis, head: Diagnosis) -> float:
    return min((side.budget.step_ms for side in (base, head) if side.budget), default=0.0)


def facts_that_moved(base: Diagnosis, head: Diagnosis) -> tuple[FactChange, ...]:
    """Return those of :data:`COUNTS` that differ by a twentieth or more, on every rank.

    What differs between the ranks of one run by as much says nothing about the two runs.
    """
    found = []
    for name in COUNTS:
        old, new = _numbers(base, name), _numbers(head, name)
        if not old or not new:
            continue
        nearest = (max(old), min(new)) if min(new) > max(old) else (min(old), max(new))
        if (min(new) > max(old) or max(new) < min(old)) and _differs(*nearest):
            found.append(FactChange(name, base.facts[name].unit, old[0], new[0]))
    return tuple(found)


def _numbers(diagnosis: Diagnosis, name: str) -> list[float]:
    """The value of a fact that stands for the run, and those of its ranks; none where it is unknown."""
    value = diagnosis.number(name)
    return [value, *diagnosis.numbers(name).values()] if value is not None else []


def limits_of(base: Diagnosis, head: Diagnosis) -> Iterator[Limit]:
    """Yield what makes the two runs hard to compare."""
    if base.run.device != head.run.device:
        yield Limit(
            "other-device",
            f"BASE ran on {base.run.device or 'an unknown device'}, HEAD on {head.run.device or 'another'}",
            "the change is that of the device and of everything else together",
        )
    alone = any(gpus(side) == 1 for side in (base, head))  # which has no strategy to compare
    if base.run.strategy.name != head.run.strategy.name and not alone:
        yield Limit(
            "other-strategy",
            f"BASE uses {base.run.strategy.name}, HEAD {head.run.strategy.name}",
            "parts of the step compare; collectives of one kind do not",
        )
    for package in ("torch", "cuda", "hip"):
        old, new = (side.run.settings.get(package) for side in (base, head))
        if old and new and old != new:
            yield Limit(
                "other-version",
                f"BASE ran with {package} {old}, HEAD with {new}",
                "kernels and collectives may be others for that reason alone",
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
                "waiting for the others cannot be separated from transfer",
            )


def are_related(base: Diagnosis, head: Diagnosis) -> bool:
    """Whether two runs may be of one job: one model, arithmetic or command, or kernels of the same names."""
    ties = [(side.run.settings.get(PARAMETERS), side.run.command, flop_of(side)) for side in (base, head)]
    (model, command, flop), (other_model, other_command, other_flop) = ties
    if model and other_model:
        return model == other_model
    same_flop = flop is not None and other_flop is not None and not _differs(flop, other_flop)
    return bool(command and command == other_command) or same_flop or not _other_work(base, head)


def _other_work(base: Diagnosis, head: Diagnosis) -> bool:
    sides = [{row.name: row.time_ms for row in side.detail.kernels} for side in (base, head)]
    if not all(sides):
        return any(sides)
    common = sides[0].keys() & sides[1].keys()
    return any(sum(side[name] for name in common) < 0.5 * sum(side.values()) for side in sides)


TEXTS = {
    "matrix_dtype": "type of matrix products",
    "parameter_dtype": "type of gathered parameters",
    "reduction_dtype": "type of reduced gradients",
    "activation_checkpointing": "activation checkpointing",
    "compiled": "torch.compile",
    "loader_kind": "who makes the batches",
}
"""Facts that are choices of the script, by the words for them."""

PLACES = {
    "loader_code": "the loader's time is in",
    "host_code": "the host's time is in",
    "straggler_code": "the straggler's time is in",
    "sync_place": "most waits for the GPU are in",
}
"""Facts that name a line of the script."""


class Setting(msgspec.Struct, frozen=True):
    """Something that is not a measurement, and differs; a side without it has ""."""

    name: str
    base: str
    head: str


def settings_that_differ(base: Diagnosis, head: Diagnosis) -> tuple[Setting, ...]:
    """Return device, ranks, strategy, versions, variables and settings of the script that differ.

    What only one side's capture records is left out: the other may have it too.
    """
    pairs = [
        ("device", base.run.device, head.run.device),
        ("GPUs", str(gpus(base)), str(gpus(head))),
        ("strategy", base.run.strategy.name, head.run.strategy.name),
        ("frameworks", ", ".join(base.run.frameworks), ", ".join(head.run.frameworks)),
        ("tracedoc", base.tool_version, head.tool_version),
        *_recorded(base, head),
        *_of_facts(base, head, TEXTS),
    ]
    if base.run.backend and head.run.backend:  # a single process has none
        pairs.append(("backend", base.run.backend, head.run.backend))
    return tuple(Setting(name, before, after) for name, before, after in pairs if before != after)


def places_that_differ(base: Diagnosis, head: Diagnosis) -> tuple[Setting, ...]:
    """Return the lines of the script that the two sides blame, where they differ."""
    return tuple(
        Setting(name, before, after)
        for name, before, after in _of_facts(base, head, PLACES)
        if before != after and not {before, after} <= {"none", ""}
    )


def _recorded(base: Diagnosis, head: Diagnosis) -> Iterator[tuple[str, str, str]]:
    before, after = base.run.settings, head.run.settings
    if before and after:
        for name in dict.fromkeys((*before, *after)):
            yield name, before.get(name, "not set"), after.get(name, "not set")


def _of_facts(base: Diagnosis, head: Diagnosis, names: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, words in names.items():
        old, new = base.value(name), head.value(name)
        if old is not None and new is not None:
            yield words, _text(old), _text(new)


def _text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


STATES = ("fixed", "new", "persisting")


class FindingChange(msgspec.Struct, frozen=True):
    """One rule's finding on either side.

    ``predicted_ms`` is the gain that BASE named, from its least to its most, and ``likely_ms`` the likely one
    where it was replayed. A bound starts at 0. ``severity`` is that on HEAD, "" where it is gone.
    """

    rule_id: str
    title: str
    state: str
    base_message: str = ""
    head_message: str = ""
    predicted_ms: tuple[float, float] | None = None
    likely_ms: float | None = None
    topic: str = ""
    severity: str = ""


def finding_changes(base: Diagnosis, head: Diagnosis) -> tuple[FindingChange, ...]:
    """Return the findings of both sides, those about the capture left out: fixed, new, persisting.

    A rule that HEAD could not judge is not "fixed": it is left out. So is one whose conditions hold there as
    before, and that costs little or that other findings tell.
    """
    before, after = _by_rule(base), _by_rule(head)
    judged = {
        verdict.rule_id
        for verdict in head.verdicts
        if verdict.outcome in ("pass", "not_applicable", "yielded")
        and not (verdict.comparisons and all(one.holds for one in verdict.comparisons))
    }
    found = []
    for rule_id, finding in before.items():
        other = after.get(rule_id)
        if other is None and rule_id not in judged:
            continue
        gain = finding.gain
        found.append(
            FindingChange(
                rule_id,
                finding.title,
                "fixed" if other is None else "persisting",
                finding.message,
                other.message if other is not None else "",
                (gain.low_ms, gain.high_ms) if gain is not None else None,
                gain.likely_ms if gain is not None else None,
                finding.topic,
                other.severity if other is not None else "",
            )
        )
    found += [
        FindingChange(
            rule_id, finding.title, "new", "", finding.message, topic=finding.topic, severity=finding.severity
        )
        for rule_id, finding in after.items()
        if rule_id not in before
    ]

    def order(change: FindingChange) -> tuple[int, float]:
        most = change.predicted_ms[1] if change.predicted_ms is not None else 0.0
        return STATES.index(change.state), -most

    return tuple(sorted(found, key=order))


def _by_rule(diagnosis: Diagnosis) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for finding in diagnosis.findings:
        if finding.topic != "capture":
            found.setdefault(finding.rule_id, finding)
    return found
