"""What is measured about each cause, in a folder each: ``rank*.py`` in the worker, the rest in the driver.

Nothing is registered: a fact is known once its module lies in a folder, and that folder is its topic.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module

from tracedoc.facts.catalog import CATALOG, Fact

READING_ORDER = (
    *("step", "communication", "links", "gradients", "sharding", "straggler"),
    *("pipeline", "host", "input", "memory", "compute", "capture"),
)
"""Topics as they are shown; any other follows."""

OTHER = "Other"


def load_rank_facts() -> Mapping[str, Fact]:
    """All facts of a rank, by name: what a worker measures."""
    for name in _modules():
        if name.rpartition(".")[2].startswith("rank"):
            import_module(name)
    return CATALOG


@cache
def load_facts() -> Mapping[str, Fact]:
    """All facts by name, in reading order."""
    place = {name: number for number, name in enumerate(_modules())}
    for name in place:
        import_module(name)
    ordered = sorted(CATALOG.values(), key=lambda fact: place.get(fact.compute.__module__, len(place)))
    CATALOG.clear()
    CATALOG.update((fact.name, fact) for fact in ordered)
    return CATALOG


def by_topic(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of facts under the titles of their topics, both in reading order; those of no topic last."""
    place = {name: number for number, name in enumerate(load_facts())}
    grouped: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: place.get(name, len(place))):
        grouped.setdefault(topic_of(name), []).append(name)
    return grouped


def topic_of(name: str) -> str:
    """The title of a fact's topic: what the docstring of its folder begins with."""
    module = CATALOG[name].compute.__module__ if name in CATALOG else ""
    if not module.startswith(f"{__name__}."):
        return OTHER
    folder = module.removeprefix(f"{__name__}.").partition(".")[0]
    doc = import_module(f"{__name__}.{folder}").__doc__ or folder.capitalize()
    return doc.partition(":")[0]


def _modules() -> Iterator[str]:
    """The modules of all topics in reading order, those of the worker first."""
    topics = [topic.name for topic in pkgutil.iter_modules(__path__)]
    topics.sort(key=lambda topic: READING_ORDER.index(topic) if topic in READING_ORDER else len(topics))
    for topic in topics:
        modules = [module.name for module in pkgutil.iter_modules([f"{__path__[0]}/{topic}"])]
        for module in sorted(modules, key=lambda name: (not name.startswith("rank"), name)):
            yield f"{__name__}.{topic}.{module}"
