"""Keep what is diagnosed of every run at hand, and print what differs between two such keepings."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHARED = ROOT.parent / "shared"

APART = ("format_variants", "reproducers", "live_samples")
"""Folders whose files are runs of their own."""

VOLATILE = ("tool_version", "reader", "sources", "source")
"""Fields that say where and with what a run was read, not what was found."""

SMALLEST = 1e-9
"""Numbers that differ by no more than this share are the same: they were added in another order."""


def runs(jobs: Path) -> dict[str, list[str]]:
    """Return the paths of each run by name: samples, shared traces, and the simulated jobs below ``jobs``."""
    found = {}
    folders = sorted(path for path in (ROOT / "sample_traces").iterdir() if path.is_dir())
    if (SHARED / "traces").is_dir():
        folders += sorted(path for path in (SHARED / "traces").iterdir() if path.is_dir())
        folders += sorted(path for path in (SHARED / "traces/cpu_gloo").iterdir() if path.is_dir())
    if jobs.is_dir():
        folders += sorted(path for path in jobs.iterdir() if path.is_dir() and path.name.startswith("job"))
    for folder in folders:
        traces = sorted(str(path) for path in folder.glob("*.json*"))
        if folder.name in APART:
            found |= {f"{folder.name}/{Path(path).name}": [path] for path in traces}
        elif traces or any(folder.glob("manifest*")):
            found[folder.name] = [str(folder)]
    return found


def answer(name: str, paths: Sequence[str]) -> tuple[str, Any]:
    """Return the diagnosis of a run as plain data; an error of the user's is what it says."""
    import tracedoc

    try:
        return name, msgspec.to_builtins(tracedoc.diagnose(paths, tracedoc.Options(jobs=1)))
    except tracedoc.errors.TracedocError as error:
        return name, {"error": f"{error.message} | {error.hint}"}


def keep(destination: Path, jobs: Path, count: int, seed: int) -> None:
    """Write the answer for each run into ``destination``, one JSON file a run."""
    if not jobs.is_dir() and (SHARED / "jobs/corpus.py").is_file():
        corpus = [sys.executable, str(SHARED / "jobs/corpus.py"), str(jobs)]
        subprocess.run([*corpus, "--jobs", str(count), "--seed", str(seed)], check=True, stdout=sys.stderr)
    destination.mkdir(parents=True, exist_ok=True)
    listed = runs(jobs)
    with ProcessPoolExecutor() as pool:
        for name, found in pool.map(answer, listed, listed.values()):
            (destination / f"{name.replace('/', '--')}.json").write_text(json.dumps(found))


def differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two answers differ, with what each says; what only one has is ``None`` in the other."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            if key not in VOLATILE:
                yield from differences(old.get(key), new.get(key), f"{at}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif isinstance(old, float) and isinstance(new, (int, float)):
        if abs(old - new) > SMALLEST * max(abs(old), abs(new)):
            yield at, old, new
    elif old != new:
        yield at, old, new


def renamed(answer: Any, names: Mapping[str, str]) -> Any:
    """Return an answer with the keys and ids of ``names`` as they are called now."""
    if isinstance(answer, dict):
        return {names.get(key, key): renamed(value, names) for key, value in answer.items()}
    if isinstance(answer, list):
        return [renamed(one, names) for one in answer]
    return names.get(answer, answer) if isinstance(answer, str) else answer


def compare(old: Path, new: Path, names: Mapping[str, str], most: int) -> int:
    """Print what differs between two keepings, at most ``most`` places a run; return how many runs do."""
    listed = sorted({path.name for folder in (old, new) for path in folder.glob("*.json")})
    changed = 0
    for name in listed:
        sides = [
            json.loads((folder / name).read_text()) if (folder / name).exists() else None
            for folder in (old, new)
        ]
        found = list(differences(renamed(sides[0], names), sides[1]))
        changed += bool(found)
        if found:
            print(f"{name.removesuffix('.json')}: {len(found)} places")
        for at, before, after in found[:most]:
            print(f"  {at}: {str(before)[:160]} -> {str(after)[:160]}")
    print(f"{changed} of {len(listed)} runs differ")
    return changed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="diagnose everything with this checkout")
    keeping.add_argument("destination", type=Path)
    keeping.add_argument("--job-folder", type=Path, default=ROOT / "build/answer-jobs")
    keeping.add_argument("--jobs", type=int, default=60)
    keeping.add_argument("--seed", type=int, default=21000)
    comparing = commands.add_parser("compare", help="print what differs")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--renamed", metavar="OLD=NEW", action="append", default=[])
    comparing.add_argument("--most", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.command == "keep":
        keep(chosen.destination, chosen.job_folder, chosen.jobs, chosen.seed)
        return 0
    names = dict(pair.split("=", 1) for pair in chosen.renamed)
    return 1 if compare(chosen.old, chosen.new, names, chosen.most) else 0


if __name__ == "__main__":
    sys.exit(main())
