"""dynolog's daemon is asked as its own client asks, by a recorded protocol; what does not fit is told.

The daemon is no Python package: request and answer are those of its sources (``cli/src/commands/gputrace.rs``
and ``dynolog/src/rpc`` of facebookincubator/dynolog, MIT), not those of a daemon that ran here.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

import tracedoc
from tests.cli.test_cli import run as run_command
from tracedoc.errors import InputError
from tracedoc.run.manifest import read_manifest
from tracedoc.running import servers
from tracedoc.running.servers import gather, trigger
from tracedoc.testing import parse_lanes

ANSWER = {
    "activityProfilersBusy": 0,
    "activityProfilersTriggered": [101, 102],
    "eventProfilersBusy": 0,
    "eventProfilersTriggered": [],
    "processesMatched": [101, 102],
}


def framed(answer: object) -> bytes:
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return struct.pack("=i", len(content)) + content


Daemon = Callable[[bytes], tuple[int, list[bytes]]]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Return a function that starts a daemon with one answer: its port, and the requests that it gets."""
    sockets: list[socket.socket] = []

    def start(answer: bytes) -> tuple[int, list[bytes]]:
        server = socket.create_server(("127.0.0.1", 0))
        sockets.append(server)
        requests: list[bytes] = []

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                (length,) = struct.unpack("=i", connection.recv(4, socket.MSG_WAITALL))
                requests.append(connection.recv(length, socket.MSG_WAITALL))
                connection.sendall(answer)

        Thread(target=serve, daemon=True).start()
        return server.getsockname()[1], requests

    yield start
    for one in sockets:
        one.close()


def test_the_daemon_is_asked_as_its_own_client_asks(daemon: Daemon, tmp_path: Path) -> None:
    port, requests = daemon(framed(ANSWER))
    assert trigger("127.0.0.1", port, tmp_path, 1.5, 42) == [101, 102]
    request = json.loads(requests[0])
    assert request["config"].splitlines()[:3] == [
        f"ACTIVITIES_LOG_FILE={tmp_path}/trace.json",
        "PROFILE_START_TIME=0",
        "ACTIVITIES_DURATION_MSECS=1500",
    ]
    assert {name: request[name] for name in ("fn", "job_id", "pids")} == {
        "fn": "setKinetOnDemandRequest",
        "job_id": 42,
        "pids": [0],
    }


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (framed(ANSWER | {"activityProfilersTriggered": [], "processesMatched": []}), "knows no process"),
        (framed(b"HTTP/1.1 400 Bad Request"), "not as dynolog does"),
        (struct.pack("=i", -5), "an answer of -5 bytes"),
        (struct.pack("=i", 2**31 - 1), "an answer of 2147483647 bytes"),
        (framed(ANSWER)[:20], "closed the connection"),
        (framed([1]), "not as dynolog does"),
        (framed(b"[" * 100_000), "not as dynolog does"),
        (b"", "does not answer"),
    ],
)
def test_other_answers_are_refused(daemon: Daemon, tmp_path: Path, answer: bytes, why: str) -> None:
    port, _ = daemon(answer)
    with pytest.raises(InputError, match=why):
        trigger("127.0.0.1", port, tmp_path, 1.5, 0)


def test_files_are_taken_when_they_are_whole_and_named_by_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SECONDS_TO_WRITE", 60.0)
    texts = [lanes.to_json() for lanes in parse_lanes("compute 0-60\nallreduce 60-80", ranks=2)]
    files = [tmp_path / "trace_102.json", tmp_path / "trace_101.json"]
    looks = iter(range(10))

    def pause(seconds: float) -> None:
        look = next(looks)
        for path, text in zip(files, texts, strict=True):
            path.write_text(text[: len(text) // 2] if look == 0 else text)

    monkeypatch.setattr("time.sleep", pause)
    assert gather("node0", tmp_path, [101, 102], 1.5) == 2
    # Whole at the second look, and unchanged at the third.
    assert next(looks) == 3
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [(one.rank, one.file, one.part and one.part["pid"]) for one in manifest.ranks] == [
        (0, "rank-0.json", 102),
        (1, "rank-1.json", 101),
    ]
    assert tracedoc.diagnose([tmp_path]).run.ranks_seen == (0, 1)


def test_a_process_whose_file_does_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SECONDS_TO_WRITE", -1.5)
    assert gather("node0", tmp_path, [101], 1.5) == 0
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.silent[0].reason == "its file trace_101.json did not come, or is not whole"


def test_a_daemon_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    shown = run_command("collect", "--from", "dynolog://127.0.0.1:9", "-o", str(tmp_path / "run"))
    assert (shown.exit_code, "KINETO_USE_DAEMON=1" in shown.stderr) == (2, True)
    assert not (tmp_path / "run").exists()
