"""Pipelines: which ranks are which stage, what each stage computes, and what equal stages would give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.digest.meetings import Action
from tracedoc.ranks.cpu_stages import CpuWork, cpu_work
from tracedoc.ranks.groups import pipeline_pairs
from tracedoc.ranks.rehearsal import Rehearsal, gains_of_work, gains_without, rehearsal
from tracedoc.ranks.run_view import RunView, once
from tracedoc.spans import Int64Array

Floats = npt.NDArray[np.float64]

ALL_PASSES = 0.8
"""A step with less of the usual work on passes was not captured with all of them."""

SLOWER = 0.05
"""Replicas whose passes differ by less do the same work."""

SLOWER_CPU = 0.15
"""Replicas that share cores differ by so much without a fault."""


class Pipeline(msgspec.Struct, frozen=True, eq=False):
    """The stages of a run, first to last, as positions of ranks; the ranks of a stage do the same work.

    ``steps`` are those that all ranks show with all of their passes. ``pass_ns[rank, step]`` is what each
    works on forward and backward passes in them, without the optimizer; ``away_ns`` is the part of it without
    work on the device, known in CPU runs (:mod:`tracedoc.ranks.cpu_stages`), whose passes are whole steps
    without communication. ``micro_batches`` are those of a step.
    """

    stages: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    pass_ns: Floats
    away_ns: Floats
    micro_batches: int

    @property
    def stage_ns(self) -> Floats:
        """What each rank of a stage works on passes in a step at least, on average."""
        return np.array([self.pass_ns[list(stage)].mean(axis=1).min() for stage in self.stages])

    @property
    def stage_away_ns(self) -> Floats:
        """What each rank of a stage is away in a step at least, on average."""
        return np.array([self.away_ns[list(stage)].mean(axis=1).min() for stage in self.stages])

    def stage_of(self, place: int) -> int:
        """Return the stage of a rank (a position), -1 where it has none."""
        return next((number for number, stage in enumerate(self.stages) if place in stage), -1)


@once
def pipeline(run: RunView) -> Pipeline | None:
    """Return the stages of a run, ``None`` where ranks pass no data from one to the next.

    Ranks that send to each other are one pipeline; the others beside it are its replicas. Two neighbours that
    send both ways are neighbouring stages; the first stage is that of the lowest rank at an end.
    """
    chains = _chains(run)
    steps = _steps(run)
    if not chains or len({len(chain) for chain in chains}) > 1 or not steps:
        return None
    stages = tuple(tuple(sorted(places)) for places in zip(*chains, strict=True))
    plan = rehearsal(run)
    if plan is None:
        return _on_cpus(run, stages)
    work = np.array(plan.work_ns)
    passes = np.array(
        [
            [work[_parts_of_step(run, plan, place, step)[0]].sum() for step in steps]
            for place in range(len(run.digests))
        ],
        dtype=np.float64,
    )
    # The last step is cut off by the end of the capture, mostly behind its last pass.
    whole = passes.sum(axis=0) >= ALL_PASSES * np.median(passes.sum(axis=0))
    steps = tuple(np.array(steps)[whole].tolist())
    away = np.zeros((len(run.digests), len(steps)))
    return Pipeline(stages, steps, passes[:, whole], away, _micro_batches(run, stages, steps))


def _on_cpus(run: RunView, stages: tuple[tuple[int, ...], ...]) -> Pipeline | None:
    work = cpu_work(run) if all(digest.is_cpu for digest in run.digests) else None
    if work is None:
        return None
    away = np.repeat(work.usual_away_ns[:, np.newaxis], len(work.steps), axis=1)
    return Pipeline(stages, work.steps, work.compute_ns + away, away, _micro_batches(run, stages, work.steps))


def _parts_of_step(
    run: RunView, plan: Rehearsal, place: int, step: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the actions of a rank up to which it works on passes in a step, and those after them.

    The passes end where the first operation with other ranks begins after the last send or receive.
    """
    digest = run.digests[place]
    part, number = plan.parts()[place], plan.steps[place].index(step)
    action = np.array(plan.action[part])
    item = np.array(plan.item[part])
    lane = np.flatnonzero(action != int(Action.START))
    action, item = action[lane], item[lane]
    edges = np.flatnonzero((action == int(Action.STEP)) & ((item == number) | (item == number + 1)))
    places = np.arange(edges[0] + 1, edges[1] + 1)
    in_row = (action[places] == int(Action.READY)) | (action[places] == int(Action.JOIN))
    table = digest.collectives
    neighbours = table.is_op("send", "recv") & (table.step == step)
    passing = np.zeros(places.size, dtype=bool)
    passing[in_row] = neighbours[item[places[in_row]] - plan.offsets[place]]
    last = int(np.flatnonzero(passing)[-1]) if passing.any() else -1
    others = np.flatnonzero((action[places] == int(Action.READY)) & ~passing)
    following = others[others > last]
    end = int(following[0]) + 1 if following.size else places.size
    return lane[places[:end]] + part.start, lane[places[end:]] + part.start


