"""What FSDP writes into a trace: the names of its host ranges become hooks of a unit."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

FSDP2, FSDP1, ZERO3 = "FSDP2", "FSDP1", "ZeRO-3"


class Hook(msgspec.Struct, frozen=True):
    """One host range of FSDP.

    ``role`` is "gather" (launches an all-gather), "pre_forward", "pre_backward", "forward_prefetch",
    "backward_prefetch", "reduce" (launches a reduce-scatter) or "other". ``unit`` is the module's name, ""
    for the root and where the version writes no names.
    """

    framework: str
    role: str
    unit: str = ""


_FSDP2_PREFETCH: Final = re.compile(r"FSDP::(forward|backward)_prefetch for (.*)$")
_FSDP2: Final = re.compile(r"FSDP::(\w+)(?: \((?P<unit>[^)]*)\))?(?: \[pg=\d+\])?$")
_FSDP1: Final = re.compile(r"FullyShardedDataParallel\.(\w+)$")

_FSDP2_ROLES: Final = {
    "all_gather": "gather",
    "pre_forward": "pre_forward",
    "pre_backward": "pre_backward",
    "post_backward_reduce": "reduce",
}
_FSDP1_ROLES: Final = {
    "_pre_forward": "pre_forward",
    "_pre_forward_prefetch": "forward_prefetch",
    "_pre_backward_hook": "pre_backward",
    "_pre_backward_prefetch": "backward_prefetch",
    "_post_backward_prefetch": "backward_prefetch",
    "_post_backward_hook": "reduce",
}
ZERO3_MARK: Final = re.compile(
    r"(?:Pre|Post)BackwardFunction(?:ForModule|Module)?$|LinearFunctionForZeroStage3$"
)


@lru_cache(maxsize=4096)
def shard_hook(name: str) -> Hook | None:
    """Return the hook that a host range is, ``None`` for any other name.

    ``FullyShardedDataParallel.forward`` is none: it holds the module's own forward pass.
    """
    if prefetch := _FSDP2_PREFETCH.match(name):
        return Hook(FSDP2, f"{prefetch[1]}_prefetch", prefetch[2])
    if found := _FSDP2.match(name):
        return Hook(FSDP2, _FSDP2_ROLES.get(found[1], "other"), found["unit"] or "")
    if (found := _FSDP1.match(name)) and found[1] != "forward":
        return Hook(FSDP1, _FSDP1_ROLES.get(found[1], "other"))
    return None


def is_zero3_mark(name: str) -> bool:
    """Return whether an operator is one of those that only DeepSpeed's ZeRO-3 puts into a graph."""
    return ZERO3_MARK.match(name) is not None
