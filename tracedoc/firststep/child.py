"""The process of an estimate: ``python -m tracedoc.firststep.child SCRIPT [ARGUMENTS]``.

Its answer is one line of JSON on the standard output; what the script prints goes to standard error.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tracedoc.firststep.fake_gpu import fake_gpu, on_host
from tracedoc.firststep.step import Allocations, Follower, arithmetic, counting

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


def main() -> None:
    """Run the script to its first update, and answer."""
    answers = os.dup(1)
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> NoReturn:
        os.write(answers, json.dumps(found).encode() + b"\n")
        os._exit(0)  # nothing of the script runs any more, not even what it does at its end

    try:
        fake_mode = import_module("torch._subclasses.fake_tensor").FakeTensorMode
    except ImportError as error:
        answer({"error": f"torch cannot be imported: {error}", "no_torch": True})
    fake = fake_mode(allow_non_fake_inputs=True)
    settings = fake_gpu(fake)
    allocations, flops = Allocations(), arithmetic()
    follower = Follower(allocations, settings, flops, answer)
    follower.follow()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    forbid_effects()
    try:
        with fake, flops, counting(allocations, follower.parameters), on_host():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        answer({"error": f"it ended before its first update (exit code {end.code})"})
    except BaseException as error:
        traceback.print_exc()
        answer({"error": told(error, script)})
    answer({"error": "it ended before its first update"})


def told(error: BaseException, script: str) -> str:
    """Return an error in one line, with the line of the script that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if Path(f.filename).resolve() == Path(script).resolve()), None)
    where = f" (line {place.lineno}: {place.line})" if place else ""
    if isinstance(error, RefusedError):
        return f"{error}{where}"
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"its step depends on values, at {str(error).splitlines()[0]}{where}"
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{kind}: {first}{where}"


if __name__ == "__main__":
    main()
