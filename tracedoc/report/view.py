"""Turn a Diagnosis into the small model that every report shares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from tracedoc.diagnosis import (
    SEVERITIES,
    BudgetCheck,
    Comparison,
    Diagnosis,
    Evidence,
    Finding,
    Fix,
    RunInfo,
    Scalar,
    Verdict,
)
from tracedoc.errors import Limit
from tracedoc.judge.fixes import LONGEST_PLAN, NOT_PLANNED, changes_training, fitting_first, framework_name
from tracedoc.ledger import PACED_BY_HOST, Ledger
from tracedoc.predicted import LEAST_SHARE, PlanStep, Tried
from tracedoc.report.step_parts import (
    Segment,
    Waterfall,
    build_waterfall,
    overlap_words,
    segments,
    with_notes,
)
from tracedoc.report.texts import map_text, one_line, plain, redacted
from tracedoc.report.words import WITHOUT, cost_text, gain_text, is_told_by_cost, played_text
from tracedoc.units import (
    format_count,
    format_ms,
    format_percent,
    format_quantity,
    format_ranges,
    format_step_change,
    lowered,
    three_digits,
)

PHASES = {
    "forward": "forward",
    "recompute": "recomputation",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other",
}
"""The phases of a step in words; "other" is data, clipping, zeroing gradients."""

EVIDENCE_SHOWN = 8
"""Places shown for a finding; the JSON holds them all."""

LONGEST_COMMAND = 200
"""Letters of the job's command that are shown; the JSON has all of it."""

LIMITS_OF_A_KIND = 3
"""Limits with one code that are shown in full; hundreds of ranks often share one."""

_SCRIPT_LINE = re.compile(
    r"(?P<file>[\w./\\\\-]{1,300}\.py)(?::(?P<line>\d{1,7})|\((?P<in_brackets>\d{1,7})\))"
)


SAME_STEP = 0.02
"""The analysed step is named beside the mean one where it differs by more than this share of it."""


class FindingView(msgspec.Struct, frozen=True):
    """A finding as it is read: numbered, with its place and gain in words, the fitting fix first.

    ``gain`` is that of the first fix in words, else that of the finding. ``planned`` says whether the plan
    has that fix. ``foreign`` are the fixes in the words of other frameworks. ``evidence`` is the longest
    places only, in order of time.
    """

    number: int
    finding: Finding
    place: str
    gain: str
    assumptions: str
    fixes: tuple[Fix, ...]
    evidence: tuple[Evidence, ...]
    foreign: tuple[Fix, ...] = ()
    planned: bool = False


class LimitView(msgspec.Struct, frozen=True):
    """Something that the capture cannot show: a limit, a guard of the capture, or both in one.

    ``severity`` is the guard's where that is more than a note; ``fix`` says how to capture better.
    """

    code: str
    text: str
    severity: str = ""
    fix: Fix | None = None


class View(msgspec.Struct, frozen=True):
    """What every report shows. All text in ``diagnosis`` is safe to show and, if asked, redacted.

    ``name`` is that of the run's folder, "" where it is not known, ``about`` says when it was captured, the
    versions, and the job's command. ``throughput`` is what it does in a second, and what its plan gives back,
    "" where neither is known. ``findings`` are about the job; those about the capture are ``limits``.
    ``waterfall`` is what each cause costs; ``segments`` are what was observed, and ``where``. ``unplanned``
    says of warnings without a fix in the plan why they have none there.
    """

    diagnosis: Diagnosis
    name: str
    about: str
    run: str
    throughput: str
    waterfall: Waterfall | None
    where: str
    segments: tuple[Segment, ...]
    overlap: str
    findings: tuple[FindingView, ...]
    limits: tuple[LimitView, ...]
    outcomes: str
    unplanned: tuple[str, ...] = ()


