"""Causes that overlap: one hides the other, costs its time, or is mended after it; of a step of 100 ms."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import tracedoc.judge.overlaps
from tests.example_diagnoses import sharded
from tests.rules.concluding import cause, conclude, finding, fix, measured, rule
from tracedoc.diagnosis import Finding
from tracedoc.judge.findings import Judgement
from tracedoc.judge.overlaps import mended_in_turn
from tracedoc.judge.replayed import _priced, as_planned
from tracedoc.ledger import Ledger, LedgerRow
from tracedoc.predicted import PlanStep, Predicted
from tracedoc.report.words import cost_text


def test_a_finding_is_told_with_what_mending_it_alone_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 ms alone, the other 10 ms, both 18: mending either saves 7 ms of them."""
    alone_ms = {("host.sync",): 15.0, ("input.wait",): 10.0, ("host.sync", "input.wait"): 18.0}
    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", lambda run, ids: (0.0, alone_ms[ids], 20.0))
    shared = cause("host.sync", 6.0, (14.0, 15.0, 16.0))
    told, plain = replace(shared, shared_with="input.wait"), cause("input.wait", 9.0, (7.0, 8.0, 9.0))
    pair = rule("syncs", cause=("host.sync",)), finding("syncs", 40.0)
    found = conclude([told, plain], pair)[0].findings
    costs = {one.id: (one.cost_ms, one.alone_ms) for one in found}
    assert costs == {"syncs": (6.0, 15.0), "input.wait": (9.0, 8.0)}
    assert [(one.size_ms, one.shared_ms, one.overlaps) for one in found] == [
        (15.0, 7.0, "waiting for the next batch"),
        (8.0, None, ""),
    ]


@pytest.mark.parametrize(
    ("beyond_ms", "words"),
    [
        (None, "costs 15 ms of the 100 ms step (15 %)"),
        (3.0, "costs 3 ms of the 100 ms step (3 %)"),
        (0.0, "costs 15 ms of the 100 ms step (15 %), the same time as findings 1-2"),
        (
            60.0,
            "costs 60 ms of the 100 ms step (60 %) once findings 1-2 are mended, which hide "
            "it today; alone it saves 15 ms",
        ),
    ],
)
def test_a_finding_costs_what_mending_it_saves_after_those_before_it(
    beyond_ms: float | None, words: str
) -> None:
    found = replace(finding("syncs", 40.0), cost_ms=9.0, alone_ms=15.0, beyond_ms=beyond_ms)
    assert cost_text(found, 100.0, number=3) == words
    part = replace(finding("fused", 40.0), overlaps="launch overhead on the host")
    assert cost_text(part, 100.0, overlaps="finding 2") == "counts with finding 2"


def test_a_hidden_finding_whose_fix_helps_leaves_what_it_saves_alone_to_that() -> None:
    """After two findings mending it saves 2 ms, and nothing alone; its fix saves 27 ms today."""
    found = replace(finding("syncs", 40.0), cost_ms=1.0, alone_ms=0.0, beyond_ms=2.0)
    fix = Predicted("fuse-optimizer", (72.0, 73.0, 74.0), (26.0, 27.0, 28.0), "host", "high")
    words = "costs 2 ms of the 100 ms step (2 %) once findings 1-2 are mended"
    assert cost_text(found, 100.0, number=3) == f"{words}, which hide it today"
    assert cost_text(found, 100.0, fix, number=3) == f"{words}; its fix also saves time of other causes"
    less = Predicted("fuse-optimizer", (97.6,) * 3, (2.4,) * 3, "host", "high")
    assert cost_text(found, 100.0, less, number=3) == words


