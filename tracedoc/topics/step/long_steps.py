"""Facts of the run about captured steps that are far longer than the others: which, on whom, and why."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.topics.step.rank import FILLS, LONGER, longest_step, longest_step_doing, longest_step_pause_ms
from tracedoc.topics.step.run import WARMUP_STEPS
from tracedoc.topics.straggler.late_ranks import own_times
from tracedoc.topics.straggler.work import SAME_AMOUNT
from tracedoc.trace.distinct import median
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed, once

LONGER_SPREADS, LONGER_OF_TWO = 5.0, 0.5
"""A step is far longer if it is by :data:`LONGER`, and by so many times what others differ; of two steps,
which do not show how much they differ, by the second share."""

INVOLVED = 0.5
"""Ranks that do at least this share of what the worst does longer are those at which the step is long."""

LASTING = 2.0
"""Steps that are slower from one on are longer than usual by amounts that differ by less than this factor."""

LEAST_IN_ORDER = 3
"""So many long steps at equal distances are regular: two always are."""

KINDS = ("host", "input", "allocator", "compile", "gc", "compute", "communication", "copies")
"""What a long step has more than the usual one."""

SLOWER, SLOWER_ON_CPUS = "the same kernels", "the same operators"
"""Stand for compute that takes longer, though the step launches, or on CPUs calls, the same work."""

LASTS = ("regular", "from one on")

PATTERNS = ("the first", "one", "several", *LASTS)
"""How captured long steps lie; where they last, they are no accident."""

COLD_UNTIL = 2
"""A capture that begins with one of these steps, from 0, may show the first calls of a job."""

MOST_OF_EXCESS = 0.5
"""Long steps are those with which a job begins where these take this share of what all take longer."""

OF_LONGEST = (longest_step_doing, longest_step_pause_ms)

NONE = Unknown("no captured step is far longer than the others")

Times = NDArray[np.float64]


class LongSteps(msgspec.Struct, frozen=True, eq=False):
    """The steps that every rank captured whole, as columns in ms: which of them are far longer.

    ``late_ms`` is what late ranks cost each, ``excess_ms`` how much longer than usual each is without that;
    ``far`` marks those that are far longer: beyond what others differ, or by functions that run in few steps.
    A stall that ranks share is no lateness, however long each is.
    Where all are too much alike for any to be far longer, ``late_ms`` is ``None``, and ``excess_ms`` 0.
    """

    steps: tuple[int, ...]
    length_ms: Times
    late_ms: Times | None
    excess_ms: Times
    far: NDArray[np.bool_]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps that are far longer, in order."""
        return tuple(np.array(self.steps)[self.far].tolist())


class WhyLong(msgspec.Struct, frozen=True):
    """Why steps are far longer: a word of :data:`KINDS`, on which ranks, and what the host does there.

    ``input_frac`` is the share of the loader in what these ranks do longer.
    """

    kind: str
    ranks: tuple[int, ...]
    doing: str
    input_frac: float


@once
def long_steps(run: RunView) -> LongSteps:
    """The captured steps compared with the usual one of their kind: with an update, or without one."""
    lengths = _lengths_ms(run)
    steps = tuple(sorted(lengths))
    length = np.array([lengths[step] for step in steps])
    excess, lost, more_late = (np.zeros(len(steps)) for _ in range(3))
    far = np.zeros(len(steps), dtype=bool)
    updates = np.array([_updates(run.digests[0], step) for step in steps], dtype=bool)
    least = LONGER if len(steps) > 2 or _is_explained(run) else LONGER_OF_TWO
    kinds = [mine for mine in (updates, ~updates) if mine.any()]
    if all(np.ptp(length[mine]) <= least * length[mine].min() for mine in kinds):
        return LongSteps(steps, length, None, excess, far)  # whatever of it late ranks cost
    late, known = late_ms_of(run, steps), _rare_ms(run, steps)
    for mine in kinds:
        longer = length[mine] - length[mine].min()
        more_late[mine] = np.maximum(late[mine] - _lower_median(late[mine]), 0.0)
        lost[mine] = np.minimum(more_late[mine], longer)
        usual, spread = _usual(length[mine] - lost[mine], np.array(steps)[mine])
        excess[mine] = length[mine] - lost[mine] - usual
        far[mine] = excess[mine] > max(least * usual, LONGER_SPREADS * spread)
        far[mine] |= (known[mine] > least * usual) & (excess[mine] >= FILLS * known[mine])
    # Where all ranks are away, those that are longest come late there and in the step that follows.
    for place in np.flatnonzero(far).tolist():
        both = slice(place, place + 2)
        if more_late[both].sum() <= excess[place]:
            excess[place] += lost[both].sum()
            late[both] -= more_late[both]
    return LongSteps(steps, length, late, excess, far)


