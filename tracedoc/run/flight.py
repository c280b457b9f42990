"""Read the dumps of PyTorch's flight recorder: which collectives a rank entered, and which it is in still.

A dump is JSON, or a pickle of plain values; a pickle that could do more than that is refused unread.
Standard library only: the hook in the user's process imports this module too.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tracedoc.run.untrusted import UnusableError, plain_json, read_bounded

FLIGHT_SUFFIX = ".flight"
"""Ends the names of dumps in a run directory: ``rank-3.flight``."""

STACK_SUFFIX = ".stack"
"""Ends the name of what the collector writes beside a dump: where the training thread was, a frame a line.

Of several samples there is the innermost frame of each, with how often it was seen behind it: `` x12``.
"""

MAX_DUMP_BYTES = 128 << 20
"""A dump holds 2,000 calls by default: some megabytes with stacks."""

_PICKLE_HEAD_BYTES = 4096
_PICKLE = b"\x80"
_RANK = re.compile(r"(?<![a-z])rank[-_ .]?(\d{1,6})(?!\d)|[-_.](\d{1,6})(?:\.\w+)?$", re.IGNORECASE)
_PLAIN_OPCODES = re.compile(
    "PROTO|FRAME|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|BINFLOAT|(SHORT_)?BINUNICODE|SETITEMS?|APPENDS?"
    "|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|MEMOIZE|(LONG_)?BIN(PUT|GET)"
)
_STACK_LINE = re.compile(r"^([^\n(]+)\(\d+\): ([^\n@]+)@(\d+)(?: x(\d{1,6}))?$", re.MULTILINE)
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, a send or a receive that a rank entered.

    ``group`` is backend and id of the process group, ``label`` its name for people; ``number`` counts the
    calls of a group, or of a pair of ranks: then ``peers`` are source and destination, numbered as there.
    ``entered_ns`` is by the host's clock, 0 where the dump does not say; ``begun`` says that the device has
    begun it, where that is known.
    ``local`` is the group's number on this rank; ``place`` is ``train.py:88``, "" in a dump without stacks.
    """

    group: str
    label: str
    op: str
    number: int
    tensors: str
    entered_ns: int
    waits: bool
    begun: bool = False
    local: int = 0
    place: str = ""
    peers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Dump:
    """What the recorder of one rank held; ``members`` are the ranks of groups, where the dump says them.

    ``entered`` are the numbers of the last collectives by the group's number on this rank, also where the
    dump leaves their calls out. ``stands_in`` is the function that the rank was in, as ``save (train.py:4)``,
    "" if unknown; ``samples`` are the shares of functions in samples of its stack.
    """

    rank: int
    path: str
    calls: tuple[Call, ...]
    members: Mapping[str, tuple[int, ...]]
    entered: Mapping[int, int] = field(default_factory=dict)
    stands_in: str = ""
    samples: Mapping[str, float] = field(default_factory=dict)


def is_dump(path: Path) -> bool:
    """True for a file that begins as a dump does; only reading it shows whether it is one."""
    try:
        with path.open("rb") as file:
            head = file.read(_PICKLE_HEAD_BYTES)
    except OSError:
        return False
    if head.startswith(_PICKLE):
        return b"pg_config" in head or b"profiling_name" in head
    return head.lstrip()[:1] == b"{" and (b'"collective_seq_id"' in head or b'"pg_status"' in head)


def read_dump(path: Path) -> Dump:
    """The dump in a file, whose name tells the rank (0 if it does not).

    Raises :class:`UnusableError` for a file that is none, and for a pickle of more than plain values.
    """
    content = read_bounded(path, MAX_DUMP_BYTES)
    match = _RANK.search(path.name)
    dump = parse_dump(content, int(match[1] or match[2]) if match else 0, str(path))
    with contextlib.suppress(UnusableError):
        text = read_bounded(path.with_name(path.name + STACK_SUFFIX), MAX_DUMP_BYTES).decode(
            "utf-8", "replace"
        )
        found = _STACK_LINE.findall(text)
        shares: dict[str, float] = {}
        named: dict[tuple[str, str], str] = {}
        for file, name, line, count in found:
            # The line is the one that was seen most often.
            place = named.setdefault((file, name), f"{name} ({file.rpartition('/')[2]}:{line})")
            shares[place] = shares.get(place, 0) + int(count or 0)
        seen = sum(shares.values())
        samples = {place: share / seen for place, share in shares.items()} if seen else {}
        dump = replace(dump, stands_in=next(iter(shares), ""), samples=samples)
    return dump


