"""Run the cases of a rule: draw each one's traces, diagnose them, and compare the verdict.

A case file is YAML::

    rule: exposed-communication
    cases:
      - name: all-reduce starts when backward has ended
        ranks: 2
        lanes: |
          compute    0-60
          allreduce  60-100   64MiB
        expect: {outcome: finding, gain_ms: [0, 40], message: "40 ms of the 100 ms step"}

Keys of a case: ``name``; ``lanes`` (:mod:`tracedoc.testing.lanes`; one compute lane unless given);
``ranks`` (2), ``steps`` (5), ``lead`` (1 ms), ``device``, ``hosts`` (1) over which the ranks
are spread, ``world_size`` (as many as ranks);
``missing_ranks: [1]`` leaves files out; ``cpu: true`` makes CPU traces; ``truncate: 0.5`` keeps that share
of every file. ``manifest: {...}`` and ``step_log: 100 x50  400 gc 300`` draw what ``tracedoc collect``
leaves beside the traces (:func:`write_job`). Keys of ``expect``: ``outcome``; ``severity``;
``gain_ms: [low, high]``, within 2 %; ``message`` and ``reason``, text that the finding's message or the
verdict's reason must hold.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from tracedoc.diagnosis import OUTCOMES, SEVERITIES
from tracedoc.errors import RuleError, TracedocError
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.run.steplog import CAPACITY, COLLECTION, CORE_WAIT, HEADER, MAGIC, RECORD, STEP
from tracedoc.testing.lane_words import DEFAULT_STEPS, LANE_LEAD_MS, LanesError
from tracedoc.testing.lanes import parse_lanes

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis, Finding, Verdict
    from tracedoc.judge.findings import Judgement
    from tracedoc.judge.rule import Rule
    from tracedoc.judge.yaml_file import Document
    from tracedoc.pipeline import Measured

GAIN_TOLERANCE: Final = 0.02
_GAIN_ZERO_MS: Final = 0.01  # an expected 0 is met by what would print as 0
_DEFAULT_LANES: Final = "compute 0-100"
_DEFAULT_DEVICE: Final = "NVIDIA H100 80GB HBM3"


class Expectation(msgspec.Struct, frozen=True):
    """What the verdict of the rule must be; ``None`` leaves a part open."""

    outcome: Annotated[str, msgspec.Meta(title="outcome")]
    severity: Annotated[str, msgspec.Meta(title="severity")] | None = None
    gain_ms: tuple[float, float] | None = None
    message: str | None = None
    reason: str | None = None


class CaseText(msgspec.Struct, frozen=True):
    """One case as a file states it."""

    name: str
    expect: Expectation
    lanes: str = _DEFAULT_LANES
    ranks: int = 2
    steps: int = DEFAULT_STEPS
    lead: float = LANE_LEAD_MS
    device: str = _DEFAULT_DEVICE
    hosts: int = 1
    world_size: int | None = None
    missing_ranks: tuple[int, ...] = ()
    cpu: bool = False
    truncate: float = 1.0
    manifest: Mapping[str, object] | None = None
    step_log: str = ""


class Case(CaseText, frozen=True):
    """One case of a rule. ``source`` and ``lanes_line`` say where its lanes begin, for error messages."""

    source: str = ""
    lanes_line: int = 0


class CaseFile(msgspec.Struct, frozen=True):
    """The cases of one rule."""

    rule: str
    cases: tuple[Case, ...]


class _FileText(msgspec.Struct, frozen=True):
    rule: str
    cases: tuple[CaseText, ...]


class CaseResult(msgspec.Struct, frozen=True):
    """Whether a case came out as expected, and if not, what came instead."""

    name: str
    passed: bool
    reason: str = ""


def run_case_file(path: str | Path, rule_directories: Sequence[str | Path] = ()) -> list[CaseResult]:
    """Run every case in ``path``, with the built-in rules and those in ``rule_directories``.

    Raises :class:`RuleError` with file, line and column where the file itself is wrong.
    """
    from tracedoc.judge.load import load_rules

    loaded = load_cases(path)
    rules = load_rules(rule_directories)
    return [_run(loaded.rule, case, rules) for case in loaded.cases]


def _run(rule: str, case: Case, rules: Sequence[Rule]) -> CaseResult:
    try:
        measured = measure_case(case)
    except TracedocError as error:
        return CaseResult(case.name, False, f"the diagnosis failed: {error.message}")
    return judge_case(rule, case, measured, rules)


def measure_case(case: Case) -> Measured:
    """Draw the traces of a case and measure them."""
    # The pipeline pulls in everything; reading cases need not.
    from tracedoc.pipeline import Options, measure

    with tempfile.TemporaryDirectory() as folder:
        return measure(write_traces(case, Path(folder)), Options(jobs=1))


def judge_case(rule: str, case: Case, measured: Measured, rules: Sequence[Rule]) -> CaseResult:
    """The result of a measured case: what ``rule``, judged beside all ``rules``, says of it."""
    from tracedoc.judge.findings import evaluate
    from tracedoc.pipeline import judge

    # Drawn hosts launch right before each kernel: a case is about the rule and its bound, if it has one.
    chosen = [one for one in rules if one.id == rule]
    bounded = any(one.gain or one.severity for one in chosen)
    said = judge(measured, rules, replay=False) if bounded else evaluate(chosen, measured.measurements)
    complaints = compare(said, rule, case.expect)
    return CaseResult(case.name, not complaints, "; ".join(complaints))


def write_traces(case: Case, folder: Path) -> list[Path]:
    """Write the traces of ``case`` into ``folder``, as ``rank-N.json``, and return the paths to diagnose."""
    try:
        builders = parse_lanes(
            case.lanes, ranks=case.ranks, steps=case.steps, lead=case.lead,
            world_size=case.world_size, device=None if case.cpu else case.device, hosts=case.hosts,
        )  # fmt: skip
    except LanesError as error:
        raise RuleError(f"{case.source}:{case.lanes_line + error.line}:1: {error.message}") from error
    paths = []
    for builder in builders:
        if builder.rank in case.missing_ranks:
            continue
        path = builder.write(folder / f"rank-{builder.rank}.json")
        if case.truncate < 1:
            whole = path.read_bytes()
            path.write_bytes(whole[: int(len(whole) * case.truncate)])
        paths.append(path)
    if case.manifest is None and not case.step_log:
        return paths
    ranks = [builder.rank for builder in builders]
    write_job(folder, ranks, case.manifest or {}, case.step_log, case.hosts)
    return [folder]


def compare(said: Diagnosis | Judgement, rule: str, expect: Expectation) -> list[str]:
    """The differences between what was said and what was expected of ``rule``, in words."""
    verdict = next((one for one in said.verdicts if one.rule_id == rule), None)
    if verdict is None:
        return [f"no rule {rule!r} was evaluated"]
    complaints: list[str] = []
    if verdict.outcome != expect.outcome:
        complaints.append(f"expected {expect.outcome}, got {verdict.outcome}{_why(verdict)}")
    if expect.reason is not None and expect.reason not in verdict.reason:
        complaints.append(f"expected a reason with {expect.reason!r}, got {verdict.reason!r}")
    about_finding = (expect.severity, expect.gain_ms, expect.message)
    if complaints or about_finding == (None, None, None):
        return complaints
    findings = [one for one in said.findings if one.rule_id == rule]
    if not findings:
        return [f"expected a finding, there is none{_why(verdict)}"]
    # A rule may speak of several ranks; one finding must meet the whole expectation.
    differences = [_compare_finding(one, expect) for one in findings]
    return min(differences, key=len)


def _compare_finding(finding: Finding, expect: Expectation) -> list[str]:
    complaints: list[str] = []
    if expect.severity is not None and finding.severity != expect.severity:
        complaints.append(f"expected severity {expect.severity}, got {finding.severity}")
    if expect.message is not None and expect.message not in finding.message:
        complaints.append(f"expected a message with {expect.message!r}, got {finding.message!r}")
    if expect.gain_ms is not None:
        low, high = expect.gain_ms
        if finding.gain is None:
            complaints.append(f"expected a gain of {low:g} to {high:g} ms, got none")
        elif not (_near(finding.gain.low_ms, low) and _near(finding.gain.high_ms, high)):
            got = f"{finding.gain.low_ms:.4g} to {finding.gain.high_ms:.4g} ms"
            complaints.append(f"expected a gain of {low:g} to {high:g} ms, got {got}")
    return complaints


def _near(value: float, expected: float) -> bool:
    return abs(value - expected) <= max(GAIN_TOLERANCE * abs(expected), _GAIN_ZERO_MS)


def _why(verdict: Verdict) -> str:
    parts = [f"{one.text}: {one.left} against {one.right}" for one in verdict.comparisons]
    if verdict.reason:
        parts.append(verdict.reason)
    return f" ({'; '.join(parts)})" if parts else ""


# Reading ------------------------------------------------------------------------------------------


def load_cases(path: str | Path) -> CaseFile:
    """Read a case file strictly: unknown and duplicate keys are errors, as are values of a wrong type."""
    from tracedoc.judge.yaml_file import Document

    document = Document(Path(path), {"outcome": OUTCOMES, "severity": SEVERITIES})
    text = document.read(_FileText, "a case file")
    if not text.cases:
        document.fail("there is no case in it", "cases")
    for number, case in enumerate(text.cases):
        _check(case, document, number)
    return CaseFile(
        text.rule,
        tuple(
            Case(**msgspec.structs.asdict(case), source=str(path), lanes_line=_lanes_line(document, number))
            for number, case in enumerate(text.cases)
        ),
    )


def _check(case: CaseText, document: Document, number: int) -> None:
    """Raise :class:`RuleError` for what the parts of a case cannot be beside each other."""
    place, expect = ("cases", number), case.expect
    if case.cpu and document.has("device", *place):
        document.fail("a CPU trace has no device", *place, "device")
    if any(not 0 <= rank < case.ranks for rank in case.missing_ranks):
        document.fail(f"missing_ranks are of 0 to {case.ranks - 1}", *place, "missing_ranks")
    if not 0 < case.truncate <= 1:
        document.fail("truncate is the share that is kept: above 0, at most 1", *place, "truncate")
    try:
        draw_log(case.step_log)
    except ValueError:
        document.fail("step_log is lengths in ms, as: 100 x50  400 gc 300", *place, "step_log")
    for name in ("severity", "gain_ms", "message"):
        if getattr(expect, name) is not None and expect.outcome != "finding":
            document.fail(f"only a finding has {name}", *place, "expect", name)
    if expect.gain_ms is not None and expect.gain_ms[0] > expect.gain_ms[1]:
        document.fail("gain_ms is [low, high], in ms a step", *place, "expect", "gain_ms")


def _lanes_line(document: Document, number: int) -> int:
    """The line (from 1) before the first line of a case's lanes; that of ``lanes: |`` itself."""
    place = ("cases", number)
    if not document.has("lanes", *place):
        return int(document.node(*place).start_mark.line)
    lanes: Any = document.node(*place, "lanes")
    return int(lanes.start_mark.line) + (lanes.style in ("|", ">"))