def build_view(diagnosis: Diagnosis, *, redact: bool = False) -> View:
    """The view of a diagnosis that all reports show; ``redact`` hides host names and absolute paths."""
    name = one_line(plain(diagnosis.name))
    if redact:
        diagnosis = redacted(diagnosis)
    diagnosis = map_text(diagnosis, plain)
    budget = diagnosis.budget
    ordered = _in_order(diagnosis)
    jobs = [one for one in ordered if not is_guard(one)]
    findings = tuple(_finding_view(number, one, jobs, diagnosis) for number, one in enumerate(jobs, 1))
    return View(
        diagnosis=diagnosis,
        name=name,
        about=about_words(diagnosis.run, diagnosis.tool_version),
        run=_run_line(diagnosis),
        throughput=_throughput(diagnosis),
        waterfall=build_waterfall(diagnosis, jobs),
        where=_where(diagnosis),
        segments=with_notes(segments(budget, on_cpu=diagnosis.run.device == "CPU"), diagnosis)
        if budget
        else (),
        overlap=overlap_words(budget) if budget else "",
        findings=findings,
        limits=_limits(diagnosis.limits, [one for one in ordered if is_guard(one)]),
        outcomes=_outcomes(diagnosis),
        unplanned=tuple(_unplanned(diagnosis.plan, findings)),
    )


def _unplanned(plan: Sequence[PlanStep], findings: Sequence[FindingView]) -> Iterator[str]:
    """What is said beside a plan of the first fixes of warnings that it is without, and of a larger batch."""
    planned = {one.fix.rpartition("/")[0] for one in plan}
    told: dict[str, list[tuple[FindingView, Fix]]] = {}
    for item in findings if plan else ():
        first = item.fixes[:1] if item.finding.id not in planned else ()
        for fix in (*first, *(one for one in item.fixes if changes_training(one) and one not in first)):
            if item.finding.severity != "note" or fix.after_plan_ms is not None:
                told.setdefault(fix.title, []).append((item, fix))
    for title, items in told.items():
        item, fix = items[0]
        numbers = format_ranges([one.number for one, _ in items])
        what = f"{title} ({'finding' if len(items) == 1 else 'findings'} {numbers})"
        if fix.replays.partition(" ")[0] in NOT_PLANNED:
            changes = f"it changes the {'batch' if changes_training(fix) else 'precision'}"
            if fix.after_plan_ms is not None:
                after = format_step_change(plan[-1].step_ms[1], fix.after_plan_ms)
                yield f"after these, {lowered(what)}: {after}; {changes}"
            elif (
                fix.predicted is not None
                and fix.predicted.step_ms[1] >= plan[-1].step_ms[1]
                and item.number > 1
            ):
                continue  # the plan gives more
            elif played := played_text(fix.predicted):
                yield f"or {lowered(what)}: {played}; {changes}"
            else:
                yield f"{what}: not planned, as {changes}"
        elif fix.predicted is None:
            whole = f"; without all of finding {item.number}: {item.gain.removesuffix(WITHOUT)}"
            yield f"{what}: what it saves is not predicted{item.gain and whole}"
        elif len(plan) < LONGEST_PLAN:
            yield f"{what}: saves less than {format_percent(LEAST_SHARE)} more after these"


def _finding_view(
    number: int, finding: Finding, findings: Sequence[Finding], diagnosis: Diagnosis
) -> FindingView:
    planned = {one.change: one.step_ms for one in diagnosis.plan if one.fix.rpartition("/")[0] == finding.id}
    fitting = fitting_first(finding.fixes, diagnosis.run)
    ordered = sorted(fitting, key=lambda one: bool(planned) and one.replays not in planned)
    fixes = tuple(replace(fix, after_plan_ms=planned.get(fix.replays, fix.after_plan_ms)) for fix in ordered)
    tried = {one.change: f" ({tried_words(one)})" for one in diagnosis.tried}
    step_ms, ledger = diagnosis.today_ms, diagnosis.ledger
    tellers = ledger.told_by(finding.overlaps) if ledger is not None else ()
    with_it = (n for n, one in enumerate(findings, 1) if one.rule_id in tellers)
    other = next((f"finding {n}" for n in with_it), "")
    played = fixes[0].predicted if fixes else None
    costs = cost_text(finding, step_ms, played, overlaps=other, number=number)
    if any(one.code == "host-profiled" for one in diagnosis.limits) and _is_of_host(finding, ledger):
        costs += "; perhaps less without the profiler"
    return FindingView(
        number=number,
        finding=finding,
        place="; ".join(filter(None, (costs, _place(finding, diagnosis)))),
        gain=played_text(played) or ("" if is_told_by_cost(finding) else gain_text(finding.gain, step_ms)),
        assumptions="; ".join(finding.gain.assumptions) if finding.gain else "",
        fixes=tuple(replace(fix, title=fix.title + tried.get(fix.change, "")) for fix in fixes),
        evidence=_longest(finding.evidence),
        foreign=tuple(fix for fix in finding.fixes if fix not in fitting),
        planned=bool(planned),
    )


