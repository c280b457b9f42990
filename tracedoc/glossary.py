"""What codes of limits and words mean, in any spelling; ``glossary.yaml`` beside this file says it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypedDict


def limits() -> dict[str, str]:
    """The explanation of each limit by its code."""
    return _texts()["limits"]


@cache
def words() -> dict[str, dict[str, str]]:
    """Each word by its name: a text for each label; ``Is`` comes first, and stands alone for most words."""
    return {
        word: meaning if isinstance(meaning, dict) else {"Is": meaning}
        for word, meaning in _texts()["words"].items()
    }


def spellings() -> dict[str, list[str]]:
    """Other words for those of :func:`words`."""
    return _texts()["spellings"]


def letters(name: str) -> str:
    """Letters and digits of a name in lower case: ``ZeRO-3``, ``zero 3`` and ``zero3`` are one word."""
    return "".join(filter(str.isalnum, name.lower()))


class _Texts(TypedDict):
    limits: dict[str, str]
    words: dict[str, str | dict[str, str]]
    spellings: dict[str, list[str]]


@cache
def _texts() -> _Texts:
    import msgspec  # `tracedoc --help` needs it not

    return msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=_Texts)
