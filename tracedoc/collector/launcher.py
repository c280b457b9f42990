"""Run a command as it is, with the hook in the environment of every Python process that it starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import tracedoc
from tracedoc.collector.nccl import debugging
from tracedoc.collector.options import Options, write_options
from tracedoc.collector.trial.changes import read_change
from tracedoc.collector.variables import looks_secret, names_secret
from tracedoc.errors import InputError, TracedocError
from tracedoc.run.manifest import (
    BY_SIGNAL,
    COMPLETE,
    MANIFEST_SCHEMA,
    NOTHING,
    PART_SUFFIX,
    PARTIAL,
    Manifest,
    Part,
    best_attempt,
    is_running,
    locked,
    read_parts,
    timestamp,
    write_json,
    write_manifest,
)

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""What shells return for a command that is not there, or may not be run."""

BASELINE = "baseline"
"""The folder in a run directory for the same command on one process."""

_SITECUSTOMIZE = Path(__file__).with_name("inject") / "sitecustomize.py"
_UNSAFE = r"[^\w.-]"
_SETTLED = frozenset({COMPLETE, PARTIAL, NOTHING})
_SECONDS_TO_LEAVE = 60.0
"""How long after the last capture ranks that do not leave on their own are waited for."""


class CommandError(TracedocError):
    """A command that could not be started, or collected; ``code`` is what to exit with."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint)
        self.code = code


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command: its exit code, the run directory, and how many processes loaded torch."""

    code: int
    folder: Path
    manifest: Manifest
    torch_processes: int
    hook_error: str = ""


# Before the command.


def run_folder(command: Sequence[str], output: str | None, now: datetime, environ: Mapping[str, str]) -> Path:
    """Return the run directory: ``output``, or one under ``tracedoc-runs`` named by time and script.

    Launchers that srun or mpirun start beside each other name theirs after the job, and so share it.
    """
    if output is not None:
        return Path(output).absolute()
    job = _job(command, environ)
    when = job if job and not job.startswith("rdzv") else f"{now:%Y%m%d-%H%M%S}"
    base = Path("tracedoc-runs").absolute() / f"{re.sub(_UNSAFE, '_', when)}-{_name(command)}"
    folder, number = base, 1
    while _run_of(folder, job, command, environ) is None:
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _name(command: Sequence[str]) -> str:
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    modules = [after for word, after in itertools.pairwise(command) if word == "-m"]
    name = (scripts or modules[-1:] or [Path(command[0]).name])[0]
    return re.sub(_UNSAFE, "_", name)[:60]


