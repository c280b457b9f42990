"""Encode a digest as bytes, and decode it with every type checked: nothing of what is read is executed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.timeline.collective_table import CollectiveTable
from tracedoc.values import Unknown

Decoded = TypeVar("Decoded")

LEVEL = 1
"""Of zlib: the higher ones save a tenth of the bytes and take three times as long."""

MAX_DIGEST_BYTES = 1 << 30
"""No digest takes more, decompressed."""

_KINDS = "biuf"  # of numpy: truth values, integers, floats


def encode(value: msgspec.Struct) -> bytes:
    """Return a struct of plain values and numpy columns as bytes: msgpack, compressed by zlib.

    Half of a surrogate pair, which JSON may hold and no Unicode text, becomes a question mark.
    """
    try:
        text = msgspec.msgpack.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, enc_hook=_plain, builtin_types=(bytes,))
        text = msgspec.msgpack.encode(_as_unicode(plain))
    return zlib.compress(text, LEVEL)


def decode(data: bytes, kind: type[Decoded]) -> Decoded:
    """Return the ``kind`` of struct that :func:`encode` was given; its columns cannot be written to.

    Raises :class:`ValueError` for anything else, and for what takes more than ``MAX_DIGEST_BYTES``.
    """
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, MAX_DIGEST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not what encode() wrote: {error}") from None
    if not inflater.eof:
        raise ValueError(f"it is cut off, or longer than {MAX_DIGEST_BYTES} bytes")
    return msgspec.msgpack.decode(text, type=kind, dec_hook=_column)


def _as_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_as_unicode(key): _as_unicode(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_unicode(one) for one in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, _packed(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a digest holds no {type(value)}")


def _packed(column: npt.NDArray[Any]) -> bytes:
    """Return a column as zlib packs it best: differences, first all their lowest bytes, then the next."""
    bits = np.ascontiguousarray(column).reshape(-1).view(f"u{column.itemsize}")
    differences = bits.copy()
    differences[1:] -= bits[:-1]
    return bytes(differences.view(np.uint8).reshape(-1, column.itemsize).T.tobytes())


def _column(kind: Any, value: Any) -> npt.NDArray[Any]:
    """Return the numpy array that ``value`` describes, if it is of the ``kind`` that the field names."""
    match value:
        case [str(name), [*shape], bytes(content)] if name[1:2] in _KINDS:
            dtype, fits = _dtype(kind, name)
            if fits and _nbytes(dtype, shape) == len(content):
                planes = np.frombuffer(content, dtype=np.uint8).reshape(dtype.itemsize, -1)
                differences = np.ascontiguousarray(planes.T).view(f"u{dtype.itemsize}")
                # Into its own memory: views would be kept with what they look at.
                column = np.empty(shape, dtype)
                np.cumsum(differences, out=column.reshape(-1).view(differences.dtype))
                column.flags.writeable = False
                return column
    raise ValueError(f"not a column of {kind}")


@lru_cache(maxsize=256)
def _dtype(kind: Any, name: str) -> tuple[np.dtype[Any], bool]:
    """Return the type that numpy calls ``name``, and whether a column of ``kind`` may be of it."""
    dtype = np.dtype(name)
    element = get_args(get_args(kind)[1])[0]
    return dtype, np.issubdtype(dtype, get_origin(element) or element)


def _nbytes(dtype: np.dtype[Any], shape: list[Any]) -> int:
    return prod(map(int, shape)) * dtype.itemsize


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
    """A key that equal columns share."""
    kind = f"{column.dtype.str}{column.shape}".encode()
    return blake2b(column.data, digest_size=16, key=kind).digest()
