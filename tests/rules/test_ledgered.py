"""What the ledger decides of findings: which stand, their order, severity and gain, and what no rule tells.

The step takes 100 ms, so that milliseconds are per cent of it.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import tracedoc.judge.ledgered
import tracedoc.judge.overlaps
from tests.rules.concluding import cause, conclude, finding, fix, measured, rule, severities
from tracedoc.diagnosis import Comparison, Gain, Verdict
from tracedoc.judge.findings import Judgement
from tracedoc.judge.ledgered import concluded
from tracedoc.judge.rule import AtMost, RuleFix
from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.whatif.larger_batch import Doubled

# -- which findings stand


def test_a_finding_whose_causes_cost_little_passes_and_says_why() -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0, severity="critical")
    judgement, ledger = conclude([cause("link.transfer", 1.2), cause("link.latency", 0.7)], pair)
    assert judgement.findings == ()
    assert judgement.verdicts == (
        Verdict("slow", "pass", reason="it costs 1.9 ms of the 100 ms step, less than 2 %"),
    )
    assert [one.told_by for one in ledger.causes] == [(), ()]


def test_from_two_per_cent_on_it_stands() -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0)
    judgement, ledger = conclude([cause("link.transfer", 2.0)], pair)
    assert severities(judgement) == [("slow", "note")]
    assert judgement.verdicts == (Verdict("slow", "finding"),)
    assert ledger.causes[0].told_by == ("slow",)


def test_a_family_stands_for_its_members() -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0)
    causes = [cause("link.transfer", 8.0), cause("host.sync", 6.0), cause("link.latency", 3.0)]
    judgement, ledger = conclude(causes, pair)
    assert [one.told_by for one in ledger.causes] == [("slow",), ("host.sync",), ("slow",)]
    assert {one.rule_id for one in judgement.findings} == {"slow", "host.sync"}


def test_without_a_ledger_nothing_changes() -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0, severity="critical")
    judgement = Judgement((pair[1],), (Verdict("slow", "finding"),), rules={"slow": pair[0]})
    empty = Ledger(reason="no kernels were captured")
    assert concluded(judgement, empty, measured()) == (judgement, empty)


def test_a_rule_that_names_no_cause_keeps_what_it_says_and_comes_last_of_its_severity() -> None:
    free = rule("free"), finding("free", 60.0, severity="critical")
    slow = rule("slow", cause=("link",)), finding("slow", 40.0)
    judgement, _ = conclude([cause("link.transfer", 20.0)], free, slow)
    assert severities(judgement) == [("slow", "critical"), ("free", "critical")]
    assert judgement.findings[1] == free[1]


def test_what_only_a_log_tells_keeps_its_own_size() -> None:
    """The captured steps need not show what the whole run does; those that do are told by the same rule."""
    log = rule("log", cause=("slow_steps",), needs=frozenset())
    judgement, _ = conclude([], (log, finding("log", 34.0, severity="critical")))
    assert severities(judgement) == [("log", "critical")]
    assert judgement.findings[0].gain == Gain(0.0, 34.0, "ceiling", ("all of it goes",))
    judgement, ledger = conclude([cause("slow_steps", 20.0)], (log, finding("log", 34.0)))
    assert severities(judgement) == [("log", "note")]
    assert ledger.causes[0].told_by == ("log",)


@pytest.mark.parametrize(
    ("is_cpu", "analysed_ms", "high_ms"), [(True, 100.0, 70.0), (True, 140.0, 50.0), (False, 100.0, 22.0)]
)
def test_what_all_ranks_of_a_cpu_run_do_is_as_its_rule_bounds_it(
    is_cpu: bool, analysed_ms: float, high_ms: float
) -> None:
    """On CPUs steps and ranks differ from the one that is played; half of it is half of the mean."""
    pair = rule("code", part_of=("host.pause",)), finding("code", 70.0, severity="critical")
    of = measured(is_cpu=is_cpu, step_ms=analysed_ms)
    judgement, _ = conclude([cause("host.pause", 30.0, (12.0, 20.0, 22.0))], pair, of=of)
    assert judgement.findings[0].gain == Gain(0.0, high_ms, "ceiling", ("all of it goes",))


def test_what_a_log_tells_of_an_entry_is_told_once() -> None:
    """Its 60 ms of a step of 200 are 30 of the 100 that the ledger accounts for."""
    log = rule("log", part_of=("host.pause",), needs=frozenset()), finding("log", 60.0)
    of_mean = replace(log[1], gain=replace(log[1].gain, mean_step_ms=200.0))
    code = rule("code", part_of=("host.pause",)), finding("code", 31.0)
    judgement, ledger = conclude([cause("host.pause", 31.0)], (log[0], of_mean), code)
    assert [one.id for one in judgement.findings] == ["log"]
    assert ledger.causes[0].told_by == ("log",)


# -- parts


def test_a_part_is_as_large_as_its_rule_bounds_it() -> None:
    """8 of 30 ms: a warning, whose entry is not told by it."""
    pair = rule("part", part_of=("link.transfer",)), finding("part", 8.0)
    judgement, ledger = conclude([cause("link.transfer", 30.0)], pair)
    assert severities(judgement) == [("link.transfer", "critical"), ("part", "warning")]
    assert judgement.findings[1].gain == Gain(0.0, 8.0, "ceiling", ("all of it goes",))
    assert ledger.causes[0].told_by == ("link.transfer",)


def test_a_part_is_no_larger_than_its_entry_gives() -> None:
    """The rule bounds it at 40 ms, the entry has 30 of the step and gives at most 22 alone; or 11 hide it."""
    pair = rule("part", part_of=("link.transfer",)), finding("part", 40.0)
    judgement, ledger = conclude([cause("link.transfer", 30.0, (12.0, 20.0, 22.0))], pair)
    assert severities(judgement) == [("part", "warning")]  # 12 ms are sure
    assert judgement.findings[0].gain == Gain(0.0, 22.0, "ceiling", ("all of it goes",))
    hidden = replace(pair[0], gain=AtMost("comm_ms", "all of it hides", behind="step_ms")), pair[1]
    judgement, ledger = conclude([cause("link.transfer", 30.0)], hidden, of=measured(step_ms=11.0))
    assert judgement.findings[0].gain == Gain(0.0, 11.0, "ceiling", ("all of it goes",))
    assert ledger.causes[0].told_by == ("part",)


def test_half_of_an_entry_tells_it() -> None:
    half, less = rule("half", part_of=("link",)), rule("less", part_of=("link",))
    pairs = (half, finding("half", 10.0)), (less, finding("less", 9.9))
    _, ledger = conclude([cause("link.transfer", 20.0)], *pairs)
    assert ledger.causes[0].told_by == ("half",)


def test_a_part_of_almost_nothing_passes() -> None:
    pair = rule("part", part_of=("link.transfer",)), finding("part", 1.9)
    judgement, _ = conclude([cause("link.transfer", 30.0)], pair)
    assert judgement.verdicts[0].outcome == "pass"
    assert judgement.verdicts[0].reason == "it costs 1.9 ms of the 100 ms step, less than 2 %"


# -- findings beside each other


def test_what_others_tell_for_the_most_part_gives_way() -> None:
    """Of 30 ms of communication the slow link is 20; what is left of it is told in plain words."""
    broad = rule("broad", cause=("link",), tells="time"), finding("broad", 30.0)
    sharp = rule("sharp", cause=("link.transfer",)), finding("sharp", 25.0)
    judgement, ledger = conclude([cause("link.transfer", 20.0), cause("link.latency", 10.0)], broad, sharp)
    assert [one.rule_id for one in judgement.findings] == ["sharp", "link.latency"]
    assert (judgement.verdicts[0].outcome, judgement.verdicts[0].reason) == (
        "yielded",
        "sharp tells 20 ms of its 30 ms",
    )
    assert [one.told_by for one in ledger.causes] == [("sharp",), ("link.latency",)]


def test_what_is_left_is_what_a_finding_tells_and_gains() -> None:
    broad = rule("broad", cause=("link",), tells="time"), finding("broad", 30.0)
    sharp = rule("sharp", cause=("link.latency",)), finding("sharp", 25.0)
    judgement, _ = conclude([cause("link.transfer", 20.0), cause("link.latency", 10.0)], broad, sharp)
    gains = {one.rule_id: one.gain.likely_ms for one in judgement.findings if one.gain is not None}
    assert gains == {"broad": 20.0, "sharp": 10.0}


def test_a_slow_link_is_told_beside_what_speaks_of_all_communication() -> None:
    """That speaks of 10 ms of latency; hiding all of it saves what the link is slow by as well."""
    broad = rule("broad", cause=("link",), tells="time"), finding("broad", 30.0)
    slow, latency = cause("link.slow", 20.0), cause("link.latency", 10.0)
    judgement, _ = conclude([slow, latency], broad)
    assert [(one.id, one.cost_ms) for one in judgement.findings] == [("link.slow", 20.0), ("broad", 10.0)]


@pytest.mark.parametrize(
    ("launches_ms", "saves", "told"),
    [
        (12.0, (25.0, 30.0, 32.0), [("small", "critical", 30.0)]),
        # Its causes cost more than twice the batch saves.
        (40.0, (25.0, 30.0, 32.0), [("small", "critical", 40.0)]),
        # Most of the step grows with the batch.
        (12.0, (24.9, 30.0, 32.0), [("host.launch", "warning", 12.0), ("small", "note", 30.0)]),
        (1.0, (7.5, 9.0, 10.0), [("small", "note", 9.0)]),
        # Less than 15 % of the step is the same for any batch.
        (1.0, (7.4, 9.0, 10.0), []),
    ],
)
def test_a_small_batch_costs_what_twice_of_it_saves(
    launches_ms: float, saves: Range, told: list[tuple[str, str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracedoc.judge.ledgered, "larger_batch", lambda run, per_step: Doubled(saves))
    monkeypatch.setattr(tracedoc.judge.ledgered, "per_step_causes", lambda run, causes: causes)
    small = rule("small", cause=("host.launch", "link.latency"), tells="batch"), finding("small", 60.0)
    judgement, _ = conclude([cause("host.launch", launches_ms)], small)
    assert [(one.id, one.severity, one.cost_ms) for one in judgement.findings] == told


@pytest.mark.parametrize(("likely_ms", "told"), [(7.6, [("small", "note", 7.6)]), (7.4, [])])
def test_a_small_batch_is_a_note_where_what_it_saves_depends_on_the_rate_of_a_link(
    likely_ms: float, told: list[tuple[str, str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled = Doubled((1.0, likely_ms, 40.0), rate_is_known=False)
    monkeypatch.setattr(tracedoc.judge.ledgered, "larger_batch", lambda run, per_step: doubled)
    small = rule("small", cause=("link.latency",), tells="batch"), finding("small", 60.0)
    judgement, _ = conclude([], small)
    assert [(one.id, one.severity, one.cost_ms) for one in judgement.findings] == told


@pytest.mark.parametrize(("launches_ms", "told"), [(14.0, {"chains", "small"}), (16.0, {"chains"})])
def test_a_small_batch_gives_way_to_what_tells_half_of_it(
    launches_ms: float, told: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tracedoc.judge.ledgered, "larger_batch", lambda run, per_step: Doubled((25.0, 30.0, 32.0))
    )
    monkeypatch.setattr(tracedoc.judge.ledgered, "per_step_causes", lambda run, causes: causes)
    small = rule("small", cause=("host.launch",), tells="batch"), finding("small", 60.0)
    chains = rule("chains", cause=("host.launch", "compute.fusion")), finding("chains", 60.0)
    causes = [cause("host.launch", launches_ms), cause("compute.fusion", 20.0)]
    judgement, _ = conclude(causes, small, chains)
    assert {one.id for one in judgement.findings} == told


def test_of_two_causes_the_one_that_explains_more_speaks() -> None:
    large = rule("large", cause=("order.messages", "link.latency")), finding("large", 1.0)
    small = rule("small", cause=("link.latency",)), finding("small", 90.0)
    judgement, _ = conclude([cause("order.messages", 9.0), cause("link.latency", 6.0)], small, large)
    assert [one.rule_id for one in judgement.findings] == ["large"]


def test_of_two_that_explain_as_much_the_one_with_more_conditions_speaks() -> None:
    pairs = [(rule(name, cause=("link.transfer",)), finding(name, 40.0)) for name in ("few", "many")]
    comparisons = tuple(Comparison("a > 1", 2, 1, True) for _ in range(2))
    judgement, _ = conclude([cause("link.transfer", 20.0)], *pairs, comparisons={"many": comparisons})
    assert [one.rule_id for one in judgement.findings] == ["many"]


def test_a_part_leaves_the_rest_of_its_entry_to_others() -> None:
    part = rule("part", part_of=("link.transfer",)), finding("part", 8.0)
    rest = rule("rest", cause=("link.transfer",), tells="time"), finding("rest", 40.0)
    judgement, _ = conclude([cause("link.transfer", 20.0)], part, rest)
    assert [one.rule_id for one in judgement.findings] == ["rest", "part"]


def test_a_part_is_one_of_what_is_named_first() -> None:
    """56 ms of code that all ranks run are its 53 ms, and 3 of the 40 of a rank that runs more."""
    part = rule("part", part_of=("host.pause", "ranks.host")), finding("part", 56.0)
    late = rule("late", cause=("ranks",)), finding("late", 54.0)
    causes = [cause("host.pause", 53.0), cause("ranks.host", 40.0)]
    judgement, ledger = conclude(causes, part, late)
    assert {one.rule_id: one.cost_ms for one in judgement.findings} == {"part": 56.0, "late": 37.0}
    assert [one.told_by for one in ledger.causes] == [("part",), ("late",)]


def test_each_of_two_late_ranks_is_told() -> None:
    pairs = [
        (rule(name, cause=("ranks",), scope="rank"), replace(finding(name, 20.0), ranks=(rank,)))
        for name, rank in (("one", 1), ("other", 2))
    ]
    judgement, _ = conclude([cause("ranks.host", 20.0, ranks=(1, 2))], *pairs)
    assert {one.rule_id for one in judgement.findings} == {"one", "other"}


def test_a_preview_gates_in_place_of_the_stable_rule_that_gives_way_to_it() -> None:
    broad = rule("broad", cause=("link",), tells="time"), finding("broad", 30.0)
    preview = rule("sharp", cause=("link.transfer",), status="preview"), finding("sharp", 25.0)
    preview = preview[0], replace(preview[1], status="preview")
    (found,) = conclude([cause("link.transfer", 20.0)], broad, preview)[0].findings
    assert (found.in_place_of, found.gates) == (("broad",), True)
    (alone,) = conclude([cause("link.transfer", 20.0)], preview)[0].findings
    assert not alone.gates


# -- what no rule tells


def test_an_entry_that_no_rule_tells_is_a_finding_in_plain_words() -> None:
    entry = cause("ranks.host", 12.0, (6.0, 7.0, 8.0), ranks=(2,), place="the forward pass")
    judgement, ledger = conclude([entry])
    (found,) = judgement.findings
    assert (found.id, found.rule_id, found.topic) == ("ranks.host", "ranks.host", "straggler")
    assert found.title == "Ranks whose host is slower than its peers"
    assert (found.says, found.cost_ms) == ("rank 2, the forward pass", 12.0)
    assert found.message == f"{found.title} ({found.says})."
    assert (found.severity, found.ranks, found.steps) == ("warning", (2,), (3, 4))
    assert found.gain == Gain(6.0, 8.0, "ledger", (), 7.0)
    assert ledger.causes[0].told_by == ("ranks.host",)


@pytest.mark.parametrize(
    ("name", "alone_ms", "rule_id"),
    [
        ("order.gathers", 14.0, "syncs"),
        ("order.gathers", 9.0, "order.gathers"),
        ("input.wait", 14.0, "input.wait"),  # another thing to mend, if of the same time
    ],
)
def test_a_cause_that_is_the_time_of_another_is_told_with_it(
    name: str, alone_ms: float, rule_id: str
) -> None:
    """A part of 7 ms which saves 14 ms alone has 14 in common with the other; of 9 it has 4."""
    told = cause("host.sync", 8.0, (15.0, 15.0, 15.0))
    entry = cause(name, 7.0, (alone_ms,) * 3, shared_with="host.sync")
    _, ledger = conclude([told, entry], (rule("syncs", cause=("host.sync",)), finding("syncs", 40.0)))
    assert ledger.causes[1].told_by == (rule_id,)


@pytest.mark.parametrize(
    ("delays", "alone_ms", "ids"),
    [
        ("host.sync", 14.0, ["host.sync"]),
        ("host.sync", 9.0, ["gathers", "host.sync"]),  # 4 of 9 in common; no fix of the wait is known
        ("compute.fusion", 14.0, ["gathers", "compute.fusion"]),
    ],
)
def test_communication_that_something_makes_late_is_told_with_that(
    delays: str, alone_ms: float, ids: list[str]
) -> None:
    """A wait of the host saves 15 ms alone; the gathers that it makes late save up to 14 of them."""
    late = cause("order.gathers", 7.0, (alone_ms,) * 3, shared_with=delays)
    gathers = rule("gathers", cause=("order.gathers",), part_of=("link",), tells="time")
    judgement, ledger = conclude([cause(delays, 8.0, (15.0,) * 3), late], (gathers, finding("gathers", 9.0)))
    assert [one.id for one in judgement.findings] == ids
    assert ledger.causes[1].told_by == (("gathers",) if "gathers" in ids else (delays,))


@pytest.mark.parametrize(
    ("gathers_ms", "size_ms", "told"), [(1.9, 12.2, False), (2.0, 12.2, True), (1.9, 12.0, True)]
)
def test_a_rule_whose_own_cause_costs_nothing_tells_most_of_what_it_measured(
    gathers_ms: float, size_ms: float, told: bool
) -> None:
    """Of what it measured 6 ms are of an entry that it has in part; the rest is another's."""
    gathers = rule("gathers", cause=("order.gathers",), part_of=("link",)), finding("gathers", size_ms)
    causes = [cause("link.transfer", 6.0 - gathers_ms), cause("order.gathers", gathers_ms)]
    judgement, _ = conclude(causes, gathers)
    assert ("gathers" in {one.id for one in judgement.findings}) is told