def environment(hook_folder: Path, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the command gets beside its own; none that the user has set is replaced."""
    added = {"PYTHONPATH": os.pathsep.join(filter(None, (str(hook_folder), environ.get("PYTHONPATH"))))}
    # Since torch 2.13 every start and stop of a profiler prints two lines otherwise.
    wanted = {
        "KINETO_LOG_LEVEL": "99",
        "TORCH_FR_DUMP_TEMP_FILE": str(Path(options.folder) / "nccl_trace_rank_"),
    }
    if options.nccl_log:
        wanted |= debugging(Path(options.folder) / "nccl.%h.%p.log")
    return added | {name: value for name, value in wanted.items() if name not in environ}


def check_command(command: Sequence[str]) -> None:
    """Raise :class:`CommandError` for a command that cannot be started."""
    program = command[0]
    if shutil.which(program):
        return
    if os.path.dirname(program) and os.path.exists(program):
        raise CommandError(
            f"{program} may not be executed", f"run it by its interpreter: python {program}", NOT_EXECUTABLE
        )
    launchers = {"torchrun": "torch", "accelerate": "accelerate", "deepspeed": "deepspeed"}
    package = launchers.get(program)
    hint = (
        f"{program} comes with {package}: activate the environment that has it"
        if package
        else "give the command after -- as you would type it: tracedoc collect -- python train.py"
    )
    raise CommandError(f"{program}: command not found", hint, NOT_FOUND)


def _open_folder(options: Options, job: str, command: Sequence[str]) -> tuple[Options, Path]:
    """Make the run directory, or join the one that another launcher of the same job has made.

    The part of this launcher is in it then, so that one which comes a moment later sees it.
    """
    folder = Path(options.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            run = _run_of(folder, job, command, os.environ)
            if run is not None:
                options = replace(options, run=run)
                part = folder / f"node-{socket.gethostname()}-{os.getpid()}{PART_SUFFIX}"
                write_json(part, _node(options, job, command))
    except FileExistsError:
        raise InputError(f"{folder} is a file", "name a new folder with -o") from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    if run is None:
        raise InputError(f"{folder} exists already", "name a new folder with -o, or leave -o out")
    return options, part


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder} cannot be written: {error.strerror}", "name another folder with -o")


def _node(options: Options, job: str, command: Sequence[str]) -> dict[str, object]:
    """A launcher's entry in the manifest as it begins."""
    return {
        "schema": MANIFEST_SCHEMA,
        "part": "node",
        "run": options.run,
        "job": job,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "name": _name(command),
        "command": public_command(command),
        "cwd": os.getcwd(),
        "tracedoc": tracedoc.__version__,
        "options": asdict(options),
        "started": timestamp(),
    }


def _run_of(folder: Path, job: str, command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the id of the run that a launcher may write into a folder; ``None`` if it holds another one."""
    if not folder.exists():
        return uuid.uuid4().hex
    if all(path.name.startswith(".") or path.name == BASELINE for path in folder.iterdir()):
        return uuid.uuid4().hex
    for node in read_parts(folder):
        if node.get("part") == "node" and _is_same_job(node, job, command, environ):
            return str(node.get("run", ""))
    return None


def _is_same_job(node: Part, job: str, command: Sequence[str], environ: Mapping[str, str]) -> bool:
    if job and node.get("job") == job:
        return node.get("host") != socket.gethostname() or not node.get("ended")
    if node.get("ended"):
        return False
    pid = node.get("pid")
    if node.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    # On one host two jobs are two, unless one of several launchers started this.
    if node.get("name") != _name(command) or not is_one_of_several(command, environ):
        return False
    return is_running(pid)


def is_one_of_several(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if a job has other launchers: its command names nodes, or its rank is set already."""
    nodes = re.search(
        r"--(?:n?nodes|num[-_](?:nodes|machines)|(?:node|machine)[-_]rank)[= ](?!1\b)", " ".join(command)
    )
    return nodes is not None or any(name in environ for name in ("RANK", "NODE_RANK", "GROUP_RANK"))


def _job(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """A text that the launchers of one job on several nodes have in common, "" if there is none."""
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    if environ.get("PMIX_NAMESPACE"):
        return f"mpi-{environ['PMIX_NAMESPACE']}"
    words = shlex.join(command)
    match = re.search(r"--rdzv[-_]id[= ](\S+)", words)
    return f"rdzv-{match[1]}" if match else ""


def _hook_folder(options: Options) -> Path:
    """Lay out the folder that goes on PYTHONPATH: in the run directory, where other nodes can see it too."""
    folder = Path(options.folder) / f".hook-{socket.gethostname()}-{os.getpid()}"
    folder.mkdir()
    shutil.copyfile(_SITECUSTOMIZE, folder / "sitecustomize.py")
    (folder / "package").write_text(str(Path(tracedoc.__file__).parent), encoding="utf-8")
    modules = sorted({name for text in options.changes for name in read_change(text).modules})
    (folder / "watched").write_text("\n".join(modules), encoding="utf-8")
    write_options(options, folder)
    return folder


def public_command(command: Sequence[str]) -> list[str]:
    """Return the command as it may be stored: values that look like keys or tokens are left out."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, value = word.partition("=")
        if equals and (names_secret(name) or _is_secret(value)):
            shown.append(f"{name}=<hidden>")
        elif (hide_next and not word.startswith("-")) or (not equals and _is_secret(word)):
            shown.append("<hidden>")
        else:
            shown.append(word)
        hide_next = word.startswith("-") and not equals and names_secret(word)
    return shown


def _is_secret(value: str) -> bool:
    # Names of folders may be long runs of letters and digits too.
    return looks_secret(value) and not os.path.exists(value)


# The command.


Runner = Callable[[Sequence[str], Options, Mapping[str, str]], int]
"""Runs a command with variables, and returns its exit code."""


def collect(command: Sequence[str], options: Options, runner: Runner | None = None) -> Outcome:
    """Run a command to its end and return what was captured; ``runner`` runs it in a way of its own.

    Raises :class:`InputError` where the run directory cannot be had, and nothing has been run;
    :class:`CommandError` where the command cannot be started, or has lost its run directory meanwhile.
    """
    check_command(command)
    job = _job(command, os.environ)
    options, part = _open_folder(options, job, command)
    folder, node = Path(options.folder), _node(options, job, command)
    try:
        hook_folder = _hook_folder(options)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        code = (runner or _run)(command, options, os.environ | environment(hook_folder, options, os.environ))
        node.update(ended=timestamp(), exit_code=code)
        with contextlib.suppress(OSError):  # the disk may be full by now
            write_json(part, node)
    finally:
        seen, failed = len(list(hook_folder.glob("torch-*"))), _text(hook_folder / "failed")
        shutil.rmtree(hook_folder, ignore_errors=True)
    _set_other_attempts_apart(folder)
    try:
        manifest = write_manifest(folder)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot be written any more: {error.strerror}",
            "the command itself has run to its end",
            code,
        ) from None
    return Outcome(code, folder, manifest, seen, failed)


def _run(command: Sequence[str], options: Options, environ: Mapping[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise CommandError(
            f"{command[0]} cannot be started: {error.strerror}",
            "run it once without tracedoc",
            NOT_EXECUTABLE,
        ) from None
    with _forwarded_signals(child):
        code = wait_for_captures(child, options) if options.exit_after_capture else child.wait()
    return code if code >= 0 else BY_SIGNAL - code


@contextlib.contextmanager
def _forwarded_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on what is sent to this process alone; the terminal's Ctrl-C reaches the command by itself."""

    def forward(number: int, frame: object) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground():
            return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    names = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def wait_for_captures(
    child: subprocess.Popen[bytes], options: Options, meanwhile: Callable[[], None] = lambda: None
) -> int:
    """Wait for the command; end it if ranks stay after every capture. Return 0 if all are there.

    ``meanwhile`` is called every second, and may raise.
    """
    done_at = 0.0
    while True:
        meanwhile()
        try:
            code = child.wait(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            if not done_at and _all_settled(Path(options.folder)):
                done_at = time.monotonic()
            if done_at and time.monotonic() - done_at > _SECONDS_TO_LEAVE:
                child.terminate()
                done_at = float("inf")
    return 0 if _all_settled(Path(options.folder), COMPLETE) else code


def _all_settled(folder: Path, *states: str) -> bool:
    """True if every rank of the job has a capture in one of these states, or in any that lasts."""
    ranks = [part for part in read_parts(folder) if part.get("part") == "rank"]
    attempt = best_attempt(ranks)
    own = [part for part in ranks if part.get("restart", 0) == attempt]
    wanted = frozenset(states) or _SETTLED
    return (
        bool(own)
        and len(own) == own[0].get("world_size")
        and all(part.get("state") in wanted or part.get("level") == "" for part in own)
    )


def _set_other_attempts_apart(folder: Path) -> None:
    """Move the traces of attempts that do not count into folders of their own: they recorded other steps."""
    ranks = [part for part in read_parts(folder) if part.get("part") == "rank"]
    attempt = best_attempt(ranks)
    for part in ranks:
        restart, file = part.get("restart", 0), part.get("file")
        if restart != attempt and isinstance(file, str):
            apart = folder / f"attempt-{restart}"
            with contextlib.suppress(OSError):
                apart.mkdir(exist_ok=True)
                os.replace(folder / file, apart / file)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# One process, to compare with.


def single_process(command: Sequence[str]) -> list[str]:
    """Return the command with one process for several; raises :class:`InputError` if it names no number."""
    options = {
        "torchrun": r"--nproc[-_]per[-_]node",
        "torch.distributed.run": r"--nproc[-_]per[-_]node",
        "torch.distributed.launch": r"--nproc[-_]per[-_]node",
        "accelerate": r"--num_processes",
        "deepspeed": r"--num_gpus",
    }
    single: list[str] = []
    found = False
    words = iter(command)
    pattern = next((options[Path(w).name] for w in command if Path(w).name in options), None)
    for word in words:
        single.append(word)
        name, equals, _ = word.partition("=")
        if pattern and re.fullmatch(pattern, name) and not found:
            found = True
            if not equals:
                next(words, None)
                single.append("1")
            else:
                single[-1] = f"{name}=1"
    if not found:
        raise InputError(
            f"--baseline finds no number of processes in: {shlex.join(public_command(command))}",
            "it changes torchrun --nproc_per_node, accelerate --num_processes or deepspeed --num_gpus to 1",
        )
    return single
