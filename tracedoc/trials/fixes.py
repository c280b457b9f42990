"""The fixes that are tried: which can be from outside the script, and what each gave."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import expm1, hypot, log, log1p, sqrt
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import tracedoc
from tracedoc.cache import cache_folder
from tracedoc.collector.trial.changes import CannotError, Change, read_change
from tracedoc.collector.trial.rank import FAILED, MADE, SAME
from tracedoc.comparison.step_change import (
    LEAST_CHANGE,
    StepChange,
    StepVerdict,
    change_between,
    noise_of,
    verdict_on,
)
from tracedoc.diagnosis import Diagnosis, Finding, Fix
from tracedoc.errors import InputError, did_you_mean
from tracedoc.judge.fixes import fitting_first
from tracedoc.predicted import FAILED as FIX_FAILED
from tracedoc.predicted import FASTER, HUNG, NO_EFFECT, NOT_MADE, SLOWER, UNDECIDED, Trials, Tried
from tracedoc.trials.one_run import Ran

DEFAULT_FIXES = 3
TOGETHER = "together"


@dataclass(frozen=True)
class Candidate:
    """A fix, the changes that it stands for, and what was predicted; ``cannot`` is why it is not tried.

    ``predicted_ms`` is the gain a step, from and to, ``None`` where none is stated; with ``of_mean`` it is
    one of the mean step, for what comes in some steps only.
    """

    fix: str
    title: str
    changes: tuple[Change, ...] = ()
    text: str = ""
    risk: str = ""
    predicted_ms: tuple[float, float] | None = None
    predicted_of_ms: float = 0.0
    of_mean: bool = False
    cannot: str = ""

    @property
    def rule(self) -> str:
        """The finding that the fix is of."""
        return self.fix.rpartition("/")[0]


def candidates(diagnosis: Diagnosis, framework: Mapping[str, Any]) -> list[Candidate]:
    """Every fix that fits the job, those that can be tried first, of them those of the plan; each once.

    ``framework`` is what a rank's manifest says of the job, empty where nothing is known.
    """
    planned = [step.fix for step in diagnosis.plan]
    found = [
        _candidate(finding, fix, diagnosis, framework)
        for finding in diagnosis.findings
        for fix in fitting_first(finding.fixes, diagnosis.run)
    ]
    found.sort(
        key=lambda one: (
            bool(one.cannot),
            planned.index(one.fix) if one.fix in planned else len(planned),
        )
    )
    # One title is one action, which frameworks write in different words.
    by_title: dict[str, Candidate] = {}
    for one in found:
        by_title.setdefault(one.title, one)
    by_text: dict[str, Candidate] = {}
    for one in by_title.values():
        by_text.setdefault(one.text or one.title, one)
    return list(by_text.values())


def _candidate(finding: Finding, fix: Fix, diagnosis: Diagnosis, framework: Mapping[str, Any]) -> Candidate:
    number = finding.fixes.index(fix)
    low_high, of_ms = _stated(finding, fix, first=number == 0, diagnosis=diagnosis)
    changes: tuple[Change, ...] = ()
    cannot = ""
    try:
        change = read_change(fix.change)
        missing = change.missing_in(framework)
        if missing:
            cannot = f"the job has no {missing}"
        else:
            changes = (change,)
    except CannotError as error:
        cannot = str(error)
    return Candidate(
        fix=f"{finding.id}/{number}",
        title=fix.title,
        changes=changes,
        text=fix.change,
        risk=fix.risk,
        predicted_ms=low_high,
        predicted_of_ms=of_ms,
        of_mean=fix.predicted is None and finding.gain is not None and finding.gain.mean_step_ms is not None,
        cannot=cannot,
    )


def _stated(
    finding: Finding, fix: Fix, *, first: bool, diagnosis: Diagnosis
) -> tuple[tuple[float, float] | None, float]:
    """The gain that is stated for a fix, and of which step; a finding's is that of its first fix."""
    step_ms = diagnosis.budget.step_ms if diagnosis.budget is not None else 0.0
    if fix.predicted is not None:
        return (fix.predicted.gain_ms[0], fix.predicted.gain_ms[2]), fix.predicted.before_ms
    if first and finding.gain is not None:
        return (finding.gain.low_ms, finding.gain.high_ms), finding.gain.mean_step_ms or step_ms
    return None, step_ms


