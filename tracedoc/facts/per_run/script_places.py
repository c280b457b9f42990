"""Facts about where in the script time goes: the function, its file and line, or a named range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tracedoc.digest.rank_digest import RankDigest
from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.facts.per_run.settings import core_wait_frac
from tracedoc.ranks.code_places import code_place
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.stragglers import stragglers
from tracedoc.timeline.own_code import CodePlace
from tracedoc.values import Unknown, Value

FLATTENING = "flatten_dense_tensors"
"""The operator that merges or splits tensors around a broadcast of buffers."""


@run_fact("loader_code", unit="text", scope="rank", needs=("host_ops",))
def loader_code(run: RunView) -> dict[str, Value]:
    """The function of the script that takes most of the loader's time, as "`__getitem__` (`data.py:12`)".

    From Python stacks, or a range that ``record_function`` names; "none" where neither shows half of
    :func:`input_idle_ms`. The line is where the function begins.
    """
    return _places(run, "input_idle_ms", loading=True)


@run_fact("host_code", unit="text", scope="rank", needs=("launches",))
def host_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which the host is for half of :func:`host_away_idle_ms` or more.

    From the same sources as :func:`loader_code`; "none" where they show none.
    """
    return _places(run, "host_away_idle_ms", loading=False)


@run_fact("straggler_code", unit="text", scope="rank", needs=("collectives", "multi_rank"))
def straggler_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which a late rank takes longer than its peers, or "none"."""
    found: dict[str, Value] = {str(digest.rank): "none" for digest in run.digests}
    for late in stragglers(run):
        if late.cause not in ("input", "python", "gc", "unknown"):
            continue
        spent_ms = float(np.median(late.cause_ns)) / 1e6
        place = code_place(run, late.rank, spent_ms, loading=late.cause == "input")
        found[str(late.rank)] = str(place or "none")
    return found


@run_fact("straggler_located", unit="bool", scope="rank", needs=("collectives", "multi_rank"))
def straggler_located(run: RunView) -> dict[str, Value]:
    """Whether :func:`straggler_code` names a function."""
    return {rank: place != "none" for rank, place in straggler_code(run).items()}


@run_fact("script_code", unit="text", scope="rank", needs=("host_ops",))
def script_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which the host of a CPU run is longest outside operators, or "none".

    From the same sources as :func:`loader_code`; all ranks run one script, so that what the step with stacks
    shows of one rank counts for those whose own trace shows nothing.
    """
    return {str(digest.rank): str(_script_place(run, digest.rank) or "none") for digest in run.digests}


@run_fact("script_code_ms", unit="ms", scope="rank", needs=("host_ops",))
def script_code_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step in which no operator runs because the host is in :func:`script_code`, at most.

    As long as the function took in the step with stacks, and at most as long as no operator runs in the
    median step of the rank that has least of that: all ranks run one script, and what one of them does alone
    makes it a straggler. 0 on a rank without a function, and on GPUs (:func:`host_away_idle_ms`).
    """
    return _script_times(run, lambda digest: 1.0)


@run_fact("script_code_running_ms", unit="ms", scope="rank", needs=("host_ops",))
def script_code_running_ms(run: RunView) -> dict[str, Value]:
    """:func:`script_code_ms` without the share of time that each rank waits for a core (``core_wait_frac``).

    A thread that is taken off its core is stopped at any place of the step, outside operators too.
    """
    waits = core_wait_frac(run)

    def running(digest: RankDigest) -> float:
        wait = waits[str(digest.rank)]
        return 1.0 - wait if isinstance(wait, float) else 1.0

    return _script_times(run, running)


def _script_place(run: RunView, rank: int) -> CodePlace | None:
    """Return the place of a rank; where its trace has none, that of the step with stacks."""
    digest = run.digest(rank)
    if not digest.is_cpu:
        return None
    own = digest.host_work is not None and digest.host_work.code
    return code_place(run, rank if own or run.source_rank is None else run.source_rank, 0.0, loading=False)


def _script_times(run: RunView, share: Callable[[RankDigest], float]) -> dict[str, Value]:
    quiet = []
    for digest in run.digests:
        idle_ms = digest.facts.get("unexplained_idle_ms", NO_STEP)
        if not isinstance(idle_ms, float | int):
            return {
                str(digest.rank): idle_ms if isinstance(idle_ms, Unknown) else NO_STEP
                for digest in run.digests
            }
        quiet.append(float(idle_ms) * share(digest))
    places = {str(digest.rank): _script_place(run, digest.rank) for digest in run.digests}
    return {rank: min(place.time_ns / 1e6, *quiet) if place else 0.0 for rank, place in places.items()}


@run_fact("broadcasts_buffers", unit="bool", scope="rank", needs=("launches",))
def broadcasts_buffers(run: RunView) -> dict[str, Value]:
    """Whether the longest gaps of :func:`host_away_idle_ms` merge or split tensors in the forward pass.

    So does DDP when it broadcasts buffers, such as the statistics of batch norm, before each forward pass.
    """
    found: dict[str, Value] = {}
    for digest in run.digests:
        if digest.host_work is None:
            found[str(digest.rank)] = NO_STEP
            continue
        first = next(iter(digest.host_work.away), None)
        found[str(digest.rank)] = first is not None and FLATTENING in first.doing and "forward" in first.where
    return found


def _places(run: RunView, fact: str, *, loading: bool) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for digest in run.digests:
        idle_ms = digest.facts.get(fact, NO_STEP)
        if isinstance(idle_ms, Unknown) or not isinstance(idle_ms, float | int):
            found[str(digest.rank)] = "none"
            continue
        place = code_place(run, digest.rank, float(idle_ms), loading=loading)
        found[str(digest.rank)] = str(place or "none")
    return found
