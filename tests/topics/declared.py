"""Hold what facts declare to need against the facts that their functions read."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from tracedoc.facts.catalog import Fact


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
                elif isinstance(value, FunctionType) and value.__module__.startswith("tracedoc.topics."):
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
