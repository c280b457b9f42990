"""The manifest of a run: which file is which rank's, what state its capture is in, and how it was made.

Each rank and each launcher writes a part of its own as things happen; the launcher merges the parts into
``manifest.json``. Nobody gathers over the network: it would disturb the job. Standard library only: the hook
in the user's process imports this module too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from tracedoc.errors import InputError
from tracedoc.run.untrusted import (
    MissingError,
    UnusableError,
    entries_at,
    entry_at,
    plain_json,
    read_bounded,
    value_at,
)

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1
PART_SUFFIX = ".manifest.json"

MAX_MANIFEST_BYTES = 64 << 20
"""A manifest, or all parts of one, beyond this size is not read: the part of a rank takes some 10 KiB."""

COMPLETE, PARTIAL, NOTHING = "complete", "partial", "nothing"
"""The states that last: all steps asked for, some of them, no trace; each with its reason."""
WAITING, RECORDING, WRITING = "waiting", "recording", "writing"
"""The states on the way there; a part left in one is that of a process still at it, or of one that died."""

BY_SIGNAL = 128
"""With the number of a signal: the exit code that shells return for a command which it ended."""

Part = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The median time of some steps in milliseconds, and how many there were."""

    median_ms: float
    steps: int


@dataclass(frozen=True, slots=True)
class ManifestRank:
    """One rank of a run: its trace, relative to ``folder``, and the host it ran on ("" if unknown).

    ``state`` and ``reason`` say whether the capture holds what was asked for ("" where the manifest does
    not say). ``level`` is ``full``, ``light`` or "" for a rank that was not asked for. ``before`` and
    ``after`` are times of steps without the profiler, ``during`` of the recorded ones, which begin with
    number ``steps_first``. ``part`` is everything the rank wrote about itself.
    """

    rank: int
    file: str
    host: str = ""
    state: str = ""
    reason: str = ""
    level: str = ""
    before: StepTime | None = None
    during: StepTime | None = None
    after: StepTime | None = None
    steps_first: int = 0
    steps_recorded: int = 0
    steps_total: int = 0
    folder: str = ""
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one run directory; ``silent`` are ranks without a trace, ``nodes`` the launchers."""

    path: str
    ranks: tuple[ManifestRank, ...]
    run: str = ""
    state: str = ""
    silent: tuple[ManifestRank, ...] = ()
    nodes: tuple[Part, ...] = ()


# Reading.

_REMOVE_IT = "remove it; ranks are then told by file name"


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a directory, ``None`` where it has none.

    Parts that a launcher did not live to merge are merged here. Raises :class:`InputError` if the file is
    there and is not a manifest of schema 1.
    """
    path = directory / MANIFEST_NAME
    try:
        text = read_bounded(path, MAX_MANIFEST_BYTES)
    except MissingError:
        parts = read_parts(directory)
        return _manifest(merge_parts(parts), str(path)) if parts else None
    except UnusableError as error:
        raise InputError(f"{path} {error}", _REMOVE_IT) from None
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> Manifest:
    """Return the manifest that was read from ``path``, which the messages name."""
    try:
        content = plain_json(text)
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}", _REMOVE_IT) from None
    ranks = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(ranks, dict) or not _is_known(content):
        raise InputError(f"{path} is not a manifest of schema {MANIFEST_SCHEMA}", _REMOVE_IT)
    return _manifest(content, path)


def _is_known(content: Part) -> bool:
    return content.get("schema") == MANIFEST_SCHEMA


def join_manifests(manifests: Sequence[Manifest]) -> Manifest | None:
    """Return one manifest for several directories of one job: without a shared disk each node writes one.

    File names stay relative to the folder each came from; a rank that two folders have is the first's.
    """
    if not manifests:
        return None
    ranks: dict[int, ManifestRank] = {}
    silent: dict[int, ManifestRank] = {}
    for manifest in manifests:
        for entry in manifest.ranks:
            ranks.setdefault(entry.rank, entry)
        for entry in manifest.silent:
            silent.setdefault(entry.rank, entry)
    return replace(
        manifests[0],
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        silent=tuple(silent[rank] for rank in sorted(silent) if rank not in ranks),
        nodes=tuple(node for manifest in manifests for node in manifest.nodes),
        state=COMPLETE if all(manifest.state == COMPLETE for manifest in manifests) else PARTIAL,
    )