def test_causes_are_mended_in_turn_with_the_first_finding_that_tells_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loader 50 ms; launches 30 after it, of 60 alone; the third finding's cause is mended by then."""
    saved = {1: 50.0, 2: 80.0, 3: 80.5, 4: 88.0}
    monkeypatch.setattr(
        tracedoc.judge.overlaps, "likely_of", lambda run, sets: [saved[len(ids)] for ids in sets]
    )
    causes = (
        cause("host.launch", 40.0, told_by=("launch", "again")),
        cause("input.wait", 20.0, told_by=("wait",)),
        cause("link.transfer", 5.0),
        cause("link.latency", 4.0),
    )
    found = [
        replace(finding("wait", 50.0), cost_ms=20.0, alone_ms=50.0),
        replace(finding("launch", 60.0), cost_ms=40.0, alone_ms=60.0),
        replace(finding("again", 9.0), cost_ms=9.0, alone_ms=9.0),
    ]
    judgement = Judgement(tuple(found), ())
    told, ledger = mended_in_turn(judgement, Ledger(100.0, 10.0, 0.0, causes), measured())
    assert [one.told_ms for one in told.findings] == [50.0, 30.0, 9.0]
    # 0.5 ms is too little for a row of its own.
    assert ledger.rows == (
        LedgerRow(("input.wait",), 50.0, "wait"),
        LedgerRow(("host.launch",), 30.0, "launch"),
        LedgerRow(("link.latency",), 7.5),
    )


def test_what_twice_the_batch_saves_beyond_its_causes_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the batch saves 40 ms, of which latency, its cause, is 1; exposed communication costs 30."""
    monkeypatch.setattr(
        tracedoc.judge.overlaps, "likely_of", lambda run, sets: [30.0 + len(ids) - 1 for ids in sets]
    )
    causes = (
        cause("link.transfer", 30.0, told_by=("exposed",)),
        cause("link.latency", 1.0, told_by=("batch",)),
    )
    exposed = replace(finding("exposed", 30.0), cost_ms=30.0, alone_ms=30.0)
    for costs_ms, told_ms in ((40.0, [40.0, 30.0]), (1.0, [1.0, 30.0])):
        batch = replace(finding("batch", 40.0), cost_ms=costs_ms, alone_ms=costs_ms)
        rules = {"batch": rule("batch", cause=("link.latency",), tells="batch")}
        judgement = Judgement((batch, exposed), (), rules=rules)
        told, ledger = mended_in_turn(judgement, Ledger(100.0, 69.0, 0.0, causes), measured())
        assert [one.told_ms for one in told.findings] == told_ms
        assert ("batch" in {row.finding for row in ledger.rows}) is (costs_ms == 1.0)


def test_a_part_whose_fix_saves_more_counts_with_the_largest_cause_that_its_rule_names() -> None:
    """The rule names a family, as ``link``: what it counts with is a cause of the ledger."""
    causes = (cause("link.transfer", 30.0), cause("link.latency", 10.0))
    part = replace(finding("part", 8.0, fix("Send less", (19.0, 20.0, 21.0))), cost_ms=8.0)
    told = _priced(part, rule("part", part_of=("link",)), sharded().run, Ledger(100.0, 60.0, 0.0, causes))
    assert (told.cost_ms, told.overlaps) == (None, "exposed communication")


@pytest.mark.parametrize(("theirs", "rows"), [("latency of messages", 1), ("", 2)])
def test_two_findings_that_hide_each_other_are_one_row(
    monkeypatch: pytest.MonkeyPatch, theirs: str, rows: int
) -> None:
    """Alone they save 2 and 0 of 100 ms, together 40: the first one's row, with which the second counts."""
    monkeypatch.setattr(
        tracedoc.judge.overlaps,
        "likely_of",
        lambda run, sets: [40.0 if len(ids) > 1 else 2.0 for ids in sets],
    )
    causes = (
        cause("link.transfer", 20.0, told_by=("exposed",)),
        cause("link.latency", 20.0, told_by=("small",)),
    )
    first = replace(finding("exposed", 2.0), cost_ms=20.0, alone_ms=2.0, overlaps=theirs, together_ms=40.0)
    second = replace(
        finding("small", 0.0), cost_ms=20.0, alone_ms=0.0, overlaps="exposed communication", together_ms=40.0
    )
    judgement = Judgement((first, second), ())
    told, ledger = mended_in_turn(judgement, Ledger(100.0, 60.0, 0.0, causes), measured())
    one, other = told.findings
    assert len(ledger.rows) == rows
    if rows == 1:
        assert (one.told_ms, one.is_pair, other.told_ms) == (40.0, True, None)
        costs = cost_text(one, 100.0, overlaps="finding 2")
        assert costs.startswith("costs 40 ms of the 100 ms step (40 %) together with finding 2: each hides")
        assert cost_text(other, 100.0, overlaps="finding 1") == "counts with finding 1"
    else:
        assert (one.told_ms, other.told_ms) == (2.0, 38.0)