def _is_of_host(finding: Finding, ledger: Ledger | None) -> bool:
    """True for a finding whose time the profiler makes longer: what it records takes the host time."""
    causes = ledger.causes if ledger is not None else ()
    return any(one.id in PACED_BY_HOST and finding.rule_id in one.told_by for one in causes)


def tried_words(one: Tried) -> str:
    """What came of a fix in a few words: ``tried: 176 -> 129 ms, kept its promise``."""
    if one.before_ms is None or one.after_ms is None:
        return f"tried: {one.verdict}"
    return f"tried: {three_digits(one.before_ms)} -> {three_digits(one.after_ms)} ms, {one.verdict}"


def is_guard(finding: Finding) -> bool:
    """True for a finding about the capture, not about the job."""
    return finding.topic == "capture" and finding.gain is None


def script_line(item: FindingView) -> tuple[str, int] | None:
    """Return the file and line that a finding names first, in its message or its places in the trace."""
    for text in (item.finding.message, *(place.what for place in item.evidence)):
        if match := _SCRIPT_LINE.search(text):
            return match["file"], max(1, int(match["line"] or match["in_brackets"]))
    return None


def budget_words(check: BudgetCheck) -> str:
    """Return a performance budget with what was measured: ``step_ms <= 420: 431 ms, broken``."""
    if check.value is None:
        return f"{check.text}: not known" + (f" ({one_line(check.reason)})" if check.reason else "")
    return f"{check.text}: {format_quantity(check.value, check.unit)}, {check.outcome}"


def instances_text(verdict: Verdict) -> str:
    """The ranks or groups by outcome: ``finding: 0-2; pass: 3``; empty without any."""
    keys: dict[str, list[str]] = {}
    for instance in verdict.instances:
        keys.setdefault(instance.outcome.replace("_", " "), []).append(instance.key)
    return "; ".join(f"{outcome}: {_keys_text(found)}" for outcome, found in keys.items())


def holds_text(comparison: Comparison, verdict: Verdict) -> str:
    """ "holds", "does not hold" or "unknown", with the rank compared where there are several."""
    holds = {True: "holds", False: "does not hold", None: "unknown"}[comparison.holds]
    several = verdict.compared is not None and len(verdict.instances) > 1
    return f"{holds} on {_keys_text([verdict.compared or ''])}" if several else holds


def _keys_text(keys: list[str]) -> str:
    if all(key.isdecimal() for key in keys):
        return f"rank{'s' * (len(keys) > 1)} {format_ranges(int(key) for key in keys)}"
    return ", ".join(one_line(key) for key in keys)


def phase_name(phase: str) -> str:
    """Return a phase of the step in words."""
    return PHASES.get(phase, phase)


def side_text(value: Scalar | None) -> str:
    """Return one side of a comparison; ``?`` if it is unknown."""
    return "?" if value is None else format_quantity(value, "")


def _in_order(diagnosis: Diagnosis) -> Sequence[Finding]:
    """The findings as the ledger has them; without one by severity, then by gain."""
    if diagnosis.ledger is not None and diagnosis.ledger.step_ms:
        return diagnosis.findings
    known = {severity: place for place, severity in enumerate(SEVERITIES)}
    gains = {one.id: one.gain.size_ms if one.gain else 0.0 for one in diagnosis.findings}
    return sorted(
        diagnosis.findings, key=lambda one: (known.get(one.severity, len(known)), -gains[one.id], one.id)
    )


