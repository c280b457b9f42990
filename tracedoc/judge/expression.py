"""Parse, check and evaluate the conditions of rules: a closed, three-valued subset of Python expressions.

The text is parsed with :mod:`ast` and every node must be on an allow-list, so a condition can read facts
and parameters, compare and do arithmetic, and nothing else. Nothing is ever compiled or executed.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import add, eq, ge, gt, le, lt, mul, ne, sub, truediv

import msgspec

from tracedoc.diagnosis import Comparison
from tracedoc.errors import TracedocError, did_you_mean
from tracedoc.units import UNITS, Unit
from tracedoc.values import Scalar, Unknown, Value

MAX_LENGTH = 1000
"""Characters of one condition."""

MAX_DEPTH = 30
"""Nesting of one condition."""

FUNCTIONS = ("min", "max", "abs")

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}
_ORDER: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}
_EQUALITY: dict[type[ast.cmpop], Callable[[object, object], bool]] = {ast.Eq: eq, ast.NotEq: ne}

# A bare number has no unit of its own; 0 is the same in every unit.
_NUMBER = Unit("number")
_ZERO = Unit("zero")
_BOOL = UNITS["bool"]


class ExpressionError(TracedocError):
    """A condition is outside the language or its units disagree; ``column`` counts from 0."""

    def __init__(self, message: str, column: int = 0) -> None:
        super().__init__(message)
        self.column = column

    def __reduce__(self) -> tuple[type[ExpressionError], tuple[str, int]]:  # type: ignore[override]
        return type(self), (self.message, self.column)


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed condition; ``names`` are the facts and parameters it reads, in order of appearance."""

    source: str
    names: tuple[str, ...]
    tree: ast.expr = field(compare=False, repr=False)


class Result(msgspec.Struct, frozen=True):
    """What a condition came to, and every comparison in it, whether or not it decided."""

    value: Value
    comparisons: tuple[Comparison, ...]


@lru_cache(maxsize=1024)  # a rule is judged for many runs in one process
def parse(text: str) -> Expression:
    """The expression that ``text`` states; raise :class:`ExpressionError` for anything else.

    Line breaks count as spaces. ``#`` is refused: comments belong to the YAML around the condition.
    """
    source = text.replace("\r", " ").replace("\n", " ").strip()
    if not source:
        raise ExpressionError("the condition is empty")
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"the condition has {len(source)} characters; at most {MAX_LENGTH} are allowed")
    if "#" in source:
        raise ExpressionError("comments stand outside the condition", source.index("#"))
    try:
        with warnings.catch_warnings():
            # Python only warns about text such as "1if" or "\d"; here it is wrong.
            warnings.simplefilter("error")
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"not an expression: {error.msg}", max((error.offset or 1) - 1, 0)) from error
    except (ValueError, RecursionError, MemoryError, Warning) as error:
        raise ExpressionError("not an expression") from error
    _limit_depth(tree)
    names: dict[str, None] = {}
    _admit(tree, names)
    return Expression(source, tuple(names), tree)


def check(
    expression: Expression, units: Mapping[str, str], texts: Mapping[str, Collection[str]] | None = None
) -> Unit:
    """The unit of the whole expression; raise :class:`ExpressionError` where kinds or units disagree.

    ``units`` names the unit of each fact and parameter. Both sides of a comparison, of ``+`` and ``-``, and
    all arguments of ``min`` and ``max`` must have one unit. A bare number may meet only fractions, ratios
    and counts, except 0, which may meet any unit; it may multiply and divide anything. ``texts`` holds
    all values of each fact that is one of a few texts: it may be compared with no other text.
    """
    _check_texts(expression, texts or {})
    return _unit_of(expression.tree, units)


def evaluate(expression: Expression, values: Mapping[str, Value]) -> Result:
    """The value of the expression and each of its comparisons, by Kleene's three-valued logic.

    It never raises: a missing name, a division by zero or a value of the wrong kind is :class:`Unknown`.
    """
    comparisons: list[Comparison] = []
    value = _value_of(expression.tree, values, comparisons)
    if isinstance(expression.tree, ast.Name) and isinstance(value, bool | Unknown):
        comparisons.append(_stated(expression.tree, value))
    return Result(value, tuple(comparisons))


# -- the language


