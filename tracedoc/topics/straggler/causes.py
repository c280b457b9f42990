"""Facts about what makes ranks late: why, since when, and what of it is chance where ranks share cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.code_places import has_stacks, more_work_place, most_work_place, place_alone
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.ranks.strategy_kinds import CONTEXT_GROUP
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.host import PHASES
from tracedoc.timeline.script_code import CodePlace, place_of_frame
from tracedoc.topics.host.run import core_wait_ms, crowded
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.topics.step.rank import step_ms
from tracedoc.topics.straggler.late_ranks import (
    CAUSE_SHARE,
    Straggler,
    late_by_rank,
    noticeable_ns,
    stragglers,
)
from tracedoc.topics.straggler.rank import foreign_turns_ms
from tracedoc.topics.straggler.run import NOT_MATCHED, cost_ms, is_matched, late_at
from tracedoc.topics.straggler.slow_gpus import slowness_by_rank
from tracedoc.topics.straggler.uneven import work_excess
from tracedoc.topics.straggler.work import CAUSES, did_before
from tracedoc.trace.distinct import median
from tracedoc.values import Unknown, Value, needed, needed_number

KERNEL_CAUSES = ("more kernels", "larger kernels", "slow GPU", "longer kernels")
"""What can be the matter with the kernels of a late rank."""

SHARED_GPU = "shared GPU"
"""What makes a rank late on whose GPU another process has its turns."""

MORE_KERNELS = 1.02
"""A rank that starts this many times the kernels of its peers does more work, not slower work."""

OWN_CAUSES = frozenset({"python", "unknown", "operator", "dispatch", "sync", "copy"})
"""What a script may do on one rank only. Loading, collecting garbage and compiling are for all alike."""

ALONE = 1 / 3
"""A peer that takes this share of a rank's time for something does it as well."""

IN_CODE = ("input", "python", "gc", "unknown")
"""What makes a rank late in functions of the script: their time lies outside operators."""

WHERE = ("somewhere in the step", *(one if one.startswith("between") else f"in {one}" for one in PHASES[1:]))
"""Where in a step something makes a rank late, in words behind a comma."""

STACKS_ON_ALL = 8
"""In jobs of so many ranks ``tracedoc collect`` has all record a step with stacks."""


@ranks_fact(
    unit="text",
    needs=("collectives", "multi_rank", foreign_turns_ms),
    values=("none", *KERNEL_CAUSES, *CAUSES[1:], SHARED_GPU),
)
def straggler_cause(run: RunView, digest: RankDigest) -> Value:
    """What this rank did longer than its peers before the collectives to which it came last.

    Each of its nanoseconds between two collectives has one cause; the one that explains half of the
    difference or more is named, "none" where there is none.

    Of kernels, or in a CPU trace operators: "more kernels"; "larger kernels", as many on more data;
    "slow GPU", matrix products of the same shapes take longer; else "longer kernels". Other exposed work:
    "communication", "copy". Idle time (:mod:`tracedoc.idle_causes`): "input", "allocator", "sync",
    "loading", "compile", "gc", "profiler", "operator", "dependency", "unknown", and late
    launches: "optimizer", "dispatch", "python". Instead of "dependency" it is "shared GPU" where half of that
    is turns of another process (:func:`foreign_turns_ms`).
    """

    late = needed(late_at(run, digest))
    return _cause(run, late) if late else "none"


def _cause(run: RunView, late: Straggler) -> str:
    if late.cause == "kernels":
        return kernel_cause(late, run)
    turns = foreign_turns_ms.of(run.digest(late.rank))
    excess = float(median(late.cause_ns)) / 1e6
    if late.cause == "dependency" and isinstance(turns, float) and turns >= CAUSE_SHARE * excess:
        return SHARED_GPU
    return late.cause or "none"


