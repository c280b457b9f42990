"""The process groups of all ranks, numbered in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from tracedoc.timeline.collective_table import CollectiveKind

NO_GROUP = -1


class Group(msgspec.Struct, frozen=True):
    """A process group, or the two ranks of sends in one direction within it.

    ``ranks`` are its members in order, as far as they are known; ``size`` is how many there are.
    ``one_way``: the first of two ranks sends and the second receives; ``exchange``: both do both at once.
    ``listed``: the trace lists the members, which otherwise are inferred.
    """

    ranks: tuple[int, ...]
    size: int
    name: str = ""
    one_way: bool = False
    listed: bool = True
    exchange: bool = False


class GroupNumbers:
    """Numbers the groups of all ranks, equal ones alike; :attr:`groups` are in order of number."""

    def __init__(
        self, ranks: Sequence[int], kinds: Sequence[Iterable[CollectiveKind]], world_size: int | None
    ):
        self.groups: list[Group] = []
        self._ranks = tuple(sorted(ranks))
        self._world = world_size
        self._numbers: dict[Group, int] = {}
        self._sorted: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._unlisted = self._unlisted_members(ranks, kinds)

    def number(self, rank: int, kind: CollectiveKind) -> int:
        """Return the number of the group in which ``rank`` runs such operations, ``NO_GROUP`` if unknown."""
        group = self._group(kind)
        if group is None or rank not in group.ranks:
            return NO_GROUP
        if kind.op in ("send", "recv") or (kind.op == "send_recv" and kind.peer is not None):
            group = self._pair(rank, kind, group)
        return NO_GROUP if group is None else self._numbers.setdefault(group, self._next(group))

    def _next(self, group: Group) -> int:
        if group not in self._numbers:
            self.groups.append(group)
        return len(self.groups) - 1

    def _group(self, kind: CollectiveKind) -> Group | None:
        if kind.group:
            members = self._sorted.setdefault(kind.group, tuple(sorted(set(kind.group))))
            return Group(members, len(members), kind.group_name)
        size = kind.group_size
        everyone = len(self._ranks)
        if self._world in (None, everyone) and size in (None, everyone):
            return Group(self._ranks, everyone, kind.group_name, listed=size is not None)
        if size is not None and size == self._world:
            return Group(tuple(range(size)), size, kind.group_name)
        members = self._unlisted.get((kind.group_name, size), ())
        if size is None or not kind.group_name or len(members) > size:
            return None
        return Group(members, size, kind.group_name, listed=False)

    def _pair(self, rank: int, kind: CollectiveKind, group: Group) -> Group | None:
        peer = kind.peer
        if peer is None or peer == rank:
            others = [member for member in group.ranks if member != rank]
            peer = others[0] if len(others) == 1 and group.size == 2 else None
        if peer is not None and peer not in group.ranks and peer < len(group.ranks):
            peer = group.ranks[peer]  # counted within the group
        if peer is None:
            return None
        if kind.op == "send_recv":
            return Group((min(rank, peer), max(rank, peer)), 2, group.name, exchange=True)
        ends = (rank, peer) if kind.op == "send" else (peer, rank)
        return Group(ends, 2, group.name, one_way=True)

    def _unlisted_members(
        self, ranks: Sequence[int], kinds: Sequence[Iterable[CollectiveKind]]
    ) -> dict[tuple[str, int | None], tuple[int, ...]]:
        """Return the captured ranks that show a group whose list of ranks the trace has cut short."""
        found: dict[tuple[str, int | None], set[int]] = defaultdict(set)
        for rank, listed in zip(ranks, kinds, strict=True):
            for kind in listed:
                if not kind.group:
                    found[kind.group_name, kind.group_size].add(rank)
        return {key: tuple(sorted(members)) for key, members in found.items()}


def pipeline_pairs(groups: Sequence[Group]) -> list[bool]:
    """Marks the groups that are two neighbours in a pipeline.

    Stages pass activations one way and gradients back, both at once between the first and the last of a
    step. A ring that passes data one way only, as ring attention does, is none.
    """
    directions = {group.ranks for group in groups if group.one_way}
    rings = _in_rings(directions)
    return [
        (group.one_way and (group.ranks[::-1] in directions or group.ranks[0] not in rings))
        or (group.exchange and {group.ranks, group.ranks[::-1]} <= directions)
        for group in groups
    ]


def _in_rings(directions: Iterable[tuple[int, ...]]) -> set[int]:
    """Return the ranks from which data can come back to them."""
    after: dict[int, set[int]] = defaultdict(set)
    for sender, receiver in directions:
        after[sender].add(receiver)
    found = set()
    for rank in list(after):
        seen: set[int] = set()
        front = [rank]
        while front:
            for near in after.get(front.pop(), ()):
                if near not in seen:
                    seen.add(near)
                    front.append(near)
        if rank in seen:
            found.add(rank)
    return found
