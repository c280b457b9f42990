"""The ledger as all reports show it: a waterfall from today's step to the ideal one, a line a cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tracedoc.diagnosis import Diagnosis, Finding
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause, is_apart, saved_words
from tracedoc.report.words import overlap_name
from tracedoc.units import format_ms, format_percent, format_ranges, lowered

LEAST_SHARE = 0.01
"""Causes below this share of the step are one line; so much that is not explained is not told."""

TODAY, IDEAL, UNTOLD = "today", "ideal", "untold"

LATE = "ranks."
"""The family of ranks that are slower than their peers: where all of them are, it is one at a time."""

ALONE = (
    "part: each millisecond counted once, for one cause; alone: how much shorter the step is if only this is "
    "mended: more where it shares time with another cause, less where that would then set the pace"
)
"""What the column of :attr:`WaterfallLine.alone` says."""


class WaterfallLine(msgspec.Struct, frozen=True):
    """One line: its time, the share of today's step that it is, and the share at which its bar begins.

    ``key`` is :data:`TODAY` or :data:`IDEAL` for the two ends; of a cause it is the severity of the finding
    that tells it, or :data:`UNTOLD`. ``number`` is that of the finding, 0 for none; ``note`` says where.
    ``alone`` is what mending only this cause saves, "" in a waterfall whose parts all say as much.
    """

    key: str
    words: str
    ms: float
    share: float
    start: float = 0.0
    note: str = ""
    number: int = 0
    alone: str = ""

    @property
    def percent(self) -> str:
        """Its share of today's step in words."""
        return format_percent(self.share)


class Waterfall(msgspec.Struct, frozen=True):
    """The lines from today's step to the ideal one; ``of`` says which step. Empty for a ``reason``."""

    lines: tuple[WaterfallLine, ...] = ()
    of: str = ""
    reason: str = ""

    @property
    def has_alone(self) -> bool:
        """True where lines say what mending each cause alone saves."""
        return any(line.alone for line in self.lines)


def build_waterfall(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Waterfall | None:
    """The waterfall of a diagnosis, whose findings are numbered from 1; ``None`` for one without a ledger."""
    ledger = diagnosis.ledger
    if ledger is None:
        return None
    if ledger.step_ms <= 0:
        return Waterfall(reason=ledger.reason)
    return Waterfall(tuple(_lines(ledger, findings, len(diagnosis.ranks))), step_words(ledger))


def step_words(ledger: Ledger) -> str:
    """Which step the ledger accounts for."""
    steps = len(ledger.steps)
    words = "the captured step" if steps == 1 else f"the mean of {steps or 'all'} complete steps"
    return words


def _lines(ledger: Ledger, findings: Sequence[Finding], ranks: int) -> Iterator[WaterfallLine]:
    step_ms = ledger.step_ms
    yield WaterfallLine(TODAY, "today's step", step_ms, 1.0)
    left_ms = step_ms
    costly = [one for one in ledger.causes if one.share_ms > 0]
    large = [one for one in costly if one.share_ms >= LEAST_SHARE * step_ms]
    if len(costly) == len(large) + 1:
        large = costly
    rows = list(_rows(large, findings, ranks, ledger))
    apart = any(format_ms(one.ms) != format_ms(one.alone_ms) for one in rows)
    for row in rows:
        left_ms -= row.ms
        yield WaterfallLine(
            key=findings[row.number - 1].severity if row.number else UNTOLD,
            words=row.words,
            ms=row.ms,
            share=_share(row.ms, step_ms),
            start=_share(left_ms, step_ms),
            note=row.note,
            number=row.number,
            alone=saved_words(row.alone_ms) if apart else "",
        )
    small = costly[len(large) :]
    if small:
        ms = sum(one.share_ms for one in small)
        words, start = f"{len(small)} smaller causes", _share(left_ms - ms, step_ms)
        yield WaterfallLine(UNTOLD, words, ms, _share(ms, step_ms), start)
    share = _share(ledger.ideal_ms, step_ms)
    yield WaterfallLine(IDEAL, "ideal step", ledger.ideal_ms, share, note=unexplained_words(ledger))


class _Row(msgspec.Struct, frozen=True):
    """A cause, or all that one finding tells, in the words of its title.

    They have ``ms`` of the step as their part, and mending only these saves ``alone_ms``.
    """

    words: str
    ms: float
    alone_ms: float
    number: int
    note: str


def _rows(
    causes: Sequence[LedgerCause], findings: Sequence[Finding], ranks: int, ledger: Ledger
) -> Iterator[_Row]:
    """The rows of large causes, the largest first: of a finding that tells several there is one."""
    told: dict[tuple[int, ...], list[LedgerCause]] = {}
    for place, cause in enumerate(causes):
        numbers = tuple(n for n, one in enumerate(findings, 1) if one.rule_id in cause.told_by)
        told.setdefault(numbers or (-place,), []).append(cause)
    rows = []
    for numbers, group in told.items():
        finding = findings[numbers[0] - 1] if numbers[0] > 0 else None
        alone_ms = finding.alone_ms if finding is not None and len(numbers) == 1 else None
        rows.append(
            _Row(
                lowered(finding.title.partition(": ")[0])
                if finding and (len(group) > 1 or len(numbers) == 1)
                else group[0].words,
                sum(one.share_ms for one in group),
                group[0].alone_ms[1] if alone_ms is None else alone_ms,
                max(numbers[0], 0),
                cause_note(group[0], finding, ranks, lambda words: overlap_name(words, findings, ledger)),
            )
        )
    yield from sorted(rows, key=lambda one: -one.ms)


def _share(ms: float, step_ms: float) -> float:
    """The share of the step, 0 to 1 whatever a file says."""
    return min(max(ms / step_ms, 0.0), 1.0)


def unexplained_words(ledger: Ledger) -> str:
    """How much of the ideal step the replay does not explain; "" for little."""
    if abs(ledger.unexplained_ms) < LEAST_SHARE * ledger.step_ms:
        return ""
    if ledger.unexplained_ms > 0:
        return f"of which {format_ms(ledger.unexplained_ms)} is unexplained"
    return f"unexplained: the replay takes {format_ms(-ledger.unexplained_ms)} longer than measured"


def cause_note(
    cause: LedgerCause,
    finding: Finding | None = None,
    ranks: int = 0,
    named: Callable[[str], str] = str,
) -> str:
    """On which of so many ranks and where a cause is seen, and what hides it or the ``finding`` of it.

    That is named by its words, or as ``named`` says them.
    """
    parts = []
    if cause.ranks and cause.id.startswith(LATE) and ranks == len(finding.ranks if finding else cause.ranks):
        parts.append("in turn")
    elif cause.ranks:
        parts.append(f"rank{'s' * (len(cause.ranks) > 1)} {format_ranges(cause.ranks)}")
    if cause.place:
        parts.append(cause.place)
    hidden, other = bool(cause.partner), cause.partner or cause.shared_with
    other = CAUSE_WORDS.get(other, other) if is_apart(cause.share_ms, cause.alone_ms[1]) else ""
    if finding is not None:
        hidden, other = finding.together_ms is not None, finding.overlaps
    if other:
        parts.append(f"{'only together with' if hidden else 'shared with'} {named(other)}")
    return "; ".join(parts)
