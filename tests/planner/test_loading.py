"""Hold what host memory it takes to load a checkpoint, and what is named only where it is the fastest."""

from __future__ import annotations

import pytest

from tracedoc.planner.assumptions import load_bytes_per_node, loading_note
from tracedoc.planner.candidates import Candidate, rank
from tracedoc.planner.hardware import Cluster, find_gpu, find_link, link_of
from tracedoc.planner.plan import advise, plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import shape_from_parameters

H100 = find_gpu("H100")


def asked(parameters: float, gpus: int, nodes: int = 1, **training: object) -> Question:
    settings = Training(**training)  # type: ignore[arg-type]
    return Question(shape_from_parameters(int(parameters)), settings, gpus, nodes, H100.memory_bytes)


def request(network: str | None = None, framework: str = "pytorch") -> PlanRequest:
    across = find_link(network, across=True) if network else None
    return PlanRequest(Cluster(H100, link_of(H100), across), framework=framework)


def chosen(question: Question, framework: str = "pytorch") -> Candidate:
    found = advise(question, request(framework=framework)).chosen
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("framework", "training", "gigabytes"),
    [
        ("pytorch", {}, 8 * 4 * 7),  # each of 8 processes holds 7e9 numbers in fp32
        ("accelerate", {}, 4 * 7),  # one does, and sends it to the others
        ("pytorch", {"lora_rank": 8}, 8 * 2 * 7),
        ("pytorch", {"lora_rank": 8, "base_bits": 4}, None),  # read onto the GPU
    ],
)
def test_a_checkpoint_is_held_by_each_process_that_loads_it(
    framework: str, training: dict[str, object], gigabytes: float | None
) -> None:
    question = asked(7e9, 8, **training)
    found = load_bytes_per_node(question, chosen(question, framework), framework)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


def test_a_small_checkpoint_is_not_worth_a_word() -> None:
    question = asked(350e6, 8)
    assert loading_note(question, chosen(question), "pytorch") == ""


def test_variants_of_sharding_are_named_only_where_they_are_the_fastest() -> None:
    """70e9 parameters over 8 nodes: a slow network favours what stays in the node, a fast one does not."""
    question = asked(70e9, 64, 8)
    slow = [one.strategy for one in rank(question, request("100Gbit/s"))]
    assert slow[0] in ("zero-3", "full-shard-node")
    assert "full-shard-node" in slow
    assert "full-shard-node" not in [one.strategy for one in rank(asked(7e9, 16, 2), request("ib-8x400g"))]
    settings = [one.strategy for one in rank(question, request("100Gbit/s", "accelerate"))]
    assert "full-shard-node" not in settings  # Accelerate's file cannot say it


def test_the_first_line_says_that_checkpointing_is_selective() -> None:
    answer = plan(asked(7e9, 8, checkpointing="selective"), request())
    assert "with selective activation checkpointing" in answer.summary


def test_a_gpu_without_published_runs_lies_between_those_with() -> None:
    """RTX 4090: 165e12 FLOPs to 1008e9 bytes, 164 a byte; A100 153 and H100 295."""
    matmul, attention = find_gpu("RTX 4090").shares
    part = (165e3 / 1008 - 312e3 / 2039) / (989e3 / 3350 - 312e3 / 2039)
    assert matmul == pytest.approx(0.80 - part * 0.16)
    assert attention == pytest.approx(0.53 - part * 0.21)
    assert find_gpu("L40S").shares == pytest.approx(find_gpu("H100").shares)
