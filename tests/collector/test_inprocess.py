"""Captures that a script makes of itself, in real processes: a loop, two Trainers, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import tracedoc
from tests.collector.conftest import Collect, Rank, command_of, run_alone
from tests.warm_torch import REPOSITORY
from tracedoc.errors import InputError
from tracedoc.run.manifest import COMPLETE, PARTIAL, ManifestRank, read_manifest

pytest.importorskip("torch", reason="a capture needs torch: the extra 'collect'")

JOB = Path(__file__).with_name("inprocess_job.py")
TRAINERS = {"trainer": "transformers", "lightning": "lightning"}

Ran = Callable[[str], tuple[list[Rank], Path]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A function that gives the ranks of each kind of training, which have all ended, and what they left."""
    folder = tmp_path_factory.mktemp("inprocess")
    kinds = {"loop": 2, "twice": 1, "fails": 1, "profiles": 1}
    kinds |= {kind: 1 for kind, package in TRAINERS.items() if find_spec(package)}
    jobs = {kind: ([str(JOB), kind, str(folder / kind)], ranks) for kind, ranks in kinds.items()}
    ended = run_alone(jobs, folder, KINETO_LOG_LEVEL="99")
    return lambda kind: (ended[kind], folder / kind)


def captured(folder: Path) -> tuple[ManifestRank, ...]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.ranks


def steps_in(folder: Path, rank: ManifestRank) -> list[int]:
    with gzip.open(folder / rank.file, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    return sorted({int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")})


def test_a_loop_captures_itself_on_every_rank(ran: Ran) -> None:
    ended, folder = ran("loop")
    assert [rank.code for rank in ended] == [0, 0]
    ranks = captured(folder)
    assert [(rank.rank, rank.state) for rank in ranks] == [(0, COMPLETE), (1, COMPLETE)]
    assert [steps_in(folder, rank) for rank in ranks] == [[4, 5, 6, 7], [4, 5, 6, 7]]
    diagnosis = tracedoc.diagnose([folder])
    assert diagnosis.run.world_size == 2
    assert diagnosis.facts["ddp_bucket_bytes"].value == 25 * 1024 * 1024
    assert diagnosis.facts["loader_workers"].value == 0


def test_every_rank_records_stacks_that_tell_where_values_are_read(ran: Ran) -> None:
    _, folder = ran("loop")
    told = [rank.part and rank.part.get("source") for rank in captured(folder)]
    assert told == ["rank-0.source.gz", "rank-1.source.gz"]
    read_in = tracedoc.diagnose([folder]).facts["item_call_sites"].value
    assert isinstance(read_in, str)
    assert re.fullmatch(r"inprocess_job\.py:\d+ \(loop\) \.item\(\) x1", read_in)


def test_a_second_capture_replaces_the_first(ran: Ran) -> None:
    (ended,), folder = ran("twice")
    assert ended == Rank(0, "trained 40\n")
    (rank,) = captured(folder)
    assert rank.state == COMPLETE


def test_an_error_of_the_loop_leaves_what_was_captured(ran: Ran) -> None:
    (ended,), folder = ran("fails")
    assert ended.code == 1
    assert "RuntimeError: the user's own" in ended.output
    (rank,) = captured(folder)
    assert rank.state == PARTIAL
    assert "RuntimeError" in rank.reason
    assert steps_in(folder, rank)[0] == 4


def test_a_profiler_of_the_script_keeps_its_trace(ran: Ran) -> None:
    (ended,), folder = ran("profiles")
    assert ended.code == 0
    assert json.loads((folder / "own.trace").read_text())["traceEvents"]
    (rank,) = captured(folder)
    assert (rank.state, rank.reason) == (PARTIAL, "the job started a profiler of its own")


def test_a_launcher_goes_before_the_script(
    collect: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(REPOSITORY)}.items():
        monkeypatch.setenv(name, value)
    launched = collect(*command_of(JOB, "loop", str(tmp_path / "own")))
    assert launched.code == 0
    assert captured(launched.folder)[0].state == COMPLETE
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers and accelerate (make loaders)")
def test_the_trainer_of_transformers(ran: Ran) -> None:
    (ended,), folder = ran("trainer")
    assert ended.code == 0, ended.output
    (rank,) = captured(folder)
    assert rank.state == COMPLETE
    assert rank.steps_total == 40
    assert rank.part is not None
    trainer = rank.part["framework"]["trainer"]  # type: ignore[index]
    assert (trainer["per_device_train_batch_size"], trainer["gradient_accumulation_steps"]) == (2, 2)


@pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning (make loaders)")
def test_the_trainer_of_lightning(ran: Ran) -> None:
    (ended,), folder = ran("lightning")
    assert ended.code == 0, ended.output
    (rank,) = captured(folder)
    assert (rank.state, rank.steps_total) == (COMPLETE, 40)


def test_an_unknown_option_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'activ'.*did you mean 'active'"):
        tracedoc.collect(tmp_path, activ=3)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        tracedoc.collect(tmp_path / "file" / "run")
