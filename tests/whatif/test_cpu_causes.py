"""On CPUs the host pauses between operators, recomputes, and sends what nothing needs: causes with edits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tracedoc
from tracedoc.ledger import LedgerCause
from tracedoc.play.run_program import Scenario
from tracedoc.predicted import Predicted
from tracedoc.testing import TraceBuilder, parse_lanes
from tracedoc.whatif.changes.buckets import _on_shared_cores
from tracedoc.whatif.ledger import book_of


def write(folder: Path, *, pause_ms: tuple[float, float], barriers: int = 0) -> Path:
    """Four steps of two ranks: 20 ms of work, a pause, barriers of 2 ms, 10 ms of work, 20 ms of all-reduce.

    Ranks meet in the all-reduce, or in the first barrier. Between two barriers the host is busy for 1 ms.
    """
    longest = max(pause_ms)
    step_ms = 20 + longest + 3 * barriers + 30
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(4):
            begin = number * step_ms
            builder.step(number, begin, begin + step_ms)
            builder.host("aten::addmm", begin, begin + 20)
            at = begin + 20 + pause_ms[rank]
            met = begin + 20 + longest
            for _ in range(barriers):
                builder.collective("barrier", at, met + 2, nbytes=0, launch_ms=at)
                builder.host("aten::item", met + 2, met + 3)
                at = met = met + 3
            builder.host("aten::mm", at, at + 10)
            builder.collective("allreduce", at + 10, begin + step_ms, nbytes=64 << 20, launch_ms=at + 10)
        builder.write(folder / f"rank-{rank}.json")
    return folder


def causes(folder: Path) -> dict[str, LedgerCause]:
    """The causes of the ledger by their ids."""
    ledger = tracedoc.diagnose([folder], tracedoc.Options(jobs=1)).ledger
    assert ledger is not None
    return {one.id: one for one in ledger.causes}


def test_what_all_hosts_pause_is_a_cause(tmp_path: Path) -> None:
    found = causes(write(tmp_path, pause_ms=(40, 40)))
    assert found["host.pause"].alone_ms[1] == pytest.approx(40, abs=0.5)
    assert "ranks.host" not in found


def test_all_steps_of_a_cpu_run_are_played_also_the_first(tmp_path: Path) -> None:
    """Pauses of 5, 4, 7, 5, 8, 6, 7 ms before 20 ms of work: 6 ms of 26."""
    builder, begin = TraceBuilder(0, 1, device=None), 0
    for number, pause in enumerate((5, 4, 7, 5, 8, 6, 7)):
        builder.step(number, begin, begin + pause + 20)
        builder.host("aten::addmm", begin, begin + 10)
        builder.host("aten::mm", begin + 10 + pause, begin + 20 + pause)
        begin += pause + 20
    builder.host("aten::addmm", begin, begin + 10)
    book = book_of(tracedoc.measure([builder.write(tmp_path / "rank-0.json")]).measurements.run)
    assert sorted(one.step for one in book.replays) == [*range(7)]
    assert book.ledger.unexplained_ms == pytest.approx(0, abs=0.1)
    assert {one.id: one.share_ms for one in book.ledger.causes}["host.pause"] == pytest.approx(6, abs=0.1)


def test_what_lies_between_operators_is_a_cause(tmp_path: Path) -> None:
    """100 operators of 0.1 ms, 0.05 ms before each: 5 of 15 ms, half of which may be the profiler's."""
    builder = TraceBuilder(0, 1, device=None)
    for number in range(4):
        builder.step(number, 15 * number, 15 * number + 15)
        for place in range(100):
            at = 15 * number + 0.15 * place
            builder.host("aten::mm", at + 0.05, at + 0.15)
    found = causes(builder.write(tmp_path / "rank-0.json"))
    assert found["host.between"].alone_ms == pytest.approx((2.5, 5, 7.5), abs=0.2)
    assert "host.pause" not in found


def test_what_one_host_pauses_longer_is_its_own(tmp_path: Path) -> None:
    """40 of its 55 ms are the other's as well, which waits for the rest."""
    found = causes(write(tmp_path, pause_ms=(40, 55)))
    assert found["ranks.host"].alone_ms[1] == pytest.approx(15, abs=0.5)
    assert found["ranks.host"].ranks == (1,)
    assert found["host.pause"].share_ms == pytest.approx(40, abs=0.5)


def test_code_that_one_rank_takes_longer_at_is_taken_out_whole(tmp_path: Path) -> None:
    """A step of 105 ms: 20, pauses of 40 and 55, 10 and 20. 15 may not be the function's."""
    folder = write(tmp_path, pause_ms=(40, 55))
    (answer,) = tracedoc.predict([folder], ["skip-code ms=40"]).alone
    assert isinstance(answer, Predicted)
    low, likely, high = answer.gain_ms
    assert likely == pytest.approx(55, abs=0.5)
    differ = 0.1 * 50
    assert (low, high) == (pytest.approx(40 - differ, abs=0.5), pytest.approx(55 + differ, abs=0.5))


