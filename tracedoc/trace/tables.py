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

WITH_VALUES = frozenset({"c10d::send", "c10d::recv_", "aten::convolution", "aten::convolution_backward"})
"""Operators whose values are kept: they name the other rank, or how a convolution goes over its input."""

# Shapes are kept where work, batch sizes or collective sizes are read from them, but not those of views,
# allocations and changes of type, which compute nothing themselves.
_SHAPED_OPS = re.compile(
    r"aten::(?!(?:empty\w*|view\w*|_?reshape\w*|_unsafe_view|t|transpose|permute|expand\w*|as_strided|select|slice|"
    r"split\w*|unbind|chunk|narrow|unsqueeze|squeeze|detach|alias|item|_local_scalar_dense|to|_to_copy|clone|"
    r"contiguous|result_type|resize_|set_|is_\w+|lift_fresh|zeros\w*|ones\w*|\w+_like|record_stream)$)\w+$"
    r"|flash_attn\w*::|triton_|(?:gloo|nccl):|c10d::|_c10d_functional::"
)


class Ids(dict[Any, int]):
    """Gives each distinct key the next number, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class Heads(Ids):
    """Numbers what many events have in common: their category, name, process and thread.

    The lists give the kind, name and thread of each number, and whether values are kept;
    ``traits[number]`` says what else is kept of such events: ``ON_GPU``, ``SHAPED``, ``COUNTED``, ``WAITS``.
    """

    def __init__(self) -> None:
        self.categories, self.names, self.threads = Ids(), Ids(), Ids()
        self.kind: list[int] = []
        self.name: list[int] = []
        self.thread: list[int] = []
        self.with_values: list[bool] = []
        self.traits = bytearray()

    def __missing__(self, key: tuple[Any, Any, Any, Any]) -> int:
        number = super().__missing__(key)
        category, name, pid, tid = key
        self.categories[category]
        self.name.append(self.names[name])
        self.thread.append(self.threads[pid, tid])
        kind = event_kind(category_text(category), category_text(name))
        self.kind.append(DROPPED if kind is None else kind)
        self.with_values.append(name in WITH_VALUES)
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
    and the number of a head; shapes are the texts of dimensions, types, values and strides.
    """

    def __init__(self) -> None:
        self.heads = Heads()
        self.places, self.shapes = Ids(), Ids()

    def traits_of(self, heads: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Return the traits of events by the numbers of their heads; a negative number has none."""
        traits = np.zeros(heads.size, dtype=np.uint8)
        known = heads >= 0
        traits[known] = np.frombuffer(self.heads.traits, dtype=np.uint8)[heads[known]]
        return traits


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


def shapes_of(*texts: bytes) -> Shapes:
    """The shapes that the JSON texts of dimensions, types, values and strides spell; none without lists."""
    try:
        found = [msgspec.json.decode(text) if text else [] for text in texts]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Shapes((), ())
    dims, types, values, strides = (tuple(one) if isinstance(one, list) else () for one in found)
    return Shapes(dims, tuple(map(category_text, types)), tuple(map(category_text, values)), strides)
