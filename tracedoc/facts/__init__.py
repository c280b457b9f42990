"""Facts: what was measured, with units, scopes and definitions; no opinions.

Importing this package fills :data:`tracedoc.facts.catalog.CATALOG`.
"""

from tracedoc.facts import (
    capture,
    communication,
    compute,
    host,
    idle,
    input,
    kernels,
    memory,
    phases,
    sharding,
    step,
)

__all__ = [
    "capture",
    "communication",
    "compute",
    "host",
    "idle",
    "input",
    "kernels",
    "memory",
    "phases",
    "sharding",
    "step",
]
