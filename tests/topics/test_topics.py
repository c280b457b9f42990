"""Hold that facts are found, grouped by topic, and read no fact that they do not declare."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tracedoc.facts.catalog import CATALOG, FactDef, digest_fact
from tracedoc.topics import OTHER, by_topic, check_declared, facts_read, load_facts, topic_of
from tracedoc.topics.gradients import run as gradients
from tracedoc.topics.gradients.run import gradient_bytes, gradient_exposed_ms, repeated_reduction_ms

PACKAGE = Path(tracedoc.__file__).parent
OF_RESULTS = ("report", "comparison", "cli")
"""Rooms that read facts in a result, which may be an old file: by name."""


def test_every_fact_has_a_topic() -> None:
    assert [name for name in load_facts() if topic_of(name) == OTHER] == []


def test_facts_are_grouped_in_reading_order() -> None:
    names = ["mfu_frac", "comm_ms", "of_a_pack", "exposed_wait_ms", "forward_compute_ms", "step_ms"]
    assert by_topic(names) == {
        "Step": ["step_ms", "comm_ms", "forward_compute_ms"],
        "Communication": ["exposed_wait_ms"],
        "Kernels and arithmetic": ["mfu_frac"],
        OTHER: ["of_a_pack"],
    }
    assert list(by_topic(load_facts()))[:3] == ["Step", "Communication", "Links"]


def test_every_module_of_a_topic_is_found() -> None:
    modules = {fact.compute.__module__ for fact in load_facts().values()}
    files = (path for path in (PACKAGE / "topics").glob("*/*.py") if path.stem != "__init__")
    assert modules == {f"tracedoc.topics.{path.parent.name}.{path.stem}" for path in files}


@pytest.fixture
def defined() -> Iterator[FactDef]:
    """A fact of the module about gradients that reads another one and does not declare it."""
    text = (
        "@digest_fact(unit='ms')\n"
        "def undeclared_ms(run, digest, step):\n"
        "    'Twice the exposed time of gradients.'\n"
        "    return _twice(run, digest, step)\n"
        "def _twice(run, digest, step):\n"
        "    return 2 * gradient_exposed_ms(run, digest, step).total_ns / 1e6\n"
    )
    names = {**vars(gradients), "digest_fact": digest_fact}
    exec(compile(text, "undeclared.py", "exec"), names)
    yield names["undeclared_ms"]
    del CATALOG["undeclared_ms"]


def test_a_fact_that_reads_another_has_to_declare_it(defined: FactDef) -> None:
    with pytest.raises(TypeError, match="fact undeclared_ms reads undeclared gradient_exposed_ms"):
        check_declared([defined])
    check_declared([replace(defined, uses=(gradient_exposed_ms,))])


def test_a_fact_declares_no_other_that_it_does_not_read() -> None:
    assert gradient_exposed_ms in facts_read(repeated_reduction_ms.compute)
    uses = (*repeated_reduction_ms.uses, gradient_bytes)
    with pytest.raises(TypeError, match="fact repeated_reduction_ms needs unread gradient_bytes"):
        check_declared([replace(repeated_reduction_ms, uses=uses)])


def _looked_up(path: Path) -> Iterator[tuple[int, str | None]]:
    """Where a module looks a fact up, and the name where it is written there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=ast.Attribute(attr="facts"), attr="get"), args=[key, *_])
                | ast.Subscript(value=ast.Attribute(attr="facts"), slice=key)
            ):
                yield node.lineno, key.value if isinstance(key, ast.Constant) else None


def test_only_results_are_asked_for_facts_by_name() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        for line, name in _looked_up(path):
            if name is not None:
                assert room in OF_RESULTS, f"{path}:{line}: import the fact {name}"
                assert name in load_facts(), f"{path}:{line}: no fact is called {name}"
