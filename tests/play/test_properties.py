"""What holds for every program: the same work takes the same time, and less work never takes more."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.play.drawn_programs import draw_ranks, draw_run, join_ranks, with_streams
from tests.play.kernel_loop import play_loop
from tracedoc.play import solver
from tracedoc.play.player import Player
from tracedoc.play.run_program import RunProgram
from tracedoc.play.segments import find_sync_graph, reduce_stretches, weigh
from tracedoc.play.solver import make_plan, solve

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=20, derandomize=True)
LOOPED = settings(max_examples=6, derandomize=True)
"""The kernel loop is slow."""


def steps_of(program: RunProgram) -> np.ndarray:
    """Return the length of each rank's steady step."""
    graph = find_sync_graph(program)
    weights = weigh(graph, program, reduce_stretches(graph, [program])[0])
    return solve(make_plan(graph), [program], weights[:, None]).step_ns[:, 0]


def ends_after(program: RunProgram, periods: int) -> np.ndarray:
    """Return when each event ends, ``periods`` steps after the beginning; kernel by kernel."""
    return play_loop(program, periods)[-1][0]


@FEW
@given(SEEDS)
def test_times_are_the_same_natively_and_in_numpy(seed: int):
    program = draw_run(seed)
    graph = find_sync_graph(program)
    weights = weigh(graph, program, reduce_stretches(graph, [program])[0])
    natively = solve(make_plan(graph), [program, program], np.stack([weights, weights + 1], axis=1))
    with patch.object(solver, "longest", None):
        in_numpy = solve(make_plan(graph), [program, program], np.stack([weights, weights + 1], axis=1))
    assert (natively.times == in_numpy.times).all()
    assert (natively.step_ns == in_numpy.step_ns).all()


@FEW
@given(SEEDS)
def test_nothing_changed_changes_nothing(seed: int):
    program = draw_run(seed)
    player = Player(0)
    (base,) = player.play_base([program])
    again = program.edited(dur=program.dur.copy(), lag=program.lag.copy(), active=program.active.copy())
    (played,) = player.play([again])
    assert played.step_ns == base.step_ns


@LOOPED
@given(SEEDS, st.sampled_from(["dur", "lag", "own", "transfer", "active"]), st.floats(0.0, 1.0))
def test_less_work_never_ends_later(seed: int, column: str, share: float):
    program = draw_run(seed)
    rng = np.random.default_rng(seed)
    if column == "active":
        less = program.edited(active=program.active & (rng.random(program.active.size) > share))
    else:
        values = getattr(program, column)
        factor = np.where(rng.random(values.size) < 0.5, share, 1.0)
        less = program.edited(**{column: np.floor(values * factor).astype(np.int64)})
    assert (ends_after(less, 3) <= ends_after(program, 3)).all()


@LOOPED
@given(SEEDS)
def test_a_pair_gives_at_least_what_each_gives(seed: int):
    program = draw_run(seed)
    faster, prompter = {"dur": program.dur // 2}, {"lag": program.lag // 2}
    pair = ends_after(program.edited(**faster, **prompter), 3)
    assert (pair <= ends_after(program.edited(**faster), 3)).all()
    assert (pair <= ends_after(program.edited(**prompter), 3)).all()


@FEW
@given(SEEDS)
def test_twice_the_work_takes_twice_as_long(seed: int):
    program = join_ranks(draw_ranks(seed))
    layout = program.layout
    columns = {name: 2 * getattr(program, name) for name in ("lag", "own", "dur", "transfer")}
    columns["ready"] = np.where(program.ready >= 0, 2 * program.ready, program.ready)
    lags = ("rejoin_lag", "launch_lag", "gap", "cause_lag", "offset_ns")
    slow = replace(layout, **{name: 2 * getattr(layout, name) for name in lags})
    twice = replace(program.edited(**columns), layout=slow)
    assert (steps_of(twice) == 2 * steps_of(program)).all()


@FEW
@given(SEEDS)
def test_the_numbers_of_ranks_do_not_matter(seed: int):
    ranks = draw_ranks(seed)
    order = np.random.default_rng(seed).permutation(len(ranks))
    there, elsewhere = join_ranks(ranks), join_ranks([ranks[place] for place in order])
    assert steps_of(elsewhere).tolist() == steps_of(there)[order].tolist()


@FEW
@given(SEEDS)
def test_the_numbers_of_streams_do_not_matter(seed: int):
    ranks = draw_ranks(seed)
    order = np.random.default_rng(seed).permutation(8)
    others = [one._replace(program=with_streams(one.program, order)) for one in ranks]
    assert steps_of(join_ranks(others)).tolist() == steps_of(join_ranks(ranks)).tolist()


@FEW
@given(SEEDS, st.integers(0, 10**12))
def test_another_clock_does_not_matter(seed: int, later_ns: int):
    ranks = draw_ranks(seed)
    later = [one._replace(offset_ns=one.offset_ns + later_ns) for one in ranks]
    assert steps_of(join_ranks(later)).tolist() == steps_of(join_ranks(ranks)).tolist()


@LOOPED
@given(SEEDS)
def test_segments_are_the_kernel_loop(seed: int):
    program = join_ranks(draw_ranks(seed))
    graph = find_sync_graph(program)
    weights = weigh(graph, program, reduce_stretches(graph, [program])[0])
    solution = solve(make_plan(graph), [program], weights[:, None])
    starts = solution.times[graph.start_base : graph.join_base, 0]
    ends = ends_after(program, solution.periods)[graph.meeting]
    alone = graph.part < 0
    length = program.dur[graph.meeting]
    assert (starts + length)[alone].tolist() == ends[alone].tolist()
