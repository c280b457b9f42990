"""What came of a fix: its steps against those of the job as it is, and against what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import expm1, hypot, log, log1p, sqrt

from msgspec.structs import replace

from tracedoc.collector.trial.rank import FAILED, MADE, SAME
from tracedoc.comparison.step_change import (
    LEAST_CHANGE,
    StepChange,
    StepVerdict,
    change_between,
    noise_of,
    verdict_on,
)
from tracedoc.predicted import FAILED as FIX_FAILED
from tracedoc.predicted import FASTER, HUNG, NO_EFFECT, NOT_MADE, SLOWER, UNDECIDED, Tried
from tracedoc.trials.candidates import Candidate
from tracedoc.trials.one_run import Ran
from tracedoc.trials.same_training import compare_training

LEAST_PAIRS = 2
"""Runs of one job differ by more than their steps show, so one of each side decides nothing."""

_STUDENT = (12.71, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.2, 2.18, 2.16, 2.0)
"""Student's t for an interval of 95 %, by degrees of freedom; the last for more."""


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
    by_runs = _STUDENT[min(error[1], len(_STUDENT) - 1)] * error[0]
    middle, low, high = map(log1p, (change.change_frac, change.low_frac, change.high_frac))
    return replace(
        change,
        low_frac=expm1(middle - hypot(middle - low, by_runs)),
        high_frac=expm1(middle + hypot(high - middle, by_runs)),
    )


def _memory(runs: Sequence[Ran]) -> int | None:
    return max(filter(None, (ran.memory_bytes for ran in runs)), default=None)
