"""The Diagnosis: everything tracedoc has to say about a run, serialisable and versioned.

Reports, comparisons and gates read this and nothing else. Names are those of the JSON, schema 2;
fields are only ever added. Durations are float milliseconds, shares 0..1, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from textwrap import shorten
from typing import Any

import msgspec

import tracedoc
from tracedoc.errors import Limit
from tracedoc.ledger import Ledger, Range
from tracedoc.predicted import PlanStep, Predicted, ReplayReport, Tried
from tracedoc.tables import (
    CollectiveRow,
    HostDetail,
    KernelRow,
    MemoryCurve,
    PhaseRow,
    Picture,
    TransferSpeeds,
    UnitRow,
    UnitTimeline,
    Waits,
)

SCHEMA_VERSION = "2"
READABLE_VERSIONS = ("1", SCHEMA_VERSION)
"""Results of schema 1 have no ledger."""

SEVERITIES = ("critical", "warning", "note")
"""From worst to mildest."""

OUTCOMES = ("finding", "pass", "not_applicable", "unknown", "yielded", "error")

Scalar = float | int | str | bool


class BudgetLocation(msgspec.Struct, frozen=True):
    """Where a budget was measured: one rank, and one of its steps (``None``: the whole capture)."""

    rank: int
    step: int | None = None


class BudgetParts(msgspec.Struct, frozen=True):
    """How a window of one GPU splits: compute + exposed_comm + exposed_copy + idle = step.

    The second line splits exposed communication exactly: transfer + wait + pipeline_wait + unsplit.
    ``overlap_frac`` is hidden / all communication, ``None`` without communication;
    ``blocking_comm_ms`` is ``None`` where it is not known.
    """

    step_ms: float
    compute_ms: float
    exposed_comm_ms: float
    exposed_copy_ms: float
    idle_ms: float
    comm_ms: float
    overlap_frac: float | None
    exposed_transfer_ms: float
    exposed_wait_ms: float
    pipeline_wait_ms: float
    exposed_comm_unsplit_ms: float
    blocking_comm_ms: float | None = None
    idle_causes_ms: dict[str, float] = msgspec.field(default_factory=dict)


BUDGET_PARTS = (
    ("compute", "compute", "compute_ms"),
    ("transfer", "exposed transfer", "exposed_transfer_ms"),
    ("wait", "waiting for peers", "exposed_wait_ms"),
    ("pipeline", "waiting in the pipeline", "pipeline_wait_ms"),
    ("unsplit", "communication (transfer or waiting)", "exposed_comm_unsplit_ms"),
    ("copy", "exposed copies", "exposed_copy_ms"),
    ("idle", "idle", "idle_ms"),
)
"""The parts of a budget that add up to the step: key, label, field."""


class Budget(BudgetParts, frozen=True):
    """The budget that stands for a rank or for the run, and where it was measured."""

    at: BudgetLocation | None = None


class CaptureBudget(BudgetParts, frozen=True):
    """The same split from the first to the last GPU event of the file; ``span_ms`` is its length."""

    span_ms: float = 0.0


class StepBudget(BudgetParts, frozen=True):
    """One step of one rank."""

    index: int = 0
    complete: bool = False
    start_ms: float = 0.0  # since the first event of the rank's trace


class RankReport(msgspec.Struct, frozen=True):
    """One rank: its whole capture, the budget of its median step, and every step."""

    rank: int
    source: str
    host: str
    device: str
    capture: CaptureBudget | None
    budget: Budget | None
    steps: tuple[StepBudget, ...] = ()


class Strategy(msgspec.Struct, frozen=True):
    """How the job is parallelised; ``name`` is "not recognised" where the trace does not tell.

    ``family`` is a short name for programs ("fsdp2", "zero-1", "unknown"...), ``sharding`` what the ranks
    split: "none", "optimizer", "gradients" (and optimizer), "full", with "hybrid-" before it, or "unknown".
    """

    name: str
    confidence: str  # "high" | "medium" | "low"
    evidence: tuple[str, ...] = ()
    family: str = "unknown"
    sharding: str = "unknown"


class RunInfo(msgspec.Struct, frozen=True):
    """What was looked at; ``frameworks`` are the wrappers and trainers in use, as the manifest tells.

    ``reader`` is what read the traces: "native", "python", or both where workers differ. ``settings`` are
    versions, variables and settings of the job by name, empty without a manifest. ``captured_at`` is when the
    first event happened, in UTC as RFC 3339 writes it, empty where the traces do not count from 1970.
    ``name`` is that of the folder with all traces, "" where there is none or it names a host; ``command`` is
    what started the job, as the manifest tells, else "".
    ``samples_per_s`` and ``tokens_per_s`` are those of ``ranks_seen`` together, in the analysed step;
    ``None`` where they are not known.
    """

    world_size: int | None
    ranks_seen: tuple[int, ...]
    device: str
    backend: str
    strategy: Strategy
    sources: tuple[str, ...]
    steps_judged: int = 0
    cycle: int | None = None
    cycles: tuple[int, ...] = ()
    frameworks: tuple[str, ...] = ()
    reader: str = ""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    captured_at: str = ""
    name: str = ""
    command: str = ""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None


def folder_of(sources: Sequence[str], hosts: Sequence[str]) -> str:
    """The name of the folder with all traces: never more of a path, and "" for one that names a host."""
    folders = {PurePath(source).parent.name for source in sources}
    name = folders.pop() if len(folders) == 1 else ""
    return "" if any(host and host in name for host in hosts) else name


class Evidence(msgspec.Struct, frozen=True):
    """A place in the traces, enough to find it again in Perfetto.

    ``start_ns`` and ``end_ns`` count from the first event of the rank's trace.
    """

    rank: int
    step: int | None
    start_ns: int
    end_ns: int
    what: str
    value: float | None = None
    unit: str = ""

    @property
    def length_ns(self) -> int:
        """Its length in nanoseconds."""
        return self.end_ns - self.start_ns


class Gain(msgspec.Struct, frozen=True):
    """What a fix could give back, in milliseconds per step of the job.

    With the basis "ceiling" ``high_ms`` is a bound that physics allows, and ``low_ms`` 0. With the basis
    "replay" it is what the fix that stands first gives, with "ledger" what the causes of the finding cost;
    then ``likely_ms`` is known. Gains of different findings
    may cover the same time and are never added. They are of today's step (:attr:`Diagnosis.today_ms`), or of
    the mean step of a log of the whole run, which takes ``mean_step_ms``.
    """

    low_ms: float
    high_ms: float
    basis: str  # "ceiling" | "replay" | "ledger"
    assumptions: tuple[str, ...] = ()
    likely_ms: float | None = None
    mean_step_ms: float | None = None

    @property
    def size_ms(self) -> float:
        """What severity follows from: the likely gain where it is known, else the bound."""
        return self.high_ms if self.likely_ms is None else self.likely_ms


class Fix(msgspec.Struct, frozen=True):
    """A change in the words of one framework.

    ``change`` is what someone can paste, "" where only ``advice``, which is prose, can be given.
    ``replays`` is what ``tracedoc whatif`` replays for it, ``predicted`` what comes of that in this run, and
    ``after_plan_ms`` the step (low, likely, high) with the plan and it, where it helps only then.
    """

    framework: str
    title: str
    change: str
    risk: str
    url: str = ""
    replays: str = ""
    predicted: Predicted | None = None
    advice: str = ""
    after_plan_ms: tuple[float, float, float] | None = None


class Finding(msgspec.Struct, frozen=True):
    """A verdict worth reading. ``id`` is stable over runs of one job.

    ``title`` begins with the usual name of the cause; ``says`` is the clause behind it in the first line.
    ``cost_ms`` is what its causes cost today's step, their shares in the ledger, and ``alone_ms`` is what
    mending them alone saves; ``None`` where the ledger has none of them, or a fix mends more than they are.
    ``overlaps`` says in plain words which cause costs the same time, "" for none; where that one hides this,
    ``together_ms`` is what mending both saves, else ``shared_ms`` what mending either saves. ``beyond_ms`` is
    what mending it saves once the findings before it are mended, with the one that hides it where each of the
    two hides the other (:attr:`is_pair`): then that one has no costs of its own.
    ``limit`` is the code of a limit that says the same, "" where none but one with the rule's id may.
    ``in_place_of`` are, of a finding in preview, the stable rules that gave way to it over the same time.
    """

    id: str
    rule_id: str
    severity: str
    confidence: str
    title: str
    message: str
    why: str
    topic: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    evidence: tuple[Evidence, ...]
    gain: Gain | None
    fixes: tuple[Fix, ...]
    status: str = "stable"
    says: str = ""
    limit: str = ""
    in_place_of: tuple[str, ...] = ()
    cost_ms: float | None = None
    alone_ms: float | None = None
    overlaps: str = ""
    together_ms: float | None = None
    shared_ms: float | None = None
    beyond_ms: float | None = None

    @property
    def told_ms(self) -> float | None:
        """What it costs as reports tell it: what mending it saves after the findings before it."""
        return self.beyond_ms if self.beyond_ms is not None else self.size_ms

    @property
    def size_ms(self) -> float | None:
        """How large it is among others: what mending it saves alone, or with the cause that hides it."""
        if self.cost_ms is None or self.together_ms is not None:
            return self.together_ms
        return self.alone_ms if self.alone_ms is not None and self.alone_ms > 0 else self.cost_ms

    @property
    def bound_ms(self) -> float:
        """The likely gain of its fix, else its bound; 0 where nothing is known of it."""
        return self.gain.size_ms if self.gain is not None else 0.0

    @property
    def is_pair(self) -> bool:
        """True where what it costs is told together with the cause that hides it and is hidden by it."""
        return self.together_ms is not None and self.together_ms == self.beyond_ms

    @property
    def gates(self) -> bool:
        """Whether it counts for ``--fail-on``: a preview does only where it stands for a stable rule."""
        return self.status == "stable" or bool(self.in_place_of)


class Comparison(msgspec.Struct, frozen=True):
    """One comparison of a rule's condition with both sides; ``holds`` is ``None`` if one is unknown."""

    text: str
    left: Scalar | None
    right: Scalar | None
    holds: bool | None
    reason: str = ""


