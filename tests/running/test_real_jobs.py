"""Real jobs of two processes over gloo: captured while they run, named where they hang or slow down."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracedoc
from tests.collector.conftest import JOBS, environment, start
from tracedoc.errors import InputError
from tracedoc.run.manifest import read_manifest
from tracedoc.running.servers import Answer, receive

pytest.importorskip("torch", reason="torch is not installed: there is nothing to ask")
pytest.importorskip("aiohttp", reason="PyTorch's debug server needs it")
pytest.importorskip("tabulate", reason="PyTorch's debug server needs it")
pytestmark = pytest.mark.soak


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for one in processes:
        with one:  # closes its pipes
            if one.poll() is None:
                one.terminate()


def serve(port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"),
        *(str(JOBS / "serves.py"), str(port), *arguments),
    ]
    return subprocess.Popen(command, env=environment(), text=True, stderr=subprocess.DEVNULL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def captured(port: int, folder: Path) -> list[Answer]:
    """What the job's server sends as soon as the job trains."""
    for _ in range(120):
        with contextlib.suppress(InputError):
            return receive(f"http://localhost:{port}", folder, 1.0, 500)
        time.sleep(1)
    raise AssertionError("the job never trained")


def test_a_job_is_captured_by_its_debug_server_and_trains_on_as_without(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    losses = []
    for name in ("alone", "asked"):
        port, told = free_port(), tmp_path / name
        process = serve(port, "500", str(told))
        started.append(process)
        if name == "asked":
            folder = tmp_path / "run"
            folder.mkdir()
            received = captured(port, folder)
            asked = time.time()
        assert process.wait(300) == 0
        losses.append(json.loads(told.read_text())["loss"])
    assert [(one.rank, one.trouble) for one in received] == [(0, ""), (1, "")]
    assert losses[0] == losses[1]
    times = json.loads((tmp_path / "asked").read_text())["times"]
    after = [took for ended, took in times if ended - took > asked]
    before = [took for ended, took in times[50:] if ended < asked - 5]
    assert len(after) > 50
    if len(before) > 50:
        assert statistics.median(after) < 1.5 * statistics.median(before)
    diagnosis = tracedoc.diagnose([folder])
    assert diagnosis.run.ranks_seen == (0, 1)
    assert diagnosis.run.steps_judged > 5


def test_a_job_that_hangs_is_named_by_its_debug_server(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    port = free_port()
    started.append(serve(port, "500", str(tmp_path / "never"), "hang"))
    for _ in range(120):
        captured(port, tmp_path)
        if list(tmp_path.glob("*.flight")):
            break
        time.sleep(1)
    shown = subprocess.run(
        [sys.executable, "-m", "tracedoc", "diagnose", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "ank 1 never entered all_reduce" in shown
    assert "rank 1 is in <module> (serves.py:" in shown


def test_a_job_that_slows_down_is_watched_named_and_captured(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = [sys.executable, str(JOBS / "ranks.py"), "2", str(JOBS / "slows_down.py"), "600", "0.05"]
    started.append(start(["-o", str(folder), "--wait", "2", "--active", "3"], job, {"TRACEDOC_LIVE": "1"}))
    while not all((folder / f"rank-{rank}.steps").exists() for rank in (0, 1)):
        assert started[0].poll() is None
        time.sleep(1)
    watch = [sys.executable, "-m", "tracedoc", "watch", str(folder), "--on-drift", "capture"]
    shown = subprocess.run(
        watch, capture_output=True, text=True, timeout=400, check=True, env=environment() | {"COLUMNS": "200"}
    ).stdout
    assert started[0].wait(60) == 0
    assert "slower since about step" in shown
    assert "rank 1 entered" in shown
    assert "it is more than they in write_metrics (slows_down.py:" in shown
    again = read_manifest(max(folder.glob("again-*")))
    assert again is not None
    assert [one.state for one in again.ranks] == ["complete", "complete"]
    assert "traggler" in shown
