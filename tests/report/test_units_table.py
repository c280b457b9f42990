"""The table of sharded units in the page and on the terminal."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tests.example_diagnoses import healthy, sharded
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json, to_json
from tracedoc.report.page import render_html
from tracedoc.report.terminal import render_text
from tracedoc.report.view import build_view
from tracedoc.tables import UnitRow

ROW = UnitRow(
    name="layers.0", phase="forward", nbytes=256 * 2**20, gathers_per_step=1.0, gather_ms=2.5, wait_ms=0.5,
    transfer_ms=2.0, launch_lag_ms=-30.0, compute_beside_ms=8.0, stall_ms=1.5, units_ahead=0,
    reductions_per_step=0.0, reduction_ms=None, reduction_stall_ms=None,
)  # fmt: skip


def with_units(*rows: UnitRow, topic: str = "sharding") -> Diagnosis:
    diagnosis = sharded()
    findings = (replace(diagnosis.findings[0], topic=topic), *diagnosis.findings[1:])
    return replace(diagnosis, findings=findings, detail=replace(diagnosis.detail, units=rows))


def text_of(diagnosis: Diagnosis) -> str:
    return render_text(build_view(diagnosis), next_command="true")


def test_page_has_a_row_for_each_unit_and_leaves_unknown_cells_empty() -> None:
    page = render_html(build_view(with_units(ROW, replace(ROW, name="layers.<1>", stall_ms=None))))
    (first, second) = re.findall(r'<tr><th scope="row">layers.*?</tr>', page)
    assert re.findall(r">([^<>]+)</td>", first) == [
        "forward", "256 MiB", "1", "30 ms ahead", "2.5 ms", "0.5 ms", "2 ms", "8 ms", "1.5 ms", "0",
    ]  # fmt: skip
    assert "layers.&lt;1&gt;" in second


def test_page_without_units_has_no_such_table() -> None:
    assert "Sharded units" not in render_html(build_view(healthy()))


def test_terminal_shows_the_units_that_stall_most_beside_a_finding_about_sharding() -> None:
    rows = [replace(ROW, name=f"layers.{k}", stall_ms=float(k)) for k in range(9)]
    shown = [
        line.split() for line in text_of(with_units(*rows)).splitlines() if line.strip().startswith("layers.")
    ]
    assert [line[0] for line in shown] == [f"layers.{k}" for k in (8, 7, 6, 5, 4, 3)]
    assert shown[0][1:] == [
        "forward",
        "256",
        "MiB",
        "2.5",
        "ms",
        "2",
        "ms",
        "8",
        "ms",
        "8",
        "ms",
    ]


def test_terminal_keeps_the_table_back_where_no_finding_is_about_sharding() -> None:
    assert "Sharded units" not in text_of(with_units(ROW, topic="communication"))


def test_units_survive_the_way_through_json() -> None:
    diagnosis = with_units(ROW)
    assert from_json(to_json(diagnosis)).detail.units == (ROW,)
