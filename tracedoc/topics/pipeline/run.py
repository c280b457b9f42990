"""Facts of the run about models that are split over ranks: pipelines, their bubbles, and layers."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import digest_fact, ranks_fact, run_fact
from tracedoc.ranks.code_places import place_alone
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_roles import Role
from tracedoc.topics.communication.run import exposed_transfer, rows_of_kind, rows_of_role, total_bytes
from tracedoc.topics.links.run import leaves_node
from tracedoc.topics.pipeline.stages import Pipeline, pipeline
from tracedoc.values import Unknown, Value, needed

LONGER_AT = ("compute", "host")

NO_PIPELINE = Unknown(
    "no stages of a pipeline are seen: no rank passes data on to another one and gets some back"
)


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def pipeline_stages(run: RunView) -> Value:
    """Stages of the pipeline, by who sends to whom; what a rank's sends reach is its neighbour."""
    return len(needed(_pipeline(run)).stages)


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def pipeline_micro_batches(run: RunView) -> Value:
    """Micro-batches that pass through a pipeline in a step, by what neighbouring stages send each other."""
    return needed(_pipeline(run)).micro_batches


@run_fact(unit="count", needs=("collectives", "multi_rank"))
def pipeline_chunks(run: RunView) -> Value:
    """Parts of the model on each rank of a pipeline that a micro-batch passes one after the other.

    More than one in an interleaved schedule (virtual stages), by what the last rank sends the first. V-shaped
    schedules, whose last rank holds two neighbouring parts, are taken to have one.
    """
    return needed(_pipeline(run)).chunks


@ranks_fact(unit="count", needs=("collectives", "multi_rank"))
def stage(run: RunView, digest: RankDigest) -> Value:
    """The stage of the pipeline that this rank is, from 0. Ranks of one stage hold the same layers."""
    return needed(_stage(run, digest))


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def stage_pass_ms(run: RunView, digest: RankDigest) -> Value:
    """What the fastest rank of this rank's stage works on forward and backward passes in a step, on average.

    From the first operation of a step to its last send or receive and the work that follows that, without the
    waiting for other ranks, the reduction of gradients and the optimizer. In a CPU run its step without
    communication: the compute of all ranks is shared out by their arithmetic, since processes share cores,
    and time without operators counts as far as it is there in at least three quarters of the steps.
    """
    number = needed(_stage(run, digest))
    return float(needed(_pipeline(run)).stage_ns[number]) / 1e6


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def other_stages_pass_ms(run: RunView, digest: RankDigest) -> Value:
    """The mean of :func:`stage_pass_ms` over the other stages."""
    return _others_ns(run, needed(_stage(run, digest))) / 1e6


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def even_stage_pass_ms(run: RunView, digest: RankDigest) -> Value:
    """The mean of :func:`stage_pass_ms` over all stages."""
    needed(_stage(run, digest))
    return float(needed(_pipeline(run)).stage_ns.mean()) / 1e6


@ranks_fact(unit="fraction", needs=("collectives", "multi_rank"))
def stage_surplus_frac(run: RunView, digest: RankDigest) -> Value:
    """The share of :func:`stage_pass_ms` by which a stage is above the mean of all, below 0 for one below."""
    number, stage_ns = needed(_stage(run, digest)), needed(_pipeline(run)).stage_ns
    return 1.0 - float(stage_ns.mean() / stage_ns[number])


@ranks_fact(unit="text", needs=("collectives", "multi_rank"), values=LONGER_AT)
def stage_longer_at(run: RunView, digest: RankDigest) -> Value:
    """At what this rank's stage takes longer than the others: "compute", or in a CPU run "host".

    "host" is time in which no operator runs: a sleep, files, Python. It is named where it makes half of the
    difference or more.
    """
    number = needed(_stage(run, digest))
    longer = needed(_pipeline(run)).stage_ns[number] - _others_ns(run, number)
    away = _away_longer_ns(run, number)
    return "host" if away > 0 and away >= longer / 2 else "compute"


