"""The critical path lies where the capture measured its pieces, one directly after the other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from tests.play.drawn_programs import draw_run
from tests.play.kernel_loop import Times, play_loop
from tracedoc.play.path import Path, find_path, measure_path
from tracedoc.play.path_walk import Piece, PieceEnd
from tracedoc.play.player import Player
from tracedoc.play.run_program import RunProgram
from tracedoc.spans import Spans
from tracedoc.step.program import RankProgram


def without_gaps(program: RunProgram) -> RunProgram:
    """Return the program with events that follow each other at once: the path draws no gaps."""
    return replace(program, layout=replace(program.layout, gap=np.zeros_like(program.layout.gap)))


def measured(program: RunProgram, times: Times, position: int) -> RankProgram:
    """Return what a capture would tell of the rank at a position: when its points and events were."""
    layout = program.layout
    points = slice(int(layout.point_base[position]), int(layout.point_base[position + 1]))
    events = slice(int(layout.event_base[position]), int(layout.event_base[position + 1]))
    start, back = times.start[points], times.back[points]
    after_return = layout.after_return[points]
    held = np.where(layout.blocks[points], back - start, 0)
    lag = np.diff(start, prepend=start[0]) - np.where(after_return, np.roll(held, 1), 0)
    known = RankProgram.__struct_fields__
    columns = dict.fromkeys(known, np.empty(0, dtype=np.int64))
    return RankProgram(
        **columns
        | {
            "step": 0,
            "start_ns": int(start[0]),
            "lag": lag,
            "after_return": after_return,
            "held": held,
            "own": program.own[points],
            "began": times.begin[events] - int(start[0]),
            "dur": times.end[events] - times.begin[events],
        }
    )


@pytest.mark.parametrize("seed", range(24))
def test_pieces_follow_each_other_without_a_gap(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Until the path comes from the step before: of that, the capture has no program."""
    monkeypatch.setattr("tracedoc.play.path_walk.TOGETHER_NS", 0)
    program = without_gaps(draw_run(seed))
    subject = seed % len(program.layout.ranks)
    (played,) = Player(subject).play([program])
    path = find_path(played, subject)
    framed = program.layout.notes[subject].framed
    periodic = program.layout.periodic and not framed
    *_, times = play_loop(program, played.periods)[: -1 if periodic else None]
    found = list(
        measure_path(
            path, program.layout, lambda rank: measured(program, times, program.layout.ranks.index(rank))
        )
    )
    whole = Spans.of(
        [start for one in found for start in one.spans.starts], [e for one in found for e in one.spans.ends]
    )
    own = [piece for piece in path.pieces if piece.earlier == 0]
    assert whole.total_ns == pytest.approx(sum(piece.ns for piece in own), abs=1)
    assert len(whole) <= 1
    assert not any(one.earlier < other.earlier for one, other in pairwise(path.pieces))
    if own and not periodic:
        last = int(times.end[program.layout.event_rank == subject].max())
        if framed:
            last = max(last, int(times.start[program.layout.point_base[subject + 1] - 1]))
        assert int(whole.ends[-1]) == last


def test_a_stretch_that_is_not_all_on_the_path_keeps_its_end():
    """Three kernels of 10 ns, 5 ns apart; the path is as long as the last 15 ns of their work."""
    program = draw_run(4)
    layout = replace(program.layout, ranks=(7,))
    began = np.array([100, 115, 130, 200])
    capture = measured(program, Times(*(np.zeros(99, dtype=np.int64) for _ in range(4))), 0)
    capture = replace(capture, start_ns=1000, began=began, dur=np.full(4, 10))
    piece = Piece("compute", 7, 15.0, "", PieceEnd.EVENTS, index=3, first=0)
    (found,) = measure_path(Path((piece,)), layout, lambda rank: capture)
    assert found.spans.pairs() == [(1120, 1125), (1130, 1140)]