def _steps(run: RunView) -> tuple[int, ...]:
    """Return the steps that all ranks show: of few, the one that was cut off shows as much of its passes."""
    common = set.intersection(*[{step.index for step in digest.steps} for digest in run.digests])
    return tuple(sorted(common))


def _chains(run: RunView) -> list[list[int]]:
    """Return the positions of the ranks of each pipeline, from its first to its last stage."""
    groups = run.matching.groups
    near: dict[int, set[int]] = defaultdict(set)
    for group, neighbours in zip(groups, pipeline_pairs(groups), strict=True):
        if neighbours:
            sender, receiver = group.ranks
            near[sender].add(receiver)
            near[receiver].add(sender)
    place_of = {digest.rank: place for place, digest in enumerate(run.digests)}
    if not near or not set(near) <= set(place_of):
        return []
    chains, seen = [], set()
    for rank in sorted(near, key=lambda rank: (len(near[rank]) > 1, rank)):
        if rank in seen:
            continue
        chain = [rank]
        seen.add(rank)
        while following := sorted(near[chain[-1]] - seen):
            chain.append(following[0])
            seen.add(following[0])
        chains.append([place_of[rank] for rank in chain])
    return chains if len(seen) == len(near) else []


def _micro_batches(run: RunView, stages: Sequence[Sequence[int]], steps: Sequence[int]) -> int:
    """Return how often the first stage sends to the second in a step."""
    first, second = run.digests[stages[0][0]].rank, {run.digests[place].rank for place in stages[1]}
    ways = [
        group.one_way and group.ranks[0] == first and group.ranks[1] in second
        for group in run.matching.groups
    ]
    mine = np.array(ways or [False])[run.matching.group] & np.isin(run.matching.step, steps)
    return round(float(mine.sum()) / len(steps))


@once
def balanced_gain_ns(run: RunView) -> Int64Array | None:
    """Return how much shorter each step would be if all stages computed equally long, by a replay.

    Without one, in CPU runs: of m micro-batches all but one pass while the slowest stage sets the pace, and
    in a step each takes every stage in turn once, whichever has the work: (m - 1) / m of what the slowest
    stage takes longer than the mean.
    """
    found, plan = pipeline(run), rehearsal(run)
    if found is None:
        return None
    if found.micro_batches < 2:  # stages take turns, whichever has the work
        return np.zeros(len(found.steps), dtype=np.int64)
    stage_ns = found.stage_ns
    if plan is None:
        longer = (stage_ns.max() - stage_ns.mean()) * (found.micro_batches - 1) / found.micro_batches
        return np.full(len(found.steps), round(longer), dtype=np.int64)
    work = np.array(plan.work_ns, dtype=np.float64)
    for number, stage in enumerate(found.stages):
        for place in stage:
            for step in found.steps:
                passes, _ = _parts_of_step(run, plan, place, step)
                work[passes] *= stage_ns.mean() / max(stage_ns[number], 1.0)
    _even_out_rest(run, plan, found, work)
    return gains_of_work(plan, work, found.steps)


