"""Which fixes of a diagnosis can be tried from outside the script, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracedoc.collector.trial.changes import CannotError, Change, read_change
from tracedoc.diagnosis import Diagnosis, Finding, Fix
from tracedoc.errors import InputError, did_you_mean
from tracedoc.judge.fixes import fitting_first

DEFAULT_FIXES = 3
TOGETHER = "together"


@dataclass(frozen=True)
class Candidate:
    """A fix, the changes that it stands for, and what was predicted; ``cannot`` is why it is not tried.

    ``predicted_ms`` is the gain a step, from and to, ``None`` where none is stated; with ``of_mean`` it is
    one of the mean step, for what comes in some steps only.
    """

    fix: str
    title: str
    changes: tuple[Change, ...] = ()
    text: str = ""
    risk: str = ""
    predicted_ms: tuple[float, float] | None = None
    predicted_of_ms: float = 0.0
    of_mean: bool = False
    cannot: str = ""

    @property
    def rule(self) -> str:
        """The finding that the fix is of."""
        return self.fix.rpartition("/")[0]


def candidates(diagnosis: Diagnosis, framework: Mapping[str, Any]) -> list[Candidate]:
    """Every fix that fits the job, those that can be tried first, of them those of the plan; each once.

    ``framework`` is what a rank's manifest says of the job, empty where nothing is known.
    """
    planned = [step.fix for step in diagnosis.plan]
    found = [
        _candidate(finding, fix, diagnosis, framework)
        for finding in diagnosis.findings
        for fix in fitting_first(finding.fixes, diagnosis.run)
    ]
    found.sort(
        key=lambda one: (
            bool(one.cannot),
            planned.index(one.fix) if one.fix in planned else len(planned),
        )
    )
    # One title is one action, which frameworks write in different words.
    by_title: dict[str, Candidate] = {}
    for one in found:
        by_title.setdefault(one.title, one)
    by_text: dict[str, Candidate] = {}
    for one in by_title.values():
        by_text.setdefault(one.text or one.title, one)
    return list(by_text.values())


def _candidate(finding: Finding, fix: Fix, diagnosis: Diagnosis, framework: Mapping[str, Any]) -> Candidate:
    number = finding.fixes.index(fix)
    low_high, of_ms = _stated(finding, fix, first=number == 0, diagnosis=diagnosis)
    changes: tuple[Change, ...] = ()
    cannot = ""
    try:
        change = read_change(fix.change)
        missing = change.missing_in(framework)
        if missing:
            cannot = f"the job has no {missing}"
        else:
            changes = (change,)
    except CannotError as error:
        cannot = str(error)
    return Candidate(
        fix=f"{finding.id}/{number}",
        title=fix.title,
        changes=changes,
        text=fix.change,
        risk=fix.risk,
        predicted_ms=low_high,
        predicted_of_ms=of_ms,
        of_mean=fix.predicted is None and finding.gain is not None and finding.gain.mean_step_ms is not None,
        cannot=cannot,
    )


def _stated(
    finding: Finding, fix: Fix, *, first: bool, diagnosis: Diagnosis
) -> tuple[tuple[float, float] | None, float]:
    """The gain that is stated for a fix, and of which step; a finding's is that of its first fix."""
    step_ms = diagnosis.budget.step_ms if diagnosis.budget is not None else 0.0
    if fix.predicted is not None:
        return (fix.predicted.gain_ms[0], fix.predicted.gain_ms[2]), fix.predicted.before_ms
    if first and finding.gain is not None:
        return (finding.gain.low_ms, finding.gain.high_ms), finding.gain.mean_step_ms or step_ms
    return None, step_ms


def choose(known: Sequence[Candidate], asked: Sequence[str], *, every: bool) -> list[Candidate]:
    """The candidates that are asked for, else the first three that can be tried, or ``every`` one.

    A name is that of a finding, of one of its fixes, or a change as it would be pasted.

    Raises :class:`InputError` for a fix that cannot be tried, and where none can.
    """
    fit = [one for one in known if not one.cannot]
    if asked:
        return [chosen for name in asked for chosen in _named(name, known)]
    if not fit:
        raise InputError(
            "none of the fixes can be tried from outside the script",
            "tracedoc try RUN --list says why; change the script, capture again, and compare",
        )
    return fit if every else fit[:DEFAULT_FIXES]


def _named(name: str, known: Sequence[Candidate]) -> Iterator[Candidate]:
    named = [one for one in known if name in (one.fix, one.rule)]
    if named:
        fit = [one for one in named if not one.cannot]
        if not fit:
            raise InputError(
                f"{name} cannot be tried: {named[0].cannot}",
                "change the script by hand, capture again, then: tracedoc compare RUN NEW",
            )
        yield fit[0]
        return
    try:
        change = read_change(name)
    except CannotError as error:
        names = [one.fix for one in known] + [one.rule for one in known]
        raise InputError(
            f"{name!r} is no fix of this run{did_you_mean(name, names)}, nor a change to make: {error}",
            "tracedoc try RUN --list names its fixes",
        ) from None
    yield Candidate(name, name.partition("\n")[0], (change,), name)


def together(chosen: Sequence[Candidate], diagnosis: Diagnosis) -> Candidate:
    """All of the candidates as one; what was predicted is the plan's, where they are the plan."""
    last = diagnosis.plan[-1] if diagnosis.plan else None
    planned = last is not None and {one.fix for one in chosen} >= {step.fix for step in diagnosis.plan}
    before = last.replay_of_step_ms if last is not None else 0.0
    return Candidate(
        fix=TOGETHER,
        title=" + ".join(one.title for one in chosen),
        changes=tuple(change for one in chosen for change in one.changes),
        text="\n".join(one.text for one in chosen),
        risk="; ".join(one.risk for one in chosen),
        predicted_ms=(before - last.step_ms[2], before - last.step_ms[0])
        if planned and last is not None
        else None,
        predicted_of_ms=before,
    )
