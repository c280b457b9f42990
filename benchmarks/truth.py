"""Diagnose random simulated jobs whose causes are known, and count what is said rightly."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulated.draws import FAULTS, draw_capture, draw_job
from tests.simulated.spec import Job
from tests.simulated.traces import write_traces
from tests.simulated.truth import OF_A_RANK, RULES_OF_FAULT, Truth
from tracedoc.diagnosis import Finding, RunInfo
from tracedoc.judge.fixes import fitting_first
from tracedoc.pipeline import Options, diagnose

REPORTED_SEEDS = 1_000_000
"""Jobs of the table in the repository begin here; while working on rules, other seeds are looked at."""

HEALTHY_IN = 8
"""One job in so many has no fault."""

WORTH_NAMING = 0.05
RIGHT = 0.01
SLACK = 0.01
"""Shares of the step: a cause that must be named, a warning that is right, a bound that is kept."""


@dataclass
class Counts:
    """What was counted over the jobs of one fault."""

    jobs: int = 0
    main_first: int = 0
    main: int = 0
    named: int = 0
    causes: int = 0
    right: int = 0
    warnings: int = 0
    kept: int = 0
    bounds: int = 0
    alarms: int = 0
    ratios: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add the counts of other jobs."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def faults_in_turn(jobs: int, first: int, only: str | None) -> Iterator[tuple[int, str | None]]:
    """Yield the seed and the fault of each job."""
    names = sorted(FAULTS)
    for number in range(jobs):
        healthy = number % HEALTHY_IN == 0
        turn = number - number // HEALTHY_IN - 1
        fault = None if healthy else names[turn % len(names)]
        if only is not None:
            fault = None if only == "healthy" else only
        yield first + number, fault


def judge(seed: int, fault: str | None) -> Counts:
    """Simulate and diagnose one job."""
    job = draw_job(seed, fault)
    truth = Truth(job)
    folder = Path(tempfile.mkdtemp(prefix="tracedoc-truth-"))
    try:
        write_traces(truth.played, job.ranks, folder, draw_capture(seed, job))
        diagnosis = diagnose([folder], Options(jobs=1))
    finally:
        shutil.rmtree(folder)
    counts = Counts(jobs=1)
    gains = {one.name: truth.gain_of_fault(one.name) for one in job.faults}
    _count_causes(counts, truth, gains, diagnosis.findings)
    for one in diagnosis.findings:
        _count_finding(counts, truth, one, diagnosis.run)
    shown = ", ".join(f"{one.name} {one.rank} {gains[one.name]:.1f}" for one in job.faults)
    head = f"{seed} {job.kind} {job.ranks} ranks {job.steps} steps {truth.step_ms:.1f} ms [{shown}]"
    counts.wrong = [f"{head}: {words}" for words in counts.wrong]
    return counts


def _names(job: Job, finding: Finding, fault: str) -> bool:
    """Return whether a finding names a fault of a job, and its rank."""
    lone_stage = fault == "slow-worker" and job.replicas == 1
    if finding.rule_id not in (*RULES_OF_FAULT[fault], *(["stage-imbalance"] if lone_stage else [])):
        return False
    found = job.fault(fault)
    return found is not None and (fault not in OF_A_RANK or found.rank in finding.ranks)


def _count_causes(counts: Counts, truth: Truth, gains: dict[str, float], found: Sequence[Finding]) -> None:
    """Count the faults that had to be named, and whether the first finding is of the largest one."""
    worth = {name: gain for name, gain in gains.items() if gain >= WORTH_NAMING * truth.step_ms}
    for name in worth:
        named = any(_names(truth.job, one, name) for one in found)
        counts.causes += 1
        counts.named += named
        if not named:
            counts.wrong.append(f"not named: {name}; found {[one.rule_id for one in found[:4]]}")
    if not worth:
        return
    main = max(worth, key=worth.__getitem__)
    first = found[0] if found else None
    other = truth.gain_of_rule(first.rule_id, first.ranks) if first is not None else None
    as_good = other is not None and other >= 0.9 * worth[main]
    right = first is not None and (_names(truth.job, first, main) or as_good)
    counts.main += 1
    counts.main_first += right
    if not right:
        counts.wrong.append(f"first is {first.rule_id if first else None}, true {other}")


def replayed_change(finding: Finding, run: RunInfo) -> str | None:
    """Return the change whose replay the finding's gain is: that of the fix that stands first.

    ``None`` where the gain is a bound.
    """
    if finding.gain is None or finding.gain.basis != "replay":
        return None
    first = fitting_first(finding.fixes, run)[0].predicted
    return None if first is None else first.change


def _count_finding(counts: Counts, truth: Truth, finding: Finding, run: RunInfo) -> None:
    """Count whether a finding's bound is kept, and whether it is right, where it warns."""
    gain = truth.gain_of_rule(finding.rule_id, finding.ranks)
    what = f"{finding.severity} {finding.rule_id} {finding.ranks}"
    replayed = replayed_change(finding, run)
    given = gain if replayed is None else truth.gain_of_change(replayed)
    if given is not None and finding.gain is not None:
        high = finding.gain.high_ms
        kept = given <= high + SLACK * truth.step_ms
        counts.bounds += 1
        counts.kept += kept
        if given >= SLACK * truth.step_ms:
            counts.ratios.append(high / given)
        if not kept:
            counts.wrong.append(f"{what} up to {high:.2f} ({replayed or 'a bound'}), true {given:.2f}")
    if finding.severity not in ("warning", "critical"):
        return
    if not truth.job.faults:
        counts.alarms = 1
        counts.wrong.append(f"{what} in a healthy job")
    if gain is not None:
        right = gain >= RIGHT * truth.step_ms
        counts.warnings += 1
        counts.right += right
        if not right:
            counts.wrong.append(f"{what}: true {gain:.2f}")