@run_fact(unit="text", needs=("collectives", "multi_rank", foreign_turns_ms))
def straggler_any_cause(run: RunView) -> Value:
    """What late ranks do, whichever they are: the :func:`straggler_cause` of half of all waiting or more.

    "none" where no cause explains so much, and where nobody is late.
    """
    waited: Counter[str] = Counter()
    for late in stragglers(run):
        waited[_cause(run, late)] += int(late.gain_ns.sum())
    cause, most = max(waited.items(), key=lambda one: one[1], default=("none", 0))
    return cause if most >= CAUSE_SHARE * waited.total() else "none"


@ranks_fact(unit="bool", needs=("collectives", "multi_rank"))
def straggler_shares_sequence(run: RunView, digest: RankDigest) -> Value:
    """Whether this rank is late and in a group named for context parallelism, which shares its sequences.

    With a causal mask ranks that hold later parts attend to more than those that hold earlier ones.
    """
    named = [one for one in run.matching.groups if len(one.ranks) > 1 and CONTEXT_GROUP.search(one.name)]
    return bool(needed(late_at(run, digest))) and any(digest.rank in one.ranks for one in named)


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_excess_ms(run: RunView, digest: RankDigest) -> Value:
    """How much longer than its peers this rank is at its cause; 0 without one.

    The median over the steps in which others wait for it. The first captured one counts only where the cause
    shows in it: what came before its first collective may not be captured.
    """
    late = needed(late_at(run, digest))
    return _excess_ms(late) if late else 0.0


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_covered_ms(run: RunView, digest: RankDigest) -> Value:
    """How much of :func:`straggler_excess_ms` nobody waits for, as the peers are at work themselves.

    It is that less :func:`straggler_cost_ms`; 0 for 2 % of the step or less.
    """
    late = needed(late_at(run, digest))
    more_ms = _excess_ms(late) - cost_ms(run, late) if late else 0.0
    return more_ms if more_ms > noticeable_ns(run) / 1e6 else 0.0


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_phase(run: RunView, digest: RankDigest) -> Value:
    """Where in the step this rank's host was longest away before a collective to which it came last."""
    late = needed(late_at(run, digest))
    return WHERE[late.away_phase if late else 0]


@ranks_fact(unit="text", needs=("multi_rank",))
def straggler_peers(run: RunView, digest: RankDigest) -> Value:
    """Who waits where this rank is late: "rank 0", say, in a job of two ranks, else "the other ranks"."""
    others = [one.rank for one in run.digests if one is not digest]
    alone = len(others) == 1 and run.world_size in (2, None)
    return f"rank {others[0]}" if alone else "the other ranks"


