"""Facts of the run, computed from the digests of all ranks."""

from tracedoc.facts.per_run import (
    code_places,
    coverage,
    exposed_communication,
    gather_stalls,
    gradients,
    host_causes,
    links,
    loader_workers,
    pipelines,
    settings,
    slow_gpus,
    step_log,
    straggler,
    strategy,
    uneven,
    wrapping,
)

__all__ = [
    "code_places",
    "coverage",
    "exposed_communication",
    "gather_stalls",
    "gradients",
    "host_causes",
    "links",
    "loader_workers",
    "pipelines",
    "settings",
    "slow_gpus",
    "step_log",
    "straggler",
    "strategy",
    "uneven",
    "wrapping",
]
