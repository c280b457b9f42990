"""Pipelines: which ranks are which stage, what each stage computes, and what equal stages would give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import ArrivalReplay, arrival_replay, gains_of_work, gains_without
from tracedoc.ranks.cpu_stages import CpuWork, cpu_work
from tracedoc.ranks.groups import pipeline_pairs
from tracedoc.ranks.run_view import RunView, once
from tracedoc.spans import Int64Array
from tracedoc.step.sync_path import Action
from tracedoc.trace.distinct import is_among

Floats = npt.NDArray[np.float64]

ALL_PASSES = 0.8
"""A step with less of the usual work on passes was not captured with all of them."""

SLOWER = 0.05
"""Replicas whose passes differ by less do the same work."""

SLOWER_CPU = 0.15
"""Replicas that share cores differ by so much without a fault."""


NOT_CAPTURED = -1
"""Stands for the position of a rank that was not captured."""


class Pipeline(msgspec.Struct, frozen=True, eq=False):
    """The stages of a run, first to last, as positions of ranks; the ranks of a stage do the same work.

    ``chains`` are the pipelines that run side by side, each with its ranks from the first to the last stage,
    ``NOT_CAPTURED`` where one is missing; ``stage_of_rank`` knows such ranks too. ``steps`` are those that
    all ranks show with all of their passes. ``pass_ns[rank, step]`` is what each works on forward and
    backward passes in them, without the optimizer; ``away_ns`` is the part of it without work on the device,
    known in CPU runs (:mod:`tracedoc.ranks.cpu_stages`), whose passes are whole steps without communication.
    ``micro_batches`` are those of a step; ``alternates``: forward and backward passes do, as in 1F1B.
    """

    chains: tuple[tuple[int, ...], ...]
    stage_of_rank: dict[int, int]
    steps: tuple[int, ...]
    pass_ns: Floats
    away_ns: Floats
    micro_batches: int
    alternates: bool = False

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The captured ranks of each stage; none where all of them are missing."""
        columns = zip(*self.chains, strict=True)
        return tuple(tuple(sorted(place for place in column if place >= 0)) for column in columns)

    @property
    def whole(self) -> bool:
        """Whether every rank of every stage was captured."""
        return all(place >= 0 for chain in self.chains for place in chain)

    @property
    def stage_ns(self) -> Floats:
        """What each rank of a stage works on passes in a step at least, on average.

        A stage of which no rank was captured takes what the others do on average.
        """
        return self._least(self.pass_ns)

    @property
    def stage_away_ns(self) -> Floats:
        """What each rank of a stage is away in a step at least, on average."""
        return self._least(self.away_ns)

    def _least(self, values: Floats) -> Floats:
        found = [values[list(stage)].mean(axis=1).min() if stage else np.nan for stage in self.stages]
        return np.where(np.isnan(found), np.nanmean(found), found)

    def stage_of(self, place: int) -> int:
        """Return the stage of a rank (a position), -1 where it has none."""
        return next((number for number, stage in enumerate(self.stages) if place in stage), -1)


@once
def pipeline(run: RunView) -> Pipeline | None:
    """Return the stages of a run, ``None`` where ranks pass no data from one to the next.

    Ranks that send to each other are one pipeline; the others beside it are its replicas. Two neighbours that
    send both ways are neighbouring stages; the first stage is that of the lowest rank at an end.
    """
    ranks = _chains(run)
    steps = _steps(run)
    if not ranks or len({len(chain) for chain in ranks}) > 1 or not steps:
        return None
    place_of = {digest.rank: place for place, digest in enumerate(run.digests)}
    chains = tuple(tuple(place_of.get(rank, NOT_CAPTURED) for rank in chain) for chain in ranks)
    stage_of_rank = {rank: number for chain in ranks for number, rank in enumerate(chain)}
    plan = arrival_replay(run)
    if plan is None:
        return _on_cpus(run, chains, stage_of_rank)
    work = np.array(plan.work_ns, dtype=np.int64)
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
    return Pipeline(
        chains, stage_of_rank, steps, passes[:, whole], away, _micro_batches(run, chains, steps),
        _alternates(run, stage_of_rank, steps),
    )  # fmt: skip


def _rehearsed(run: RunView) -> tuple[Pipeline | None, ArrivalReplay | None]:
    """Return the pipeline of a run, and its arrival replay, which takes long: none without a pipeline."""
    found = pipeline(run)
    return found, None if found is None else arrival_replay(run)


def _on_cpus(
    run: RunView, chains: tuple[tuple[int, ...], ...], stage_of_rank: dict[int, int]
) -> Pipeline | None:
    work = cpu_work(run) if all(digest.is_cpu for digest in run.digests) else None
    if work is None:
        return None
    away = np.repeat(work.usual_away_ns[:, np.newaxis], len(work.steps), axis=1)
    passes = work.compute_ns + away
    return Pipeline(
        chains, stage_of_rank, work.steps, passes, away, _micro_batches(run, chains, work.steps),
        _alternates(run, stage_of_rank, work.steps),
    )  # fmt: skip