@ranks_fact(unit="bool", needs=("collectives", "multi_rank"))
def rank_zero_alone(run: RunView, digest: RankDigest) -> Value:
    """Whether this is rank 0, to which scripts give what is done once, and late from what no other rank does.

    The cause (:func:`straggler_cause`) is Python, code that no operator covers, launching, waiting for the
    GPU or copies, and no other rank takes a third or more of its time for that before the same collectives;
    or it is that the rank starts more kernels. False for a rank that nobody waits for.
    """
    late = late_by_rank(run).get(digest.rank)
    return late is not None and digest.rank == 0 and _does_alone(run, late)


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script in which a late rank takes longer than its peers, or "none".

    From the stacks of that rank alone, in its trace or in its step with stacks. What the function takes on
    ranks that are not late does not count; the rest is half or more of what the
    rank is longer at its cause. Of a rank with more kernels, or operators, it is the function that starts
    half or more of those that it starts beyond the others.
    """
    late = late_by_rank(run).get(digest.rank)
    shown = late_place(run, late) if late else None
    return str(shown.place) if shown else "none"


@run_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_turn_code(run: RunView) -> Value:
    """The function in which one rank alone was for longer in the step with stacks, whichever rank that was.

    For jobs in which another rank is late in each step. It takes half or more of what the rank is longer at
    its cause, or starts half or more of the operators that it has beyond the others; "none" without one.
    """
    others = [
        (digest.rank, [one.rank for one in run.digests if one is not digest])
        for digest in run.digests
        if digest.rank in run.source_steps
    ]
    in_code = [one.cause_ns[one.cause_ns > 0] for one in stragglers(run) if one.cause in IN_CODE]
    lasted_ms = max((float(median(ns)) / 1e6 for ns in in_code if ns.size), default=0.0)
    found = [place_alone(run, rank, peers, lasted_ms, loading=False) for rank, peers in others]
    alone = [place for place, compared in found if lasted_ms and place is not None and compared]
    longest = max(alone, key=lambda one: one.time_ns, default=None)
    return str(longest or most_work_place(run, others) or "none")


@ranks_fact(unit="text", needs=("collectives", "multi_rank"))
def straggler_recapture(run: RunView, digest: RankDigest) -> Value:
    """The command that records the Python stacks that a late rank lacks, or "none".

    Asked of ranks that are late by code of their own process. In jobs of up to 8 ranks, and on rank 0, it is
    "tracedoc collect", elsewhere "tracedoc collect --ranks 0,77".
    """
    late, rank = late_by_rank(run).get(digest.rank), digest.rank
    if late is None or rank in run.job.sources or has_stacks(run, rank):
        return "none"
    if not _is_in_code_of_rank(run, late):
        return "none"
    few = (run.world_size or len(run.digests)) <= STACKS_ON_ALL
    return "tracedoc collect" + ("" if few or rank == 0 else f" --ranks 0,{rank}")


def _is_in_code_of_rank(run: RunView, late: Straggler) -> bool:
    """Whether what makes a rank late runs in its own process, where stacks would show it."""
    if late.cause != "input":
        return late.cause in ("python", "unknown")
    job = run.job.rank(late.rank)
    return job is not None and job.loader.workers == 0


def kernel_cause(late: Straggler, run: RunView) -> str:
    """Why the kernels of a rank that they make late take longer, of :data:`KERNEL_CAUSES`.

    "more kernels", "larger kernels" (as many, on more data), "slow GPU" (three in four of its matrix products
    take longer than those of its peers, at the median by half or more of what its compute does), else "longer
    kernels".
    """
    if late.more_kernels >= MORE_KERNELS:
        return "more kernels"
    place = run.digests.index(run.digest(late.rank))
    excess, slowness = work_excess(run), slowness_by_rank(run)[late.rank]
    if excess is not None and excess.explained[place].mean() >= CAUSE_SHARE:
        return "larger kernels"
    if isinstance(slowness, Unknown) or slowness.low_ratio <= 1.0:
        return "longer kernels"
    enough = slowness.ratio - 1.0 >= CAUSE_SHARE * (slowness.compute_ratio - 1.0)
    return "slow GPU" if enough else "longer kernels"


def _does_alone(run: RunView, late: Straggler) -> bool:
    """Whether no peer takes a third or more of the time that a late rank takes for its cause.

    Compared are times before the collectives to which it came last, all of them together. Kernels count where
    the rank starts more of them than its peers.
    """
    if late.cause == "kernels":
        return kernel_cause(late, run) == "more kernels"
    if late.cause not in OWN_CAUSES:
        return False
    us = np.zeros(len(run.digests), dtype=np.int64)
    for operation in late.operations:
        for did in did_before(run, operation):
            us[did.place] += did.us[CAUSES.index(late.cause)]
    place = run.matching.ranks.index(late.rank)
    return bool(us[place] > 0 and np.delete(us, place).max(initial=0) < ALONE * us[place])


class LatePlace(msgspec.Struct, frozen=True):
    """The function that makes a rank late; ``more_ns`` is how much longer it takes there than on the others.

    ``more_ns`` is ``None`` where no other rank has a place to compare with.
    """

    place: CodePlace
    more_ns: int | None


def late_place(run: RunView, late: Straggler) -> LatePlace | None:
    """Return the function that makes a rank late, ``None`` where its own stacks show none.

    What it takes longer there than on the median of the ranks that are not late is half or more of what the
    rank is longer at its cause. Where only this rank recorded stacks, its time counts whole. Operators that
    it alone starts are counted.
    """
    not_peers = {late.rank, *(one.rank for one in _noticed(run))}
    peers = [digest.rank for digest in run.digests if digest.rank not in not_peers]
    if late.cause == "kernels" and kernel_cause(late, run) == "more kernels":
        more = more_work_place(run, late.rank, peers)
        return LatePlace(more.place, None) if more is not None else None
    if late.cause not in IN_CODE:
        return None
    least_ms = float(median(late.cause_ns)) / 1e6
    found, compared = place_alone(run, late.rank, peers, least_ms, loading=late.cause == "input")
    if found is None or _is_loop(run, found):
        return None
    return LatePlace(found, found.time_ns if compared else None)


def _is_loop(run: RunView, place: CodePlace) -> bool:
    """Whether a place is a function around every step, by the sampled stacks, and not what it calls."""
    around = {place_of_frame(frame) for rank in run.job.ranks for frame in rank.samples.loop}
    names = {(one.file, one.function) for one in around if one is not None}
    return not place.call and (place.file, place.function) in names


def ranks_to_read(run: RunView, recorded: Sequence[int]) -> list[int]:
    """The ranks, of those that recorded a step with stacks, whose step tells something: few of many.

    ``recorded`` are in order. Late ones and those of the stage that is away for longest stand for themselves,
    the first two others for what all do: what takes long on one of them alone is chance.
    """
    if len(recorded) < 2:
        return list(recorded)
    late = {one.rank for one in _noticed(run) if one.cause in (*IN_CODE, "kernels")}
    found = pipeline(run)
    if found is not None and found.stage_away_ns.any():
        late |= {run.digests[place].rank for place in found.stages[int(found.stage_away_ns.argmax())]}
    late &= set(recorded)
    on_time = [rank for rank in recorded if rank not in late]
    return sorted({recorded[0], *late, *on_time[:2]})


def _noticed(run: RunView) -> list[Straggler]:
    return [one for one in stragglers(run) if median(one.gain_ns) > noticeable_ns(run)]


def _excess_ms(late: Straggler) -> float:
    """How much longer than its peers a late rank is at its cause (:func:`straggler_excess_ms`)."""
    seen = late.gain_ns > 0
    seen[0] &= bool(late.cause_ns[0] > 0)
    return float(median(late.cause_ns[seen])) / 1e6 if seen.any() else 0.0


ENOUGH_TURNS = 4
AS_LONG = 0.9
"""Work that ranks do in turn takes about as long in so many steps or more: this share of the median."""

TURN_MS = 5.0
"""A process that shares its core may stand back for a turn or two of some milliseconds each."""

HABIT_STEPS = 2
"""One step shows no habit."""

HABIT = 0.15
"""So much of every step spent otherwise than the peers is no accident, whatever else they wait for."""

EXPLAINED = 0.5
"""Processes that share cores come last by chance; a cause in every step is none."""

SURELY_EXPLAINED = 0.6
"""As many operators as those of the peers, which take longer, may only share their core."""

IN_CODE_SHARE = 0.05
"""A function of the script in which only this rank is so long in every step is no accident either."""


@ranks_fact(unit="bool", needs=("collectives", "multi_rank", core_wait_ms, step_ms))
def straggler_beyond_chance(run: RunView, digest: RankDigest) -> Value:
    """Whether more makes this rank late than processes that share cores do to each other by chance.

    True on GPUs, whose work needs no core. On CPUs what it does longer than its peers recurs in three steps
    of four: 5 ms, and half of what the others wait for it or 15 % of the step (5 % in a named function of the
    script; three fifths of the waiting where the same operators take longer). And half of what they wait, or
    15 % of the step, is left without what it waited for a core (:func:`core_wait_ms`), unless a named
    function of this rank alone takes as long.
    """
    late = needed(late_at(run, digest))
    if late is None or not digest.is_cpu:
        return late is not None
    if len(late.steps) < HABIT_STEPS or min(cost_ms(run, late), late.recurring_ms) <= TURN_MS:
        return False
    step, shown = needed_number(step_ms.of(digest)), late_place(run, late)
    return _recurs(run, late, shown, step) and _has_cores(run, late, shown, step)


def _recurs(run: RunView, late: Straggler, shown: LatePlace | None, step: float) -> bool:
    """Whether what a rank is longer at explains the waiting for it in at least three quarters of the steps.

    Each step's cause is compared with the waiting of that step; only longer kernels with that of the median
    step: sharing a core makes them longer as well, by a different length in each step.
    """
    waited = late.gain_ns.astype(np.float64)
    if late.cause == "kernels" and late.more_kernels < MORE_KERNELS:
        waited = np.full(waited.size, median(waited))
    shares = np.minimum(late.cause_ns / np.maximum(waited, 1.0), 1.0)[waited > 0]
    explained = float(habitual(shares)) if shares.size else 0.0
    if _is_longer(run, late):
        return explained >= SURELY_EXPLAINED
    habit = float(habitual(late.cause_ns)) / 1e6 / step
    return explained >= EXPLAINED or habit > HABIT or (shown is not None and habit > IN_CODE_SHARE)


def _has_cores(run: RunView, late: Straggler, shown: LatePlace | None, step: float) -> bool:
    """Whether a rank is late from more than what it waited for a core."""
    cost = cost_ms(run, late)
    if shown is not None and (late.cause == "kernels" or (shown.more_ns or 0) / 1e6 > EXPLAINED * cost):
        return True
    waited = needed_number(_core_wait_frac(run, late, cost))
    return waited < EXPLAINED or cost * (1.0 - waited) > HABIT * step


def _core_wait_frac(run: RunView, late: Straggler, cost: float) -> Value:
    """Share of what a rank costs for which it had no free core (:func:`core_wait_ms`).

    All of it where "longer kernels" is the cause, which nothing else shows; then it is 1 where operators use
    more threads than the rank has cores, for an operator waits for the last of them. Of other causes, which
    are seen on their own, only what it waited longer than the median of the other ranks; 0 where that is not
    known.
    """
    waits = core_wait_ms.by_rank(run)
    wait = waits.pop(str(late.rank))
    if not _is_longer(run, late):
        known = [float(value) for value in (wait, *waits.values()) if not isinstance(value, (Unknown, str))]
        if len(known) <= len(waits):
            return 0.0
        wait = max(known[0] - float(median(known[1:])), 0.0)
    elif crowded(run, late.rank):
        return 1.0
    return needed_number(wait) / cost


def _is_longer(run: RunView, late: Straggler) -> bool:
    return late.cause == "kernels" and kernel_cause(late, run) == "longer kernels"


@run_fact(unit="ms", needs=("collectives", "multi_rank"))
def straggler_turn_ms(run: RunView) -> Value:
    """How much longer than the others the latest rank of each step, whichever it is, is at work of its own.

    Of its causes (:func:`straggler_cause`) the largest that is no operators, communication or copies: that is
    sleep, I/O, loading, Python. What it is in at least three quarters of the steps. 0 where that is less
    than nine tenths of the median: what comes by chance is of any length. Unknown with fewer than four steps.
    """
    late = stragglers(run)
    if not late:
        return 0.0 if is_matched(run) else NOT_MATCHED
    if len(late[0].steps) < ENOUGH_TURNS:
        return Unknown(f"fewer than {ENOUGH_TURNS} steps can be compared")
    worst = np.argmax([one.gain_ns for one in late], axis=0)
    own = [CAUSES.index(cause) for cause in CAUSES if cause not in ("kernels", "communication", "copy")]
    longest = np.array([late[place].excess_us[step, own].max() for step, place in enumerate(worst.tolist())])
    usual, least = float(median(longest)), float(habitual(longest))
    return max(least, 0.0) / 1e3 if least >= AS_LONG * usual else 0.0