def choose(known: Sequence[Candidate], asked: Sequence[str], *, every: bool) -> list[Candidate]:
    """The candidates that are asked for, else the first three that can be tried, or ``every`` one.

    A name is that of a finding, of one of its fixes, or a change as it would be pasted.

    Raises :class:`InputError` for a fix that cannot be tried, and where none can.
    """
    fit = [one for one in known if not one.cannot]
    if asked:
        return [chosen for name in asked for chosen in _named(name, known)]
    if not fit:
        raise InputError(
            "none of the fixes can be tried from outside the script",
            "tracedoc try RUN --list says why; change the script, capture again, and compare",
        )
    return fit if every else fit[:DEFAULT_FIXES]


def _named(name: str, known: Sequence[Candidate]) -> Iterator[Candidate]:
    named = [one for one in known if name in (one.fix, one.rule)]
    if named:
        fit = [one for one in named if not one.cannot]
        if not fit:
            raise InputError(
                f"{name} cannot be tried: {named[0].cannot}",
                "change the script by hand, capture again, then: tracedoc compare RUN NEW",
            )
        yield fit[0]
        return
    try:
        change = read_change(name)
    except CannotError as error:
        names = [one.fix for one in known] + [one.rule for one in known]
        raise InputError(
            f"{name!r} is no fix of this run{did_you_mean(name, names)}, nor a change to make: {error}",
            "tracedoc try RUN --list names its fixes",
        ) from None
    yield Candidate(name, name.partition("\n")[0], (change,), name)


def together(chosen: Sequence[Candidate], diagnosis: Diagnosis) -> Candidate:
    """All of the candidates as one; what was predicted is the plan's, where they are the plan."""
    last = diagnosis.plan[-1] if diagnosis.plan else None
    planned = last is not None and {one.fix for one in chosen} >= {step.fix for step in diagnosis.plan}
    before = last.replay_of_step_ms if last is not None else 0.0
    return Candidate(
        fix=TOGETHER,
        title=" + ".join(one.title for one in chosen),
        changes=tuple(change for one in chosen for change in one.changes),
        text="\n".join(one.text for one in chosen),
        risk="; ".join(one.risk for one in chosen),
        predicted_ms=(before - last.step_ms[2], before - last.step_ms[0])
        if planned and last is not None
        else None,
        predicted_of_ms=before,
    )


LEAST_PAIRS = 2
"""Runs of one job differ by more than their steps show, so one of each side decides nothing."""

_STUDENT_99 = (
    *(63.66, 63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499),
    *(3.355, 3.25, 3.169, 3.106, 3.055, 3.012, 2.7),
)
"""Student's t for an interval of 99 %, by degrees of freedom; the last for more.

It is looked at after each turn from the second to the sixth, and ends when it decides: then all looks
together hold in 95 %, by simulation (group sequential tests: Pocock, Biometrika 64, 1977)."""


