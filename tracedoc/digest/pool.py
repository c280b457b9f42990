"""Let the digests of all ranks share what they have alike: each pickle brought copies of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.digest.gemms import GemmTable
from tracedoc.digest.named_values import NamedValues
from tracedoc.digest.packed_columns import PackedColumn
from tracedoc.digest.packed_spans import PackedSpans
from tracedoc.digest.packed_table import PackedTable
from tracedoc.digest.rank_digest import DRAWN, RankDigest
from tracedoc.digest.step_table import StepTable
from tracedoc.digest.work import WorkTable
from tracedoc.values import Unknown, Value

Alike = TypeVar("Alike", bound=Hashable)
Array = TypeVar("Array", bound=npt.NDArray[Any])


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

    def array(self, array: Array) -> Array:
        """Return the first of all equal columns that are not packed."""
        content = array.tobytes()
        key = (np.ndarray, (array.dtype.char, content))
        if key not in self._known:
            self._known[key] = np.frombuffer(content, dtype=array.dtype)
        return cast(Array, self._known[key])

    def value(self, value: Value) -> Value:
        """Return a fact's value: text and reasons are shared, numbers are small."""
        return self.of(value) if isinstance(value, (str, Unknown)) else value


def shared(digest: RankDigest, pool: Pool) -> RankDigest:
    """Return an equal digest that shares with those before it what it has in common with them."""
    facts, spans, steps, gemms = digest.facts, digest.spans, digest.steps, digest.gemms
    table, work, host = digest.collectives, digest.work, digest.host_work
    if isinstance(facts, NamedValues):
        values = tuple(map(pool.value, facts.values_in_order))
        facts = NamedValues(pool.names(facts.names), values)
    if isinstance(table, PackedTable):
        table = table.shared(pool.of, pool.column)
    if isinstance(gemms, GemmTable):
        gemms = replace(
            gemms,
            names=pool.names(gemms.names),
            keys=pool.array(gemms.keys),
            gridded=pool.array(gemms.gridded),
            calls=pool.array(gemms.calls),
            alone=pool.array(gemms.alone),
            beside=pool.array(gemms.beside),
        )
    if work is not None:
        work = WorkTable(pool.array(work.kernels), pool.array(work.blocks), pool.array(work.flops))
    if host is not None:
        before = replace(
            host.before,
            causes=pool.array(host.before.causes),
            kernels=pool.array(host.before.kernels),
            away_phase=pool.array(host.before.away_phase),
        )
        host = replace(host, before=before)
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
        host_work=host,
        work=work,
        gradients=pool.array(digest.gradients),
    )


def without_timeline(digest: RankDigest, pool: Pool) -> RankDigest:
    """Return the digest of a rank that no picture shows: without what only pictures need."""
    if not isinstance(digest.spans, PackedSpans):
        return digest
    return replace(digest, spans=digest.spans.without(DRAWN).shared(pool.of))
