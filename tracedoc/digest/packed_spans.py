"""Sets of time as small as they travel: distances in few bytes, equal sets once, empty ones left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from tracedoc.digest.packed_columns import Unsigned, narrow
from tracedoc.spans import Spans

Places = tuple[tuple[str, int], ...]


class PackedSet(msgspec.Struct, frozen=True, eq=False):
    """One set: its first start, the lengths of its intervals, and the gaps between them."""

    first_ns: int
    lengths: Unsigned
    gaps: Unsigned

    @classmethod
    def of(cls, spans: Spans) -> PackedSet:
        """Return ``spans`` packed."""
        first_ns = int(spans.starts[0]) if len(spans) else 0
        return cls(first_ns, narrow(spans.ends - spans.starts), narrow(spans.starts[1:] - spans.ends[:-1]))

    def unpack(self) -> Spans:
        """Return the set."""
        if self.lengths.size == 0:
            return Spans.empty()
        starts = np.empty(self.lengths.size, dtype=np.int64)
        starts[0] = self.first_ns
        starts[1:] = self.lengths[:-1]
        starts[1:] += self.gaps.astype(np.int64)
        np.cumsum(starts, out=starts)
        return Spans(starts, starts + self.lengths.astype(np.int64))


class PackedSpans(Mapping[str, Spans]):
    """Named sets; reads like a dictionary of :class:`Spans`."""

    __slots__ = ("_places", "_sets")

    def __init__(self, spans: Mapping[str, Spans] = MappingProxyType({})) -> None:
        sets: list[PackedSet] = []
        places: dict[str, int] = {}
        known: dict[tuple[int, bytes, bytes], int] = {}
        for name, one in spans.items():
            if len(one):
                packed = PackedSet.of(one)
                key = (packed.first_ns, packed.lengths.tobytes(), packed.gaps.tobytes())
                if key not in known:
                    known[key] = len(sets)
                    sets.append(packed)
                places[name] = known[key]
        self._sets = tuple(sets)
        self._places: Places = tuple(places.items())

    def without(self, names: Collection[str]) -> PackedSpans:
        """Return the sets without those of some names."""
        kept = [(name, place) for name, place in self._places if name not in names]
        places = sorted({place for _, place in kept})
        found = PackedSpans()
        found._sets = tuple(self._sets[place] for place in places)
        found._places = tuple((name, places.index(place)) for name, place in kept)
        return found

    def shared(self, places: Callable[[Places], Places]) -> PackedSpans:
        """Return the sets with the names that others have too in place of their own."""
        found = PackedSpans()
        found._sets, found._places = self._sets, places(self._places)
        return found

    def __getitem__(self, name: str) -> Spans:
        for mine, place in self._places:
            if mine == name:
                return self._sets[place].unpack()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._places)

    def __len__(self) -> int:
        return len(self._places)
