"""Bring a trace from the node's own disk to the run directory: compressed, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20
_GZIP = 31  # zlib's way to ask for a gzip header


def local_path(name: str, needed_bytes: int, folder: Path) -> Path:
    """Return where to save a trace first: on the node's own disk, or in ``folder`` where that has no room.

    Raises ``OSError`` if neither has room for ``needed_bytes`` and some more.
    """
    for directory in (Path(tempfile.gettempdir()), folder):
        with contextlib.suppress(OSError):
            if shutil.disk_usage(directory).free > needed_bytes + _SPARE_BYTES:
                return directory / f".{name}.{os.getpid()}.json"
    raise OSError(f"no room for a trace of about {needed_bytes >> 20} MB")


def compress(source: Path, target: Path, deadline_s: float) -> int:
    """Write ``source`` as gzip to ``target`` by way of ``<target>.part``; return the size of the result.

    The source is removed, whatever happens. Raises ``OSError`` where there is no room, and ``TimeoutError``
    if ``time.monotonic`` passes ``deadline_s`` first.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with source.open("rb") as raw, part.open("wb") as packed:
            deflater = zlib.compressobj(5, zlib.DEFLATED, _GZIP)
            while chunk := raw.read(_CHUNK_BYTES):
                packed.write(deflater.compress(chunk))
                if time.monotonic() > deadline_s:
                    raise TimeoutError("writing the trace took too long")
            packed.write(deflater.flush())
            packed.flush()
            os.fsync(packed.fileno())
        os.replace(part, target)
        return target.stat().st_size
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):
            source.unlink()
