"""Number what many events have in common: heads, places, and shapes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.columns import Kind, Shapes
from tracedoc.trace.vocabulary import event_kind

DROPPED = 255
"""Stands among the kinds for events that a trace does not keep."""

ON_GPU, SHAPED, COUNTED, WAITS = 1, 2, 4, 8
"""Traits of events: on a device and a stream; with shapes; allocator's counters; a wait for an event."""

_GPU_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.SYNC, Kind.GPU_ANNOTATION, Kind.ACCELERATOR)
_MEMORY = "[memory]"

NAMING_PEERS = frozenset({"c10d::send", "c10d::recv_"})
"""Operators whose values are kept: they name the other rank."""

# Shapes are kept where batch sizes, FLOPs or collective sizes are read from them; all of them would
# double the memory of a trace.
_SHAPED_OPS = re.compile(
    r"aten::(?:mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|_scaled_grouped_mm|_grouped_mm|embedding|"
    r"_?convolution\w*|conv\w+|cudnn_convolution\w*|miopen_convolution\w*|\w*_attention\w*)$"
    r"|flash_attn\w*::|aten::_flash_attention|(?:gloo|nccl):|c10d::|_c10d_functional::"
)


class Ids(dict[Any, int]):
    """Gives each distinct key the next number, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class Heads(Ids):
    """Numbers what many events have in common: their category, name, process and thread.

    The lists give the kind, name and thread of each number, and whether its values name another rank;
    ``traits[number]`` says what else is kept of such events: ``ON_GPU``, ``SHAPED``, ``COUNTED``, ``WAITS``.
    """

    def __init__(self) -> None:
        self.categories, self.names, self.threads = Ids(), Ids(), Ids()
        self.kind: list[int] = []
        self.name: list[int] = []
        self.thread: list[int] = []
        self.names_peer: list[bool] = []
        self.traits = bytearray()

    def __missing__(self, key: tuple[Any, Any, Any, Any]) -> int:
        number = super().__missing__(key)
        category, name, pid, tid = key
        self.categories[category]
        self.name.append(self.names[name])
        self.thread.append(self.threads[pid, tid])
        kind = event_kind(category_text(category), category_text(name))
        self.kind.append(DROPPED if kind is None else kind)
        self.names_peer.append(name in NAMING_PEERS)
        self.traits.append(
            ON_GPU * (kind in _GPU_KINDS)
            | SHAPED * (_SHAPED_OPS.match(category_text(name)) is not None)
            | COUNTED * (name == _MEMORY)
            | WAITS * (kind is Kind.SYNC)
        )
        return number


class Tables:
    """What all chunks of a trace share.

    A head is a category, a name, a process and a thread; a place is a device, a stream, the text of a grid,
    and the number of a head.
    """

    def __init__(self) -> None:
        self.heads = Heads()
        self.places = Ids()
        self._shapes: dict[tuple[bytes, bytes, bytes], Shapes] = {}

    def traits_of(self, heads: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Return the traits of events by the numbers of their heads; a negative number has none."""
        traits = np.zeros(heads.size, dtype=np.uint8)
        known = heads >= 0
        traits[known] = np.frombuffer(self.heads.traits, dtype=np.uint8)[heads[known]]
        return traits

    def shapes_of(self, dims: bytes, types: bytes, values: bytes) -> Shapes:
        """Return the shapes that JSON texts spell, the same object for the same texts."""
        known = self._shapes.get((dims, types, values))
        if known is None:
            known = self._shapes[dims, types, values] = _shapes(dims, types, values)
        return known


def interned(table: Ids, keys: list[Any]) -> npt.NDArray[np.int32]:
    """Return the numbers of keys."""
    try:
        return np.fromiter(map(table.__getitem__, keys), np.int32, len(keys))
    except TypeError:  # a list or an object stands where a name should
        texts = (tuple(part if _is_plain(part) else str(part) for part in key) for key in keys)
        return np.fromiter((table[key] for key in texts), np.int32, len(keys))


def category_text(value: Any) -> str:
    """Return a category or name as text, whatever the file holds in its place."""
    return value if isinstance(value, str) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float))


def _shapes(dims: bytes, types: bytes, values: bytes) -> Shapes:
    try:
        sizes, *texts = (msgspec.json.decode(text) if text else [] for text in (dims, types, values))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shapes((), ())
    return Shapes(
        tuple(sizes) if isinstance(sizes, list) else (),
        *(tuple(map(category_text, listed)) if isinstance(listed, list) else () for listed in texts),
    )