def outcome(fix: Candidate, pairs: Sequence[tuple[Ran, Ran]], base: Sequence[Ran]) -> Tried:
    """What is known of a fix after runs of the job as it is and with it, side by side.

    ``base`` are all runs of the job as it is: what they differ by among themselves is noise.
    """
    found = Tried(
        fix=fix.fix,
        title=fix.title,
        change=fix.text,
        verdict=UNDECIDED,
        predicted_ms=fix.predicted_ms,
        predicted_of_ms=fix.predicted_of_ms,
        runs=len(pairs),
    )
    with_fix = [ran for _, ran in pairs]
    if not with_fix:
        return found
    for ran in with_fix:
        if ran.problem:
            return replace(found, verdict=HUNG if ran.hung else FIX_FAILED, why=ran.problem)
        if why := _not_made(ran):
            return replace(found, verdict=NOT_MADE, why=why)
    if fix.of_mean:
        pairs = [(_as_mean(ran), _as_mean(other)) for ran, other in pairs]
        base = [_as_mean(ran) for ran in base]
    base_ms = statistics.median(_median(ran) for ran, _ in pairs)
    scales = [base_ms / _median(ran) for ran, _ in pairs]  # what changed on the machine between turns
    before = [scale * ms for scale, (ran, _) in zip(scales, pairs, strict=True) for ms in ran.steps_ms]
    after = [scale * ms for scale, (_, ran) in zip(scales, pairs, strict=True) for ms in ran.steps_ms]
    change = _as_runs_differ(change_between(before, after, LEAST_CHANGE), _standard_error(pairs, base))
    verdict = verdict_on(change)
    usual = noise_of(on_cpu=with_fix[0].on_cpu)
    if verdict.word == "inconclusive" and -usual <= change.low_frac <= 0 <= change.high_frac <= usual:
        verdict = StepVerdict("unchanged")
    if len(pairs) < LEAST_PAIRS:
        verdict = StepVerdict("inconclusive", "one run of each is not enough")
    gain = tuple(-share * change.base_ms for share in (change.high_frac, change.change_frac, change.low_frac))
    training, same = compare_training(base, with_fix[0], fix.changes)
    found = replace(
        found,
        why=verdict.why,
        before_ms=change.base_ms,
        after_ms=change.base_ms - gain[1],
        gain_ms=(gain[0], gain[1], gain[2]),
        training=training,
        same_training=same,
        memory_bytes=(_memory([ran for ran, _ in pairs]), _memory(with_fix)),
    )
    words = {"improved": found.side or FASTER, "regressed": SLOWER, "unchanged": NO_EFFECT}
    return replace(found, verdict=words.get(verdict.word, UNDECIDED))


def _not_made(ran: Ran) -> str:
    """Why a fix was not made though the job ran, "" where it was."""
    wrong = [words for outcome, words in ran.made.values() if outcome in ("", FAILED)]
    if wrong:
        return wrong[0]
    outcomes = {outcome for outcome, _ in ran.made.values()}
    return "the job has all of it already" if outcomes and outcomes <= {SAME} and MADE not in outcomes else ""


def _as_mean(ran: Ran) -> Ran:
    """A run in which every step takes its mean step: what comes in some steps counts as often as it comes."""
    steps = len(ran.steps_ms)
    return dataclasses.replace(ran, steps_ms=(statistics.fmean(ran.steps_ms),) * steps)


def _median(ran: Ran) -> float:
    return statistics.median(ran.steps_ms)


def _standard_error(pairs: Sequence[tuple[Ran, Ran]], base: Sequence[Ran]) -> tuple[float, int]:
    """That of the mean logarithm of the ratio of two runs, and how many differences it is known from.

    Ratios of a fix differ among themselves, and runs of the job as it is from the next, by as much as any two
    runs do: both tell it, which no number of steps in one run does.
    """
    ratios = [log(_median(ran) / _median(before)) for before, ran in pairs]
    middle = statistics.fmean(ratios)
    squares = sum((ratio - middle) ** 2 for ratio in ratios)
    squares += sum(log(_median(after) / _median(before)) ** 2 for before, after in pairwise(base))
    known = max(len(pairs) - 1 + len(base) - 1, 1)
    return sqrt(squares / known / len(pairs)), known


def _as_runs_differ(change: StepChange, error: tuple[float, int]) -> StepChange:
    """The change with an interval that holds what runs differ by, beside what steps do."""
    by_runs = _STUDENT_99[min(error[1], len(_STUDENT_99) - 1)] * error[0]
    middle, low, high = map(log1p, (change.change_frac, change.low_frac, change.high_frac))
    return replace(
        change,
        low_frac=expm1(middle - hypot(middle - low, by_runs)),
        high_frac=expm1(middle + hypot(high - middle, by_runs)),
    )