def _rare_ms(run: RunView, steps: tuple[int, ...]) -> Times:
    """How long every rank that shows functions is in each step in those that run in few steps."""
    hosts = [one.host_work for one in run.digests if one.host_work is not None]
    shown = [host.rare for host in hosts if host.stacks or host.rare]
    ns = [[sum(one.ns_of.get(step, 0) for one in rare) for step in steps] for rare in shown]
    return np.min(ns, axis=0, initial=np.iinfo(np.int64).max) / 1e6 if ns else np.zeros(len(steps))


def _lower_median(values: Times) -> float:
    return float(np.sort(values)[(values.size - 1) // 2])


def _usual(length: Times, numbers: NDArray[np.int64]) -> tuple[float, float]:
    """The length of the usual step in ms, and by how much the others differ from it.

    It is the lower median. Where most steps are longer than some by about as much, and their order shows that
    this is no accident, the shorter ones are the usual ones.
    """
    ordered = np.sort(length)
    shorter = ordered[: int(np.diff(ordered).argmax()) + 1] if ordered.size > 1 else ordered
    longer = length > shorter[-1]
    usual = _lower_median(length)
    likely = np.full(length.size, usual)
    if shorter.size > 1 and 2 * longer.sum() > length.size and _lie(longer, length - usual, numbers) in LASTS:
        usual = _lower_median(shorter)
        likely = np.where(longer, _lower_median(length[longer]), usual)
    return usual, _lower_median(np.abs(length - likely))


def _is_explained(run: RunView) -> bool:
    """Whether a rank's longest step does something that its others do not, for half of what it is longer."""
    for digest in run.digests:
        doing, pause = longest_step_doing.of(digest), longest_step_pause_ms.of(digest)
        if isinstance(doing, str) or (isinstance(pause, float) and pause > 0):
            return True
    return False


def _updates(digest: RankDigest, index: int) -> bool:
    """Whether the optimizer runs in a step of a rank; also where that is not known."""
    places = [place for place, step in enumerate(digest.steps) if step.index == index]
    return digest.work is None or not places or bool(digest.work.updates[places[0]])


@once
def why_long(run: RunView) -> WhyLong | Unknown:
    """Why captured steps are far longer, by what they have more than the usual steps of the same rank."""
    found = long_steps(run)
    if not found.far.any():
        return NONE
    more = {digest.rank: _more_ns(digest, found.numbers) for digest in run.digests}
    # Who waits for others in communication does nothing longer itself.
    own = {rank: sum(ns for kind, ns in of.items() if kind != "communication") for rank, of in more.items()}
    worst = max(own, key=lambda rank: own[rank])
    if own[worst] <= max(
        more[worst]["communication"], INVOLVED * max(of["communication"] for of in more.values())
    ):
        return WhyLong("communication", tuple(own), "", 0.0)
    of = {kind: ns for kind, ns in more[worst].items() if kind != "communication"}
    digest = run.digest(worst)
    kind = max(of, key=lambda kind: of[kind])
    if kind == "compute" and _same_work(digest, found.numbers):
        kind = SLOWER_ON_CPUS if digest.is_cpu else SLOWER
    # What the host does beside them makes no kernels longer.
    told = longest_step.of(digest) in found.numbers and kind != SLOWER
    doing = longest_step_doing.of(digest) if told else ""
    return WhyLong(
        kind=kind,
        ranks=tuple(rank for rank, ns in own.items() if ns >= INVOLVED * own[worst]),
        doing=doing if isinstance(doing, str) else "",
        input_frac=min(of["input"] / own[worst], 1.0),
    )


def _more_ns(digest: RankDigest, far: tuple[int, ...]) -> dict[str, float]:
    """What a rank's long steps have more of each kind than the median of its others, 0 at least.

    All of them together: the step in which a rank is away is the next one of ranks that wait for it.
    """
    long, others = _long_and_others(digest, far)
    rest = [_parts_ns(digest.steps[place]) for place in others]
    usual = {kind: float(median([one[kind] for one in rest])) if rest else 0.0 for kind in KINDS}
    parts = [_parts_ns(digest.steps[place]) for place in long]
    return {kind: sum(max(one[kind] - usual[kind], 0.0) for one in parts) for kind in KINDS}


def _long_and_others(digest: RankDigest, far: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The places of a rank's long steps, and of its others of the same kind."""
    long = [place for place, step in enumerate(digest.steps) if step.complete and step.index in far]
    kinds = {_updates(digest, digest.steps[place].index) for place in long}
    others = [
        place
        for place, step in enumerate(digest.steps)
        if step.complete and step.index not in far and _updates(digest, step.index) in kinds
    ]
    return long, others


def _same_work(digest: RankDigest, far: tuple[int, ...]) -> bool:
    """Whether long steps have as many kernels and thread blocks as the others; on CPUs, operators."""
    long, others = _long_and_others(digest, far)
    if digest.work is None or not long or not others:
        return False
    counts = (digest.work.kernels, digest.work.blocks)
    return all(abs(of[long].mean() - of[others].mean()) <= SAME_AMOUNT * of[others].mean() for of in counts)


def _parts_ns(step: StepDigest) -> dict[str, float]:
    named = {kind: float(step.idle_ns.get(kind, 0)) for kind in ("input", "allocator", "compile", "gc")}
    return named | {
        "host": step.budget.idle_ns - sum(named.values()),
        "compute": float(step.budget.compute_ns),
        "communication": float(step.budget.exposed_comm_ns),
        "copies": float(step.budget.exposed_copy_ns),
    }


def _lengths_ms(run: RunView) -> dict[int, float]:
    """The length of each step that all ranks with steps captured whole: the mean over the ranks.

    Where they do not meet in every step it is what the rank that takes longest takes without waiting.
    """
    counted = [one for one in run.digests if one.steps]
    found: dict[int, list[int]] = {}
    for digest in counted:
        for step in digest.complete_steps:
            found.setdefault(step.index, []).append(step.budget.window_ns)
    steps = sorted(step for step, ns in found.items() if len(ns) == len(counted))
    if len(counted) == len(run.digests) and (apart := own_times(run, steps)) is not None:
        return dict(zip(steps, (apart.pace_ns / 1e6).tolist(), strict=True))
    return {step: sum(found[step]) / len(counted) / 1e6 for step in steps}


def late_ms_of(run: RunView, steps: tuple[int, ...]) -> Times:
    """What each step takes longer than if all ranks came as early as the median one; zeros if not known."""
    if (apart := own_times(run, steps)) is not None:
        return np.asarray(apart.late_ns / 1e6)
    if len(run.digests) < 2 or arrival_replay(run) is None:
        return np.zeros(len(steps))
    return np.maximum(gains_together(run, StartPolicy.MEDIAN, steps), 0) / 1e6


@run_fact(unit="text", needs=OF_LONGEST)
def long_steps_captured(run: RunView) -> Value:
    """The captured steps far longer than the usual one: by a tenth, and by five times what others differ.

    Or by a tenth in functions that run in few of the steps. Of two steps by half, unless one alone does
    something, or pauses. Usual is the lower median, of steps with an update and without one apart; where most
    steps are longer, at equal distances or from one on, it is that of the others. What late ranks cost a step
    more than usual is no part of its length.
    """
    found = long_steps(run)
    return format_ranges(found.numbers) if found.far.any() else NONE


@run_fact(unit="count", needs=OF_LONGEST)
def long_steps_count(run: RunView) -> Value:
    """How many captured steps are far longer than the usual one (:func:`long_steps_captured`)."""
    found = long_steps(run)
    if len(found.steps) < 2:
        return Unknown(f"all ranks captured {len(found.steps)} steps whole; two are needed")
    return int(found.far.sum())


@run_fact(unit="count", needs=OF_LONGEST)
def captured_steps(run: RunView) -> Value:
    """The steps that all ranks captured whole."""
    return len(long_steps(run).steps)


def _lie(far: NDArray[np.bool_], excess: Times, numbers: NDArray[np.int64]) -> str:
    """How long steps lie, of :data:`PATTERNS`, "" without any."""
    count = int(far.sum())
    if not count:
        return ""
    last = excess[-count:]
    if count > 1 and far[-count:].all() and last.max() <= LASTING * last.min():
        return "from one on"
    if period_of(far, numbers):
        return "regular"
    early = far & (np.cumsum(~far) == 0) & (numbers <= WARMUP_STEPS) & (numbers[0] <= COLD_UNTIL)
    if excess[early].sum() >= MOST_OF_EXCESS * excess[far].sum():
        return "the first"
    return "one" if count == 1 else "several"


def period_of(far: NDArray[np.bool_], numbers: NDArray[np.int64]) -> int:
    """The distance between some steps if all that were captured at that distance are among them, else 0."""
    mine = numbers[far]
    gaps = np.diff(mine)
    if mine.size < LEAST_IN_ORDER or gaps.min() < 2 or (gaps != gaps[0]).any():
        return 0
    due = (numbers - mine[0]) % gaps[0] == 0
    return int(gaps[0]) if far[due].all() else 0


@run_fact(unit="text", values=PATTERNS, needs=OF_LONGEST)
def long_steps_pattern(run: RunView) -> Value:
    """How the long steps (:func:`long_steps_captured`) lie.

    "from one on": two and more, all at the end of the capture, longer by about as much; "regular": three and
    more, at equal distances of two steps and more; "the first": those with which the job begins take most of
    what all take longer, as where kernels are loaded and code is compiled; else "one" or "several".
    """
    found = long_steps(run)
    return _lie(found.far, found.excess_ms, np.array(found.steps)) or NONE


@run_fact(unit="count", needs=OF_LONGEST)
def long_steps_period(run: RunView) -> Value:
    """Every how many steps a long one comes (:func:`long_steps_captured`), where they are regular."""
    found = long_steps(run)
    if not found.far.any():
        return NONE
    period = period_of(found.far, np.array(found.steps))
    return period or Unknown("long steps do not come at equal distances")


@run_fact(unit="ms", needs=OF_LONGEST)
def long_step_excess_ms(run: RunView) -> Value:
    """How much longer than usual the longest captured step is (:func:`long_steps_captured`)."""
    found = long_steps(run)
    return float(found.excess_ms.max()) if found.far.any() else NONE


@run_fact(unit="text", values=(*KINDS, SLOWER, SLOWER_ON_CPUS), needs=(longest_step, *OF_LONGEST))
def long_step_kind(run: RunView) -> Value:
    """What the longest captured step has most of beyond the median step, on the rank that has most of it.

    "compute", exposed "communication" or "copies", and idle time: "input", "allocator", "compile", "gc"
    by what the host does, "host" for the rest. "the same kernels": compute takes longer, though long steps
    launch as many kernels and thread blocks; "the same operators": so on CPUs. Waiting in communication is
    that of others.
    """
    return needed(why_long(run)).kind


@run_fact(unit="text", needs=(longest_step, *OF_LONGEST))
def long_step_ranks(run: RunView) -> Value:
    """On which ranks the longest captured step is long by what they do themselves: "every rank", or which."""
    found = needed(why_long(run))
    if len(found.ranks) == len(run.digests) > 1:
        return "every rank"
    return ("rank " if len(found.ranks) == 1 else "ranks ") + format_ranges(found.ranks)


@run_fact(unit="text", needs=(longest_step, *OF_LONGEST))
def long_step_doing(run: RunView) -> Value:
    """What the host does in the longest captured step only (:func:`longest_step_doing`)."""
    found = needed(why_long(run))
    return found.doing or Unknown(
        "no function, range or operator of the trace fills what the step takes longer"
    )
