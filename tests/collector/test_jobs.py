"""Real jobs under the collector end as they would without it, and give the capture that their case allows."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

import tracedoc
from tests.collector.conftest import JOBS, Collect, Rank, job, run_alone
from tracedoc.run.manifest import read_manifest

pytest.importorskip("torch", reason="torch is not installed: there is nothing to collect")

SKIPS = JOBS / "skips_a_collective.py"
SHORT = "--wait 2 --warmup 1 --active 3"


Alone = dict[str, list[Rank]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """How the ranks of jobs end without the collector, and what they print."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = {
        "plain": ([str(JOBS / "plain.py"), "30"], 2),
        "handles_sigterm": ([str(JOBS / "handles_sigterm.py")], 1),
    }
    return run_alone(jobs, folder, STORE=str(folder / "store"))


def test_every_rank_records_the_steps_asked_for_and_the_job_computes_the_same(
    collect: Collect, alone: Alone
) -> None:
    ran = collect(*job("plain", "30", ranks=2))
    # Both ranks print the same words into one pipe, where their line ends may change places.
    expected = "".join(rank.output for rank in alone["plain"])
    assert (ran.code, ran.stdout.replace("\n", "")) == (0, expected.replace("\n", ""))
    for rank in (0, 1):
        entry = ran.rank(rank)
        assert (entry["state"], entry["reason"], entry["level"]) == ("complete", "", "full")
        # 5 steps pass, 1 warms up, 5 are recorded and one more for the end of the fifth.
        assert ran.steps(rank) == [6, 7, 8, 9, 10, 11]
        assert entry["steps"] == {"first": 6, "recorded": 6, "asked": 6, "total": 30}
        assert entry["optimizers"] == {"AdamW": 30}
        assert [entry["step_ms"][kind]["steps"] for kind in ("before", "during")] == [4, 6]
    assert ran.manifest()["state"] == "complete"
    assert "captured 2 of 2 ranks, steps 6-11" in ran.stderr
    assert f"next: tracedoc diagnose {ran.folder}" in ran.stderr
    assert sum(path.stat().st_size for path in ran.folder.iterdir()) < 2_000_000


@pytest.mark.parametrize(("ranks", "warm"), [(1, True), pytest.param(2, False, marks=pytest.mark.soak)])
def test_spawned_ranks_are_captured_and_their_loader_workers_and_forks_are_not(
    collect: Collect, tmp_path: Path, ranks: int, warm: bool
) -> None:
    """A rank that is spawned imports torch itself, whatever the process that spawns it."""
    ran = collect(*job("spawned", str(tmp_path / "store"), str(ranks), warm=warm))
    assert ran.code == 0, ran.stderr
    assert ran.stdout.endswith("all done\n")
    assert [ran.rank(rank)["state"] for rank in range(ranks)] == ["complete"] * ranks
    assert ran.rank(0)["optimizers"] == {"AdamW": 24}
    written = {f"rank-{rank}.{kind}" for rank in range(ranks) for kind in ("json.gz", "manifest.json")}
    assert {path.name for path in ran.folder.glob("rank*.json*")} == written


