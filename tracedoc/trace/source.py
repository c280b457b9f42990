"""Open a trace file as a stream of JSON bytes, inflating gzip whatever the file is called."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from tracedoc.errors import InputError

_inflate: Any
try:
    from isal import isal_zlib as _inflate
except ImportError:  # the standard library does the same, several times slower
    _inflate = zlib

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31
_INPUT_BYTES = 64 * 1024  # what is inflated at a time: a cut file is salvaged up to its last block
_OUTPUT_BYTES = 256 * 1024  # more at a time takes half as long again: isal's buffer grows by copying

# Traces inflate 10 to 30 times, synthetic ones up to 60; deflate can do 1,032.
_BOMB_RATIO = 100
_BOMB_BYTES = 128 << 20

_OTHER_CONTAINERS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
)


class Source:
    """Decompressed bytes of one file or stream, read once from front to back.

    ``damaged`` is true once a gzip stream ended early or was found corrupt: what came before is whole.
    Raises :class:`InputError` beyond ``max_bytes`` of text; where that is ``None``, beyond what a trace
    can plausibly inflate to.
    """

    def __init__(
        self,
        path: str,
        stream: BinaryIO,
        on_bytes: Callable[[int], None] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.damaged = False
        self._stream = stream
        self._on_bytes = on_bytes
        self._max_bytes = max_bytes
        self._stored_bytes = 0
        self._text_bytes = 0
        self._stored = self._read_stored()
        for magic, container in _OTHER_CONTAINERS:
            if self._stored.startswith(magic):
                raise InputError(f"{path} is {container}", "unpack it and pass the .json or .json.gz inside")
        self._inflater: Any = None
        if self._stored.startswith(_GZIP_MAGIC):
            self._inflater = _inflate.decompressobj(_GZIP_WINDOW)

    def readinto(self, target: memoryview) -> int:
        """Fill the front of ``target``; return how many bytes came, 0 at the end."""
        if self._inflater is not None:
            count = self._inflate_into(target)
        elif self._stored:
            count = self._take_stored(target)
        else:
            count = self._read_straight(target)
        self._text_bytes += count
        self._check_size()
        return count

    def _read_straight(self, target: memoryview) -> int:
        try:
            count = (self._stream.readinto(target) if hasattr(self._stream, "readinto") else 0) or 0
        except OSError as error:
            raise _unreadable(self.path, error) from None
        self._tell(count)
        return count

    def _check_size(self) -> None:
        if self._max_bytes is not None:
            if self._text_bytes > self._max_bytes:
                raise InputError(
                    f"{self.path} holds more than {self._max_bytes:,} bytes of JSON, the limit that was set",
                    "raise --max-bytes to read it",
                )
        elif self._text_bytes > max(_BOMB_BYTES, _BOMB_RATIO * self._stored_bytes):
            raise InputError(
                f"{self.path} inflates to more than {_BOMB_RATIO} times its size, which no trace does",
                "if you trust the file, allow its size: --max-bytes 2GB",
            )

    def _take_stored(self, target: memoryview) -> int:
        count = min(len(target), len(self._stored))
        target[:count] = self._stored[:count]
        self._stored = self._stored[count:]
        return count

    def _inflate_into(self, target: memoryview) -> int:
        while True:
            if self._inflater.eof and not self._next_member():
                return 0
            if not self._stored:
                self._stored = self._read_stored()
                if not self._stored:
                    self.damaged = True
                    return 0
            try:
                data = self._inflater.decompress(self._stored, min(len(target), _OUTPUT_BYTES))
            except (_inflate.error, zlib.error):
                self.damaged = True
                self._stored = b""
                return 0
            self._stored = self._inflater.unconsumed_tail
            if data:
                target[: len(data)] = data
                return len(data)

    def _next_member(self) -> bool:
        """Go on to the next gzip member; return false at the end of the file.

        Zeros after a member are padding, anything else that is not gzip is ignored as gzip(1) does.
        """
        rest = bytes(self._inflater.unused_data).lstrip(b"\0")
        while len(rest) < len(_GZIP_MAGIC):
            more = self._read_stored()
            if not more:
                return False
            rest = (rest + more).lstrip(b"\0")
        if not rest.startswith(_GZIP_MAGIC):
            return False
        self._stored = rest
        self._inflater = _inflate.decompressobj(_GZIP_WINDOW)
        return True

    def _read_stored(self) -> bytes:
        try:
            data = self._stream.read(_INPUT_BYTES)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        self._tell(len(data))
        return data

    def _tell(self, count: int) -> None:
        self._stored_bytes += count
        if self._on_bytes is not None and count:
            self._on_bytes(count)


def _unreadable(path: str, error: OSError) -> InputError:
    reason = error.strerror or str(error) or type(error).__name__
    return InputError(f"{path} cannot be read: {reason}", "check its permissions, and its disk or network")


def open_stream(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, or standard input for ``-``; the reasons for failure are the user's words."""
    name = os.fspath(path)
    if name == "-":
        return sys.stdin.buffer
    try:
        return open(name, "rb", buffering=0)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist", "check the path") from None
    except IsADirectoryError:
        raise InputError(
            f"{name} is a directory, not a trace", "pass it to diagnose, which looks inside"
        ) from None
    except OSError as error:
        raise _unreadable(name, error) from None
