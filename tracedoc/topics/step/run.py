"""Facts of the run from the log of every optimizer step: outliers and garbage collection."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracedoc.facts.catalog import NO_MANIFEST, job_of, ranks_fact, run_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.steplog import BEGINS, COLLECTION, CORE_WAIT, STEP, STOPPED, WINDOW, WRITTEN
from tracedoc.step.rank_digest import RankDigest
from tracedoc.trace.distinct import distinct, intersection, is_among, median, quantile
from tracedoc.values import Unknown, Value, needed, once

STEPS_FOR_OUTLIERS = 20
"""With fewer logged steps, facts about outliers and pauses are unknown."""

WARMUP_STEPS = 5
"""The first steps of a job allocate, compile and measure; they are left out."""

OUTLIER_RATIO = 1.5
"""A step this many times as long as the median is an outlier."""

ENOUGH_PLAIN = 5
"""The length of a step without a collection is known from this many such steps on."""

_QUIET_BEFORE_WRITING_NS = 2_000_000_000

_WRITTEN_BYTES_PER_NS = 0.02
"""After the capture its trace is compressed beside the job: where no log tells until when, 2 s and 1 s
for each 20 MB are left out."""

Ints = NDArray[np.int64]


class Steps(msgspec.Struct, frozen=True, eq=False):
    """The steps of a rank that count: its warm-up and all that the capture touched are left out.

    ``paused_ns`` is the time that garbage collections took in each, ``waited_ns`` that for which the training
    thread waited for a free core, 0 where that is not known.
    """

    number: Ints
    length_ns: Ints
    paused_ns: Ints
    waited_ns: Ints


def counted_steps(rank: RankJob, touched_elsewhere: Ints | None = None) -> Steps | Unknown:
    """The steps of a rank's log that show how the job runs without the profiler.

    ``touched_elsewhere`` are numbers of steps that the captures of other ranks touched: whoever waits for
    a rank that is captured is slow in the same steps.
    """
    if rank.log is None:
        return Unknown("no log of all steps: it lies beside the manifest of `tracedoc collect`")
    words = np.frombuffer(rank.log.words, dtype=np.int64).reshape(-1, 3)
    kind, number = words[:, 0] >> 32, words[:, 0] & 0xFFFFFFFF
    order = np.argsort(words[:, 1], kind="stable")
    steps = order[kind[order] == STEP]
    warm = (number[steps] > WARMUP_STEPS) & (words[steps, 2] > 0)
    touched = _touched(rank, words[steps])
    if touched_elsewhere is not None:
        touched |= is_among(number[steps], touched_elsewhere)
    kept = warm & ~touched
    pauses = order[kind[order] == COLLECTION]
    steps_end = words[steps, 1]
    paused = np.zeros(steps.size, dtype=np.int64)
    home = np.searchsorted(steps_end, words[pauses, 1])
    inside = home < steps.size
    np.add.at(paused, home[inside], words[pauses[inside], 2])
    # Each number once, in order: a clock that was set back brings later steps before earlier ones.
    numbers, once = np.unique(number[steps[kept]], return_index=True)
    waited = core_waits_ns(rank, numbers)
    if waited is None:
        waited = np.zeros(numbers.size, dtype=np.int64)
    found = Steps(numbers, words[steps[kept], 2][once], paused[kept][once], waited)
    if found.number.size < STEPS_FOR_OUTLIERS:
        return Unknown(_too_few(int(warm.sum()), int((warm & touched).sum())))
    return found


def _too_few(warm: int, touched: int) -> str:
    """The reason why the steps of a log are too few; ``warm`` is their number after the warm-up."""
    logged = f"{warm} {'step was' if warm == 1 else 'steps were'} logged after the first {WARMUP_STEPS}"
    if not touched:
        return f"{logged}, fewer than {STEPS_FOR_OUTLIERS}"
    return (
        f"{logged}; without the {touched} that the capture and the writing of its trace touched, "
        f"{warm - touched} {'is' if warm - touched == 1 else 'are'} left, fewer than {STEPS_FOR_OUTLIERS}"
    )


def _touched(rank: RankJob, steps: Ints) -> NDArray[np.bool_]:
    """A mask of the steps that the capture touched: from its beginning until its trace is written."""
    assert rank.log is not None
    ends, begins = steps[:, 1], steps[:, 1] - steps[:, 2]
    touched = np.zeros(len(steps), dtype=np.bool_)
    windows = rank.log.of_kind(WINDOW)
    writing_ns = _QUIET_BEFORE_WRITING_NS + int(rank.json_bytes / _WRITTEN_BYTES_PER_NS)
    for place, (which, start, _) in enumerate(windows):
        if which == BEGINS:
            until = np.iinfo(np.int64).max  # a capture that never ended touches all that follows
            for what, end, _ in windows[place + 1 :]:
                if what == BEGINS:
                    break
                until = end if what == WRITTEN else end + writing_ns
            touched |= (ends >= start) & (begins <= until)
    return touched


@once
def _touched_on_any_rank(run: RunView) -> Ints:
    """The numbers of the steps that the capture of some rank touched. One records a step more."""
    found = [np.empty(0, dtype=np.int64)]
    for rank in run.job.ranks:
        if rank.log is not None:
            words = np.frombuffer(rank.log.words, dtype=np.int64).reshape(-1, 3)
            steps = words[words[:, 0] >> 32 == STEP]
            found.append(steps[_touched(rank, steps), 0] & 0xFFFFFFFF)
    return distinct(np.concatenate(found))


@once
def _logged(run: RunView) -> list[Steps] | Unknown:
    if not run.job.ranks:
        return NO_MANIFEST
    touched = _touched_on_any_rank(run)
    found = [counted_steps(rank, touched) for rank in run.job.ranks]
    known = [steps for steps in found if isinstance(steps, Steps)]
    reasons = [steps for steps in found if isinstance(steps, Unknown)]
    return known or reasons[0]


@ranks_fact(unit="count")
def logged_steps(run: RunView, digest: RankDigest) -> Value:
    """Steps of the whole run that were timed, less the first five and those that the capture touched."""
    return int(needed(_logged_by(run, digest)).number.size)


@ranks_fact(unit="ms")
def logged_step_ms(run: RunView, digest: RankDigest) -> Value:
    """Median time of these steps, from the end of one optimizer step to the end of the next, on the host."""
    return float(median(needed(_logged_by(run, digest)).length_ns)) / 1e6


@run_fact(unit="ms")
def logged_mean_step_ms(run: RunView) -> Value:
    """Mean time of the logged steps that all ranks share: what costs of the whole run are a part of."""
    return float(needed(job_steps(run)).length_ns.mean()) / 1e6


@run_fact(unit="ms")
def worst_gc_pause_ms(run: RunView) -> Value:
    """Most time that garbage collections took in one logged step of a rank: the others wait for it."""
    return max(float(steps.paused_ns.max()) for steps in needed(_logged(run))) / 1e6


def _logged_by(run: RunView, digest: RankDigest) -> Steps | Unknown:
    return counted_steps(needed(job_of(run, digest)), _touched_on_any_rank(run))


class JobSteps(msgspec.Struct, frozen=True, eq=False):
    """The steps that every logged rank has, for the job as a whole: ranks step together.

    ``length_ns`` is the median over ranks; ``paused_ns`` and ``waited_ns`` are sums over ranks, since who
    waits for one pause waits for the next; ``longest_ns`` is that of the rank that paused longest.
    """

    number: Ints
    length_ns: Ints
    paused_ns: Ints
    longest_ns: Ints
    waited_ns: Ints

    @property
    def median_ns(self) -> float:
        """The median length of a step."""
        return float(median(self.length_ns))

    @property
    def excess_ns(self) -> NDArray[np.float64]:
        """How much longer than usual each step took; 0 for those that were not."""
        return np.asarray(np.maximum(self.length_ns - self.median_ns, 0.0), dtype=np.float64)

    @property
    def gc_cost_ns(self) -> NDArray[np.float64]:
        """How much longer its collections made each step, at most.

        Where nearly all steps have one, the length of a step without is not known: the longest pause counts.
        """
        plain = self.length_ns[self.paused_ns == 0]
        if plain.size < ENOUGH_PLAIN:
            return np.asarray(np.minimum(self.longest_ns, self.length_ns), dtype=np.float64)
        excess = np.maximum(self.length_ns - float(median(plain)), 0.0)
        return np.asarray(np.minimum(self.paused_ns, excess), dtype=np.float64)

    @property
    def core_wait_cost_ns(self) -> NDArray[np.float64]:
        """How much longer waiting for free cores made each step, at most: what was waited more than usual."""
        more = np.maximum(self.waited_ns - float(median(self.waited_ns)), 0.0)
        return np.asarray(np.minimum(more, np.maximum(self.excess_ns - self.gc_cost_ns, 0.0)))


@once
def job_steps(run: RunView) -> JobSteps | Unknown:
    """The steps of the job; Unknown without logs, or where ranks share too few steps.

    The median of the ranks; where these do not meet in every step, those of the rank whose steps differ
    least: the others wait for it when they meet.
    """
    ranks = needed(_logged(run))
    numbers = ranks[0].number
    for other in ranks[1:]:
        numbers = intersection(numbers, other.number)
    if numbers.size < STEPS_FOR_OUTLIERS:
        return Unknown(f"the logs of the ranks share {numbers.size} steps, fewer than {STEPS_FOR_OUTLIERS}")
    places = [np.searchsorted(steps.number, numbers) for steps in ranks]
    lengths, paused, waited = (
        np.stack([getattr(steps, name)[place] for steps, place in zip(ranks, places, strict=True)])
        for name in ("length_ns", "paused_ns", "waited_ns")
    )
    length = median(lengths, axis=0).astype(np.int64)
    if run.meets_rarely:
        length = lengths[int(lengths.std(axis=1).argmin())]
    return JobSteps(numbers, length, paused.sum(axis=0), paused.max(axis=0), waited.sum(axis=0))


@once
def stopped_steps(run: RunView) -> dict[int, Ints]:
    """By rank the steps of the job that are far longer mostly because the process stood still, by its log.

    Places among :func:`job_steps`; of ranks that were stopped in some, which the others wait for.
    """
    found: dict[int, Ints] = {}
    steps = job_steps(run)
    for rank in run.job.ranks if isinstance(steps, JobSteps) else ():
        stops = rank.log.of_kind(STOPPED) if rank.log is not None else []
        if rank.log is None or not stops or isinstance(steps, Unknown):
            continue
        logged = np.array(rank.log.of_kind(STEP))
        home = np.searchsorted(logged[:, 1], [end - length // 2 for _, end, length in stops])
        stopped = np.zeros(steps.number.size)
        for (_, _, length), place in zip(stops, home.tolist(), strict=True):
            if place < len(logged):
                stopped[steps.number == logged[place, 0]] += length
        places = np.flatnonzero(is_outlier(steps) & (stopped >= NAMED_SHARE * steps.excess_ns))
        if places.size:
            found[rank.rank] = places
    return found


@run_fact(unit="ms")
def gc_cost_ms(run: RunView) -> Value:
    """Time a step that garbage collection costs the job, as the mean over all logged steps.

    A collection counts only as far as its step was longer than the median of those without one: what the
    GPU's queue hides costs nothing. Collections of all ranks count, since the others wait. Where fewer than
    five steps are without, the pause of the rank that paused longest counts: an upper bound.
    """
    return float(needed(job_steps(run)).gc_cost_ns.mean()) / 1e6


SURELY = 0.98
"""By so many roots of their number steps lie around the median where 95 % of such samples have it."""


def lasting(rest: NDArray[np.float64]) -> float:
    """The correlation of each step's length with the next one's, 0 where it is negative."""
    power = float((rest * rest).sum())
    return max(float((rest[1:] * rest[:-1]).sum()) / power, 0.0) if power else 0.0


def _sure_ends_ms(run: RunView) -> tuple[float, float]:
    """The interval of 95 % for the median step, by the sign test.

    Where what makes steps long lasts, with correlation r from one to the next, n steps count as
    n (1 - r) / (1 + r).
    """
    steps = needed(job_steps(run))
    again = lasting(np.asarray(steps.length_ns - steps.median_ns, dtype=np.float64))
    half = min(SURELY * ((1 + again) / max(1 - again, 1e-9) / steps.number.size) ** 0.5, 0.5)
    low, high = (quantile(steps.length_ns, share) for share in (0.5 - half, 0.5 + half))
    return float(low) / 1e6, float(high) / 1e6


@run_fact(unit="ms")
def logged_median_low_ms(run: RunView) -> Value:
    """The least that the median of the logged steps may be, if they were drawn again: the end of 95 %."""
    return _sure_ends_ms(run)[0]


@run_fact(unit="ms")
def logged_median_high_ms(run: RunView) -> Value:
    """The most that the median of the logged steps may be (:func:`logged_median_low_ms`)."""
    return _sure_ends_ms(run)[1]


@run_fact(unit="fraction")
def logged_core_wait_frac(run: RunView) -> Value:
    """Share of the logged steps in which a training thread waited for a core, on the rank where most."""
    return core_wait_share(run)


def core_wait_share(run: RunView) -> float | Unknown:
    """The share of :func:`logged_core_wait_frac`."""
    ranks = _logged(run)
    if isinstance(ranks, Unknown):
        return ranks
    return max(float(steps.waited_ns.sum() / steps.length_ns.sum()) for steps in ranks)


@run_fact(unit="count")
def step_outliers(run: RunView) -> Value:
    """The logged steps that took more than 1.5 times the median.

    What their training threads waited longer than usual for a free core (Linux counts it) is left out.
    """
    return int(is_outlier(needed(job_steps(run))).sum())


def is_outlier(steps: JobSteps) -> NDArray[np.bool_]:
    """A mask of the steps of more than 1.5 times the median, without what they waited for free cores."""
    return np.asarray(steps.length_ns - steps.core_wait_cost_ns > OUTLIER_RATIO * steps.median_ns)


# -- waits for cores


def core_waits_ns(rank: RankJob, numbers: Ints) -> Ints | None:
    """The wait of a rank's training thread for a core in each of these steps, in ns, 0 where not logged.

    ``None`` where no step has it: the kernel does not count it, or the log is older than that.
    """
    if rank.log is None:
        return None
    words = np.frombuffer(rank.log.words, dtype=np.int64).reshape(-1, 3)
    words = words[words[:, 0] >> 32 == CORE_WAIT]
    if not len(words):
        return None
    logged, once = np.unique(words[:, 0] & 0xFFFFFFFF, return_index=True)
    place = np.minimum(np.searchsorted(logged, numbers), logged.size - 1)
    return np.asarray(np.where(logged[place] == numbers, words[once[place], 2], 0), dtype=np.int64)


@once
def own_frac(run: RunView) -> tuple[float, float]:
    """Least and most of a captured step that a usual one of the run takes, as shares of the median rank's.

    At least with the captured steps as they are: they may lie in a slow spell of the machine. At most without
    what ranks waited longer for cores than in logged steps, which is not the profiler's. 1 where too few
    steps were timed, and 1 at most.
    """
    ranks, logged, usual, more = run.job.ranks, job_steps(run), 0.0, 0.0
    if not isinstance(logged, Unknown):
        waited = sum(rank.core_wait_ms or 0.0 for rank in ranks)
        usual, more = logged.median_ns / 1e6, max(waited - float(median(logged.waited_ns)) / 1e6, 0.0)
    known = [
        (min((usual or own) / lasts, 1.0), own / max(lasts - more, own))
        for rank in ranks
        if rank.during is not None and (lasts := rank.during.median_ms) and (own := rank.unprofiled_ms)
    ]
    if not known:
        return 1.0, 1.0
    least, most = median(known, axis=0).tolist()
    return min(least, most), most
