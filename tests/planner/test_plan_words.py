"""Hold the words in which a plan tells times, links, and that nothing helps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tracedoc.planner.candidates import Candidate, step_range
from tracedoc.planner.hardware import Cluster, find_gpu, find_link, link_of
from tracedoc.planner.plan import advise, plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import shape_from_parameters
from tracedoc.planner.timing import Step


def asked(parameters: float, gpus: int = 8, nodes: int = 1, memory: float = 80e9) -> Question:
    return Question(shape_from_parameters(int(parameters)), Training(), gpus, nodes, memory)


H100 = find_gpu("H100")
ONE_NODE = PlanRequest(Cluster(H100, link_of(H100), None))
TWO_NODES = PlanRequest(Cluster(H100, link_of(H100), find_link("roce-100g", across=True)))


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    chosen = advise(asked(1e9), ONE_NODE).chosen
    assert chosen is not None
    return chosen


@pytest.mark.parametrize(
    ("best", "worst", "text"),
    [
        (5.0, 9.6, "5 to 9.6 ms"),
        (9.5, 9.8, "9.8 ms"),
        (120.4, 310.2, "120 to 310 ms"),
        (309.8, 310.2, "310 ms"),
        (1500.0, 9900.0, "1.50 to 9.90 s"),
        (9000.0, 12_000.0, "9.0 to 12.0 s"),
        (11_960.0, 12_040.0, "12.0 s"),
    ],
)
def test_a_step_is_told_from_best_to_worst(
    best: float, worst: float, text: str, candidate: Candidate
) -> None:
    assert step_range(replace(candidate, step=Step(1.0, 1.0, 0.0, 1.0, best, best, worst))) == text


def test_no_step_is_told_where_none_is_predicted(candidate: Candidate) -> None:
    assert step_range(replace(candidate, step=None)) == ""


def test_links_are_told_with_whose_bandwidth_it_is() -> None:
    texts = plan(asked(7e9, 16, 2), TWO_NODES).assumptions
    assert any("450 GB/s (a GPU, one way)" in text for text in texts)
    assert any("12.5 GB/s (a node, all adapters)" in text for text in texts)


def test_where_nothing_helps_the_plan_says_so() -> None:
    summary = plan(asked(1e15, 1, memory=1e9), ONE_NODE).summary
    assert summary.endswith("No single change that is known here helps.")


def test_turning_points_double_and_halve_what_was_asked() -> None:
    points = dict(point.split(": ") for point in plan(asked(1e9), ONE_NODE).turning_points)
    assert points["1 GPU"] == "everything fits on it"
    (micro_batch,) = (what.removeprefix("micro-batch ") for what in points if what.startswith("micro-batch"))
    assert int(micro_batch) in (2, 4, 8, 16, 32, 64, 128)
    question = asked(1e9).changed(micro_batch=int(micro_batch))
    before = asked(1e9).changed(micro_batch=int(micro_batch) // 2)
    one, other = (advise(each, ONE_NODE).chosen for each in (before, question))
    assert one is not None
    assert other is not None
    assert (one.strategy, one.checkpointing) != (other.strategy, other.checkpointing)


def test_adapters_are_told_with_their_matrices() -> None:
    question = Question(shape_from_parameters(int(7e9)), Training(lora_rank=16), 2, 1, 24e9)
    texts = plan(question, ONE_NODE).assumptions
    assert any(text.startswith("LoRA of rank 16 on q_proj, v_proj: ") for text in texts)
    chosen = question.changed(lora_targets=("o_proj",))
    assert any("on o_proj: " in text for text in plan(chosen, ONE_NODE).assumptions)