def _even_out_rest(run: RunView, plan: Rehearsal, found: Pipeline, work: Floats) -> None:
    """Let what follows the passes take each rank as long as the fastest one.

    An optimizer that exchanges norms or flags inside ends together on all ranks: what it takes some of them
    longer is waiting for the last stage to be done.
    """
    for step in found.steps:
        rests = [_parts_of_step(run, plan, place, step)[1] for place in range(len(run.digests))]
        least = min(work[rest].sum() for rest in rests)
        for rest in rests:
            length = work[rest].sum()
            work[rest] *= least / length if length > 0 else 1.0


@once
def even_gain_ns(run: RunView) -> Int64Array | None:
    """Return how much shorter each step would be if every micro-batch took its stage equally long.

    The work of a rank between two sends is that of one forward or backward pass. Passes that lie between the
    same kinds of sends in one stage are given their mean over its ranks, micro-batches and steps.
    """
    found, plan = pipeline(run), rehearsal(run)
    if found is None or plan is None:
        return None
    if found.micro_batches < 2:
        return np.zeros(len(found.steps), dtype=np.int64)
    work = np.array(plan.work_ns, dtype=np.float64)
    for alike in _alike(run, plan, found):
        lengths = [float(work[places].sum()) for places in alike]
        mean = sum(lengths) / len(lengths)
        for places, length in zip(alike, lengths, strict=True):
            work[places] *= mean / length if length > 0 else 1.0
    _even_out_rest(run, plan, found, work)
    return gains_of_work(plan, work, found.steps)


@once
def pass_ratios(run: RunView) -> Floats:
    """Return how long each pass of a rank through a micro-batch takes, over the mean of those like it.

    Those that come once in a step, and so cannot be compared, are left out; none without a pipeline.
    """
    found, plan = pipeline(run), rehearsal(run)
    ratios: list[float] = []
    if found is not None and plan is not None:
        work = np.array(plan.work_ns, dtype=np.float64)
        for alike in _alike(run, plan, found):
            lengths = np.array([work[places].sum() for places in alike])
            if lengths.size > len(found.steps) * len(found.stages[0]) and lengths.mean() > 0:
                ratios.extend((lengths / lengths.mean()).tolist())
    return np.array(ratios)


def _alike(run: RunView, plan: Rehearsal, found: Pipeline) -> list[list[npt.NDArray[np.intp]]]:
    """Return the passes of all ranks, those of one stage and kind together."""
    passes: dict[tuple[int, tuple[int, ...]], list[npt.NDArray[np.intp]]] = defaultdict(list)
    for place in range(len(run.digests)):
        stage = found.stage_of(place)
        if stage >= 0:
            for kind, places in _passes(run, plan, found, place):
                passes[stage, kind].append(places)
    return list(passes.values())


