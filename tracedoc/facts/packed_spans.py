"""Sets of time as small as they travel: 32-bit distances, equal sets once, empty ones left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans

MAX_DISTANCE_NS = int(np.iinfo(np.uint32).max)
"""A set with an interval or a gap longer than this (4.3 s) keeps 64-bit distances."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSet:
    """One set: its first start, then the lengths of interval, gap, interval, gap..."""

    first_ns: int
    distances: npt.NDArray[np.uint32] | npt.NDArray[np.int64]

    @classmethod
    def of(cls, spans: Spans) -> PackedSet:
        """Return ``spans`` packed."""
        if len(spans) == 0:
            return cls(0, np.empty(0, dtype=np.uint32))
        edges = np.empty(2 * len(spans), dtype=np.int64)
        edges[0::2], edges[1::2] = spans.starts, spans.ends
        distances = np.diff(edges)
        small = int(distances.max()) <= MAX_DISTANCE_NS
        return cls(int(edges[0]), distances.astype(np.uint32) if small else distances)

    def unpack(self) -> Spans:
        """Return the set."""
        if self.distances.size == 0:
            return Spans.empty()
        edges = np.empty(self.distances.size + 1, dtype=np.int64)
        edges[0] = self.first_ns
        np.cumsum(self.distances, out=edges[1:])
        edges[1:] += self.first_ns
        return Spans(edges[0::2].copy(), edges[1::2].copy())


class PackedSpans(Mapping[str, Spans]):
    """Named sets; reads like a dictionary of :class:`Spans`."""

    __slots__ = ("_places", "_sets")

    def __init__(self, spans: Mapping[str, Spans]) -> None:
        self._sets: list[PackedSet] = []
        self._places: dict[str, int] = {}
        known: dict[tuple[int, bytes], int] = {}
        for name, one in spans.items():
            if len(one):
                packed = PackedSet.of(one)
                key = (packed.first_ns, packed.distances.tobytes())
                if key not in known:
                    known[key] = len(self._sets)
                    self._sets.append(packed)
                self._places[name] = known[key]

    def __getitem__(self, name: str) -> Spans:
        return self._sets[self._places[name]].unpack()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
