"""Compose the Diagnosis from what was measured and judged; nothing is computed here that is not shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from msgspec.structs import replace

import tracedoc
from tracedoc.detail.charts import memory_curve, step_picture, transfer_table, unit_timeline, wait_table
from tracedoc.detail.tables import collective_rows, host_detail, kernel_rows, phase_rows, unit_rows
from tracedoc.diagnosis import (
    Budget,
    BudgetCheck,
    BudgetLocation,
    CaptureBudget,
    Detail,
    Diagnosis,
    FactRecord,
    Finding,
    RankReport,
    RunInfo,
    Scalar,
    StepBudget,
    Strategy,
    folder_of,
)
from tracedoc.errors import Failures, Limit
from tracedoc.facts.catalog import Fact, FactTable
from tracedoc.facts.measure_run import Measurements
from tracedoc.judge.findings import Judgement
from tracedoc.judge.first_line import host_profiled, summarise
from tracedoc.judge.fixes import fitting_first
from tracedoc.ledger import Ledger, Range
from tracedoc.play.run_replay import Refusal
from tracedoc.predicted import PlanStep, ReplayReport
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.waiting import ExposedSplit
from tracedoc.run.job import job_settings
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.activity import Budget as ExactBudget
from tracedoc.topics.capture.run import strategy_of
from tracedoc.topics.compute.run import samples_per_step, tokens_per_step
from tracedoc.topics.step.rank import step_ms
from tracedoc.units import format_ranges, lowered
from tracedoc.values import Unknown, Value
from tracedoc.whatif.path_in_picture import path_in_picture
from tracedoc.whatif.predictions import run_replay

FEW_STEPS = 3
"""With fewer captured steps than that nothing is said of a whole day."""

_UNIX_TIME_NS = (10**18, 5 * 10**18)
"""Nanoseconds that are taken for a time since 1970: September 2001 to June 2128."""


def compose(
    measurements: Measurements,
    judgement: Judgement,
    info: RunInfo,
    *,
    limits: tuple[Limit, ...],
    ledger: Ledger | None = None,
    replay: ReplayReport | None = None,
    plan: tuple[PlanStep, ...] = (),
    budgets: tuple[BudgetCheck, ...] = (),
    rules_left_out: int = 0,
) -> Diagnosis:
    """The diagnosis of one run."""
    run = measurements.run
    representative = run.representative_digest
    budget = _rank_budget(run, representative, _Milliseconds()) if representative is not None else None
    failures = Failures()
    detail = _detail(run, representative, failures) if representative is not None else Detail()
    if replay is not None:
        detail = failures.contain(
            "the critical path in the timeline", lambda: _with_path(detail, run), detail
        )
    summary = failures.contain(
        "the answer in a sentence",
        lambda: summarise(
            measurements,
            judgement,
            run=info,
            ledger=ledger,
            limits=limits,
            plan=plan,
            rules_left_out=rules_left_out,
        ),
        "The measurements stand below.",
    )
    return Diagnosis(
        summary=_with_capture(summary, _failure(limits, run), info, run),
        run=replace(
            info,
            samples_per_s=_rate(measurements, samples_per_step, ledger),
            tokens_per_s=_rate(measurements, tokens_per_step, ledger),
        ),
        budget=budget,
        ranks=tuple(_rank_report(run, digest) for digest in run.digests),
        findings=judgement.findings,
        verdicts=judgement.verdicts,
        facts=_fact_records(measurements.facts),
        limits=(*limits, *host_profiled(measurements, ledger), *failures.limits),
        detail=detail,
        replay=replay,
        ledger=ledger,
        plan=plan,
        budgets=budgets,
        gpu_hours=_given_back(plan, judgement.findings, info),
        rules_left_out=rules_left_out,
        tool_version=tracedoc.__version__,
    )


def _detail(run: RunView, representative: RankDigest, failures: Failures) -> Detail:
    contain = failures.contain
    return Detail(
        collectives=contain("the table of collectives", lambda: collective_rows(run, representative), ()),
        kernels=contain("the table of kernels", lambda: kernel_rows(representative), ()),
        units=contain("the table of sharded units", lambda: unit_rows(run), ()),
        host=contain("the tables of the host", lambda: host_detail(representative), None),
        phases=contain("the table of phases", lambda: phase_rows(representative), ()),
        picture=contain("the timeline", lambda: step_picture(run), None),
        waits=contain("who waits for whom", lambda: wait_table(run), None),
        transfers=contain("the table of transfers", lambda: transfer_table(run), None),
        unit_timeline=contain("the timeline of sharded units", lambda: unit_timeline(run), None),
        memory=contain("the memory over time", lambda: memory_curve(run), None),
    )


def _with_path(detail: Detail, run: RunView) -> Detail:
    """The detail with the critical path in its picture, where the run was replayed."""
    made = run_replay(run)
    if detail.picture is None or isinstance(made, Refusal):
        return detail
    return replace(detail, picture=replace(detail.picture, path=path_in_picture(run, made, detail.picture)))


def _failure(limits: tuple[Limit, ...], run: RunView) -> str:
    """The words before all else: that the job hangs or failed, files are cut off, or a rank ended early."""
    hung = next((limit.message for limit in limits if limit.code == "job-hung"), "")
    if hung:
        return f"The job hung: {hung}. "
    cut = [digest.rank for digest in run.digests if digest.truncated]
    missing = next((limit.message for limit in limits if limit.code == "rank-left-out"), "")
    if missing:
        return f"{missing[0].upper()}{missing[1:]}. "
    if cut and len(run.digests) == 1:
        return "The file is cut off. "
    if cut:
        few = "The file of rank" if len(cut) == 1 else "The files of ranks"
        return f"{few} {format_ranges(cut)} {'is' if len(cut) == 1 else 'are'} cut off. "
    early = next((limit.message for limit in limits if limit.code == "ended-early"), "")
    if early:
        return f"{early[0].upper()}{early[1:]}. "
    words = next((limit.message for limit in limits if limit.code == "job-failed"), "")
    return f"The job failed: {words}. " if words else ""


def _with_capture(summary: str, failure: str, info: RunInfo, run: RunView) -> str:
    """The answer behind what is wrong with the capture: it failed, lacks ranks, or has a single step."""
    # Where no rank shows a whole step, the answer itself says so.
    partial = info.steps_judged == 0 and any(digest.complete_steps for digest in run.digests)
    if failure:
        return failure + summary
    seen = len(info.ranks_seen)
    ranks = f"{seen} of {info.world_size} ranks" if info.world_size and seen < info.world_size else ""
    step = "one step" if info.steps_judged == 1 or partial else ""
    words = " and ".join(filter(None, (ranks, step)))
    whole = ", not whole on every rank" if partial else ""
    return f"{words[0].upper()}{words[1:]} captured{whole}; {lowered(summary)}" if words else summary


def run_info(measurements: Measurements, cycle: int | None, cycles: tuple[int, ...]) -> RunInfo:
    """What is known of the job: its ranks, device, strategy and settings."""
    run = measurements.run
    strategy = strategy_of(run)
    representative = run.representative_digest or run.digests[0]
    return RunInfo(
        world_size=run.world_size,
        ranks_seen=tuple(digest.rank for digest in run.digests),
        device=representative.device,
        backend=representative.backend,
        strategy=Strategy(
            strategy.name, strategy.confidence, strategy.evidence, strategy.family, strategy.sharding
        ),
        sources=tuple(digest.source for digest in run.digests),
        steps_judged=min((len(d.complete_steps) for d in run.digests if d.steps), default=0),
        cycle=cycle,
        cycles=cycles,
        frameworks=tuple(dict.fromkeys(one for rank in run.job.ranks for one in rank.frameworks)),
        reader=", ".join(sorted({digest.reader for digest in run.digests if digest.reader})),
        settings=job_settings(run.job),
        captured_at=_captured_at(run),
        name=folder_of([one.source for one in run.digests], [one.host for one in run.digests]),
        command=run.job.command,
    )


def _rate(measurements: Measurements, of_step: Fact, ledger: Ledger | None) -> float | None:
    """What all captured ranks do in a second of today's step, ``None`` where that is not known."""
    count, length_ms = measurements.value(of_step), measurements.value(step_ms)
    if ledger is not None and ledger.step_ms > 0:
        length_ms = ledger.step_ms
    if isinstance(count, int) and isinstance(length_ms, float) and length_ms > 0:
        return 1e3 * count / length_ms
    return None


