"""Real runs of a small job: a change is made, a bad one ends its own run only, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.collector.conftest import command_of
from tracedoc.collector.trial.changes import read_change
from tracedoc.trials import one_run
from tracedoc.trials.one_run import Job, Ran, run_once

pytest.importorskip("torch", reason="torch is not installed: there is nothing to try")

SCRIPT = Path(__file__).with_name("trained.py")
WAIT, STEPS = 2, 6


def run(
    tmp_path: Path,
    *changes: str,
    silence_s: float = 60.0,
    environ: dict[str, str] | None = None,
    warm: bool = True,
) -> Ran:
    command = command_of(SCRIPT, str(tmp_path / "marker"), warm=warm)
    job = Job(tuple(command), tmp_path, {**os.environ, **(environ or {})}, WAIT, STEPS)
    return run_once(
        job,
        [read_change(text) for text in changes],
        tmp_path / "scratch",
        deadline=time.monotonic() + 120,
        silence_s=silence_s,
        tell=lambda step: None,
    )


def test_a_run_times_its_steps_and_keeps_losses_and_leaves_no_file_but_its_own(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert (ran.problem, len(ran.steps_ms), len(ran.squared_norms)) == ("", STEPS, 3)
    # The first step is that of the weights as they were drawn; each lowers the loss.
    losses = [step[0] for step in ran.losses[0] if step]
    assert len(losses) == WAIT + STEPS
    assert losses == sorted(losses, reverse=True)
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
    assert not list((tmp_path / "scratch").glob(".hook-*"))


def test_a_call_gets_the_keywords_of_the_change(tmp_path: Path) -> None:
    ran = run(tmp_path, "torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)")
    assert (ran.problem, ran.made) == ("", {"torch.optim.SGD": ("made", "torch.optim.SGD")})
    other = run(tmp_path / "other", environ={"HOW": "other-loss"})
    assert ran.losses == other.losses


def test_a_part_that_the_job_never_meets_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, "DataLoader(num_workers=1)", "torch.optim.SGD(fast=True)")
    assert ran.problem == ""
    assert ran.made == {
        "DataLoader": ("", "the job never came to DataLoader"),
        "torch.optim.SGD": ("failed", "LookupError: torch.optim.SGD of this version has no fast"),
    }


def test_a_script_that_breaks_says_its_own_error(tmp_path: Path) -> None:
    ran = run(tmp_path, "HOW=raise python train.py")
    assert (ran.problem, ran.hung) == ("exit code 1: ValueError: this fix is wrong", False)


def test_a_script_that_ends_early_says_after_how_many_steps(tmp_path: Path) -> None:
    assert run(tmp_path, "export HOW=short").problem == "the script ended after 4 steps, 2 of them timed"


def test_a_run_that_makes_no_step_any_more_is_ended(tmp_path: Path) -> None:
    ran = run(tmp_path, "export HOW=hang", silence_s=4.0, warm=False)
    assert (ran.hung, ran.problem.startswith("no step in ")) == (True, True)


def test_ctrl_c_ends_every_process_also_those_in_sessions_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "SECONDS_TO_END", 1.0)
    marker = tmp_path / "marker"

    def press() -> None:
        for _ in range(2200):
            if marker.exists():
                os.kill(os.getpid(), signal.SIGINT)
                return
            threading.Event().wait(0.05)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "export HOW=child", silence_s=110.0, warm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [p for p in Path("/proc").glob("[0-9]*/cmdline") if _names(p, str(SCRIPT))] == []


def _names(path: Path, script: str) -> bool:
    try:
        words = path.read_bytes().decode(errors="replace").split("\0")
        return script in words and (path.parent / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
