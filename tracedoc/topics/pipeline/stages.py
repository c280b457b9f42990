"""The stages of a pipeline: which ranks they are, and what each of them works on its passes in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import ArrivalReplay, arrival_replay
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest
from tracedoc.step.sync_path import Action
from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.topics.straggler.work import work_shares
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.trace.vocabulary import P2P_OPS
from tracedoc.values import once

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

ALL_PASSES = 0.8
"""A step with less of the usual work on passes was not captured with all of them."""

NOT_CAPTURED = -1
"""Stands for the position of a rank that was not captured."""


class Pipeline(msgspec.Struct, frozen=True, eq=False):
    """The stages of a run, first to last, as positions of ranks; the ranks of a stage do the same work.

    ``chains`` are the pipelines that run side by side, each with its ranks from the first to the last stage,
    ``NOT_CAPTURED`` where one is missing; ``stage_of_rank`` knows such ranks too. ``steps`` are those that
    all ranks show whole, without any those with all of their passes. ``pass_ns[rank, step]`` is what each
    works on forward and backward passes in them, without the optimizer; ``away_ns`` is the part of it without
    work on the device, known in CPU runs (:func:`cpu_work`), whose passes are whole steps without
    communication.
    ``micro_batches`` are those of a step; each passes through every rank ``chunks`` times, more than once in
    an interleaved schedule. ``alternates``: forward and backward passes do, as in 1F1B. ``open_ended``: there
    may be stages beyond those at an end, of which no rank was captured.
    """

    chains: tuple[tuple[int, ...], ...]
    stage_of_rank: dict[int, int]
    steps: tuple[int, ...]
    pass_ns: Floats
    away_ns: Floats
    micro_batches: int
    chunks: int = 1
    alternates: bool = False
    open_ended: bool = False

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
    def bubble_frac(self) -> float | None:
        """The share of the passes' time that a rank waits by the schedule: (p - 1) / (v m + p - 1).

        With p equal stages of v chunks and m micro-batches, of GPipe and of 1F1B alike. ``None`` where the
        number of stages or of micro-batches is not known.
        """
        if self.open_ended:
            return None
        passes, others = self.chunks * self.micro_batches, len(self.chains[0]) - 1
        return others / (passes + others) if passes else None

    @property
    def shape(self) -> str:
        """The micro-batches as text, with the chunks of an interleaved schedule."""
        count = f"{self.micro_batches} micro-batches"
        return f"{count} through {self.chunks} chunks a rank" if self.chunks > 1 else count

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
        """The stage of a rank (a position), -1 where it has none."""
        return next((number for number, stage in enumerate(self.stages) if place in stage), -1)


@once
def pipeline(run: RunView) -> Pipeline | None:
    """The stages of a run, ``None`` where ranks pass no data from one to the next as stages do.

    Ranks that send to each other are one pipeline; the others beside it are its replicas. Two neighbours that
    send both ways are neighbouring stages; the first stage is that of the lowest rank at an end.
    """
    ranks = _chains(run)
    shown = set.intersection(*[{step.index for step in digest.steps} for digest in run.digests])
    if not ranks or len({len(chain) for chain in ranks}) > 1 or not shown:
        return None
    plan = arrival_replay(run)
    chosen = run.common_steps or tuple(sorted(shown))
    measured = _cpu_passes(run) if plan is None else _gpu_passes(run, plan, chosen)
    if measured is None:
        return None
    steps, pass_ns, away_ns = measured
    place_of = {digest.rank: place for place, digest in enumerate(run.digests)}
    chains = tuple(tuple(place_of.get(rank, NOT_CAPTURED) for rank in chain) for chain in ranks)
    stage_of_rank = {rank: number for chain in ranks for number, rank in enumerate(chain)}
    micro_batches, chunks = _micro_batches(run, ranks, steps)
    alternates = _alternates(run, stage_of_rank, steps)
    more = run.world_size is None or len(stage_of_rank) < run.world_size
    open_ended = more and any(NOT_CAPTURED in (chain[0], chain[-1]) for chain in chains)
    return Pipeline(
        chains, stage_of_rank, steps, pass_ns, away_ns, micro_batches, chunks, alternates, open_ended
    )


def _chains(run: RunView) -> list[list[int]]:
    """The ranks of each pipeline, from its first to its last stage, with those not captured.

    A rank that was not captured is known from its neighbours on both sides.
    """
    near: dict[int, set[int]] = defaultdict(set)
    for group, neighbours in zip(run.matching.groups, run.matching.between_stages.tolist(), strict=True):
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


def _micro_batches(run: RunView, chains: Sequence[Sequence[int]], steps: Sequence[int]) -> tuple[int, int]:
    """How many micro-batches a step has, and how many chunks each rank holds.

    With m micro-batches and v chunks a stage sends the next one m v activations, and the last rank the first
    m (v - 1). In a pipeline of two ranks, which are neighbours both ways, the first sends gradients as well,
    m (2 v - 1) messages, and its backward passes are m v. Where the numbers do not fit there is one chunk;
    ``(0, 1)`` where no two neighbours were captured.
    """
    digests = {digest.rank: digest for digest in run.digests}
    pairs = ((pair, chain) for chain in chains for pair in pairwise(chain) if digests.keys() >= {*pair})
    ends, chain = next(pairs, (None, ()))
    if ends is None:
        return 0, 1
    sends = _sends(run, ends, steps)
    if len(chain) > 2:
        passes, count = sends, sends - _sends(run, (chain[-1], chain[0]), steps)
    else:
        passes = digests[ends[0]].signs.passes
        count = 2 * passes - sends
    fits = count > 0 and passes % count == 0
    return (count, passes // count) if fits else (sends, 1)


def _sends(run: RunView, ends: tuple[int, int], steps: Sequence[int]) -> int:
    """How often the first of two ranks sends to the second in a step, on average."""
    ways = [
        (group.one_way and group.ranks == ends) or (group.exchange and set(group.ranks) == set(ends))
        for group in run.matching.groups
    ]
    mine = np.array(ways or [False])[run.matching.group] & is_among(run.matching.step, steps)
    return round(float(mine.sum()) / len(steps))


def ways_of_kinds(
    table: CollectiveTable, stage_of_rank: Mapping[int, int], stage: int
) -> npt.NDArray[np.int64]:
    """Towards which stage each kind of operation goes: 1 the next, -1 the one before, 0 neither."""
    peers = [-1 if kind.peer is None else kind.peer for kind in table.kinds]
    return np.array([np.sign(stage_of_rank.get(peer, stage) - stage) for peer in peers] or [0])


def _alternates(run: RunView, stage_of_rank: dict[int, int], steps: Sequence[int]) -> bool:
    """Whether some rank hands on activations and gradients in turn, as in 1F1B.

    With all forward passes first it hands on all activations before the first gradient. The first stage
    hands on no gradient: there it counts when one comes.
    """
    for digest in run.digests:
        stage, table = stage_of_rank.get(digest.rank), digest.collectives
        if stage is None:
            continue
        towards, sends = ways_of_kinds(table, stage_of_rank, stage)[table.kind], table.is_op("send")
        if (table.is_op("send_recv") & (towards != 0) & is_among(table.step, steps)).sum() > len(steps):
            return True
        gradients = table.is_op("recv") & (towards > 0) if stage == 0 else sends & (towards < 0)
        events = np.flatnonzero(is_among(table.step, steps) & (gradients | (sends & (towards > 0))))
        times = np.where(sends[events], table.start_ns[events], table.end_ns[events])
        order = events[np.argsort(times, kind="stable")]
        turns = (np.diff(gradients[order].astype(np.int8)) != 0) & (np.diff(table.step[order]) == 0)
        if turns.sum() > len(steps):
            return True
    return False


# -- what each rank works on passes


def _gpu_passes(
    run: RunView, plan: ArrivalReplay, steps: Sequence[int]
) -> tuple[tuple[int, ...], Floats, Floats]:
    """The steps with all passes, what each rank works on them, and no time away: ``[rank, step]``."""
    work = np.array(plan.work_ns, dtype=np.int64)
    places = range(len(run.digests))
    passes = np.array(
        [[work[passes_of_step(run, plan, place, step)].sum() for step in steps] for place in places],
        dtype=np.float64,
    )
    # The last step is cut off by the end of the capture, mostly behind its last pass.
    total = passes.sum(axis=0)
    whole = total >= ALL_PASSES * median(total)
    return tuple(np.array(steps)[whole].tolist()), passes[:, whole], np.zeros((len(places), whole.sum()))


def actions_of(plan: ArrivalReplay, place: int) -> tuple[Places, Int64Array, Int64Array]:
    """The actions of a rank that are no starts: their places in the plan, what they are, and their items."""
    part = plan.parts()[place]
    action = np.array(plan.action[part], dtype=np.int64)
    kept = np.flatnonzero(action != int(Action.START))
    return kept + part.start, action[kept], np.array(plan.item[part], dtype=np.int64)[kept]


def passes_of_step(run: RunView, plan: ArrivalReplay, place: int, step: int) -> Places:
    """The actions of a rank up to which it works on passes in a step.

    The passes end where the last reduction of gradients begins after the last send or receive, or the first
    other operation with other ranks.
    """
    digest, number = run.digests[place], plan.steps[place].index(step)
    table = digest.collectives
    position, action, item = actions_of(plan, place)
    edges = np.flatnonzero((action == int(Action.STEP)) & ((item == number) | (item == number + 1)))
    within = slice(edges[0] + 1, edges[1] + 1)
    position, action, item = position[within], action[within], item[within]
    in_row = (action == int(Action.READY)) | (action == int(Action.JOIN))
    neighbours = table.is_op(*P2P_OPS) & (table.step == step)
    passing = np.zeros(position.size, dtype=bool)
    passing[in_row] = neighbours[item[in_row] - plan.offsets[place]]
    last = int(np.flatnonzero(passing)[-1]) if passing.any() else -1
    others = np.flatnonzero((action == int(Action.READY)) & ~passing)
    following = others[others > last]
    # Gradients are reduced beside the last backward pass, the last of them when it is done.
    reductions = np.flatnonzero(digest.gradients)
    reduced = following[is_among(item[following] - plan.offsets[place], reductions)]
    ends = reduced[-1:] if reduced.size else following[:1]
    end = int(ends[0]) + 1 if ends.size else position.size
    return position[:end]


class CpuWork(msgspec.Struct, frozen=True, eq=False):
    """What the ranks of a CPU run have to do in the steps that all captured whole, in ns.

    ``compute_ns[rank, step]`` is the compute of all ranks by this one's share of their arithmetic;
    ``away_ns`` the time of a rank in which it neither runs operators nor waits for a transfer.
    """

    steps: tuple[int, ...]
    compute_ns: Floats
    away_ns: Floats

    @property
    def usual_away_ns(self) -> Floats:
        """What each rank is away in at least three quarters of the steps."""
        return habitual(self.away_ns.T)


def _cpu_passes(run: RunView) -> tuple[tuple[int, ...], Floats, Floats] | None:
    """The complete steps, what each rank of a CPU run has to do in them, and how long it is away."""
    work = cpu_work(run) if all(digest.is_cpu for digest in run.digests) else None
    if work is None:
        return None
    away = np.repeat(work.usual_away_ns[:, np.newaxis], len(work.steps), axis=1)
    return work.steps, work.compute_ns + away, away


@once
def cpu_work(run: RunView) -> CpuWork | None:
    """The work of the ranks of a CPU run; ``None`` without a complete step, or amounts of work.

    Processes share cores, and compute is as long as the others let it be: so that of all ranks is shared out
    by their arithmetic (or number of operators). Time without operators or waiting, as a sleep or a file,
    counts as far as it is there in at least three quarters of the steps.
    """
    shares = work_shares(run)
    arithmetic, _, operators = shares.amount
    amount = np.where(np.isnan(arithmetic).any(), operators, arithmetic)
    if not shares.steps or np.isnan(amount).any():
        return None
    away = np.array([_away_ns(digest, shares.steps) for digest in run.digests])
    compute = shares.compute_ns.sum(axis=0) * amount / amount.sum(axis=0)
    return CpuWork(shares.steps, compute, away)


def _away_ns(digest: RankDigest, steps: tuple[int, ...]) -> list[float]:
    """The time of each step in which a rank neither computes nor waits for a transfer."""
    waiting = waiting_for_transfers(digest)
    chosen = [step for step in digest.steps if step.index in steps]
    waits = waiting.covered_ns([step.start_ns for step in chosen], [step.end_ns for step in chosen])
    return [
        float(step.budget.window_ns - step.budget.compute_ns - wait)
        for step, wait in zip(chosen, waits.tolist(), strict=True)
    ]


def waiting_for_transfers(digest: RankDigest) -> Spans:
    """When a rank waits for transfers with no compute beside them.

    A wait lasts until a transfer ends. What lasts until the rank computes or begins another transfer is its
    own time, whatever travels meanwhile: a send that nobody waits for yet lasts as long as a sleep beside it.
    """
    table, exposed = digest.collectives, digest.exposed_comm
    times = distinct(np.concatenate((table.start_ns, table.end_ns, exposed.starts, exposed.ends)))
    ends = is_among(times[1:], table.end_ns)
    return exposed & Spans.of(times[:-1][ends], times[1:][ends])
