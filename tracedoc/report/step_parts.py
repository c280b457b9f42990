"""What a step is made of, as all reports show it: its observed parts, and the ledger's, a line a cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import BUDGET_PARTS, BudgetParts, Diagnosis, Finding
from tracedoc.idle_causes import WORDS
from tracedoc.ledger import INHERENT, Ledger, LedgerCause, LedgerRow, is_hidden
from tracedoc.predicted import LEAST_SHARE
from tracedoc.units import format_ms, format_percent, format_ranges, lowered

LEAST_NOTED_SHARE = 0.02
"""Share of the step from which exposed copies are shown with where they run, and waiting with whose it is."""

MOSTLY_LATE = 0.5
"""Late ranks that cost more than this share of the waiting explain it."""


class Segment(msgspec.Struct, frozen=True):
    """One part of a step: its share is of the whole step, ``note`` names the largest causes."""

    key: str
    label: str
    ms: float
    share: float
    note: str = ""


def segments(budget: BudgetParts, *, on_cpu: bool = False) -> tuple[Segment, ...]:
    """The parts of a budget that are not empty, in the order of the bar; ``on_cpu`` chooses the words."""
    whole = budget.step_ms
    found = []
    for key, label, field in BUDGET_PARTS:
        ms = float(getattr(budget, field))
        if ms <= 0 or whole <= 0:
            continue
        note = _causes(budget.idle_causes_ms, on_cpu=on_cpu) if key == "idle" else ""
        found.append(Segment(key, label, ms, ms / whole, note))
    return tuple(found)


def with_notes(parts: tuple[Segment, ...], diagnosis: Diagnosis) -> tuple[Segment, ...]:
    """Return the parts with notes: how many exposed copies stay on the device, and whose waiting it is."""
    by_key = {part.key: part for part in parts}
    for key, note_of in (("copy", _copies_note), ("wait", _waiting_note)):
        if (part := by_key.get(key)) is not None and part.share >= LEAST_NOTED_SHARE:
            by_key[key] = replace(part, note=note_of(part, diagnosis))
    return tuple(by_key.values())


def _copies_note(copy: Segment, diagnosis: Diagnosis) -> str:
    host_ms = diagnosis.number("exposed_host_copy_ms")
    if host_ms is None:
        return ""
    if host_ms < 0.02 * copy.ms:
        return "within the device"
    if host_ms > 0.98 * copy.ms:
        return "between host and device"
    return f"{format_ms(host_ms)} between host and device, the rest within it"


def _waiting_note(wait: Segment, diagnosis: Diagnosis) -> str:
    """What of the waiting is due to ranks that are late, where most of it is not."""
    ledger = diagnosis.ledger
    if ledger is None or not ledger.step_ms:
        return ""
    late_ms = sum(one.share_ms for one in ledger.causes if one.id.startswith("ranks."))
    if late_ms >= MOSTLY_LATE * wait.ms:
        return ""
    if any(one.id in INHERENT for one in ledger.causes):
        return "as the pipeline drains, and from the causes above"
    most = "most of it " if late_ms >= LEAST_SHARE * ledger.step_ms else ""
    return f"{most}what makes them late is among the causes above"


def overlap_words(budget: BudgetParts) -> str:
    """How much communication compute hides, and for how much of it compute waits."""
    if budget.comm_ms <= 0 or budget.overlap_frac is None:
        return ""
    text = (
        f"{format_ms(budget.comm_ms)} of communication in the step, "
        f"{format_percent(budget.overlap_frac)} of it behind compute"
    )
    if not budget.blocking_comm_ms:
        return text
    return f"{text}; compute waits for {format_ms(budget.blocking_comm_ms)} of it"


def _causes(causes: dict[str, float], most: int = 3, *, on_cpu: bool = False) -> str:
    noise = 0.02 * sum(causes.values())
    largest = sorted(((ms, cause) for cause, ms in causes.items() if ms > noise), key=lambda pair: -pair[0])
    words = [f"{_idle_words(cause, on_cpu=on_cpu)} {format_ms(ms)}" for ms, cause in largest[:most]]
    return ", ".join(words)


def _idle_words(cause: str, *, on_cpu: bool) -> str:
    words = WORDS.get(cause)
    if words is None:
        return cause.replace("_", " ")
    return (words.on_cpu if on_cpu else "") or words.idle


UNEXPLAINED = 0.02
"""Of the ideal step so little that is not explained is not told, as a share of today's."""

LEAST_SHOWN = 0.0005
"""What small causes cost together is a line from this share of the step: less is what sums round off."""