def parse_dump(content: bytes, rank: int, path: str = "") -> Dump:
    """The dump of a rank in the bytes of a file; errors as for :func:`read_dump`."""
    try:
        values = _plain_pickle(content) if content.startswith(_PICKLE) else plain_json(content)
    except ValueError as error:
        raise UnusableError(f"is no dump of the flight recorder: {error}") from None
    entries = values.get("entries") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(entries, list):
        raise UnusableError("is no dump of the flight recorder: it has no entries")
    listed = [entry for entry in entries if isinstance(entry, dict)]
    if listed and not any("collective_seq_id" in entry for entry in listed):
        version = _text(values.get("version"))
        raise UnusableError(
            f"has format {version or 'unknown'} of the flight recorder, which does not number the calls of a "
            "group; PyTorch 2.4 and later write one that does"
        )
    done = _numbers(values, "last_completed_collective")
    entered = _numbers(values, "last_enqueued_collective")
    # The parts of a coalesced call have no state of their own.
    whole = {_place_in_group(one): one for one in listed if _op(one) == "coalesced"}
    # Before format 2.7 those of collectives are not listed either.
    parts = {_place_in_group(one) for one in listed if _op(one) != "coalesced"}
    calls = [
        _call(one, whole.get(_place_in_group(one), one), done)
        for one in listed
        if _op(one) != "coalesced" or (_place_in_group(one) not in parts and one.get("is_p2p") is not True)
    ]
    return Dump(rank, path, tuple(calls), _members(values), entered)


class _Plain(pickle.Unpickler):
    """Unpickles numbers, texts and collections of them."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def _plain_pickle(content: bytes) -> object:
    """The value of a pickle; ``ValueError`` for one with an opcode that plain values do not need."""
    try:
        for opcode, value, _ in pickletools.genops(content):
            if not _PLAIN_OPCODES.fullmatch(opcode.name):
                raise pickle.UnpicklingError(f"it holds more than plain values ({opcode.name})")
            # The unpickler makes room for as many values as an index says.
            if opcode.name == "LONG_BINPUT" and isinstance(value, int) and value > len(content):
                raise pickle.UnpicklingError("it is damaged")
        return _Plain(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # whatever a damaged pickle leads to
        raise ValueError(f"it is damaged: {type(error).__name__}") from None


def _call(entry: Mapping[str, Any], stated: Mapping[str, Any], done: Mapping[int, int]) -> Call:
    group, label = _group(entry)
    backend, _, name = _text(entry.get("profiling_name")).partition(":")
    words = name.split()
    peers = re.findall(r"\d{1,6}", words[1])[:2] if len(words) > 1 else []
    if words and words[0] == "recv":
        peers.reverse()
    is_pair = len(peers) == 2
    number = _whole(entry.get("p2p_seq_id" if is_pair else "collective_seq_id"))
    is_done = stated.get("state") == "completed"
    is_retired = stated.get("retired") is True
    # gloo records no states. Elsewhere a call that was retired and is not completed has timed out: its
    # watchdog gave it up, and may have counted it as the last one that ended.
    has_timed_out = is_retired and not is_done and backend != "gloo"
    is_counted = not is_pair and number <= done.get(_whole(entry.get("pg_id")), 0)
    finished = is_done or (not has_timed_out and (is_retired or is_counted))
    return Call(
        group=f"{backend}:{group}",
        label=label,
        op=_op(entry),
        number=number,
        tensors=_tensors(entry.get("input_sizes"), entry.get("input_dtypes")),
        entered_ns=_whole(entry.get("time_created_ns")),
        waits=not finished,
        local=_whole(entry.get("pg_id")),
        begun=stated.get("state") in ("started", "completed"),
        place=_place(entry.get("frames")),
        peers=(int(peers[0]), int(peers[1])) if is_pair else None,
    )


def _op(entry: Mapping[str, Any]) -> str:
    name = _text(entry.get("profiling_name"))
    return (name.partition(":")[2] or name).partition(" ")[0]


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Id and name of the group of a call; the name is the id where the job gave none."""
    named = entry.get("process_group")
    one, label = named[:2] if isinstance(named, (list, tuple)) and len(named) > 1 else (named, "")
    return _text(one), _text(label) if _text(label) not in ("", "undefined") else _text(one)


