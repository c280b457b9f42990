"""What is measured about each cause, in a folder each: ``rank*.py`` in the worker, the rest in the driver.

Nothing is registered: a fact is known once its module lies in a folder, and that folder is its topic.
"""

from __future__ import annotations

import dis
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from tracedoc.facts.catalog import CATALOG, FactDef

READING_ORDER = (
    *("step", "communication", "links", "gradients", "sharding", "straggler"),
    *("pipeline", "host", "input", "memory", "compute", "capture"),
)
"""Topics as they are shown; any other follows."""

OTHER = "Other"


def load_rank_facts() -> Mapping[str, FactDef]:
    """All facts of a rank, by name: what a worker measures."""
    for name in _modules():
        if name.rpartition(".")[2].startswith("rank"):
            import_module(name)
    return CATALOG


@cache
def load_facts() -> Mapping[str, FactDef]:
    """All facts by name, in reading order; what they declare is checked."""
    place = {name: number for number, name in enumerate(_modules())}
    for name in place:
        import_module(name)
    check_declared(CATALOG.values())
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


# -- what facts declare


def check_declared(facts: Iterable[FactDef]) -> None:
    """Raise :class:`TypeError` where a fact reads one that its ``needs`` do not name, or names one unread."""
    for fact in facts:
        read = facts_read(fact.spans or fact.compute)
        for kind, wrong in (
            ("reads undeclared", read.difference(fact.uses)),
            ("needs unread", set(fact.uses) - read),
        ):
            if wrong:
                raise TypeError(f"fact {fact.name} {kind} {', '.join(sorted(one.name for one in wrong))}")


def facts_read(function: Callable[..., Any]) -> set[FactDef]:
    """The facts that a function reads, itself or in functions of the topics that it calls."""
    found: set[FactDef] = set()
    waiting, seen = [function], set[FunctionType]()
    while waiting:
        one = inspect.unwrap(waiting.pop())
        if not isinstance(one, FunctionType) or one in seen or not one.__module__.startswith(__name__):
            continue
        seen.add(one)
        for code in _codes(one.__code__):
            for name in code.co_names:
                value = one.__globals__.get(name)
                if isinstance(value, FactDef):
                    found |= {value} if _reads(code, name) else set()
                elif callable(value):
                    waiting.append(value)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _reads(code: CodeType, name: str) -> bool:
    """Whether a name among those of a function is a global: it may be an attribute."""
    return any(one.opname == "LOAD_GLOBAL" and one.argval == name for one in dis.get_instructions(code))
