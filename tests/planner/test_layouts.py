"""Work layouts out by hand: what a stage holds and sends, its bubble, and the files that set it up."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import tomllib
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.activations import block_activations
from tracedoc.planner.candidates import rank
from tracedoc.planner.configurations import megatron_arguments, torchtitan_toml
from tracedoc.planner.families import read_model_config
from tracedoc.planner.hardware import Cluster, LinkKind, find_gpu, find_link, link_of
from tracedoc.planner.layouts import Layout, Update, data_parallel, layouts, stage_blocks
from tracedoc.planner.memory import model_states, peak_memory
from tracedoc.planner.plan import Plan, advise, plan
from tracedoc.planner.setup import PlanRequest, Question, Training
from tracedoc.planner.shape import ModelShape, shape_from_parameters
from tracedoc.planner.timing import predict
from tracedoc.planner.traffic import Transfer, bandwidth, transfers

NVLINK = LinkKind("nvlink", "NVLink", False, 400.0, 1.0, 0.0, "here")
NETWORK = LinkKind("ib", "InfiniBand", True, 400.0, 1.0, 0.0, "here")
CLUSTER = Cluster(find_gpu("H100"), NVLINK, NETWORK)


def model(tmp_path: Path, **keys: object) -> ModelShape:
    """Return a Llama of 8 blocks of 64 x 64 x 4 + 64 x 128 x 3 weights, and 2 x 256 x 64 outside."""
    small = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 20,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small | keys))
    return read_model_config(file)


LLAMA_405B = {
    "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
    "intermediate_size": 53248, "vocab_size": 128256,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "head_dim": 8,
}  # fmt: skip


def ask(shape: ModelShape, gpus: int = 16, **training: object) -> Question:
    settings = {"sequence": 64, "precision": "bf16-mixed", **training}
    return Question(shape, Training(**settings), gpus, max(1, gpus // 8), 80e9)  # type: ignore[arg-type]


def sent(question: Question, layout: Layout, what: str) -> list[Transfer]:
    """Return what of this travels in one micro-batch."""
    return [one for one in transfers(question, layout) if one.what == what]


def gbps(question: Question, layout: Layout, what: str) -> float:
    """Return the bandwidth of the first of these transfers."""
    link = bandwidth(sent(question, layout, what)[0], question, CLUSTER)
    assert link is not None
    return link[0]


BLOCK = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
END = 256 * 64


def test_megatron_takes_6_and_12_by_d_bytes_a_weight(tmp_path: Path) -> None:
    """Half of the blocks and the embedding, halved: its distributed optimizer over 4 GPUs."""
    layout = Layout("megatron", data=4, tensor=2, pipeline=2, rounds=2)
    states = peak_memory(ask(model(tmp_path)), layout).states
    weights = (4 * BLOCK + END) / 2
    assert states.parameters == pytest.approx(2 * weights, rel=0.01)
    assert states.gradients == pytest.approx(4 * weights, rel=0.01)
    assert states.optimizer == pytest.approx(12 * weights / 4, rel=0.01)


def test_torchtitan_shards_all_states_and_with_a_pipeline_keeps_the_stage_gathered(tmp_path: Path) -> None:
    shape = model(tmp_path)
    flat = peak_memory(ask(shape), Layout("torchtitan", data=8, tensor=2)).states
    whole = 8 * BLOCK + 2 * END
    assert flat.states == pytest.approx(16 * whole / 16, rel=0.01)
    accumulated = Layout("torchtitan", data=8, tensor=2, rounds=4)  # each micro-batch's gradients are reduced
    assert peak_memory(ask(shape), accumulated).states == flat
    layout = Layout("torchtitan", data=4, tensor=2, pipeline=2, rounds=2)
    piped = peak_memory(ask(shape), layout).states
    stage = (4 * BLOCK + END) / 2  # blocks 0 to 3 and the embedding; 16 bytes over 4, 2 and 4 kept whole
    assert piped.copies == pytest.approx(2 * stage, rel=0.01)
    assert piped.states == pytest.approx((16 / 4 + 4) * stage, rel=0.01)


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages(tmp_path: Path) -> None:
    """1F1B: the first of 4 stages keeps 4 times 2 of 8 blocks, as much as without a pipeline."""
    question = ask(model(tmp_path))
    layout = Layout("megatron", data=2, tensor=2, pipeline=4, rounds=8)
    kept = peak_memory(question, layout).activations
    assert kept == pytest.approx(4 * 2 * block_activations(question, layout) / 2)
    interleaved = Layout("megatron", data=2, tensor=2, pipeline=4, rounds=8, chunks=2)
    more = peak_memory(question, interleaved).activations
    assert more == pytest.approx(kept * (1 + 3 / 8))
    short = replace(interleaved, rounds=4)  # no more than there are
    assert peak_memory(question, short).activations == pytest.approx(kept)


def test_context_parallelism_gathers_keys_and_values_of_the_whole_sequence(tmp_path: Path) -> None:
    """Keys and values: 64 numbers of 64 tokens each, halved by TP 2; 3 of 4 parts gathered, and gradients."""
    question = ask(model(tmp_path, vocab_size=8), gpus=8, checkpointing="on")

    def working(family: str) -> float:
        layout = Layout(family, data=1, tensor=2, context=4)
        memory = peak_memory(question, layout)
        assert memory.moment == "first block"
        return memory.working

    stream = 64 / 4 * 64 * 2 / 2  # what DTensor keeps whole of attention's and the MLP's input, less its half
    assert working("torchtitan") - working("megatron") == pytest.approx(
        2 * stream + 2 * 64 * 64 * 4 / 2 * 3 / 4
    )


def test_inputs_of_8_bit_products_are_saved_in_8_bits(tmp_path: Path) -> None:
    """Of a token 64 numbers for attention, 64 and 128 for the MLP; attention's 64 are there twice."""
    layout = Layout("megatron", data=16)
    wide = peak_memory(ask(model(tmp_path)), layout).activations
    narrow = peak_memory(ask(model(tmp_path), fp8=True), layout).activations
    assert wide - narrow == pytest.approx(8 * 64 * (64 + 64 + 128 - 64))


