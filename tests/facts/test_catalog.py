"""Facts have definitions and tests, and one that fails costs only itself."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tests.topics.small_runs import (
    facts_of_rank,
    two_steps,
)
from tracedoc.facts.catalog import CATALOG, computed
from tracedoc.testing import TraceBuilder
from tracedoc.topics.host import rank as host
from tracedoc.values import Failed


def test_every_fact_says_what_it_is() -> None:
    for definition in CATALOG.values():
        assert definition.doc.endswith((".", ")")), definition.name
        assert definition.name == definition.name.lower()
        assert all(f'"{value}"' in definition.doc for value in definition.values), definition.name
        suffixes = {"ms": "_ms", "fraction": "_frac", "bytes": ("_bytes", "_per_step"), "gbps": "_gbps"}
        if definition.unit in suffixes:
            assert definition.name.endswith(suffixes[definition.unit]), definition.name


def test_a_fact_that_fails_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from msgspec.structs import replace

    def broken(_: object) -> float:
        raise RuntimeError("boom")

    monkeypatch.setitem(CATALOG, "idle_ms", replace(CATALOG["idle_ms"], compute=broken))
    facts = facts_of_rank(tmp_path, two_steps(TraceBuilder()))
    failed = facts["idle_ms"]
    assert isinstance(failed, Failed)
    assert failed.reason == "error: RuntimeError: boom"
    assert 'raise RuntimeError("boom")' in failed.traceback
    assert facts["step_ms"] == 100


def test_a_shared_function_that_fails_costs_the_facts_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> float:
        raise RuntimeError("boom")

    monkeypatch.setattr(host, "launch_interval_ns", broken)
    caplog.set_level("DEBUG", logger="tracedoc")
    diagnosis = tracedoc.diagnose([two_steps(TraceBuilder()).write(tmp_path / "rank-0.json")])
    failed = {name for name, fact in diagnosis.facts.items() if fact.unknown == "error: RuntimeError: boom"}
    # Facts about launches, and the hooks of FSDP, whose idle time is a part of theirs.
    assert {"launch_pace_idle_ms", "host_away_idle_ms", "short_kernel_idle_ms"} <= failed
    assert diagnosis.facts["step_ms"].value == 100
    assert diagnosis.facts["exposed_comm_ms"].value == 0
    verdicts = {one.rule_id: one.outcome for one in diagnosis.verdicts}
    assert (verdicts["host-bound-launches"], verdicts["blocking-syncs"]) == ("error", "pass")
    assert 'raise RuntimeError("boom")' in caplog.text


def test_every_fact_is_held_by_a_test_or_by_the_cases_of_a_rule(repository: Path) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("*.py"))
    rules = "".join(path.read_text(encoding="utf-8") for path in (repository / "rules").rglob("*.yaml"))
    held = set(re.findall(r"[a-z][a-z0-9_]+", tests + rules))
    assert [name for name in CATALOG if name not in held] == []


def test_a_value_that_is_no_number_is_a_fault_of_its_fact() -> None:
    for value in (math.nan, math.inf):
        definition = replace(CATALOG["stage"], compute=lambda run, value=value: {"0": 1.0, "1": value})
        values, _ = computed(definition, None)
        assert values == {"0": 1.0, "1": Failed("error: not a number")}
