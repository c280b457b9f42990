"""Figures for slides and papers: what they show, that they are safe, and the same each time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.example_diagnoses import HOSTILE, sharded
from tracedoc.cli import main
from tracedoc.diagnosis import BUDGET_PARTS, Detail, Diagnosis
from tracedoc.diagnosis_json import to_json
from tracedoc.errors import InputError
from tracedoc.report.figures import HATCHES, LABEL, colours, diagnosis_figure
from tracedoc.report.render import render_file
from tracedoc.report.view import build_view
from tracedoc.report.words import STATES

BEGINS = {"png": b"\x89PNG\r\n", "pdf": b"%PDF-", "svg": b"<?xml"}


def panel(figure: Any, title: str) -> Any:
    """Return the axes under a title."""
    return next(axis for axis in figure.axes if axis.get_title(loc="left").startswith(title))


@pytest.fixture(scope="module")
def figure() -> Any:
    return sharded().figure()


def test_budgets_are_stacked_and_as_long_as_the_step(figure: Any) -> None:
    """Rank 0: compute 250, transfer 40, waiting 90, copies 2, idle 10, 5 and 3 by cause; 400 ms in all."""
    bars = [bar for bar in panel(figure, "Where the median step").patches if round(bar.get_y() + 0.4) == 0]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        (0, 250), (250, 40), (290, 90), (380, 2), (382, 10), (392, 5), (397, 3),
    ]  # fmt: skip


def test_the_ledger_is_drawn_from_todays_step_to_the_ideal_one(figure: Any) -> None:
    """Of 420 ms the first row takes 86, so that its bar begins at 334; the ideal step begins at 0."""
    bars = panel(figure, "What costs the step").patches
    drawn = [end for bar in bars[:2] for end in (bar.get_x(), bar.get_width())]
    assert drawn == pytest.approx([0, 1, 334 / 420, 86 / 420])
    assert bars[-1].get_x() == 0
    words = [label.get_text() for label in panel(figure, "What costs the step").get_yticklabels()]
    assert (words[0], words[-1]) == ("today's step", "ideal step")


def test_heat_map_has_the_waits_that_the_page_has(figure: Any) -> None:
    """Ranks 0 and 5 in steps 5 and 6, of which nothing is known of rank 5 in the last."""
    (image,) = panel(figure, "Exposed waiting").get_images()
    assert image.get_array().tolist() == [[90.0, 45.0], [10.0, None]]


def test_the_late_rank_stands_out(figure: Any) -> None:
    labels = panel(figure, "Step 5, all ranks on one clock").get_yticklabels()
    assert [(label.get_text(), label.get_fontweight()) for label in labels] == [
        ("rank 0", "normal"),
        ("rank 5", "bold"),
    ]


def test_timeline_has_each_state_at_its_time(figure: Any) -> None:
    drawn = panel(figure, "Step 5").patches
    (waits,) = (patch.get_path().vertices for patch in drawn if patch.get_hatch() == HATCHES["wait"])
    # Rank 0 is the first row, rank 5 the second.
    assert [(bar[0][0], bar[1][0], bar[0][1]) for bar in waits.reshape(-1, 5, 2)] == [
        (200, 290, -0.4),
        (350, 360, 0.6),
    ]


def test_critical_path_runs_through_the_late_rank(figure: Any) -> None:
    (line,) = (line for line in panel(figure, "Step 5").lines if line.get_label() == LABEL)
    at = dict(zip(*line.get_data(), strict=True))
    # Rank 5 is the second row; the host runs above its bar, communication below it.
    assert [round(at[ms], 2) for ms in (280.0, 350.0, 390.0)] == [0.59, 1.44, 1.44]
    assert min(at) == 0.0
    assert max(at) == 390.0


def test_no_two_colours_that_meet_are_one_in_grey() -> None:
    """By relative luminance as in ITU-R BT.709; patterns tell apart what is alike."""

    def grey(key: str) -> float:
        red, green, blue = (int(colours()[key][at : at + 2], 16) / 255 for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    keys = [key for key, _, _ in BUDGET_PARTS]
    for first, second in combinations(keys, 2):
        alike = abs(grey(first) - grey(second)) < 0.1
        assert not alike or HATCHES.get(first) != HATCHES.get(second), (first, second)
    assert {key for key, _ in STATES.values()} <= set(colours())
    assert set(HATCHES) <= set(colours())


@pytest.mark.parametrize("file_format", sorted(BEGINS))
def test_figure_has_one_file(file_format: str) -> None:
    diagnosis = replace(sharded(), summary=f"Costs $5_{{6}} in `f` and {HOSTILE}")
    content = render_file(diagnosis, file_format)
    assert content.startswith(BEGINS[file_format])
    if file_format == "svg":
        assert content == render_file(diagnosis, file_format), "no date, no random number"
        assert b"<script" not in content
        text = " ".join(ElementTree.fromstring(content).itertext())
        assert "$5_{6}" in text, "no formula"
        assert "`" not in text
        assert "gpu-node" not in text
        assert not re.search(rb'(?:href|src)="(?!#|data:image/)', content), "nothing is fetched"


def test_capture_without_a_step_has_no_figure() -> None:
    nothing: Diagnosis = replace(sharded(), ranks=(), detail=Detail(), ledger=None)
    with pytest.raises(InputError, match="no step to draw"):
        diagnosis_figure(build_view(nothing))


def test_settings_of_the_user_stay(figure: Any) -> None:
    import matplotlib

    assert matplotlib.rcParams["axes.spines.top"] is True
    assert not figure.axes[0].spines["top"].get_visible()


def test_commands_write_figures(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(to_json(sharded()), encoding="utf-8")
    figure, waterfall = tmp_path / "figure.pdf", tmp_path / "waterfall.png"
    done = CliRunner().invoke(main, ["report", str(before), "-o", str(figure)])
    assert done.exit_code == 0, done.stderr
    assert f"wrote {figure}" in done.stderr
    assert figure.read_bytes().startswith(BEGINS["pdf"])
    done = CliRunner().invoke(main, ["compare", str(before), str(before), "-o", str(waterfall)])
    assert done.exit_code == 0, done.stderr
    assert waterfall.read_bytes().startswith(BEGINS["png"])
