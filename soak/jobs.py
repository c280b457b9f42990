"""Run small real jobs that go wrong, with and without the collector, and compare how they end.

    python soak/jobs.py [NAME...]

Each must end alike, by its exit code and by what it prints (its losses among that); what `tracedoc diagnose`
says of the run must name what happened; nothing may print a traceback of tracedoc's.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
JOBS = REPOSITORY / "tests" / "collector" / "jobs"
LONGEST_S = 120
SIDE_EFFECTS = re.compile(r"^(tracedoc:|next:|error:|hint:)")


@dataclass(frozen=True)
class Case:
    """One job: its command, how the collector is told, and what the diagnosis must say (a pattern)."""

    name: str
    command: Sequence[str]
    says: str
    options: str = ""
    terminal: bool = False
    around: Callable[[list[str], Path], list[str]] = lambda command, folder: command
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: list[str]
    err: str


def script(how: str, rank: int, step: int, steps: int = 40) -> list[str]:
    """Return the script in which a rank goes wrong before a step, with its arguments."""
    return [str(JOBS / "goes_wrong.py"), how, str(rank), str(step), str(steps)]


def alone(how: str, step: int, steps: int = 40, *flags: str) -> list[str]:
    """Return it as one process."""
    return [sys.executable, *flags, *script(how, 0, step, steps)]


def ranks(how: str, rank: int, step: int) -> list[str]:
    """Return it as two ranks whose launcher knows nothing of torch."""
    return [sys.executable, str(JOBS / "ranks.py"), "2", *script(how, rank, step)]


def torchrun(how: str, rank: int, step: int, steps: int = 40, *options: str) -> list[str]:
    """Return it as two ranks of torchrun."""
    given = options or ("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0")
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *given,
        *script(how, rank, step, steps),
    ]


def own_profiler(step: int) -> list[str]:
    """Return a job that profiles some steps itself, from a step on."""
    # Not os.devnull: the profiler replaces what it exports to by a file of its own.
    own = Path(tempfile.gettempdir()) / f"own-profile-{os.getpid()}.json"
    return [sys.executable, str(JOBS / "profiles_itself.py"), str(step), str(own)]


def nodes(how: str, rank: int, step: int) -> list[str]:
    """Return it as two nodes on this machine, with a rank each."""
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", "{node}"]
    words += ["--master_addr", "127.0.0.1", "--master_port", "{port}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words, *script(how, rank, step)]
    return [sys.executable, str(JOBS / "nodes.py"), "2", *launcher]


def on_each_node(command: list[str], folder: Path) -> list[str]:
    """Let every launcher have a collector of its own, all with one folder."""
    end = command.index("--")
    start = next(place for place, word in enumerate(command) if word.endswith("nodes.py")) + 2
    return [*command[end + 1 : start], *command[: end + 1], *command[start:]]


def in_small_files(command: list[str], folder: Path) -> list[str]:
    """Let no file grow beyond 8 KiB, as a quota does."""
    return ["bash", "-c", 'ulimit -f 8; exec "$0" "$@"', *command]


def in_small_room(command: list[str], folder: Path) -> list[str]:
    """Give the run's folder a disk of its own that is soon full; needs the right to mount."""
    folder.mkdir()
    words = 'mount -t tmpfs -o size=24k none "$0" && exec "$@"'
    return ["unshare", "-m", "sh", "-c", words, str(folder), *command]


def _may_mount() -> bool:
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


AFTER = r"after step (8|9|7)\b"
NOTHING = "nothing was captured"
FINE = r"\d step"

