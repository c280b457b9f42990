"""Hold predictions of the replay against simulated jobs with the fix applied, and measure what they cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay_cost import costs

from tests.play.held import Held, hold, names_best

REPORTED_SEEDS = 1_000_000
"""Jobs of the table in the repository begin here; while working on the replay, other seeds are looked at."""

LARGE = 0.05
"""Gains above this share of the step are large."""


def main() -> None:
    """Print the tables; predictions that are far off go to stderr with ``--wrong``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--first", type=int, default=REPORTED_SEEDS, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--wrong", action="store_true", help="list predictions that are off by 3 %% of the step"
    )
    parser.add_argument("--no-cost", action="store_true")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.jobs)
    with ProcessPoolExecutor(asked.processes) as pool:
        jobs = list(pool.map(_held, seeds, chunksize=4))
    for line in (*accuracy(jobs), "", *goals(jobs)):
        print(line)
    if asked.wrong:
        for one in (one for held in jobs if held for one in held if one.error > 0.03 or not one.inside):
            print(one, file=sys.stderr)
    if not asked.no_cost:
        for line in ("", *cost_table(costs())):
            print(line)


def _held(seed: int) -> list[Held] | None:
    try:
        return hold(seed)
    except AssertionError:
        return None  # refused


def accuracy(jobs: Sequence[list[Held] | None]) -> Iterator[str]:
    """Yield the table of errors, one line for each change."""
    yield "| change | predictions | median | p90 | worst | truth in range | mean true gain |"
    yield "|---|---|---|---|---|---|---|"
    everything = [one for held in jobs if held for one in held]
    for change in sorted({_named(one) for one in everything}):
        yield _line(f"`{change}`", [one for one in everything if _named(one) == change])
    yield _line("**all but `feed-input`**", [one for one in everything if one.change != "feed-input"])


def _named(held: Held) -> str:
    """Return what a prediction is listed under: what messages and units become differs from job to job."""
    return held.change.split()[0] if held.change.startswith(("cap-buckets", "split-units")) else held.change


def _line(name: str, held: Sequence[Held]) -> str:
    errors = sorted(one.error for one in held)
    inside = sum(one.inside for one in held) / len(held)
    gain = sum(one.true_gain for one in held) / len(held)
    shown = " | ".join(
        f"{100 * error:.2f} %" for error in (median(errors), errors[int(0.9 * len(errors))], errors[-1])
    )
    return f"| {name} | {len(held)} | {shown} | {100 * inside:.1f} % | {100 * gain:.0f} % |"


def goals(jobs: Sequence[list[Held] | None]) -> Iterable[str]:
    """Yield what is asked of the replay, and what was measured."""
    everything = [one for held in jobs if held for one in held if one.change != "feed-input"]
    errors = sorted(one.error for one in everything)
    large = [one for one in everything if one.true_gain > LARGE]
    relative = median(abs(one.gain - one.true_gain) / one.true_gain for one in large)
    named = [answer for held in jobs if held and (answer := names_best(held, least=LARGE)) is not None]
    inside = sum(one.inside for one in everything) / len(everything)
    yield "| goal | | measured |"
    yield "|---|---|---|"
    yield f"| error of the likely step, median | at most 1 % | {100 * median(errors):.2f} % |"
    yield f"| the same, p90 | at most 3 % | {100 * errors[int(0.9 * len(errors))]:.2f} % |"
    yield f"| truth in the range | at least 95 % | {100 * inside:.1f} % |"
    first = 100 * sum(named) / len(named)
    yield f"| best fix of a job first ({len(named)} jobs) | at least 95 % | {first:.1f} % |"
    what = f"gains above 5 % of the step ({len(large)}): median error of the gain"
    yield f"| {what} | at most 3 % | {100 * relative:.2f} % |"
    yield f"| jobs refused | | {sum(held is None for held in jobs)} of {len(jobs)} |"


def cost_table(found: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield what twenty fixes in three scenarios cost, by ranks."""
    yield "| ranks | GPU events | replay and 20 fixes, 3 scenarios | memory after reading | peak |"
    yield "|---|---|---|---|---|"
    for one in found:
        yield (
            f"| {one['ranks']:.0f} | {one['events']:,.0f} | {one['processor_s']:.2g} s "
            f"| {one['read_mb']:.0f} MB | {one['peak_mb']:.0f} MB |"
        )


if __name__ == "__main__":
    main()
