"""What the codes of limits and the words of an answer mean; ``glossary.yaml`` beside this file says it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def limits() -> dict[str, str]:
    """The explanation of each limit by its code."""
    return _texts()["limits"]


def answer_words() -> dict[str, str]:
    """The explanation of each word of an answer."""
    return _texts()["words"]


@cache
def _texts() -> dict[str, dict[str, str]]:
    import msgspec  # `tracedoc --help` needs it not

    text = Path(__file__).with_suffix(".yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, dict[str, str]])