def _manifest(content: Part, path: str) -> Manifest:
    listed: list[ManifestRank] = []
    silent: list[ManifestRank] = []
    folder = str(Path(path).parent)
    for rank, entry in entry_at(content, "ranks").items():
        # Longer numbers than any job has ranks are damage.
        if not rank.isdecimal() or not rank.isascii() or len(rank) > 6 or not isinstance(entry, dict):
            continue
        if isinstance(entry.get("file"), str) and entry["file"]:
            listed.append(_rank(int(rank), entry, folder))
        elif "file" in entry or "state" in entry:
            silent.append(_rank(int(rank), entry, folder))
    return Manifest(
        path=path,
        ranks=tuple(sorted(listed, key=lambda entry: entry.rank)),
        run=_text(content, "run"),
        state=_text(content, "state"),
        silent=tuple(sorted(silent, key=lambda entry: entry.rank)),
        nodes=tuple(entries_at(content, "nodes")),
    )


def _rank(rank: int, entry: Part, folder: str) -> ManifestRank:
    times, steps = entry_at(entry, "step_ms"), entry_at(entry, "steps")
    return ManifestRank(
        rank=rank,
        file=_text(entry, "file"),
        host=_text(entry, "host"),
        state=_text(entry, "state"),
        reason=_text(entry, "reason"),
        level=_text(entry, "level"),
        before=_step_time(entry_at(times, "before")),
        during=_step_time(entry_at(times, "during")),
        after=_step_time(entry_at(times, "after")),
        steps_first=value_at(steps, "first", int) or 0,
        steps_recorded=value_at(steps, "recorded", int) or 0,
        steps_total=value_at(steps, "total", int) or 0,
        folder=folder,
        part=entry,
    )


def _step_time(entry: Part) -> StepTime | None:
    median, steps = entry.get("median_ms"), value_at(entry, "steps", int)
    known = isinstance(median, int | float) and median >= 0
    return StepTime(float(median), steps) if known and steps else None  # type: ignore[arg-type]


def _text(entry: Part, key: str) -> str:
    return value_at(entry, key, str) or ""


# Writing.


_writings = itertools.count()


