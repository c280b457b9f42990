"""Let the digests of a run share what they have alike: each came with copies of its own."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.values import Unknown

Shared = TypeVar("Shared")


def share(value: Shared, known: dict[Any, Any]) -> Shared:
    """Return an equal value that consists, where it can, of parts in ``known``, which holds those before it.

    Shared are texts, reasons, tuples of integers, and columns that cannot be written to. Of a run of many
    ranks these are the names of facts and kernels, the members of groups, and the sizes of collectives.
    """
    return cast(Shared, _share(value, known))


_OWN = frozenset((int, float, bool, bytes, type(None)))
"""Types of values that are not shared: the most there are, so they are asked for first."""

_WHOLE = frozenset((str, Unknown, frozenset))


def _share(value: Any, known: dict[Any, Any]) -> Any:
    kind = type(value)
    if kind in _OWN:
        return value
    # Of just these types: a member of an enum may equal a text.
    if kind in _WHOLE or (kind is tuple and set(map(type, value)) == {int}):
        return known.setdefault(value, value)
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else known.setdefault(_content(value), value)
    if isinstance(value, tuple):
        return tuple([_share(one, known) for one in value])
    if isinstance(value, msgspec.Struct):
        return kind(*[_share(getattr(value, name), known) for name in value.__struct_fields__])
    if isinstance(value, CollectiveTable):
        return CollectiveTable(*(_share(getattr(value, name), known) for name in value.__slots__))
    if isinstance(value, Mapping):
        return {_share(name, known): _share(one, known) for name, one in value.items()}
    return value


def _content(column: npt.NDArray[Any]) -> bytes:
    """Return what columns have in common that are equal."""
    kind = f"{column.dtype.str}{column.shape}".encode()
    return blake2b(column.data, digest_size=16, key=kind).digest()
