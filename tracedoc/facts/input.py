"""Facts about the input pipeline."""

from __future__ import annotations

from collections import Counter

from tracedoc.facts.catalog import Unknown, Value, rank_fact, run_fact
from tracedoc.facts.step import NO_STEP, judged_host_step
from tracedoc.facts.view import RunView
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.trace.distinct import distinct

LOADERS = {
    "single_process": "num_workers=0: samples are made on the training thread",
    "workers": "worker processes",
    "pipe": "a data pipe",
}

MOST_WORKERS = 8
"""So many workers of a rank are suggested at most, and where its cores are not known."""


@rank_fact("loader_wait_ms", unit="ms", needs=("host_ops",))
def loader_wait_ms(timeline: RankTimeline) -> Value:
    """Time of the host's median step inside the data loader's ``__next__``.

    The host may wait here while the GPU still has work; :func:`input_idle_ms` says what that costs.
    """
    step = judged_host_step(timeline)
    if step is None:
        return Unknown("the host's steps are not known")
    return timeline.host_delays.input.clip(step.start_ns, step.end_ns).total_ns / 1e6


@rank_fact("input_idle_ms", unit="ms", needs=("host_ops", "kernels"))
def input_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the device is idle while the host waits for the data loader."""
    if timeline.judged is None or timeline.idle is None:
        return NO_STEP
    if loader_kind(timeline) == Unknown(_NO_LOADER):
        return Unknown(_NO_LOADER)
    return timeline.idle.in_window(timeline.judged.start_ns, timeline.judged.end_ns)["input"] / 1e6


_NO_LOADER = "no torch DataLoader is visible in this trace"


@rank_fact("loader_kind", unit="text", needs=("host_ops",))
def loader_kind(timeline: RankTimeline) -> Value:
    """How the data loader makes its samples, as the name of its range tells."""
    used = distinct(timeline.trace.name).tolist()
    kinds = {kind for index in used if (kind := vocabulary.data_loader(timeline.trace.names[index]))}
    for kind, words in LOADERS.items():
        if kind in kinds:
            return words
    return Unknown(_NO_LOADER)


@run_fact("suggested_loader_workers", unit="count", scope="rank")
def suggested_loader_workers(run: RunView) -> dict[str, Value]:
    """Workers for which a rank has cores: its share of those that it may use, less one for training itself.

    Ranks of a host that name the same cores share them evenly. From 1 to 8; 8 without a manifest.
    """
    told = {one.rank: one for one in run.job.ranks} if run.job is not None else {}
    sharing = Counter((one.host, one.affinity) for one in told.values())

    def workers(rank: int) -> int:
        one = told.get(rank)
        if one is None or one.cores is None:
            return MOST_WORKERS
        return min(max(one.cores // sharing[one.host, one.affinity] - 1, 1), MOST_WORKERS)

    return {str(digest.rank): workers(digest.rank) for digest in run.digests}
