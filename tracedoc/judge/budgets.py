"""Judge the performance budgets that a project set itself: what a fact must at least or at most be."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from tracedoc.diagnosis import BudgetCheck
from tracedoc.errors import InputError
from tracedoc.facts.catalog import FactDef, FactTable
from tracedoc.judge.expression import Expression, ExpressionError, check, evaluate, parse
from tracedoc.units import UNITS
from tracedoc.values import Unknown, Value

EXAMPLE = "exposed_comm_frac <= 0.15"


def parse_budgets(texts: Iterable[str], facts: Mapping[str, FactDef]) -> tuple[Expression, ...]:
    """Return the budgets that ``texts`` state, as ``exposed_comm_frac <= 0.15`` or ``step_ms <= 420``.

    A budget compares one expression over facts with one number, which has the expression's unit. The
    expression is in the language of the rules' conditions.

    Raises :class:`InputError` for anything else, and for a fact that does not exist.
    """
    units = {name: fact.unit for name, fact in facts.items()}
    return tuple(_parsed(text, units) for text in texts)


def judge_budgets(budgets: Sequence[Expression], facts: FactTable) -> tuple[BudgetCheck, ...]:
    """Return what each budget came to. One whose facts are unknown is neither met nor broken.

    A fact that is measured for each rank counts with the value of the rank that stands for the run.
    """
    values: dict[str, Value] = {name: one.value for name, one in facts.items()}
    units = {name: one.definition.unit for name, one in facts.items()}
    return tuple(_judged(budget, values, units) for budget in budgets)


def _parsed(text: str, units: Mapping[str, str]) -> Expression:
    try:
        budget = parse(text)
        compared, _ = _sides(budget)
        unit = check(compared, units)
    except ExpressionError as error:
        raise InputError(
            f"the budget {text!r} cannot be read: {error.message}", f"write it as {EXAMPLE}"
        ) from error
    if unit.kind != "number" or not budget.names:
        raise InputError(f"the budget {text!r} compares no measured number", f"write it as {EXAMPLE}")
    return budget


def _sides(budget: Expression) -> tuple[Expression, float]:
    """Return what is measured and the number that it is compared with."""
    match budget.tree:
        case ast.Compare(
            left=left,
            ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()],
            comparators=[ast.Constant(value=int() | float() as number)],
        ) if not isinstance(number, bool):
            return Expression(ast.unparse(left), budget.names, left), float(number)
    raise ExpressionError("it is not a fact, one of <, <=, >, >=, and a number")


def _judged(budget: Expression, values: Mapping[str, Value], units: Mapping[str, str]) -> BudgetCheck:
    compared, number = _sides(budget)
    unit = check(compared, units).name
    value = evaluate(compared, values).value
    met = evaluate(budget, values).value
    known_unit = unit if unit in UNITS else ""
    if isinstance(value, Unknown) or isinstance(met, Unknown) or isinstance(value, str | bool):
        reason = next((one.reason for one in (value, met) if isinstance(one, Unknown)), "")
        return BudgetCheck(budget.source, "unknown", number, known_unit, None, reason)
    return BudgetCheck(budget.source, "met" if met else "broken", number, known_unit, float(value))