def _passes(
    run: RunView, plan: Rehearsal, found: Pipeline, place: int
) -> list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]:
    """Return the work of one rank between its sends, with what kind it is of.

    The kind is which way the send before and the one after go, and how many kernels run in between, which do
    not depend on how long samples are. A way is 1 to the next stage, -1 to the one before, 0 where the step
    begins or ends.
    """
    table, stage = run.digests[place].collectives, found.stage_of(place)
    stage_of = {run.digests[p].rank: number for number, ps in enumerate(found.stages) for p in ps}
    ways = np.array(
        [np.sign(stage_of.get(-1 if kind.peer is None else kind.peer, stage) - stage) for kind in table.kinds]
        or [0]
    )
    sends = np.array([kind.op == "send" for kind in table.kinds] or [False])
    part = plan.parts()[place]
    action = np.array(plan.action[part])
    item = np.array(plan.item[part]) - plan.offsets[place]
    lane = np.flatnonzero(action != int(Action.START))
    action, item = action[lane], item[lane]
    in_row = (action == int(Action.READY)) | (action == int(Action.JOIN))
    kind = np.where(in_row, table.kind[np.where(in_row, item, 0)], 0)
    sent = np.where(in_row & (action == int(Action.READY)) & sends[kind], ways[kind], 0)
    path = run.digests[place].meetings
    assert path is not None
    kernels = path.kernels[lane]
    edges = np.flatnonzero((sent != 0) | (action == int(Action.STEP)))
    passes: list[tuple[tuple[int, ...], npt.NDArray[np.intp]]] = []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        like = (int(sent[begin]), int(sent[end]), int(kernels[begin + 1 : end + 1].sum()))
        passes.append((like, lane[begin + 1 : end + 1] + part.start))
    return passes


class SlowWorker(msgspec.Struct, frozen=True, eq=False):
    """A rank (a position) that takes longer than the others of its stage.

    ``longer_ns`` is by how much its passes do in each step of the pipeline, 0 where its GPU is idle for
    longer instead; ``gain_ns`` how much shorter each step would be if they did not.
    """

    place: int
    longer_ns: Int64Array
    gain_ns: Int64Array


@once
def slow_workers(run: RunView) -> tuple[SlowWorker, ...]:
    """Return the ranks that hold up their pipeline, and with it the others, by more than their replicas."""
    found, plan = pipeline(run), rehearsal(run)
    if found is None:
        return ()
    if plan is None:
        return _away_workers(found, cpu_work(run))
    workers = []
    idle = _idle_ns(run, found)
    for stage in found.stages:
        for place in stage:
            others = [other for other in stage if other != place]
            if not others:
                continue
            usual = np.median(found.pass_ns[others], axis=0)
            longer = found.pass_ns[place] - usual
            if longer.mean() >= SLOWER * usual.mean():
                work = np.array(plan.work_ns, dtype=np.float64)
                for column, step in enumerate(found.steps):
                    passes, _ = _parts_of_step(run, plan, place, step)
                    work[passes] *= usual[column] / max(found.pass_ns[place, column], 1.0)
                gain = gains_of_work(plan, work, found.steps)
                workers.append(SlowWorker(place, np.maximum(longer, 0).astype(np.int64), gain))
            elif (idle[place] - np.median(idle[others], axis=0)).mean() >= SLOWER * usual.mean():
                gain = gains_without(run, place, found.steps)
                workers.append(SlowWorker(place, np.zeros(len(found.steps), dtype=np.int64), gain))
    return tuple(sorted(workers, key=lambda worker: -int(worker.gain_ns.sum())))


def _away_workers(found: Pipeline, work: CpuWork | None) -> tuple[SlowWorker, ...]:
    """Return the ranks of a CPU run that are away for longer than their replicas: the others wait as long."""
    workers: list[SlowWorker] = []
    if work is None:
        return ()
    for stage in found.stages:
        for place in stage:
            others = [other for other in stage if other != place]
            if not others:
                continue
            usual = np.median(work.usual_away_ns[others])
            if work.usual_away_ns[place] - usual >= SLOWER_CPU * found.pass_ns[others].mean():
                longer = work.away_ns[place] - np.median(work.away_ns[others], axis=0)
                gain = np.maximum(longer, 0).astype(np.int64)
                workers.append(SlowWorker(place, np.zeros(len(found.steps), dtype=np.int64), gain))
    return tuple(sorted(workers, key=lambda worker: -int(worker.gain_ns.sum())))


def _idle_ns(run: RunView, found: Pipeline) -> Floats:
    by_step = [{step.index: step.budget.idle_ns for step in digest.steps} for digest in run.digests]
    return np.array([[idle[step] for step in found.steps] for idle in by_step], dtype=np.float64)
