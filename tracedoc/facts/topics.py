"""Group the facts by topic, in reading order."""

from __future__ import annotations

from tracedoc.facts import per_rank, per_run
from tracedoc.facts.catalog import CATALOG

TOPICS = {
    "Step": (per_rank.step, per_rank.phase_times),
    "Communication": (
        per_rank.messages,
        per_run.exposed_communication,
        per_run.purposes,
        per_run.links,
        per_run.slow_transfers,
        per_run.topology,
        per_rank.overlap_slowdown,
    ),
    "Gradients": (
        per_run.gradients,
        per_run.gradient_format,
        per_rank.stream_order,
        per_run.compute_stream,
        per_rank.unused_search,
    ),
    "Sharding": (
        per_rank.sharded_units,
        per_rank.gather_order,
        per_run.gather_stalls,
        per_run.reduce_scatters,
        per_run.tiny_units,
        per_run.wrapping,
        per_rank.shard_hooks,
        per_rank.offload,
    ),
    "Stragglers": (
        per_run.straggler,
        per_run.causes,
        per_run.shared_cores,
        per_run.uneven,
        per_run.slow_gpus,
        per_rank.straggler,
    ),
    "Pipelines": (per_run.pipeline,),
    "Host and idle time": (
        per_rank.launch_pace,
        per_run.host_causes,
        per_run.script_places,
        per_rank.compilation,
        per_run.compile_limit,
    ),
    "Input": (per_rank.loader, per_run.loader_workers),
    "Memory and copies": (per_rank.memory, per_run.memory_room),
    "Kernels and arithmetic": (per_rank.kernel_mix, per_rank.attention, per_rank.arithmetic),
    "Job and capture": (
        per_run.strategy,
        per_run.fewer_gpus,
        per_rank.process,
        per_rank.capture,
        per_run.coverage,
        per_run.settings,
        per_run.step_log,
        per_run.slow_steps,
    ),
}
"""The modules of each topic."""

OTHER = "Other"

_TOPIC_OF_MODULE = {module.__name__: topic for topic, modules in TOPICS.items() for module in modules}


def topic_of(name: str) -> str:
    """Return the topic of a fact, ``OTHER`` for one that is not in the catalogue."""
    fact = CATALOG.get(name)
    return OTHER if fact is None else _TOPIC_OF_MODULE.get(fact.compute.__module__, OTHER)


def by_topic(names: list[str]) -> dict[str, list[str]]:
    """Return the names under their topics, both in reading order; topics without a name are left out."""
    modules = [module.__name__ for found in TOPICS.values() for module in found]
    place = {module: number for number, module in enumerate(modules)}
    ordered = sorted(names, key=lambda name: place.get(_module(name), len(modules)))
    grouped: dict[str, list[str]] = {}
    for name in ordered:
        grouped.setdefault(topic_of(name), []).append(name)
    return grouped


def _module(name: str) -> str:
    fact = CATALOG.get(name)
    return "" if fact is None else fact.compute.__module__