_BEGAN_NS = 1_700_000_000_000_000_000


def draw_log(words: str, *, rank: int = 0) -> bytes:
    """Return the bytes of a step log; raises :class:`ValueError` for words that are none."""
    content = [HEADER.pack(MAGIC, rank, CAPACITY, _BEGAN_NS)]
    end, number = _BEGAN_NS, 0
    tokens = words.split()
    while tokens:
        length = _ns(tokens.pop(0))
        times, pause, waited = 1, 0, 0
        if tokens and tokens[0].startswith("x"):
            times = int(tokens.pop(0)[1:])
        if len(tokens) > 1 and tokens[0] == "gc":
            pause = _ns(tokens[1])
            del tokens[:2]
        if len(tokens) > 1 and tokens[0] == "wait":
            waited = _ns(tokens[1])
            del tokens[:2]
        for _ in range(times):
            end += length
            number += 1
            if pause:
                content.append(RECORD.pack(2, COLLECTION, end - 1, pause))
            if waited:
                content.append(RECORD.pack(number, CORE_WAIT, end, waited))
            content.append(RECORD.pack(number, STEP, end, length))
    return b"".join(content)


def _ns(word: str) -> int:
    return round(float(word) * 1e6)


def write_job(
    folder: Path, ranks: Sequence[int], part: Mapping[str, object], log: str, hosts: int = 1
) -> None:
    """Write a manifest in which each rank says ``part``, and the log of each rank where ``log`` draws one."""
    entries = {}
    for place, rank in enumerate(ranks):
        host = f"node{place * hosts // len(ranks)}"
        entry = {"file": f"rank-{rank}.json", "host": host, "environment": {}, **part}
        if log:
            entry["step_log"] = f"rank-{rank}.steps"
            (folder / f"rank-{rank}.steps").write_bytes(draw_log(log, rank=rank))
        entries[str(rank)] = entry
    manifest = {"schema": MANIFEST_SCHEMA, "ranks": entries}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
