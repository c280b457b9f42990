"""Notice ranks whose recording ends well before that of the others: they crashed, or were stopped."""

from __future__ import annotations

from statistics import median

from tracedoc.errors import Limit
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.units import format_ms, format_ranges

EARLY_STEPS = 1.5
"""A rank ends early where the longest recording goes on for so many steps of the run."""


def ended_early(run: RunView) -> list[Limit]:
    """Return one limit for the ranks that end early, none where all end together.

    Ranks are compared that were recorded from one step on, by the length of their recordings.
    """
    lengths = {digest.rank: _length_ns(digest) for digest in run.digests if _length_ns(digest)}
    first = {digest.first_step for digest in run.digests}
    representative = run.representative_digest
    if len(lengths) < 2 or len(first) != 1 or representative is None:
        return []
    steps = [step.end_ns - step.start_ns for digest in run.digests for step in digest.complete_steps]
    if not steps:
        return []
    longest = max(lengths.values())
    early = [rank for rank, length in lengths.items() if longest - length > EARLY_STEPS * median(steps)]
    if not early:
        return []
    missing_ms = (longest - min(lengths[rank] for rank in early)) / 1e6
    who = f"rank {early[0]} ended" if len(early) == 1 else f"ranks {format_ranges(early)} ended"
    return [
        Limit(
            "ended-early",
            f"{who} up to {format_ms(missing_ms)} before the others, in the middle of the capture",
            "it crashed or was stopped: look at its log first; steps that all ranks have are analysed",
        )
    ]


def _length_ns(digest: RankDigest) -> int:
    return digest.capture.window_ns if digest.capture is not None and digest.step_source != "none" else 0
