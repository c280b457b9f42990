"""Facts of the run about where in its loop a script calls what takes time, by its stacks."""

from __future__ import annotations

from tracedoc.facts.catalog import ranks_fact, run_fact
from tracedoc.ranks.code_places import beside_training, is_defined_as, may_feed_model
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.source_step import BesideTraining
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.phases import Phase
from tracedoc.topics.host.run import script_code_ms, script_place
from tracedoc.values import Value


@ranks_fact(unit="bool", needs=("host_ops",))
def script_code_feeds(run: RunView, digest: RankDigest) -> Value:
    """Whether the loop calls :func:`script_code` before the model, so that the step may need what it makes.

    By the lines of the sampled stacks: of the outermost frame in which both lie, that of the function comes
    before that of the model, or is the same, as in ``model(prepare())``.
    """
    return may_feed_model(run.job, script_place(run, digest.rank))


@run_fact(unit="bool")
def stacks_recorded(run: RunView) -> bool:
    """Whether a step was recorded with Python stacks, which name functions where they take most of a gap."""
    return bool(run.source_steps) or any(
        place.file
        for digest in run.digests
        if digest.host_work is not None
        for place in digest.host_work.code
    )


# -- operators that the script calls beside training


def _beside(run: RunView, digest: RankDigest) -> BesideTraining | None:
    return beside_training(run) if digest.is_cpu else None


@ranks_fact(unit="text", needs=("host_ops",))
def beside_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script in which operators of a CPU run take longest beside training, or "none".

    From the steps with stacks: one that neither calls the model, its backward pass or an optimizer, nor is
    called by ``forward`` or ``backward`` of the model. Hooks of modules and gradients are such functions.
    All ranks with such a step call it. Of one with :func:`beside_needed` only calls count, 10 us each.
    """
    beside = _beside(run, digest)
    return str(beside.place) if beside is not None else "none"


@ranks_fact(unit="bool", needs=("host_ops",))
def beside_needed(run: RunView, digest: RankDigest) -> Value:
    """Whether a backward pass goes back to operators of :func:`beside_code`, as to those of a loss.

    One operator on a whole batch in place of many saves their calls alone.
    """
    beside = _beside(run, digest)
    return beside is not None and beside.needed


@ranks_fact(unit="bool", needs=("host_ops",))
def beside_feeds(run: RunView, digest: RankDigest) -> Value:
    """Whether the loop calls :func:`beside_code` before the model, as :func:`script_code_feeds` tells it."""
    beside = _beside(run, digest)
    return may_feed_model(run.job, beside.place) if beside is not None else False


@ranks_fact(unit="fraction", needs=("host_ops",))
def beside_forward_frac(run: RunView, digest: RankDigest) -> Value:
    """Share of :func:`beside_code` in what operators take outside backward passes and the optimizer.

    In the step with stacks of the rank where it takes least, with times between operators below 0.1 ms.
    """
    beside = _beside(run, digest)
    return beside.forward_frac if beside is not None else 0.0


@ranks_fact(unit="fraction", needs=("host_ops",))
def beside_backward_frac(run: RunView, digest: RankDigest) -> Value:
    """Share of :func:`beside_code` in what operators take in backward passes, as the forward one."""
    beside = _beside(run, digest)
    return beside.backward_frac if beside is not None else 0.0


@ranks_fact(unit="ms", needs=("host_ops", "kernels", script_code_ms))
def beside_code_ms(run: RunView, digest: RankDigest) -> Value:
    """Time of the analysed step in which operators run that :func:`beside_code` calls.

    Its shares of what operators take inside the backward pass, and outside, where the forward pass counts as
    a whole but for :func:`script_code_ms`.
    """
    beside = _beside(run, digest)
    if beside is None:
        return 0.0
    computes = {one.phase: one.compute_ns for one in digest.phases}
    lasts = sum(one.span_ns for one in digest.phases if one.phase is Phase.FORWARD)
    outside = max(lasts - _ms(script_code_ms(run, digest)) * 1e6, computes.get(Phase.FORWARD, 0))
    outside += computes.get(Phase.OTHER, 0)
    backward = computes.get(Phase.BACKWARD, 0)
    return (beside.forward_frac * outside + beside.backward_frac * backward) / 1e6


@ranks_fact(unit="ms", needs=("host_ops", script_code_ms))
def beside_pauses_ms(run: RunView, digest: RankDigest) -> Value:
    """What :func:`beside_code` takes without operators: :func:`script_code_ms` where that is the same."""
    beside, place = _beside(run, digest), script_place(run, digest.rank)
    same = beside is not None and place is not None and is_defined_as(place, beside.place)
    return script_code_ms(run, digest) if same else 0.0


@ranks_fact(unit="fraction", needs=("host_ops", beside_forward_frac, beside_pauses_ms))
def script_forward_frac(run: RunView, digest: RankDigest) -> Value:
    """:func:`beside_forward_frac` where :func:`script_code` is that function."""
    return beside_forward_frac(run, digest) if _ms(beside_pauses_ms(run, digest)) else 0.0


@ranks_fact(unit="fraction", needs=("host_ops", beside_backward_frac, beside_pauses_ms))
def script_backward_frac(run: RunView, digest: RankDigest) -> Value:
    """:func:`beside_backward_frac` where :func:`script_code` is that function."""
    return beside_backward_frac(run, digest) if _ms(beside_pauses_ms(run, digest)) else 0.0


@ranks_fact(unit="ms", needs=(beside_code_ms, beside_pauses_ms, script_code_ms))
def script_ms(run: RunView, digest: RankDigest) -> Value:
    """What :func:`script_code` takes of a step, with the operators that it calls beside training."""
    own = _ms(beside_code_ms(run, digest)) if _ms(beside_pauses_ms(run, digest)) else 0.0
    return _ms(script_code_ms(run, digest)) + own


MOSTLY_PAUSES = 0.5
"""A function whose operators take less than this share of what it takes without is host code."""


@ranks_fact(unit="bool", needs=(beside_code_ms, beside_pauses_ms))
def script_code_in_operators(run: RunView, digest: RankDigest) -> Value:
    """Whether :func:`script_code` calls operators beside training, for half as long as it is in none."""
    pauses = _ms(beside_pauses_ms(run, digest))
    return _ms(beside_code_ms(run, digest)) >= MOSTLY_PAUSES * pauses > 0


def _ms(value: Value) -> float:
    return float(value) if isinstance(value, float | int) else 0.0
