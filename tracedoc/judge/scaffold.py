"""Write a new rule and its cases, ready to be changed: a rule that can be read, and cases that pass."""

from __future__ import annotations

import re
from pathlib import Path

from tracedoc.errors import RuleError
from tracedoc.judge.rule_cache import builtin_directory

RULE = """id: {id}
title: "{title}: say in a few words what is wrong"
topic: communication
status: preview
since: "0.1"
scope: run
needs: [kernels, collectives]
params:
  min_share: {{value: 0.10, unit: fraction, why: "say why less of it is no finding"}}
when: exposed_comm_ms / step_ms > min_share
gain: {{at_most: exposed_comm_ms, assuming: "say what has to hold for all of it"}}
message: "{{exposed_comm_ms}} of the {{step_ms}} step is ..."
why: >
  Say in two sentences why this costs time: what waits for what.
fixes:
  - framework: pytorch
    title: Say what to change
    change: "the line of code or configuration"
    risk: none for numerics
"""

CASES = """rule: {id}
cases:
  - name: the fault, drawn as lanes in milliseconds
    lanes: |
      backward   20-60
      compute    0-60
      allreduce  60-100  64MiB
    expect: {{outcome: finding, gain_ms: [0, 40], message: "40 ms of the 100 ms step"}}
  - name: a healthy job that looks like it
    lanes: |
      backward   20-100
      compute    0-100
      allreduce  60-100  64MiB
    expect: {{outcome: pass}}
  - name: one GPU
    ranks: 1
    expect: {{outcome: not_applicable}}
"""


def write_rule(rule_id: str, directory: Path) -> tuple[Path, Path]:
    """Write ``ID.yaml`` into ``directory`` and its cases into the folder ``tests`` there; return both paths.

    Raises :class:`RuleError` for an id that is none, that tracedoc uses itself, or whose files are there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", rule_id) or len(rule_id) > 60:
        raise RuleError(
            f"id {rule_id!r} must be lower-case words joined by hyphens", "name it after the failing state"
        )
    if any(path.stem == rule_id for path in builtin_directory().rglob("*.yaml")):
        raise RuleError(f"tracedoc has a rule {rule_id}", "take another id: those of all rules must differ")
    rule, cases = directory / f"{rule_id}.yaml", directory / "tests" / f"{rule_id}.yaml"
    for path in (rule, cases):
        if path.exists():
            raise RuleError(f"{path} is there already", "take another id or folder")
    cases.parent.mkdir(parents=True, exist_ok=True)
    title = rule_id.replace("-", " ").capitalize()
    rule.write_text(RULE.format(id=rule_id, title=title), encoding="utf-8")
    cases.write_text(CASES.format(id=rule_id), encoding="utf-8")
    return rule, cases