def _place(finding: Finding, diagnosis: Diagnosis) -> str:
    """Where a finding was seen, and how sure it is: ``on rank 1, confidence high``."""
    run, parts = diagnosis.run, []
    if len(finding.ranks) > 1 and finding.ranks == run.ranks_seen:
        parts.append("on every rank")
    elif finding.ranks:
        parts.append(f"on rank{'s' * (len(finding.ranks) > 1)} {format_ranges(finding.ranks)}")
    return ", ".join((*parts, f"confidence {finding.confidence}"))


def _longest(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    longest = sorted(evidence, key=lambda place: -place.length_ns)[:EVIDENCE_SHOWN]
    return tuple(sorted(longest, key=lambda place: (place.rank, place.start_ns)))


def about_words(run: RunInfo, tool_version: str = "") -> str:
    """When and how a run was captured: its date, the versions, and the command of the job."""
    when = f"captured {run.captured_at[:16].replace('T', ' ')} UTC" if run.captured_at else ""
    torch = f"PyTorch {run.settings['torch']}" if "torch" in run.settings else ""
    tool = f"tracedoc {tool_version}" if tool_version else ""
    command = run.command if len(run.command) <= LONGEST_COMMAND else f"{run.command[:LONGEST_COMMAND]} ..."
    return ", ".join(filter(None, (when, torch, tool, command)))


def _throughput(diagnosis: Diagnosis) -> str:
    """What a second does, and the GPU-hours of a day that the plan gives back; "" for neither."""
    run, hours = diagnosis.run, diagnosis.gpu_hours
    rates = ", ".join(rates_of(run))
    if run.samples_per_s and diagnosis.today_ms:
        rates += f" ({format_count(round(run.samples_per_s * diagnosis.today_ms / 1e3))} samples a step)"
    if rates and run.world_size is not None and len(run.ranks_seen) < run.world_size:
        rates += f" on {_count(len(run.ranks_seen), 'captured rank')}"
    if hours is None or run.world_size is None:
        return rates
    low, likely, high = (f"{one:.0f}" if one >= 9.95 else f"{one:.1f}" for one in hours)
    span = "" if low == high else f" ({low} to {high})"
    back = f"the predicted step saves about {likely} of {24 * run.world_size} GPU-hours a day{span}"
    return f"{rates}; {back}" if rates else f"{back[0].upper()}{back[1:]}"


def rates_of(run: RunInfo) -> list[str]:
    """The samples and the tokens that a run does in a second, in words, as far as they are known."""
    rates = ((run.samples_per_s, "samples/s"), (run.tokens_per_s, "tokens/s"))
    known = [(rate, unit) for rate, unit in rates if rate]
    return [f"{format_count(rate) if rate >= 1000 else three_digits(rate)} {unit}" for rate, unit in known]


def _run_line(diagnosis: Diagnosis) -> str:
    run, seen = diagnosis.run, len(diagnosis.run.ranks_seen)
    parts = [_length(diagnosis)]
    parts += [run.device] if run.device else []
    if run.world_size is None:
        parts.append(f"{_count(seen, 'rank')} seen")
    else:
        parts.append(f"{seen} of {_count(run.world_size, 'rank')}")
    if run.backend and (run.world_size or seen) > 1:
        parts.append(run.backend)
    parts.append(_strategy(run))
    parts.append(f"{_count(run.steps_judged, 'step')} analysed" if run.steps_judged else _no_step(diagnosis))
    if (mfu := diagnosis.number("mfu_frac")) is not None:
        hfu = diagnosis.number("hfu_frac") or mfu
        again = f" ({format_percent(hfu)} HFU)" if format_percent(hfu) != format_percent(mfu) else ""
        parts.append(f"{format_percent(mfu)} MFU{again}")
    if run.cycle is not None and len(run.cycles) > 1:
        parts.append(f"cycle {run.cycle} ({len(run.cycles)} recorded)")
    return ", ".join(part for part in parts if part)


def _no_step(diagnosis: Diagnosis) -> str:
    """On how many ranks no step is complete."""
    without = sum(not any(step.complete for step in rank.steps) for rank in diagnosis.ranks)
    ranks = len(diagnosis.ranks)
    return f"no complete step{f' on {without} of {ranks} ranks' if without < ranks else ''}"


def _length(diagnosis: Diagnosis) -> str:
    """The step that the answer is about, with the analysed one where that has another length; "" for none."""
    today, analysed = diagnosis.today_ms, diagnosis.budget.step_ms if diagnosis.budget else None
    if not today:
        return ""
    if not analysed or abs(today - analysed) <= SAME_STEP * today:
        return f"{format_ms(today)}/step"
    return f"{format_ms(today)}/step on average ({format_ms(analysed)} in the analysed one)"


SURE = {"medium": "probably ", "low": "perhaps "}
"""How sure a strategy is, of those that are not."""


def _strategy(run: RunInfo) -> str:
    name = framework_name(run.strategy.name)
    if run.strategy.family == "unknown" and run.strategy.confidence == "low":
        return f"strategy {name}" if name else ""
    return f"{SURE.get(run.strategy.confidence, '')}{name}"


def _where(diagnosis: Diagnosis) -> str:
    budget = diagnosis.budget
    if budget is None:
        return ""
    if budget.at is None:
        return f"observed: {format_ms(budget.step_ms)}"
    step = "whole capture" if budget.at.step is None else f"step {budget.at.step}"
    return f"observed on rank {budget.at.rank}, {step}: {format_ms(budget.step_ms)}"


def _limits(limits: tuple[Limit, ...], guards: list[Finding]) -> tuple[LimitView, ...]:
    """Return limits and guards, each once; a guard's fix goes with the last limit that it belongs to."""
    left = {guard.limit or guard.rule_id: guard for guard in guards}
    shown: list[LimitView] = []
    for limit in reversed(_few_of_each(limits)):
        guard = left.pop(limit.code, None)
        text = f"{limit.message}; {limit.effect}" if limit.effect else limit.message
        shown.append(_with_guard(limit.code, one_line(text), guard))
    shown.reverse()
    for guard in left.values():
        shown.append(_with_guard(guard.rule_id, one_line(guard.message).removesuffix("."), guard))
    return tuple(shown)


def _with_guard(code: str, text: str, guard: Finding | None) -> LimitView:
    if guard is None:
        return LimitView(code, text)
    severity = guard.severity if guard.severity != "note" else ""
    return LimitView(code, text, severity, guard.fixes[0] if guard.fixes else None)


def _few_of_each(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    by_code: dict[str, list[Limit]] = {}
    for limit in limits:
        by_code.setdefault(limit.code, []).append(limit)
    shown: list[Limit] = []
    for code, alike in by_code.items():
        shown += alike[:LIMITS_OF_A_KIND]
        if len(alike) > LIMITS_OF_A_KIND:
            shown.append(Limit(code, f"{len(alike) - LIMITS_OF_A_KIND} more of this kind"))
    return tuple(shown)


def _outcomes(diagnosis: Diagnosis) -> str:
    """How many rules passed, do not apply, or could not be judged; the findings speak for others."""
    words = {
        "pass": "passed",
        "not_applicable": "not applicable",
        "unknown": "not judged from this trace",
        "error": "failed",
    }
    outcomes = [verdict.outcome for verdict in diagnosis.verdicts]
    said = [f"{count} {words[outcome]}" for outcome in words if (count := outcomes.count(outcome))]
    rules = _count(len(diagnosis.verdicts), "rule")
    if diagnosis.rules_left_out:
        total = len(diagnosis.verdicts) + diagnosis.rules_left_out
        rules = f"{len(diagnosis.verdicts)} of {total} rules judged"
    return f"{rules}: {', '.join(said)}" if said else rules if diagnosis.rules_left_out else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
