"""What a pipeline gains if its stages, its micro-batches or the ranks of a stage take equally long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from tracedoc.ranks.arrival_replay import (
    ArrivalReplay,
    arrival_replay,
    gains_of_launches,
    gains_of_work,
)
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.step.rank_digest import RankDigest
from tracedoc.step.sync_path import Action
from tracedoc.topics.pipeline.stages import (
    CpuWork,
    Floats,
    Pipeline,
    Places,
    actions_of,
    cpu_work,
    passes_of_step,
    pipeline,
    ways_of_kinds,
)
from tracedoc.topics.straggler.slow_gpus import Slowness, slowness_by_rank
from tracedoc.topics.straggler.work import CAUSES, host_surplus_ns, host_us
from tracedoc.trace.distinct import is_among, median, quantile
from tracedoc.values import once

SLOWER = 0.05
"""Replicas whose passes differ by less do the same work."""

SLOWER_CPU = 0.15
"""Replicas that share cores differ by so much without a fault."""


@once
def pass_ratios(run: RunView) -> Floats:
    """How long each pass of a rank through a micro-batch takes, over the mean of those like it.

    Those that come once in a step, and so cannot be compared, are left out; none without a pipeline.
    """
    found, plan = _replayed(run)
    ratios: list[float] = []
    if found is not None and plan is not None and found.whole:
        work = np.array(plan.work_ns, dtype=np.float64)
        for alike in _alike(run, plan, found):
            lengths = alike.lengths(work)
            if lengths.size > len(found.steps) * len(found.stages[0]) and lengths.mean() > 0:
                ratios.extend((lengths / lengths.mean()).tolist())
    return np.array(ratios)


class SlowWorker(msgspec.Struct, frozen=True, eq=False):
    """A rank (a position) that takes longer than its replicas, or than other stages take for the same.

    ``gain_ns`` is how much shorter each step of the pipeline would be if it did not; ``excess_us[step,
    cause]`` what it is longer at, by :data:`CAUSES`, ``None`` where its collectives with replicas tell that.
    """

    place: int
    gain_ns: Int64Array
    excess_us: Int64Array | None = None


@once
def slow_stages(run: RunView) -> dict[int, float]:
    """How many times as long a GPU takes for layers that other stages have too, of ranks without replicas."""
    found = pipeline(run)
    slowness = (
        {}
        if found is None
        else {place: slowness_by_rank(run)[run.digests[place].rank] for place in _alone(found)}
    )
    return {
        place: one.ratio
        for place, one in slowness.items()
        if isinstance(one, Slowness) and min(one.ratio, one.low_ratio) >= 1 + SLOWER
    }


def _alone(found: Pipeline) -> list[int]:
    """The ranks that have no replica."""
    return [stage[0] for stage in found.stages if len(stage) == 1]


@once
def slow_workers(run: RunView) -> tuple[SlowWorker, ...]:
    """The ranks that hold up their pipeline, and with it the others, by more than their replicas."""
    found, plan = _replayed(run)
    if found is None:
        return ()
    if plan is None:
        workers = _away_workers(found, cpu_work(run))
    else:
        workers = [*_slow_on_gpus(run, plan, found), *_slow_alone(run, plan, found)]
    return tuple(sorted(workers, key=lambda worker: -int(worker.gain_ns.sum())))


def _replayed(run: RunView) -> tuple[Pipeline | None, ArrivalReplay | None]:
    """The pipeline of a run, and the replay of all ranks, which takes long: none without a pipeline."""
    found = pipeline(run)
    return found, None if found is None else arrival_replay(run)


class _Alike(msgspec.Struct, frozen=True, eq=False):
    """The passes of one kind through a stage: each one's actions, and the rank (a position) that it is of."""

    passes: list[Places]
    ranks: list[int]

    def lengths(self, work: Floats) -> Floats:
        """How long each takes, where actions take these times."""
        return np.array([work[places].sum() for places in self.passes])


def _alike(run: RunView, plan: ArrivalReplay, found: Pipeline) -> list[_Alike]:
    """The passes of all ranks, those of one stage and kind together."""
    kinds: dict[tuple[int, tuple[int, ...]], _Alike] = defaultdict(lambda: _Alike([], []))
    for place in range(len(run.digests)):
        stage = found.stage_of(place)
        if stage >= 0:
            for kind, places in _passes(run, plan, found, place):
                kinds[stage, kind].passes.append(places)
                kinds[stage, kind].ranks.append(place)
    return list(kinds.values())