def write_json(path: Path, content: Part) -> None:
    """Write a JSON file as :func:`replace_file` does."""
    replace_file(path, json.dumps(content, indent=1, default=str).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    # A signal handler may write in the middle of another writing, so each has a file of its own.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_writings)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def timestamp() -> str:
    """This moment in UTC, as parts of a manifest say when something began or ended."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def is_running(pid: int) -> bool:
    """Whether a process of this host is there and this user's."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def rank_stem(rank: int, restart: int) -> str:
    """The beginning of the names of a rank's files; a restarted job keeps those of each attempt."""
    return f"rank-{rank}" if restart == 0 else f"rank-{rank}.restart-{restart}"


def read_parts(directory: Path) -> list[Part]:
    """Return the parts in a directory, of ranks and of launchers; one that cannot be read is left out."""
    parts: list[Part] = []
    try:
        paths = sorted(directory.glob(f"*{PART_SUFFIX}"))
    except OSError:
        return []
    room = MAX_MANIFEST_BYTES
    for path in paths:
        with contextlib.suppress(UnusableError, ValueError):
            text = read_bounded(path, room)
            room -= len(text)
            content = plain_json(text)
            if isinstance(content, dict) and _is_known(content):
                parts.append(content)
    return parts


def merge_parts(parts: Iterable[Part]) -> dict[str, object]:
    """Return the manifest that the parts of one run make together.

    Of a job that was restarted, one attempt counts for all ranks, since other attempts recorded other
    steps: the one with most complete ranks, of equals the latest.
    """
    ranks = [part for part in parts if part.get("part") == "rank" and value_at(part, "rank", int) is not None]
    nodes = [part for part in parts if part.get("part") == "node"]
    exits = {_process(part): part for part in parts if part.get("part") == "exit"}
    attempt = best_attempt(ranks)
    chosen = {str(part["rank"]): part for part in ranks if _attempt(part) == attempt}
    ended = bool(nodes) and all(node.get("ended") for node in nodes)
    entries = {rank: _settled(chosen[rank], ended, exits) for rank in sorted(chosen, key=int)}
    first: Part = nodes[0] if nodes else {}
    return {
        "schema": MANIFEST_SCHEMA,
        "run": first.get("run", ""),
        "state": _state(entries.values()),
        "attempt": attempt,
        "nodes": nodes,
        "ranks": entries,
    }


def best_attempt(ranks: Sequence[Part]) -> int:
    """Return the restart whose captures count: most complete ranks, then most traces, then the latest."""
    worth: dict[int, list[int]] = {}
    for part in ranks:
        of_attempt = worth.setdefault(_attempt(part), [0, 0])
        of_attempt[0] += part.get("state") == COMPLETE
        of_attempt[1] += bool(part.get("file"))
    return max(worth, key=lambda attempt: (worth[attempt], attempt), default=0)


def _attempt(part: Part) -> int:
    return value_at(part, "restart", int) or 0


def _process(part: Part) -> tuple[str, int] | None:
    host, pid = value_at(part, "host", str), value_at(part, "pid", int)
    return (host, pid) if host is not None and pid is not None else None


def _settled(part: Part, ended: bool, exits: Mapping[tuple[str, int] | None, Part]) -> dict[str, object]:
    """Return a rank's part with the state it will keep, once nothing of the job runs any more.

    ``exits`` are the parts in which launchers say how processes ended, by host and process number.
    """
    entry = {key: value for key, value in part.items() if key not in ("schema", "part")}
    place = _process(part)
    if place is not None and place in exits:
        entry["exit_code"] = exits[place].get("exit_code")
        entry["exited_ns"] = exits[place].get("exited_ns")
    state = entry.get("state")
    if ended and state in (WAITING, RECORDING, WRITING):
        entry["state"] = NOTHING
        entry["reason"] = f"the process ended without a word while its capture was {state}"
    return entry


def _state(entries: Iterable[Part]) -> str:
    states = {_text(entry, "state") for entry in entries if entry.get("level") != ""}
    if not states or states == {NOTHING}:
        return NOTHING
    return COMPLETE if states == {COMPLETE} else PARTIAL


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let launchers of several nodes merge one after the other, where the file system has locks."""
    path = directory / ".lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_manifest(directory: Path) -> Manifest:
    """Merge the parts in a directory into its ``manifest.json``, and return it."""
    path = directory / MANIFEST_NAME
    with locked(directory):
        content = merge_parts(read_parts(directory))
        write_json(path, content)
    return _manifest(content, str(path))


VARIABLE = "TRACEDOC_LIVE"
"""Set to 1, it has the ranks of a collected job watch for requests."""

REQUEST_NAME = "again.request"
SECONDS_BETWEEN_LOOKS, LEAST_SECONDS_BETWEEN_LOOKS = 1.0, 0.05
"""A rank looks for a request once a step, but no less often and no more often than this."""

STEPS_SAMPLED = 4
"""What a rank does is sampled over so many steps before it answers."""

_MAX_REQUEST_BYTES = 10_000
_STEP_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Request:
    """The capture that is asked for: from step ``at`` on, into the folder ``again-<number>`` of the run's.

    Without ``active`` steps ranks only write what their flight recorders hold.
    """

    number: int
    at: int
    warmup: int = 1
    active: int = 5

    @property
    def folder(self) -> str:
        """The name of the folder that the ranks write into."""
        return f"again-{self.number}"


def read_request(folder: Path) -> Request | None:
    """The request that lies in a run directory, ``None`` where there is none that can be understood."""
    try:
        content = json.loads(read_bounded(folder / REQUEST_NAME, _MAX_REQUEST_BYTES))
        request = Request(**content)
    except (UnusableError, ValueError, TypeError, RecursionError):
        return None
    values = asdict(request).values()
    return request if all(type(one) is int and 0 <= one < _STEP_LIMIT for one in values) else None