def _told(rule_id: str, alone_ms: float, shared_ms: float, overlaps: str) -> Finding:
    return replace(
        finding(rule_id, 40.0), cost_ms=1.0, alone_ms=alone_ms, shared_ms=shared_ms, overlaps=overlaps
    )


def _planned(rule_id: str) -> PlanStep:
    return PlanStep(f"{rule_id}/0", "mend", "no-sync", (70.0, 80.0, 90.0), (10.0, 20.0, 30.0), "host", 100.0)


@pytest.mark.parametrize(
    ("shared_ms", "severity", "order"),
    [
        (8.0, "note", ["wait", "launch"]),
        (7.9, "note", ["launch", "wait"]),  # less than eight tenths of the 10 ms that the wait costs
        (8.0, "warning", ["launch", "wait"]),
    ],
)
def test_of_two_that_cost_the_same_time_the_one_is_first_that_the_plan_mends_first(
    shared_ms: float, severity: str, order: list[str]
) -> None:
    launch = replace(_told("launch", 15.0, shared_ms, "waiting for the next batch"), severity=severity)
    wait = _told("wait", 10.0, shared_ms, "launch overhead on the host")
    causes = (cause("host.launch", 9.0, told_by=("launch",)), cause("input.wait", 6.0, told_by=("wait",)))
    ledger = Ledger(100.0, 85.0, 0.0, causes, (3, 4), "high")
    plan = (_planned("wait"), _planned("launch"))
    assert [one.id for one in as_planned([launch, wait], plan, ledger)] == order
    assert [one.id for one in as_planned([launch, wait], plan[::-1], ledger)] == ["launch", "wait"]


