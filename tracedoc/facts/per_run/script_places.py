"""Facts about where in the script time goes: the function, its file and line, or a named range."""

from __future__ import annotations

from collections.abc import Callable

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.facts.per_run.settings import core_wait_frac
from tracedoc.ranks.code_places import code_place, common_place
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.script_code import CodePlace
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


@run_fact("script_code", unit="text", scope="rank", needs=("host_ops",))
def script_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which the host of a CPU run is longest outside operators, or "none".

    From the same sources as :func:`loader_code`; all ranks run one script, so that what the steps with stacks
    show counts for those whose own trace shows nothing, if each rank whose step was read is in that function.
    """
    return {str(digest.rank): str(_script_place(run, digest.rank) or "none") for digest in run.digests}


@run_fact("script_code_ms", unit="ms", scope="rank", needs=("host_ops",))
def script_code_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step in which no operator runs because the host is in :func:`script_code`, at most.

    As long as the function took in the steps with stacks, on the rank where it was shortest, and at most as
    long as no operator runs in the median step of the rank that has least of that: all ranks run one script,
    and what one of them does alone makes it a straggler. 0 on a rank without a function, and on GPUs
    (:func:`host_away_idle_ms`).
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
    """Return the place of a rank; where its trace has none, that of all steps with stacks."""
    digest = run.digest(rank)
    if not digest.is_cpu:
        return None
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    if run.source_steps and not any(one.file for one in of_trace):
        return common_place(run)
    return code_place(run, rank, 0.0, loading=False)


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