def test_a_cause_that_no_rule_tells_has_the_reason_and_the_known_fixes_of_one_for_it() -> None:
    """Of rules that stand for it the first that is applicable; a fix that lacks a number is left out."""
    fixes = (
        RuleFix(framework="any", title="Launch less", risk="none", change="x = 1"),
        RuleFix(framework="any", title="Use {cores} threads", risk="none", change="x = 2"),
    )
    unfit = rule("other", stands_for=("host.launch",), why="no")
    standing = rule("slow-host", stands_for=("host.launch",), why="The host is slow.", fixes=fixes)
    verdicts = (Verdict("other", "not_applicable"), Verdict("slow-host", "pass"))
    judgement = Judgement((), verdicts, {one.id: one for one in (unfit, standing)})
    ledger = Ledger(100.0, 70.0, 0.0, (cause("host.launch", 30.0),), (3, 4), "high")
    found = concluded(judgement, ledger, measured())[0].findings[0]
    assert (found.rule_id, found.why) == ("host.launch", "The host is slow.")
    assert [fix.title for fix in found.fixes] == ["Launch less"]


@pytest.mark.parametrize(("share_ms", "told"), [(2.0, True), (1.9, False)])
def test_a_small_entry_is_not_told(share_ms: float, told: bool) -> None:
    judgement, _ = conclude([cause("host.sync", share_ms)])
    assert bool(judgement.findings) is told


