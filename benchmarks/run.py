"""Measure speed and peak memory side by side with other readers, and write the table to README.md.

Every contender is a whole process: interpreter start and imports count. Contenders take turns, files are in
the page cache, and the table shows medians. Peak memory is the maximum resident size of the process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from inputs import compress, make_input
from ranks import ranks_lines

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
README = HERE / "README.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
HTA_PYTHON = REPOSITORY / ".venv-hta" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Contender:
    """A command that reads one file."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a command: wall and processor time in seconds, peak resident size in MB (1e6 bytes)."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def measure(command: tuple[str, ...]) -> Measured:
    """Run a command to its end and return what it cost; its output is thrown away."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=child_environment()
    )
    assert child.stderr is not None
    complaint = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{complaint.decode()}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e6)


def child_environment() -> dict[str, str]:
    """Return an environment in which the checkout is importable."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}


def warm(path: Path) -> None:
    """Read a file once, so that it is in the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def take_turns(contenders: list[Contender], rounds: int, path: Path | None = None) -> dict[str, Measured]:
    """Return the medians of every contender over interleaved rounds."""
    runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            if path is not None:
                warm(path)
            runs[contender.name].append(measure(contender.command))
    return {
        name: Measured(
            statistics.median(run.wall_s for run in measured),
            statistics.median(run.cpu_s for run in measured),
            statistics.median(run.peak_mb for run in measured),
        )
        for name, measured in runs.items()
    }


def entry(name: str, path: Path, *, python: Path | str = sys.executable) -> Contender:
    """Return the contender that ``entry_NAME.py`` is, reading ``path``."""
    return Contender(name, (str(python), str(HERE / f"entry_{name}.py"), str(path)))


def reading_table(plain: Path, packed: Path, rounds: int) -> list[str]:
    """Return the rows of the table of readers, as Markdown."""
    contenders = [
        entry("tracedoc", plain),
        Contender("tracedoc, .gz", entry("tracedoc", packed).command),
        entry("json", plain),
        entry("msgspec", plain),
    ]
    if HTA_PYTHON.exists():
        contenders.append(entry("hta", plain, python=HTA_PYTHON))
    results = take_turns(contenders, rounds, plain)
    own = results["tracedoc"].wall_s
    words = {
        "tracedoc": "tracedoc: load + breakdown",
        "tracedoc, .gz": "tracedoc: the same, .gz",
        "json": "`json.loads` alone",
        "msgspec": "msgspec typed decode alone",
        "hta": "HolisticTraceAnalysis 0.5.0: load + breakdown",
    }
    raw_mb = plain.stat().st_size / 1e6
    rows = ["| | wall | processor | peak memory | wall / tracedoc |", "|---|---|---|---|---|"]
    rows += [
        f"| {words[name]} | {cost.wall_s:.2f} s | {cost.cpu_s:.2f} s | {cost.peak_mb:.0f} MB "
        f"| {cost.wall_s / own:.2f} |"
        for name, cost in results.items()
    ]
    rows.append("")
    if "hta" in results:
        rows.append(f"- Goal at least 10 x HolisticTraceAnalysis: {results['hta'].wall_s / own:.1f} x.")
    bound = 60 + 0.6 * raw_mb
    rows.append(
        f"- Goal peak below 60 MB + 0.6 x raw = {bound:.0f} MB: {results['tracedoc'].peak_mb:.0f} MB."
    )
    return rows


def start_up_lines(rounds: int) -> list[str]:
    """Return how long the command line takes to start, as Markdown."""
    results = take_turns(
        [
            Contender("bare", (sys.executable, "-c", "pass")),
            Contender("help", (sys.executable, "-m", "tracedoc", "--help")),
        ],
        rounds,
    )
    bare, shown = results["bare"].wall_s, results["help"].wall_s
    return [
        f"- Start-up: `tracedoc --help` {shown * 1000:.0f} ms, `python -c pass` {bare * 1000:.0f} ms; "
        f"goal within 200 ms of it: {(shown - bare) * 1000:.0f} ms."
    ]


def machine_lines(plain: Path, origin: str, rounds: int) -> list[str]:
    """Return what was measured and on what, as Markdown."""
    packages = []
    for package in ("numpy", "msgspec", "isal"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"no {package}")
    return [
        f"Input: {plain.stat().st_size / 1e6:.0f} MB of JSON, {origin}. Medians of {rounds} interleaved "
        "rounds, warm page cache, whole processes.",
        "",
        f"Machine: {cpu_model()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"{', '.join(packages)}; command: `make bench`.",
        "",
    ]


def cpu_model() -> str:
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
    README.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=100, help="size of the input in MB of JSON")
    parser.add_argument(
        "--shared", type=Path, default=REPOSITORY.parent / "shared", help="where real traces lie"
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench", help="where inputs go")
    parser.add_argument("--dry", action="store_true", help="print the table, leave README.md as it is")
    options = parser.parse_args()
    shared = options.shared.resolve()
    real = shared if (shared / "bench").is_dir() else None
    plain, origin = make_input(options.folder, options.mb, real)
    lines = machine_lines(plain, origin, options.rounds)
    lines += reading_table(plain, compress(plain), options.rounds)
    lines += start_up_lines(max(options.rounds, 5))
    lines += ["", *ranks_lines(options.folder, options.mb, options.rounds, real)]
    print("\n".join(lines))
    if not options.dry:
        write_results(lines)


if __name__ == "__main__":
    main()
