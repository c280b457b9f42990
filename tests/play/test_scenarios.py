"""What a capture leaves open of a transfer, by hand: latency, bytes, and waiting for missing ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from tests.play.drawn_programs import draw_run
from tracedoc.play.player import OverlapShare, slow_down
from tracedoc.play.run_program import CollectiveParts, Scenario
from tracedoc.play.scenarios import as_scenario, call_latency, split_transfers, with_batches
from tracedoc.ranks.bandwidth import SizeCurve
from tracedoc.step.program import UNKNOWN_SHARE
from tracedoc.timeline.collective_table import NONE

MIB = 1 << 20


def parts(transfer_us: list[int], nbytes: list[int], *, matched: bool = True) -> CollectiveParts:
    """All-reduces of one group: how long each takes, and its message."""
    count = len(transfer_us)
    return CollectiveParts(
        event=np.arange(count),
        op=np.arange(count, dtype=np.int64) if matched else np.full(count, NONE, dtype=np.int64),
        transfer_ns=np.array(transfer_us, dtype=np.int64) * 1000,
        nbytes=np.array(nbytes, dtype=np.int64),
        kind=np.zeros(count, dtype=np.int32),
        group=np.zeros(count, dtype=np.int32),
        gradients=np.zeros(count, dtype=bool),
        extra=np.zeros(count, dtype=bool),
        complete=np.full(count, matched),
        block=np.full(count, NONE, dtype=np.int32),
        kinds=("all_reduce",),
        group_sizes=(2,),
    )


def latency_us(joins: CollectiveParts) -> list[list[float]]:
    """The latency of each part: fast, likely and slow."""
    return [(split_transfers(joins, one).latency_ns / 1000).tolist() for one in Scenario]


@pytest.mark.parametrize(
    ("transfer_us", "nbytes", "latency"),
    [
        # A message of 4 MiB moves at half of the full rate: up to half of its 40 us are latency.
        (40, 4 * MIB, [0, 10, 20]),
        # A message of 12 MiB moves at three quarters of it.
        (40, 12 * MIB, [0, 5, 10]),
        # Without bytes a collective takes 30 us on a usual link.
        (400, 4 * MIB, [0, 30, 200]),
        # All of a message of unknown size may be latency.
        (40, NONE, [0, 20, 40]),
    ],
)
def test_latency_of_one_size_is_a_part_of_what_its_bytes_leave(
    transfer_us: int, nbytes: int, latency: list[float]
) -> None:
    assert latency_us(parts([transfer_us], [nbytes])) == [[one] for one in latency]


def test_latency_of_several_sizes_is_that_of_their_line() -> None:
    """20 us, and 10 for each MiB; fast and slow are 30 % off."""
    joins = parts([30, 40, 60, 100], [MIB, 2 * MIB, 4 * MIB, 8 * MIB])
    fast, likely, slow = latency_us(joins)
    assert fast == pytest.approx([14] * 4, abs=0.01)
    assert likely == pytest.approx([20] * 4, abs=0.01)
    assert slow == pytest.approx([26] * 4, abs=0.01)


def test_between_hosts_several_sizes_say_what_a_call_takes() -> None:
    """20 us, and 10 us for each MiB: what transfers of one size differ by is no latency."""
    sizes = [MIB, MIB, 4 * MIB, 4 * MIB, 16 * MIB, 16 * MIB, 16 * MIB]
    joins = parts([30, 30, 60, 60, 140, 180, 220], sizes)
    joins = replace(joins, links=(SizeCurve(None, 60.0 * MIB, 60.0 * MIB),))
    joins = replace(joins, splits=tuple(split_transfers(joins, one) for one in Scenario))
    program = SimpleNamespace(layout=SimpleNamespace(joins=joins), transfer=joins.transfer_ns)
    saved = [call_latency(cast(Any, program), one) / 1000 for one in Scenario]
    assert saved == [pytest.approx([us] * len(sizes)) for us in (30, 20, 10)]


def test_what_may_be_waiting_for_a_missing_rank_stays() -> None:
    """Of 100 us, 60 are more than another of that size takes: waiting but in the fast scenario."""
    joins = parts([100, 40], [4 * MIB, 4 * MIB], matched=False)
    fixed = [(split_transfers(joins, one).fixed_ns / 1000).tolist() for one in Scenario]
    # Beside what waits: the latency of 40 us.
    assert fixed == [[0, 0], [60 + 10, 10], [60 + 20, 20]]


@pytest.mark.parametrize(
    ("known", "contention"),
    [
        ((0.1, 0.2, 0.4), (0.14, 0.2, 0.26)),  # the median of the ranks, and 30 % less and more
        ((UNKNOWN_SHARE,) * 3, (0.0, 0.06, 0.15)),
    ],
)
def test_contention_is_that_of_the_capture(known: tuple[float, ...], contention: tuple[float, ...]) -> None:
    program = next(
        one
        for one in map(draw_run, range(100))
        if len(one.layout.ranks) == len(known) and one.layout.joins.event.size
    )
    notes = tuple(
        replace(note, contention=one) for note, one in zip(program.layout.notes, known, strict=True)
    )
    program = replace(program, layout=replace(program.layout, notes=notes))
    assert tuple(as_scenario(program, one).contention for one in Scenario) == pytest.approx(contention)


def test_compute_is_slower_by_what_it_shares_more_than_in_the_capture() -> None:
    """By 20 % beside transfers: 110 us, half of them beside one, are 100 alone and 120 all beside it."""
    program = draw_run(0).edited(contention=0.2)
    known = OverlapShare(np.array([0.5, 0.5, 0.5]), np.array([0.0, 1.0, 0.5]))
    now = OverlapShare(np.array([0.5, 0.0, 1.0]), np.array([0.0, 0.0, 1.0]))
    slower = slow_down(program, known, now)
    assert (110 * (1 + slower.stretch)).tolist() == pytest.approx([110, 100, 120])
    assert (1 + slower.itself).tolist() == pytest.approx([1, 1 / 1.2, 1.2 / 1.1])


def test_workers_that_are_waited_for_a_fifth_of_the_time_likely_set_the_pace() -> None:
    """The first call waited 19 of 100 us for a batch, the second 20."""
    program = draw_run(1)
    layout = replace(program.layout, batch_point=np.array([0, 1]), batch_ns=np.array([19_000, 20_000]))
    own, ready = program.own.astype(np.int64), program.ready.astype(np.int64)
    own[:2], ready[:2] = 300, 100_000
    program = replace(program, layout=layout).edited(own=own, ready=ready)
    found = {scenario: with_batches(program, scenario) for scenario in Scenario}
    behind = {scenario: one.ready[:2].tolist() for scenario, one in found.items()}
    assert behind == {
        Scenario.FAST: [NONE, NONE],
        Scenario.LIKELY: [NONE, 100_000],
        Scenario.SLOW: [100_000, 100_000],
    }
    assert found[Scenario.FAST].own[:2].tolist() == [19_000, 20_000]
    assert found[Scenario.LIKELY].own[:2].tolist() == [19_000, 300]
    assert found[Scenario.SLOW].own[:2].tolist() == [300, 300]
