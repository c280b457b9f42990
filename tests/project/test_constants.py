"""Hold that a constant's name stands for one value, and that what tells waits stands in one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tracedoc

PACKAGE = Path(tracedoc.__file__).parent


def constants(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the names of a module's constants that are numbers, or tuples of numbers, with their values."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            else:
                pairs = [(target, value)]
            for name, one in pairs:
                if isinstance(name, ast.Name) and name.id.isupper() and one is not None:
                    number = _number(one)
                    if number is not None:
                        yield name.id, number


def _number(node: ast.expr) -> object:
    """The number, or tuple of numbers, that an expression of literals gives; ``None`` for anything else."""
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.operator, ast.unaryop, ast.expr_context)
    if not all(isinstance(one, allowed) for one in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "constant", "eval"))  # literals alone
    parts = value if isinstance(value, tuple) else (value,)
    return value if parts and all(type(part) in (int, float) for part in parts) else None


def test_the_name_of_a_constant_stands_for_one_value() -> None:
    """Whether it is private or not."""
    values: dict[str, dict[object, str]] = defaultdict(dict)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, value in constants(path):
            values[name.lstrip("_")].setdefault(value, str(path.relative_to(PACKAGE)))
    several = {name: places for name, places in values.items() if len(places) > 1}
    assert several == {}


def test_what_tells_waits_stands_in_one_place() -> None:
    lags = {name for name, _ in constants(PACKAGE / "timeline" / "lags.py")}
    assert "RELEASE_NS" in lags
    again = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name, _ in constants(path)
        if name in lags and path.name != "lags.py"
    }
    assert again == set()