CASES = [
    Case("healthy", torchrun("nothing", 0, 0), FINE),
    Case("shorter than the warm-up", alone("nothing", 0, 4), NOTHING),
    *(
        Case(f"one rank {how}, {when}", torchrun(how, 1, step), rf"rank 1 ended after step {step - 1} {says}")
        for how, says in (
            ("raise", r"with exit code 1 \(RuntimeError\)"),
            ("exit", "with exit code 3"),
            ("_exit", "with exit code 4"),
            ("abort", "by SIGABRT"),
            ("segfault", "by SIGSEGV"),
            ("SIGKILL", "by SIGKILL"),
            ("SIGTERM", "by SIGTERM"),
        )
        for when, step in (("before the window", 3), ("in it", 9), ("after it", 30))
    ),
    *(
        Case(f"alone, {how}, {when}", alone(how, step), rf"rank 0 ended after step {step - 1} {says}")
        for how, says in (
            ("raise", r"with exit code 1 \(RuntimeError\)"),
            ("SIGKILL", "by SIGKILL"),
            ("SIGTERM", "by SIGTERM"),
            ("_exit", "with exit code 4"),
            ("SIGINT", r"(by SIGINT|with exit code \d+)"),
        )
        for when, step in (("before", 3), ("inside", 9), ("after", 30))
    ),
    Case("no launcher tells: one rank SIGKILL", ranks("SIGKILL", 1, 9), "rank [01] ended after step 8"),
    Case("all done, then os._exit(0)", alone("_exit0", 30), FINE),
    *(
        Case(f"two nodes, {how} {when}", nodes(how, 1, step), says, around=on_each_node)
        for how, when, step, says in (
            ("nothing", "", 0, FINE),
            ("raise", "before the window", 3, r"rank 1 ended after step 2 with exit code 1 \(RuntimeError\)"),
            ("SIGKILL", "in it", 9, "rank 1 ended after step 8 by SIGKILL"),
        )
    ),
    Case(
        "torchrun gets SIGKILL, inside",
        torchrun("parent-SIGKILL", 0, 9, 100),
        FINE,
    ),
    *(
        Case(f"torchrun gets {name}, {when}", torchrun(f"parent-{name}", 0, step, 400), "rank [01] ended")
        for name in ("SIGTERM", "SIGINT")
        for when, step in (("before", 3), ("inside", 9), ("after", 40))
    ),
    *(
        Case(f"Ctrl-C, {kind}, {when}", command("Ctrl-C", step), "rank [01] ended after", terminal=True)
        for kind, command in (
            ("alone", lambda how, step: alone(how, step, 400)),
            ("torchrun", lambda how, step: torchrun(how, 0, step, 400)),
        )
        for when, step in (("before", 3), ("inside", 9), ("after", 40))
    ),
    Case("folder removed, before", alone("remove-folder", 3), ""),
    Case("folder removed, inside", alone("remove-folder", 9), ""),
    Case("folder removed, after", torchrun("remove-folder", 0, 30), ""),
    Case("folder replaced by a file, inside", torchrun("replace-folder", 0, 9), ""),
    Case("a rank forks", torchrun("fork", 1, 9), FINE),
    Case("sys.path is replaced", torchrun("replace-path", 1, 4), FINE),
    Case("python -I", alone("nothing", 0, 40, "-I"), NOTHING),
    Case("python -S -E", alone("nothing", 0, 40, "-S", "-E"), NOTHING),
    Case("an attempt fails, the next does not", torchrun("raise", 1, 9, 40, "--max-restarts", "1"), FINE),
    Case("all attempts fail", torchrun("exit", 5, 9, 40, "--max-restarts", "1"), FINE),
    *(
        Case(f"a profiler of its own, {when}", own_profiler(step), FINE)
        for when, step in (("from the start", 0), ("inside", 8), ("after", 20))
    ),
    Case("files may not grow", torchrun("nothing", 0, 0), "", around=in_small_files),
    *(
        [Case("the disk is full", torchrun("nothing", 0, 0), "", around=in_small_room)]
        if _may_mount()
        else []
    ),
]


# Running.


