"""The step of each side whose parts are compared: that of a rank for which nobody waits."""

from __future__ import annotations

from tracedoc.diagnosis import Budget, Diagnosis, RankReport

_LEAST_COST = 0.1
"""A rank that costs the others this share of the step is one that they wait for."""


def compared_budget(diagnosis: Diagnosis) -> Budget | None:
    """Return the budget whose parts are compared; ``None`` where the run has none.

    That is the run's own, unless it is the step of the rank that all others wait for: there the wait shows as
    whatever made the rank late, and on every other rank as waiting. Then it is the lower median of those.
    """
    own = diagnosis.budget
    if own is None or own.at is None or own.at.rank != late_rank(diagnosis):
        return own
    others = [rank for rank in diagnosis.ranks if rank.rank != own.at.rank and rank.budget is not None]
    others.sort(key=_step_ms)
    return others[(len(others) - 1) // 2].budget if others else own


def late_rank(diagnosis: Diagnosis) -> int | None:
    """Return the rank that the others wait for longest, ``None`` where they hardly wait for any."""
    record = diagnosis.facts.get("straggler_cost_ms")
    if record is None or diagnosis.budget is None:
        return None
    costs = {
        rank: float(cost)
        for rank, cost in record.values.items()
        if isinstance(cost, int | float) and rank.isdecimal()
    }
    rank = max(costs, key=lambda one: costs[one], default="")
    return int(rank) if rank and costs[rank] >= _LEAST_COST * diagnosis.budget.step_ms else None


def _step_ms(rank: RankReport) -> float:
    return rank.budget.step_ms if rank.budget is not None else 0.0
