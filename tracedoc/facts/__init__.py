"""Facts: what was measured, with units, scopes and definitions; no opinions.

Importing this package fills :data:`tracedoc.facts.catalog.CATALOG`.
"""

from tracedoc.facts import (
    capture,
    communication,
    compute,
    gradients,
    host,
    idle,
    input,
    job,
    kernels,
    links,
    memory,
    offload,
    phases,
    runlong,
    shard_hooks,
    sharding,
    slowness,
    step,
    straggler,
    strategy,
    uneven,
    wrapping,
)

__all__ = [
    "capture",
    "communication",
    "compute",
    "gradients",
    "host",
    "idle",
    "input",
    "job",
    "kernels",
    "links",
    "memory",
    "offload",
    "phases",
    "runlong",
    "shard_hooks",
    "sharding",
    "slowness",
    "step",
    "straggler",
    "strategy",
    "uneven",
    "wrapping",
]
