"""What else differs: settings, lines of the script, collectives, counts; and whose step is compared."""

from __future__ import annotations

from msgspec.structs import replace

from tests.example_diagnoses import sharded
from tracedoc.comparison.compare import compare
from tracedoc.comparison.differences import finding_changes
from tracedoc.comparison.waterfall import compared_budget, late_rank
from tracedoc.diagnosis import Budget, BudgetLocation, Comparison, Diagnosis, FactRecord, Verdict
from tracedoc.tables import CollectiveRow


def with_settings(**settings: str) -> Diagnosis:
    base = sharded()
    return replace(base, run=replace(base.run, settings=settings))


def with_facts(**facts: FactRecord) -> Diagnosis:
    base = sharded()
    return replace(base, facts={**base.facts, **facts})


def row(calls: float, nbytes: int, time_ms: float) -> CollectiveRow:
    return CollectiveRow(
        op="all_reduce",
        group="default",
        group_size=8,
        dtype="float",
        calls_per_step=calls,
        bytes_median=nbytes,
        bytes_per_step=nbytes,
        time_ms=time_ms,
        exposed_ms=time_ms,
        wait_ms=None,
        transfer_ms=None,
        busbw_gbps=None,
    )


def test_versions_and_variables_that_differ_are_settings() -> None:
    found = compare(
        with_settings(torch="2.4.0", cuda="12.4", NCCL_ALGO="Ring"),
        with_settings(torch="2.9.1", cuda="12.4", NCCL_DEBUG="INFO"),
    )
    assert [(one.name, one.base, one.head) for one in found.settings] == [
        ("torch", "2.4.0", "2.9.1"),
        ("NCCL_ALGO", "Ring", "not set"),
        ("NCCL_DEBUG", "not set", "INFO"),
    ]
    assert [limit.code for limit in found.limits] == ["other-version", "missing-ranks", "missing-ranks"]


def test_side_without_a_manifest_has_unknown_settings() -> None:
    assert compare(with_settings(), with_settings(torch="2.9.1")).settings == ()


def test_lines_of_the_script_that_differ_are_named() -> None:
    def blaming(place: str) -> Diagnosis:
        return with_facts(host_code=FactRecord("text", "rank", place))

    found = compare(blaming("`log` (`train.py:40`)"), blaming("`save` (`train.py:52`)"))
    assert [(one.base, one.head) for one in found.places] == [
        ("`log` (`train.py:40`)", "`save` (`train.py:52`)")
    ]
    assert compare(blaming("none"), blaming("none")).places == ()


def test_collectives_that_changed_have_both_sides() -> None:
    base = sharded()
    before = replace(base, detail=replace(base.detail, collectives=(row(80, 5_000_000, 100.0),)))
    after = replace(base, detail=replace(base.detail, collectives=(row(1, 5_000_000, 12.0),)))
    (change,) = compare(before, after).collectives
    assert (change.op, change.base_calls, change.head_calls) == ("all_reduce", 80, 1)
    assert (change.base_bytes, change.head_bytes) == (5_000_000, 5_000_000)
    assert (change.base_ms, change.head_ms) == (100.0, 12.0)
    assert compare(before, before).collectives == ()
    gone = replace(base, detail=replace(base.detail, collectives=()))
    assert compare(before, gone).collectives[0].head_calls == 0


def test_count_that_ranks_of_one_run_disagree_on_did_not_move() -> None:
    def buckets(*counts: int) -> Diagnosis:
        values = {str(rank): count for rank, count in enumerate(counts)}
        return with_facts(gradient_buckets=FactRecord("count", "rank", counts[0], values=dict(values)))

    assert compare(buckets(3, 4), buckets(4, 4)).facts == ()
    (moved,) = compare(buckets(3, 4), buckets(80, 81)).facts
    assert (moved.base, moved.head) == (3, 80)


def straggling(costs: dict[str, float]) -> Diagnosis:
    """Return a run that rank 5 stands for, whose step holds no waiting."""
    whole = sharded()
    late = next(rank for rank in whole.ranks if rank.rank == 5)
    assert late.budget is not None
    values: dict[str, float | int | str | bool | dict[str, str]] = dict(costs)
    record = FactRecord("ms", "rank", costs.get("5"), values=values)
    return replace(whole, budget=late.budget, facts={**whole.facts, "straggler_cost_ms": record})


def test_straggler_s_step_is_seen_from_a_rank_that_waits_for_it() -> None:
    seen = compared_budget(straggling({"0": 0.0, "5": 80.0}))
    assert seen is not None
    assert seen.at is not None
    assert seen.at.rank != 5
    assert seen.exposed_wait_ms == 90


def test_of_two_ranks_that_wait_the_shorter_step_is_seen() -> None:
    run = straggling({"5": 80.0})
    assert run.ranks[0].budget is not None
    lengths = {0: 200.0, 1: 100.0}
    waiting = tuple(
        replace(rank, budget=replace(run.ranks[0].budget, step_ms=lengths[rank.rank]))
        for rank in run.ranks
        if rank.rank in lengths
    )
    late = tuple(rank for rank in run.ranks if rank.rank == 5)
    seen = compared_budget(replace(run, ranks=(*waiting, *late)))
    assert seen is not None
    assert seen.step_ms == 100


def test_finding_is_fixed_where_its_rule_passed_and_not_where_it_could_not_be_judged() -> None:
    base = sharded()
    gone = base.findings[0].rule_id

    def after(outcome: str, *holds: bool) -> list[tuple[str, str]]:
        kept = tuple(one for one in base.findings if one.rule_id != gone)
        compared = tuple(Comparison("a > b", 2, 1, one) for one in holds)
        head = replace(base, findings=kept, verdicts=(Verdict(gone, outcome, compared),))
        return [(one.rule_id, one.state) for one in finding_changes(base, head) if one.rule_id == gone]

    assert after("pass") == [(gone, "fixed")]
    assert after("unknown") == []
    # Its conditions hold as before; it is told with another finding, or costs little.
    assert after("yielded", True, True) == after("pass", True) == []
    assert after("pass", True, False) == [(gone, "fixed")]


def test_rank_that_hardly_costs_the_others_stands_for_the_run() -> None:
    run = straggling({"0": 0.0, "5": 7.0})  # of 400 ms
    assert late_rank(run) is None
    assert compared_budget(run) is run.budget


def test_unknown_costs_are_no_straggler() -> None:
    run = straggling({})
    record = FactRecord("ms", "rank", None, "no collective", {"5": {"unknown": "no collective"}})
    unknown = replace(run, facts={"straggler_cost_ms": record})
    assert late_rank(unknown) is None
    assert isinstance(compared_budget(unknown), Budget)
    assert compared_budget(replace(unknown, budget=None)) is None
    assert BudgetLocation(5, 5) == compared_budget(unknown).at  # type: ignore[union-attr]


def test_one_process_has_no_strategy_to_compare() -> None:
    base, head = sharded(), sharded()
    single = replace(base.run.strategy, name="single process")
    base = replace(base, run=replace(base.run, world_size=1, ranks_seen=(0,), strategy=single, backend=""))
    head = replace(head, run=replace(head.run, ranks_seen=tuple(range(8))))
    found = compare(base, head, scaling="weak")
    assert found.limits == ()
    assert "backend" not in [one.name for one in found.settings]
