"""What replaying a step gives: its critical path, and the step after changes, as results to show and keep."""

from __future__ import annotations

import msgspec

from tracedoc.ledger import Ledger, Range

CPU_RUNS_DIFFER = 0.10
"""Steps of two runs of a job on CPUs, which share their cores with everything else, differ by this share."""


def as_runs_differ(gain_ms: Range, step_ms: float) -> Range:
    """A gain on CPUs of a step of ``step_ms``: as unsure as two runs, by what it takes or leaves."""
    low, likely, high = gain_ms
    spread = CPU_RUNS_DIFFER * max(min(likely, step_ms - likely), 0.0)
    return low - spread, likely, max(min(high + spread, step_ms), high)


LEAST_SHARE = 0.01
"""A gain below this share of the step is within the spread of any measurement."""


SAME_SAMPLES = " for the same samples"
"""Behind the step of a change of the batch."""


class Predicted(msgspec.Struct, frozen=True, tag_field="state", tag="predicted"):
    """The step after a change, and what it saves, as ``(low, likely, high)`` in milliseconds.

    ``change`` is what was replayed, as ``tracedoc whatif`` takes it. ``then_limited_by`` is the resource with
    the largest share of the critical path after it. A change that does more work a step is counted for as
    much work as today.
    """

    change: str
    step_ms: Range
    gain_ms: Range
    then_limited_by: str
    confidence: str
    assumptions: tuple[str, ...] = ()

    @property
    def before_ms(self) -> float:
        """Today's step, of which the likely gain is a part."""
        return self.step_ms[1] + self.gain_ms[1]


class NotPredicted(msgspec.Struct, frozen=True, tag_field="state", tag="not-predicted"):
    """Why a change is not predicted for this run."""

    change: str
    reason: str


class PathPiece(msgspec.Struct, frozen=True):
    """One kind of work on the critical path: ``ms`` of it on ``rank``, and what it is where that is known."""

    resource: str
    rank: int
    ms: float
    what: str = ""


class ReplayReport(msgspec.Struct, frozen=True):
    """How the analysed step was replayed.

    ``state`` is "used", or "refused" for ``reason``; then the rest is empty. ``step_ms`` is the measured
    step, ``replayed_ms`` the replayed one. ``path`` holds the shares of the critical path by resource
    ("compute", "communication", "copy", "host", "input", "sync", "allocator"), ``path_ranks`` by rank, and
    ``longest`` its longest kinds of work. ``notes`` list what was assumed. ``more_ranks`` is the step on
    twice and four times as many ranks, each with the work of today's.
    """

    state: str
    reason: str = ""
    step: int | None = None
    step_ms: float | None = None
    replayed_ms: float | None = None
    model_error_frac: float | None = None
    unexplained_frac: float | None = None
    confidence: str = ""
    path: dict[str, float] = msgspec.field(default_factory=dict)
    path_ranks: dict[str, float] = msgspec.field(default_factory=dict)
    longest: tuple[PathPiece, ...] = ()
    notes: tuple[str, ...] = ()
    more_ranks: tuple[Predicted | NotPredicted, ...] = ()


class PlanStep(msgspec.Struct, frozen=True):
    """One fix of a plan: the step with it and all fixes before it, and what it adds to what they save.

    ``fix`` is the finding's id and the number of its fix, as ``exposed-communication/0``;
    ``replay_of_step_ms`` the measured step without any.
    """

    fix: str
    title: str
    change: str
    step_ms: Range
    gain_ms: Range
    then_limited_by: str
    replay_of_step_ms: float = 0.0


class WhatIf(msgspec.Struct, frozen=True):
    """The answer of ``tracedoc whatif``: the replay, and the step after each change.

    ``alone`` has an entry for each change that was asked for, made alone; ``together`` each of them on top of
    those before it. ``ledger`` is what each cause costs, where no change was asked for.
    """

    replay: ReplayReport
    alone: tuple[Predicted | NotPredicted, ...] = ()
    together: tuple[Predicted, ...] = ()
    ledger: Ledger | None = None
