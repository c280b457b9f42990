"""What is known of where a script calls what takes time, with and without stacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tracedoc
from tracedoc.testing.lanes import parse_lanes
from tracedoc.topics.host.in_loop import script_code_feeds, stacks_recorded
from tracedoc.topics.input.run import slow_loading_captured
from tracedoc.values import Unknown


def test_a_trace_without_stacks_shows_no_place_in_the_loop(tmp_path: Path) -> None:
    (builder,) = parse_lanes("step: 100\nloader 0-40\ncompute 40-100", ranks=1)
    measurements = tracedoc.measure([builder.write(tmp_path / "rank-0.json")]).measurements
    assert stacks_recorded(measurements.run) is False
    assert isinstance(script_code_feeds.by_rank(measurements.run)["0"], Unknown)
    assert measurements.facts["loading_ms"].value == 40
    assert slow_loading_captured(measurements.run) is False


@pytest.mark.parametrize(
    ("doing", "kind", "same"),
    [("loading", "input", True), ("loading", "host", False), ("other", "input", False)],
)
def test_a_loader_is_slow_in_the_log_as_in_the_capture(
    monkeypatch: pytest.MonkeyPatch, doing: str, kind: str, same: bool
) -> None:
    monkeypatch.setattr("tracedoc.topics.input.run.slow_code", lambda run: SimpleNamespace(doing=doing))
    monkeypatch.setattr("tracedoc.topics.input.run.long_step_kind", lambda run: kind)
    run: Any = None
    assert slow_loading_captured(run) is same
