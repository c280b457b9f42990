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


def check_declared(facts: Iterable[Fact]) -> None:
    """Raise :class:`TypeError` where a fact reads one that its ``needs`` do not name, or names one unread."""
    for fact in facts:
        named = list(_facts_named(fact.spans or fact.compute))
        undeclared = {one.name for one, code in named if one not in fact.uses and _is_global(one.name, code)}
        unread = {one.name for one in fact.uses}.difference(one.name for one, _ in named)
        if undeclared or unread:
            kind = "reads undeclared" if undeclared else "needs unread"
            raise TypeError(f"fact {fact.name} {kind} {', '.join(sorted(undeclared or unread))}")


def _facts_named(function: Callable[..., Any]) -> Iterator[tuple[Fact, CodeType]]:
    """The facts that a function names, itself or in functions of the topics that it calls, and where."""
    waiting, seen = [inspect.unwrap(function)], set[Callable[..., Any]]()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            facts, called = _named_in(one)
            yield from facts
            waiting += called


@cache
def _named_in(
    function: Callable[..., Any],
) -> tuple[list[tuple[Fact, CodeType]], list[Callable[..., Any]]]:
    """The facts that a function names, and where; and the functions of the topics that it calls."""
    facts, called = [], []
    if isinstance(function, FunctionType):
        for code in _codes(function.__code__):
            for value in map(function.__globals__.get, code.co_names):
                if isinstance(value, Fact):
                    facts.append((value, code))
                elif isinstance(value, FunctionType) and value.__module__.startswith(__name__):
                    called.append(inspect.unwrap(value))
    return facts, called


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _is_global(name: str, code: CodeType) -> bool:
    """Whether a name in a function is a global: it may be an attribute."""
    return any(one.opname == "LOAD_GLOBAL" and one.argval == name for one in dis.get_instructions(code))
