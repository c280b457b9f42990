"""Hold the model of model states against real training on CPU, set up by the very code that a plan prints."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.planner.ranks_of_a_job import run_as_ranks
from tracedoc.planner.configurations import configurations
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.memory import model_states
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

WORLD = 4
NODES = 2  # for HYBRID_SHARD; the processes share one machine
DTYPES = {"fp32": "float32", "bf16-mixed": "float32", "bf16": "bfloat16"}
CASES = [
    ("ddp", "fp32"),
    ("ddp", "bf16-mixed"),
    ("zero-redundancy", "fp32"),
    ("shard-grad-op", "bf16-mixed"),
    ("full-shard", "fp32"),
    ("full-shard", "bf16-mixed"),
    ("full-shard", "bf16"),
    ("hsdp", "bf16-mixed"),
]


def question(parameters: int, strategy: str, precision: str) -> Question:
    nodes = NODES if strategy == "hsdp" else 1
    return Question(shape_from_parameters(parameters), Training(precision=precision), WORLD, nodes, 1e9)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """Return what every process measured; all in one run, as importing torch takes longest."""
    asked = {}
    for strategy, precision in CASES:
        printed = configurations(question(200_000, strategy, precision).changed(checkpointing="on"), strategy)
        asked[f"{strategy} {precision}"] = (printed[0].text, DTYPES[precision])
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    script = Path(__file__).with_name("measure_states.py")
    written = run_as_ranks([sys.executable, str(script), str(meeting)], json.dumps(asked), world_size=WORLD)
    return [json.loads(out.splitlines()[-1]) for out in written]


@pytest.mark.parametrize(("strategy", "precision"), CASES)
def test_model_states_agree_with_a_real_run_within_5_percent(
    strategy: str, precision: str, measured: list[dict[str, dict[str, int]]]
) -> None:
    name = f"{strategy} {precision}"
    whole = measured[0][name]["whole"]
    expected = model_states(
        question(whole, strategy, precision), data_parallel(question(whole, strategy, precision), strategy)
    )
    for what in ("parameters", "gradients", "optimizer"):
        mean = sum(rank[name][what] for rank in measured) / WORLD
        assert mean == pytest.approx(getattr(expected, what), rel=0.05), what
    total = max(sum(rank[name][w] for w in ("parameters", "gradients", "optimizer")) for rank in measured)
    assert total == pytest.approx(expected.states, rel=0.05)
