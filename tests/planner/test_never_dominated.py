"""Random questions: no recommendation is beaten by a row of its table, and what is printed can be read."""

from __future__ import annotations

import ast
import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tomllib
import yaml

from tracedoc.errors import InputError
from tracedoc.planner.candidates import Candidate, families
from tracedoc.planner.families import read_model_config
from tracedoc.planner.hardware import Cluster, find_link, gpus, link_of, links
from tracedoc.planner.plan import Plan, plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import ModelShape, shape_from_parameters

READ: dict[str, Callable[[str], object]] = {
    "python": ast.parse, "yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads,
    "bash": shlex.split,
}  # fmt: skip
"""How a configuration is read, by its language."""
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 768, "head_dim": 128, "intermediate_size": 6144, "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    file = tmp_path_factory.mktemp("moe") / "config.json"
    file.write_text(json.dumps(MOE))
    return read_model_config(file)


def drawn(seed: int, experts: ModelShape) -> tuple[Question, PlanRequest]:
    """Return a question that somebody could ask; some cannot be answered."""
    draw = random.Random(seed)
    framework = draw.choice(
        ["pytorch", "pytorch", "accelerate", "trainer", "deepspeed", "torchtitan", "megatron"]
    )
    gpu = draw.choice(gpus())
    size = draw.choice([1, 2, 4, 8, 8, 8, 16, 16, 32, 64, 128])
    nodes = max(1, size // 8)
    network = draw.choice([link.name for link in links() if link.across])
    across = find_link(network, across=True) if nodes > 1 else None
    layouts = framework in ("torchtitan", "megatron")
    training = Training(
        precision="bf16-mixed" if gpu.bf16 else "fp16-mixed",
        optimizer=draw.choice(["adamw", "adamw", "adamw-8bit", "sgd"]) if not layouts else "adamw",
        sequence=draw.choice([512, 2048, 4096, 16384, 65536]),
        micro_batch=draw.choice([1, 1, 2, 8]),
        accumulation=draw.choice([1, 1, 4]),
        lora_rank=draw.choice([0, 0, 16]) if not layouts else 0,
        checkpointing=draw.choice(["auto", "auto", "auto", "on", "selective", "off"]),
        loss=draw.choice(["eager", "fused", "chunked"]),
        offload=draw.choice(["none", "none", "none", "all"]) if not layouts else "none",
    )
    parameters = int(draw.choice([1e8, 1e9, 3e9, 7e9, 13e9, 34e9, 70e9]))
    model = experts if draw.random() < 0.2 else shape_from_parameters(parameters)
    known = draw.random() < 0.9
    cluster = Cluster(gpu, link_of(gpu), across) if known else Cluster(None, None, across)
    searched = not layouts and known and draw.random() < 0.2
    batch = size * draw.choice([1, 4, 12]) if draw.random() < 0.2 else None
    request = PlanRequest(
        cluster,
        draw.choice(["speed"] * 4 + ["memory"]),
        framework,
        batch=batch,
        search=searched,
        overlaps=draw.choice([None, None, (), ("data",)]) if layouts else None,
        context_by=draw.choice(["", "", "ring", "gather"]) if layouts else "",
        keeps_accumulation=draw.random() < 0.1,
    )
    return Question(model, training, size, nodes, gpu.memory_bytes), request


def beaten(answer: Plan) -> tuple[Candidate, Candidate] | None:
    """The recommended row, and one of its framework in the same table that beats it."""
    rows = [one for one in answer.strategies if one.family in families(answer.framework)]
    chosen = next((one for one in rows if one.strategy == answer.recommended), None)
    better = [one for one in rows if chosen is not None and one.dominates(chosen)]
    return (chosen, better[0]) if chosen is not None and better else None


def check(seed: int, experts: ModelShape) -> bool:
    """Hold one question; whether something was recommended, and not refused."""
    question, request = drawn(seed, experts)
    try:
        answer = plan(question, request)
    except InputError as refused:
        if refused.hint:
            return False
        raise
    assert beaten(answer) is None, seed
    for configuration in answer.configurations:
        READ[configuration.language](configuration.text)
    if answer.recommended is not None and answer.found:
        assert answer.recommended == answer.found[0].strategy, seed
        best = max(one.tokens_per_second for one in answer.found)
        assert (answer.tokens_per_second or 0) >= 0.97 * best, seed
    step = answer.strategies[0].step
    if answer.recommended is not None and step is not None and step.width > 1.52:
        assert any("is wide: " in text and "narrows it" in text for text in answer.assumptions), seed
    if answer.recommended is None:
        fitting = [one for one in answer.strategies if one.doubt <= 1]
        assert all(one.family not in families(answer.framework) for one in fitting), seed
        assert not fitting or "Nothing of" in answer.summary, seed
    return answer.recommended is not None


def test_no_recommendation_is_beaten_by_a_row_of_its_table(experts: ModelShape) -> None:
    answered = sum(check(seed, experts) for seed in range(30))
    assert answered > 10


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 3000, 50))
def test_no_recommendation_of_2000_is_beaten(first: int, experts: ModelShape) -> None:
    answered = sum(check(seed, experts) for seed in range(first, first + 50))
    assert answered > 15


def test_a_row_beats_another_only_if_it_is_nowhere_worse(tmp_path: Path) -> None:
    question = Question(shape_from_parameters(int(13e9)), Training(), 8, 1, 85e9)
    a100 = next(gpu for gpu in gpus() if gpu.name == "A100 SXM 80GB")
    rows = {c.strategy: c for c in plan(question, PlanRequest(Cluster(a100, link_of(a100), None))).strategies}
    full, whole = rows["full-shard"], rows["shard-grad-op"]
    assert full.dominates(whole)  # faster, smaller, without checkpointing
    assert not whole.dominates(full)
    assert not full.dominates(full)
    assert not rows["zero-2"].dominates(full)  # faster, and larger
