"""Step logs are followed from where the last look ended; drift is told within twenty steps, and who it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_cli import run as run_command
from tests.run.test_flight import call, dump
from tracedoc.cli.watch import follow
from tracedoc.collector.steps import StepLogWriter
from tracedoc.errors import InputError
from tracedoc.run.manifest import read_request, write_json
from tracedoc.run.steplog import BEGINS, CAPACITY, ENDS, HEADER, MAGIC, RECORD, STEP
from tracedoc.running.watch import JobWatch, LogTail, RankSteps, write_metrics
from tracedoc.testing.cases import draw_log

MS = 1_000_000


def job(tmp_path: Path, *logs: str) -> JobWatch:
    paths = {}
    for rank, words in enumerate(logs):
        paths[rank] = tmp_path / f"rank-{rank}.steps"
        paths[rank].write_bytes(draw_log(words, rank=rank))
    watch = JobWatch(paths)
    watch.look()
    return watch


def test_a_log_is_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.steps"
    writer = StepLogWriter(path, 0)
    tail = LogTail(path)
    now = 10**18
    for number in range(1, 4):
        writer.step(now + number * 10 * MS)
    assert [number for _, number, _, _ in tail.read()] == [1, 2, 3]
    assert tail.read() == []
    writer.step(now + 4 * 10 * MS)
    assert [(kind, number) for kind, number, _, _ in tail.read()] == [(STEP, 4)]


@pytest.mark.parametrize("first", [CAPACITY - 2, CAPACITY, CAPACITY + 5])
def test_a_ring_is_followed_over_its_end(tmp_path: Path, first: int) -> None:
    path = tmp_path / "rank-0.steps"
    ring = bytearray(RECORD.size * min(first, CAPACITY))

    def write(numbers: range) -> None:
        for number in numbers:
            record = RECORD.pack(number, STEP, 10**18 + number * 10 * MS, 10 * MS)
            place = number % CAPACITY * RECORD.size
            ring[place : place + RECORD.size] = record
        path.write_bytes(HEADER.pack(MAGIC, 0, CAPACITY, 10**18) + ring)

    write(range(first))
    tail = LogTail(path)
    assert len(tail.read()) == min(first, CAPACITY)
    write(range(first, first + 7))
    assert [number for _, number, _, _ in tail.read()] == list(range(first, first + 7))
    assert tail.read() == []


def test_a_log_that_is_not_there_yet_is_no_trouble(tmp_path: Path) -> None:
    assert LogTail(tmp_path / "rank-0.steps").read() == []


def test_slower_steps_are_told_within_twenty_and_against_what_was_before(tmp_path: Path) -> None:
    steady = job(tmp_path, "100 x200")
    assert (steady.drift_words, steady.slowest.usual_ns) == ("", 100 * MS)
    # Eight of the last 16 are slower, then nine of them.
    assert job(tmp_path, "100 x200 110 x8").drift_words == ""
    assert job(tmp_path, "100 x200 110 x9").drift_words == (
        "slower since about step 201: 110 ms a step instead of 100 ms, 10 % more"
    )


def test_steps_as_slow_as_some_before_are_no_drift(tmp_path: Path) -> None:
    assert job(tmp_path, "100 x100 120 x16 100 x100 118 x16").drift_words == ""
    assert job(tmp_path, "100 x200 104 x20").drift_words == ""
    # The slowest 16 of the first hour had a median of 120: from 1.25 times as much above the usual on.
    assert job(tmp_path, "100 x100 120 x16 100 x100 125 x16").drift_words == ""
    assert job(tmp_path, "100 x100 120 x16 100 x100 126 x16").slowest.drift == pytest.approx(0.26)


def test_steps_that_got_slower_are_no_measure_of_what_is_usual(tmp_path: Path) -> None:
    later = job(tmp_path, "100 x200 150 x500")
    assert later.slowest.usual_ns == 100 * MS
    assert later.slowest.drift == 0.5


def test_single_slow_steps_are_counted_and_those_of_a_drift_are_not(tmp_path: Path) -> None:
    assert "1 slow step, the last 101 with 900 ms" in job(tmp_path, "100 x100 900 100 x100").words
    # Until the median follows, eight of them stand out.
    assert job(tmp_path, "100 x100 200 x100").slowest.slow == 8


def test_what_logs_show_of_single_ranks_is_told(tmp_path: Path) -> None:
    watch = job(tmp_path, "100 x100 120 x20", "100 x100 120 x20 gc 24")
    assert watch.drift_words.endswith("; rank 1 collects garbage for 20 % of its last steps")
    watch = job(tmp_path, "100 x100 120 x20 wait 12", "100 x100 120 x20")
    assert watch.drift_words.endswith("; rank 0 waits for a core for 10 % of its last steps")


def test_steps_under_the_profiler_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.steps"
    writer = StepLogWriter(path, 0)
    now = 2 * 10**18
    for number in range(1, 41):
        now += 100 * MS
        writer.step(now)
        if number in (10, 20):
            writer.window(ENDS if number == 20 else BEGINS)
    steps = RankSteps()
    steps.add(LogTail(path).read())
    # The first has no length; ten are in the window, and one has its end in it.
    assert len(steps._held) == 40 - 1 - 11


def test_the_textfile_has_a_line_a_rank_and_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    write_metrics(job(tmp_path, "100 x200 110 x20", "100 x200"), 'a "run"', path)
    text = path.read_text()
    assert 'tracedoc_step_seconds{run="a \\"run\\"",rank="0"} 0.11\n' in text
    assert 'tracedoc_usual_step_seconds{run="a \\"run\\"",rank="1"} 0.1\n' in text
    assert 'tracedoc_steps_total{run="a \\"run\\"",rank="1"} 201\n' in text
    assert text.count("# TYPE") == 6
    assert [one.name for one in tmp_path.glob(".job*")] == []


def run_folder(tmp_path: Path, *logs: str, **more: object) -> Path:
    """A run of ranks that are this process, with their logs."""
    for rank, words in enumerate(logs):
        (tmp_path / f"rank-{rank}.steps").write_bytes(draw_log(words, rank=rank))
        part = {
            "schema": 1,
            "part": "rank",
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step_log": f"rank-{rank}.steps",
            **more,
        }
        write_json(tmp_path / f"rank-{rank}.manifest.json", part)
    return tmp_path


def end_job(folder: Path) -> None:
    write_json(
        folder / "node-a-1.manifest.json", {"schema": 1, "part": "node", "ended": "now", "exit_code": 0}
    )


def each_second(do: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``do`` called with 1, 2, ... while seconds pass in sleeps, which take no time."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        before, slept[0] = slept[0], round(slept[0] + seconds, 6)
        for second in range(int(before) + 1, int(slept[0]) + 1):
            do(second)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("tracedoc.cli.watch.SECONDS_SILENT", 1e12)


def test_a_job_that_has_ended_is_told_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "100 x200")
    end_job(folder)
    shown = run_command("watch", str(folder), "--prometheus", str(tmp_path / "job.prom"))
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1].endswith(
        "the job has ended; step 200: 100 ms (median of 16), usual 100 ms (steps 11-168)"
    )
    assert (tmp_path / "job.prom").exists()


def test_ranks_that_come_later_or_again_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = {"schema": 1, "part": "node", "host": socket.gethostname(), "pid": os.getpid()}
    write_json(tmp_path / "node-a-1.manifest.json", node)

    def go_on(second: int) -> None:
        if second == 1:
            run_folder(tmp_path, "100 x200", pid=2**22 + 1)
        elif second == 2:
            run_folder(tmp_path, "10 x50", "20 x60", restart=1)
        else:
            end_job(tmp_path)

    each_second(go_on, monkeypatch)
    follow(tmp_path, tmp_path / "job.prom", False, 0.0)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")][:2] == [
        "step 200: 100 ms (median of 16), usual 100 ms (steps 11-168)",
        "step 60: 20 ms (median of 16)",
    ]


def test_a_folder_without_logs_is_told(tmp_path: Path) -> None:
    assert "has no step log" in run_command("watch", str(tmp_path)).stderr


def test_on_drift_ranks_that_take_requests_tell_who_is_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "100 x200", "100 x200", live=True)

    def answer(second: int) -> None:
        """Slow down in the first second, answer the request in the next, and end."""
        for rank in (0, 1):
            (folder / f"rank-{rank}.steps").write_bytes(draw_log("100 x200 130 x20", rank=rank))
        if second == 2:
            request = read_request(folder)
            assert request is not None
            assert (request.active, request.number) == (0, 1)
            for rank in (0, 1):
                calls = [
                    call("all_reduce", n, 10**9 + n / 10 + rank * (n % 2) / 50, done=True) for n in range(8)
                ]
                path = folder / request.folder / f"rank-{rank}.flight"
                path.write_bytes(dump(*calls, groups={"dp": "[0, 1]"}))
                function = "write_metrics" if rank else "forward"
                Path(f"{path}.stack").write_text(f"train.py(4): {function}@7 x30\ntrain.py(1): step@2 x10")
        if second == 3:
            end_job(folder)

    each_second(answer, monkeypatch)
    follow(folder, None, False, 10.0)
    shown = capsys.readouterr().out
    assert "slower since about step 205: 130 ms a step instead of 100 ms, 30 % more" in shown
    assert "rank 1 entered 4 of 8 calls last, 20 ms (median) after all others" in shown
    assert "it is more than they in write_metrics (train.py:7)" in shown
    assert not (folder / "again-1").exists()


def test_ranks_that_take_no_requests_are_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "100 x200 130 x20")
    monkeypatch.setattr("time.sleep", lambda seconds: end_job(folder))
    follow(folder, None, True, 10.0)
    shown = capsys.readouterr().out
    assert "who is late is not known: the job of" in shown
    assert "not captured: the job of" in shown


def test_a_textfile_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        follow(run_folder(tmp_path, "100 x20"), tmp_path / "missing" / "a.prom", False, 10.0)