def test_one_round_of_interleaved_micro_batches_keeps_the_gradients_of_half_a_stage(tmp_path: Path) -> None:
    """The second part of the stage is reduced before the backward pass of the first; with more rounds not."""
    question = ask(model(tmp_path), checkpointing="on")
    layout = Layout("torchtitan", data=2, tensor=2, pipeline=4, rounds=4)

    def gradients(layout: Layout) -> float:
        return peak_memory(question, layout).states.gradients

    once, stage = gradients(layout), 3 * BLOCK / 2  # the second of 4 stages has 3 of 8 blocks
    assert once == pytest.approx((4 / 2 + 4) * stage, rel=0.01)
    assert gradients(replace(layout, chunks=2)) == pytest.approx((4 / 2 + 4 / 2) * stage, rel=0.01)
    assert gradients(replace(layout, chunks=2, rounds=8)) == pytest.approx(once)


def test_torchtitan_keeps_what_stages_send_and_buffers_for_gradients(tmp_path: Path) -> None:
    """The second of 4 stages: 3 blocks' inputs of 3 micro-batches, and of 6 in all 3 more buffers for inputs,
    6 for gradients, and 3 that it sent.
    """
    question = ask(model(tmp_path), checkpointing="on")
    layout = Layout("torchtitan", data=2, tensor=2, pipeline=4, rounds=6)
    stream = 64 * 64 * 2 / 2
    kept = peak_memory(question, layout).activations
    assert kept == pytest.approx((3 * 3 + 3 + 6 + 3) * stream)


