"""The tables of a diagnosis as pandas frames, for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, fields

from tracedoc.diagnosis import BudgetParts, Diagnosis, RankReport, StepBudget
from tracedoc.errors import InputError
from tracedoc.judge.fixes import fitting_first
from tracedoc.ledger import LedgerCause
from tracedoc.tables import CollectiveRow, KernelRow

Row = dict[str, Any]


def frame(diagnosis: Diagnosis, table: str) -> Any:
    """Return one of :data:`TABLES` as a ``DataFrame``; an empty one keeps its columns.

    Raises :class:`InputError` for another name.
    """
    if table not in TABLES:
        raise InputError(f"a diagnosis has no table {table!r}", f"its tables: {', '.join(TABLES)}")
    import pandas

    columns, rows = TABLES[table](diagnosis)
    return pandas.DataFrame(rows, columns=columns)


def parquet(rows: Sequence[Struct]) -> bytes:
    """Structs of one kind as a Parquet file, a column for each field; raises where pyarrow is missing."""
    import pandas

    try:
        content: bytes = pandas.DataFrame(map(asdict, rows)).to_parquet(engine="pyarrow", index=False)
    except ImportError:
        raise InputError("Parquet needs pyarrow", 'pip install ".[parquet]"') from None
    return content


def _steps(diagnosis: Diagnosis) -> tuple[list[str], list[Row]]:
    names = _names(StepBudget, but=("index", "idle_causes_ms"))
    steps = [(report.rank, step) for report in diagnosis.ranks for step in report.steps]
    causes = _causes(step for _, step in steps)
    rows = [
        {"rank": rank, "step": step.index} | _values(step, names) | _idle(step, causes)
        for rank, step in steps
    ]
    return ["rank", "step", *names, *_idle_names(causes)], rows


def _ranks(diagnosis: Diagnosis) -> tuple[list[str], list[Row]]:
    names = _names(BudgetParts, but=("idle_causes_ms",))
    causes = _causes(report.budget for report in diagnosis.ranks if report.budget is not None)
    rows = [_rank(report, names, causes) for report in diagnosis.ranks]
    first = ["rank", "host", "device", "source", "complete_steps", "step"]
    return [*first, *names, *_idle_names(causes), "capture_ms"], rows


def _rank(report: RankReport, names: list[str], causes: list[str]) -> Row:
    budget = report.budget
    row = _values(report, ["rank", "host", "device", "source"])
    row["complete_steps"] = sum(step.complete for step in report.steps)
    row["step"] = budget.at.step if budget is not None and budget.at is not None else None
    if budget is not None:
        row |= _values(budget, names) | _idle(budget, causes)
    row["capture_ms"] = report.capture.span_ms if report.capture is not None else None
    return row


def _findings(diagnosis: Diagnosis) -> tuple[list[str], list[Row]]:
    names = ["rule_id", "severity", "confidence", "title", "message", "topic", "ranks", "steps"]
    gains = ["low_ms", "likely_ms", "high_ms", "basis"]
    rows = []
    for finding in diagnosis.findings:
        row = _values(finding, names)
        row |= {f"gain_{name}": getattr(finding.gain, name, None) for name in gains}
        for fix in fitting_first(finding.fixes, diagnosis.run)[:1]:
            row |= {"fix": fix.title, "change": fix.change}
        rows.append(row)
    return [*names, *(f"gain_{name}" for name in gains), "fix", "change"], rows


def _listed(kind: type, rows: Iterable[object]) -> tuple[list[str], list[Row]]:
    names = _names(kind)
    return names, [_values(row, names) for row in rows]


def _ledger(diagnosis: Diagnosis) -> tuple[list[str], list[Row]]:
    names = _names(LedgerCause, but=("alone_ms",))
    causes = diagnosis.ledger.causes if diagnosis.ledger is not None else ()
    alone = ("alone_low_ms", "alone_ms", "alone_high_ms")
    rows = [_values(one, names) | dict(zip(alone, one.alone_ms, strict=True)) for one in causes]
    return [*names, *alone], rows


TABLES: dict[str, Callable[[Diagnosis], tuple[list[str], list[Row]]]] = {
    "steps": _steps,
    "ranks": _ranks,
    "findings": _findings,
    "ledger": _ledger,
    "collectives": lambda diagnosis: _listed(CollectiveRow, diagnosis.detail.collectives),
    "kernels": lambda diagnosis: _listed(KernelRow, diagnosis.detail.kernels),
}
"""What :meth:`Diagnosis.to_frame` knows: each gives the names of its columns, and its rows."""


def _names(kind: type, *, but: tuple[str, ...] = ()) -> list[str]:
    return [one.name for one in fields(kind) if one.name not in but]


def _values(of: object, names: Iterable[str]) -> Row:
    return {name: getattr(of, name) for name in names}


def _causes(budgets: Iterable[BudgetParts]) -> list[str]:
    return sorted({cause for budget in budgets for cause in budget.idle_causes_ms})


def _idle_names(causes: list[str]) -> list[str]:
    return [f"idle_{cause}_ms" for cause in causes]


def _idle(budget: BudgetParts, causes: list[str]) -> Row:
    times = (budget.idle_causes_ms.get(cause, 0.0) for cause in causes)
    return dict(zip(_idle_names(causes), times, strict=True))