def _given_back(plan: Sequence[PlanStep], findings: Sequence[Finding], info: RunInfo) -> Range | None:
    """The GPU-hours of a day that the plan saves, or the first fix that was played where that is more."""
    steps = [(plan[-1].replay_of_step_ms, plan[-1].step_ms)] if plan else []
    fixes = fitting_first(findings[0].fixes, info) if findings else ()
    steps += [(one.before_ms, one.step_ms) for fix in fixes if (one := fix.predicted)][:1]
    if info.world_size is None or info.device == "CPU" or info.steps_judged < FEW_STEPS:
        return None
    saved = [
        tuple(max(24.0 * info.world_size * (1 - after / before), 0.0) for after in reversed(after_ms))
        for before, after_ms in steps
        if before > 0
    ]
    low, likely, high = max(saved, key=lambda one: one[1], default=(0.0, 0.0, 0.0))
    return (low, likely, high) if likely > 0 else None


def _captured_at(run: RunView) -> str:
    """The time of the first event; time that does not count from 1970 lies before 2001."""
    starts = [one.start_ns for one in run.digests if _UNIX_TIME_NS[0] <= one.start_ns < _UNIX_TIME_NS[1]]
    if not starts:
        return ""
    return f"{datetime.fromtimestamp(min(starts) // 10**9, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


