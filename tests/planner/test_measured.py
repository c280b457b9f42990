"""Hold how a run's own measurement rescales what is predicted for other strategies."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tracedoc.planner.candidates import candidate
from tracedoc.planner.hardware import Cluster, find_gpu, link_of
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.measured import compare
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import shape_from_parameters

H100 = find_gpu("H100")
REQUEST = PlanRequest(Cluster(H100, link_of(H100), None))
RUN = Question(shape_from_parameters(10**9), Training(), 8, 1, 80e9)


def test_computation_that_took_twice_as_long_does_so_everywhere() -> None:
    usual = candidate(RUN, data_parallel(RUN, "full-shard"), REQUEST).step
    assert usual is not None
    twice = 2 * usual.compute_ms + usual.optimizer_ms
    found = compare(RUN, REQUEST, "full-shard", twice)
    assert found is not None
    assert found.scale == pytest.approx(2)
    assert found.predicted.expected_ms == usual.expected_ms
    before = candidate(RUN, data_parallel(RUN, "shard-grad-op"), REQUEST).step
    after = candidate(RUN, data_parallel(RUN, "shard-grad-op"), replace(REQUEST, scale=found.scale)).step
    assert before is not None
    assert after is not None
    assert after.compute_ms == pytest.approx(2 * before.compute_ms)
    assert after.comm_ms == before.comm_ms


def test_what_the_run_idled_stays_in_every_strategy() -> None:
    usual = candidate(RUN, data_parallel(RUN, "full-shard"), REQUEST).step
    assert usual is not None
    measured = usual.compute_ms + usual.optimizer_ms
    found = compare(RUN, REQUEST, "full-shard", measured)
    assert found is not None
    assert found.idle_ms(usual.expected_ms + 100) == pytest.approx(100)
    assert found.idle_ms(usual.expected_ms / 2) == 0
    slow = candidate(RUN, data_parallel(RUN, "full-shard"), replace(REQUEST, idle_ms=100.0)).step
    assert slow is not None
    assert slow.expected_ms == pytest.approx(usual.expected_ms + 100)
    note = found.note(usual.expected_ms + 100)
    assert note.startswith("Measured ")
    assert "with FSDP FULL_SHARD, predicted " in note
    assert "idles 100 ms" in note


def test_a_strategy_that_the_planner_does_not_know_is_not_compared() -> None:
    assert compare(RUN, REQUEST, "", 10.0) is None
    unknown = PlanRequest(Cluster(None, None, None))
    assert compare(RUN, unknown, "ddp", 10.0) is None
