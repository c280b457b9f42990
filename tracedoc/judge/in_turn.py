"""Mend one finding after the other, in their order: what each saves beyond those before it."""

from __future__ import annotations

from itertools import accumulate

from msgspec.structs import replace

from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement
from tracedoc.ledger import Ledger, LedgerRow
from tracedoc.predicted import LEAST_SHARE
from tracedoc.whatif.ledger import likely_of


def mended_in_turn(
    judgement: Judgement, ledger: Ledger, measurements: Measurements
) -> tuple[Judgement, Ledger]:
    """The findings with what each saves after those before it, and the ledger with its rows.

    A cause is mended with the first finding that tells it. Those that none tells follow, the largest first,
    as far as they are worth a row.
    """
    groups: list[tuple[str, tuple[str, ...]]] = []
    taken: set[str] = set()
    for finding in judgement.findings:
        if finding.cost_ms is None:  # its fix mends more than its own causes
            continue
        told = (one.id for one in ledger.causes if finding.rule_id in one.told_by)
        if ids := tuple(id for id in told if id not in taken):
            groups.append((finding.id, ids))
            taken |= {*ids}
    groups += [
        ("", (one.id,))
        for one in ledger.causes
        if one.id not in taken and one.share_ms >= LEAST_SHARE * ledger.step_ms
    ]
    sets = list(accumulate((ids for _, ids in groups), tuple.__add__))
    saved = likely_of(measurements.run, sets)
    first = judgement.findings[0] if judgement.findings else None
    if first is not None and groups[:1] and groups[0][0] == first.id and first.alone_ms is not None:
        saved[0] = min(first.alone_ms, *saved)
    rows = tuple(
        LedgerRow(ids, ms - before, finding)
        for (finding, ids), ms, before in zip(groups, saved, [0.0, *saved], strict=False)
        if finding or ms - before >= LEAST_SHARE * ledger.step_ms
    )
    beyond = {row.finding: row.ms for row in rows if row.finding}
    findings = tuple(
        replace(one, beyond_ms=beyond[one.id]) if one.id in beyond else one for one in judgement.findings
    )
    return replace(judgement, findings=findings), replace(ledger, rows=rows)
