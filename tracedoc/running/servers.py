"""Traces of a running job from other tools: PyTorch's debug server in it, dynolog's daemon on its host."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tracedoc.errors import InputError
from tracedoc.run.flight import FLIGHT_SUFFIX, STACK_SUFFIX, parse_dump, waits_in
from tracedoc.run.untrusted import UnusableError
from tracedoc.running.ask import SECONDS_TO_CONNECT, write_part

SECONDS_TO_ANSWER = 120.0
"""How long after the time to record all traces may take to arrive; the server gives its ranks 60 seconds."""

ASKED_AT_MOST = 16_384
MAX_TEXT_BYTES = 64 << 20
"""A dump or a stack of a rank beyond this size is cut."""

_PIECE_BYTES = 1 << 18
_LETTERS_OF_ERROR = 80
_HELD_BACK = 512
"""So many bytes before a mark are not passed on until what follows them is known."""

_SPARE_BYTES = 64 << 20
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+) in ([^\n]+)')
_INSTALLED = ("site-packages", "dist-packages", "/lib/python3")


@dataclass(slots=True)
class Answer:
    """What was received of one rank: its host as the server names it, and what is wrong, "" for nothing."""

    rank: int
    host: str
    trouble: str = ""
    name: str = ""
    text: str = ""


class Page:
    """A page that is read once, front to back; raises ``OSError`` where it ends early or takes too long."""

    def __init__(self, response: http.client.HTTPResponse, deadline: float) -> None:
        self._response, self._deadline = response, deadline
        self._buffer = b""
        self._ended = False

    def skip_to(self, *marks: bytes, sink: Callable[[bytes], object] = lambda data: None) -> bytes:
        """Read up to and with the first of some marks, and return it; b"" at the end of the page.

        What comes before goes to ``sink``.
        """
        while True:
            places = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
            if places:
                place, mark = min(places)
                sink(self._buffer[:place])
                self._buffer = self._buffer[place + len(mark) :]
                return mark
            if self._ended:
                return b""
            if len(self._buffer) > _HELD_BACK:
                sink(self._buffer[:-_HELD_BACK])
                self._buffer = self._buffer[-_HELD_BACK:]
            self._read()

    def _read(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("its answer took too long")
        try:
            chunk = self._response.read1(_PIECE_BYTES)
        except http.client.HTTPException as error:
            raise ConnectionError(f"its answer is damaged: {type(error).__name__}") from None
        self._ended = not chunk
        self._buffer += chunk


def check_url(url: str) -> tuple[str, int]:
    """Host and port of a server; raises :class:`InputError` for what is no plain http address of one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or parts.username:
        raise InputError(
            f"{url} is no address of a debug server",
            "give it as http://HOST:25999, the port of rank 0's server",
        )
    return host, port or 25999


def receive(url: str, folder: Path, seconds: float, max_mb: float) -> list[Answer]:
    """Fetch traces of ``seconds`` of all ranks into a folder that is there, and dumps of a job that hangs.

    Where a rank imports modules just now, no trace is asked for: a profiler that starts meanwhile breaks the
    import, and so the job. Raises :class:`InputError` then, and where no such server answers.
    """
    host, port = check_url(url)
    stacks = {one.rank: one.text for one in _texts(url, host, port, "/stacks")}
    importing = [rank for rank, text in stacks.items() if "<frozen importlib" in text]
    if importing:
        raise InputError(
            f"rank {importing[0]} imports modules just now: a profiler that starts meanwhile can break the "
            "import, and so the job",
            "ask again when it trains",
        )
    before = _dumps(url, host, port)
    answers: list[Answer] = []
    deadline = time.monotonic() + seconds + SECONDS_TO_ANSWER
    try:
        with _Get(url, host, port, f"/profile?duration={seconds:g}", deadline) as page:
            for one in _answers(page):
                answers.append(one)
                _save_trace(page, one, folder, max_mb)
    except OSError as error:
        if not answers:
            raise InputError(f"{url} sent no trace: {error}", "is the job still there?") from None
        answers[-1].trouble = answers[-1].trouble or f"the server was gone: {error}"
    seen = {one.rank for one in answers}
    answers += [
        Answer(rank, "", "the server's answer ended before it") for rank in stacks if rank not in seen
    ]
    for one in answers:
        write_part(
            folder, rank=one.rank, world_size=len(answers), host=one.host, server=url, seconds=seconds,
            name=one.name, reason=one.trouble,
        )  # fmt: skip
    with contextlib.suppress(InputError):
        _keep_dumps(before, _dumps(url, host, port), stacks, folder)
    return answers


def _dumps(url: str, host: str, port: int) -> dict[str, str]:
    """The dumps of all ranks, by the names of their files."""
    pages = (("/fr_trace_json", FLIGHT_SUFFIX), ("/fr_trace_nccl_json", f".nccl{FLIGHT_SUFFIX}"))
    return {
        f"rank-{one.rank}{suffix}": one.text
        for path, suffix in pages
        for one in _texts(url, host, port, path)
        if not one.trouble
    }


