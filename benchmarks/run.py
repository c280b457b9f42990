"""Measure speed and peak memory side by side with other readers, and write the tables to README.md.

Every contender is a whole process: interpreter start and imports count. Contenders take turns, files are in
the page cache, and the tables show medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import goals
import ranks
from inputs import compress, make_input, make_ranks
from measure import HERE, REPOSITORY, Contender, diagnose, entry, measure, read_once, take_turns
from readers import GPU_IDLE, HTA, HTA_ROUNDS, reading, several, several_table, start_up, table

README = HERE / "README.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
QUICK_MB = 30


def benchmark(folder: Path, megabytes: int, rounds: int, shared: Path | None) -> list[str]:
    """Return every table, as Markdown."""
    began = time.monotonic()
    plain, large = make_input(folder, megabytes, shared), make_input(folder, 5 * megabytes, shared)
    stacks, run = make_input(folder, megabytes, shared, stacks=True), make_ranks(folder, 8, megabytes, shared)
    small_costs = reading(plain, compress(plain), rounds)
    large_costs = reading(large, compress(large), rounds)
    stacks_costs = reading(stacks, None, rounds)
    several_costs = take_turns(several(run), rounds, [run])
    many = ranks.many_ranks(folder, megabytes, rounds, shared)
    measured = goals.Measurements(
        small_costs,
        large_costs,
        stacks_costs,
        several_costs,
        many["workers"],
        many["growth"],
        many["again"],
        many["many"],
        _event_bytes(plain),
    )
    return [
        *_machine(rounds, shared),
        *goals.table(goals.goals(measured, megabytes)),
        *table(small_costs, f"One rank, {_size(plain)}:"),
        *table(large_costs, f"One rank, {_size(large)}:"),
        *table(stacks_costs, f"One rank with Python stacks, {_size(stacks)}:"),
        *several_table(several_costs, f"8 ranks of {_size(plain)}, tracedoc with two workers:"),
        "`tracedoc diagnose` on many ranks:",
        "",
        *ranks.table(many, megabytes),
        *start_up(max(rounds, 5)),
        f"All of this took {(time.monotonic() - began) / 60:.0f} minutes.",
    ]


def _event_bytes(path: Path) -> float | None:
    """Return what the columns of a trace take for each event."""
    command = [sys.executable, str(Path(__file__).with_name("entry_columns.py")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def quick(folder: Path, rounds: int, shared: Path | None) -> list[str]:
    """Return what a diagnosis costs beside reading alone: processor time, the best of several rounds.

    Processor time stands a busy machine. What a trace of 1 MB takes is subtracted: start-up and rules.
    """
    paths = make_input(folder, QUICK_MB, shared), make_input(folder, 1, None)
    read_once(paths)
    lines = [f"{_size(paths[0])}, processor time beside start-up, best of {rounds}:"]
    spent = {}
    for name, contender in (
        ("load + breakdown", lambda path: entry("tracedoc", path)),
        ("diagnose", diagnose),
        ("json.loads", lambda path: entry("json", path)),
    ):
        whole, start = (_least_cpu(contender(path), rounds) for path in paths)
        spent[name] = whole - start
        lines.append(f"  {name:18}{whole - start:6.2f} s + {start:.2f} s")
    own = spent["load + breakdown"]
    return [
        *lines,
        f"diagnose / (load + breakdown) {spent['diagnose'] / own:.2f}",
        f"json.loads / (load + breakdown) {spent['json.loads'] / own:.2f}",
    ]


def _least_cpu(contender: Contender, rounds: int) -> float:
    costs = [measure(contender) for _ in range(rounds)]
    if None in costs:
        raise SystemExit(1)
    return min(cost.cpu_s for cost in costs if cost is not None)


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.0f} MB of JSON"


def _machine(rounds: int, shared: Path | None) -> list[str]:
    """Return what was measured and on what, as Markdown."""
    own = [f"{name} {_own_version(name)}" for name in ("tracedoc", "numpy", "msgspec", "isal")]
    peers = [
        f"{name} {_version_in(python, name)}"
        for name, python in (("HolisticTraceAnalysis", HTA), ("gpu-idle", GPU_IDLE.with_name("python")))
    ]
    origin = "synthetic" if shared is None else "grown from real traces, but for ranks of a few MB"
    return [
        f"Inputs: {origin}. Medians of {rounds} interleaved rounds (HolisticTraceAnalysis: "
        f"{min(rounds, HTA_ROUNDS)}), warm page cache, whole processes.",
        "",
        f"Machine: {_cpu_model()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"{', '.join(own + peers)}; command: `make bench`.",
        "",
    ]


def _own_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _version_in(python: Path, package: str) -> str:
    """Return the version of a package in another environment."""
    if not python.exists():
        return "(not installed)"
    ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "(not installed)"


def _cpu_model() -> str:
    """Return the name of the processor, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_results(lines: list[str]) -> None:
    """Put the lines between the markers of README.md."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(before + BEGIN + "\n".join(lines) + "\n\n" + END + after, encoding="utf-8")


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=100, help="size of the small input; the large one has 5 x")
    parser.add_argument("--quick", action="store_true", help="what diagnose costs beside reading, in seconds")
    parser.add_argument(
        "--shared", type=Path, default=REPOSITORY.parent / "shared", help="where real traces lie"
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench", help="where inputs go")
    parser.add_argument("--dry", action="store_true", help="print the tables, leave README.md as it is")
    options = parser.parse_args()
    shared = options.shared.resolve()
    real = shared if (shared / "bench").is_dir() else None
    if options.quick:
        print("\n".join(quick(options.folder, options.rounds, real)))
        return
    if not Path("/proc/self/smaps_rollup").exists():
        raise SystemExit("the memory of several processes is measured on Linux only")
    lines = benchmark(options.folder, options.mb, options.rounds, real)
    print("\n".join(lines))
    if not options.dry:
        write_results(lines)


if __name__ == "__main__":
    main()
