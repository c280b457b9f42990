"""Damage copies of all samples and shared traces, and count what answers claim that whole runs do not.

    python soak/damaged_runs.py [--count 24] [--seed 1]

Ends with 1 where a warning is new, promises more, or the first line does not say that a file is cut off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.damage import Truth, answer, damaged, damages  # noqa: E402

PLACES = (REPOSITORY / "sample_traces", REPOSITORY.parent / "shared" / "traces")
APART = ("format_variants", "reproducers", "live_samples")
"""Folders whose files are runs of their own."""


def runs() -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the trace files of each run."""
    for place in PLACES:
        for folder in sorted({path.parent for path in place.rglob("*.json*")}):
            paths = sorted(one for one in folder.glob("*.json*") if not one.name.startswith("manifest"))
            if folder.name in APART:
                yield from ((f"{folder.name}/{path.name}", [path]) for path in paths)
            elif paths:
                yield folder.name, paths


def main() -> int:
    """Try every run; return 1 if any damage made an answer claim more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    tried, noted = 0, 0
    wrong: Counter[str] = Counter()
    for name, paths in runs():
        truth = Truth(paths)
        if isinstance(truth.whole, str):
            continue
        for damage in damages(paths, chosen.seed, chosen.count):
            with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
                found = answer(damaged(paths, damage, Path(folder)))
            tried += 1
            claims = truth.invented(found, damage)
            noted += bool(truth.invented(found, damage, notes=True)) and not claims
            for claim in claims:
                print(f"{name}, {damage.name}, rank {damage.rank}: {claim}", flush=True)
            if claims:
                wrong[damage.name.rstrip("0123456789. ").lstrip("0123456789. ")] += 1
    kinds = ", ".join(f"{kind} {count}" for kind, count in wrong.most_common())
    more = f"{sum(wrong.values())} claim more ({kinds or 'none'})"
    print(f"damaged runs: {tried} tried, {more}, {noted} in notes only")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
