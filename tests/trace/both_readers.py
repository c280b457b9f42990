"""Read one trace with each reader, and hold that nothing tells the two apart."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from tracedoc.errors import InputError
from tracedoc.trace import chunks
from tracedoc.trace.columns import Trace
from tracedoc.trace.compact import Coded, Sparse
from tracedoc.trace.kineto import read_trace
from tracedoc.trace.reader import VARIABLE

Words = tuple[str, str]


@contextmanager
def reader(name: str, chunk_bytes: int) -> Iterator[None]:
    """Choose the reader, and the size of its chunks."""
    before, bytes_before = os.environ.get(VARIABLE), chunks.CHUNK_BYTES
    os.environ[VARIABLE], chunks.CHUNK_BYTES = name, chunk_bytes
    try:
        yield
    finally:
        chunks.CHUNK_BYTES = bytes_before
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def read(data: bytes, name: str, chunk_bytes: int = chunks.CHUNK_BYTES, **options: Any) -> Trace | Words:
    """Return the trace, or the words of the error."""
    with reader(name, chunk_bytes):
        try:
            return read_trace("rank-0.json", stream=io.BytesIO(data), **options)
        except InputError as error:
            return error.message, error.hint


def described(value: Any) -> Any:
    """Return a trace or a part of one as values that compare exactly, types and bytes of columns included."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (Coded, Sparse)):
        return {name: described(getattr(value, name)) for name in type(value).__slots__}
    if isinstance(value, msgspec.Struct):
        return {name: described(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Trace):
        return {name: described(getattr(value, name)) for name in Trace.__slots__}
    if isinstance(value, Mapping):
        return [(described(key), described(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    return type(value).__name__, repr(value)


def assert_alike(data: bytes, chunk_bytes: int = chunks.CHUNK_BYTES, **options: Any) -> Trace | Words:
    """Hold that both readers make the same of ``data``; return what the native one made."""
    native = read(data, "native", chunk_bytes, **options)
    python = read(data, "python", chunk_bytes, **options)
    if isinstance(native, Trace) and isinstance(python, Trace):
        seen, expected = described(native), described(python)
        assert seen["info"].pop("reader") == ("str", "'native'")
        assert expected["info"].pop("reader") == ("str", "'python'")
        for name in expected:
            assert seen[name] == expected[name], name
    else:
        assert native == python
    return native
