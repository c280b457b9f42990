"""``tracedoc history``: the runs of a folder as a table, as JSON, and as a figure."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.example_diagnoses import HOSTILE, sharded
from tracedoc.cli import main
from tracedoc.diagnosis import Diagnosis, Verdict
from tracedoc.diagnosis_json import to_json


def history(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["history", *arguments])


def keep(folder: Path, name: str, diagnosis: Diagnosis, made: int) -> None:
    file = folder / f"{name}.json"
    file.write_text(to_json(diagnosis), encoding="utf-8")
    os.utime(file, (made, made))


def healed() -> Diagnosis:
    """Return the run without its straggler: every step 80 ms shorter, and that rule passed."""
    base = sharded()
    assert base.budget is not None
    ranks = tuple(
        replace(rank, steps=tuple(replace(step, step_ms=step.step_ms - 80) for step in rank.steps))
        for rank in base.ranks
    )
    budget = replace(base.budget, step_ms=320.0, exposed_wait_ms=10.0, exposed_comm_ms=50.0)
    verdicts = tuple(one for one in base.verdicts if one.rule_id != "straggler-rank")
    verdicts = (*verdicts, Verdict("straggler-rank", "pass"))
    findings = tuple(one for one in base.findings if one.rule_id != "straggler-rank")
    return replace(base, ranks=ranks, budget=budget, findings=findings, verdicts=verdicts, ledger=None)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    keep(folder, "zz-first", sharded(), 1000)
    keep(folder, "aa-second", healed(), 2000)
    return folder


def test_runs_come_oldest_first_with_what_a_fix_gave(runs: Path) -> None:
    result = history(str(runs), "-f", "json")
    assert result.exit_code == 0, result.stderr
    first, second = json.loads(result.stdout)["runs"]
    assert (first["name"], second["name"]) == ("zz-first.json", "aa-second.json")
    assert (first["step_ms"], second["step_ms"]) == (400, 320)
    assert (first["verdict"], second["verdict"]) == ("", "improved")
    assert second["realised_ms"] == 80
    (fixed,) = [one for one in second["fixed"] if one["rule_id"] == "straggler-rank"]
    assert fixed["predicted_ms"] == [10, 90]


def test_steps_are_those_of_the_ledgers_where_every_run_has_one(tmp_path: Path) -> None:
    """As ``diagnose`` tells them: 420 ms on average, where the analysed step takes 400."""
    keep(tmp_path, "first", sharded(), 1000)
    ledger = sharded().ledger
    assert ledger is not None
    keep(tmp_path, "second", replace(healed(), ledger=replace(ledger, step_ms=336.0)), 2000)
    first, second = json.loads(history(str(tmp_path), "-f", "json").stdout)["runs"]
    assert (first["step_ms"], second["step_ms"]) == (420, 336)
    assert sum(first["parts_ms"].values()) == pytest.approx(420)
    assert sum(second["parts_ms"].values()) == pytest.approx(336)


@pytest.mark.parametrize(
    ("captured", "order"),
    [
        (("2026-11-02T10:00:00Z", "2026-11-01T10:00:00Z"), ["aa-second.json", "zz-first.json"]),
        (("2026-11-02T10:00:00Z", ""), ["zz-first.json", "aa-second.json"]),
    ],
)
def test_the_time_of_capture_comes_before_that_of_the_files(
    tmp_path: Path, captured: tuple[str, str], order: list[str]
) -> None:
    for name, diagnosis, at, made in zip(
        ("zz-first", "aa-second"), (sharded(), healed()), captured, (1000, 2000), strict=True
    ):
        keep(tmp_path, name, replace(diagnosis, run=replace(diagnosis.run, captured_at=at)), made)
    assert [one["name"] for one in json.loads(history(str(tmp_path), "-f", "json").stdout)["runs"]] == order


def test_unrelated_jobs_are_kept_apart(tmp_path: Path) -> None:
    """A job of another model between two runs of one: these are compared with each other, not with it."""
    models = (("a", sharded(), "7000000"), ("b", sharded(), "13000000"), ("c", healed(), "7000000"))
    for number, (name, found, parameters) in enumerate(models):
        run = replace(found.run, settings={"parameters": parameters})
        keep(tmp_path, name, replace(found, run=run), 1000 * number)
    runs = json.loads(history(str(tmp_path), "-f", "json").stdout)["runs"]
    assert [(one["name"], one["job"], one["verdict"]) for one in runs] == [
        ("a.json", 1, ""), ("c.json", 1, "improved"), ("b.json", 2, ""),
    ]  # fmt: skip
    assert history(str(tmp_path)).stdout.startswith("3 runs of 2 jobs that have nothing in common")


def test_a_job_on_gpus_and_one_on_cpus_are_unrelated(tmp_path: Path, sample_traces: Path) -> None:
    """Nothing ties them: the one on CPUs has no kernels at all."""
    for name in ("cpu_ddp_healthy", "synthetic_ddp_tiny_batch"):
        (tmp_path / name).symlink_to(sample_traces / name)
    runs = json.loads(history(str(tmp_path), "-f", "json").stdout)["runs"]
    assert [one["job"] for one in runs] == [1, 2]


def test_text_has_a_row_for_each_run(runs: Path) -> None:
    lines = history(str(runs)).stdout.splitlines()
    assert lines[0] == "2 runs: 400 ms -> 320 ms a step; one finding was fixed."
    titles = ["Run", "GPUs", "step", "computing", "change", "verdict", "costs most"]
    assert lines[1] == runs.name
    assert re.split(r"\s{2,}", lines[3]) == titles
    assert "ranks whose host is slower than its peers 88 ms" in " ".join(lines)
    assert any("predicted up to 90 ms" in line or "predicted 10 to 90 ms" in line for line in lines)


def test_figures_and_pages_are_written(runs: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"history.{kind}" for kind in ("png", "svg", "html", "md")]
    result = history(str(runs), *(word for name in names for word in ("-o", str(name))))
    assert result.exit_code == 0, result.stderr
    assert names[0].read_bytes().startswith(b"\x89PNG\r\n")
    assert "waiting for peers" in names[1].read_text()
    assert names[2].read_text().startswith("<!doctype html>")
    assert names[3].read_text().startswith("<!-- tracedoc -->\n### 2 runs")


def test_what_holds_no_run_is_listed_with_its_reason(runs: Path) -> None:
    (runs / "empty").mkdir()
    (runs / "cut.json").write_text(to_json(sharded())[:3000], encoding="utf-8")
    (runs / "notes.txt").write_text("not a run", encoding="utf-8")
    result = history(str(runs))
    assert result.exit_code == 0
    assert "Not compared" in result.stdout
    assert "empty: " in result.stdout
    assert "cut.json: " in result.stdout
    assert "notes.txt" not in result.stdout


def test_diagnosis_beside_a_folder_stands_for_it(runs: Path) -> None:
    (runs / "zz-first").mkdir()
    assert len(json.loads(history(str(runs), "-f", "json").stdout)["runs"]) == 2


def test_run_without_a_step_says_so(runs: Path) -> None:
    keep(runs, "broken", replace(sharded(), budget=None), 3000)
    last = json.loads(history(str(runs), "-f", "json").stdout)["runs"][-1]
    assert (last["step_ms"], last["problem"]) == (None, "no step to analyse")
    assert "no step to analyse" in history(str(runs)).stdout


def test_names_stay_text(runs: Path, tmp_path: Path) -> None:
    keep(runs, "x", replace(sharded(), findings=(replace(sharded().findings[0], rule_id=HOSTILE),)), 3000)
    page = tmp_path / "h.html"
    history(str(runs), "-o", str(page), "-o", str(tmp_path / "h.svg"))
    assert "<script" not in page.read_text()


@pytest.mark.parametrize("what", ["no such folder", ""])
def test_folder_without_runs_is_an_error(tmp_path: Path, what: str) -> None:
    result = history(str(tmp_path / what))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "hint: give the folder that holds the runs" in result.stderr
