"""Words that users have no reason to know, and what is said instead of them."""

from __future__ import annotations

import re

BANNED = {
    r"judged step|steps? judged|is judged as|are judged": "analysed",
    r"told as a limit": "shown below",
    r"finds? fault": "flags",
    r"holds? compute up|held up by|holds? the host up": "blocks",
    r"launche[sd]? late\b|launched late": "launch-bound: too late",
    r"comes? late and the others": "straggler",
    r"leaves the GPU alone": "long host gaps",
    r"that nothing hides": "exposed communication",
    r"nothing above a note": "only minor findings",
    r"is worth (?:up to|about)|surely gain|gives? back|give back": "saves",
    r"not your problem": "the GPUs are busy",
    r"explained by another finding": "part of another finding",
    r"(?:no|\d) whole steps?\b|captured whole": "complete step",
    r"arrivals of the peers": "this capture cannot separate waiting from transfer",
    r"takes no step|of its own that tells": "is missing",
    r"told strategy|undrawn|cannot tell\b|can tell\b|told apart": "cannot separate, cannot show",
    r"no operator covers": "in Python outside PyTorch's operators",
    r"fixing (?:it|both)|that code\b|no single cause": "the fix, the function or the cause by its name",
    r":(?:func|class|data|mod|meth):`": "a name in backticks",
}
"""Patterns, each with the words that VOICE asks for."""

PATTERN = re.compile("|".join(f"(?:{one})" for one in BANNED), re.IGNORECASE)


def banned_in(text: str) -> list[str]:
    """Return what of a text should be said otherwise."""
    return [match[0] for match in PATTERN.finditer(" ".join(text.split()))]
