"""Translate the host ranges of training frameworks into what they mean for a step.

Like :mod:`tracedoc.trace.vocabulary`, everything here looks at a name alone and is meant to be called once
per distinct name. Names are those of torch 2.0 to 2.13, DeepSpeed and Megatron; each pattern is anchored.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Final

import msgspec

_EVALUATION = "autograd::engine::evaluate_function"


def is_evaluation(name: str) -> bool:
    """True for the engine's range around one node of the backward graph (torch 1.9+)."""
    return name.startswith(_EVALUATION)


is_forward_wrapper = re.compile(
    r"(?:DistributedDataParallel|DataParallel|CustomFSDP)\.forward$"
    r"|FullyShardedDataParallel\.(?:forward|_root_pre_forward|_pre_forward)$"
    r"|FSDP::(?:root_pre_forward|pre_forward)\b"
    r"|(?:Pre|Post)BackwardFunction(?:ForModule|Module)?$"
    r"|Torch-Compiled Region|CompiledFunction$|## Call CompiledFxGraph"
).match
"""True for a range of a wrapper's forward pass: the pass has begun where one starts."""

is_forward_operator = re.compile(
    r"aten::(?:linear|conv[123]d|batch_norm|layer_norm|rms_norm|group_norm|instance_norm|dropout|embedding"
    r"|embedding_bag|scaled_dot_product_attention|cross_entropy_loss|multi_head_attention_forward|lstm|gru)$"
    r"|LinearFunctionForZeroStage3$"
).match
"""True for a composite operator of the forward pass.

The backward graph never calls these itself: inside one of its nodes they are recomputation.
"""

_REDUCER = r"torch\.distributed\.ddp\.reducer::|torch::distributed::reducer::"

is_backward_tail = re.compile(
    rf"{_REDUCER}"
    r"|FSDP::(?:post_backward|root_post_backward)"
    r"|FullyShardedDataParallel\._post_backward"
).match
"""True for a range that ends a backward pass after its last node: buckets copied back, shards freed."""

is_bucket_copy = re.compile(rf"(?:{_REDUCER})(?:mul_out|copy_bucket_to_grad)$").match
"""True for a range in which DistributedDataParallel brings a gradient into its bucket, or back."""

is_optimizer_label = re.compile(r"[#\s]*(?:optimizer|optim)(?:[ _.]step)?[#\s]*$", re.IGNORECASE).match
"""True for a user's own label of the optimizer's step: ``## optimizer ##``."""


def is_parameter_gather(name: str) -> bool:
    """True for a c10d operator that hands updated parameters back to all ranks after the optimizer."""
    return name.startswith(("c10d::_allgather_base", "c10d::allgather", "c10d::broadcast"))


def elements(dims: object) -> int:
    """Return the number of elements of a tensor, or of all tensors of a list, from its ``Input Dims``."""
    if not isinstance(dims, (list, tuple)):
        return 0
    if all(isinstance(extent, int) for extent in dims):
        return prod(dims)
    return sum(elements(part) for part in dims)


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
RATE_LIMITER: Final = "FullyShardedDataParallel.rate_limiter"
"""The range in which FSDP1 waits before a gather until few are in flight."""

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
    """True for an operator that only DeepSpeed's ZeRO-3 puts into a graph."""
    return ZERO3_MARK.match(name) is not None
