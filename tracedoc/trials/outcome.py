"""What came of a fix: its steps against those of the job as it is, and against what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import expm1, log, sqrt

from msgspec.structs import replace

from tracedoc.collector.trial.rank import FAILED, MADE, SAME
from tracedoc.comparison.step_change import StepVerdict, change_between, noise_of, verdict_on
from tracedoc.ledger import Range
from tracedoc.predicted import FAILED as FIX_FAILED
from tracedoc.predicted import FASTER, HUNG, KEPT, LESS, MORE, NO_EFFECT, NOT_MADE, SLOWER, UNDECIDED, Tried
from tracedoc.trials.candidates import Candidate
from tracedoc.trials.one_run import Ran
from tracedoc.trials.same_training import compare_training

LEAST_PAIRS = 2
"""Runs of one job differ by more than their steps show, so one of each side decides nothing."""


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
    usual = noise_of(on_cpu=with_fix[0].on_cpu)
    change = change_between(before, after, max(usual, _noise(pairs, base)))
    verdict = verdict_on(change)
    if verdict.word == "unchanged" and verdict_on(replace(change, noise_frac=usual)).word != "unchanged":
        verdict = StepVerdict("inconclusive", f"runs of one job differ by {change.noise_frac:.0%} here")
    if len(pairs) < LEAST_PAIRS:
        verdict = StepVerdict("inconclusive", "one run of each is not enough")
    gain = tuple(-share * change.base_ms for share in (change.high_frac, change.change_frac, change.low_frac))
    training, same = compare_training(base, with_fix[0], fix.changes)
    return replace(
        found,
        verdict=_verdict(verdict, found, (gain[0], gain[1], gain[2]), change.base_ms),
        why=verdict.why,
        before_ms=change.base_ms,
        after_ms=change.base_ms - gain[1],
        gain_ms=(gain[0], gain[1], gain[2]),
        training=training,
        same_training=same,
        memory_bytes=(_memory([ran for ran, _ in pairs]), _memory(with_fix)),
    )


def _not_made(ran: Ran) -> str:
    """Why a fix was not made though the job ran, "" where it was."""
    wrong = [words for outcome, words in ran.made.values() if outcome in ("", FAILED)]
    if wrong:
        return wrong[0]
    outcomes = {outcome for outcome, _ in ran.made.values()}
    return "the job has all of it already" if outcomes and outcomes <= {SAME} and MADE not in outcomes else ""


def _median(ran: Ran) -> float:
    return statistics.median(ran.steps_ms)


def _noise(pairs: Sequence[tuple[Ran, Ran]], base: Sequence[Ran]) -> float:
    """The share by which a gain may differ from turn to turn, as far as these runs show it.

    That is half of what the turns differ by, and what one run of the job as it is differs from the next by,
    less the more turns there are.
    """
    ratios = [log(_median(ran) / _median(before)) for before, ran in pairs]
    steps = [abs(log(_median(after) / _median(before))) for before, after in pairwise(base)]
    among = (max(ratios) - min(ratios)) / 2
    return expm1(max(among, statistics.median(steps) / sqrt(len(pairs)) if steps else 0.0))


def _memory(runs: Sequence[Ran]) -> int | None:
    return max(filter(None, (ran.memory_bytes for ran in runs)), default=None)


def _verdict(steps: StepVerdict, found: Tried, gain: Range, before_ms: float) -> str:
    if steps.word == "improved":
        if found.predicted_ms is None:
            return FASTER
        sides = {_side(found.predicted_ms, gain)}
        if found.predicted_of_ms > 0:
            scale = before_ms / found.predicted_of_ms
            sides.add(_side((found.predicted_ms[0] * scale, found.predicted_ms[1] * scale), gain))
        return KEPT if KEPT in sides or len(sides) > 1 else sides.pop()
    return {"regressed": SLOWER, "unchanged": NO_EFFECT}.get(steps.word, UNDECIDED)


def _side(predicted: tuple[float, float], gain: Range) -> str:
    """Where a realised gain lies against a predicted one, by their intervals."""
    if gain[2] < predicted[0]:
        return LESS
    return MORE if gain[0] > predicted[1] else KEPT
