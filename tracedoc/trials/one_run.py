"""One run of the job: started with a change, timed for some steps, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tracedoc.collector import launcher
from tracedoc.collector.options import Options
from tracedoc.collector.trial.changes import Change
from tracedoc.collector.trial.rank import FAILED, MADE, SAME, outcome_file
from tracedoc.errors import TracedocError
from tracedoc.run.manifest import COMPLETE, Part, read_parts
from tracedoc.run.steplog import STEP, read_step_log
from tracedoc.run.untrusted import UnusableError, entry_at, items_at, value_at

LEAST_SILENCE_S = 120.0
"""A job that makes no step for so long hangs, and later for ten times as long as it was silent as it is."""
SECONDS_TO_END = 8.0
"""How long processes that are asked to end are waited for."""
OUT_OF_TIME = "the budget of time was used up (--budget)"
OUTPUT = "output.txt"

Tell = Callable[[int], None]
"""Called about every second with the number of steps that the slowest rank has made."""


@dataclass(frozen=True)
class Job:
    """What is started: a command, where, with which variables; ``wait`` steps pass, ``steps`` are timed.

    Where steps are short, as many are timed as take ``seconds``.
    """

    command: tuple[str, ...]
    folder: Path
    environ: Mapping[str, str]
    wait: int
    steps: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Ran:
    """What a run showed: each timed step in ms, the median over ranks; ``problem`` is why it has none.

    ``made`` says of each part of its change what came of it, as pairs of the outcome and words. ``losses``
    are by rank and step, ``squared_norms`` of the gradients by step, summed over ranks. ``silent_s`` is the
    longest time without a step. ``hung`` is True where that was too long, ``short`` where the script ended by
    itself before all steps were timed.
    """

    steps_ms: tuple[float, ...] = ()
    problem: str = ""
    hung: bool = False
    short: bool = False
    made: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    losses: Mapping[int, Sequence[Sequence[float | None]]] = field(default_factory=dict)
    squared_norms: Sequence[float] = ()
    memory_bytes: int | None = None
    on_cpu: bool = True
    seconds: float = 0.0
    silent_s: float = 0.0


class _EndError(Exception):
    """The run is to end now, for a reason."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


