"""Put HolisticTraceAnalysis' numbers beside ours, each difference with the definitions that explain it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tracedoc.crosscheck.ask import Breakdown, ask_hta
from tracedoc.crosscheck.definitions import Split, stages
from tracedoc.errors import InputError
from tracedoc.trace.kineto import read_trace

PARTS = ("span_ms", "compute_ms", "non_compute_ms", "idle_ms", "overlap_frac")

_LEAST_MS, _LEAST_SHARE, _LEAST_OVERLAP = 0.002, 1e-5, 1e-4
"""HTA keeps times as float64 microseconds since 1970 in some files, and rounds its percentages."""


class Reason(msgspec.Struct, frozen=True):
    """A definition that differs, and how much it adds to each number to arrive at HTA's."""

    text: str
    changes: dict[str, float]


class RankCheck(msgspec.Struct, frozen=True):
    """One rank: our split of the capture, HTA's, and the reasons for the difference.

    ``unexplained`` holds what the reasons leave over, by number; it is empty where they explain everything.
    ``error`` says why there is no comparison.
    """

    rank: int
    source: str
    ours: Split | None
    hta: Breakdown | None
    reasons: tuple[Reason, ...] = ()
    unexplained: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""


class CrossCheck(msgspec.Struct, frozen=True):
    """All ranks beside HTA; ``hta_version`` is the version that answered."""

    hta_version: str
    ranks: tuple[RankCheck, ...]


def cross_check(sources: Sequence[tuple[int, str]]) -> CrossCheck:
    """Compare the captures of ranks, each a pair of rank and file.

    Raises :class:`InputError` for what is no local file: HTA opens files itself.
    """
    for _, source in sources:
        if not os.path.isfile(source):
            raise InputError(
                "HolisticTraceAnalysis reads local files only", "copy the traces to this machine"
            )
    version, answers = ask_hta([os.path.abspath(source) for _, source in sources])
    checks = (_check(rank, source, answer) for (rank, source), answer in zip(sources, answers, strict=True))
    return CrossCheck(version, tuple(checks))


def _check(rank: int, source: str, hta: Breakdown) -> RankCheck:
    name = os.path.basename(source)
    found = list(stages(read_trace(source)))
    if not found:
        return RankCheck(rank, name, None, None, error="no GPU activity is in this file")
    ours = found[0].split
    if hta.error:
        return RankCheck(rank, name, ours, None, error=f"HTA does not read this file: {hta.error}")
    reasons = tuple(
        Reason(after.reason, changes)
        for before, after in pairwise(found)
        if (changes := _changes(before.split, after.split))
    )
    return RankCheck(rank, name, ours, hta, reasons, _changes(found[-1].split, hta))


def _changes(before: Split | Breakdown, after: Split | Breakdown) -> dict[str, float]:
    """Return by how much each number changes, without those that stay the same."""
    changes = {}
    for part in PARTS:
        old, new = getattr(before, part), getattr(after, part)
        if old is None or new is None:
            continue
        least = _LEAST_OVERLAP if part == "overlap_frac" else _LEAST_MS + _LEAST_SHARE * abs(old)
        if abs(new - old) > least:
            changes[part] = new - old
    return changes
