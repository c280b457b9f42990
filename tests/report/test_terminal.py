"""The text report: answer first, next command last, no line too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import DIAGNOSES, sharded
from tests.golden import REFRESH
from tracedoc.predicted import Predicted, ReplayReport
from tracedoc.report.terminal import bar_cells, render_text, to_ascii
from tracedoc.report.view import Segment, build_view
from tracedoc.tables import KernelRow

NEXT = "tracedoc diagnose runs/a -o report.html"


def shown(name: str, **options: object) -> str:
    return render_text(build_view(DIAGNOSES[name]()), next_command=NEXT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_answer_is_the_first_line_and_next_command_the_last(name: str):
    lines = shown(name).splitlines()
    assert lines[0] == build_view(DIAGNOSES[name]()).diagnosis.summary
    assert lines[-1] == f"next: {NEXT}"


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
@pytest.mark.parametrize("verdicts", [False, True])
def test_text_without_colour_holds_no_control_character(name: str, verdicts: bool):
    assert all(character == "\n" or character.isprintable() for character in shown(name, verdicts=verdicts))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
@pytest.mark.parametrize("width", [40, 60, 110])
def test_lines_fit_the_terminal_but_for_code_and_the_command(name: str, width: int):
    code = [
        line
        for finding in DIAGNOSES[name]().findings
        for fix in finding.fixes
        for line in fix.change.split("\n")
    ]
    lines = shown(name, width=width).splitlines()[:-1]
    too_wide = [
        line for line in lines if len(line) > width and line.strip() not in {part.strip() for part in code}
    ]
    assert not [line for line in too_wide if "script" not in line and ": tracedoc explain" not in line]


def test_colour_is_only_there_when_asked_for():
    assert "\x1b[" in shown("sharded", width=100, color=True)
    assert "\x1b[" not in shown("sharded", width=100)


def test_trace_cannot_colour_the_terminal():
    assert "\x1b[31m" not in shown("hostile", width=100, color=True).replace("\x1b[31m\x1b", "")
    assert "[bold red]" in shown("hostile", width=100)


def test_verdicts_name_each_rule_with_its_comparison():
    text = shown("sharded", verdicts=True)
    assert all(verdict.rule_id in text for verdict in sharded().verdicts)
    assert "late_ms / step_ms > min_share  holds: 0.23 against 0.05" in text
    assert "mfu < min_mfu  unknown: ? against 0.3 (shapes were not recorded)" in text


def test_guard_of_the_capture_is_a_limit_with_its_fix():
    diagnosis = sharded()
    guard = replace(diagnosis.findings[1], topic="capture", rule_id="few-steps", gain=None)
    text = render_text(build_view(replace(diagnosis, findings=(guard,))), next_command=NEXT)
    assert f"{guard.message.removesuffix('.')} [few-steps]" in " ".join(text.split())
    assert "   fix   " in text
    assert not any(word in text for word in ("Findings", "   why   ", "   risk  "))


def test_only_the_first_finding_gives_its_reasons():
    first, second = (item.finding for item in build_view(sharded()).findings)
    text = " ".join(shown("sharded").split())
    assert f"why {first.why}" in text
    assert second.why not in text
    assert "more why, 1 other fix: tracedoc explain exposed-communication" in text


def test_bar_gives_every_part_a_cell_and_fills_the_width():
    parts = tuple(Segment(str(share), "", share, share) for share in (0.9, 0.097, 0.003))
    assert bar_cells(parts, 10) == (8, 1, 1)
    assert sum(bar_cells(parts, 80)) == 80
    assert bar_cells((), 80) == ()


def test_bar_stays_readable_in_ascii():
    text = to_ascii(shown("sharded"))
    assert text.isascii()
    assert "# compute" in text
    assert "~ waiting for peers" in text


@pytest.mark.parametrize("name", ["sharded", "healthy", "cpu"])
def test_report_reads_like_its_golden_file(name: str):
    golden = Path(__file__).parent / "golden" / f"{name}.txt"
    assert shown(name) == golden.read_text(encoding="utf-8"), REFRESH


def test_top_lists_so_many_kernels_and_collectives_with_most_time_first() -> None:
    diagnosis = DIAGNOSES["sharded"]()
    kernels = tuple(KernelRow(f"kernel_{n}", "gemm", n, float(n)) for n in (1, 3, 2))
    view = build_view(replace(diagnosis, detail=replace(diagnosis.detail, kernels=kernels)))
    text = render_text(view, next_command=NEXT, top=2)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("kernel_")] == [
        "kernel_3",
        "kernel_2",
    ]
    assert "\nKernels  " not in render_text(view, next_command=NEXT)


def test_a_replayed_fix_is_followed_by_the_command_that_replays_it() -> None:
    diagnosis = DIAGNOSES["sharded"]()
    predicted = Predicted("gather-ahead units=2", (78.0, 80.0, 82.0), (3.0, 5.0, 7.0), "compute", "high")
    fix = replace(diagnosis.findings[0].fixes[0], replays="gather-ahead units=2", predicted=predicted)
    findings = (replace(diagnosis.findings[0], fixes=(fix,)), *diagnosis.findings[1:])
    replay = ReplayReport("used", step_ms=85.0)
    view = build_view(replace(diagnosis, findings=findings, replay=replay))
    assert "\n   try   tracedoc whatif runs/a 'gather-ahead units=2'\n" in render_text(
        view, next_command=NEXT, run="runs/a"
    )
