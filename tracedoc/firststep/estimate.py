"""Estimate the first step of a script in a process of its own: start it, be it, and read its answer.

``python -m tracedoc.firststep.estimate SCRIPT [ARGUMENTS]`` is that process. Its answer is one line of JSON
on the standard output; what the script prints goes to standard error.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tracedoc.errors import InputError
from tracedoc.firststep.fake_gpu import fake_gpu, on_host
from tracedoc.firststep.step import Allocations, Follower, arithmetic, counting

SECONDS = 300.0
"""How long a script may take to its first update; fake tensors take seconds for a model of any size."""

INSTEAD = "give the model's size instead, as --params 7B, or its --model config.json"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a script's first update was on one GPU. Bytes and FLOPs are those of one backward pass.

    ``batch`` is the shape of the first tensor that the model was given, ``whole_numbers`` whether that holds
    ids. ``autocast`` and ``sharded`` are "bf16", "fp16" or "": what autocast and FSDP compute in; ``dtype``
    is that of the trained parameters. ``states`` is numbers of optimizer state for each parameter, ``rounds``
    the backward passes of an update. Of the ``blocks``, at ``path`` in ``model``, all forward passes together
    left ``block_bytes`` for backward, results included; ``input_bytes`` and ``output_bytes`` went in and came
    out. Before the update ``activation_bytes`` is the most that was live beside parameters and gradients,
    ``peak_bytes`` the most of all together.
    """

    model: str
    path: str
    parameters: int
    trained: int
    dtype: str
    autocast: str
    sharded: str
    compiled: bool
    optimizer: str
    states: float
    rounds: int
    blocks: int
    block: str
    block_parameters: int
    block_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    peak_bytes: int
    matmul_flops: int
    attention_flops: int
    batch: tuple[int, ...] = ()
    whole_numbers: bool = False


def first_step(command: str) -> FirstStep:
    """The first update of ``"train.py --its options"``, run under fake tensors.

    Raises :class:`InputError` where there is no such script, no torch, or no update that can be followed.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--script {command!r}: {error}", 'as in: --script "train.py --lr 1e-4"') from None
    if words[:1] and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or not words[0].endswith(".py"):
        raise InputError(f"--script {command!r} names no Python file", 'as in: --script "train.py --lr 1e-4"')
    if not os.path.isfile(words[0]):
        raise InputError(f"{words[0]} does not exist", "give the script that trains, and its options")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tracedoc.firststep.estimate", *words],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{words[0]} came to no update in {SECONDS:g} s under fake tensors", INSTEAD
        ) from None
    return _read(words[0], ended.stdout, ended.returncode, ended.stderr)


def _environment() -> dict[str, str]:
    """Return the environment of a single rank that sees no GPU, asks no hub, and reports to nobody."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{path}{os.pathsep}{package}" if path else package,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRACEDOC_PLAN": "1",
        **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ""),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
        **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "TORCHDYNAMO_DISABLE"), "1"),
        **{"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"},
    }


def _read(script: str, answer: bytes, code: int, errors: bytes) -> FirstStep:
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
        raise InputError(f"the first step of {script} cannot be followed: {last[0][:300]}", INSTEAD) from None
    if "error" in found:
        if found.get("no_torch"):
            raise InputError(
                f"--script needs torch: {found['error']}",
                "install tracedoc in the environment that trains, or give --params",
            )
        raise InputError(
            f"the first step of {script} cannot be followed: {found['error']}", _hint(found["error"])
        )
    known = {field.name for field in fields(FirstStep)}
    values = {name: value for name, value in found.items() if name in known}
    return FirstStep(**{**values, "batch": tuple(found.get("batch", ()))})


def _hint(error: str) -> str:
    if error.startswith("it ") and "update" not in error:
        return f'skip that where os.environ.get("TRACEDOC_PLAN") is set, or {INSTEAD}'
    return INSTEAD


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
