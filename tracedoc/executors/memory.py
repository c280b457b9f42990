"""Keep a process that works through many files as small as one that reads a single file."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress


def share_what_is_loaded() -> None:
    """Have the cyclic collector leave alone what there is now.

    To walk an object writes to it, and a page that a forked process writes to is no longer its parent's.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.freeze()


def give_back() -> None:
    """Return what was freed to the system; glibc would keep it, scattered, and take more for the next file.

    Does nothing where the allocator has no ``malloc_trim`` (man 3 malloc_trim).
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # numpy has imported it already

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