def _usually_longer(run: RunView, plan: ArrivalReplay, found: Pipeline) -> dict[int, float]:
    """How many times the median of its replicas most passes of a rank take: three in four, at the least.

    A rank whose samples are longer by chance has passes that are shorter as well. Ranks without a pass to
    compare are left out.
    """
    work = np.array(plan.work_ns, dtype=np.float64)
    ratios: dict[int, list[float]] = defaultdict(list)
    for alike in _alike(run, plan, found):
        lengths, ranks = alike.lengths(work), np.array(alike.ranks)
        for place in set(alike.ranks):
            others = lengths[ranks != place]
            usual = median(others) if others.size else 0.0
            if usual > 0:
                ratios[place].extend((lengths[ranks == place] / usual).tolist())
    return {place: float(quantile(found, 0.25)) for place, found in ratios.items()}


def _passes(
    run: RunView, plan: ArrivalReplay, found: Pipeline, place: int
) -> Iterator[tuple[tuple[int, ...], Places]]:
    """Yield the work of one rank between its sends in the steps of a pipeline, with what kind it is of.

    The kind is which way the send before and the one after go (0 where the step begins or ends), and how many
    kernels run in between, which do not depend on how long samples are.
    """
    table, path = run.digests[place].collectives, run.digests[place].sync_path
    assert path is not None
    ways = ways_of_kinds(table, found.stage_of_rank, found.stage_of(place))
    sends = np.array([kind.op in ("send", "send_recv") for kind in table.kinds] or [False])
    position, action, item = actions_of(plan, place)
    ready = action == int(Action.READY)
    kind = np.zeros(action.size, dtype=np.intp)
    kind[ready] = table.kind[item[ready] - plan.offsets[place]]
    sent = np.where(ready & sends[kind], ways[kind], 0)
    kernels = path.kernels[position - plan.parts()[place].start]
    begins = action == int(Action.STEP)
    edges = np.flatnonzero((sent != 0) | begins)
    whole = np.append(is_among(plan.steps[place], found.steps), False)
    step = np.maximum.accumulate(np.where(begins, item, -1))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if step[begin] < 0 or not whole[step[begin]]:
            continue
        like = (int(sent[begin]), int(sent[end]), int(kernels[begin + 1 : end + 1].sum()))
        yield like, position[begin + 1 : end + 1]


def _with_replicas(found: Pipeline) -> Iterator[tuple[int, list[int]]]:
    """Yield each rank that is not alone in its stage, with the others of it."""
    for stage in found.stages:
        if len(stage) > 1:
            yield from ((place, [other for other in stage if other != place]) for place in stage)


def _slow_on_gpus(run: RunView, plan: ArrivalReplay, found: Pipeline) -> list[SlowWorker]:
    """The ranks whose passes take longer than those of their replicas, or whose GPU is idle for longer."""
    workers = []
    idle, most = _idle_ns(run, found.steps), _usually_longer(run, plan, found)
    for place, others in _with_replicas(found):
        usual = median(found.pass_ns[others], axis=0)
        longer = found.pass_ns[place] - usual
        if longer.mean() >= SLOWER * usual.mean() and most.get(place, np.inf) >= 1 + SLOWER:
            gain = _gain_of_usual_passes(run, plan, found, place, usual)
            workers.append(SlowWorker(place, gain, _longer_at(run, place, others, found.steps, longer)))
            continue
        away = np.maximum(idle[place] - median(idle[others], axis=0), 0)
        if away.mean() >= SLOWER * usual.mean():
            earlier = dict(zip(found.steps, away.astype(np.int64).tolist(), strict=True))
            gain = gains_of_launches(plan, place, earlier, found.steps)
            workers.append(SlowWorker(place, gain, _longer_at(run, place, others, found.steps, away)))
    return workers


def _longer_at(
    run: RunView, place: int, others: list[int], steps: tuple[int, ...], longer_ns: Floats
) -> Int64Array:
    """What a rank is longer at than its replicas in each step, by :data:`CAUSES`: ``longer_ns`` in all.

    All of it is in kernels where nothing shows what else.
    """
    found = _in_kernels(longer_ns)
    for number, step in enumerate(steps):
        usual = median([_spent_us(run.digests[other], step) for other in others], axis=0)
        more = np.maximum(_spent_us(run.digests[place], step) - usual, 0)
        if more.any():
            found[number] = more * (found[number].sum() / more.sum())
    return found