@ranks_fact(unit="ms", needs=("collectives", "multi_rank"))
def stage_away_ms(run: RunView, digest: RankDigest) -> Value:
    """How much longer than on the other stages no operator runs on this rank's in a step of a CPU run."""
    return max(_away_longer_ns(run, needed(_stage(run, digest))), 0.0) / 1e6


@ranks_fact(unit="text", needs=("collectives", "multi_rank", stage, stage_away_ms))
def stage_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script in which a rank is longer than those of other stages, or "none".

    It makes half of :func:`stage_away_ms`, by the stacks of both.
    """
    own, away_ms = stage(run, digest), stage_away_ms(run, digest)
    if not isinstance(away_ms, float) or away_ms <= 0:
        return "none"
    peers = [one.rank for one in run.digests if stage(run, one) != own]
    return str(place_alone(run, digest.rank, peers, away_ms, loading=False)[0] or "none")


def _stage(run: RunView, digest: RankDigest) -> int | Unknown:
    return needed(_pipeline(run)).stage_of_rank.get(digest.rank, NO_PIPELINE)


def _others_ns(run: RunView, number: int) -> float:
    return float(np.delete(needed(_pipeline(run)).stage_ns, number).mean())


def _away_longer_ns(run: RunView, number: int) -> float:
    away_ns = needed(_pipeline(run)).stage_away_ns
    return float(away_ns[number] - np.delete(away_ns, number).mean())


@run_fact(unit="fraction", needs=("collectives", "multi_rank"))
def pipeline_schedule_bubble_frac(run: RunView) -> Value:
    """Share of the passes' time that a rank waits by the schedule (:attr:`Pipeline.bubble_frac`)."""
    share = needed(_pipeline(run)).bubble_frac
    return Unknown("the number of stages or micro-batches is not known") if share is None else share


def _pipeline(run: RunView) -> Pipeline | Unknown:
    return pipeline(run) or NO_PIPELINE


# -- what stages and layers exchange


@digest_fact(unit="count", needs=("collectives", "host_ops"))
def layer_exchanges_per_step(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Collectives of tensor-parallel layers in the median step, both passes.

    Those of a group that adds up 64 KiB or more in the forward pass, by all-reduce or reduce-scatter.
    """
    return int(rows_of_role(digest, step, Role.LAYER).size)


@digest_fact(unit="bytes", needs=("collectives", "host_ops"))
def layer_exchange_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bytes of the collectives of tensor-parallel layers in the median step."""
    return total_bytes(digest, rows_of_role(digest, step, Role.LAYER))


@digest_fact(
    unit="ms",
    needs=("collectives", "host_ops", "kernels"),
    interval="collective of a tensor-parallel layer with no compute beside it",
)
def layer_exchange_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in collectives of tensor-parallel layers, less waiting."""
    return exposed_transfer(run, digest, step, rows_of_role(digest, step, Role.LAYER))


@digest_fact(
    unit="ms",
    needs=("collectives", "kernels"),
    interval="send or receive with no compute beside it",
)
def p2p_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in sends and receives, less waiting for the other end."""
    return exposed_transfer(run, digest, step, rows_of_kind(digest, step, "send", "recv", "send_recv"))


@digest_fact(unit="bytes", needs=("collectives",))
def p2p_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bytes that the median step sends to and receives from single ranks."""
    return total_bytes(digest, rows_of_kind(digest, step, "send", "recv", "send_recv"))


# -- nodes


NO_LAYERS = Unknown("no layer is split over ranks")


@digest_fact(unit="bool", needs=("collectives", "host_ops"))
def layers_leave_node(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether layers are split over several nodes, though GPUs inside a node have a faster link.

    As :func:`gathers_leave_node`, of the collectives that :func:`layer_exchanges_per_step` counts.
    """
    rows = np.flatnonzero(digest.roles == Role.LAYER)
    return leaves_node(run, digest, rows) if rows.size else NO_LAYERS