def run(command: Sequence[str], folder: Path, case: Case) -> Ended:
    """Run a command to its end in a session of its own."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RUN_FOLDER": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        **case.environ,
    }
    if case.terminal:
        return at_a_terminal(command, Path(f"{folder}.now"), environ)
    done = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = done.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        out, err = done.communicate()
        return Ended(-99, [], f"HANGS\n{err}")
    # Ranks share a pipe, where the end of a line may come after the next rank's words.
    lines = re.split(r"\n|(?=rank \d+:)", out)
    return Ended(done.returncode, sorted(filter(None, lines)), err)


def at_a_terminal(command: Sequence[str], asks: Path, environ: dict[str, str]) -> Ended:
    """Run a command at a terminal, and press Ctrl-C there when the job asks for it."""
    asks.unlink(missing_ok=True)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], list(command), environ)
    shown, pressed, until = b"", False, time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        if select.select([terminal], [], [], 0.005)[0]:
            try:
                chunk = os.read(terminal, 65_536)
            except OSError:  # the last process has left the terminal
                break
            if not chunk:
                break
            shown += chunk
        if not pressed and asks.exists():
            pressed = True
            os.write(terminal, b"\x03")
    else:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    lines = [line for line in shown.decode(errors="replace").splitlines() if line.startswith("rank ")]
    return Ended(code if time.monotonic() < until else -99, sorted(lines), shown.decode(errors="replace"))


def as_shells_say(code: int) -> int:
    """Return the exit code that a shell makes of one that may be minus a signal."""
    return code if code >= 0 else 128 - code


def try_case(case: Case, folder: Path) -> list[str]:
    """Return what is wrong with a case, nothing if all is as it should be."""
    wrong = []
    plain = run(list(case.command), folder / "plain", case)
    into = folder / "run"
    collect = [sys.executable, "-m", "tracedoc", "collect", "-o", str(into), *case.options.split()]
    collected = run(case.around([*collect, "--", *case.command], into), into, case)
    if collected.code != as_shells_say(plain.code):
        wrong.append(f"exit code {collected.code}, without the collector {as_shells_say(plain.code)}")
    if collected.out != plain.out:
        wrong.append(f"printed {collected.out}, without the collector {plain.out}")
    wrong += our_tracebacks(collected.err)
    if not (into.is_dir() and any(into.iterdir())):
        return wrong
    answer = subprocess.run(
        [sys.executable, "-m", "tracedoc", "diagnose", str(into)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    if answer.returncode not in (0, 1, 2) or "Traceback" in answer.stderr:
        wrong.append(f"diagnose ended with {answer.returncode}: {answer.stderr[-2000:]}")
    first = (answer.stdout + answer.stderr).strip().split("\n\n")[0]
    if not re.search(case.says, first):
        wrong.append(f"diagnose does not say {case.says!r} but: {first}")
    return wrong


def our_tracebacks(text: str) -> list[str]:
    """Return the tracebacks that end in the collector; the job's own are the job's."""
    found = re.findall(r"Traceback \(most recent call last\):\n(?:  .*\n)+.*", text)
    return [one for one in found if re.findall(r'File "(.*?)"', one)[-1:] and "/tracedoc/" in _last_file(one)]


def _last_file(traceback: str) -> str:
    return str(re.findall(r'File "(.*?)"', traceback)[-1]).replace(str(JOBS), "")


def main(names: Sequence[str]) -> int:
    """Try the cases with these words in their names; return how many failed."""
    # What ignores Ctrl-C, as a job in the background of a script does, hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    cases = [case for case in CASES if not names or any(name in case.name for name in names)]
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            began = time.monotonic()
            wrong = try_case(case, Path(folder))
        print(f"{'FAILED' if wrong else 'ok':7}{time.monotonic() - began:5.1f} s  {case.name}", flush=True)
        for one in wrong:
            print(f"       {one}", flush=True)
        failed += bool(wrong)
    print(f"{len(cases)} jobs that go wrong: {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