def _spent_us(digest: RankDigest, step: int) -> Int64Array:
    """What a device did in a step, and where it was idle its host, by :data:`CAUSES`; without communication.

    What a host does instead of launching is Python.
    """
    (shown,) = (one for one in digest.steps if one.index == step)
    spent = {"kernels": shown.budget.compute_ns, "copy": shown.budget.exposed_copy_ns, **shown.idle_ns}
    spent["python"] = spent.pop("launch", 0)
    return np.array([spent.get(cause, 0) // 1000 for cause in CAUSES])


def _in_kernels(longer_ns: Floats) -> Int64Array:
    """Time of each step by :data:`CAUSES`, all of it in kernels."""
    found = np.zeros((longer_ns.size, len(CAUSES)), dtype=np.int64)
    found[:, CAUSES.index("kernels")] = np.maximum(longer_ns, 0) // 1000
    return found


def _slow_alone(run: RunView, plan: ArrivalReplay, found: Pipeline) -> list[SlowWorker]:
    """The ranks without replicas whose GPU is slower, or idle for longer, than those of other stages."""
    workers, slow = [], slow_stages(run)
    idle = _idle_ns(run, found.steps)
    for place in _alone(found):
        pass_ns = found.pass_ns[place]
        if place in slow:
            usual = pass_ns / slow[place]
            gain = _gain_of_usual_passes(run, plan, found, place, usual)
            workers.append(SlowWorker(place, gain, _in_kernels(pass_ns - usual)))
        elif found.whole:
            longer = np.maximum(idle[place] - median(np.delete(idle, place, axis=0), axis=0), 0)
            surplus = host_surplus_ns(run, run.digests[place].rank)
            if surplus is not None:  # the others' hosts may be as slow beside their waiting
                longer = np.minimum(longer, max(surplus, 0))
            causes = np.sum([host_us(run, place, step) for step in found.steps], axis=0)
            if causes.any() and longer.mean() >= SLOWER * pass_ns.mean():
                excess = np.outer(longer, causes / causes.sum()).astype(np.int64) // 1000
                earlier = dict(zip(found.steps, longer.astype(np.int64).tolist(), strict=True))
                gain = gains_of_launches(plan, place, earlier, found.steps)
                workers.append(SlowWorker(place, gain, excess))
    return workers


def _gain_of_usual_passes(
    run: RunView, plan: ArrivalReplay, found: Pipeline, place: int, usual_ns: Floats
) -> Int64Array:
    """What each step gains where a rank's passes take ``usual_ns``, by a replay of all ranks.

    At most, where some were not captured: what its passes take longer.
    """
    if not found.whole:
        return np.asarray(np.maximum(found.pass_ns[place] - usual_ns, 0), dtype=np.int64)
    work = np.array(plan.work_ns, dtype=np.float64)
    for column, step in enumerate(found.steps):
        passes = passes_of_step(run, plan, place, step)
        work[passes] *= usual_ns[column] / max(found.pass_ns[place, column], 1.0)
    return gains_of_work(plan, work, found.steps)


def _away_workers(found: Pipeline, work: CpuWork | None) -> list[SlowWorker]:
    """The ranks of a CPU run that are away for longer than their replicas: the others wait as long."""
    workers: list[SlowWorker] = []
    if work is None:
        return workers
    for place, others in _with_replicas(found):
        more = work.usual_away_ns[place] - median(work.usual_away_ns[others])
        if more >= SLOWER_CPU * found.pass_ns[others].mean():
            longer = work.away_ns[place] - median(work.away_ns[others], axis=0)
            gain = np.maximum(longer, 0).astype(np.int64)
            workers.append(SlowWorker(place, gain))
    return workers


def _idle_ns(run: RunView, steps: tuple[int, ...]) -> Floats:
    """What the GPU of each rank is idle in steps: ``[rank, step]``."""
    by_step = [{step.index: step.budget.idle_ns for step in digest.steps} for digest in run.digests]
    return np.array([[idle[step] for step in steps] for idle in by_step], dtype=np.float64)
