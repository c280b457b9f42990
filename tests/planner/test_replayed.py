"""Hold when a step that a run's replay predicts stands for the planner's estimate."""

from __future__ import annotations

from msgspec.structs import replace

from tracedoc.planner.candidates import candidate
from tracedoc.planner.hardware import Cluster, find_gpu, link_of
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.measured import replayed_note, replayed_steps
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import shape_from_parameters

H100 = find_gpu("H100")
RUN = Question(shape_from_parameters(10**9), Training(checkpointing="off"), 4, 1, 80e9)
PREDICTED = [("keep-gathered", (80.0, 85.0, 90.0)), ("more-ranks by=2", (101.0, 102.0, 103.0))]
KNOWN = replayed_steps(RUN, "full-shard", 100.0, PREDICTED)
REQUEST = PlanRequest(Cluster(H100, link_of(H100), None), replayed=KNOWN)


def range_of(question: Question, strategy: str) -> tuple[float, float, float]:
    step = candidate(question, data_parallel(question, strategy), REQUEST).step
    assert step is not None
    return step.best_ms, step.expected_ms, step.worst_ms


def test_parameters_that_stay_gathered_are_the_next_strategy() -> None:
    assert range_of(RUN, "shard-grad-op") == (80.0, 85.0, 90.0)
    assert range_of(RUN, "full-shard") == (100.0, 100.0, 100.0)


def test_twice_the_ranks_are_the_same_strategy_on_twice_the_gpus() -> None:
    assert range_of(RUN.changed(gpus=8), "full-shard") == (101.0, 102.0, 103.0)
    assert replayed_note(RUN.changed(gpus=8), KNOWN).endswith("102 ms for FSDP FULL_SHARD.")
    assert replayed_note(RUN.changed(gpus=16), KNOWN) == ""


def test_other_training_machines_and_strategies_are_estimated() -> None:
    bare = replace(REQUEST, replayed=())
    for question in (RUN.changed(micro_batch=2), RUN.changed(gpus=8, nodes=2), RUN.changed(gpus=16)):
        for strategy in ("full-shard", "shard-grad-op"):
            assert candidate(question, data_parallel(question, strategy), REQUEST) == candidate(
                question, data_parallel(question, strategy), bare
            )
    assert candidate(RUN, data_parallel(RUN, "ddp"), REQUEST) == candidate(
        RUN, data_parallel(RUN, "ddp"), bare
    )


def test_without_a_replay_or_a_measured_step_nothing_is_known() -> None:
    assert replayed_steps(RUN, "full-shard", 100.0, []) == ()
    assert replayed_steps(RUN, "full-shard", None, PREDICTED) == ()
    assert replayed_steps(RUN, "", 100.0, PREDICTED) == ()
    (_, only) = replayed_steps(RUN, "ddp", 100.0, PREDICTED)
    assert only.gpus == 8
