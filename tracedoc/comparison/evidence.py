"""What was seen on both sides of a part of the step, in words."""

from __future__ import annotations

from tracedoc.comparison.viewpoint import late_rank
from tracedoc.diagnosis import Budget, CollectiveRow, Diagnosis
from tracedoc.idle_causes import WORDS
from tracedoc.units import format_bytes, format_ms

_LEAST_SHARE = 0.01
"""Causes of idle time below this share of the longer step are not named."""


def transfer_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return how the collective with most exposed time differs: calls, bytes, bandwidth."""
    before = {_kind(row): row for row in base.detail.collectives}
    after = {_kind(row): row for row in head.detail.collectives}
    kinds = sorted(
        {*before, *after}, key=lambda kind: -max(_exposed(before.get(kind)), _exposed(after.get(kind)))
    )
    if not kinds:
        return ""
    old, new = before.get(kinds[0]), after.get(kinds[0])
    words = [f"{kinds[0][0]}: {_calls(old)} -> {_calls(new)} a step"]
    if (old is None or old.bytes_per_step) and (new is None or new.bytes_per_step):
        words.append(f"{format_bytes(_bytes(old))} -> {format_bytes(_bytes(new))}")
    if old is not None and new is not None and old.busbw_gbps and new.busbw_gbps:
        words.append(f"{old.busbw_gbps:.3g} -> {new.busbw_gbps:.3g} GB/s")
    return ", ".join(words)


def waiting_words(side: Diagnosis) -> str:
    """Return which rank the others wait for, or who arrived last most often."""
    late = late_rank(side)
    shares: dict[str, int] = {}
    for row in side.detail.collectives:
        for rank, count in row.last_arrivals.items():
            shares[rank] = shares.get(rank, 0) + count
    total = sum(shares.values())
    rank = str(late) if late is not None else max(shares, key=lambda one: shares[one], default="")
    words = []
    if total and 2 * shares.get(rank, 0) >= total:
        words.append(f"rank {rank} arrives last in {100 * shares[rank] / total:.0f} % of the collectives")
    elif late is not None:
        words.append(f"most of it for rank {late}")
    place = side.facts.get("straggler_code")
    code = place.values.get(str(late)) if place is not None and late is not None else None
    if isinstance(code, str) and code not in ("", "none"):
        words.append(f"it is late in {code}")
    return "; ".join(words)


def idle_words(before: Budget, after: Budget, causes: tuple[str, ...]) -> str:
    """Return the causes of idle time that changed, with their time on both sides."""
    least = _LEAST_SHARE * max(before.step_ms, after.step_ms)
    pairs = [(one, before.idle_causes_ms.get(one, 0.0), after.idle_causes_ms.get(one, 0.0)) for one in causes]
    pairs = [pair for pair in pairs if abs(pair[2] - pair[1]) >= least]
    pairs.sort(key=lambda pair: -abs(pair[2] - pair[1]))
    return ", ".join(
        f"{WORDS[one].idle if one in WORDS else one}: {format_ms(old)} -> {format_ms(new)}"
        for one, old, new in pairs[:2]
    )


def workers_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return how many workers the loaders have, where both sides know it."""
    old, new = (side.facts.get("loader_workers") for side in (base, head))
    if old is None or new is None or old.value is None or new.value is None:
        return ""
    return f"loader workers: {old.value} -> {new.value}"


def offload_words(base: Diagnosis, head: Diagnosis) -> str:
    """Return the bytes that offloading moves, where a side moves any."""
    sizes = []
    for side in (base, head):
        record = side.facts.get("offloaded_bytes_per_step")
        value = record.value if record is not None else None
        sizes.append(float(value) if isinstance(value, int | float) else 0.0)
    return f"offloaded: {format_bytes(sizes[0])} -> {format_bytes(sizes[1])} a step" if any(sizes) else ""


def _kind(row: CollectiveRow) -> tuple[str, str]:
    return row.op, row.dtype


def _exposed(row: CollectiveRow | None) -> float:
    return row.exposed_ms if row is not None else 0.0


def _bytes(row: CollectiveRow | None) -> float:
    return float(row.bytes_per_step or 0) if row is not None else 0.0


def _calls(row: CollectiveRow | None) -> str:
    return f"{row.calls_per_step:.3g}" if row is not None else "0"
