"""Whatever fails by a fault of ours is missing from the answer, which says so, and the rest stands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

import tracedoc
from tracedoc import pipeline, worker
from tracedoc.cli import main
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import LOG, Failures, InputError
from tracedoc.facts.catalog import CATALOG
from tracedoc.judge import compose, findings
from tracedoc.ranks import strategy
from tracedoc.report import page as html
from tracedoc.report import terminal
from tracedoc.report.render import render
from tracedoc.step import rank_digest
from tracedoc.testing import parse_lanes
from tracedoc.timeline import build
from tracedoc.timeline.strategy_signs import StrategySigns

LANES = """
compute    0-60
allreduce  60-100   256MiB
"""


def fail(*given: object, **named: object) -> NoReturn:
    raise ZeroDivisionError("broken on purpose")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for rank, builder in enumerate(parse_lanes(LANES, ranks=2)):
        builder.write(folder / f"rank-{rank}.json")
    return folder


@pytest.fixture(scope="module")
def whole(run: Path) -> Diagnosis:
    """The diagnosis of which nothing fails."""
    return tracedoc.diagnose([run])


def internal_errors(diagnosis: Diagnosis) -> list[str]:
    return [limit.message for limit in diagnosis.limits if limit.code == "internal-error"]


def test_every_fact_fails_alone(run: Path, whole: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    """All facts fail at once: each is unknown with its error, and rules over them say error."""
    for name, definition in CATALOG.items():
        monkeypatch.setitem(CATALOG, name, _with_compute(definition))
    diagnosis = tracedoc.diagnose([run])
    assert len(diagnosis.ranks) == 2
    assert len(diagnosis.facts) == len(whole.facts)
    for record in diagnosis.facts.values():
        assert str(record.unknown).startswith("error: ZeroDivisionError")
    assert {verdict.outcome for verdict in diagnosis.verdicts} <= {"error", "not_applicable", "unknown"}


def _with_compute(definition: Any) -> Any:
    from msgspec.structs import replace

    return replace(
        definition, compute=fail, **({"spans": fail} if getattr(definition, "spans", None) else {})
    )


PARTS: list[tuple[object, str]] = [
    *((rank_digest, name) for name in ("_kernel_table", "strategy_signs", "host_digest", "gemm_table")),
    *(
        (rank_digest, name)
        for name in (
            "drawn_sets",
            "small_table",
            "gradient_rows",
            "work_table",
            "_judged_spans",
            "memory_table",
        )
    ),
    *((build, name) for name in ("find_phases", "_units", "_phase_budgets")),
    *(
        (compose, name)
        for name in ("collective_rows", "kernel_rows", "step_picture", "unit_rows", "host_detail")
    ),
    *((compose, name) for name in ("phase_rows", "summarise", "wait_table", "transfer_table")),
    *((compose, name) for name in ("unit_timeline", "memory_curve")),
    *((pipeline, name) for name in ("read_job", "job_limits", "ending_limits", "_source_steps")),
]


@pytest.mark.parametrize(("module", "name"), PARTS, ids=[name for _, name in PARTS])
def test_a_part_of_the_answer_fails_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    monkeypatch.setattr(module, name, fail)
    diagnosis = tracedoc.diagnose([run])
    assert diagnosis.budget is not None
    assert diagnosis.budget.step_ms == 100
    (message,) = internal_errors(diagnosis)
    assert "failed: ZeroDivisionError: broken on purpose" in message
    for report_format in ("text", "html", "json"):
        assert "broken on purpose" in render(diagnosis, report_format)


@pytest.mark.parametrize("place", range(len(strategy.WRAPPERS)))
def test_a_strategy_that_cannot_be_recognised_costs_itself(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    whole = strategy.WRAPPERS
    others = tuple(fail if number == place else one for number, one in enumerate(whole))
    monkeypatch.setattr(strategy, "WRAPPERS", others)
    signs = StrategySigns(whole=True, seen=frozenset({"ddp"}), marks=(("ddp", 1),), collectives=3)
    claim = strategy.decide([signs], 2)
    its_own = [one.__name__ for one in whole].index("ddp")
    assert (claim.name == "DDP") == (place != its_own)
    if place <= its_own:  # those after it are not asked
        assert claim.confidence == "low"
        assert claim.evidence[-1].endswith("is not known: ZeroDivisionError: broken on purpose")


@pytest.mark.parametrize("name", ["BESIDE", "by_hand"])
def test_what_runs_beside_a_strategy_costs_itself(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(strategy, name, (fail, *strategy.BESIDE) if name == "BESIDE" else fail)
    claim = strategy.decide([StrategySigns(collectives=3)], 2)
    assert (claim.name, claim.confidence) == (strategy.NOT_RECOGNISED, "low")
    assert "broken on purpose" in claim.evidence[-1]


def test_a_rule_that_failed_is_named_where_no_cause_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for builder in parse_lanes("step: 100\ncompute 0-97\nallreduce 40-100 64MiB", ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    usual: Callable[..., Any] = findings.verdict_of
    monkeypatch.setattr(
        findings,
        "verdict_of",
        lambda rule, *given: fail() if rule.id == "tiny-batch" else usual(rule, *given),
    )
    summary = tracedoc.diagnose([tmp_path]).summary
    assert summary.endswith("The rule tiny-batch failed and could not be judged.")


@pytest.mark.parametrize("step", ["verdict_of", "_finding"])
def test_a_rule_fails_alone(run: Path, whole: Diagnosis, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Each step of judging fails for one rule: that verdict is an error, the others are what they were."""
    said = whole.verdicts
    outcomes = {verdict.rule_id: verdict.outcome for verdict in said}
    broken = next(rule_id for rule_id, outcome in outcomes.items() if outcome == "finding")
    usual: Callable[..., Any] = getattr(findings, step)
    monkeypatch.setattr(
        findings, step, lambda rule, *given: fail() if rule.id == broken else usual(rule, *given)
    )
    diagnosis = tracedoc.diagnose([run])
    found = {verdict.rule_id: verdict for verdict in diagnosis.verdicts}
    assert found[broken].outcome == "error"
    assert "broken on purpose" in found[broken].reason
    assert broken not in {finding.rule_id for finding in diagnosis.findings}
    yielding = {one.rule_id for one in said if one.outcome == "yielded" and broken in one.reason}
    for rule_id, outcome in outcomes.items():
        assert rule_id in {broken, *yielding} or found[rule_id].outcome == outcome