def test_converting_to_8_bits_takes_6_bytes_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token and block: 2 x 64 and 64 + 128 go in, 2 x 64, 3 x 64 and 2 x 128 come out, 8 blocks of them."""
    monkeypatch.setattr("tracedoc.planner.timing.NARROW_TRAFFIC", 0.0)
    question = ask(model(tmp_path), gpus=8, fp8=True)
    layout = Layout("megatron", data=8)
    step = predict(question, layout, CLUSTER)
    slow = replace(CLUSTER.gpu, hbm_gbps=CLUSTER.gpu.hbm_gbps / 2) if CLUSTER.gpu else None
    slower = predict(question, layout, replace(CLUSTER, gpu=slow))
    plain = ask(model(tmp_path), gpus=8)
    without = predict(plain, layout, CLUSTER)
    without_slower = predict(plain, layout, replace(CLUSTER, gpu=slow))
    assert step is not None
    assert slower is not None
    assert without is not None
    assert without_slower is not None
    numbers = 8 * 64 * (2 * 64 + 64 + 128 + 2 * 64 + 3 * 64 + 2 * 128)
    longer = (slower.compute_ms - step.compute_ms) - (without_slower.compute_ms - without.compute_ms)
    assert longer == pytest.approx(numbers * 6 / 3350e9 * 1e3)


def test_experts_of_several_nodes_share_the_adapters_of_each(tmp_path: Path) -> None:
    """Of 16 GPUs in 2 nodes 8 of 15 peers are in the other node: 50 GB/s there for each, 400 here."""
    shape = model(tmp_path, **MOE)
    layout = Layout("torchtitan", data=16, expert=16)
    assert gbps(ask(shape), layout, "expert") == pytest.approx(1 / (8 / 15 / 50 + 7 / 15 / 400))
    assert gbps(ask(shape), replace(layout, expert=8), "expert") == 400.0
    (alone,) = sent(ask(shape), layout, "expert")
    (overlapped,) = sent(ask(shape), replace(layout, strategy="megatron"), "expert")
    assert (alone.exposed, overlapped.exposed) == (1.0, 0.4)


def test_megatron_is_given_the_option_for_what_is_predicted_overlapped(tmp_path: Path) -> None:
    shape, word = model(tmp_path, **MOE), "--overlap-moe-expert-parallel-comm"
    apart, together = Layout("megatron", data=16, expert=16), Layout("megatron", data=16, expert=8)
    assert word in megatron_arguments(ask(shape), apart)
    assert word not in megatron_arguments(ask(shape), together)
    staged = Layout("megatron", data=16, pipeline=2, expert=16, rounds=4)  # not interleaved
    assert word not in megatron_arguments(ask(shape, gpus=32), staged)


def test_experts_are_shared_by_their_own_degree(tmp_path: Path) -> None:
    shape = model(tmp_path, **MOE)
    together = peak_memory(ask(shape), Layout("megatron", data=16)).states
    apart = peak_memory(ask(shape), Layout("megatron", data=16, expert=4)).states
    experts = 8 * 16 * 3 * 64 * 32
    assert together.parameters - apart.parameters == pytest.approx(2 * experts * 3 / 4)
    # GPUs with other experts share no expert's states: 4 have each, of a quarter of them.
    assert apart.optimizer == pytest.approx(together.optimizer)


def test_all_gpus_together_hold_every_states_once_however_experts_are_split(tmp_path: Path) -> None:
    shape = model(tmp_path, **MOE)
    for layout in (
        Layout("torchtitan", data=16, expert=8),
        Layout("torchtitan", data=4, tensor=2, context=2, expert=4),
    ):
        states = peak_memory(ask(shape), layout).states
        assert 16 * states.states == pytest.approx(16 * shape.parameters, rel=0.01)
        experts = 8 * 16 * 3 * 64 * 32 / layout.tensor / layout.expert
        peers = layout.shards // layout.expert
        bytes_sent = sum(one.sent for one in sent(ask(shape), layout, "experts' data"))
        assert bytes_sent == pytest.approx(experts * (2 * 2 + 4) * (peers - 1) / peers)


def test_tensor_parallelism_sends_the_stream_four_times_a_block_and_pass(tmp_path: Path) -> None:
    question = ask(model(tmp_path), micro_batch=2)
    layout = Layout("torchtitan", data=4, tensor=4, micro_batch=2)
    (once,) = sent(question, layout, "tensor")
    assert once.sent == pytest.approx(8 * 4 * 2 * (2 * 64 * 64 * 2) * 3 / 4)
    assert gbps(question, layout, "tensor") == 400.0
    (again,) = sent(question.changed(checkpointing="on"), layout, "tensor")
    assert again.sent == pytest.approx(1.5 * once.sent)


def test_rings_that_share_the_adapters_of_a_node_are_slower(tmp_path: Path) -> None:
    """8 rings of data parallelism, one for each tensor rank of a node: an eighth of 400 GB/s each."""
    assert gbps(ask(model(tmp_path)), Layout("torchtitan", data=2, tensor=8), "data") == 50.0


def test_data_parallelism_is_a_layout_that_splits_nothing_else(tmp_path: Path) -> None:
    """torchtitan over 8 GPUs is FSDP: as long a step; at the loss a block is gathered, and no embedding."""
    question = ask(model(tmp_path), gpus=8, micro_batch=4)
    layout, sharded = Layout("torchtitan", data=8, micro_batch=4), data_parallel(question, "full-shard")
    assert model_states(question, layout) == model_states(question, sharded)
    one, other = (predict(question, each, CLUSTER) for each in (layout, sharded))
    assert one is not None
    assert other is not None
    assert one.expected_ms == other.expected_ms
    peaks = [peak_memory(question, each) for each in (layout, sharded)]
    assert peaks[0].activations == peaks[1].activations
    assert peaks[0].moment == peaks[1].moment == "loss"
    assert peaks[0].units - peaks[1].units == 2 * BLOCK - 2 * (256 * 64 + 64)


@pytest.mark.parametrize(("chunks", "bubble"), [(1, 7 / 71), (2, 3.5 / 67.5)])
def test_the_bubble_is_what_stages_wait_over_the_step(chunks: int, bubble: float) -> None:
    assert Layout("megatron", 8, 8, 8, rounds=64, chunks=chunks).bubble == pytest.approx(bubble)


def test_a_pipelines_step_is_micro_batches_and_stages_but_one(tmp_path: Path) -> None:
    """4 even stages, 4 micro-batches: 7 times a stage's micro-batch, of which 4 are work."""
    layout = Layout("megatron", data=1, pipeline=4, rounds=4)
    far = Cluster(find_gpu("H100"), NVLINK, NETWORK)
    step = predict(ask(model(tmp_path), gpus=4), layout, far)
    assert step is not None
    rest = step.optimizer_ms + step.comm_ms
    assert step.compute_ms * 7 / 4 <= step.expected_ms <= step.compute_ms * 7 / 4 + 7 / 4 * rest