def test_an_entry_is_not_told_where_the_user_left_its_rule_out() -> None:
    left_out = [rule("syncs", cause=("host.sync",))]
    judgement, ledger = conclude([cause("host.sync", 30.0), cause("link.transfer", 9.0)], left_out=left_out)
    assert severities(judgement) == [("link.transfer", "warning")]
    assert [one.told_by for one in ledger.causes] == [(), ("link.transfer",)]


def test_the_bubble_of_a_schedule_is_a_note_where_its_cost_puts_it() -> None:
    judgement, _ = conclude([cause("pipeline.bubble", 40.0), cause("host.launch", 3.0)])
    assert severities(judgement) == [("pipeline.bubble", "note"), ("host.launch", "note")]


@pytest.mark.parametrize(
    ("cause_id", "ranks", "last_ms", "shared"),
    [
        ("host.launch", (), 20.0, True),
        ("host.sync", (), 9.9, False),
        ("ranks.host", (2,), 20.0, False),
        ("pipeline.imbalance", (2,), 20.0, False),
    ],
)
def test_a_cause_that_all_ranks_share_is_every_ranks(
    cause_id: str, ranks: tuple[int, ...], last_ms: float, shared: bool
) -> None:
    """A finding is seen on rank 2; what rank 2 does beyond its peers is gone where all others are."""
    seen = replace(finding("slow", 30.0), ranks=(2,), says="it is slow", message="It is slow (rank 2).")
    pair = rule("slow", cause=(cause_id,), scope="rank"), seen
    one = LedgerCause(cause_id, 20.0, (20.0, 20.0, 20.0), last_ms, ranks)
    (told,) = conclude([one], pair)[0].findings
    assert told.ranks == ((0, 1, 2, 3) if shared else (2,))
    assert told.says == f"it is slow{' (every rank; rank 2 is the worst)' if shared else ''}"
    assert ("the other ranks have the cause as well" in told.message) is shared


