"""Let the digests of all ranks share what they have alike: each pickle brought copies of its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from tracedoc.facts.catalog import Unknown, Value
from tracedoc.facts.digest import RankDigest
from tracedoc.facts.gemms import GemmTable
from tracedoc.facts.named_values import NamedValues
from tracedoc.facts.packed_spans import PackedSpans
from tracedoc.facts.step_table import StepTable
from tracedoc.timeline.packed_columns import PackedColumn
from tracedoc.timeline.packed_table import PackedTable

Alike = TypeVar("Alike", bound=Hashable)


class Pool:
    """What the digests so far hold that others may hold too. Needed only while digests come."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, Hashable], object] = {}

    def of(self, value: Alike) -> Alike:
        """Return the first of all equal values of this type."""
        return cast(Alike, self._known.setdefault((type(value), value), value))

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return names of which each is shared, and all of them if they come in this order elsewhere."""
        return self.of(tuple(map(self.of, names)))

    def column(self, column: PackedColumn) -> PackedColumn:
        """Return the first of all equal columns."""
        content = column.more.tobytes()
        key = (PackedColumn, (column.size, column.least, column.more.dtype.char, content))
        if key not in self._known:
            # On the bytes of the key, which are kept only once then.
            more = np.frombuffer(content, dtype=column.more.dtype)
            self._known[key] = PackedColumn(column.size, column.least, more)
        return cast(PackedColumn, self._known[key])

    def value(self, value: Value) -> Value:
        """Return a fact's value: text and reasons are shared, numbers are small."""
        return self.of(value) if isinstance(value, (str, Unknown)) else value


def shared(digest: RankDigest, pool: Pool) -> RankDigest:
    """Return an equal digest that shares with those before it what it has in common with them."""
    facts, spans, steps, gemms = digest.facts, digest.spans, digest.steps, digest.gemms
    table = digest.collectives
    if isinstance(facts, NamedValues):
        values = tuple(map(pool.value, facts.values_in_order))
        facts = NamedValues(pool.names(facts.names), values)
    if isinstance(table, PackedTable):
        table = table.shared(pool.of, pool.column)
    if isinstance(gemms, GemmTable):
        gemms = replace(gemms, names=pool.names(gemms.names))
    return replace(
        digest,
        host=pool.of(digest.host),
        device=pool.of(digest.device),
        backend=pool.of(digest.backend),
        step_source=pool.of(digest.step_source),
        groups=tuple(map(pool.of, digest.groups)),
        capture_idle_ns={pool.of(cause): ns for cause, ns in digest.capture_idle_ns.items()},
        steps=steps.shared(pool.names) if isinstance(steps, StepTable) else steps,
        collectives=table,
        kernels=replace(
            digest.kernels,
            names=pool.names(digest.kernels.names),
            categories=pool.of(digest.kernels.categories),
        ),
        spans=spans.shared(pool.of) if isinstance(spans, PackedSpans) else spans,
        signs=pool.of(digest.signs),
        present=pool.of(digest.present),
        facts=facts,
        gemms=gemms,
    )
