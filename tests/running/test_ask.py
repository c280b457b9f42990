"""A request lies in the run directory before the step that it names, and its answer is waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_cli import run as run_command
from tests.run.test_flight import call, dump
from tests.running.test_watch import end_job, run_folder
from tracedoc.collector import live
from tracedoc.collector.live import RequestWatch
from tracedoc.errors import InputError
from tracedoc.run.manifest import REQUEST_NAME, Request, read_request, write_json
from tracedoc.running import ask as asking
from tracedoc.running.ask import ask, wait_for


def test_all_ranks_begin_at_a_step_that_lies_four_seconds_ahead(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "100 x50", "100 x49 2000", live=True)
    request, ranks = ask(folder, warmup=2, active=3)
    # The log's step 50 is the 51st: 40 usual steps later and one more, as that one has begun.
    assert request == Request(number=1, at=92, warmup=2, active=3)
    assert read_request(folder) == request
    assert (len(ranks), (folder / "again-1").is_dir()) == (2, True)
    assert ask(folder, warmup=1, active=5)[0].number == 2


def test_a_job_that_takes_no_requests_or_has_ended_is_not_asked(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "100 x50")
    shown = run_command("collect", "--again", str(folder))
    assert (shown.exit_code, "takes no requests" in shown.stderr) == (2, True)
    assert "TRACEDOC_LIVE=1 tracedoc collect" in shown.stderr
    end_job(run_folder(tmp_path, "100 x50", live=True))
    with pytest.raises(InputError, match="has ended"):
        ask(folder, warmup=1, active=5)
    with pytest.raises(InputError, match="no run directory"):
        ask(tmp_path / "missing", warmup=1, active=5)
    assert not (folder / REQUEST_NAME).exists()


def test_waiting_ends_when_every_rank_has_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path, "100 x50", "100 x50", live=True)
    request, ranks = ask(folder, warmup=1, active=5)
    states = iter(["recording", "complete"])

    def pause(seconds: float) -> None:
        state = next(states)
        for rank in (0, 1):
            part = {"schema": 1, "part": "rank", "rank": rank, "state": state if rank else "complete"}
            write_json(folder / request.folder / f"rank-{rank}.manifest.json", part)

    monkeypatch.setattr("time.sleep", pause)
    assert wait_for(folder, request, ranks)
    assert next(states, None) is None


def test_a_job_without_steps_stands_still_and_its_dumps_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "100 x50", "100 x50", live=True)
    monkeypatch.setattr(asking, "SECONDS_STILL", 0.0)

    def pause(seconds: float) -> None:
        for rank in (0, 1):
            calls = [call("all_reduce", 1, done=True), *([call("all_reduce", 2)] if rank == 0 else [])]
            path = folder / "again-1" / f"rank-{rank}.flight"
            path.write_bytes(dump(*calls, groups={"dp": "[0, 1]"}))

    monkeypatch.setattr("time.sleep", pause)
    shown = run_command("collect", "--again", str(folder))
    assert shown.exit_code == 2
    assert "the job stands still: rank 1 never entered all_reduce 2 of group dp" in shown.stderr


def test_a_process_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "100 x50", live=True)
    request, _ = ask(folder, warmup=1, active=5)
    gone = run_folder(tmp_path, "100 x50", live=True, pid=2**22 + 1)
    with pytest.raises(InputError, match="ended meanwhile"):
        wait_for(gone, request, asking.live_ranks(gone))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"number": "1", "at": 2}',
        '{"number": 1, "at": -2}',
        '{"number": 1, "at": 2, "folder": "/etc"}',
        '{"number": 1, "at": true}',
        json.dumps({"number": 1, "at": 2}) + " " * 20_000,
    ],
)
def test_what_is_no_request_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / REQUEST_NAME).write_text(content)
    assert read_request(tmp_path) is None


def test_a_rank_answers_a_request_once_and_none_that_lay_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_SAMPLES", 1)
    asked: list[Request] = []
    (tmp_path / REQUEST_NAME).write_text('{"number": 1, "at": 9}')
    watch = RequestWatch(tmp_path, "rank-0", asked.append, lambda: 0)
    watch.look()
    assert asked == []
    (tmp_path / REQUEST_NAME).write_text('{"number": 2, "at": 9}')
    watch.look()
    watch.look()
    assert asked == [Request(2, 9)]
    # Without steps it is for the dumps alone, whatever this process holds.
    (tmp_path / REQUEST_NAME).write_text('{"number": 3, "at": 9, "active": 0}')
    watch.look()
    assert len(asked) == 1
    assert (tmp_path / "again-3").is_dir()


def test_only_one_way_to_capture_is_taken(tmp_path: Path) -> None:
    for given in ((), ("--again", "a", "--from", "http://b"), ("--again", "a", "--", "true")):
        assert "one of -- COMMAND, --from URL and --again RUN" in run_command("collect", *given).stderr
    assert os.listdir(tmp_path) == []