@pytest.mark.parametrize("name", terminal.SECTIONS)
def test_a_part_of_the_text_fails_alone(whole: Diagnosis, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from tracedoc.report.view import build_view

    view = build_view(whole)
    verdicts = name == "verdicts"
    usual = terminal.render_text(view, next_command="next", verdicts=verdicts)
    monkeypatch.setitem(terminal.SECTIONS, name, fail)
    shown = terminal.render_text(view, next_command="next", verdicts=verdicts)
    assert f"The part with {name} could not be shown: ZeroDivisionError" in shown
    assert shown.splitlines()[0] == usual.splitlines()[0]
    assert shown.splitlines()[-1] == usual.splitlines()[-1]


@pytest.mark.parametrize(
    "name",
    [
        *("columns_of", "draw", "rank_rows", "steps_of_ranks", "phase_table", "collective_table"),
        *("by_category", "heat_map", "scatter", "memory_chart", "unit_chart", "step_words", "unchecked"),
    ],
)
def test_a_table_of_the_page_fails_alone(
    whole: Diagnosis, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(html, name, fail)
    page = render(whole, "html")
    assert "failed: ZeroDivisionError: broken on purpose" in page
    assert page.rstrip().endswith("</html>")


def test_a_part_of_the_page_fails_alone() -> None:
    assert html._part("verdicts", lambda: "shown") == "shown"
    assert "verdicts could not be shown: ZeroDivisionError" in html._part("verdicts", fail)


def test_a_rank_that_cannot_be_measured_costs_that_rank(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = worker.measure_rank
    monkeypatch.setattr(
        worker, "measure_rank", lambda timeline, rank: fail() if rank == 1 else measure(timeline, rank=rank)
    )
    diagnosis = tracedoc.diagnose([run], tracedoc.Options(jobs=1))
    assert [report.rank for report in diagnosis.ranks] == [0]
    (limit,) = [one for one in diagnosis.limits if one.code == "unread-file"]
    assert "by a fault of tracedoc's (ZeroDivisionError: broken on purpose)" in limit.message
    with pytest.raises(InputError, match="by a fault of tracedoc's"):
        tracedoc.diagnose([run / "rank-1.json"])


def test_debug_shows_where(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compose, "kernel_rows", fail)
    with caplog.at_level(logging.DEBUG, LOG.name):
        done = CliRunner().invoke(main, ["diagnose", str(run), "--debug", "-f", "json"])
    assert json.loads(done.stdout)["budget"]["step_ms"] == 100
    assert 'raise ZeroDivisionError("broken on purpose")' in caplog.text


def test_what_users_are_to_be_told_and_a_lack_of_memory_pass() -> None:
    def raise_this(error: BaseException) -> Callable[[], NoReturn]:
        def make() -> NoReturn:
            raise error

        return make

    failures = Failures()
    for error in (InputError("no"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            failures.contain("it", raise_this(error), None)
    assert failures.contain("it", raise_this(KeyError("x" * 900)), 5) == 5
    assert len(failures.limits[0].message) < 300