def _keep_dumps(
    before: Mapping[str, str], after: Mapping[str, str], stacks: Mapping[int, str], folder: Path
) -> None:
    """Write the later dumps, if a rank waits in a call that it waited in before: else the job goes on."""
    waits: dict[str, list[set[tuple[str, str, int]]]] = {}
    for dumps in (before, after):
        for name, text in dumps.items():
            with contextlib.suppress(UnusableError):
                waits.setdefault(name, []).append(waits_in(parse_dump(text.encode(), 0)))
    if not any(len(both) == 2 and both[0] & both[1] for both in waits.values()):
        return
    for name, text in after.items():
        (folder / name).write_text(text, encoding="utf-8")
        rank = int(name.partition(".")[0].removeprefix("rank-"))
        (folder / (name + STACK_SUFFIX)).write_text(_script(stacks.get(rank, "")), encoding="utf-8")


def _script(stacks: str) -> str:
    """The frames of the script's own code in the thread that runs it, innermost first, a frame a line."""
    threads = re.split(r"\n\n|(?=^(?:Current t|T)hread )", stacks, flags=re.MULTILINE)
    main = next((text for text in threads if "in <module>" in text), stacks)
    frames = [f"{file}({line}): {name}@{line}" for file, line, name in _FRAME.findall(main)]
    return "\n".join([one for one in frames if not any(part in one for part in _INSTALLED)] or frames)


def _texts(url: str, host: str, port: int, path: str) -> list[Answer]:
    """What each rank answered on a page of texts."""
    found = []
    try:
        with _Get(url, host, port, path, time.monotonic() + SECONDS_TO_ANSWER) as page:
            for one in _answers(page):
                if not one.trouble:
                    pieces: list[bytes] = []
                    page.skip_to(b"</pre>", sink=_bounded(pieces))
                    one.text = b"".join(pieces).decode("utf-8", "replace")
                found.append(one)
    except OSError as error:
        raise InputError(f"{url}{path} cannot be read: {error}", "is the job still there?") from None
    if not found:
        raise InputError(
            f"{url} answered, but not as PyTorch's debug server does",
            "give the port of torch.distributed.debug.start_debug_server on rank 0, and torch 2.13 or newer",
        )
    return found


def _bounded(pieces: list[bytes]) -> Callable[[bytes], None]:
    left = MAX_TEXT_BYTES

    def keep(data: bytes) -> None:
        nonlocal left
        pieces.append(data[:left])
        left -= min(len(data), left)

    return keep


def _answers(page: Page) -> Iterator[Answer]:
    """Yield each rank of a page, which then stands at the beginning of what the rank answered."""
    known: set[int] = set()
    while page.skip_to(b"<h2>Rank "):
        heading: list[bytes] = []
        page.skip_to(b"</h2>", sink=_bounded(heading))
        match = re.match(
            r"(\d{1,6}): (?:https?://([^/:\s]+))?", b"".join(heading)[:300].decode("utf-8", "replace")
        )
        if match is None or int(match[1]) in known or len(known) >= ASKED_AT_MOST:
            raise OSError("the page names no rank, or one twice")
        known.add(int(match[1]))
        one = Answer(int(match[1]), match[2] or "")
        begins = page.skip_to(b"Failed to fetch: status=", b"<pre>", b"var data = ")
        if begins.startswith(b"Failed"):
            status: list[bytes] = []
            page.skip_to(b"</p>", sink=_bounded(status))
            one.trouble = (
                f"the rank did not answer (status {b''.join(status)[:8].decode('ascii', 'replace')})"
            )
        elif not begins:
            one.trouble = "the server's answer ended before this rank's"
        yield one


def _save_trace(page: Page, one: Answer, folder: Path, max_mb: float) -> None:
    """Write the trace that comes next in the page, as far as it comes and no larger than it may be."""
    if one.trouble:
        return
    one.name = f"rank-{one.rank}.json.gz"
    left = int(max_mb * 1e6)
    tail = b""
    with gzip.open(folder / one.name, "wb", 5) as file:

        def keep(data: bytes) -> None:
            nonlocal left, tail
            if len(data) > left or shutil.disk_usage(folder).free < _SPARE_BYTES:
                one.trouble = (
                    one.trouble or f"the trace is larger than {max_mb:g} MB (--max-mb), or the disk is full"
                )
                return
            left -= len(data)
            # The statement's end is not the trace's.
            file.write(tail + data[:-_HELD_BACK])
            tail = data[-_HELD_BACK:]

        try:
            if not page.skip_to(b"openPerfetto(data)", sink=keep):
                one.trouble = "the server's answer ended in the middle of the trace"
        except OSError as error:
            one.trouble = f"the server was gone in the middle of the trace: {error}"
            raise
        finally:
            file.write(tail.rstrip().removesuffix(b";"))


class _Get:
    """A page of a server, as a context."""

    def __init__(self, url: str, host: str, port: int, path: str, deadline: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=SECONDS_TO_CONNECT)
        try:
            self._connection.connect()
            if self._connection.sock is not None:
                self._connection.sock.settimeout(max(deadline - time.monotonic(), SECONDS_TO_CONNECT))
            self._connection.request("GET", path)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise InputError(
                f"{url} does not answer: {str(error)[:_LETTERS_OF_ERROR] or type(error).__name__}",
                "the job starts a server by torch.distributed.debug.start_debug_server()",
            ) from None
        if response.status != 200:
            self._connection.close()
            raise InputError(
                f"{url}{path} answered with status {response.status}", "is that PyTorch's debug server?"
            )
        self._page = Page(response, deadline)

    def __enter__(self) -> Page:
        return self._page

    def __exit__(self, *exception: object) -> None:
        self._connection.close()


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
