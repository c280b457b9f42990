"""Have dynolog's daemon trigger the profiler in the processes of a job, and take the traces that they write.

The daemon speaks JSON behind a length of four bytes, as its own ``dyno gputrace`` does. The job's processes
write the files, so the folder has to be on a disk that they share with this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import time
from pathlib import Path

from tracedoc.errors import InputError
from tracedoc.running.ask import SECONDS_TO_CONNECT, write_part

PORT = 1778
SECONDS_TO_WRITE = 120.0
"""How long after the time to record the files of all processes may take."""

_LENGTH = struct.Struct("=i")
_MAX_ANSWER_BYTES = 1 << 20
_MOST_PROCESSES = 4096
_HEAD_BYTES = 1 << 16


def trigger(host: str, port: int, folder: Path, seconds: float, job_id: int) -> list[int]:
    """Ask the daemon of a host for traces of ``seconds``; the numbers of the processes that will write them.

    Raises :class:`InputError` where no daemon answers, and where it knows no process of the job.
    """
    config = (
        f"ACTIVITIES_LOG_FILE={folder / 'trace.json'}\nPROFILE_START_TIME=0\n"
        f"ACTIVITIES_DURATION_MSECS={round(1000 * seconds)}\nPROFILE_REPORT_INPUT_SHAPES=true\n"
        "PROFILE_PROFILE_MEMORY=false\nPROFILE_WITH_STACK=false\nPROFILE_WITH_FLOPS=false\n"
        "PROFILE_WITH_MODULES=false"
    )
    request = {
        "fn": "setKinetOnDemandRequest",
        "config": config,
        "job_id": job_id,
        "pids": [0],
        "process_limit": _MOST_PROCESSES,
    }
    message = json.dumps(request).encode()
    try:
        with socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT) as connection:
            connection.sendall(_LENGTH.pack(len(message)) + message)
            (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
            if not 0 < length <= _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {length} bytes")
            answer = json.loads(_receive(connection, length))
            pids = answer["activityProfilersTriggered"] or answer["processesMatched"]
            pids = [pid for pid in pids if type(pid) is int and pid > 0][:_MOST_PROCESSES]
    except OSError as error:
        raise InputError(
            f"dynolog does not answer at {host}:{port}: {error or type(error).__name__}",
            "start its daemon with --enable_ipc_monitor, and the job with KINETO_USE_DAEMON=1",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{host}:{port} answered, but not as dynolog does: {error}", f"its daemon listens on port {PORT}"
        ) from None
    if not pids:
        raise InputError(
            "dynolog knows no process of that job, or all of them are being profiled",
            "start the job with KINETO_USE_DAEMON=1; --job-id is what SLURM_JOB_ID says there",
        )
    return pids


def _receive(connection: socket.socket, size: int) -> bytes:
    deadline = time.monotonic() + SECONDS_TO_CONNECT
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        if time.monotonic() > deadline:
            raise TimeoutError("its answer took too long")
        data += chunk
    return data


def gather(host: str, folder: Path, pids: list[int], seconds: float) -> int:
    """Wait for the files of the processes, and name them by their ranks; the number of complete ones.

    What of a process did not come is in the manifest with its reason.
    """
    deadline = time.monotonic() + seconds + SECONDS_TO_WRITE
    files = {pid: folder / f"trace_{pid}.json" for pid in pids}
    sizes: dict[int, int] = {}
    done: set[int] = set()
    while len(done) < len(files) and time.monotonic() < deadline:
        time.sleep(1.0)
        for pid, path in files.items():
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                if pid not in done and size == sizes.get(pid) and _is_whole(path):
                    done.add(pid)
                sizes[pid] = size
    for place, (pid, path) in enumerate(sorted(files.items())):
        rank, world_size = _rank(path) if pid in done else (place, 0)
        named = folder / f"rank-{rank}.json"
        if pid in done and not named.exists():
            os.replace(path, named)
        name = named.name if pid in done else ""
        reason = "" if name else f"its file {path.name} did not come, or is not whole"
        write_part(
            folder, rank=rank, world_size=max(world_size, len(pids)), host=host, server=f"dynolog://{host}",
            seconds=seconds, name=name, reason=reason, pid=pid,
        )  # fmt: skip
    return len(done)


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
        return file.read().rstrip().endswith(b"}")


def _rank(path: Path) -> tuple[int, int]:
    """Rank and size of the job as a trace says them; 0 and 0 where it says none."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    found = [re.search(rb'"%s"\s*:\s*(\d{1,6})\b' % name, head) for name in (b"rank", b"world_size")]
    rank, size = (int(one[1]) if one else 0 for one in found)
    return rank, size
