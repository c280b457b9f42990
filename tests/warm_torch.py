"""Start the ranks of small jobs in forks of one process, which has imported torch for all of them.

Importing torch takes each of these jobs longer than its training. A fork begins where the interpreter would:
with the arguments, variables, folder and files of its job, and under ``tracedoc collect`` with its hook. The
hook then finds torch imported already; jobs that are started as a person does show that it waits for that.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_BETWEEN_LOOKS = 0.02


class Rank(NamedTuple):
    """A rank that runs: where its exit code comes from, and its process id."""

    ended: socket.socket
    pid: int

    def wait(self) -> int:
        """Wait for its end; return its exit code, or minus the signal that ended it."""
        with self.ended:
            return int(_line(self.ended))


@cache
def warm_torch() -> str:
    """The address of the process that starts ranks, which ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address = os.path.join(folder.name, "socket")
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return address


def start_rank(address: str, argv: list[str], environ: dict[str, str], files: tuple[int, int, int]) -> Rank:
    """Start a script with its arguments, in this folder; ``files`` are its input, output and errors."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    asked = json.dumps({"argv": argv, "environ": environ, "folder": os.getcwd()}).encode() + b"\n"
    sent = socket.send_fds(link, [asked], list(files))
    link.sendall(asked[sent:])
    return Rank(link, int(_line(link)))


def _line(link: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n"):
        part = link.recv(1)
        if not part:
            raise EOFError("the process that starts ranks is gone")
        text += part
    return text.decode()


# In the process that starts ranks.


def main() -> None:
    """Start ranks until standard input ends; returns in each, whose process is then that of its script."""
    import torch._dynamo  # the first step of an optimizer imports it
    import torch.nn.parallel
    import torch.profiler  # noqa: F401

    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            link, _ = server.accept()
            if os.fork() == 0:
                break
            link.close()
            _reap()
        else:
            return
    asked, files = _received(link)
    rank = os.fork()
    if rank:
        _keep(link, rank)
    link.close()
    _become(asked, files)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _received(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += link.recv(1 << 20)
    return json.loads(text), files


def _keep(link: socket.socket, rank: int) -> None:
    """Tell the id of a rank and how it ended; end it where nobody asks any more."""
    link.sendall(f"{rank}\n".encode())
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
        if select.select([link], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            os.kill(rank, signal.SIGKILL)
            os._exit(0)


def _become(asked: dict[str, Any], files: list[int]) -> None:
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = asked["argv"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *paths]
    for path in paths:
        if os.path.exists(os.path.join(path, "sitecustomize.py")):
            _hook(os.path.join(path, "sitecustomize.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _hook(file: str) -> None:
    """Have the collector's hook see the modules that it would have watched for."""
    names = runpy.run_path(file, run_name="sitecustomize")
    (watch,) = (finder for finder in sys.meta_path if type(finder).__name__ == "_Watch")
    for name in [name for name in sys.modules if name in watch.watched]:
        names["_hook"]().imported(sys.modules[name], names["_here"])


if __name__ == "__main__":
    main()
