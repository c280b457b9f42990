"""Facts of one rank, computed from its timeline in the worker."""

from tracedoc.facts.per_rank import (
    arithmetic,
    capture,
    kernel_mix,
    launch_pace,
    loader,
    memory,
    messages,
    offload,
    phase_times,
    shard_hooks,
    sharded_units,
    step,
)

__all__ = [
    "arithmetic",
    "capture",
    "kernel_mix",
    "launch_pace",
    "loader",
    "memory",
    "messages",
    "offload",
    "phase_times",
    "shard_hooks",
    "sharded_units",
    "step",
]
