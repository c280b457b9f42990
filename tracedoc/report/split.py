"""The observed split of a step as all reports show it: its parts, whose waiting it is, what idles."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import BUDGET_PARTS, BudgetParts, Diagnosis
from tracedoc.idle_causes import WORDS
from tracedoc.ledger import INHERENT
from tracedoc.predicted import LEAST_SHARE
from tracedoc.units import format_ms, format_percent

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
