"""Find the trace files that paths stand for, and what their names hint."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tracedoc.errors import InputError, Limit
from tracedoc.run.ending import how_it_ended
from tracedoc.run.flight import is_dump
from tracedoc.run.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    PART_SUFFIX,
    Manifest,
    join_manifests,
    parse_manifest,
    read_manifest,
)
from tracedoc.run.remote import (
    RemoteEntry,
    is_remote,
    is_remote_folder,
    list_remote,
    public_name,
    read_remote,
    remote_size,
)

_TRACE_NAME = re.compile(r"\.json(?:\.gz)?$", re.IGNORECASE)
# A crash during export leaves the file that would have been renamed at the end.
_LEFTOVER_NAME = re.compile(r"\.json(?:\.gz)?\.(?:tmp|part)$", re.IGNORECASE)
_OWN_FILES = frozenset({MANIFEST_NAME, "diagnosis.json", "tried.json"})
_VIEW_SUFFIXES = (".perfetto.json", ".perfetto.json.gz")
_SNIFFED_BYTES = 64 * 1024

_RANK_IN_NAME = (
    re.compile(r"(?<![a-z])rank[-_ .]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?<![a-z])worker[-_ .]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r(\d{1,6})(?=[-_.])", re.IGNORECASE),
)
# tensorboard_trace_handler writes <host>_<pid>.<time>.pt.trace.json, a new time for each cycle.
_TIME_IN_NAME = re.compile(r"\.(\d{10,20})(?=\.(?:pt\.trace\.)?json)")
_STEP_IN_NAME = re.compile(r"(?<![a-z])(?:step|iter(?:ation)?|cycle)[-_ ]?(\d{1,9})(?!\d)", re.IGNORECASE)
_SUFFIX = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?(?:\.(?:tmp|part))?$", re.IGNORECASE)
_TRACE_KEYS = re.compile(
    rb'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds|ph)"\s*:'
)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file that may be a trace, and what its manifest and name say about it.

    ``order_hint`` grows with the cycles of one process (a time or a step); ``group_hint`` is the rest of
    the name, equal for the cycles of one process. ``named`` is true if the user gave this very path:
    then it must be a trace, while a file found in a directory may turn out to be none.
    """

    path: str
    size_bytes: int
    rank_hint: int | None
    group_hint: str
    order_hint: int | None
    named: bool = True
    manifest_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The files of one run, in natural order of their names."""

    files: tuple[TraceFile, ...]
    manifest: Manifest | None
    limits: tuple[Limit, ...]


def discover(paths: Sequence[str]) -> Run:
    """Return the trace files that paths stand for: files of any name, directories, URLs, ``-`` for stdin.

    In a directory the names decide (``*.json``, ``*.json.gz``); if it holds none, its subfolders are
    looked into, also those of TensorBoard. Raises :class:`InputError` for a path that does not exist and
    for a directory without traces.
    """
    files: list[TraceFile] = []
    limits: list[Limit] = []
    manifests: list[Manifest | None] = []
    for path in dict.fromkeys(paths):
        if path == "-":
            files.append(TraceFile("-", 0, None, "", None))
        elif is_remote(path):
            found, manifest_here = _remote(path, limits)
            manifests.append(manifest_here)
            files.extend(found)
        elif os.path.isdir(path):
            found, manifest_here = _directory(Path(path), limits)
            manifests.append(manifest_here)
            files.extend(found)
        elif os.path.exists(path):
            files.append(_local_file(Path(path), named=True, manifest=None))
        else:
            raise InputError(f"{path} does not exist", "pass a trace file or a directory of traces")
    if not files:
        raise InputError(
            "no path was given", "pass a trace file, a directory of traces, or - for standard input"
        )
    unique = {_identity(file.path): file for file in reversed(files)}
    ordered = sorted(unique.values(), key=lambda file: natural_key(file.path))
    known = [manifest for manifest in manifests if manifest is not None]
    return Run(tuple(ordered), join_manifests(known), tuple(limits))


def _identity(path: str) -> str:
    return path if path == "-" or is_remote(path) else os.path.realpath(path)


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts rank-2 before rank-10."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text) if part
    )


def _directory(directory: Path, limits: list[Limit]) -> tuple[list[TraceFile], Manifest | None]:
    earlier = len(limits)
    manifest = _manifest_in(directory, limits)
    files = _files_in(directory, _listed(manifest), limits)
    if files:
        return files, manifest
    known: dict[Path, Manifest | None] = {}
    # The folders of a run in which nothing was captured are not that run: its baseline, earlier attempts.
    if manifest is None or manifest.ranks:
        for folder in _subfolders(directory):
            own = _manifest_in(folder, limits)
            try:
                found = _files_in(folder, _listed(manifest) | _listed(own), limits)
            except InputError as error:
                limits.append(Limit("not-a-trace", error.message, "it was left out"))
                continue
            files += found
            if found:
                known[folder] = own
    if not files:
        raise _no_traces(directory, manifest, limits[earlier:])
    _refuse_several_runs(directory, known)
    return files, join_manifests([one for one in (manifest, *known.values()) if one is not None])


def _manifest_in(directory: Path, limits: list[Limit]) -> Manifest | None:
    try:
        return read_manifest(directory)
    except InputError as error:
        limits.append(Limit("bad-manifest", error.message, "ranks come from the files and their names"))
        return None


def _listed(manifest: Manifest | None) -> dict[Path, int]:
    if manifest is None:
        return {}
    listed = {}
    for entry in manifest.ranks:
        # A name that no file can have (a null byte, a circle of links) names none of these.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            listed[(Path(entry.folder) / entry.file).resolve()] = entry.rank
    return listed


def _no_traces(directory: Path, manifest: Manifest | None, limits: Sequence[Limit]) -> InputError:
    """Return the error for a folder without traces, with what is known of why there are none."""
    refused = [limit.message for limit in limits if limit.code == "not-a-trace"]
    if manifest is not None and not refused:
        reasons = [f"rank {entry.rank}: {entry.reason}" for entry in manifest.silent if entry.reason]
        ended = [words] if (words := how_it_ended(manifest)) else []
        first = (reasons or ["no rank reached an optimizer step"])[:1]
        return InputError(
            f"nothing was captured in {directory}: {'; '.join(ended + first)}",
            "capture it again: tracedoc collect -- COMMAND",
        )
    return InputError(
        f"{directory} holds no traces" + (f": {refused[0]}" if refused else ""),
        "pass the directory that torch.profiler exported to; traces end in .json or .json.gz",
    )


def _refuse_several_runs(directory: Path, known: Mapping[Path, Manifest | None]) -> None:
    """Raise where folders side by side hold runs of their own, not the nodes of one: they share a rank."""
    ranks = [entry.rank for manifest in known.values() if manifest is not None for entry in manifest.ranks]
    if len(ranks) > len(set(ranks)):
        newest = max(known, key=lambda folder: folder.stat().st_mtime)
        raise InputError(
            f"{directory} holds {len(known)} runs, each in a folder of its own", f"pass one of them: {newest}"
        )


def _subfolders(directory: Path) -> Iterable[Path]:
    """Yield the folders one level down, and those in TensorBoard's plugins/profile."""
    for folder in _entries(directory):
        if os.path.isdir(folder) and not folder.name.startswith("."):
            yield folder
            profiles = folder / "profile"
            if folder.name == "plugins" and os.path.isdir(profiles):
                yield from (path for path in _entries(profiles) if os.path.isdir(path))


