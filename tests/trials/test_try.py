"""``tracedoc try``: what is chosen, the turns that are taken, what is shown and kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tracedoc
from tracedoc.cli import main
from tracedoc.collector.trial.changes import Change
from tracedoc.predicted import TRIED_NAME, read_tried
from tracedoc.run import discover
from tracedoc.testing.lanes import parse_lanes
from tracedoc.trials import one_run, turns
from tracedoc.trials.fixes import candidates
from tracedoc.trials.one_run import Job, Ran

STEPS = 20
COMMAND = ("--", sys.executable, "-c", "pass")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def folder(sample_traces: Path, tmp_path: Path) -> Path:
    """A run whose job sets small buckets."""
    return Path(shutil.copytree(sample_traces / "cpu_ddp_small_buckets", tmp_path / "run"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The smallest run that there is, whose diagnosis takes no time."""
    folder = tmp_path / "small"
    folder.mkdir()
    (rank,) = parse_lanes("compute 0-100", ranks=1)
    rank.write(folder / "rank-0.json")
    return folder


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is run, as texts of its changes: 100 ms a step, and what ``answers`` says with a change."""
    taken: list[str] = []
    steps.clear()

    def run_once(job: Job, changes: Sequence[Change], scratch: Path, **rest: Any) -> Ran:
        text = "\n".join(change.text for change in changes)
        taken.append(text)
        steps.append(job.steps)
        answer = answers.get(text, 100.0)
        return answer if isinstance(answer, Ran) else timed(answer)

    monkeypatch.setattr(one_run, "run_once", run_once)
    return taken


answers: dict[str, float | Ran] = {}
steps: list[int] = []
"""How many steps each run was asked for."""


def timed(step_ms: float) -> Ran:
    steps = tuple(step_ms * (1 + (number % 3 - 1) / 1000) for number in range(STEPS))
    return Ran(steps, losses={0: [[1.0]] * STEPS}, memory_bytes=1 << 20)


def test_the_listing_says_what_can_be_tried_and_why_the_rest_cannot(folder: Path) -> None:
    listed = run("try", str(folder), "--list", "-q")
    assert listed.exit_code == 0, listed.output
    can, cannot = listed.stdout.split("These cannot:")
    assert "small-gradient-buckets/0: Fewer, larger buckets\n      DDP(model, bucket_cap_mb=" in can
    assert "no setting of the job" in cannot
    rows = json.loads(run("try", str(folder), "--list", "-q", "-f", "json").stdout)
    assert {row["fix"] for row in rows if not row["cannot"]} >= {"small-gradient-buckets/0"}


def test_every_fix_that_can_be_tried_is_printed_as_it_is_made(folder: Path) -> None:
    diagnosis = tracedoc.diagnose(folder)
    printed = {fix.change for finding in diagnosis.findings for fix in finding.fixes}
    for one in candidates(diagnosis, {}):
        assert one.cannot or [change.text for change in one.changes] == [one.text.strip()]
        assert one.text in printed


def test_fixes_take_turns_with_the_job_as_it_is_until_each_is_decided(small: Path, job: list[str]) -> None:
    first, second = "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"
    answers.clear()
    answers.update({first: 50.0, second: 100.0})
    shown = run("try", str(small), first, second, "-q", "-f", "json", *COMMAND)
    assert shown.exit_code == 0, shown.output
    assert job == ["", first, "", second] * 2
    tried = json.loads(shown.stdout)["tried"]
    assert [(one["verdict"], one["runs"]) for one in tried] == [("faster", 2), ("no effect", 2)]
    assert tried[0]["gain_ms"][1] == pytest.approx(50.0)


def test_a_fix_that_fails_ends_itself_alone(small: Path, job: list[str]) -> None:
    wrong, right = "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"
    answers.clear()
    answers.update({wrong: Ran(problem="exit code 1: ValueError: no"), right: 50.0})
    shown = run("try", str(small), wrong, right, "-q", *COMMAND)
    assert shown.exit_code == 0, shown.output
    assert job.count(wrong) == 1
    assert f"{wrong}: exit code 1: ValueError: no" in shown.stdout
    assert shown.stdout.startswith(f"{right}: 100 ms -> 50 ms a step (faster). 2 fixes tried, 1 to take")
    assert f"{right} {sys.executable} -c pass" in " ".join(shown.stdout.split())


def test_short_steps_are_timed_for_three_seconds_and_asked_ones_as_asked(small: Path, job: list[str]) -> None:
    answers.clear()
    answers.update({"": 10.0, "A=1": 10.0})
    run("try", str(small), "A=1", "-q", *COMMAND)
    assert steps == [30, 300, 300, 300]
    steps.clear()
    run("try", str(small), "A=1", "-q", "--steps", "40", *COMMAND)
    assert steps == [40] * 4


def test_a_script_with_fewer_steps_is_timed_in_those_it_makes(small: Path, job: list[str]) -> None:
    short = replace(timed(100.0), problem="the script ended after 30 steps, 20 of them timed", short=True)
    answers.clear()
    answers.update({"": short, "A=1": 50.0})
    shown = run("try", str(small), "A=1", "-q", *COMMAND)
    assert shown.exit_code == 0, shown.output
    assert steps == [30, STEPS, STEPS, STEPS]
    assert "A=1: 100 ms -> 50 ms a step (faster)" in shown.stdout


def test_a_script_that_ends_after_three_steps_is_not_tried(small: Path, job: list[str]) -> None:
    answers.clear()
    answers[""] = Ran((100.0,) * 3, "the script ended after 13 steps, 3 of them timed", short=True)
    shown = run("try", str(small), "A=1", "-q", *COMMAND)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "the job cannot be timed as it is: the script ended after 13 steps, 3 of them" in shown.stderr


def test_all_at_once_is_one_more_fix(small: Path, job: list[str]) -> None:
    answers.clear()
    run("try", str(small), "A=1", "B=2", "--together", "-q", *COMMAND)
    assert job[:6] == ["", "A=1", "", "B=2", "", "A=1\nB=2"]


def test_a_job_that_does_not_run_as_it_is_is_an_error(small: Path, job: list[str]) -> None:
    answers.clear()
    answers[""] = Ran(problem="exit code 3: no such file")
    shown = run("try", str(small), "A=1", "-q", *COMMAND)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "error: the job cannot be timed as it is: exit code 3: no such file" in shown.stderr


def test_an_interrupted_trial_shows_what_is_known(
    small: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.clear()
    answers["A=1"] = 50.0
    usual = one_run.run_once

    def third(*words: Any, **rest: Any) -> Ran:
        if len(job) == 4:
            raise KeyboardInterrupt
        return usual(*words, **rest)

    monkeypatch.setattr(one_run, "run_once", third)
    shown = run("try", str(small), "A=1", "B=1", "-q", *COMMAND)
    assert shown.exit_code == 130
    assert "Not all is decided: interrupted." in shown.stdout
    assert "A=1" in shown.stdout


def test_the_budget_ends_trials_that_are_not_decided(
    small: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.clear()
    clock = iter(range(0, 100_000, 60))
    monkeypatch.setattr(turns.time, "monotonic", lambda: float(next(clock)))
    shown = run("try", str(small), "A=1", "--budget", "90s", "-q", *COMMAND)
    assert shown.exit_code == 0, shown.output
    assert "Not all is decided: the budget of time was used up (--budget)." in shown.stdout


def test_what_was_tried_is_shown_beside_the_fix_and_in_the_history(
    folder: Path, job: list[str], tmp_path: Path
) -> None:
    known = candidates(tracedoc.diagnose(folder), {})
    fix = next(one for one in known if one.fix == "small-gradient-buckets/0")
    answers.clear()
    answers[fix.text] = 60.0
    record = tmp_path / "record.jsonl"
    shown = run("try", str(folder), fix.fix, "-q", "--record", str(record), *COMMAND)
    assert shown.exit_code == 0, shown.output
    (kept,) = read_tried(folder)
    assert (kept.fix, kept.before_ms) == (fix.fix, 100.0)
    assert kept.training == "losses equal to the last bit in 19 steps"
    words = f"tried: 100 -> 60.0 ms, {kept.verdict}"
    assert f"({words})" in " ".join(run("diagnose", str(folder), "-q").stdout.split())
    assert tracedoc.diagnose(folder).tried == (kept,)
    history = run("history", str(tmp_path), "-q").stdout
    assert f"run: Fewer, larger buckets: {words}" in " ".join(history.split())
    (line,) = record.read_text().splitlines()
    assert json.loads(line)["fix"] == fix.fix
    assert str(tmp_path) not in line
    assert os.uname().nodename not in line


def test_the_file_of_what_was_tried_is_no_trace() -> None:
    assert TRIED_NAME in discover._OWN_FILES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no-such-fix",), "is no fix of this run"),
        (("batch_size = 2 * batch_size",), "it changes the script's own code"),
        (("A=1", "--cwd", "/no/such/folder"), "is not here"),
        (("A=1", "--budget", "soon"), "is no time such as 90s"),
        (("A=1", "--env", "novalue"), "is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    folder: Path, job: list[str], words: tuple[str, ...], message: str
) -> None:
    shown = run("try", str(folder), *words, "-q", *COMMAND)
    assert (shown.exit_code, job) == (2, [])
    assert message in shown.stderr


def test_a_page_draws_the_step_with_each_fix(small: Path, job: list[str], tmp_path: Path) -> None:
    answers.clear()
    answers["A=1"] = 50.0
    page = tmp_path / "tried.html"
    shown = run("try", str(small), "A=1", "-q", "-o", str(page), *COMMAND)
    assert shown.exit_code == 0, shown.output
    assert "95 % interval" in page.read_text()
    assert "The step as it is and with each fix" in page.read_text()