@pytest.mark.parametrize(
    ("blocks", "family", "stages", "parts"),
    [
        (126, "torchtitan", 8, (15, 16, 15)),
        (80, "megatron", 8, (10, 10, 10)),
        (126, "megatron", 16, (7, 8, 7)),
        (8, "torchtitan", 1, (8, 8, 8)),
    ],
)
def test_stages_have_whole_blocks(blocks: int, family: str, stages: int, parts: tuple[int, ...]) -> None:
    assert stage_blocks(blocks, Layout(family, 1, pipeline=stages)) == parts


def test_every_layout_uses_all_gpus_and_splits_heads_inside_a_node(tmp_path: Path) -> None:
    shape = model(tmp_path, num_key_value_heads=4)
    found = list(layouts(ask(shape, gpus=16), "torchtitan", Update(16)))
    assert found
    for layout in found:
        assert layout.data * layout.tensor * layout.pipeline * layout.context == 16
        assert layout.tensor in (1, 2, 4)  # of 4 heads of keys
        assert layout.data * layout.micro_batch * layout.rounds == 16
        assert layout.rounds >= layout.pipeline


def test_405b_on_512_h100_fits_as_it_was_trained(tmp_path: Path) -> None:
    """TP 8 x PP 8 x FSDP 8, which torchtitan published; data parallelism alone does not fit."""
    shape = model(tmp_path, **LLAMA_405B)
    gpu = find_gpu("H100")
    question = Question(shape, Training(sequence=8192), 512, 64, gpu.memory_bytes)
    cluster = Cluster(gpu, link_of(gpu), find_link(gpu.network, across=True))
    assert not any(one.fits for one in rank(question, PlanRequest(cluster)) if one.family != "deepspeed")
    every = layouts(question, "torchtitan", Update(512))
    known = next(one for one in every if one.id == "tp8-pp8-fsdp8" and one.micro_batch == 1)
    assert peak_memory(question.changed(checkpointing="on"), known).total < gpu.memory_bytes
    chosen = advise(question, PlanRequest(cluster, framework="torchtitan")).chosen
    assert chosen is not None
    assert chosen.fits
    changes = advise(question, PlanRequest(cluster)).changes
    assert "--framework torchtitan" in [change.option for change in changes]