def _judged(task: tuple[int, str | None]) -> tuple[str, Counts]:
    seed, fault = task
    try:
        return fault or "healthy", judge(seed, fault)
    except Exception as error:
        return fault or "healthy", Counts(
            jobs=1, wrong=[f"seed {seed} {fault}: {type(error).__name__}: {error}"]
        )


def table(counts: dict[str, Counts]) -> Iterable[str]:
    """Yield the lines of the table, one for each fault, and the sum."""
    yield (
        "| fault | jobs | main cause first | causes of 5 % named | warnings right | bounds kept "
        "| bound / gain (median) | healthy, with a warning |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    total = Counts()
    for name in sorted(counts, key=lambda name: (name == "healthy", name)):
        total.add(counts[name])
        yield _line(name, counts[name])
    yield _line("**all**", total)


def _line(name: str, one: Counts) -> str:
    def share(part: int, whole: int) -> str:
        return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else ""

    alarms = str(one.alarms) if name in ("healthy", "**all**") else ""
    ratio = f"{median(one.ratios):.2f}" if one.ratios else ""
    return (
        f"| {name} | {one.jobs} | {share(one.main_first, one.main)} | {share(one.named, one.causes)} "
        f"| {share(one.right, one.warnings)} | {share(one.kept, one.bounds)} | {ratio} | {alarms} |"
    )


def main() -> None:
    """Print the table; what was wrong goes to stderr with ``--wrong``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--first", type=int, default=REPORTED_SEEDS, help="the first seed")
    parser.add_argument("--only", help="one fault, or healthy")
    parser.add_argument("--wrong", action="store_true", help="list what was said wrongly")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    counts: dict[str, Counts] = defaultdict(Counts)
    tasks = list(faults_in_turn(asked.jobs, asked.first, asked.only))
    if asked.processes == 1:
        done: Iterable[tuple[str, Counts]] = map(_judged, tasks)
        results = list(done)
    else:
        with ProcessPoolExecutor(asked.processes) as pool:
            results = list(pool.map(_judged, tasks, chunksize=4))
    for name, one in results:
        counts[name].add(one)
    for line in table(counts):
        print(line)
    if asked.wrong:
        for one in counts.values():
            for line in one.wrong:
                print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
