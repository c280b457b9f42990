"""Damaged captures claim nothing that whole ones do not: a sample of what ``soak/damaged_runs.py`` tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage import (
    Damage,
    Truth,
    answer,
    clock_set_back,
    cut_stored,
    cut_text,
    damaged,
    damages,
    edited,
    gpu_ends_early,
    lost_thread,
    read_text,
    shorter,
    without_marks,
)
from tracedoc.diagnosis import Diagnosis


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json*") if not path.name.startswith("manifest"))


def diagnosed(paths: list[Path], damage: Damage, folder: Path) -> Diagnosis:
    found = answer(damaged(paths, damage, folder))
    assert isinstance(found, Diagnosis), found
    return found


def bytes_of(count: int, path: Path) -> float:
    return count / path.stat().st_size


@pytest.mark.parametrize(("rank", "size"), [(1, 150_000), (0, 200_000)])
def test_a_cut_file_makes_no_straggler_and_no_gaps(
    shared_traces: Path, tmp_path: Path, rank: int, size: int
) -> None:
    paths = files_of(shared_traces / "fsdp2_h100_4rank")
    share = bytes_of(size, paths[rank])
    found = diagnosed(paths, Damage("cut", rank, cut_stored(share)), tmp_path)
    assert found.summary.startswith(f"Rank {rank} is left out: its file is cut off")
    assert {one.severity for one in found.findings} <= {"note"}
    assert not [one for one in found.findings if one.topic == "straggler"]
    assert [one.rank for one in found.ranks] == [one for one in range(4) if one != rank]


def test_steps_before_the_cut_are_analysed_on_every_rank(sample_traces: Path, tmp_path: Path) -> None:
    paths = files_of(sample_traces / "synthetic_zero3_gather_stall")
    found = diagnosed(paths, Damage("cut", 2, cut_text(0.7), "cut off"), tmp_path)
    assert found.summary.startswith("The file of rank 2 is cut off. Exposed all-gathers")
    assert {tuple(step.index for step in rank.steps) for rank in found.ranks} == {
        tuple(step.index for step in found.ranks[2].steps)
    }
    assert all(step.complete for rank in found.ranks for step in rank.steps)


def test_a_lone_step_is_unknown_where_the_gpus_records_end_before_it(
    shared_traces: Path, tmp_path: Path
) -> None:
    paths = files_of(shared_traces / "fsdp2_h100_4rank")
    found = diagnosed(paths, Damage("GPU", None, edited(gpu_ends_early(0.6))), tmp_path)
    assert found.summary.startswith("No answer: the records of the GPU end early")
    assert not [one for one in found.findings if one.topic != "capture"]


def test_kernels_that_were_launched_before_the_capture_are_of_no_step(
    shared_traces: Path, tmp_path: Path
) -> None:
    """This GPU runs two steps behind its host: at 28 % of the capture it has begun with nothing of it."""
    paths = files_of(shared_traces / "ddp_resnet_mi300_8rank_r0")
    found = diagnosed(paths, Damage("GPU", 0, edited(gpu_ends_early(0.28))), tmp_path)
    assert "no answer: the records of the GPU end early" in found.summary
    assert found.budget is None
    assert not [one for one in found.findings if one.topic != "capture"]


def test_a_rank_that_ended_early_is_left_out_of_a_lone_step(shared_traces: Path, tmp_path: Path) -> None:
    paths = files_of(shared_traces / "fsdp2_h100_4rank")
    found = diagnosed(paths, Damage("shorter", 1, edited(shorter(0.3))), tmp_path)
    assert found.summary.startswith("Rank 1 is left out: its records end before a step")
    assert not [one for one in found.findings if one.topic == "straggler"]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.soak), 6])
def test_a_rank_whose_first_and_last_step_have_no_mark(
    shared_traces: Path, tmp_path: Path, rank: int
) -> None:
    """What follows its only marked step ends that, so that it compares with the steps of the other ranks."""
    paths = files_of(shared_traces / "published_pipeline_8rank")
    damage = Damage("without marks", rank, edited(without_marks))
    found = diagnosed(paths, damage, tmp_path)
    assert Truth(paths).invented(found, damage) == []
    assert found.summary.startswith(
        "One step captured; pipeline imbalance on ranks 6-7 (290 ms of the 2.12 s step): stage 3"
    )


def test_a_rank_that_ends_within_the_first_step_of_several_is_left_out(
    shared_traces: Path, tmp_path: Path
) -> None:
    paths = files_of(shared_traces / "published_pipeline_8rank")
    found = diagnosed(paths, Damage("shorter", 7, edited(shorter(0.323))), tmp_path)
    assert found.summary.startswith("Rank 7 is left out: its records end before a step")


def test_a_rank_whose_clock_is_set_back_in_its_only_step_is_left_out(
    shared_traces: Path, tmp_path: Path
) -> None:
    paths = files_of(shared_traces / "fsdp2_h100_4rank")
    found = diagnosed(paths, Damage("clock", 2, edited(clock_set_back(0.5, 20))), tmp_path)
    assert found.summary.startswith("Rank 2 is left out: its records end before a step")
    assert "clock-went-back" in {one.code for one in found.limits}
    assert not [one for one in found.findings if one.topic == "straggler"]


def test_a_clock_that_is_set_back_while_the_gpu_runs_behind_its_host_is_seen(
    shared_traces: Path, tmp_path: Path
) -> None:
    """The host of this job ends before: only what the streams run goes back."""
    paths = files_of(shared_traces / "ddp_resnet_mi300_8rank_r0")
    found = diagnosed(paths, Damage("clock", 0, edited(clock_set_back(0.8, 20))), tmp_path)
    assert "clock-went-back" in {one.code for one in found.limits}
    assert Truth(paths).invented(found, Damage("clock", 0, read_text)) == []


@pytest.mark.parametrize(("number", "share"), [(5, "47 %"), (0, "20 %")])
def test_kernels_that_a_lost_thread_launched_say_nothing_of_the_host(
    shared_traces: Path, tmp_path: Path, number: int, share: str
) -> None:
    """One thread of this job runs the forward pass and the optimizer, another one the backward pass."""
    paths = files_of(shared_traces / "ddp_resnet_a100_2rank_r0")
    found = diagnosed(paths, Damage("thread", 0, edited(lost_thread(number))), tmp_path)
    assert f"no answer: the calls that launched {share} of the kernels are not in the trace" in found.summary
    assert not [one for one in found.findings if one.topic != "capture"]


def test_a_rank_of_which_a_thread_of_gloo_is_lost_is_left_out(shared_traces: Path, tmp_path: Path) -> None:
    """Of its 27 all-reduces 20 run on one thread, 8 before the last complete step, and 7 on another."""
    paths = files_of(shared_traces / "cpu_gloo" / "patho_smallbucket")
    found = diagnosed(paths, Damage("thread", 0, edited(lost_thread(0))), tmp_path)
    assert found.summary.startswith("Rank 0 is left out: what a host thread did is missing in a step")
    assert any(one.message.startswith("rank 0: 8 of 27 collectives that were") for one in found.limits)


def test_a_thread_whose_events_are_cut_off_did_not_pause(shared_traces: Path, tmp_path: Path) -> None:
    """Both files name the thread that communicates for 13 of 21 ms, and end before its events."""
    paths = files_of(shared_traces / "cpu_gloo" / "comp")
    found = diagnosed(paths, Damage("cut", None, cut_text(0.943), "cut off"), tmp_path)
    assert found.summary == "The files of ranks 0-1 are cut off. No answer: no step is known to be whole."


def test_time_that_may_be_waiting_for_a_rank_promises_nothing(sample_traces: Path, tmp_path: Path) -> None:
    """Rank 1 waits 109 ms of each step for rank 0, which only the whole run shows."""
    paths = files_of(sample_traces / "cpu_ddp_slow_metrics")
    found = diagnosed(paths, Damage("cut", 0, cut_text(0.3), "cut off"), tmp_path)
    first, *others = found.findings
    assert (first.rule_id, first.severity, first.gain, first.fixes) == ("link.unsplit", "note", None, ())
    assert "transfer or waiting" in first.message
    assert not [one for one in others if one.rule_id.startswith(("link.", "order."))]


RUNS = (
    "fsdp2_h100_4rank",
    "published_pipeline_8rank",
    "dlrm_8rank_v100",
    "ddp_resnet_a100_2rank_r0",
    "cpu_gloo/patho_straggler",
)


SAMPLES = ("synthetic_ddp_tiny_batch", "cpu_ddp_slow_metrics")


@pytest.mark.parametrize("name", [*RUNS, *SAMPLES])
def test_no_damage_of_a_run_adds_a_warning(
    shared_traces: Path, sample_traces: Path, tmp_path: Path, name: str
) -> None:
    """One copy of each run, damaged in another way than those of the others."""
    paths = files_of((sample_traces if name in SAMPLES else shared_traces) / name)
    *_, damage = damages(paths, seed=7, count=1 + [*RUNS, *SAMPLES].index(name))
    found = answer(damaged(paths, damage, tmp_path))
    assert Truth(paths).invented(found, damage, notes=True) == [], (damage.name, damage.rank)
