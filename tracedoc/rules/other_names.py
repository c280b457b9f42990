"""Names that people look for and no rule has: which rules tell what they mean, and why there is none."""

from __future__ import annotations

from typing import Final, NamedTuple


class OtherName(NamedTuple):
    """The rules that tell what a name means, and a sentence about how."""

    rules: tuple[str, ...]
    says: str


OTHER_NAMES: Final = {
    "cpu-starvation": OtherName(
        ("cpu-quota", "shared-cores"),
        "Two rules tell that a host's processors are short, each with a counter and a fix of its own: a "
        "container is stopped when its quota is used up, or training threads wait for a free core.",
    ),
    "warm-up-in-window": OtherName(
        ("few-steps", "recompilation", "step-outliers"),
        "Steps of the warm-up are left out: one in which kernels are loaded or compiled does not stand for "
        "the others, and the limit cold-start says where the capture holds no other. These rules tell what "
        "is slow beyond it.",
    ),
}
