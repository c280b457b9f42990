"""The launcher passes on what the command does, and says clearly what cannot be done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collector.conftest import Collect, environment, job, start
from tests.warm_torch import REPOSITORY
from tracedoc.cli.collect import _tell_beside
from tracedoc.collector.launcher import Outcome, check_command, public_command, run_folder, single_process
from tracedoc.collector.options import Options, level_of, listed_ranks, read_options, write_options
from tracedoc.errors import InputError
from tracedoc.run.manifest import Manifest, ManifestRank, StepTime


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; print('out'); sys.exit(3)", 3),
        ("import os; print('out', flush=True); os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_the_exit_code_and_the_output_are_the_commands(collect: Collect, code: str, expected: int) -> None:
    ran = collect(*python(code))
    assert (ran.code, ran.stdout) == (expected, "out\n")


def test_a_job_without_torch_is_told_that_no_rank_was_seen(collect: Collect) -> None:
    ran = collect(*python("print(1)"))
    assert ran.code == 0
    assert "error: no rank reached an optimizer step: no Python process" in ran.stderr
    assert "hint: torch may be missing" in ran.stderr
    assert ran.manifest()["state"] == "nothing"


def test_a_hook_that_cannot_start_says_why(collect: Collect, tmp_path: Path) -> None:
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    for init in (package.parent, package):
        (init / "__init__.py").touch()
    (package / "optimizer.py").write_text("print('imported')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch.optim.optimizer"
    ran = collect(*python(code))
    assert (ran.code, ran.stdout) == (0, "imported\n")
    assert "error: the hook could not start in the job's Python (Python 3." in ran.stderr


def test_a_command_that_is_not_there_gives_127_and_no_folder(collect: Collect) -> None:
    ran = collect("no-such-command-here", "x")
    assert ran.code == 127
    assert "error: no-such-command-here: command not found" in ran.stderr
    assert not ran.folder.exists()


def test_a_folder_that_exists_is_refused_before_anything_runs(collect: Collect, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rank-0.json.gz").touch()
    ran = collect(*python("print('ran')"), folder=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert f"error: {folder} exists already" in ran.stderr


def test_a_dry_run_shows_what_would_be_injected_and_does_nothing(collect: Collect) -> None:
    ran = collect("no-such-command-here", options="--dry-run --wait 10")
    assert ran.code == 0
    assert "records        steps 11-16 (from 0), ranks: auto" in ran.stdout
    assert "environment    PYTHONPATH=" in ran.stdout
    assert not ran.folder.exists()


def test_sigterm_for_the_launcher_reaches_the_command(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    process = start(["-o", str(tmp_path / "run")], python(code))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_a_sitecustomize_that_the_hook_hides_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.GREETING = 'hello'")
    code = (
        "import sys, sitecustomize; print(GREETING, sitecustomize.__file__);"
        "print([entry for entry in sys.path if '.hook' in entry])"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tracedoc", "collect", "-o", str(tmp_path / "run"), "--", *python(code)],
        cwd=REPOSITORY,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"hello {tmp_path / 'sitecustomize.py'}\n[]\n"


def test_the_environment_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch, collect: Collect) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    ran = collect(*python("import os; print(os.environ['KINETO_LOG_LEVEL'], os.environ['PYTHONPATH'])"))
    level, path = ran.stdout.split()
    assert level == "5"
    assert path.split(os.pathsep)[1] == "/mine"


def test_launchers_of_two_nodes_without_a_shared_disk_make_one_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: there is nothing to collect")
    rendezvous = {"STORE": str(tmp_path / "store"), "WORLD_SIZE": "2"}
    nodes = [tmp_path / "a", tmp_path / "b"]
    launchers = [
        start(
            ["-o", str(folder), "--wait", "2", "--active", "3"],
            job("plain", "12"),
            {**rendezvous, "RANK": str(rank), "LOCAL_RANK": "0"},
        )
        for rank, folder in enumerate(nodes)
    ]
    for launcher in launchers:
        launcher.communicate(timeout=120)
        assert launcher.returncode == 0
    assert [sorted(json.loads((node / "manifest.json").read_text())["ranks"]) for node in nodes] == [
        ["0"],
        ["1"],
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tracedoc", "diagnose", *map(str, nodes)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 of 2 ranks" in done.stdout


def test_launchers_with_one_folder_join_while_the_job_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = start(["-o", str(folder)], python("print('ready', flush=True); input()"), {"RANK": "0"})
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    second = start(["-o", str(folder)], python("pass"), {"RANK": "1"})
    second.communicate(timeout=60)
    unrelated = start(["-o", str(folder)], python("pass"))
    assert "exists already" in unrelated.communicate(timeout=60)[1]
    first.communicate("\n", timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    nodes = json.loads((folder / "manifest.json").read_text())["nodes"]
    assert len(nodes) == 2
    assert len({node["run"] for node in nodes}) == 1
    late = start(["-o", str(folder)], python("pass"))
    assert "exists already" in late.communicate(timeout=60)[1]
    assert late.returncode == 2


def test_of_collectors_that_begin_at_once_in_one_folder_one_runs_its_command(tmp_path: Path) -> None:
    launchers = [start(["-o", str(tmp_path / "run")], python("input(); print('ran')")) for _ in range(3)]
    said = [launcher.communicate("\n", timeout=60) for launcher in launchers]
    assert sorted(launcher.returncode for launcher in launchers) == [0, 2, 2]
    for launcher, (out, err) in zip(launchers, said, strict=True):
        assert out == ("ran\n" if launcher.returncode == 0 else "")
        assert launcher.returncode == 0 or f"error: {tmp_path / 'run'} exists already" in err


def test_a_baseline_is_the_same_command_on_one_process() -> None:
    assert single_process(["torchrun", "--nproc_per_node", "8", "t.py", "--nproc_per_node", "8"]) == [
        *("torchrun", "--nproc_per_node", "1", "t.py", "--nproc_per_node", "8")
    ]
    assert single_process(["python", "-m", "torch.distributed.run", "--nproc-per-node=gpu", "t.py"]) == [
        *("python", "-m", "torch.distributed.run", "--nproc-per-node=1", "t.py")
    ]
    assert single_process(["/x/accelerate", "launch", "--num_processes", "4", "t.py"])[3] == "1"
    with pytest.raises(InputError, match="--baseline finds no number of processes"):
        single_process(["python", "t.py"])


def test_a_baseline_is_told_beside_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    def outcome(folder: str, *medians: float) -> Outcome:
        ranks = tuple(
            ManifestRank(number, f"rank-{number}.json", before=StepTime(ms, 10), during=StepTime(2 * ms, 6))
            for number, ms in enumerate(medians)
        )
        return Outcome(0, Path(folder), Manifest(f"{folder}/manifest.json", ranks), len(ranks))

    _tell_beside(outcome("/runs/a b/baseline", 40.0), outcome("/runs/a b", 50.0, 60.0))
    assert capsys.readouterr().err.splitlines() == [
        "tracedoc: a step before the capture (median): 40 ms on one process, 60 ms in the job",
        "tracedoc: the one process: tracedoc diagnose '/runs/a b/baseline'",
    ]


def test_values_that_look_like_secrets_are_not_stored() -> None:
    command = [
        "t.py",
        "--hub-token",
        "abc",
        "--api_key=xyz",
        "--name",
        "hf_abcdefghijkl",
        "s3://u:p@bucket",
        "--tokenizer",
        "gpt2",
        "data.url=https://u:p@host",
        "model.gradientAccumulationSteps=16",
    ]
    assert public_command(command) == [
        *("t.py", "--hub-token", "<hidden>", "--api_key=<hidden>", "--name", "<hidden>"),
        *("<hidden>", "--tokenizer", "gpt2", "data.url=<hidden>", "model.gradientAccumulationSteps=16"),
    ]


def test_the_run_is_named_after_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime

    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5)
    folder = run_folder(["torchrun", "--nproc_per_node", "2", "src/train.py", "--x", "1"], None, now, {})
    assert folder == tmp_path / "tracedoc-runs" / "20260102-030405-train"
    folder.mkdir(parents=True)
    (folder / "rank-0.json.gz").touch()
    assert run_folder(["python", "-m", "pkg.train"], None, now, {}).name == "20260102-030405-pkg.train"
    assert run_folder(["torchrun", "train.py"], None, now, {}).name == "20260102-030405-train-2"
    srun = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0"}
    assert run_folder(["python", "train.py"], None, now, srun).name == "slurm-42.0-train"


def test_ranks_are_listed_and_beyond_16_most_are_captured_lightly() -> None:
    assert listed_ranks("0,4-6") == {0, 4, 5, 6}
    assert listed_ranks("auto") is listed_ranks("all") is None
    for wrong in ("", "x", "3-1", "-1"):
        with pytest.raises(ValueError):
            listed_ranks(wrong)
    auto = Options("")
    assert [level_of(auto, rank, 16, rank) for rank in (0, 15)] == ["full", "full"]
    assert [level_of(auto, rank, 17, rank) for rank in (0, 1, 16)] == ["full", "light", "light"]
    assert level_of(Options("", ranks="all"), 16, 17, 16) == "full"
    assert [level_of(Options("", ranks="0-1"), rank, 64, rank) for rank in (1, 2)] == ["full", ""]


def test_options_travel_by_file_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    options = Options("/run", wait=3, with_stack=True, max_mb=1.5)
    write_options(options, tmp_path)
    path = tmp_path / "config.json"
    assert read_options(path) == options
    path.write_text(path.read_text().replace('"wait"', '"from_the_future"'))
    assert read_options(path) == Options("/run", with_stack=True, max_mb=1.5)


def test_a_script_is_no_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch(mode=0o644)
    with pytest.raises(Exception, match="may not be executed"):
        check_command([str(script)])
