"""Options that commands share: the format of what is printed, quiet, and the page in a browser."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.example_diagnoses import sharded
from tracedoc.cli import main
from tracedoc.collector import launcher
from tracedoc.diagnosis_json import to_json
from tracedoc.run.manifest import read_manifest

PLAN = ("plan", "--params", "7B", "--gpus", "2", "--gpu", "H100")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    file = tmp_path / "diagnosis.json"
    file.write_text(to_json(sharded()), encoding="utf-8")
    return str(file)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a browser is asked for; none opens."""
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: pages.append(url) or True)
    return pages


@pytest.mark.parametrize(
    "command",
    [
        ("diagnose", "RUN"),
        ("facts", "RUN"),
        ("whatif", "RUN"),
        ("whatif", "RUN", "--list"),
        ("kernels", "RUN"),
        ("rules", "list"),
        PLAN,
        ("explain", "tiny-batch"),
        ("explain", "exposed_comm_ms"),
        ("explain", "zero-3"),
    ],
    ids=" ".join,
)
def test_every_command_that_prints_data_prints_json(command: tuple[str, ...], sample_traces: Path):
    trace = str(sample_traces / "synthetic_ddp_tiny_batch" / "rank-0.json.gz")
    words = [trace if word == "RUN" else word for word in command]
    result = run(*words, "-f", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_explained_rule_is_whole_in_json():
    rule = json.loads(run("explain", "tiny-batch", "-f", "json").stdout)["rule"]
    assert "mean_kernel_ms <" in rule["when"]
    threshold = rule["params"]["launch_cost_ms"]
    assert (threshold["value"], threshold["unit"]) == (0.01, "ms")
    assert rule["fixes"][0]["change"]
    assert rule["needs"] == sorted(rule["needs"])


def test_name_of_nothing_is_an_error_in_json_too():
    result = run("explain", "nothing-of-ours", "-f", "json")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("command", [("facts", "RUN"), ("whatif", "RUN", "--list")], ids=" ".join)
def test_json_has_its_old_option_too(command: tuple[str, ...], sample_traces: Path):
    trace = str(sample_traces / "synthetic_ddp_tiny_batch" / "rank-0.json.gz")
    words = [trace if word == "RUN" else word for word in command]
    assert run(*words, "--json").stdout == run(*words, "-f", "json").stdout


def test_quiet_says_nothing_beside_the_result(saved: str, tmp_path: Path):
    page = tmp_path / "report.html"
    assert run("report", saved, "-o", str(page)).stderr.endswith(f"wrote {page}\n")
    quiet = run("report", saved, "-o", str(page), "-q")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
    assert run("report", saved, "-q").stdout == run("report", saved).stdout


def test_quiet_says_nothing_of_what_was_collected(sample_traces: Path, monkeypatch: pytest.MonkeyPatch):
    folder = sample_traces / "cpu_ddp_rare_metrics"
    manifest = read_manifest(folder)
    assert manifest is not None
    captured = launcher.Outcome(0, folder, manifest, torch_processes=2)
    monkeypatch.setattr(launcher, "collect", lambda command, options: captured)
    assert "tracedoc: captured 2 of 2 ranks" in run("collect", "--", "python", "train.py").stderr
    assert run("collect", "-q", "--", "python", "train.py").stderr == ""


def test_quiet_hides_no_error(tmp_path: Path):
    assert run("report", str(tmp_path / "none.json"), "-q").stderr.startswith("error: ")


def test_version_has_a_short_option():
    assert run("-V").stdout == run("--version").stdout


def test_page_is_opened_where_it_was_written(saved: str, tmp_path: Path, opened: list[str]):
    page = tmp_path / "report.html"
    result = run("report", saved, "-o", str(page), "--open")
    assert result.exit_code == 0, result.output
    assert opened == [page.as_uri()]


def test_page_without_a_name_is_opened_from_a_temporary_file(
    saved: str, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("report", saved, "--open")
    assert result.stdout.startswith(sharded().summary)
    (page,) = tmp_path.glob("tracedoc-*.html")
    assert opened == [page.as_uri()]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_where_no_browser_is_the_page_is_named(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    result = run("report", saved, "-o", str(tmp_path / "report.html"), "--open")
    assert result.exit_code == 2
    assert f"hint: open {tmp_path / 'report.html'} in one" in result.stderr