def test_a_job_that_profiles_itself_from_the_start_keeps_its_trace_and_is_captured_later(
    collect: Collect, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    ran = collect(*job("profiles_itself", "0", str(own)), options=SHORT)
    assert ran.code == 0, ran.stderr
    assert len(json.loads(own.read_text())["traceEvents"]) > 100
    # Held up at step 2, so tried again 2 + 1 + 3 + 1 steps later: at 9, recording from 10.
    assert ran.rank(0)["state"] == "complete"
    assert ran.steps(0) == [10, 11, 12, 13]
    assert ran.rank(0)["foreign_profilers"] == 1


def test_a_job_that_starts_a_profiler_meanwhile_keeps_its_trace_and_ours_is_partial(
    collect: Collect, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    ran = collect(*job("profiles_itself", "5", str(own)), options=SHORT)
    assert ran.code == 0, ran.stderr
    assert len(json.loads(own.read_text())["traceEvents"]) > 100
    assert (ran.rank(0)["state"], ran.rank(0)["reason"]) == (
        "partial",
        "the job started a profiler of its own",
    )
    assert ran.rank(0)["steps"]["recorded"] == 2


def test_a_job_whose_profiler_leaves_no_time_for_another_try_is_told_so(
    collect: Collect, tmp_path: Path
) -> None:
    """Held up at step 2; the next try is 2 + 1 + 19 + 1 steps later, at 25, and the job takes 24."""
    own = tmp_path / "own.json"
    ran = collect(*job("profiles_itself", "0", str(own)), options="--wait 2 --warmup 1 --active 19")
    assert ran.rank(0)["state"] == "nothing"
    assert ran.rank(0)["reason"] == (
        "a profiler of the job was open when recording was to begin; "
        "the job ended after 24 steps, before the next try at 26"
    )


def test_a_rank_that_raises_leaves_its_last_steps(collect: Collect) -> None:
    ran = collect(*job("raises", ranks=2))
    assert ran.code == 1
    assert "this rank has had enough" in ran.stderr
    assert ran.rank(1)["reason"] == "the job ended by RuntimeError after 9 steps"
    for rank in (0, 1):
        assert ran.rank(rank)["state"] == "partial"
        assert ran.rank(rank)["steps"]["recorded"] == 3
    assert ran.manifest()["nodes"][0]["exit_code"] == 1


@pytest.mark.soak
def test_torchrun_tells_how_a_rank_was_killed(collect: Collect, tmp_path: Path) -> None:
    """Killed in the window: what the other rank captured is kept, and the log tells the last step."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"),
        *(str(JOBS / "goes_wrong.py"), "SIGKILL", "1", "9", "40"),
    ]
    ran = collect(*command)
    assert ran.code == 1
    assert "tracedoc: rank 1 ended after step 8 by SIGKILL" in ran.stderr
    assert (ran.rank(0)["state"], ran.rank(1)["state"]) == ("partial", "nothing")
    diagnosis = tracedoc.diagnose([ran.folder])
    assert diagnosis.summary.startswith("The job failed: rank 1 ended after step 8 by SIGKILL")


@pytest.mark.parametrize("how", ["remove-folder", pytest.param("replace-folder", marks=pytest.mark.soak)])
def test_a_folder_that_goes_away_costs_the_capture_and_nothing_else(
    collect: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("RUN_FOLDER", str(tmp_path / "run"))
    command = job("goes_wrong", how, "0", "8", "20")
    ran = collect(*command)
    assert ran.code == 0
    assert re.fullmatch(r"rank 0: 20 steps, losses [\d.]+, last [\d.]+\n", ran.stdout)
    assert "Traceback" not in ran.stderr
    assert "cannot write" in ran.stderr


def test_ranks_that_hang_until_sigterm_leave_their_last_steps_and_die_by_it(collect: Collect) -> None:
    ran = collect(*job("hangs", ranks=2))
    assert ran.code == 128 + signal.SIGTERM
    for rank in (0, 1):
        assert ran.rank(rank)["state"] == "partial"
        assert "SIGTERM" in ran.rank(rank)["reason"]
        assert ran.steps(rank)[:3] == [6, 7, 8]


def test_a_job_that_hangs_is_told_by_the_rank_that_is_missing_and_what_it_does(
    collect: Collect, tmp_path: Path
) -> None:
    ran = collect(*job("skips_a_collective", str(tmp_path / "run"), ranks=2), options=SHORT)
    assert ran.code == 128 + signal.SIGTERM
    line = next(i for i, text in enumerate(SKIPS.read_text().splitlines(), 1) if "group=group" in text)
    told = re.search(
        rf"rank 1 never entered all_reduce 9 of group dp \(called at skips_a_collective.py:{line}\); "
        r"rank 0 waits since \d\d:\d\d:\d\d UTC; rank 1 is in load_shard \(skips_a_collective.py:\d+\)",
        ran.stderr,
    )
    assert told is not None
    assert tracedoc.diagnose([ran.folder]).summary.startswith(f"The job hung: {told[0]}")


def test_a_job_that_takes_requests_is_captured_again_while_it_runs(
    collect: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEDOC_LIVE", "1")
    ran = collect(*job("asks_again", str(tmp_path / "run"), ranks=2), options=SHORT + " --no-source-step")
    assert ran.code == 0, ran.stderr
    again = read_manifest(ran.folder / "again-1")
    assert again is not None
    assert [(one.rank, one.state, one.steps_first, one.steps_recorded) for one in again.ranks] == [
        (0, "complete", 301, 3),
        (1, "complete", 301, 3),
    ]
    # The first capture stands as it was, with how the rank ended.
    for rank in (0, 1):
        entry = ran.rank(rank)
        assert (entry["state"], entry["steps"]["first"], entry["end"]) == ("complete", 3, "the job ended")
        assert entry["steps"]["total"] > 301
    # The last step counts where something of the job was recorded after it.
    assert tracedoc.diagnose([ran.folder / "again-1"]).run.steps_judged in (2, 3)
    assert tracedoc.diagnose([ran.folder]).run.steps_judged in (3, 4)


def test_a_killed_collector_leaves_the_job_alone_and_what_was_captured(collect: Collect) -> None:
    ran = collect(*job("goes_wrong", "parent-SIGKILL", "0", "9", "40"))
    assert ran.code == -signal.SIGKILL
    assert re.fullmatch(r"rank 0: 40 steps, losses [\d.]+, last [\d.]+\n", ran.stdout)
    assert not (ran.folder / "manifest.json").exists()
    (rank,) = tracedoc.diagnose([ran.folder]).ranks
    assert len(rank.steps) >= 5


def test_the_jobs_own_sigterm_handler_still_decides_how_it_ends(collect: Collect, alone: Alone) -> None:
    ran = collect(*job("handles_sigterm"))
    (rank,) = alone["handles_sigterm"]
    assert (ran.code, ran.stdout) == (rank.code, rank.output) == (7, "saving a checkpoint 9\n")
    assert ran.rank(0)["state"] == "partial"
    assert ran.rank(0)["steps"]["recorded"] >= 2


def test_a_job_that_ends_before_recording_begins_says_how_to_record_earlier(collect: Collect) -> None:
    ran = collect(*job("plain", "4"))
    assert ran.code == 0
    assert ran.rank(0)["state"] == "nothing"
    assert "the job made 4 optimizer steps" in ran.stderr
    assert "hint: record earlier: --wait 1" in ran.stderr


def test_of_two_optimizers_the_first_to_step_is_the_clock_and_both_are_counted(collect: Collect) -> None:
    ran = collect(*job("gan"), options=SHORT)
    assert (ran.code, ran.stdout) == (0, "done\n")
    assert ran.rank(0)["state"] == "complete"
    assert ran.rank(0)["clock"] == "RMSprop"
    assert ran.rank(0)["optimizers"] == {"RMSprop": 24, "Adam": 12}
    assert ran.steps(0) == [3, 4, 5, 6]


def test_a_compiled_optimizer_is_counted_and_the_hook_is_not_compiled_with_it(collect: Collect) -> None:
    ran = collect(*job("compiles", warm=False), options=SHORT)
    assert ran.code == 0, ran.stderr
    assert ran.rank(0)["state"] == "complete"
    assert ran.rank(0)["steps"]["total"] == 20
    # About a dozen: the hook's own functions would make it ten for every step.
    assert int(ran.stdout) < 30


def test_exit_after_capture_ends_every_rank_and_only_those_asked_for_are_recorded(collect: Collect) -> None:
    options = "--exit-after-capture --ranks 0,2 " + SHORT
    ran = collect(*job("plain", "1000000", ranks=3), options=options)
    assert ran.code == 0, ran.stderr
    for rank in (0, 2):
        assert ran.rank(rank)["state"] == "complete"
        # 2 + 1 + 3 + 1 steps, ten that are timed without the profiler, and one with stacks.
        assert ran.rank(rank)["steps"]["total"] == 18
        assert ran.rank(rank)["step_ms"]["after"]["steps"] == 10
        assert ran.rank(rank)["source"] == f"rank-{rank}.source.gz"
    traces = sorted(path.name for path in ran.folder.glob("*.json.gz"))
    assert traces == ["rank-0.json.gz", "rank-2.json.gz"]
    assert ran.manifest()["state"] == "complete"
    assert "captured 2 of 2 ranks" in ran.stderr


def test_ranks_that_do_not_exist_are_reported(collect: Collect) -> None:
    ran = collect(*job("plain", "5"), options="--ranks 7")
    assert (ran.code, ran.manifest()["state"]) == (0, "nothing")
    assert "error: none of the ranks asked for made an optimizer step" in ran.stderr
    assert "hint: these did: 0; choose with --ranks" in ran.stderr


def test_recording_stops_when_its_time_is_up(collect: Collect) -> None:
    ran = collect(*job("plain", "40", "0.05"), options="--wait 2 --active 35 --max-seconds 1")
    assert ran.code == 0, ran.stderr
    assert ran.rank(0)["state"] == "partial"
    assert "--max-seconds" in ran.rank(0)["reason"]
    assert ran.rank(0)["steps"]["total"] == 40
    assert 1 <= ran.rank(0)["steps"]["recorded"] < 36


def test_a_disk_without_room_is_told_and_the_job_goes_on(collect: Collect) -> None:
    ran = collect(*job("small_disk"), options=SHORT)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("done 21 ")
    assert ran.rank(0)["state"] == "nothing"
    assert "the trace could not be saved" in ran.rank(0)["reason"]
    assert list(ran.folder.glob("*.gz*")) == []


def test_a_failure_of_the_collector_is_told_and_the_job_goes_on(collect: Collect) -> None:
    ran = collect(*job("breaks_the_collector"), options=SHORT)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("done 21 ")
    assert ran.rank(0)["reason"] == "the collector failed: KeyError: 'broken on purpose'"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        ("pathologies.py", {"PATHO": "none"}, "2 of 2 ranks, gloo, DDP"),
        ("pathologies.py", {"PATHO": "slowloader"}, "input"),
        ("train_fsdp2.py", {"STEPS": "14"}, "FSDP"),
    ],
)
def test_diagnose_reads_what_torchrun_jobs_leave(
    collect: Collect,
    tmp_path: Path,
    shared_traces: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    environ: dict[str, str],
    words: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    scripts = shared_traces / "cpu_gloo" / "scripts"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    options = "--wait 2 --warmup 1 --active 4 --diagnose"
    ran = collect(*torchrun, str(scripts / script), options=options)
    if "terminate called without an active exception" in ran.stderr:
        # These scripts leave without a barrier, and gloo may then abort, with and without the collector.
        ran = collect(*torchrun, str(scripts / script), options=options, folder=tmp_path / "again")
    assert ran.code == 0, ran.stderr
    assert ran.manifest()["state"] == "complete"
    assert words in ran.stdout
    assert "manifest" not in ran.stdout