# -- severity and order


@pytest.mark.parametrize(
    ("alone_ms", "severity"),
    [
        ((15.0, 20.0, 30.0), "critical"),
        ((14.9, 20.0, 30.0), "warning"),
        ((5.0, 20.0, 30.0), "warning"),
        ((0.0, 10.0, 30.0), "warning"),  # likely 10, in the middle 5
        ((0.0, 9.9, 30.0), "note"),
    ],
)
def test_severity_follows_from_what_is_sure_and_likely_to_be_saved(alone_ms: Range, severity: str) -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0, severity="critical")
    assert severities(conclude([cause("link.transfer", 20.0, alone_ms)], pair)[0]) == [("slow", severity)]


@pytest.mark.parametrize(("share_ms", "severity"), [(20.0, "critical"), (10.0, "warning"), (4.0, "note")])
def test_of_a_hidden_cause_its_share_counts(share_ms: float, severity: str) -> None:
    """Alone it gives nothing, and neither does what hides it: both together do."""
    nothing = (0.0, 0.0, 0.0)
    causes = [
        cause("link.transfer", share_ms, nothing, partner="host.sync"),
        cause("host.sync", share_ms, nothing),
    ]
    pair = rule("exposed", cause=("link",)), finding("exposed", 40.0)
    judgement, _ = conclude(causes, pair)
    told = [("exposed", severity)]
    # Of 4 % that mending it alone does not give nobody is told who has no rule for it.
    assert severities(judgement) == ([*told, ("host.sync", severity)] if share_ms > 5 else told)


