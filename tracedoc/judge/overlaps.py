"""Causes that overlap: what several give together, and what is said of one that another hides or shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracedoc.facts.measure_run import Measurements
from tracedoc.ledger import CAUSE_WORDS, LedgerCause, Range, is_apart
from tracedoc.units import format_ms
from tracedoc.whatif.ledger import alone_of

MOSTLY_SHARED = 0.8
"""A cause is told by what tells another, where that saves at least this share of what mending it saves."""

MORE = 0.1
"""A limit behind another is told where mending both saves more than one by this share of what it costs."""


def alone_ms_of(causes: Sequence[LedgerCause], measurements: Measurements) -> Range:
    """How much shorter the step is without these causes together: low, likely and high, in ms."""
    if len(causes) == 1:
        return causes[0].alone_ms
    found = alone_of(measurements.run, tuple(one.id for one in causes)) if causes else None
    return found or (0.0, 0.0, 0.0)


def overlap_words(causes: Sequence[LedgerCause], measurements: Measurements) -> str:
    """What is said of causes the largest of which another, none of these, hides or costs the same time as."""
    largest = max(causes, key=lambda one: one.share_ms, default=None)
    mine = tuple(one.id for one in causes)
    if largest is not None and largest.shared_with and largest.shared_with not in mine:
        return _shared(largest)
    if largest is None or not largest.partner or largest.partner in mine:
        return ""
    both = alone_of(measurements.run, (*mine, largest.partner))
    if both is None:
        return ""
    alone = alone_ms_of(causes, measurements)[1]
    if both[1] - alone < MORE * largest.share_ms:
        return ""
    partner = CAUSE_WORDS.get(largest.partner, largest.partner)
    saves = format_ms(alone) if alone > 0 else "nothing"
    return (
        f" Another limit takes about as long at the same time ({partner}): removing only this saves {saves},"
        f" both {format_ms(both[1])}."
    )


def _shared(cause: LedgerCause) -> str:
    """What is said of a cause that costs time which another one costs as well."""
    if not is_apart(cause.share_ms, cause.alone_ms[1]):
        return ""
    other = CAUSE_WORDS.get(cause.shared_with, cause.shared_with)
    return f" Part of this time is that of another cause too ({other}): mending either saves it."


def same_time(cause: LedgerCause, told: Mapping[str, list[str]]) -> list[str]:
    """The rules that tell the cause whose mending saves most of what mending this one does; [] for none.

    ``told`` has the rules by the id of the cause.

    Of time that two causes share each has half as its part, which is so much less than what it saves alone.
    """
    shared_ms = 2 * (cause.alone_ms[1] - cause.share_ms)
    return told.get(cause.shared_with, []) if shared_ms >= MOSTLY_SHARED * cause.alone_ms[1] else []