def _place_in_group(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    numbers = (_whole(entry.get(name)) for name in ("collective_seq_id", "p2p_seq_id"))
    return (_group(entry)[0], *numbers)  # type: ignore[return-value]


def _place(frames: object) -> str:
    """Where the script called: the innermost frame of no installed package, else of none of torch's."""
    known: list[tuple[str, object]] = []
    for frame in frames[:64] if isinstance(frames, list) else ():
        if isinstance(frame, dict) and _text(frame.get("filename")).endswith(".py"):
            known.append((_text(frame["filename"]), frame.get("line")))
    own = [one for one in known if not any(name in one[0] for name in _INSTALLED)]
    other = [one for one in known if "/torch/" not in one[0]]
    for file, line in (*own, *other):
        return f"{file.rpartition('/')[2]}:{_whole(line)}"
    return ""


def _numbers(values: Mapping[str, Any], name: str) -> dict[int, int]:
    """The number of the last collective that a group entered or ended, by the group's number on this rank."""
    status = values.get("pg_status")
    groups = status.items() if isinstance(status, dict) else ()
    return {_whole(one): _whole(state.get(name)) for one, state in groups if isinstance(state, dict)}


def _members(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    config = values.get("pg_config")
    found = {}
    for one, group in config.items() if isinstance(config, dict) else ():
        ranks = re.findall(r"\d{1,6}", _text(group.get("ranks"))) if isinstance(group, dict) else []
        # Of gloo's groups one stands there, without its id.
        if ranks and _text(one):
            found[_text(one)] = tuple(sorted(int(rank) for rank in ranks))
    return found


def _tensors(sizes: object, kinds: object) -> str:
    """The inputs of a call in words, as ``Float[10, 4]``; of many the first ones."""
    words = []
    for place, size in enumerate(sizes[:4] if isinstance(sizes, list) else ()):
        kind = _text(kinds[place]) if isinstance(kinds, list) and place < len(kinds) else ""
        shape = [str(_whole(one)) for one in size[:8]] if isinstance(size, list) else []
        words.append(f"{kind}[{', '.join(shape)}]")
    return ", ".join(words)


def _text(value: object) -> str:
    return str(value)[:100_000] if isinstance(value, (str, int)) else ""


def _whole(value: object) -> int:
    """A number that may be written as text; 0 for what is none, and for one beyond 64 bits."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,19}", value):
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 2**63 else 0  # type: ignore[operator, return-value]


def waits_in(dump: Dump) -> set[tuple[str, str, int]]:
    """The calls that a rank waits in: group, operation and number."""
    return {(one.group, one.op, one.number) for one in dump.calls if one.waits}


def find_dumps(folder: Path) -> list[Path]:
    """The files of a folder that begin as dumps and name a rank, in order of their names."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [one for one in entries if _RANK.search(one.name) and one.is_file() and is_dump(one)]


def dumps_at(paths: Iterable[Path]) -> list[Path]:
    """The dumps among files, and in folders, that paths name."""
    found = []
    for path in paths:
        found += find_dumps(path) if path.is_dir() else [path] if is_dump(path) else []
    return found