def _entries(directory: Path) -> list[Path]:
    """The files and folders of a folder, in natural order of the names."""
    try:
        return sorted(directory.iterdir(), key=lambda path: natural_key(path.name))
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}", "check its permissions") from None


def _files_in(directory: Path, manifest: dict[Path, int], limits: list[Limit]) -> list[TraceFile]:
    def read(path: Path) -> TraceFile | None:
        if not os.path.isfile(path) or is_dump(path):
            return None
        if reason := _why_no_trace(path):
            limits.append(Limit("not-a-trace", f"{path} {reason}", "it was left out"))
            return None
        return _local_file(path, named=False, manifest=manifest.get(path.resolve()))

    return _by_name(_entries(directory), read, limits)


Named = TypeVar("Named", Path, RemoteEntry)


def _by_name(
    entries: Iterable[Named], read: Callable[[Named], TraceFile | None], limits: list[Limit]
) -> list[TraceFile]:
    """The files that are traces by their names and by ``read``; what a crash left of ranks that have none."""
    whole: list[TraceFile] = []
    leftovers: list[TraceFile] = []
    for entry in entries:
        leftover = _LEFTOVER_NAME.search(entry.name) is not None
        of_trace = (leftover or _TRACE_NAME.search(entry.name)) and not entry.name.startswith(".")
        if of_trace and not _is_ours(entry.name) and (file := read(entry)) is not None:
            (leftovers if leftover else whole).append(file)
    have = {_owner(file) for file in whole}
    for file in leftovers:
        if _owner(file) not in have:
            whole.append(file)
            limits.append(
                Limit(
                    "unfinished-export",
                    f"{public_name(file.path)} is what an export left that did not finish",
                    "what is whole in it is read",
                )
            )
    return whole


def _is_ours(name: str) -> bool:
    return name in _OWN_FILES or name.endswith((PART_SUFFIX, *_VIEW_SUFFIXES))


