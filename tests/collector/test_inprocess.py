"""Captures that a script makes of itself, in real processes: a loop, two Trainers, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tracedoc
from tracedoc.errors import InputError
from tracedoc.run.manifest import COMPLETE, PARTIAL, ManifestRank, read_manifest

pytest.importorskip("torch", reason="a capture needs torch: the extra 'collect'")

JOB = Path(__file__).with_name("inprocess_job.py")
REPOSITORY = JOB.parents[2]


def run(kind: str, folder: Path, ranks: int = 1, *, launcher: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Run the job and return the exit code and the output of each rank."""
    base = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",
        "WORLD_SIZE": str(ranks),
    }
    jobs = [
        subprocess.Popen(
            [*launcher, sys.executable, str(JOB), kind, str(folder)],
            env={**base, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )
        for rank in range(ranks)
    ]
    outputs = [job.communicate(timeout=180)[0] for job in jobs]
    return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]


def captured(folder: Path) -> tuple[ManifestRank, ...]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.ranks


def steps_in(folder: Path, rank: ManifestRank) -> list[int]:
    with gzip.open(folder / rank.file, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return sorted({int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")})


def test_a_loop_captures_itself_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert [code for code, _ in run("loop", folder, 2)] == [0, 0]
    ranks = captured(folder)
    assert [(rank.rank, rank.state) for rank in ranks] == [(0, COMPLETE), (1, COMPLETE)]
    assert [steps_in(folder, rank) for rank in ranks] == [[4, 5, 6, 7], [4, 5, 6, 7]]
    diagnosis = tracedoc.diagnose([folder])
    assert diagnosis.run.world_size == 2
    assert diagnosis.facts["ddp_bucket_bytes"].value == 25 * 1024 * 1024
    assert diagnosis.facts["loader_workers"].value == 0


def test_every_rank_records_stacks_that_tell_where_values_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert [code for code, _ in run("loop", folder, 2)] == [0, 0]
    told = [rank.part and rank.part.get("source") for rank in captured(folder)]
    assert told == ["rank-0.source.gz", "rank-1.source.gz"]
    read_in = tracedoc.diagnose([folder]).facts["values_read_in"].value
    assert isinstance(read_in, str)
    assert re.fullmatch(r"inprocess_job\.py:\d+ \(loop\) \.item\(\) x1", read_in)


def test_a_second_capture_replaces_the_first(tmp_path: Path) -> None:
    ((code, output),) = run("twice", tmp_path)
    assert (code, output) == (0, "trained 40\n")
    (rank,) = captured(tmp_path)
    assert rank.state == COMPLETE


def test_an_error_of_the_loop_leaves_what_was_captured(tmp_path: Path) -> None:
    ((code, output),) = run("fails", tmp_path)
    assert code == 1
    assert "RuntimeError: the user's own" in output
    (rank,) = captured(tmp_path)
    assert rank.state == PARTIAL
    assert "RuntimeError" in rank.reason
    assert steps_in(tmp_path, rank)[0] == 4


def test_a_profiler_of_the_script_keeps_its_trace(tmp_path: Path) -> None:
    ((code, _),) = run("profiles", tmp_path)
    assert code == 0
    assert json.loads((tmp_path / "own.trace").read_text())["traceEvents"]
    (rank,) = captured(tmp_path)
    assert (rank.state, rank.reason) == (PARTIAL, "the job started a profiler of its own")


def test_a_launcher_goes_before_the_script(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "tracedoc", "collect", "-o", str(tmp_path / "launched"), "--")
    ((code, _),) = run("loop", tmp_path / "own", launcher=launcher)
    assert code == 0
    assert captured(tmp_path / "launched")[0].state == COMPLETE
    assert not list((tmp_path / "own").iterdir())


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers and accelerate (make loaders)")
    pytest.importorskip("accelerate", reason="needs transformers and accelerate (make loaders)")
    ((code, output),) = run("trainer", tmp_path)
    assert code == 0, output
    (rank,) = captured(tmp_path)
    assert rank.state == COMPLETE
    assert rank.steps_total == 40
    assert rank.part is not None
    trainer = rank.part["framework"]["trainer"]  # type: ignore[index]
    assert (trainer["per_device_train_batch_size"], trainer["gradient_accumulation_steps"]) == (2, 2)


def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning (make loaders)")
    ((code, output),) = run("lightning", tmp_path)
    assert code == 0, output
    (rank,) = captured(tmp_path)
    assert (rank.state, rank.steps_total) == (COMPLETE, 40)


def test_an_unknown_option_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'activ'.*did you mean 'active'"):
        tracedoc.collect(tmp_path, activ=3)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        tracedoc.collect(tmp_path / "file" / "run")
