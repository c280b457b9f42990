"""Keep what was made of files, so that the next command on them need not read them again."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

import tracedoc
from tracedoc.step.codec import decode, encode

VARIABLE = "TRACEDOC_CACHE"
"""The environment variable that names the folder of the cache; ``off`` is none."""

LEAST_BYTES = 1 << 20
"""Smaller files are read faster than their digests are looked for."""

MOST_BYTES = 256 << 20
"""What all entries may take; beyond it those go that were not used for longest."""

_MOST_ENTRY_BYTES = MOST_BYTES // 8
_SUFFIX = ".digest"
_ENDS = 1024
# A file that was written to this recently may change again without a new time.
_SETTLED_S = 2.0

Kept = TypeVar("Kept", bound=msgspec.Struct)


class Slot:
    """Where what is made of files, as they are now, is kept or will be: ``key_now`` names their state."""

    def __init__(self, folder: Path, key: str, key_now: Callable[[], str | None]) -> None:
        self._folder, self._key, self._key_now = folder, key, key_now

    def load(self, kind: type[Kept]) -> Kept | None:
        """The kept value, ``None`` where there is nothing or it is damaged."""
        entry = self._folder / (self._key + _SUFFIX)
        try:
            if not _is_private(self._folder):
                return None
            kept = decode(entry.read_bytes(), kind)
            os.utime(entry)
        except OSError:
            return None
        except (ValueError, msgspec.MsgspecError):  # the latter is no ValueError where types differ
            entry.unlink(missing_ok=True)
            return None
        return kept

    def store(self, value: msgspec.Struct) -> None:
        """Keep a value, if the files are still what they were; where that fails, nothing is kept."""
        if self._key_now() != self._key:
            return
        content = encode(value)
        if len(content) > _MOST_ENTRY_BYTES:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(self._folder):
                _write(self._folder, self._key + _SUFFIX, content)
                _prune(self._folder)
        except OSError:
            return


def slot_of(path: str, *options: object) -> Slot | None:
    """Return the slot of a file that is read with ``options``; ``None`` where nothing is to be kept of it."""
    return _slot(partial(_key, path, repr(options)))


def slot_of_small_files(paths: Sequence[str], *options: object) -> Slot | None:
    """Return the slot of what is made of several small files; ``None`` where nothing is to be kept."""
    return _slot(partial(_key_of_states, paths, repr(options)))


def _slot(key_now: Callable[[], str | None]) -> Slot | None:
    folder = cache_folder()
    key = key_now() if folder is not None else None
    return Slot(folder, key, key_now) if folder is not None and key is not None else None


def cache_folder() -> Path | None:
    """Return the folder of the cache, as the platform has it."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        return None if asked == "off" else Path(asked)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "tracedoc")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home, "tracedoc", "cache")
    return Path(home, "Library/Caches" if sys.platform == "darwin" else ".cache", "tracedoc")


def _key(path: str, options: str) -> str | None:
    """Return a name for a file as it is now and for how it is read; ``None`` where it cannot be kept."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size < LEAST_BYTES:
                return None
            if abs(time.time() - found.st_mtime) < _SETTLED_S:
                return None
            head = file.read(_ENDS)
            file.seek(-_ENDS, os.SEEK_END)
            ends = head + file.read(_ENDS)
    except OSError:
        return None  # the reader says what is wrong with it
    # Messages name the file as it was given, so that is part of what is kept.
    words = (os.path.abspath(path), path, found.st_size, found.st_mtime_ns, options, _version())
    return hashlib.sha256(repr(words).encode("utf-8", "surrogatepass") + ends).hexdigest()


def _key_of_states(paths: Sequence[str], options: str) -> str | None:
    """Return a name for files by their sizes and times; ``None`` where one may change again unseen."""
    try:
        found = [(os.path.abspath(path), os.stat(path)) for path in paths]
    except OSError:
        return None
    if any(abs(time.time() - state.st_mtime) < _SETTLED_S for _, state in found):
        return None
    states = [(path, state.st_size, state.st_mtime_ns) for path, state in found]
    words = repr((paths, states, options, _version()))
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=1)
def _version() -> str:
    """Return a name for the code that measures: the version, and the state of its files."""
    root = os.path.dirname(tracedoc.__file__)
    state = sorted(_states_below(root, len(root)))
    return f"{tracedoc.__version__} {hashlib.sha256(repr(state).encode()).hexdigest()}"


def _states_below(folder: str, root: int) -> Iterator[tuple[str, int, int]]:
    """Yield path, time and size of each file of code; paths from their character ``root`` on."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith((".py", ".so", ".pyd")):
                state = entry.stat()
                yield entry.path[root:], state.st_mtime_ns, state.st_size
            elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                yield from _states_below(entry.path, root)


def _is_private(folder: Path) -> bool:
    """True if nobody else can write into a folder."""
    if sys.platform == "win32":
        return True
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix="unfinished-")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, folder / name)
    except BaseException:
        os.unlink(unfinished)
        raise


def _prune(folder: Path) -> None:
    """Remove the entries that were not used for longest, until the rest is small enough."""
    entries = sorted(_entries(folder))
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if total <= MOST_BYTES:
            break
        Path(path).unlink(missing_ok=True)
        total -= size


def _entries(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Yield when each entry was used last, its size and path."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(_SUFFIX) or entry.name.startswith("unfinished-"):
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process removed it
                yield state.st_mtime_ns, state.st_size, entry.path
