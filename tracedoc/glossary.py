"""What codes of limits, and words of an answer or a plan mean; ``glossary.yaml`` beside this file says it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def limits() -> dict[str, str]:
    """The explanation of each limit by its code."""
    return _texts()["limits"]


def answer_words() -> dict[str, str]:
    """The explanation of each word of an answer."""
    return _texts()["words"]


def plan_words() -> dict[str, str]:
    """The explanation of each word of a plan: a table of what it shards, costs and is for."""
    return _texts()["plans"]


@cache
def _texts() -> dict[str, dict[str, str]]:
    import msgspec  # `tracedoc --help` needs it not

    text = Path(__file__).with_suffix(".yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, dict[str, str]])