def _parts_of_step(
    run: RunView, plan: ArrivalReplay, place: int, step: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the actions of a rank up to which it works on passes in a step, and those after them.

    The passes end where the first operation with other ranks begins after the last send or receive.
    """
    digest = run.digests[place]
    part, number = plan.parts()[place], plan.steps[place].index(step)
    action = np.array(plan.action[part], dtype=np.int64)
    item = np.array(plan.item[part], dtype=np.int64)
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
    """Return the ranks of each pipeline, from its first to its last stage, with those not captured.

    A rank that was not captured is known from its neighbours on both sides.
    """
    groups = run.matching.groups
    near: dict[int, set[int]] = defaultdict(set)
    for group, neighbours in zip(groups, pipeline_pairs(groups), strict=True):
        if neighbours:
            sender, receiver = group.ranks
            near[sender].add(receiver)
            near[receiver].add(sender)
    chains, seen = [], set()
    for rank in sorted(near, key=lambda rank: (len(near[rank]) > 1, rank)):
        if rank in seen:
            continue
        chain = [rank]
        seen.add(rank)
        while following := sorted(near[chain[-1]] - seen):
            chain.append(following[0])
            seen.add(following[0])
        chains.append(chain)
    return chains if len(seen) == len(near) else []


def _micro_batches(run: RunView, chains: Sequence[Sequence[int]], steps: Sequence[int]) -> int:
    """Return how often a stage sends to the next one in a step: the first two ranks that were captured."""
    pairs = (pair for chain in chains for pair in pairwise(chain) if min(pair) >= 0)
    sender, receiver = next(pairs, (NOT_CAPTURED, NOT_CAPTURED))
    if sender < 0:
        return 0
    ends = (run.digests[sender].rank, run.digests[receiver].rank)
    ways = [group.one_way and group.ranks == ends for group in run.matching.groups]
    mine = np.array(ways or [False])[run.matching.group] & np.isin(run.matching.step, steps)
    return round(float(mine.sum()) / len(steps))


def _alternates(run: RunView, stage_of_rank: dict[int, int], steps: Sequence[int]) -> bool:
    """Return whether some rank hands on activations and gradients in turn, as in 1F1B.

    With all forward passes first it hands on all activations before the first gradient. The first stage
    hands on no gradient: there it counts when one comes.
    """
    for digest in run.digests:
        stage, table = stage_of_rank.get(digest.rank), digest.collectives
        if stage is None:
            continue
        towards = np.array(
            [
                np.sign(stage_of_rank.get(-1 if kind.peer is None else kind.peer, stage) - stage)
                for kind in table.kinds
            ]
            or [0]
        )[table.kind]
        sends = table.is_op("send")
        gradients = table.is_op("recv") & (towards > 0) if stage == 0 else sends & (towards < 0)
        events = np.flatnonzero(is_among(table.step, steps) & (gradients | (sends & (towards > 0))))
        times = np.where(sends[events], table.start_ns[events], table.end_ns[events])
        order = events[np.argsort(times, kind="stable")]
        turns = (np.diff(gradients[order].astype(np.int8)) != 0) & (np.diff(table.step[order]) == 0)
        if turns.sum() > len(steps):
            return True
    return False


def _scheduled_ns(found: Pipeline, stage_ns: Floats) -> float:
    """Return what the passes of a step take by the schedule, where stages take these times.

    With all forward passes first (GPipe) each stage is taken once in turn, and the slowest sets the pace of
    the other micro-batches. In 1F1B the slowest works from when the stages before it have passed on the first
    micro-batch until they are to pass the last gradient back, but for what it waits for its first gradient:
    the stages after it, less the forward passes ahead (a third of the work of a micro-batch each).
    """
    count, stages = max(found.micro_batches, 1), stage_ns.size
    one = stage_ns / count
    if not found.alternates:
        return float((count - 1) * one.max() + one.sum())
    ahead = np.arange(stages - 1, -1, -1)
    before, after = np.cumsum(one) - one, one.sum() - np.cumsum(one)
    return float((before + count * one + np.maximum(after - ahead * one / 3, 0)).max())


@once
def balanced_gain_ns(run: RunView) -> Int64Array | None:
    """Return how much shorter each step would be if all stages computed equally long, by a replay.

    Without one, in CPU runs and where ranks are missing: of m micro-batches all but one pass while the
    slowest stage sets the pace, and in a step each takes every stage in turn once, whichever has the work.
    With all forward passes first that is (m - 1) / m of what the slowest stage takes longer than the mean.
    """
    found, plan = _rehearsed(run)
    if found is None:
        return None
    if found.micro_batches < 2:  # stages take turns, whichever has the work
        return np.zeros(len(found.steps), dtype=np.int64)
    stage_ns = found.stage_ns
    if plan is None or not found.whole:
        equal = np.full(stage_ns.size, stage_ns.mean())
        longer = max(_scheduled_ns(found, stage_ns) - _scheduled_ns(found, equal), 0.0)
        return np.full(len(found.steps), round(longer), dtype=np.int64)
    work = np.array(plan.work_ns, dtype=np.float64)
    for number, stage in enumerate(found.stages):
        for place in stage:
            for step in found.steps:
                passes, _ = _parts_of_step(run, plan, place, step)
                work[passes] *= stage_ns.mean() / max(stage_ns[number], 1.0)
    _even_out_rest(run, plan, found, work)
    return gains_of_work(plan, work, found.steps)


def _even_out_rest(run: RunView, plan: ArrivalReplay, found: Pipeline, work: Floats) -> None:
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
    found, plan = _rehearsed(run)
    if found is None or plan is None or not found.whole:
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
    found, plan = _rehearsed(run)
    ratios: list[float] = []
    if found is not None and plan is not None and found.whole:
        work = np.array(plan.work_ns, dtype=np.float64)
        for alike in _alike(run, plan, found):
            lengths = np.array([work[places].sum() for places in alike])
            if lengths.size > len(found.steps) * len(found.stages[0]) and lengths.mean() > 0:
                ratios.extend((lengths / lengths.mean()).tolist())
    return np.array(ratios)


def _alike(run: RunView, plan: ArrivalReplay, found: Pipeline) -> list[list[npt.NDArray[np.intp]]]:
    """Return the passes of all ranks, those of one stage and kind together."""
    passes: dict[tuple[int, tuple[int, ...]], list[npt.NDArray[np.intp]]] = defaultdict(list)
    for place in range(len(run.digests)):
        stage = found.stage_of(place)
        if stage >= 0:
            for kind, places in _passes(run, plan, found, place):
                passes[stage, kind].append(places)
    return list(passes.values())


def _passes(
    run: RunView, plan: ArrivalReplay, found: Pipeline, place: int
) -> list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]:
    """Return the work of one rank between its sends, with what kind it is of.

    The kind is which way the send before and the one after go, and how many kernels run in between, which do
    not depend on how long samples are. A way is 1 to the next stage, -1 to the one before, 0 where the step
    begins or ends.
    """
    table, stage = run.digests[place].collectives, found.stage_of(place)
    stage_of = found.stage_of_rank
    ways = np.array(
        [np.sign(stage_of.get(-1 if kind.peer is None else kind.peer, stage) - stage) for kind in table.kinds]
        or [0]
    )
    sends = np.array([kind.op == "send" for kind in table.kinds] or [False])
    part = plan.parts()[place]
    action = np.array(plan.action[part], dtype=np.int64)
    item = np.array(plan.item[part], dtype=np.int64) - plan.offsets[place]
    lane = np.flatnonzero(action != int(Action.START))
    action, item = action[lane], item[lane]
    in_row = (action == int(Action.READY)) | (action == int(Action.JOIN))
    kind = np.where(in_row, table.kind[np.where(in_row, item, 0)], 0)
    sent = np.where(in_row & (action == int(Action.READY)) & sends[kind], ways[kind], 0)
    path = run.digests[place].sync_path
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
    found, plan = _rehearsed(run)
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
                if not found.whole:
                    gain = _gain_by_schedule(found, place, usual)
                workers.append(SlowWorker(place, np.maximum(longer, 0).astype(np.int64), gain))
            elif (idle[place] - np.median(idle[others], axis=0)).mean() >= SLOWER * usual.mean():
                gain = gains_without(run, place, found.steps)
                workers.append(SlowWorker(place, np.zeros(len(found.steps), dtype=np.int64), gain))
    return tuple(sorted(workers, key=lambda worker: -int(worker.gain_ns.sum())))


def _gain_by_schedule(found: Pipeline, place: int, usual_ns: Floats) -> Int64Array:
    """Return what each step gains where a rank's passes take what is usual in its stage, without a replay."""
    chain = next(chain for chain in found.chains if place in chain)
    stage_ns = np.repeat(found.stage_ns[:, np.newaxis], len(found.steps), axis=1)
    for number, one in enumerate(chain):
        if one >= 0:
            stage_ns[number] = found.pass_ns[one]
    mended = stage_ns.copy()
    mended[chain.index(place)] = usual_ns
    gains = [
        _scheduled_ns(found, a) - _scheduled_ns(found, b) for a, b in zip(stage_ns.T, mended.T, strict=True)
    ]
    return np.rint(np.maximum(gains, 0)).astype(np.int64)


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