class _Milliseconds(dict[int, float]):
    """Milliseconds by nanoseconds: the steps of a rank share many numbers, 0 most of all."""

    def __missing__(self, ns: int) -> float:
        self[ns] = ns / 1e6
        return self[ns]


def _parts(
    budget: ExactBudget,
    split: ExposedSplit | None,
    idle_ns: Mapping[str, int],
    blocking_ns: int | None,
    *,
    ms: _Milliseconds,
) -> dict[str, float | dict[str, float] | None]:
    shown = split or ExposedSplit(0, 0, 0, budget.exposed_comm_ns)
    return {
        "step_ms": ms[budget.window_ns],
        "compute_ms": ms[budget.compute_ns],
        "exposed_comm_ms": ms[budget.exposed_comm_ns],
        "exposed_copy_ms": ms[budget.exposed_copy_ns],
        "idle_ms": ms[budget.idle_ns],
        "comm_ms": ms[budget.comm_ns],
        "overlap_frac": 1.0 - budget.exposed_comm_ns / budget.comm_ns if budget.comm_ns else None,
        "exposed_transfer_ms": ms[shown.transfer_ns],
        "exposed_wait_ms": ms[shown.wait_ns],
        "pipeline_wait_ms": ms[shown.pipeline_wait_ns],
        "exposed_comm_unsplit_ms": ms[shown.unsplit_ns],
        "blocking_comm_ms": None if blocking_ns is None else ms[blocking_ns],
        "idle_causes_ms": {cause: ms[ns] for cause, ns in idle_ns.items() if ns},
    }


def _rank_budget(run: RunView, digest: RankDigest, ms: _Milliseconds) -> Budget | None:
    step = digest.judged_step
    if step is None:
        return None
    split = run.splits[digest.rank, step.index]
    at = BudgetLocation(digest.rank, step.index if digest.step_source != "none" else None)
    parts = _parts(step.budget, split, step.idle_ns, step.blocking_ns, ms=ms)
    return Budget(**parts, at=at)  # type: ignore[arg-type]


def _rank_report(run: RunView, digest: RankDigest) -> RankReport:
    capture, ms = None, _Milliseconds()
    if digest.capture is not None:
        parts = _parts(digest.capture, None, digest.capture_idle_ns, None, ms=ms)
        capture = CaptureBudget(**parts, span_ms=ms[digest.capture.window_ns])  # type: ignore[arg-type]
    return RankReport(
        rank=digest.rank,
        source=digest.source,
        host=digest.host,
        device=digest.device,
        capture=capture,
        budget=_rank_budget(run, digest, ms),
        steps=tuple(_step_budget(run, digest, step, ms) for step in digest.steps),
    )


def _step_budget(run: RunView, digest: RankDigest, step: StepDigest, ms: _Milliseconds) -> StepBudget:
    parts = _parts(step.budget, run.splits[digest.rank, step.index], step.idle_ns, step.blocking_ns, ms=ms)
    return StepBudget(
        **parts,  # type: ignore[arg-type]
        index=step.index,
        complete=step.complete,
        start_ms=ms[step.start_ns - digest.start_ns],
    )


def _fact_records(facts: FactTable) -> dict[str, FactRecord]:
    """The records of all facts. What is unknown for the same reason is one object: there is much."""
    unknown: dict[str, dict[str, str]] = {}
    tables: dict[tuple[str, ...], dict[str, Scalar | dict[str, str]]] = {}

    def shown(value: Value) -> Scalar | dict[str, str]:
        if isinstance(value, Unknown):
            return unknown.setdefault(value.reason, {"unknown": value.reason})
        return value

    def table(values: Mapping[str, Value]) -> dict[str, Scalar | dict[str, str]]:
        reasons = {value.reason if isinstance(value, Unknown) else None for value in values.values()}
        if reasons == {None} and isinstance(values, dict):
            return values  # as it is: a copy for each of many ranks and facts would be much
        found = {key: shown(value) for key, value in values.items()}
        if len(reasons) == 1 and (reason := reasons.pop()) is not None:
            return tables.setdefault((reason, *found), found)
        return found

    return {
        name: FactRecord(
            unit=measurement.definition.unit,
            scope=measurement.definition.scope,
            value=None if isinstance(measurement.value, Unknown) else measurement.value,
            unknown=measurement.value.reason if isinstance(measurement.value, Unknown) else None,
            values=table(measurement.values),
            doc=measurement.definition.doc,
        )
        for name, measurement in facts.items()
    }
