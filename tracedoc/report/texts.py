"""Texts made safe to show: control characters written out, hosts and paths hidden on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import Limit

# Text that only names things: never redacted, or keys that reports look up would change.
_IDENTIFIERS = frozenset(
    {
        "id",
        "rule_id",
        "severity",
        "confidence",
        "status",
        "topic",
        "outcome",
        "code",
        "unit",
        "scope",
        "basis",
    }
    | {"framework", "fixes", "op", "category", "schema_version", "tool_version", "text", "doc", "why"}
)
# Control characters could drive a terminal; direction marks could make a name read as another.
_HIDDEN = {
    code: f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
    for code in (
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    )
}
_POSIX_PATH = re.compile(
    # Not the slash of `</b>`, `ms/step`, `a / b`, `../x` or `https://x`.
    r"(?:file://|(?<![\w/.~<-])(?:~[\w.-]*)?)/(?=[\w.@+-])(?:[^/\s\"'<>|:;,()]+/)*[^/\s\"'<>|:;,()]*"
)
_WINDOWS_PATH = re.compile(r"(?<!\w)(?:[A-Za-z]:|\\)\\(?:[^\\\s\"'<>|:;,()]+\\)*[^\\\s\"'<>|:;,()]*")


def one_line(text: str) -> str:
    """Return the text with every run of white space as one blank."""
    return " ".join(text.split())


def plain(text: str) -> str:
    """Return the text with control characters and direction marks written out, as ``\\x1b``."""
    return text.translate(_HIDDEN)


def redacted(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with hosts as ``host-1`` and absolute paths as their last part.

    Relative paths stay: they say which file is meant, and nothing about the machine.
    """
    hosts = sorted({rank.host for rank in diagnosis.ranks if rank.host})
    names = {host: f"host-{number}" for number, host in enumerate(hosts, 1)}
    words = sorted(names, key=len, reverse=True)
    host_pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words) or "(?!)")
    # Whole sources first: they may hold blanks, where the pattern for paths in text must stop.
    files = sorted(
        {*diagnosis.run.sources, *(rank.source for rank in diagnosis.ranks)}, key=len, reverse=True
    )
    sources = {file: _last_part(file) for file in files if _last_part(file) != file}

    shared = _shared_beginning(list(sources))

    def hide(text: str) -> str:
        if text in sources:
            return sources[text]
        if shared in text:
            for file, last in sources.items():
                text = text.replace(file, last)
        text = _WINDOWS_PATH.sub(lambda match: _last_part(match[0]), text)
        text = _POSIX_PATH.sub(lambda match: _last_part(match[0]), text)
        return host_pattern.sub(lambda match: names[match[0]], text)

    return map_text(diagnosis, hide, keep=_IDENTIFIERS)


def _shared_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    same = (place for place, letter in enumerate(first) if letter != last[place])
    return first[: next(same, len(first))]


def _last_part(path: str) -> str:
    if re.match(r"[A-Za-z]:\\|\\\\", path):
        return PureWindowsPath(path).name or "path"
    path = path.removeprefix("file://")
    if path.startswith(("/", "~")):
        return PurePosixPath(path).name or "path"
    return path


_NUMBERS = (float, int)


def map_text(
    diagnosis: Diagnosis, change: Callable[[str], str], *, keep: frozenset[str] = frozenset()
) -> Diagnosis:
    """Return the diagnosis with ``change`` made to its texts; what has none to change is shared with it."""
    changed_texts: dict[str, str] = {}

    def changed_text(value: str) -> str:
        # Ranks and steps repeat most texts.
        if (text := changed_texts.get(value)) is None:
            text = changed_texts.setdefault(value, change(value))
        return value if text == value else text

    def walk(value: Any, field: str) -> Any:
        if value is None or isinstance(value, _NUMBERS) or field in keep:
            return value
        if isinstance(value, str):
            return changed_text(value)
        if isinstance(value, tuple):
            items = tuple(walk(item, field) for item in value)
            return value if all(map(is_, items, value)) else items
        if isinstance(value, dict):
            # Only the keys of free dictionaries (values of facts by host, say) are texts.
            free = field == "values"
            found = {
                walk(key, "") if free else key: walk(item, "" if free else key) for key, item in value.items()
            }
            same = all(map(is_, found, value)) and all(map(is_, found.values(), value.values()))
            return value if same and len(found) == len(value) else found
        if isinstance(value, msgspec.Struct):
            new = {}
            for name in value.__struct_fields__:
                item = getattr(value, name)
                if (found := walk(item, name)) is not item:
                    new[name] = found
            return replace(value, **new) if new else value
        if isinstance(value, Limit):
            return Limit(value.code, change(value.message), change(value.effect))
        return value

    changed: Diagnosis = walk(diagnosis, "")
    return changed
