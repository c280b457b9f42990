"""Facts about the input pipeline."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.facts.per_rank.step import idle_of_cause
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.values import Unknown, Value

NO_LOADER = Unknown("no torch DataLoader is visible in this trace")

LOADERS = {"single_process": "training thread", "workers": "worker processes", "pipe": "data pipe"}


@rank_fact(unit="ms", needs=("host_ops",))
def loader_wait_ms(timeline: RankTimeline) -> Value:
    """Time of the host's median step inside the data loader's ``__next__``.

    The host may wait here while the GPU still has work; the cost is :func:`input_idle_ms`.
    """
    step = timeline.judged_host_step
    if step is None:
        return Unknown("the host's steps are not known")
    return timeline.host_delays.input.clip(step.start_ns, step.end_ns).total_ns / 1e6


@rank_fact(unit="ms", needs=("host_ops", "kernels"), interval="GPU idle while the data loader is waited for")
def input_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which the device is idle while the host waits for the data loader."""
    if timeline.judged is not None and loader_kind(timeline) == NO_LOADER:
        return NO_LOADER
    return idle_of_cause(timeline, "input")


@rank_fact(unit="text", needs=("host_ops",), values=LOADERS.values())
def loader_kind(timeline: RankTimeline) -> Value:
    """Where the data loader makes its samples, by the name of its range.

    One of "training thread" (num_workers=0), "worker processes" and "data pipe".
    """
    trace = timeline.trace
    named = [vocabulary.data_loader(name) for name in trace.names]
    kinds = {kind for index, kind in enumerate(named) if kind and (trace.name == index).any()}
    for kind, words in LOADERS.items():
        if kind in kinds:
            return words
    return NO_LOADER