TODAY, IDEAL, UNTOLD = "today", "ideal", "untold"

LATE = "ranks."
"""The family of ranks that are slower than their peers: where all of them are, it is one at a time."""

IN_TURN = "each row is what mending it saves after those above it"
"""How the rows add up."""


class WaterfallLine(msgspec.Struct, frozen=True):
    """One line: its time, the share of today's step that it is, and the share at which its bar begins.

    ``key`` is :data:`TODAY` or :data:`IDEAL` for the two ends; of a cause it is the severity of the finding
    that tells it, or :data:`UNTOLD`. ``number`` is that of the finding, 0 for none; ``note`` says where.
    """

    key: str
    words: str
    ms: float
    share: float
    start: float = 0.0
    note: str = ""
    number: int = 0

    @property
    def percent(self) -> str:
        """Its share of today's step in words."""
        return format_percent(self.share)


class Waterfall(msgspec.Struct, frozen=True):
    """The lines from today's step to the ideal one; ``of`` says which step. Empty for a ``reason``."""

    lines: tuple[WaterfallLine, ...] = ()
    of: str = ""
    reason: str = ""


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
    causes, left_ms = {one.id: one for one in ledger.causes}, step_ms
    numbers = {one.id: number for number, one in enumerate(findings, 1)}
    for row in ledger.rows:
        left_ms -= row.saves_ms
        number = numbers.get(row.finding, 0)
        finding = findings[number - 1] if number else None
        known = [causes[id] for id in row.causes if id in causes]
        largest = max(known, key=lambda one: one.share_ms, default=LedgerCause("", 0.0, (0.0, 0.0, 0.0), 0.0))
        pair = [findings[numbers[id] - 1] for id in (row.finding, row.hidden) if id in numbers]
        behind = _behind(row, largest, finding) if len(pair) < 2 else "each hides the other"
        notes = cause_note(largest, finding, ranks), behind
        names = [lowered(one.title.partition(": ")[0]) for one in pair]
        yield WaterfallLine(
            key=finding.severity if finding else UNTOLD,
            words=" and ".join(names) or largest.words,
            ms=row.saves_ms,
            share=_share(row.saves_ms, step_ms),
            start=_share(left_ms, step_ms),
            note="; ".join(filter(None, notes)),
            number=number,
        )
    ms = left_ms - ledger.ideal_ms
    if ms >= LEAST_SHOWN * step_ms:
        told = {id for row in ledger.rows for id in row.causes}
        smaller_ms = sum(one.share_ms for one in ledger.causes if one.id not in told)
        words = "smaller causes" if 2 * smaller_ms >= ms else "possibly more of the causes above"
        yield WaterfallLine(UNTOLD, words, ms, _share(ms, step_ms), _share(left_ms - ms, step_ms))
    share = _share(ledger.ideal_ms, step_ms)
    yield WaterfallLine(IDEAL, "ideal step", ledger.ideal_ms, share, note=unexplained_words(ledger))


def _behind(row: LedgerRow, cause: LedgerCause, finding: Finding | None) -> str:
    """That mending a row saves little before those above it, where they hide it."""
    alone_ms = cause.alone_ms[1] if finding is None else finding.alone_ms
    return (
        "only once those above are mended"
        if alone_ms is not None and is_hidden(row.saves_ms, alone_ms)
        else ""
    )


def _share(ms: float, step_ms: float) -> float:
    """The share of the step, 0 to 1 whatever a file says."""
    return min(max(ms / step_ms, 0.0), 1.0)


def unexplained_words(ledger: Ledger) -> str:
    """How much of the ideal step the replay does not explain; "" for little."""
    if abs(ledger.unexplained_ms) < UNEXPLAINED * ledger.step_ms:
        return ""
    if ledger.unexplained_ms > 0:
        return f"of which {format_ms(ledger.unexplained_ms)} is unexplained"
    return f"unexplained: the replay takes {format_ms(-ledger.unexplained_ms)} longer than measured"


def cause_note(cause: LedgerCause, finding: Finding | None = None, ranks: int = 0) -> str:
    """On which of so many ranks and where a cause, or the ``finding`` that tells it, is seen."""
    parts = []
    late = bool(cause.ranks) and cause.id.startswith(LATE)
    on = finding.ranks if late and finding else cause.ranks
    if late and len(on) == ranks:
        parts.append("one rank after another")
    elif on:
        parts.append(f"rank{'s' * (len(on) > 1)} {format_ranges(on)}")
    if cause.place:
        parts.append(cause.place)
    return "; ".join(parts)