def test_of_two_that_hide_each_other_the_one_that_saves_more_alone_speaks_for_both() -> None:
    """Mending the other one saves nothing before, however large its part is."""
    causes = [
        cause("link.transfer", 25.0, (0.0, 0.0, 0.0), partner="host.launch"),
        cause("host.launch", 20.0, (4.0, 4.0, 4.0), partner="link.transfer"),
    ]
    judgement, _ = conclude(causes)
    assert severities(judgement) == [("host.launch", "critical"), ("link.transfer", "note")]


def test_what_the_schedule_hides_weighs_what_it_gives_alone() -> None:
    entry = cause("host.sync", 20.0, (1.0, 1.0, 1.0), partner="pipeline.bubble")
    bubble = cause("pipeline.bubble", 30.0, partner="host.sync")
    assert severities(conclude([bubble, entry])[0]) == [("pipeline.bubble", "note"), ("host.sync", "note")]


@pytest.mark.parametrize(("on_cpu", "severity"), [("capped", "note"), ("as_usual", "critical")])
def test_shares_of_a_cpu_step_are_notes_unless_a_rule_knows_better(on_cpu: str, severity: str) -> None:
    pair = rule("slow", cause=("link",), on_cpu=on_cpu), finding("slow", 40.0)
    causes = [cause("link.transfer", 20.0), cause("input.wait", 30.0)]
    found = dict(severities(conclude(causes, pair, of=measured(is_cpu=True))[0]))
    assert found == {"slow": severity, "input.wait": "note"}