def test_what_code_takes_beyond_pauses_lies_between_its_operators(tmp_path: Path) -> None:
    """Of 20 ms a pause is 10; operators have 60 us between them, of which at best 10 ms go, too.

    A tenth of these is how far steps differ.
    """
    (rank,) = parse_lanes("step: 100\ncompute 0-60 x600 40us  70-100 x300 40us", ranks=1, device=None)
    rank.write(tmp_path / "rank-0.json")
    (answer,) = tracedoc.predict([tmp_path], ["skip-code ms=20"]).alone
    assert isinstance(answer, Predicted)
    assert answer.gain_ms[1:] == (pytest.approx(10, abs=0.2), pytest.approx(21, abs=0.2))


def test_barriers_go_with_what_the_host_does_between_them(tmp_path: Path) -> None:
    """Five barriers of 2 ms with 1 ms between them: 14 ms at least; what follows the last may be theirs."""
    folder = write(tmp_path, pause_ms=(5, 5), barriers=5)
    (answer,) = tracedoc.predict([folder], ["no-extra-messages"]).alone
    assert isinstance(answer, Predicted)
    assert answer.gain_ms[1] == pytest.approx(14.5, abs=0.6)
    assert causes(folder)["order.extra"].alone_ms[1] == pytest.approx(14.5, abs=0.6)


def test_a_run_without_barriers_has_none_to_leave_out(tmp_path: Path) -> None:
    folder = write(tmp_path, pause_ms=(5, 5))
    (answer,) = tracedoc.predict([folder], ["no-extra-messages"]).alone
    assert not isinstance(answer, Predicted)
    assert "order.extra" not in causes(folder)


def test_messages_that_no_longer_share_cores_with_the_backward_pass_make_both_shorter(tmp_path: Path) -> None:
    """Of 60 ms: 30 of work, 20 beside a message of 20, and one of 10 that the host waits for.

    A broadcast between them takes the other of gloo's threads. As one message they go at 50 ms and take 30.
    If both shared a core for those 20 ms, each takes 10 of them alone: it goes at 40, takes 20, and nothing
    changes; half of that is likely.
    """
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(4):
            begin = 60.0 * number
            builder.step(number, begin, begin + 60)
            builder.host("aten::addmm", begin, begin + 20)
            builder.backward(begin + 20, begin + 50.1)
            builder.host("aten::mm", begin + 20, begin + 30)
            builder.collective("allreduce", begin + 30, begin + 50, nbytes=16 << 20, launch_ms=begin + 30)
            builder.collective("broadcast", begin + 30.1, begin + 30.2, nbytes=64, launch_ms=begin + 30.1)
            builder.host("aten::mm", begin + 30, begin + 50)
            builder.collective("allreduce", begin + 50, begin + 60, nbytes=8 << 20, launch_ms=begin + 50)
        builder.write(tmp_path / f"rank-{rank}.json")
    (answer,) = tracedoc.predict([tmp_path], ["cap-buckets mib=24"]).alone
    assert isinstance(answer, Predicted)
    assert answer.step_ms == pytest.approx((60, 70, 80), abs=0.3)


def _beside(spare: int | None, scenario: Scenario) -> tuple[list[int], list[int]]:
    """Of two messages that go with a third, the first was called before; 20 ms of work follow the second."""
    layout = SimpleNamespace(
        is_cpu=True,
        spare_cores=spare,
        point=np.array([-1, 1, 3]),
        joins=SimpleNamespace(event=np.array([0, 1, 2])),
    )
    program = SimpleNamespace(
        layout=layout, lag=np.array([0, 10, 10, 10]), transfer=np.array([10, 20, 5]), scenario=scenario
    )
    apart, lag = _on_shared_cores(cast(Any, program), np.array([0, 1]), np.array([2, 2, 2]))
    return apart.tolist(), lag.tolist()


def test_what_the_step_before_called_shares_no_core_with_this_one() -> None:
    """Only the second message and the work beside it have half of a core each."""
    assert _beside(None, Scenario.FAST) == ([0, 10], [0, 10, 5, 5])


def test_messages_share_cores_where_operators_leave_none() -> None:
    """By half at least where none is free, not where one is, perhaps not where nothing is known."""
    assert _beside(0, Scenario.SLOW) == ([0, 5], [0, 10, 8, 8])
    assert _beside(1, Scenario.FAST) == _beside(None, Scenario.SLOW) == ([0, 0], [0, 10, 10, 10])
