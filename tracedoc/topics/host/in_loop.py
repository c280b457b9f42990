"""Facts of the run about where in its loop a script calls what takes time, by its stacks."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import Job
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.script_code import CodePlace, place_of_stack
from tracedoc.topics.host.run import script_place
from tracedoc.values import Unknown, Value


@ranks_fact(unit="bool", needs=("host_ops",))
def script_code_feeds(run: RunView, digest: RankDigest) -> Value:
    """Whether the loop calls :func:`script_code` before the model, so that the step may need what it makes.

    By the lines of the sampled stacks: of the outermost frame in which both lie, that of the function comes
    before that of the model, or is the same, as in ``model(prepare())``.
    """
    return may_feed_model(run.job, script_place(run, digest.rank))


def may_feed_model(job: Job, place: CodePlace | None) -> Value:
    """Whether the loop calls a function before the model; unknown where no sampled stack shows both."""
    stacks = [
        (frames, rank.samples.loop)
        for rank in job.ranks
        for step in rank.samples.sampled
        for _, frames in step.stacks
    ]
    models = [frames for frames, _ in stacks if _in_model(frames)]
    for frames, loop in stacks if models else ():
        found = place_of_stack(frames, loop)
        if found and place and _same_code(found, place) and not _in_model(frames):
            return _comes_before(frames, models[0])
    return Unknown("no sampled stack shows both the function and the model")


def _in_model(frames: Sequence[str]) -> bool:
    return any(one.startswith("torch/nn/modules/module.py(") for one in frames)


def _same_code(one: CodePlace, other: CodePlace) -> bool:
    """Whether two places are one function, or one call at the top level, whose line is not compared."""
    return all(getattr(one, name) == getattr(other, name) for name in ("file", "function", "call"))


def _comes_before(frames: Sequence[str], model: Sequence[str]) -> bool:
    """Whether the outermost line in which two stacks differ comes first in the first of them."""
    for own, its in zip(reversed(frames), reversed(model), strict=False):
        (name, _, line), (other, _, of_model) = own.rpartition("@"), its.rpartition("@")
        if name != other:
            return True
        if line != of_model:
            return int(line or 0) < int(of_model or 0)
    return False


@run_fact(unit="bool")
def stacks_recorded(run: RunView) -> bool:
    """Whether a step was recorded with Python stacks, which name functions where they take most of a gap."""
    return bool(run.source_steps) or any(
        place.file
        for digest in run.digests
        if digest.host_work is not None
        for place in digest.host_work.code
    )