def _limit_depth(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ExpressionError(f"the condition is nested deeper than {MAX_DEPTH} levels")
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def _admit(node: ast.expr, names: dict[str, None]) -> None:
    children: Iterable[ast.expr]
    match node:
        case ast.BoolOp(values=values):
            children = values
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            children = (operand,)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            children = (left, right)
        case ast.Compare(left=left, ops=operators, comparators=rights) if all(
            type(operator) in _ORDER or type(operator) in _EQUALITY for operator in operators
        ):
            children = (left, *rights)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in FUNCTIONS:
            if (len(arguments) == 1) != (function == "abs") or not arguments:
                count = "one argument" if function == "abs" else "two or more arguments"
                raise ExpressionError(f"{function} takes {count}", node.col_offset)
            children = arguments
        case ast.Name(id=name):
            if name in FUNCTIONS:
                raise ExpressionError(f"{name} is a function: write {name}(...)", node.col_offset)
            names[name] = None
            return
        case ast.Constant(value=bool() | str()):
            return
        case ast.Constant(value=int() | float() as number):
            # Beyond 2**53 an integer has no exact float; 1e999 is infinite.
            if abs(number) > 2**53:
                raise ExpressionError("the number is too large", node.col_offset)
            return
        case _:
            raise ExpressionError(f"{ast.unparse(node)!r} is not part of the rule language", node.col_offset)
    for child in children:
        _admit(child, names)


def _check_texts(expression: Expression, texts: Mapping[str, Collection[str]]) -> None:
    compared = [node for node in ast.walk(expression.tree) if isinstance(node, ast.Compare)]
    for node in compared:
        for pair in pairwise((node.left, *node.comparators)):
            for side, other in (pair, pair[::-1]):
                match side, other:
                    case ast.Name(id=name), ast.Constant(value=str() as text) if name in texts:
                        if text not in texts[name]:
                            hint = did_you_mean(text, texts[name])
                            raise ExpressionError(f"{name} is never {text!r}{hint}", other.col_offset)


# -- units


def _unit_of(node: ast.expr, units: Mapping[str, str]) -> Unit:
    # Each node is visited once: a second visit at every level would take 2**depth.
    match node:
        case ast.BoolOp(values=operands):
            for operand in operands:
                _require(operand, _BOOL, units)
            return _BOOL
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _require(operand, _BOOL, units)
        case ast.UnaryOp(operand=operand):
            return _require(operand, _NUMBER, units)
        case ast.BinOp(left=left, op=operator, right=right):
            one, other = _require(left, _NUMBER, units), _require(right, _NUMBER, units)
            if isinstance(operator, ast.Mult | ast.Div):
                return _product(one, other, 1 if isinstance(operator, ast.Mult) else -1)
            purpose = "added" if isinstance(operator, ast.Add) else "subtracted"
            return _common_unit([(left, one), (right, other)], purpose)
        case ast.Compare():
            return _comparison_unit(node, units)
        case ast.Call(func=ast.Name(id=function), args=arguments):
            measured = [(argument, _require(argument, _NUMBER, units)) for argument in arguments]
            return _common_unit(measured, f"arguments of one {function}")
        case ast.Name(id=name):
            if name not in units:
                raise ExpressionError(f"unknown name {name!r}{did_you_mean(name, units)}", node.col_offset)
            return UNITS[units[name]]
        case ast.Constant(value=bool()):
            return _BOOL
        case ast.Constant(value=str()):
            return UNITS["text"]
        case ast.Constant(value=value):
            return _ZERO if value == 0 else _NUMBER
        case _:
            raise AssertionError(f"parse admitted {type(node).__name__}")


def _comparison_unit(node: ast.Compare, units: Mapping[str, str]) -> Unit:
    sides = [(side, _unit_of(side, units)) for side in (node.left, *node.comparators)]
    for position, relation in enumerate(node.ops):
        unit = _common_unit(sides[position : position + 2], "compared")
        if unit.kind != "number" and type(relation) in _ORDER:
            word = "text" if unit.kind == "text" else "a truth value"
            raise ExpressionError(f"{word} has no order: use == or !=", node.col_offset)
    return _BOOL


def _require(node: ast.expr, like: Unit, units: Mapping[str, str]) -> Unit:
    """The unit of an operand, which must be of one kind with another."""
    unit = _unit_of(node, units)
    if unit.kind != like.kind:
        wanted = "a number" if like is _NUMBER else "a truth value: compare it with something"
        raise ExpressionError(f"{ast.unparse(node)!r} is {_describe(unit)}, not {wanted}", node.col_offset)
    return unit


def _common_unit(operands: list[tuple[ast.expr, Unit]], purpose: str) -> Unit:
    first, common = operands[0]
    for node, unit in operands[1:]:
        agreed = _agree(common, unit)
        if agreed is None:
            one, other = ast.unparse(first), ast.unparse(node)
            message = f"{one!r} is {_describe(common)} and {other!r} is {_describe(unit)}: "
            if _NUMBER in (common, unit) and common.kind == unit.kind:
                message += "give the number a unit by making it a param"
            else:
                message += f"they cannot be {purpose}"
            raise ExpressionError(message, node.col_offset)
        common = agreed
    return common


def _agree(one: Unit, other: Unit) -> Unit | None:
    """The unit of ``one + other``, or ``None`` if they cannot be added."""
    if one == other or (one.kind == other.kind and other == _ZERO):
        return one
    if one.kind != other.kind:
        return None
    if one == _ZERO:
        return other
    if _NUMBER in (one, other):
        named = other if one == _NUMBER else one
        return named if _powers(named) in (_powers(UNITS["ratio"]), _powers(UNITS["count"])) else None
    if _powers(one) != _powers(other):
        return None
    return one if _powers(one) != _powers(UNITS["ratio"]) else UNITS["ratio"]


def _powers(unit: Unit) -> tuple[int, int, int, int]:
    return unit.time, unit.data, unit.items, unit.exponent


def _product(one: Unit, other: Unit, sign: int) -> Unit:
    bare = (_NUMBER, _ZERO)
    if one in bare and other in bare:
        return _NUMBER
    if other in bare:
        return one
    if one in bare and sign > 0:
        return other
    time, data, items, exponent = (a + sign * b for a, b in zip(_powers(one), _powers(other), strict=True))
    for unit in UNITS.values():
        if (
            unit.kind == "number"
            and unit.name != "fraction"
            and _powers(unit) == (time, data, items, exponent)
        ):
            return unit
    return Unit(_compound_name(time, data, items, exponent), time, data, items, exponent=exponent)


def _compound_name(time: int, data: int, items: int, exponent: int) -> str:
    powers = {"ms": time, "bytes": data, "count": items}
    above = [name if power == 1 else f"{name}^{power}" for name, power in powers.items() if power > 0]
    below = [name if power == -1 else f"{name}^{-power}" for name, power in powers.items() if power < 0]
    name = "/".join(["*".join(above) or "1", *below])
    factor = exponent - UNITS["ms"].exponent * time
    return f"1e{factor} {name}" if factor else name


def _describe(unit: Unit) -> str:
    if unit.kind == "text":
        return "text"
    if unit.kind == "bool":
        return "a truth value"
    if unit in (_NUMBER, _ZERO):
        return "a bare number"
    return f"in {unit.name}"


# -- values


def _value_of(node: ast.expr, values: Mapping[str, Value], comparisons: list[Comparison]) -> Value:
    # Names are most of what is asked for, once for each of hundreds of ranks.
    if type(node) is ast.Name:
        value = values.get(node.id)
        if value is None:
            return Unknown(f"{node.id} was not measured")
        if type(value) is float and not math.isfinite(value):
            return Unknown(f"{node.id} is not finite")
        return value
    match node:
        case ast.BoolOp(op=operator, values=operands):
            decisive = isinstance(operator, ast.Or)
            return _kleene([_truth_of(operand, values, comparisons) for operand in operands], decisive)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _truth_of(operand, values, comparisons)
            return truth if isinstance(truth, Unknown) else not truth
        case ast.UnaryOp(operand=operand):
            number = _number(operand, _value_of(operand, values, comparisons))
            return number if isinstance(number, Unknown) else -number
        case ast.BinOp(left=left, op=operator, right=right):
            one = _number(left, _value_of(left, values, comparisons))
            other = _number(right, _value_of(right, values, comparisons))
            return _calculate(node, type(operator), one, other)
        case ast.Compare():
            return _compare(node, values, comparisons)
        case ast.Call(func=ast.Name(id=function), args=arguments):
            numbers = [_number(argument, _value_of(argument, values, comparisons)) for argument in arguments]
            known = [number for number in numbers if not isinstance(number, Unknown)]
            if len(known) < len(numbers):
                return _join_unknown(numbers)
            return abs(known[0]) if function == "abs" else min(known) if function == "min" else max(known)
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case _:
            raise AssertionError(f"parse admitted {type(node).__name__}")


def _truth_of(node: ast.expr, values: Mapping[str, Value], comparisons: list[Comparison]) -> bool | Unknown:
    value = _value_of(node, values, comparisons)
    if not isinstance(value, bool | Unknown):
        value = Unknown(f"{ast.unparse(node)} is not a truth value")
    if isinstance(node, ast.Name):
        comparisons.append(_stated(node, value))
    return value


def _stated(node: ast.Name, value: bool | Unknown) -> Comparison:
    """A fact that is itself a truth value as the comparison with True that it stands for."""
    if isinstance(value, Unknown):
        return Comparison(node.id, None, True, None, value.reason)
    return Comparison(node.id, value, True, value)


def _kleene(truths: list[bool | Unknown], decisive: bool) -> bool | Unknown:
    """``decisive`` if one operand has it, else the unknown ones if there are any."""
    if any(truth is decisive for truth in truths):
        return decisive
    if any(isinstance(truth, Unknown) for truth in truths):
        return _join_unknown(truths)
    return not decisive


def _number(node: ast.expr, value: Value) -> float | Unknown:
    if isinstance(value, Unknown):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Unknown(f"{ast.unparse(node)} is {type(value).__name__}, not a number")
    return value


def _calculate(
    node: ast.expr, operator: type[ast.operator], one: float | Unknown, other: float | Unknown
) -> float | Unknown:
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return _join_unknown((one, other))
    if operator is ast.Div and other == 0:
        return Unknown(f"division by zero: {ast.unparse(node)}")
    try:
        result = _ARITHMETIC[operator](float(one), float(other))
    except OverflowError:
        result = math.inf
    return result if math.isfinite(result) else Unknown(f"too large: {ast.unparse(node)}")


def _join_unknown(values: Iterable[Value]) -> Unknown:
    """All that is unknown among ``values`` as one, each reason once."""
    reasons = [value.reason.split("; ") for value in values if isinstance(value, Unknown)]
    return Unknown("; ".join(dict.fromkeys(reason for joined in reasons for reason in joined)))


def _compare(node: ast.Compare, values: Mapping[str, Value], comparisons: list[Comparison]) -> bool | Unknown:
    sides = [node.left, *node.comparators]
    # Each side of a chain is evaluated once, so its own comparisons are listed once.
    measured = [_value_of(side, values, comparisons) for side in sides]
    links: list[bool | Unknown] = []
    for position, (operator, text) in enumerate(zip(node.ops, _texts_of_links(node), strict=True)):
        left, right = measured[position], measured[position + 1]
        holds = _relate(text, operator, left, right)
        known = [None if isinstance(one, Unknown) else one for one in (left, right)]
        sure, reason = (None, holds.reason) if isinstance(holds, Unknown) else (holds, "")
        comparisons.append(Comparison(text, known[0], known[1], sure, reason))
        links.append(holds)
    return _kleene(links, decisive=False)


@lru_cache(maxsize=1024)
def _texts_of_links(node: ast.Compare) -> tuple[str, ...]:
    """Each link of a chain as text; a condition is evaluated for hundreds of ranks."""
    sides = [node.left, *node.comparators]
    return tuple(
        ast.unparse(ast.Compare(sides[position], [operator], [sides[position + 1]]))
        for position, operator in enumerate(node.ops)
    )


def _relate(text: str, operator: ast.cmpop, left: Value, right: Value) -> bool | Unknown:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return _join_unknown((left, right))
    if _kind(left) != _kind(right):
        return Unknown(f"{text}: the two sides are not of one kind")
    if type(operator) in _EQUALITY:
        return _EQUALITY[type(operator)](left, right)
    if isinstance(left, str | bool) or isinstance(right, str | bool):
        return Unknown(f"{text}: only numbers have an order")
    return _ORDER[type(operator)](left, right)


def _kind(value: Scalar) -> str:
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