# Names of torchtitan 0.2.2, torchtitan/config/job_config.py.
TORCHTITAN = {
    "training": {"seq_len", "local_batch_size", "global_batch_size", "mixed_precision_param"},
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
        "context_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree",
        "context_parallel_rotate_method", "enable_async_tensor_parallel",
        "expert_tensor_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
}  # fmt: skip


def test_torchtitan_reads_the_printed_sections(tmp_path: Path) -> None:
    layout = Layout("torchtitan", 8, 8, 8, chunks=2, micro_batch=2, rounds=16)
    text = torchtitan_toml(ask(model(tmp_path), gpus=512, checkpointing="on"), layout)
    written = tomllib.loads(text)
    for section, keys in written.items():
        assert set(keys) <= TORCHTITAN[section]
    assert written["training"]["local_batch_size"] == 32
    assert written["training"]["global_batch_size"] == 256
    assert written["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert written["activation_checkpoint"] == {"mode": "full"}


# Names of NVIDIA/Megatron-LM, megatron/training/arguments.py.
MEGATRON = {
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--sequence-parallel", "--tp-comm-overlap",
    "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
    "--moe-token-dispatcher-type", "--overlap-moe-expert-parallel-comm", "--use-distributed-optimizer",
    "--expert-tensor-parallel-size", "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity",
    "--overlap-grad-reduce", "--overlap-param-gather", "--micro-batch-size", "--global-batch-size",
    "--seq-length", "--cp-comm-type",
    "--max-position-embeddings", "--bf16", "--grad-reduce-in-bf16", "--fp16", "--fp8-format",
    "--transformer-impl", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
}  # fmt: skip


def test_megatron_knows_the_printed_arguments(tmp_path: Path) -> None:
    shape = model(tmp_path, **LLAMA_405B)
    layout = Layout("megatron", 4, 8, 16, micro_batch=2, rounds=16)
    text = megatron_arguments(ask(shape, gpus=512, fp8=True, checkpointing="on"), layout)
    words = shlex.split(text.removeprefix("LAYOUT=(").removesuffix(")"))
    given = dict(zip(words, [*words[1:], ""], strict=True))
    assert {word for word in words if word.startswith("--")} <= MEGATRON
    assert given["--pipeline-model-parallel-size"] == "16"
    stages = given["--pipeline-model-parallel-layout"].split("|")  # 126 blocks, embedding, loss: 16 x 8
    assert stages == ["E" + 7 * "t", *14 * ["tttttttt"], 7 * "t" + "L"]
    assert given["--global-batch-size"] == "128"


@pytest.mark.parametrize(
    "training", [{"lora_rank": 8}, {"optimizer": "adamw-8bit"}, {"precision": "bf16"}, {"offload": "all"}]
)
def test_what_these_frameworks_are_not_planned_for_is_refused(
    training: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="--framework torchtitan"):
        advise(ask(model(tmp_path), **training), PlanRequest(CLUSTER, framework="torchtitan"))


def test_a_loss_over_a_split_vocabulary_takes_16_bytes_a_logit(tmp_path: Path) -> None:
    """8192 tokens x 8192 words over 4 GPUs, more than what a block needs."""
    question = ask(model(tmp_path, vocab_size=8192), sequence=8192, checkpointing="on")
    memory = peak_memory(question, Layout("torchtitan", data=4, tensor=4))
    assert memory.moment == "loss"
    gathered = 8192 * 64 * 2 * 3 / 4  # what goes into the head, beside the part that is there anyway
    assert memory.working == pytest.approx(8192 * 8192 * 16 / 4 + gathered)
    each_step = memory.activations + memory.working + memory.units
    assert memory.reserve == pytest.approx(0.1 * each_step + 8192 * 8192 * 2 / 4)
    fused = question.changed(loss="fused")
    memory = peak_memory(fused, Layout("torchtitan", data=4, tensor=4))
    assert memory.working == pytest.approx(8192 * 8192 * 4 / 4 + gathered)


def test_a_layout_is_named_where_it_is_faster_than_sharding_over_many_gpus() -> None:
    """Over a slow network a pipeline sends next to nothing, and gathering 70e9 weights takes long."""
    gpu = find_gpu("A100")
    slow = Cluster(gpu, link_of(gpu), find_link("100Gbit/s", across=True))

    def named(gpus: int) -> bool:
        question = Question(shape_from_parameters(70 * 10**9), Training(), gpus, gpus // 8, gpu.memory_bytes)
        summary = plan(question, PlanRequest(slow)).summary
        return summary.partition(": ")[0].startswith("torchtitan is predicted ")

    assert named(64)
    assert not named(32)


LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}


def asked_for(shape: ModelShape, layout: str, memory: float = 80e9, **request: object) -> Plan:
    """Plan for a layout of Megatron on 16 GPUs, with sequences of 2048 tokens."""
    given = {name: request.pop(name) for name in ("micro_batch", "accumulation") if name in request}
    training = Training(sequence=2048, **given)  # type: ignore[arg-type]
    settings = {"framework": "megatron", "layout": layout, **request}
    settings |= {f"keeps_{name}": True for name in given}
    return plan(Question(shape, training, 16, 2, memory), PlanRequest(CLUSTER, **settings))  # type: ignore[arg-type]


def test_a_layout_that_is_asked_for_is_answered_beside_the_fastest(tmp_path: Path) -> None:
    answer = asked_for(model(tmp_path, **LARGE), "tp8-pp2", micro_batch=1, accumulation=8)
    asked = answer.strategies[0]
    assert (answer.rule, answer.recommended, asked.strategy) == ("asked", "tp8-pp2", "tp8-pp2")
    assert (asked.layout.micro_batch, asked.layout.rounds) == (1, 8)
    assert answer.faster not in (None, "tp8-pp2")
    layouts_of = [one.layout for one in answer.strategies]
    assert {each.data * each.micro_batch * each.rounds for each in layouts_of} == {8}


def test_an_interleaved_layout_has_the_parts_that_were_asked_for(tmp_path: Path) -> None:
    asked = asked_for(model(tmp_path, **LARGE), "pp4-vpp4-tp2", batch=64).strategies[0].layout
    assert (asked.pipeline, asked.chunks, asked.tensor, asked.data) == (4, 4, 2, 2)
    assert asked.schedule.startswith("interleaved 1F1B, ")


def test_micro_batches_that_are_given_hold_for_every_layout(tmp_path: Path) -> None:
    answer = asked_for(model(tmp_path, **LARGE), "", batch=96, micro_batch=3)
    assert {one.layout.micro_batch for one in answer.strategies} == {3}


def test_a_layout_that_does_not_fit_is_told_beside_what_does(tmp_path: Path) -> None:
    answer = asked_for(model(tmp_path, **LARGE), "dp16", memory=30e9, micro_batch=1, accumulation=2)
    assert answer.recommended not in (None, "dp16")
    assert answer.summary.startswith("DP 16 is not predicted to fit: it takes ")
    assert "dp16" in [one.strategy for one in answer.strategies]


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ("tp2-xp4", "'xp4' is no part"),
        ("tp2-tp4", "'tp4' is no part"),
        ("tp2-dp4", "is for 8 GPUs, not 16"),
        ("tp16", "16 GPUs cannot share its 8 heads"),
        ("pp16", "8 blocks are fewer than its 16 stages"),
        ("vpp2-dp16", "vpp is for a pipeline"),
        ("ep4", "the experts of a block, 1, do not divide by 4"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=error):
        asked_for(model(tmp_path), layout)


def test_a_batch_that_contradicts_the_micro_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--batch 7 is not 2 x 4 of 16 groups"):
        asked_for(model(tmp_path), "dp16", micro_batch=2, accumulation=4, batch=7)
