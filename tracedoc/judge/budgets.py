"""Judge the performance budgets that a project set itself, over facts and what causes cost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tracedoc.diagnosis import BudgetCheck
from tracedoc.errors import InputError, did_you_mean
from tracedoc.facts.catalog import Fact, FactTable
from tracedoc.judge.expression import Expression, ExpressionError, check, evaluate, parse
from tracedoc.ledger import CAUSE_IDS, Ledger
from tracedoc.units import UNITS
from tracedoc.values import Unknown, Value

EXAMPLE = "exposed_comm_frac <= 0.15, or as cause.link.share <= 0.1"

CAUSE = re.compile(r"\bcause\.(?P<id>[a-z_.]+)\.(?P<part>share|alone_ms)\b")
"""What a cause of the ledger, or a family of them, costs: a share of the step, or what is gained alone."""

_UNIT_OF_PART = {"share": "fraction", "alone_ms": "ms"}


def parse_budgets(texts: Iterable[str], facts: Mapping[str, Fact]) -> tuple[Expression, ...]:
    """The budgets that ``texts`` state, as ``step_ms <= 420`` or ``cause.link.share <= 0.1``.

    A budget compares one expression over facts and causes with one number, which has the expression's unit.
    The expression is in the language of the rules' conditions.

    Raises :class:`InputError` for anything else, and for a fact or cause that does not exist.
    """
    return tuple(_parsed(text, {name: fact.unit for name, fact in facts.items()}) for text in texts)


def judge_budgets(
    budgets: Sequence[Expression], facts: FactTable, ledger: Ledger | None
) -> tuple[BudgetCheck, ...]:
    """Each budget with its outcome. One whose facts are unknown is neither met nor broken.

    A fact that is measured for each rank counts with the value of the rank that stands for the run. Of a
    family of causes the shares count together; alone, the one that gives most. Without a ledger both are
    unknown.
    """
    values: dict[str, Value] = {name: one.value for name, one in facts.items()}
    units = {name: one.definition.unit for name, one in facts.items()}
    for named in (one for budget in budgets for one in CAUSE.finditer(budget.source)):
        values[_name(named)] = _cost(named["id"], named["part"], ledger)
        units[_name(named)] = _UNIT_OF_PART[named["part"]]
    return tuple(_judged(budget, values, units) for budget in budgets)


def _parsed(text: str, units: dict[str, str]) -> Expression:
    for named in CAUSE.finditer(text):
        cause, units[_name(named)] = named["id"], _UNIT_OF_PART[named["part"]]
        if not any(_is_of(cause, known) for known in CAUSE_IDS):
            raise InputError(
                f"the budget {text!r} names no cause: {cause}{did_you_mean(cause, CAUSE_IDS)}",
                f"write it as {EXAMPLE}",
            )
    try:
        budget = replace(parse(CAUSE.sub(_name, text)), source=text.strip())
        compared, _ = _sides(budget)
        unit = check(compared, units)
    except ExpressionError as error:
        raise InputError(
            f"the budget {text!r} cannot be read: {error.message}", f"write it as {EXAMPLE}"
        ) from error
    if unit.kind != "number" or not budget.names:
        raise InputError(f"the budget {text!r} compares no measured number", f"write it as {EXAMPLE}")
    return budget


def _name(named: re.Match[str]) -> str:
    """What stands for a cause in an expression, whose names have no dots."""
    return named[0].replace(".", "__")


def _is_of(cause: str, name: str) -> bool:
    return cause == name or cause.startswith(f"{name}.")


def _cost(name: str, part: str, ledger: Ledger | None) -> Value:
    """A cause that the ledger does not list costs nothing."""
    if ledger is None or ledger.step_ms <= 0:
        reason = ledger.reason if ledger is not None else ""
        return Unknown(reason or "what each cause costs is not known of this run")
    causes = [one for one in ledger.causes if _is_of(one.id, name)]
    if part == "share":
        return sum(one.share_ms for one in causes) / ledger.step_ms
    return max((one.alone_ms[1] for one in causes), default=0.0)


def _sides(budget: Expression) -> tuple[Expression, float]:
    """The measured side of a budget, and the number that it is compared with."""
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
