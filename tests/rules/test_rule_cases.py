"""Every case in tests/rules/*.yaml: its lanes, through the real reader, give the verdict it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.testing.cases import Case, load_cases, run_case

_CASES = [
    pytest.param(loaded.rule, case, id=f"{path.stem}: {case.name}")
    for path in sorted(Path(__file__).parent.glob("*.yaml"))
    for loaded in (load_cases(path),)
    for case in loaded.cases
]


@pytest.mark.parametrize(("rule", "case"), _CASES)
def test_verdict_is_as_expected(rule: str, case: Case) -> None:
    result = run_case(rule, case)
    assert result.passed, result.reason