def _owner(file: TraceFile) -> int | str:
    rank = file.rank_hint if file.manifest_rank is None else file.manifest_rank
    return file.group_hint if rank is None else rank


def _local_file(path: Path, *, named: bool, manifest: int | None) -> TraceFile:
    folder = (str(path.parent), path.parent.name)
    return _trace_file(str(path), path.name, folder, path.stat().st_size, named=named, manifest=manifest)


def _trace_file(
    path: str, name: str, folder: tuple[str, str], size_bytes: int, *, named: bool, manifest: int | None
) -> TraceFile:
    """Return the file with what its name hints; ``folder`` is its folder's path and name."""
    order = _TIME_IN_NAME.search(name) or _STEP_IN_NAME.search(name)
    rest = name if order is None else name[: order.start()] + name[order.end() :]
    return TraceFile(
        path=path,
        size_bytes=size_bytes,
        rank_hint=_rank_in(_SUFFIX.sub(".", name), folder[1]),
        group_hint=f"{folder[0]}/{_SUFFIX.sub('', rest)}",
        order_hint=None if order is None else int(order.group(1)),
        named=named,
        manifest_rank=manifest,
    )


# Remote files: the names decide alone, for looking into each would cost a request.


def _remote(url: str, limits: list[Limit]) -> tuple[list[TraceFile], Manifest | None]:
    if _TRACE_NAME.search(public_name(url)) or not is_remote_folder(url):
        return [_remote_file(url, remote_size(url), named=True, manifest=None)], None
    entries = list_remote(url)
    manifest = _remote_manifest(entries, limits)
    ranks = {entry.file: entry.rank for entry in manifest.ranks} if manifest else {}
    files = _remote_files(entries, ranks, limits)
    if not files:
        for folder in sorted(entries, key=lambda entry: natural_key(entry.name)):
            if folder.is_folder and not folder.name.startswith("."):
                files.extend(_remote_files(list_remote(folder.path), {}, limits))
    if not files:
        raise InputError(
            f"{public_name(url)} holds no traces",
            "pass the folder that torch.profiler exported to; traces end in .json or .json.gz",
        )
    return files, manifest


def _remote_manifest(entries: Sequence[RemoteEntry], limits: list[Limit]) -> Manifest | None:
    found = next((entry for entry in entries if entry.name == MANIFEST_NAME), None)
    if found is None:
        return None
    name = public_name(found.path)
    try:
        if found.size_bytes > MAX_MANIFEST_BYTES:
            raise InputError(f"{name} is larger than {MAX_MANIFEST_BYTES:,} bytes")
        return parse_manifest(read_remote(found.path), name)
    except InputError as error:
        limits.append(Limit("bad-manifest", error.message, "ranks come from the files and their names"))
        return None


def _remote_files(
    entries: Sequence[RemoteEntry], ranks: Mapping[str, int], limits: list[Limit]
) -> list[TraceFile]:
    def read(entry: RemoteEntry) -> TraceFile | None:
        if entry.is_folder:
            return None
        return _remote_file(entry.path, entry.size_bytes, named=False, manifest=ranks.get(entry.name))

    return _by_name(sorted(entries, key=lambda entry: natural_key(entry.name)), read, limits)


def _remote_file(url: str, size_bytes: int, *, named: bool, manifest: int | None) -> TraceFile:
    folder, _, name = public_name(url).rpartition("/")
    names = (folder, folder.rpartition("/")[2])
    return _trace_file(url, name, names, size_bytes, named=named, manifest=manifest)


def _rank_in(*names: str) -> int | None:
    """Return the rank in the first name that has one: the file's, else that of its folder (rank3/)."""
    for name in names:
        for pattern in _RANK_IN_NAME:
            match = pattern.search(name)
            if match:
                return int(match.group(1))
    return None


def _why_no_trace(path: Path) -> str:
    """The reason why a file cannot be a trace, "" if it may be one; only reading it shows for sure."""
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
            complete = len(head) < _SNIFFED_BYTES
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if head.startswith(b"\x1f\x8b"):
        try:
            inflater = zlib.decompressobj(31)
            head = inflater.decompress(head, _SNIFFED_BYTES)
            complete = inflater.eof
        except zlib.error:
            return "is a damaged gzip file"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        return "is empty"
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the trace itself"
    if text[:1] not in b"{[":
        return "is not JSON"
    if re.match(rb'\{\s*"tracedocView"\s*:', text):
        return "was written by tracedoc, for Perfetto"
    if re.match(rb'\{\s*"schema"\s*:', text) and b'"nodes"' in text:
        return "is an execution trace, not a profiler trace"
    if complete and not _TRACE_KEYS.search(text):
        return "is JSON, but not a trace"
    return ""