def run_once(
    job: Job, changes: Sequence[Change], scratch: Path, *, deadline: float, silence_s: float, tell: Tell
) -> Ran:
    """Run the job with changes made to it; its files of this run go into ``scratch``, a new folder.

    The run ends at ``deadline``, of ``time.monotonic``, or when no step is made for ``silence_s``. Whatever
    ends it, Ctrl-C too, ends every process that it started. Raises :class:`CommandError` where the command
    cannot be started.
    """
    watch = _Watch(scratch, deadline, silence_s, tell)
    options = Options(
        folder=str(scratch),
        wait=job.wait,
        active=job.steps,
        exit_after_capture=True,
        trial=True,
        changes=tuple(change.text for change in changes),
    )
    environ = dict(job.environ)
    for change in changes:
        environ |= change.environ
        for name in change.unset:
            environ.pop(name, None)
    command = [*job.command, *(argument for change in changes for argument in change.arguments)]

    def run(command: Sequence[str], options: Options, variables: Mapping[str, str]) -> int:
        hook = variables["PYTHONPATH"].partition(os.pathsep)[0]
        with open(scratch / OUTPUT, "wb") as output:
            try:
                child = subprocess.Popen(
                    command,
                    cwd=job.folder,
                    env=_with_hook(environ, variables, hook),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise launcher.CommandError(
                    f"{command[0]} cannot be started: {error.strerror}", "give the command after --", 126
                ) from None
            try:
                return launcher.wait_for_captures(child, options, watch.look)
            except BaseException:
                _end_all(child, hook)
                raise

    began = time.monotonic()
    try:
        code = launcher.collect(command, options, run).code
        ran = _what_it_showed(scratch, job, changes, code)
    except _EndError as error:
        ran = Ran(problem=str(error), hung=error.hung)
    return replace(ran, seconds=time.monotonic() - began, silent_s=watch.longest_s)


def _with_hook(environ: Mapping[str, str], variables: Mapping[str, str], hook: str) -> dict[str, str]:
    """The job's variables and those of the hook, which stands before the job's own PYTHONPATH."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    path = os.pathsep.join(filter(None, (hook, environ.get("PYTHONPATH"))))
    return {**added, **environ, "PYTHONPATH": path}


class _Watch:
    """Looks at a run every second: how far it is, and whether it still makes steps."""

    def __init__(self, scratch: Path, deadline: float, silence_s: float, tell: Tell) -> None:
        self._scratch, self._deadline, self._silence_s, self._tell = scratch, deadline, silence_s, tell
        self._steps, self._since = 0, time.monotonic()
        self.longest_s = 0.0

    def look(self) -> None:
        """Tell how far the run is; raises :class:`_EndError` where it is to end."""
        now = time.monotonic()
        steps = min((len(log) for log in _logs(self._scratch).values()), default=0)
        silent = now - self._since
        self.longest_s = max(self.longest_s, silent)
        if steps != self._steps:
            self._steps, self._since = steps, now
            self._tell(steps)
        elif silent > self._silence_s:
            raise _EndError(f"no step in {silent:.0f} s, after {steps}", hung=True)
        if now > self._deadline:
            raise _EndError(OUT_OF_TIME)


def _logs(scratch: Path) -> dict[int, list[tuple[int, int, int]]]:
    """The steps that each rank has logged: number, end, length."""
    found = {}
    for path in scratch.glob("*.steps"):
        with contextlib.suppress(UnusableError):
            log = read_step_log(path)
            if log is not None:
                found[log.rank] = log.of_kind(STEP)
    return found


def _what_it_showed(scratch: Path, job: Job, changes: Sequence[Change], code: int) -> Ran:
    parts = {int(str(part["rank"])): part for part in read_parts(scratch) if part.get("part") == "rank"}
    lengths: dict[int, list[float]] = {}
    for log in _logs(scratch).values():
        for number, _, length in log:
            if number > job.wait and length > 0:
                lengths.setdefault(number, []).append(length / 1e6)
    steps = tuple(statistics.median(lengths[number]) for number in sorted(lengths))
    memory = [entry_at(part, "memory") for part in parts.values()]
    complete = bool(parts) and all(part.get("state") == COMPLETE for part in parts.values())
    problem = ""
    if not complete or code:
        problem = _why(scratch, parts, code, len(steps))
    elif not steps:
        problem = "it made no step that could be timed"
    return Ran(
        steps_ms=steps,
        problem=problem,
        short=bool(problem and parts) and not code,
        made=_made(scratch, changes),
        losses={rank: items_at(part, "losses", list) for rank, part in parts.items()},
        squared_norms=_norms(parts),
        memory_bytes=max(filter(None, map(_peak, memory)), default=None),
        on_cpu=not any("total_bytes" in of_rank for of_rank in memory),
    )


def _why(scratch: Path, parts: Mapping[int, Part], code: int, timed: int) -> str:
    """Why a run has no steps, or not all of them: the error, else how far it came."""
    lines = (scratch / OUTPUT).read_bytes()[-20_000:].decode("utf-8", "replace").splitlines()
    errors = [
        line.strip()
        for line in lines
        if re.match(r"\s*(?:\[rank\d+\]:\s*)?\w*(?:\.\w+)*(?:Error|Exception)\b:?", line)
    ]
    own = [line for line in errors if "ChildFailedError" not in line]
    if code:
        said = own[-1] if own else next((line.strip() for line in reversed(lines) if line.strip()), "no word")
        return f"exit code {code}: {said}"[:400]
    steps = max((value_at(entry_at(part, "steps"), "total", int) or 0 for part in parts.values()), default=0)
    if not parts:
        return "no rank reached an optimizer step"
    return f"the script ended after {steps} steps, {timed} of them timed"


def _made(scratch: Path, changes: Sequence[Change]) -> dict[str, tuple[str, str]]:
    """What came of each part of the changes: the worst that a process noted, and its words."""
    found = {}
    for change in changes:
        for part, _ in change.parts:
            for outcome in (FAILED, MADE, SAME):
                path = outcome_file(scratch, outcome, part)
                if path.exists():
                    found[part] = (outcome, path.read_text(encoding="utf-8", errors="replace"))
                    break
            else:
                found[part] = ("", f"the job never came to {part}")
    return found


def _norms(parts: Mapping[int, Part]) -> list[float]:
    """The squared norms of gradients by step, summed over ranks, up to the first unknown one."""
    by_rank = [part.get("squared_norms") for part in parts.values()]
    lists = [one for one in by_rank if isinstance(one, list)]
    sums = []
    for values in zip(*lists, strict=False):
        if any(not isinstance(value, int | float) for value in values):
            break
        sums.append(float(sum(values)))
    return sums


def _peak(memory: Part) -> int | None:
    return value_at(memory, "peak_reserved_bytes", int) or value_at(memory, "host_peak_bytes", int)


# The end of a run.


def _end_all(child: subprocess.Popen[bytes], hook: str) -> None:
    """End the command and all that has its hook: launchers put ranks into sessions of their own."""
    held = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _signal_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
        for pid in _with_variable(hook):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _signal_group(child, signal.SIGKILL)
        child.wait()
    finally:
        signal.signal(signal.SIGINT, held)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _with_variable(hook: str) -> list[int]:
    """The processes that were started with a hook's folder; none where the system lists no variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if hook.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class NoRunError(TracedocError):
    """The job as it is cannot be timed, so that nothing can be compared with it."""