@pytest.mark.parametrize("told", [True, False])
def test_two_limits_that_hide_each_other_are_told_as_such(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a rule tells the cause or none does; one that names both has no need to."""
    both_ms = {1: (0.0, 1.0, 2.0), 2: (12.0, 14.0, 15.0)}
    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", lambda run, ids: both_ms[len(ids)])
    causes = [cause("link.transfer", 20.0, (0.0, 1.0, 2.0), partner="host.sync"), cause("host.sync", 20.0)]
    pairs = [(rule("slow", cause=("link.transfer",)), finding("slow", 30.0))] if told else []
    found = {one.id: one for one in conclude(causes, *pairs)[0].findings}
    slow = found["slow" if told else "link.transfer"]
    assert (slow.together_ms, slow.overlaps) == (14.0, "waits of the host for the GPU")
    # Without the one 1 ms is saved, without both no more than a tenth of 20 ms beyond that.
    both_ms[2] = (1.0, 2.9, 4.0)
    found = {one.id: one for one in conclude(causes, *pairs)[0].findings}
    assert found["slow" if told else "link.transfer"].together_ms is None
    both = rule("both", cause=("link.transfer", "host.sync")), finding("both", 30.0)
    (one,) = conclude(causes, both)[0].findings
    assert (one.message, one.overlaps) == ("It is so.", "")


def test_a_wait_is_told_with_the_pause_behind_it() -> None:
    """A pause of 30 ms behind a wait: without the one or the other the step is 30 ms shorter."""
    pause = cause("host.pause", 15.0, (30.0,) * 3, shared_with="host.sync")
    wait = cause("host.sync", 15.0, (30.0,) * 3, shared_with="host.pause")
    judgement, ledger = conclude([pause, wait], (rule("away", cause=("host.pause",)), finding("away", 40.0)))
    assert [one.told_by for one in ledger.causes] == [("away",)] * 2
    assert [one.id for one in judgement.findings] == ["away"]


def test_a_wait_before_what_two_findings_tell_is_a_finding_of_its_own() -> None:
    """Without the wait the step is 95 ms shorter, without the copies 52, and without the late rank 64."""
    copies = cause("input.copies", 26.0, (52.0,) * 3, shared_with="host.sync")
    late = cause("ranks.host", 43.0, (64.0,) * 3, shared_with="host.sync")
    wait = cause("host.sync", 48.0, (95.0,) * 3, shared_with="input.copies")
    rules = {name: rule(name, cause=(id,)) for name, id in (("pin", copies.id), ("rank", late.id))}
    told = [(one, finding(name, 60.0)) for name, one in rules.items()]
    judgement, _ = conclude([wait, late, copies], *told)
    assert {one.id: one.alone_ms for one in judgement.findings} == {"host.sync": 95, "rank": 64, "pin": 52}


def test_what_a_host_does_behind_a_wait_is_told_before_the_wait() -> None:
    pause = cause("ranks.host", 15.0, (30.0,) * 3, shared_with="host.sync")
    wait = cause("host.sync", 16.0, (31.0,) * 3, shared_with="ranks.host")
    judgement, ledger = conclude([wait, pause])
    assert [one.id for one in judgement.findings] == ["ranks.host"]
    assert [one.told_by for one in ledger.causes] == [("ranks.host",)] * 2


@pytest.mark.parametrize(
    ("wait_ms", "least_ms", "named", "ids"),
    [
        (30.5, 30.0, ["away", "syncs"], ["away", "syncs"]),
        (31.5, 30.0, ["away", "syncs"], ["syncs", "away"]),  # more than 1 % of the step of 100 ms
        (30.5, 30.0, ["syncs"], ["syncs", "host.pause"]),  # no fix of the pause is known
        (30.5, 0.0, ["away", "syncs"], ["away", "syncs"]),  # a warning, and a critical finding
    ],
)
def test_a_wait_that_costs_the_pause_behind_it_comes_after_that(
    wait_ms: float, least_ms: float, named: list[str], ids: list[str]
) -> None:
    pause = cause("host.pause", 15.0, (least_ms, 30.0, 30.0), shared_with="host.sync")
    wait = cause("host.sync", 15.2, (wait_ms,) * 3, shared_with="host.pause")
    rules = {"away": rule("away", cause=("host.pause",)), "syncs": rule("syncs", cause=("host.sync",))}
    judgement, _ = conclude([wait, pause], *[(rules[name], finding(name, 40.0)) for name in named])
    assert [one.id for one in judgement.findings] == ids


@pytest.mark.parametrize("wait_ms", [30.0, 24.0])
def test_a_gather_behind_a_wait_and_a_pause_is_told_with_the_pause(
    monkeypatch: pytest.MonkeyPatch, wait_ms: float
) -> None:
    """Without the pause the step is 20 ms shorter, and the gather still late by 11: 31 without all of it."""
    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", lambda run, ids: (18.0, 31.0, 32.0))
    pause = cause("host.pause", 10.0, (20.0,) * 3, shared_with="host.sync")
    wait = cause("host.sync", wait_ms / 2, (wait_ms,) * 3, shared_with="host.pause")
    gather = cause("order.gathers", 5.0, (10.0,) * 3, shared_with="host.sync")
    judgement, ledger = conclude(
        [pause, wait, gather], (rule("away", cause=("host.pause",)), finding("away", 40.0))
    )
    assert {one.told_by for one in ledger.causes} == {("away",)}
    (found,) = judgement.findings
    assert found.gain is not None
    assert (found.gain.low_ms, found.gain.likely_ms, found.gain.high_ms) == (20.0, 31.0, 32.0)
    assert found.size_ms == 31.0


def test_a_finding_of_a_time_that_others_cost_as_well_keeps_its_likely_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 ms without both is within a tenth of the 30 without either."""
    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", lambda run, ids: (29.0, 32.0, 34.0))
    late = cause("ranks.host", 15.0, (30.0,) * 3, shared_with="host.sync")
    wait = cause("host.sync", 15.0, (30.0,) * 3, shared_with="ranks.host")
    (found,) = conclude([late, wait], (rule("late", cause=("ranks",)), finding("late", 40.0)))[0].findings
    assert found.gain is not None
    assert (found.gain.likely_ms, found.gain.high_ms, found.size_ms) == (30.0, 34.0, 30.0)


@pytest.mark.parametrize(
    ("place", "told_by"),
    [("`log` (`train.py:3`)", "syncs"), ("`load` (`train.py:9`)", "host.pause"), ("", "host.pause")],
)
def test_what_a_function_costs_is_told_once(place: str, told_by: str) -> None:
    """A pause that costs some of the time of a finding is told with it where that names its function."""
    told, log = cause("host.sync", 20.0, (15.0,) * 3), finding("syncs", 40.0)
    pause = cause("host.pause", 7.0, (8.0,) * 3, shared_with="host.sync", place=place)
    named = replace(log, says="the host waits in `log` (`train.py:3`)")
    _, ledger = conclude([told, pause], (rule("syncs", cause=("host.sync",)), named))
    assert ledger.causes[1].told_by == (told_by,)
