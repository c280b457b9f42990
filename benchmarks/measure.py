"""Run commands to their ends, in turns, and say what each cost."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
SAMPLE_S = 0.05
SETTLED_BYTES = 256 << 20
SMALL_RUN = REPOSITORY / "sample_traces" / "synthetic_ddp_tiny_batch"
"""Files of which tracedoc keeps nothing, as they are small."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A command. ``tree`` asks for the memory of all its processes together, not of the largest one.

    A slow one takes part in the first ``most_rounds`` only.
    """

    name: str
    command: tuple[str, ...]
    tree: bool = False
    most_rounds: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of a command took: seconds, and peaks of memory in MB (1e6 bytes).

    ``peak_mb`` is the largest resident size of one process; of a tree it is the sum of proportional sizes,
    in which a page that n processes share counts as 1/n for each, and ``driver_mb`` is the share of the
    process that was started. The processor time of a tree leaves out its workers.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    driver_mb: float = 0.0


Costs = dict[str, "Cost | None"]
"""Medians by the names of contenders; ``None`` for one that failed."""


def entry(name: str, *paths: Path, python: Path | str = sys.executable, tree: bool = False) -> Contender:
    """Return the contender that ``entry_NAME.py`` is, reading ``paths``."""
    return Contender(name, (str(python), str(HERE / f"entry_{name}.py"), *map(str, paths)), tree)


def diagnose(path: Path, *, jobs: int | None = None) -> Contender:
    """Return ``tracedoc diagnose``: alone if ``jobs`` is not given, else with the memory of its tree."""
    command = (sys.executable, "-m", "tracedoc", "diagnose", str(path), "-f", "json")
    if jobs is None:
        return Contender("diagnose", command)
    return Contender(f"{path.name}, {jobs}", (*command, "--jobs", str(jobs)), tree=True)


def take_turns(contenders: Sequence[Contender], rounds: int, paths: Iterable[Path] = ()) -> Costs:
    """Return the medians of every contender over interleaved rounds; ``paths`` are in the page cache.

    They are read before every run: a system may drop what nobody has asked for while a slow one ran. For the
    same reason memory is taken and freed: a virtual machine may have lost what the one before had.
    """
    paths = tuple(paths)
    runs: dict[str, list[Cost]] = {contender.name: [] for contender in contenders}
    failed: set[str] = set()
    for number in range(rounds):
        for contender in contenders:
            left = contender.most_rounds is not None and number >= contender.most_rounds
            if contender.name in failed or left:
                continue
            read_once(paths)
            write_once(SETTLED_BYTES)
            cost = _time_and_memory(contender)
            if cost is None:
                failed.add(contender.name)
            else:
                runs[contender.name].append(cost)
                print(f"  {number + 1}/{rounds} {contender.name}: {cost.wall_s:.2f} s", file=sys.stderr)
    return {name: None if name in failed else _median(costs) for name, costs in runs.items()}


def read_once(paths: Iterable[Path]) -> None:
    """Read files, so that they are in the page cache."""
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            with file.open("rb") as stream:
                while stream.read(1 << 24):
                    pass


def write_once(count: int) -> None:
    """Take so many bytes of memory and free them, so that the next process is given them at once.

    In a process of its own: the peak of this one would count as that of those it starts (man 2 getrusage).
    """
    subprocess.run([sys.executable, "-c", f"b'1' * {count}"], check=True)


def _time_and_memory(contender: Contender) -> Cost | None:
    """Return the cost of one run; of a tree, time and memory of two, for looking at its memory slows it."""
    cost = measure(contender)
    if cost is None or not contender.tree:
        return cost
    watched = measure(contender, watched=True)
    return watched and replace(cost, peak_mb=watched.peak_mb, driver_mb=watched.driver_mb)


def measure(contender: Contender, *, watched: bool = False) -> Cost | None:
    """Run a command to its end, its output thrown away; say on stderr if it fails, and return ``None``.

    ``watched`` looks at the memory of the whole tree; otherwise it is that of its largest process.
    """
    with tempfile.TemporaryDirectory() as kept:
        shutil.copytree(_kept_rules().name, kept, dirs_exist_ok=True)
        return _measured(contender, _environment(kept), watched=watched)


def _measured(contender: Contender, environment: dict[str, str], *, watched: bool) -> Cost | None:
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            contender.command,
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            env=environment,
        ) as child,
    ):
        tree = driver = 0
        while watched and not _has_ended(child.pid):
            driver = max(driver, proportional_bytes(child.pid))
            tree = max(tree, sum(proportional_bytes(pid) for pid in descendants(child.pid)))
            time.sleep(SAMPLE_S)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            complaints.seek(0)
            words = complaints.read().decode(errors="replace")
            print(f"{' '.join(contender.command)} failed:\n{words[-2000:]}", file=sys.stderr)
            return None
    cpu = usage.ru_utime + usage.ru_stime
    if watched:
        return Cost(wall, cpu, tree / 1e6, driver / 1e6)
    return Cost(wall, cpu, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6)


@cache
def _kept_rules() -> tempfile.TemporaryDirectory[str]:
    """Return a cache of tracedoc as its first command leaves it: with the rules, and without any trace."""
    folder = tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", "tracedoc", "diagnose", str(SMALL_RUN), "-f", "json"]
    environment = _environment(folder.name)
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, env=environment, check=True)
    return folder


def _environment(cache_folder: str) -> dict[str, str]:
    """Return an environment with the checkout importable, and bytecode kept as an installation has it.

    One thread for linear algebra, of which there is none: starting more is noise on a machine of few cores.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    own = {"PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1", "TRACEDOC_CACHE": cache_folder}
    return kept | own


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
        statistics.median(cost.peak_mb for cost in costs),
        statistics.median(cost.driver_mb for cost in costs),
    )


# The memory of a tree of processes, on Linux.


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def descendants(root: int) -> list[int]:
    """Return a process and all that it and its children started."""
    found, front = [], [root]
    while front:
        pid = front.pop()
        found.append(pid)
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                front += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
    return found


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
