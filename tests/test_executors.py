"""The same answer wherever ranks are read; what is lost with a worker; and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

import tracedoc.executors.run
import tracedoc.pipeline
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import to_json
from tracedoc.errors import InputError
from tracedoc.executors.run import Lost, OnBytes, _start_method, run_each
from tracedoc.pipeline import Options, ProgressEvent, diagnose

RUN = "synthetic_ddp_tiny_batch"
COMMAND = [sys.executable, "-m", "tracedoc", "diagnose"]


def length(path: str, on_bytes: OnBytes | None) -> int:
    """Stands for the work of a rank; some paths are fatal."""
    if path.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if path.startswith("hungry"):
        raise MemoryError
    if path.startswith("cut off"):
        connection.Connection._send = write_half  # type: ignore[attr-defined]
    if path.startswith("buggy"):
        raise ZeroDivisionError("a bug")
    if path.startswith("damaged"):
        raise InputError("damaged is damaged")
    if on_bytes is not None:
        on_bytes(len(path))
    return len(path)


def write_half(self: Any, data: bytes, *_: Any) -> None:
    """Stands for the end of a worker in the middle of what it says."""
    os.write(self.fileno(), bytes(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def in_order(path: str, on_bytes: OnBytes | None) -> float:
    return float(path)


FREED_BYTES = 64_000_000
_held: list[bytes] = []


def private_bytes(path: str, on_bytes: OnBytes | None) -> int:
    """Say what this process holds for itself alone; take a lot after that, and free all but its end."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    before = sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Private_Dirty:"))
    taken = [bytes(50_000) for _ in range(FREED_BYTES // 50_000)]  # each from the heap, by its size
    _held.append(taken[-1])
    return before


def frozen(path: str, on_bytes: OnBytes | None) -> int:
    return gc.get_freeze_count()


@pytest.fixture(scope="module")
def here(sample_traces: Path) -> Diagnosis:
    return diagnose([sample_traces / RUN], Options(jobs=1))


# -- the same answer


def test_a_pool_says_what_one_process_says(here: Diagnosis, sample_traces: Path):
    assert to_json(diagnose([sample_traces / RUN], Options(jobs=2))) == to_json(here)


def test_dask_says_what_one_process_says(here: Diagnosis, sample_traces: Path):
    pytest.importorskip("distributed", reason="Dask is not installed")
    found = diagnose([sample_traces / RUN], Options(jobs=2, executor="dask://local"))
    assert to_json(found) == to_json(here)


def test_mpi_says_what_one_process_says(here: Diagnosis, sample_traces: Path, repository: Path):
    done = over_mpi(repository, str(sample_traces / RUN), "-f", "json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == to_json(here).strip()


@pytest.mark.parametrize("wrong", [["nowhere.json"], ["."], ["nowhere.json", "--steps", "x"]])
def test_an_error_is_told_by_one_process_of_an_mpi_job(wrong: list[str], repository: Path, tmp_path: Path):
    done = over_mpi(repository, *(str(tmp_path) if word == "." else word for word in wrong))
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1


def over_mpi(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Diagnose in two processes of an MPI job."""
    command = [*mpi(2), *COMMAND, *words, "--executor", "mpi"]
    return subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False, timeout=120)


def mpi(processes: int) -> list[str]:
    """Return what starts a job of so many processes; skip the test where there is no MPI."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("no MPI is installed: there is no mpiexec")
    return [mpiexec, "-n", str(processes)]


def test_a_plain_script_may_diagnose_with_workers(sample_traces: Path, repository: Path, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import tracedoc\n"
        f"found = tracedoc.diagnose([{str(sample_traces / RUN)!r}], tracedoc.Options(jobs=2))\n"
        "print(len(found.ranks))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repository)},
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


# -- what is lost


def test_a_killed_worker_costs_its_own_path_only():
    sizes = {"killed": 90, "a": 50, "bb": 40, "ccc": 30, "killed too": 20, "dddd": 10}
    found = dict(run_each(length, sizes, jobs=2))
    assert {path: found[path] for path in ("a", "bb", "ccc", "dddd")} == {
        "a": 1,
        "bb": 2,
        "ccc": 3,
        "dddd": 4,
    }
    assert isinstance(found["killed"], Lost)
    assert isinstance(found["killed too"], Lost)


def test_a_worker_that_is_killed_while_it_answers_keeps_nobody_waiting():
    found = dict(run_each(length, {"cut off": 3, "a": 2, "bb": 1}, jobs=2))
    assert isinstance(found.pop("cut off"), Lost)
    assert found == {"a": 1, "bb": 2}


def test_a_bug_in_a_worker_is_raised_and_says_where_it_was():
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        list(run_each(length, {"buggy": 3, "a": 2}, jobs=2))
    assert "in length" in str(caught.value.__cause__)


@pytest.mark.parametrize("jobs", [1, 2])
def test_too_little_memory_and_damage_cost_their_own_path_only(jobs: int):
    found = dict(run_each(length, {"hungry": 3, "damaged": 2, "a": 1}, jobs=jobs))
    assert found["a"] == 1
    assert isinstance(found["hungry"], Lost)
    assert isinstance(found["damaged"], InputError)


def test_a_lost_rank_is_a_limit_and_the_others_stand(sample_traces: Path, monkeypatch: pytest.MonkeyPatch):
    run = sample_traces / "synthetic_fsdp2_healthy"
    lost = str(run / "rank-2.json.gz")

    def lose_one(work, sizes, **options):
        for path in sizes:
            yield path, Lost("killed") if path == lost else work(path, None)

    monkeypatch.setattr(tracedoc.pipeline, "run_each", lose_one)
    found = diagnose([run])
    assert found.run.ranks_seen == (0, 1, 3)
    assert {limit.code for limit in found.limits} >= {"lost-rank", "missing-ranks"}
    with pytest.raises(InputError, match="rank-2"):
        diagnose([run], Options(strict=True))


def test_a_damaged_file_costs_its_rank_in_a_pool_too(sample_traces: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(sample_traces / RUN, run)
    (run / "rank-1.json.gz").unlink()
    (run / "rank-1.json").write_text('{"traceEvents": []}')
    found = diagnose([run], Options(jobs=2))
    assert found.run.ranks_seen == (0, 2, 3)
    assert "unread-file" in {limit.code for limit in found.limits}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone keeps what was freed")
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_freed_of_one_file_is_not_held_through_the_next(jobs: int):
    paths = [str(number) for number in range(4)]
    held = dict(run_each(private_bytes, dict.fromkeys(paths, 1), jobs=jobs))
    assert max(held.values()) - min(held.values()) < FREED_BYTES / 2


def test_the_collector_leaves_alone_what_a_worker_shares_with_its_parent():
    found = dict(run_each(frozen, {"a": 1, "b": 1}, jobs=2))
    assert min(found.values()) > 0


def test_the_largest_file_comes_first():
    found = list(run_each(in_order, {"1": 1, "3": 3, "2": 2}, jobs=1))
    assert [value for _, value in found] == [3, 2, 1]


# -- what is missing


@pytest.mark.parametrize(
    ("executor", "module", "extra"),
    [("dask://local", "distributed", ".[dask]"), ("mpi", "mpi4py", ".[mpi]")],
)
def test_an_executor_that_is_not_installed_says_what_to_install(
    executor: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        list(run_each(length, {"a": 1, "b": 1}, executor=executor))
    assert caught.value.hint == f"in a checkout of tracedoc: pip install '{extra}'"


@pytest.mark.parametrize("executor", ["ray", "dask://", "", "mpi://node"])
def test_an_unknown_executor_is_an_error_that_names_the_known_ones(executor: str):
    with pytest.raises(InputError) as caught:
        run_each(length, {"a": 1}, executor=executor)
    assert "dask://HOST:PORT" in caught.value.hint


def test_standard_input_stays_in_this_process():
    assert dict(run_each(length, {"-": 0, "abc": 1}, jobs=2)) == {"-": 1, "abc": 3}
    with pytest.raises(InputError, match="standard input"):
        run_each(length, {"-": 0}, executor="mpi")


# -- progress


def test_progress_moves_while_one_file_is_read(tmp_path: Path):
    event = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": %d, "dur": 1, "args": {}},\n'
    path = tmp_path / "rank-0.json"
    path.write_text('{"traceEvents": [\n' + "".join(event % (2 * i) for i in range(20_000)) + "{}]}")
    events: list[ProgressEvent] = []
    diagnose([path], progress=events.append)
    size = path.stat().st_size
    assert any(0 < event.done_bytes < size and event.done_ranks == 0 for event in events)
    assert (events[-1].done_ranks, events[-1].total_ranks) == (1, 1)
    assert (events[-1].done_bytes, events[-1].total_bytes) == (size, size)


@pytest.mark.parametrize("jobs", [1, 2])
def test_bytes_of_all_paths_are_told_together(jobs: int):
    ticks: list[int] = []
    assert len(list(run_each(length, {"abc": 3, "de": 2}, jobs=jobs, on_bytes=ticks.append))) == 2
    assert ticks == sorted(ticks)
    assert ticks[-1] == 5


# -- stopping


@contextmanager
def reading(
    folder: Path, jobs: int, repository: Path, *options: str, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start ``tracedoc diagnose`` in a session of its own on endless files; yield once they are read.

    It can be interrupted even where the tests themselves run in the background and ignore interrupts.
    """
    paths = [folder / f"rank-{number}.json" for number in range(jobs)]
    for path in paths:
        os.mkfifo(path)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*before, *COMMAND, *map(str, paths), "--jobs", str(jobs), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repository,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, ours)
    threading.Thread(target=_release, args=(process, paths), daemon=True).start()
    with ExitStack() as files:
        for path in paths:
            # Opening waits for the reader.
            file = files.enter_context(path.open("w", buffering=1))
            assert process.poll() is None, process.communicate()[1]
            file.write('{"traceEvents": [\n')
        yield process


def _release(process: subprocess.Popen[str], paths: Sequence[Path]) -> None:
    """Let go whoever waits for a reader of these pipes once the process has ended: it will not read them."""
    process.wait()
    for path in paths:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_stops_at_once_and_leaves_no_process(jobs: int, tmp_path: Path, repository: Path):
    with reading(tmp_path, jobs, repository) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=5) == 130
        # The pipes reach their end when the last process that was started has gone.
        assert "".join(process.communicate(timeout=5)).strip() == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_an_interrupt_ends_a_local_dask_cluster(tmp_path: Path, repository: Path):
    pytest.importorskip("distributed", reason="Dask is not installed")
    with reading(tmp_path, 2, repository, "--executor", "dask://local") as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert "".join(process.communicate(timeout=5)).strip() == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_an_interrupt_ends_an_mpi_job(tmp_path: Path, repository: Path):
    with reading(tmp_path, 2, repository, "--executor", "mpi", before=mpi(3)) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=5) == 130
        assert "Traceback" not in "".join(process.communicate(timeout=5))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, repository: Path):
    with reading(tmp_path, 2, repository) as process:
        process.kill()
        process.communicate(timeout=5)
    assert process.returncode == -signal.SIGKILL


# -- how workers start

WORK = """
import multiprocessing, os, signal

def kind(path, on_bytes):
    if path == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return type(multiprocessing.current_process()).__name__
"""
SCRIPT = """
import sys, threading
from tracedoc.executors.run import run_each
from tracedoc.executors.run import Lost
from work import kind

_, beside, *paths = sys.argv
if beside == "a thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for path, result in run_each(kind, dict.fromkeys(paths, 1), jobs=2):
    print(path, "lost" if isinstance(result, Lost) else result)
"""


def kinds_of_workers(beside: str, paths: list[str], folder: Path, repository: Path) -> dict[str, str]:
    """Return the kind of process that read each path, where ``beside`` the main thread is another or not."""
    (folder / "work.py").write_text(WORK)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), beside, *paths],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repository)},
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize(("beside", "kind"), [("nothing", "ForkProcess"), ("a thread", "ForkServerProcess")])
def test_workers_are_forked_where_no_other_thread_can_hold_a_lock(
    beside: str, kind: str, tmp_path: Path, repository: Path
):
    found = kinds_of_workers(beside, ["a", "b", "c"], tmp_path, repository)
    assert found == {"a": kind, "b": kind, "c": kind}


def test_where_the_system_does_not_tell_its_threads_nothing_is_forked(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert _start_method() != "fork"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_where_no_process_may_be_started_this_one_reads(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tracedoc.executors.run, "_start_method", lambda: "fork")
    monkeypatch.setattr(os, "fork", refuse)
    assert dict(run_each(length, {"abc": 3, "de": 2}, jobs=2)) == {"abc": 3, "de": 2}


def test_a_worker_of_a_pool_of_the_caller_reads_itself():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(lengths, (["abc", "de"],)) == {"abc": 3, "de": 2}


def test_threads_that_start_workers_do_not_lose_the_script():
    script = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lengths, [["abc", "de"]] * 3))
    assert found == [{"abc": 3, "de": 2}] * 3
    assert sys.modules["__main__"] is script


def lengths(paths: list[str]) -> dict[str, Any]:
    return dict(run_each(length, dict.fromkeys(paths, 1), jobs=2))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_killed_fork_costs_its_own_path_only(tmp_path: Path, repository: Path):
    found = kinds_of_workers("nothing", ["a", "killed", "b", "c"], tmp_path, repository)
    assert found.keys() == {"a", "killed", "b", "c"}
    assert [path for path, kind in found.items() if kind == "lost"] == ["killed"]
