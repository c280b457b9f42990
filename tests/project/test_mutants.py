"""Hold that each mutant still finds the definition that it changes, and its tests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

LISTED = msgspec.yaml.decode((Path(__file__).parents[1] / "mutants.yaml").read_bytes())


@pytest.mark.parametrize("mutant", LISTED, ids=[mutant["name"] for mutant in LISTED])
def test_mutant_changes_one_line_that_tests_hold(mutant: dict[str, str], repository: Path) -> None:
    text = (repository / mutant["file"]).read_text(encoding="utf-8")
    assert text.count(mutant["line"]) == 1
    assert mutant["mutant"] != mutant["line"]
    assert (repository / mutant["tests"].split("::")[0]).exists()
