"""Decode one whole file into typed msgspec structs and count the events: a floor for typed readers."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, gc=False):
    """The fields of an event that any breakdown needs."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: Any = None


class Document(msgspec.Struct):
    """A trace file."""

    traceEvents: list[Event]  # noqa: N815 - the name in the file


if __name__ == "__main__":
    gc.disable()
    print(len(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Document).traceEvents))
