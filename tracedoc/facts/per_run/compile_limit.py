"""A fact from the manifest about torch.compile: functions that it stopped compiling."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_run.settings import by_rank
from tracedoc.facts.per_run.strategy import compiled
from tracedoc.ranks.run_view import RunView
from tracedoc.values import Value


@run_fact(unit="count", scope="rank")
def recompile_limit_hits(run: RunView) -> dict[str, Value]:
    """How often torch.compile gave a function up since the job began, having compiled it too often already.

    From Dynamo's own counters. By default it compiles a function eight times; what needs another version
    runs uncompiled from then on. 0 without a manifest where no compiled code runs.
    """
    if run.job is None and not compiled(run):
        return {str(digest.rank): 0 for digest in run.digests}
    return by_rank(run, lambda rank: rank.compiled.get("recompile_limit_hits", 0))
