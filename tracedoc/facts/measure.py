"""Measure every fact of the catalogue: per rank in the worker, then over the digests of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tracedoc.facts.catalog import FactTable


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether the capture holds what a fact or rule needs.

    ``state`` is "present", "by_nature" (absent because the run has none: one GPU, a CPU run) or
    "not_captured" (the run may have it, this capture does not).
    """

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured, and how far it can be trusted. The only input of the rule engine.

    ``available`` has one entry for each of :data:`tracedoc.facts.catalog.NEEDS`. ``confidence`` is
    "high", "medium" or "low". ``ranks`` and ``steps`` are those judged.
    """

    facts: FactTable
    available: Mapping[str, Availability]
    confidence: str
    is_cpu: bool
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