class Instance(msgspec.Struct, frozen=True):
    """What a rule said of one rank, group or unit."""

    key: str
    outcome: str


class Verdict(msgspec.Struct, frozen=True):
    """What one rule said, finding or not.

    Where a rule judges each rank, ``comparisons`` are those of the rank ``compared``: the worst one of a
    finding, else the first with the outcome.
    """

    rule_id: str
    outcome: str
    comparisons: tuple[Comparison, ...] = ()
    reason: str = ""
    instances: tuple[Instance, ...] = ()
    compared: str | None = None


class BudgetCheck(msgspec.Struct, frozen=True):
    """A performance budget of the project, as ``step_ms <= 420``, and what was measured.

    ``outcome`` is "met", "broken", or "unknown" for ``reason``; ``limit`` and ``value`` are in ``unit``.
    """

    text: str
    outcome: str
    limit: float
    unit: str
    value: float | None = None
    reason: str = ""


class FactRecord(msgspec.Struct, frozen=True):
    """A fact as it is written to JSON: ``value`` or ``unknown``, and the values by key."""

    unit: str
    scope: str
    value: Scalar | None = None
    unknown: str | None = None
    values: dict[str, Scalar | dict[str, str]] = msgspec.field(default_factory=dict)
    doc: str = ""


class Detail(msgspec.Struct, frozen=True):
    """Optional tables that pages and comparisons read."""

    collectives: tuple[CollectiveRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    units: tuple[UnitRow, ...] = ()
    host: HostDetail | None = None
    phases: tuple[PhaseRow, ...] = ()
    picture: Picture | None = None
    waits: Waits | None = None
    transfers: TransferSpeeds | None = None
    unit_timeline: UnitTimeline | None = None
    memory: MemoryCurve | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """Everything above. ``summary`` is the answer in one sentence.

    ``ledger`` is what each cause costs the mean captured step, ``None`` without a replay. ``plan`` are fixes
    in the order in which they pay, each on top of those before it; ``gpu_hours`` is how many GPU-hours of a
    day it saves (low, likely, high), or the first fix where that saves more: ``None`` where neither or the
    number of GPUs is not known, and on CPUs. ``budgets`` are the performance budgets
    that the project set itself, ``rules_left_out`` the number of rules not selected. ``tried`` is what fixes
    gave when they were tried on the job.
    """

    summary: str
    run: RunInfo
    budget: Budget | None
    ranks: tuple[RankReport, ...]
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    facts: dict[str, FactRecord]
    limits: tuple[Limit, ...]
    detail: Detail = Detail()
    replay: ReplayReport | None = None
    ledger: Ledger | None = None
    plan: tuple[PlanStep, ...] = ()
    budgets: tuple[BudgetCheck, ...] = ()
    gpu_hours: Range | None = None
    rules_left_out: int = 0
    tried: tuple[Tried, ...] = ()
    tool_version: str = ""
    schema_version: str = SCHEMA_VERSION

    @property
    def name(self) -> str:
        """The name of the run, which older results do not keep: that of its folder, "" for none."""
        return self.run.name or folder_of(self.run.sources, [rank.host for rank in self.ranks])

    def value(self, fact: str) -> float | str | None:
        """The value of a fact that stands for the run, ``None`` where it is unknown."""
        record = self.facts.get(fact)
        return record.value if record is not None else None

    def number(self, fact: str) -> float | None:
        """The value of a fact that stands for the run, ``None`` where it is unknown or no number."""
        value = self.value(fact)
        return float(value) if isinstance(value, float | int) else None

    @property
    def today_ms(self) -> float | None:
        """The step that the answer is about, in ms: the ledger's, else the analysed one.

        The ledger's is the mean of the captured steps where these differ.
        """
        ledger = self.ledger
        if ledger is not None and ledger.step_ms > 0:
            return ledger.step_ms
        return self.budget.step_ms if self.budget is not None else self.number("step_ms")

    def numbers(self, fact: str) -> dict[str, float]:
        """The values of a fact that are numbers, by rank or group."""
        values = self.facts[fact].values if fact in self.facts else {}
        return {key: float(value) for key, value in values.items() if isinstance(value, float | int)}

    def __repr__(self) -> str:
        """The answer and the findings in one line."""
        found = ", ".join(dict.fromkeys(finding.rule_id for finding in self.findings)) or "none"
        return f"<Diagnosis: {shorten(self.summary, 160, placeholder=' ...')} Findings: {found}>"

    def _repr_html_(self) -> str:
        """The answer, the step, and the findings for a notebook."""
        return tracedoc.notebook_html(self)

    def figure(self) -> Any:
        """A matplotlib ``Figure``: the drawn step of all ranks, their budgets, and their waits.

        A notebook shows it; ``figure.savefig("figure.pdf")`` keeps it. Raises :class:`InputError` where the
        capture has no step to draw.
        """
        return tracedoc.figure_of(self)

    def to_frame(self, table: str = "steps") -> Any:
        """A table as a pandas ``DataFrame``.

        It is one of "steps", "ranks", "findings", "ledger", "collectives" and "kernels".

        "steps" has a row for each rank and step, "ranks" the median step of each; both have the parts of the
        budget, and idle time by cause as ``idle_<cause>_ms`` (0 without that cause). "findings" has the gain
        and the first fix of each. "collectives" and "kernels" are those of the analysed step. The columns
        have the names of the JSON; what is not known is ``None`` or NaN.

        Raises :class:`InputError` for another table.
        """
        return tracedoc.frame(self, table)