@pytest.mark.parametrize(("launches_ms", "severity"), [(0.0, "note"), (4.0, "note"), (4.1, "warning")])
def test_what_is_mostly_for_want_of_a_compiler_is_a_level_less_severe(
    launches_ms: float, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", lambda run, ids: (8.0, 8.0, 8.0))
    pair = rule("tiny", cause=("compute.small_kernels", "host.launch")), finding("tiny", 40.0)
    causes = [cause("compute.small_kernels", 4.0, (6.0,) * 3), cause("host.launch", launches_ms)]
    assert severities(conclude(causes, pair)[0]) == [("tiny", severity)]


def test_doubts_cap_severity() -> None:
    judgement, _ = conclude([cause("link.transfer", 20.0)], of=measured(confidence="medium"))
    assert severities(judgement) == [("link.transfer", "warning")]


@pytest.mark.parametrize(("share_ms", "first"), [(39.0, "slow"), (41.0, "host.sync")])
def test_what_a_rule_tells_comes_before_what_none_does_at_a_similar_size(share_ms: float, first: str) -> None:
    """At half the size a fix is worth more than the larger cause without one."""
    pair = rule("slow", cause=("link",)), finding("slow", 40.0)
    judgement, _ = conclude([cause("host.sync", share_ms), cause("link.transfer", 20.0)], pair)
    assert judgement.findings[0].rule_id == first


def test_findings_come_in_the_order_of_their_shares_whatever_their_bounds_are() -> None:
    small = rule("small", cause=("link",)), finding("small", 90.0, severity="critical")
    large = rule("large", cause=("input",)), finding("large", 30.0)
    judgement, _ = conclude([cause("input.wait", 25.0), cause("link.transfer", 20.0)], small, large)
    assert severities(judgement) == [("large", "critical"), ("small", "critical")]


# -- one gain


def test_a_gain_is_what_its_cause_gives() -> None:
    pair = rule("slow", cause=("link",)), finding("slow", 40.0, fix("Not played", None))
    (found,) = conclude([cause("link.transfer", 20.0, (10.0, 15.0, 18.0))], pair)[0].findings
    assert found.gain == Gain(10.0, 18.0, "ledger", ("all of it goes",), 15.0)


def test_several_causes_give_what_they_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two that hide each other gives nothing alone; played together they give 30 ms."""
    asked: list[tuple[str, ...]] = []

    def together(run: object, ids: tuple[str, ...]) -> Range:
        asked.append(ids)
        return 28.0, 30.0, 31.0

    monkeypatch.setattr(tracedoc.judge.overlaps, "alone_of", together)
    pair = rule("slow", cause=("link",)), finding("slow", 40.0)
    causes = [cause("link.transfer", 15.0, (0.0, 0.0, 0.0)), cause("link.latency", 15.0, (0.0, 0.0, 0.0))]
    (found,) = conclude(causes, pair)[0].findings
    assert asked == [("link.transfer", "link.latency")]
    assert found.gain == Gain(28.0, 31.0, "ledger", ("all of it goes",), 30.0)
    assert found.severity == "critical"
