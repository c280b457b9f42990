"""A job that failed is told by the rank that went first, its last step, and how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tests.run.test_manifest import put
from tracedoc.errors import InputError
from tracedoc.run.ending import ending_limits, how_it_ended
from tracedoc.run.manifest import read_manifest, write_manifest
from tracedoc.testing import parse_lanes
from tracedoc.testing.cases import draw_log

NS = 1_000_000_000


def rank(number: int, total: int = 0, ended: str = "", **more: object) -> dict[str, object]:
    """Return the part of a rank; ``ended`` is what ended it in order, at the second of its number."""
    part = {
        "schema": 1,
        "part": "rank",
        "rank": number,
        "host": "n0",
        "pid": 100 + number,
        "level": "full",
        "state": "complete",
        "file": f"rank-{number}.json",
        "steps": {"total": total},
        **more,
    }
    if ended:
        part |= {"end": ended, "ended": f"2026-01-01T00:00:{10 + number}+00:00"}
    return part


def node(code: int) -> dict[str, object]:
    return {"schema": 1, "part": "node", "host": "n0", "ended": "now", "exit_code": code}


def exited(number: int, code: int) -> dict[str, object]:
    return {"schema": 1, "part": "exit", "host": "n0", "pid": 100 + number, "exit_code": code, "exited_ns": 9}


def words(folder: Path, *parts: dict[str, object], logs: dict[int, str] | None = None) -> str:
    put(folder, *parts)
    for number, drawn in (logs or {}).items():
        (folder / f"rank-{number}.steps").write_bytes(draw_log(drawn, rank=number))
    return how_it_ended(write_manifest(folder))


def test_a_job_that_ended_well_is_not_spoken_of(tmp_path: Path) -> None:
    assert words(tmp_path, rank(0, 20, "the job ended"), node(0)) == ""
    # Many scripts leave by os._exit when all is done.
    assert words(tmp_path / "left", rank(0, 20), node(0)) == ""
    assert ending_limits(None) == []


def test_the_launcher_tells_exit_codes(tmp_path: Path) -> None:
    first = rank(1, 15, "the job ended by RuntimeError")
    second = rank(2, 15, "the job ended by DistBackendError")
    parts = (rank(0, 3), first, second, exited(0, -15), exited(1, 1), exited(2, 1), node(1))
    assert words(tmp_path, *parts) == "rank 1 ended after step 14 with exit code 1 (RuntimeError)"


def test_a_rank_that_was_killed_is_told_by_its_log(tmp_path: Path) -> None:
    killed = rank(1, step_log="rank-1.steps", state="recording", file=None)
    others = rank(0, 10, "the job ended by RuntimeError")
    said = words(tmp_path, others, killed, exited(1, -9), node(1), logs={1: "100 x9"})
    assert said == "rank 1 ended after step 9 by SIGKILL, perhaps for lack of memory"


def test_a_log_that_others_outlived_by_far_is_a_lower_bound(tmp_path: Path) -> None:
    killed = rank(1, step_log="rank-1.steps")
    others = rank(0, 30, "the job ended by RuntimeError")
    said = words(tmp_path, others, killed, exited(1, 4), node(1), logs={1: "100 x11"})
    assert said == "rank 1 ended after step 11 or later with exit code 4"


def test_short_steps_may_be_missing_where_a_rank_was_killed(tmp_path: Path) -> None:
    killed = rank(0, step_log="rank-0.steps")
    for length, later in ((10, ""), (9.9, " or later")):
        said = words(tmp_path / str(length), killed, node(3), logs={0: f"{length} x8"})
        assert said == f"rank 0 ended after step 8{later} with exit code 3"
    raised = rank(0, 9, "the job ended by ValueError", step_log="rank-0.steps")
    said = words(tmp_path / "raised", raised, node(1), logs={0: "5 x7"})
    assert said == "rank 0 ended after step 8 with exit code 1 (ValueError)"


def test_without_exit_codes_of_ranks_the_first_sign_counts(tmp_path: Path) -> None:
    parts = (rank(0, 9, "the job ended"), rank(1, 9, "the job ended by ValueError"), node(1))
    assert words(tmp_path, *parts) == "rank 1 ended after step 8 by ValueError"
    gone = rank(1, step_log="rank-1.steps")
    said = words(tmp_path / "gone", rank(0, 9, "the job ended"), gone, node(1), logs={1: "100 x8"})
    assert said == "rank 1 ended after step 8 without a word: it was killed, or left by os._exit"


def test_the_only_process_ends_as_its_command(tmp_path: Path) -> None:
    killed = rank(0, step_log="rank-0.steps")
    assert words(tmp_path, killed, node(128 + 9), logs={0: "100 x8"}) == (
        "rank 0 ended after step 8 by SIGKILL, perhaps for lack of memory"
    )
    assert words(tmp_path / "3", rank(0, 9, "the job ended"), node(3)) == (
        "rank 0 ended after step 8 with exit code 3"
    )


def test_a_command_that_fails_after_its_ranks_is_told_alone(tmp_path: Path) -> None:
    parts = (rank(0, 9, "the job ended"), rank(1, 9, "the job ended"), node(7))
    assert words(tmp_path, *parts) == "the job ended with exit code 7"


def test_an_end_that_nobody_saw_is_a_limit(tmp_path: Path) -> None:
    put(tmp_path, rank(0, 9), {"schema": 1, "part": "node", "host": "n0"})
    assert [limit.code for limit in ending_limits(read_manifest(tmp_path))] == ["job-unfinished"]


def test_diagnose_says_first_that_the_job_failed(tmp_path: Path) -> None:
    words(tmp_path, rank(0, step_log="rank-0.steps"), node(128 + 6), logs={0: "100 x8"})
    (builder,) = parse_lanes("compute 0-60", ranks=1)
    builder.write(tmp_path / "rank-0.json")
    diagnosis = tracedoc.diagnose([tmp_path])
    assert diagnosis.summary.startswith("The job failed: rank 0 ended after step 8 by SIGABRT. ")
    assert diagnosis.limits[0].code == "job-failed"
    (tmp_path / "rank-0.json").unlink()
    with pytest.raises(InputError, match="rank 0 ended after step 8 by SIGABRT"):
        tracedoc.diagnose([tmp_path])


def test_no_rank_of_a_job_that_ended_well_crashed(tmp_path: Path) -> None:
    """Two of five steps are missing on rank 1: its recording was closed sooner, nothing more."""
    put(tmp_path, *(rank(number, 20, "the job ended") for number in (0, 1)), node(0))
    for number, count in ((0, 5), (1, 2)):
        builder = parse_lanes("compute 0-60\nallreduce 60-100 64MiB", ranks=2, steps=count)[number]
        builder.write(tmp_path / f"rank-{number}.json")
    codes = {limit.code for limit in tracedoc.diagnose([tmp_path]).limits}
    assert not codes & {"ended-early", "job-failed", "job-unfinished"}


def test_a_manifest_of_any_types_is_no_error(tmp_path: Path) -> None:
    for odd in (None, True, -1, 10**18, 1.5, "x", "2026-99-99", [], {}, "9999-12-31T23:59:59"):
        for key in ("end", "ended", "exit_code", "exited_ns", "step_log", "steps", "pid", "host"):
            folder = tmp_path / f"{key}-{len(list(tmp_path.iterdir()))}"
            assert isinstance(words(folder, rank(0, 9, **{key: odd}), exited(0, 1), node(1)), str)
            assert isinstance(words(folder, rank(0), {**exited(0, 1), key: odd}, {**node(1), key: odd}), str)
