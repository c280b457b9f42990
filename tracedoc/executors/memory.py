"""Keep a process that works through many files as small as one that reads a single file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

_WORTH_RETURNING = 16 << 20  # after 100 MB of JSON 24 MB are free, after 4 MB it is 9
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, by malloc.h
_LARGEST_KEPT = 32 << 20  # glibc's upper limit
_MOST_KEPT = 1 << 30
_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def share_what_is_loaded() -> None:
    """Have the cyclic collector leave alone what there is now.

    To walk an object writes to it, and a page that a forked process writes to is no longer its parent's.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.freeze()


def keep_until_given_back() -> None:
    """Have the allocator use again what was freed, until :func:`give_back`: for a process of tracedoc's own.

    Else glibc maps larger arrays anew and shrinks the heap, and the system clears the same pages again, one
    fault each, of microseconds in a virtual machine. Does nothing with other allocators (man 3 mallopt).
    """
    _call("mallopt", _MMAP_THRESHOLD, _LARGEST_KEPT)
    _call("mallopt", _TRIM_THRESHOLD, _MOST_KEPT)


def give_back() -> None:
    """Give freed memory back to the system; glibc would keep it, scattered, and take more for the next file.

    Not after small files: to take the same pages again would cost a tenth of the time that they do. Does
    nothing where the allocator has no ``malloc_trim`` (man 3 malloc_trim).
    """
    if _freed_bytes() >= _WORTH_RETURNING:
        _call("malloc_trim", 0)


def _freed_bytes() -> int:
    """The free bytes of the heap; where nobody says, as many as are worth returning."""
    ask = _mallinfo2()
    return int(ask().fordblks) if ask is not None else _WORTH_RETURNING


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    """The function of glibc that tells the state of its heap, ``None`` before 2.33 (man 3 mallinfo2)."""
    import ctypes  # as numpy does

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]

    ask = getattr(_allocator(), "mallinfo2", None)
    if ask is not None:
        ask.restype = Mallinfo2
    return ask


def _call(name: str, *arguments: int) -> None:
    with suppress(AttributeError):
        getattr(_allocator(), name)(*arguments)


@cache
def _allocator() -> Any:
    """Return the C library, where it may be glibc."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        return ctypes.CDLL(None)
    except OSError:
        return None