def _memory(runs: Sequence[Ran]) -> int | None:
    return max(filter(None, (ran.memory_bytes for ran in runs)), default=None)


# -- whether it trains the same


ROUNDING = 1e-4
"""Losses in 32 bits may differ by this share for another order of sums, after some steps of training."""
SHORTER_ROUNDING = 3e-2
"""The same where products or sums keep 8 to 11 bits."""


def compare_training(base: Sequence[Ran], ran: Ran, changes: Sequence[Change]) -> tuple[str, bool]:
    """What losses say, in words, and whether that is as the changes say; ``base`` is the job as it is."""
    first = base[0]
    place, size = _difference(first, ran)
    if place is None:
        return "no losses to compare" if not _has_losses(ran) else _equal_words(ran), True
    own = [found for other in base[1:] if (found := _difference(first, other))[0] is not None]
    if own:
        largest = max(one[1] for one in own)
        words = f"two runs as it is differ from step {min(one[0] or 0 for one in own)} by {largest:.1g}"
        return f"losses cannot be compared: {words}", True
    said = f"losses differ from step {place} by {size:.1g}"
    if any(change.draws_anew for change in changes):
        return f"{said} (workers draw random samples of their own)", True
    if any(change.rounds for change in changes):
        return (
            f"{said} (fewer bits: {'expected' if size <= SHORTER_ROUNDING else 'more than that explains'})",
            (size <= SHORTER_ROUNDING),
        )
    if size <= ROUNDING:
        return f"{said} (rounding)", True
    return f"{said}: other data, or another computation", False


def _equal_words(ran: Ran) -> str:
    count = min((len(steps) - 1 for steps in ran.losses.values()), default=0)
    return f"losses equal to the last bit in {count} steps"


def _has_losses(ran: Ran) -> bool:
    return any(step for steps in ran.losses.values() for step in steps)


def _difference(one: Ran, other: Ran) -> tuple[int | None, float]:
    """The first step in which losses or gradients differ, from 1, and the largest relative difference."""
    pairs = [*_losses(one, other), *_norms(one, other)]
    apart = [(step, abs(a - b) / max(abs(a), abs(b))) for step, a, b in pairs if a != b]
    return (min(step for step, _ in apart), max(size for _, size in apart)) if apart else (None, 0.0)


def _losses(one: Ran, other: Ran) -> Iterator[tuple[int, float, float]]:
    for rank in one.losses.keys() & other.losses.keys():
        for step, (mine, theirs) in enumerate(zip(one.losses[rank], other.losses[rank], strict=False), 1):
            # The last step of a run may have been cut off between two micro-batches.
            for a, b in zip(mine, theirs, strict=False):
                if a is not None and b is not None:
                    yield step, a, b


def _norms(one: Ran, other: Ran) -> Iterator[tuple[int, float, float]]:
    for step, (a, b) in enumerate(zip(one.squared_norms, other.squared_norms, strict=False), 1):
        yield step, a**0.5, b**0.5


# -- outcomes kept as data


RECORDS_NAME = "trials.jsonl"
"""The file in the user's cache folder."""


def record(found: Trials, diagnosis: Diagnosis, path: Path | None) -> None:
    """Add a line for each fix to the records in the user's cache, and to a file where one is named.

    No line names a host, a folder or the command. Raises :class:`OSError` for the named file alone.
    """
    run = diagnosis.run
    about = {
        "tracedoc": tracedoc.__version__,
        "device": run.device,
        "world_size": run.world_size,
        "strategy": run.strategy.family,
    }
    lines = [msgspec.json.encode({**about, **msgspec.to_builtins(one)}) + b"\n" for one in found.tried]
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(folder / RECORDS_NAME, lines)
    if path is not None:
        _append(path, lines)


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(lines)
