"""Which operators of a trace a backward pass goes back to, by the arrows from one to the other."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any

import msgspec
import numpy as np

from tracedoc.trace.assemble import since_the_epoch
from tracedoc.trace.chunks import MalformedJson, cut
from tracedoc.trace.events import IMPOSSIBLE, Int64Array, text_ns
from tracedoc.trace.metadata import base_ns_of
from tracedoc.trace.source import Source, open_stream

BACKWARD = "fwdbwd"
"""The category of an arrow from an operator to its node of the backward graph."""


class _Arrow(msgspec.Struct, gc=False):
    """The beginning or end of an arrow, or any other event; ``ts`` is the operator's own start."""

    ph: Any = ""
    cat: Any = ""
    ts: msgspec.Raw = msgspec.Raw(b"")


_decoded = msgspec.json.Decoder(list[_Arrow]).decode


def differentiated(path: str) -> Int64Array:
    """When the operators of a file start that its backward passes go back to, in order, as ``Trace.ts_ns``.

    Kineto draws them where gradients were computed while it recorded. What cannot be read has none.
    """
    texts: list[bytes] = []

    def decode(array: bytes | memoryview) -> None:
        arrows = _decoded(array)
        texts.extend(bytes(one.ts) for one in arrows if one.ph == "s" and one.cat == BACKWARD)

    def decode_chunk(buffer: bytearray, begin: int, end: int) -> None:
        try:
            decode(memoryview(buffer)[begin:end])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedJson(str(error)) from None

    def decode_one(text: bytes) -> bool:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            decode(b"[" + text + b"]")
            return True
        return False

    with closing(open_stream(path)) as file:
        outcome = cut(Source(path, file, None, None), decode_chunk, decode_one)
    starts = since_the_epoch(text_ns(texts), base_ns_of(outcome.metadata))
    return np.sort(starts[starts != IMPOSSIBLE])
