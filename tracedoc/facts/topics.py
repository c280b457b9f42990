"""Group the facts by topic, in the order in which a reader asks for them."""

from __future__ import annotations

import tracedoc.facts as facts
from tracedoc.facts.catalog import CATALOG

TOPICS = {
    "Step": (facts.step, facts.phases),
    "Communication": (facts.communication, facts.links),
    "Gradients": (facts.gradients,),
    "Sharding": (facts.sharding, facts.wrapping, facts.shard_hooks, facts.offload),
    "Stragglers": (facts.straggler, facts.uneven, facts.slowness),
    "Host and idle time": (facts.host, facts.idle),
    "Input": (facts.input,),
    "Memory and copies": (facts.memory,),
    "Kernels and arithmetic": (facts.kernels, facts.compute),
    "Job and capture": (facts.strategy, facts.capture, facts.job, facts.runlong),
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
