"""Keep a script that is estimated from writing, deleting, connecting and starting programs."""

from __future__ import annotations

import builtins
import io
import os
import sys
from typing import Any

_CHANGING = frozenset("wax+")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    "os.remove": "deletes a file",
    "os.rename": "renames a file",
    "os.rmdir": "deletes a folder",
    "os.truncate": "truncates a file",
    "os.link": "links a file",
    "os.symlink": "links a file",
    "os.chmod": "changes a file",
    "os.chown": "changes a file",
    "shutil.rmtree": "deletes a folder",
    "subprocess.Popen": "starts a program",
    "os.system": "starts a program",
    "os.exec": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.kill": "sends a signal",
    "socket.connect": "connects to a network",
    "socket.bind": "opens a port",
    "socket.sendto": "sends to a network",
    "socket.getaddrinfo": "asks a network for a name",
}
"""Audit events of Python (PEP 578) that are answered with an error."""


class RefusedError(PermissionError):
    """Something that an estimate must not do."""


def forbid_effects() -> None:
    """Let what opens a file to write get the null device, and everything else that has an effect an error.

    For code outside of Python, no file may grow either, where the system knows such a limit. Holds until the
    process ends.
    """
    opened, made = builtins.open, os.mkdir

    def open_(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not isinstance(file, int) and _CHANGING & set(mode):
            file, mode = os.devnull, mode.replace("x", "w")
        return opened(file, mode, *rest, **named)

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        if os.path.exists(path):
            made(path, *rest, **named)  # fails as it would without us

    builtins.open = io.open = open_
    os.mkdir = mkdir
    sys.addaudithook(_refuse)
    _forbid_growth()


def _refuse(event: str, given: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = given
        if isinstance(path, int) or path == os.devnull or not (flags or 0) & _WRITING:
            return
        raise RefusedError(f"it opens {path!r} to write")
    if event == "os.mkdir" and not os.path.exists(given[0]):
        raise RefusedError(f"it makes the folder {given[0]!r}")
    if event in _REFUSED:
        raise RefusedError(f"it {_REFUSED[event]} ({event})")


def _forbid_growth() -> None:
    try:
        import resource
        import signal
    except ImportError:  # not on Windows
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
