"""Hold that facts are found, grouped by topic, and read no fact that they do not declare."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tests.topics.declared import check_declared
from tracedoc.comparison.differences import COUNTS, PLACES, TEXTS
from tracedoc.facts.catalog import CATALOG, Fact, digest_fact
from tracedoc.topics import OTHER, by_topic, load_facts, topic_of
from tracedoc.topics.gradients import run as gradients
from tracedoc.topics.gradients.run import fp32_reduction_saving_ms, gradient_bytes, gradient_exposed_ms

PACKAGE = Path(tracedoc.__file__).parent
OF_RESULTS = ("report", "comparison", "cli")
"""Rooms that read facts in a result, which may be an old file: by name."""


def test_every_fact_has_a_topic() -> None:
    assert [name for name in load_facts() if topic_of(name) == OTHER] == []


def test_facts_are_grouped_in_reading_order() -> None:
    names = ["mfu_frac", "comm_ms", "of_a_pack", "exposed_wait_ms", "recompute_ms", "step_ms"]
    assert by_topic(names) == {
        "Step": ["step_ms", "comm_ms", "recompute_ms"],
        "Communication": ["exposed_wait_ms"],
        "Kernels and arithmetic": ["mfu_frac"],
        OTHER: ["of_a_pack"],
    }
    assert list(by_topic(load_facts()))[:3] == ["Step", "Communication", "Links"]


def test_every_module_of_a_topic_is_found() -> None:
    with_facts = {fact.compute.__module__ for fact in load_facts().values()}
    for path in (PACKAGE / "topics").glob("*/*.py"):
        if re.search(r"^@(rank|digest|manifest|run)_fact", path.read_text(encoding="utf-8"), re.M):
            assert f"tracedoc.topics.{path.parent.name}.{path.stem}" in with_facts


@pytest.fixture
def defined() -> Iterator[Fact]:
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


def test_facts_declare_what_they_read() -> None:
    check_declared(load_facts().values())


def test_a_fact_that_reads_another_has_to_declare_it(defined: Fact) -> None:
    with pytest.raises(TypeError, match="fact undeclared_ms reads undeclared gradient_exposed_ms"):
        check_declared([defined])
    check_declared([replace(defined, uses=(gradient_exposed_ms,))])


def test_a_fact_declares_no_other_that_it_does_not_read() -> None:
    uses = (*fp32_reduction_saving_ms.uses, gradient_bytes)
    with pytest.raises(TypeError, match="fact fp32_reduction_saving_ms needs unread gradient_bytes"):
        check_declared([replace(fp32_reduction_saving_ms, uses=uses)])


def _looked_up(tree: ast.AST) -> Iterator[ast.expr]:
    """What is looked up in a table of facts."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=ast.Attribute(attr="facts"), attr="get"), args=[key, *_])
                | ast.Subscript(value=ast.Attribute(attr="facts"), slice=key)
            ):
                yield key


def test_only_results_are_asked_for_facts_by_name() -> None:
    named = {
        f"{path.relative_to(PACKAGE)}:{key.lineno}: {key.value}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in OF_RESULTS
        for key in _looked_up(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(key, ast.Constant)
    }
    assert named == set()


def test_what_results_are_asked_for_is_a_fact() -> None:
    """By name, or through a function that takes the name."""
    paths = [path for room in OF_RESULTS for path in (PACKAGE / room).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    takes = {
        (function.name, place)
        for function in functions
        for key in _looked_up(function)
        for place, argument in enumerate(function.args.args)
        if isinstance(key, ast.Name) and key.id == argument.arg
    }
    asked = [key for tree in trees for key in _looked_up(tree)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asked += [key for place, key in enumerate(node.args) if (node.func.id, place) in takes]
    names = {key.value for key in asked if isinstance(key, ast.Constant)} | {*COUNTS, *TEXTS, *PLACES}
    assert len(names) > 20
    assert sorted(names - set(load_facts())) == []
