"""Reach traces in object stores and on web servers through fsspec, only where a path names one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from tracedoc.errors import InputError, how_to_install

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# What networks and logins raise that is no OSError, by the modules that define it.
_NETWORK_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
_BROKE_OFF = "ClientPayloadError"
# Enough for a good rate over one connection; this much of a file is in memory at a time.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file or folder of a remote directory; ``path`` is a full URL."""

    path: str
    name: str
    size_bytes: int
    is_folder: bool


def is_remote(path: str) -> bool:
    """True if a path is a URL such as ``s3://bucket/run`` and not a file of this machine."""
    return _SCHEME.match(path) is not None


def _is_web(path: str) -> bool:
    return path.partition(":")[0].lower() in ("http", "https")


def public_name(path: str) -> str:
    """Return a path as reports may show it: a URL loses what may hold a password or a signature."""
    if not is_remote(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError as error:
        raise InputError(f"a URL cannot be understood: {error}", "check the address") from None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def remote_size(path: str) -> int:
    """Return the stored size of a remote file, 0 where the server does not say."""
    with _filesystem(path) as (filesystem, inner):
        size = int(filesystem.info(inner).get("size") or 0)
    return size


def is_remote_folder(path: str) -> bool:
    """True if a URL is a folder. A web page is asked only where the URL ends with a slash."""
    if _is_web(path):
        # Others would be downloaded whole, in search of links.
        return urlsplit(path).path.endswith("/")
    with _filesystem(path) as (filesystem, inner):
        is_folder = bool(filesystem.isdir(inner))
    return is_folder


def list_remote(path: str) -> list[RemoteEntry]:
    """The files of a remote folder, one level deep."""
    entries = []
    with _filesystem(path) as (filesystem, inner):
        for found in filesystem.ls(inner, detail=True):
            name = urlsplit(found["name"]).path.rstrip("/").rpartition("/")[2]
            is_folder = found["type"] == "directory"
            url = filesystem.unstrip_protocol(found["name"])
            entries.append(RemoteEntry(url, name, int(found.get("size") or 0), is_folder))
    return entries


def read_remote(path: str) -> bytes:
    """Return a small remote file whole."""
    with _filesystem(path) as (filesystem, inner):
        content = bytes(filesystem.cat_file(inner))
    return content


@contextmanager
def open_remote(path: str) -> Iterator[BinaryIO]:
    """Open a remote file to be read once from front to back; blocks of it are fetched as they are needed."""
    with _filesystem(path) as (filesystem, inner):
        # Not every web server gives parts of a file; one answer is read as it comes.
        block = 0 if _is_web(path) else _BLOCK_BYTES
        with filesystem.open(inner, "rb", block_size=block, cache_type="readahead") as stream:
            yield cast(BinaryIO, stream)


@contextmanager
def _filesystem(path: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the path in it; what networks raise becomes words about the URL."""
    name = public_name(path)
    try:
        yield _open_filesystem(path)
    except FileNotFoundError as error:
        # fsspec calls all refusals of web servers so.
        status = getattr(error.__cause__, "status", 404)
        if status != 404:
            reason = f"the server answered {status} {getattr(error.__cause__, 'message', '')}".rstrip()
            raise _unreadable(name, reason) from None
        raise InputError(
            f"{name} was not found", "check the address; its server may be out of reach"
        ) from None
    except _network_errors() as error:
        if type(error).__name__ == _BROKE_OFF:
            reason = "the connection broke off before the end"
            raise InputError(f"{name} cannot be read: {reason}", "try again, or download it first") from None
        reason = getattr(error, "strerror", "") or getattr(error, "message", "") or type(error).__name__
        raise _unreadable(name, reason) from None


def _network_errors() -> tuple[type[Exception], ...]:
    # Only some filesystems import these modules.
    others = (getattr(sys.modules.get(module), error, OSError) for module, error in _NETWORK_ERRORS)
    return (OSError, *others)


def _unreadable(name: str, reason: str) -> InputError:
    return InputError(
        f"{name} cannot be read: {reason}", "check the address, and that your login may read it"
    )


def _open_filesystem(path: str) -> tuple[Any, str]:
    scheme = path.partition(":")[0].lower()
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(f"{scheme}:// needs fsspec", how_to_install("remote")) from None
    try:
        filesystem, inner = url_to_fs(path)
    except ImportError as error:
        raise InputError(f"{scheme}:// cannot be opened: {error}", how_to_install("remote")) from None
    except ValueError as error:
        raise InputError(
            f"{scheme}:// is no kind of path that is known: {error}", "use s3://, gs://, hf:// or https://"
        ) from None
    return filesystem, str(inner)
