"""Hold what a layout may be told besides its sizes: overlap, sequences, experts, recomputation; by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib
from msgspec.structs import replace

from tests.planner.test_layouts import CLUSTER, END, LARGE, MOE, ask, asked_for, model, sent
from tracedoc.errors import InputError
from tracedoc.planner.configurations import megatron_arguments, torchtitan_toml
from tracedoc.planner.hardware import Cluster, LinkKind, find_gpu, find_link, link_of
from tracedoc.planner.layouts import Layout
from tracedoc.planner.memory import block_weights, peak_memory, stage_weights
from tracedoc.planner.plan import plan
from tracedoc.planner.setup import PlanRequest, Question
from tracedoc.planner.timing import NARROW_TRAFFIC, Step, predict, step_flops
from tracedoc.planner.traffic import bandwidth


def test_a_block_of_experts_takes_no_less_than_launching_its_kernels(tmp_path: Path) -> None:
    """8 blocks and 4 micro-batches of 0.9 ms and 0.33 for each of 8 experts; recomputed, a third more.

    Half of what the GPU computes is launched before the host waits for the number of tokens.
    """
    question, layout = ask(model(tmp_path, **MOE)), Layout("megatron", data=16, expert=2, rounds=4)

    def both(layout: Layout, *, checkpointing: str = "off", capacity: float = 0.0) -> Step:
        asked = question.changed(capacity=capacity, checkpointing=checkpointing)
        step = predict(asked, layout, CLUSTER)
        assert step is not None
        return step

    step = both(layout)
    assert step.host_ms + step.compute_ms / 2 == pytest.approx(8 * 4 * (0.9 + 8 * 0.33))
    again = both(layout, checkpointing="on")
    assert again.host_ms + again.compute_ms / 2 == pytest.approx(8 * 4 * (0.9 + 8 * 0.33) * 4 / 3)
    padded = both(layout, capacity=1.0)  # nothing to wait for, and one product for all experts
    assert padded.host_ms + padded.compute_ms == pytest.approx(8 * 4 * (0.9 + 0.33))
    assert both(replace(layout, strategy="torchtitan")).host_ms == 0.0
    long = question.changed(sequence=1 << 18)  # attention takes longer than the host
    step = predict(long, layout, CLUSTER)
    assert step is not None
    assert step.host_ms == 0.0


def test_a_capacity_pads_what_experts_compute_on(tmp_path: Path) -> None:
    """Twice an even share: twice the products, activations and tokens of experts; attention stays."""
    question = ask(model(tmp_path, **MOE))
    layout = Layout("megatron", data=16, expert=8)
    padded = question.changed(capacity=2.0)
    of_experts = sum(m.inputs * m.outputs * 8 for m in question.model.linears if m.count > 1)
    more = step_flops(padded)[0].matmul - step_flops(question)[0].matmul
    assert more == 2 * of_experts * question.model.experts_met * question.training.tokens
    (tokens,), (twice,) = sent(question, layout, "expert"), sent(padded, layout, "expert")
    assert twice.size == 2 * tokens.size
    text = megatron_arguments(padded, layout)
    assert "--moe-expert-capacity-factor 2\n  --moe-pad-expert-input-to-capacity" in text


def test_deepep_fills_nvlink_where_nccls_all_to_all_does_not(tmp_path: Path) -> None:
    question = ask(model(tmp_path, **MOE), gpus=8)
    layout = Layout("megatron", data=8, expert=8)
    (nccl,), (flex,) = (sent(question, replace(layout, flex=on), "expert") for on in (False, True))
    cluster = replace(CLUSTER, inside=link_of(find_gpu("H100")))
    rates = [bandwidth(one, question, cluster) for one in (nccl, flex)]
    assert rates[0] is not None
    assert rates[1] is not None
    assert (rates[0][0], rates[1][0]) == pytest.approx((0.5 * 0.8 * 450, 0.89 * 0.8 * 450))
    text = megatron_arguments(question, replace(layout, flex=True))
    assert "--moe-token-dispatcher-type flex" in text


def test_deepep_sends_a_token_once_to_each_gpu_and_node(tmp_path: Path) -> None:
    """2 experts of each token on 16 GPUs of 2 nodes: on 1.9375 of the GPUs, on 1.5 of the nodes."""
    question = ask(model(tmp_path, **MOE), gpus=16)
    layout = Layout("megatron", data=16, expert=16)
    (nccl,), (flex,) = (sent(question, replace(layout, flex=on), "expert") for on in (False, True))
    assert flex.size / nccl.size == pytest.approx(1.9375 / 2)
    cluster = Cluster(CLUSTER.gpu, link_of(find_gpu("H100")), find_link("ib-8x400g", across=True))
    rate = bandwidth(flex, question, cluster)
    assert rate is not None
    away = (1.5 / 2) / (1.9375 * 15 / 16)  # of what leaves a GPU, this leaves the node
    assert 1 / rate[0] == pytest.approx(away / 40 + (1 - away) / (0.89 * 360))


def test_megatron_computes_no_scores_outside_of_a_window(tmp_path: Path) -> None:
    """Half of the blocks see 1024 of 4096 positions: 1 - (3/4)^2 of a causal triangle's area."""
    windowed = model(
        tmp_path, **MOE, sliding_window=1024, layer_types=["sliding_attention", "full_attention"]
    )
    question, whole = ask(windowed, sequence=4096), ask(model(tmp_path, **MOE), sequence=4096)

    def scores(of: Question, family: str) -> float:
        return step_flops(of, family=family)[0].attention

    assert scores(question, "megatron") / scores(whole, "megatron") == pytest.approx(
        (1 + 1 - (3 / 4) ** 2) / 2
    )
    assert scores(question, "fsdp") == scores(whole, "fsdp")


def test_cut_matrices_reach_less_of_the_peak(tmp_path: Path) -> None:
    """Blocks of 4096: cut in 8, products move 8/4096 - 1/4096 more numbers a FLOP, those of 11008 less."""
    question = ask(model(tmp_path, **LARGE, num_key_value_heads=32), gpus=8, sequence=4096)
    whole = predict(question, Layout("megatron", data=8), CLUSTER)
    cut = predict(question, Layout("megatron", data=1, tensor=8), CLUSTER)
    assert whole is not None
    assert cut is not None
    parts = 32 * 4 * 4096**2, 32 * 3 * 4096 * 11008  # attention with heads of 4096, and the MLP
    more = (parts[0] * 7 / 4096 + parts[1] * 7 / 11008) / sum(parts)
    flops = 6 * question.model.active_parameters * 4096
    flops -= 3 * 2 * (question.model.outside_parameters - 256 * 4096) * 4096
    assert cut.compute_ms * 8 - whole.compute_ms == pytest.approx(
        1e3 * flops * NARROW_TRAFFIC * more / 3350e9, rel=0.02
    )


@pytest.mark.parametrize(
    ("experts", "framework", "capacity", "flex", "said"),
    [
        (False, "megatron", 1.0, False, "are for Megatron's models with experts"),
        (True, "torchtitan", 0.0, True, "are for Megatron's models with experts"),
        (True, "megatron", -1.0, False, "--capacity is -1$"),
        (True, "megatron", 1.0, True, "--capacity is 1 with --flex-dispatch"),
    ],
)
def test_a_capacity_is_for_experts_and_nccls_all_to_all(
    experts: bool, framework: str, capacity: float, flex: bool, said: str, tmp_path: Path
) -> None:
    question = ask(model(tmp_path, **(MOE if experts else {})), capacity=capacity)
    with pytest.raises(InputError, match=said):
        plan(question, PlanRequest(CLUSTER, framework=framework, flex=flex))


def test_servers_with_pcie_widen_the_range_until_they_are_measured(tmp_path: Path) -> None:
    question = ask(model(tmp_path, **LARGE))
    gpu, layout = find_gpu("A100 PCIe 80GB"), Layout("megatron", tensor=8, data=2)

    def width(link: LinkKind) -> float:
        step = predict(question, layout, replace(CLUSTER, gpu=gpu, inside=link))
        assert step is not None
        assert step.best_ms < step.expected_ms < step.worst_ms
        return step.worst_ms / step.best_ms

    pcie = link_of(gpu)
    assert pcie is not None
    assert width(replace(pcie, measured=True)) == pytest.approx(1.20 / 0.83)
    assert 1.5 < width(pcie) < 1.20 / 0.83 * 1.35 / 0.75


def test_megatron_adds_the_biases_of_experts_one_by_one(tmp_path: Path) -> None:
    """46 ps for each number of the results of a token's experts, on any GPU."""
    question = ask(model(tmp_path, **MOE))
    biased = replace(question, model=replace(question.model, experts_biased=True))
    for strategy, ps in (("megatron", 46), ("torchtitan", 0)):
        layout = Layout(strategy, data=16, expert=2)
        plain, slower = (predict(q, layout, CLUSTER) for q in (question, biased))
        assert plain is not None
        assert slower is not None
        numbers = question.model.blocks * question.training.tokens * question.routed * question.model.hidden
        assert slower.compute_ms - plain.compute_ms == pytest.approx(ps * 1e-9 * numbers)


def test_few_tokens_reach_less_of_the_peak(tmp_path: Path) -> None:
    """512 tokens instead of 4096: each product moves 1/512 - 1/4096 more numbers a FLOP."""
    large = model(tmp_path, **LARGE, num_key_value_heads=32)
    few, many = (ask(large, gpus=8, sequence=tokens) for tokens in (512, 4096))
    steps = [predict(one, Layout("megatron", data=8), CLUSTER) for one in (few, many)]
    assert steps[0] is not None
    assert steps[1] is not None
    flops = [sum(f.matmul for f in step_flops(one)) for one in (few, many)]
    attention = [sum(f.attention for f in step_flops(one)) for one in (few, many)]
    assert attention[1] == 64 * attention[0]
    more = 8 * steps[0].compute_ms - steps[1].compute_ms  # what is left is attention, which grows with both
    shorter = (attention[1] - 8 * attention[0]) / (989e12 * 0.5) * 1e3
    moved = flops[1] * NARROW_TRAFFIC * (1 / 512 - 1 / 4096) / 3350e9 * 1e3
    assert more + shorter == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize(("overlaps", "shown"), [((), 1.0), (("data",), 1.0), (("data", "tensor"), 0.4)])
def test_tensor_parallelism_is_exposed_unless_it_is_overlapped(
    overlaps: tuple[str, ...], shown: float, tmp_path: Path
) -> None:
    layout = Layout("megatron", data=2, tensor=8, overlaps=overlaps)
    assert sent(ask(model(tmp_path)), layout, "tensor")[0].exposed == shown
    states = {one.exposed for one in sent(ask(model(tmp_path)), layout, "data")}
    assert states == ({None} if "data" in overlaps else {1.0})
    text = megatron_arguments(ask(model(tmp_path)), layout)
    assert ("--tp-comm-overlap" in text) == ("tensor" in overlaps)
    assert ("--overlap-grad-reduce" in text) == ("data" in overlaps)


def test_heads_are_exchanged_for_tokens_or_keys_sent_round(tmp_path: Path) -> None:
    """4 of 64 tokens' parts: q, k, v and the result, 4 x 64 numbers of 16 tokens, 3/4 of them to others."""
    question = ask(model(tmp_path), gpus=4)
    ring = Layout("megatron", data=1, context=4)
    (exchanged,) = sent(question, replace(ring, context_by="all-to-all"), "context")
    assert (exchanged.op, exchanged.exposed, exchanged.calls) == ("all-to-all", 1.0, 8 * 4)
    assert exchanged.sent == 8 * 2 * (4 * 64 * 16 * 2) * 3 / 4
    (passed,) = sent(question, ring, "context")
    assert (passed.op, passed.exposed) == ("all-gather", None)
    for how, word in (("", "p2p"), ("all-to-all", "a2a"), ("gather", "all_gather")):
        layout = replace(ring, context_by=how)
        assert f"--cp-comm-type {word}" in megatron_arguments(question, layout)
    text = torchtitan_toml(question, Layout("torchtitan", data=1, context=4, context_by="ring"))
    assert tomllib.loads(text)["parallelism"]["context_parallel_rotate_method"] == "alltoall"


def test_megatrons_selective_recomputation_is_that_of_attention(tmp_path: Path) -> None:
    """Fused attention keeps no scores, so that it saves nothing; its forward pass, 4 x 8 x 64 x 64 x 64."""
    question, layout = ask(model(tmp_path), checkpointing="selective"), Layout("megatron", data=16)
    kept = peak_memory(question, layout)
    assert kept == peak_memory(question.changed(checkpointing="off"), layout)
    again = step_flops(question, "megatron")[2]
    assert (again.matmul, again.attention) == (0.0, 4 * 8 * 64 * 64 * 64)
    assert "--recompute-granularity selective" in megatron_arguments(question, layout)


def test_megatron_computes_single_modules_again(tmp_path: Path) -> None:
    """64 tokens in 8 blocks and 16 bits; what is left out is there once more for one block's backward pass.

    2 norms of 64, 2 experts of 32, and latent queries and keys of 4 x 24 and values of 4 x 16.
    """
    layout = Layout("megatron", data=16)
    latent = model(tmp_path, **DEEPSEEK)
    for shape, module, numbers in (
        (model(tmp_path, **MOE), "layernorm", 2 * 64),
        (model(tmp_path, **MOE), "moe_act", 2 * 32),
        (latent, "mla_up_proj", 4 * (24 + 24 + 16)),
    ):
        asked = ask(shape, checkpointing="selective", recomputed=(module,), loss="chunked")
        kept, whole = (peak_memory(one, layout) for one in (asked, asked.changed(recomputed=())))
        assert whole.activations - kept.activations == 8 * 64 * 2 * numbers
        assert kept.working - whole.working == 64 * 2 * numbers
        again = step_flops(asked, "megatron")[2]
        up = 2 * 64 * 8 * (32 * 4 * 24 + 16 * 4 * 32) if module == "mla_up_proj" else 0
        assert (again.matmul, again.attention) == (up, 0.0)
        text = megatron_arguments(asked, layout)
        assert f"--recompute-granularity selective\n  --recompute-modules {module}" in text
    with pytest.raises(InputError, match="no checkpointing is called 'moe_act'"):
        plan(
            ask(model(tmp_path), checkpointing="selective", recomputed=("moe_act",)),
            PlanRequest(CLUSTER, framework="megatron"),
        )


def test_without_sequence_parallelism_norms_and_inputs_are_kept_whole(tmp_path: Path) -> None:
    """Two norms and two inputs of 64 numbers in 16 bits, of 64 tokens in 8 blocks, of which half is split."""
    layout = Layout("megatron", data=8, tensor=2)
    split = peak_memory(ask(model(tmp_path)), layout).activations
    whole = peak_memory(ask(model(tmp_path)), replace(layout, sequence_parallel=False)).activations
    norm = 4 + 2  # a copy in fp32, and the result
    assert whole - split == 8 * 64 * 64 * (2 * norm + 2 * 2) / 2
    text = megatron_arguments(ask(model(tmp_path)), replace(layout, sequence_parallel=False))
    assert "--sequence-parallel" not in text


def test_experts_that_are_not_cut_are_shared_by_the_gpus_of_a_matrix_as_well(tmp_path: Path) -> None:
    """TP 2 on 16 GPUs: 16 whole experts over 16 GPUs, or 16 halves over 8 times 2; as many weights."""
    question = ask(model(tmp_path, **MOE))
    cut, whole = (
        Layout("megatron", data=8, tensor=2, expert=8),
        Layout("megatron", data=8, tensor=2, expert=16),
    )
    whole = replace(whole, expert_tensor=1)
    assert block_weights(question, whole) == block_weights(question, cut)
    assert (cut.expert_shards, whole.expert_shards) == (1, 1)
    assert (cut.id, whole.id) == ("tp2-ep8-dp8", "tp2-ep16-dp8-etp1")
    (sent_whole,) = sent(question, whole, "expert")
    assert (sent_whole.group, sent_whole.distance) == (16, 1)
    words = megatron_arguments(question, whole)
    assert "--expert-tensor-parallel-size 1" in words
    answer = asked_for(model(tmp_path, **MOE), "tp2-ep16-etp1", micro_batch=1, accumulation=2)
    assert answer.recommended == whole.id


DEEPSEEK = {
    "model_type": "deepseek_v3", "num_attention_heads": 4, "n_routed_experts": 16, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 128, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip


def test_the_fullest_stage_is_one_without_the_leading_dense_blocks(tmp_path: Path) -> None:
    """8 blocks in 4 stages; the 2 dense ones are the first stage, and each other has 2 full ones."""
    shape = model(tmp_path, **DEEPSEEK)
    question, layout = ask(shape, gpus=4), Layout("megatron", data=1, pipeline=4, rounds=4)
    first, second = (stage_weights(question, layout, number).all for number in (0, 1))
    assert second == pytest.approx(2 * shape.block_parameters)
    inside = shape.parameters - shape.outside_parameters
    assert first - END == pytest.approx(inside - 6 * shape.block_parameters)
    assert second > 5 * first
    whole = stage_weights(question, Layout("megatron", data=4, expert=4), 0)
    assert whole.dense + 4 * whole.experts == pytest.approx(shape.parameters)
    states = peak_memory(question, layout).states
    assert states.optimizer == pytest.approx(12 * second)


def test_latent_attention_is_split_as_its_heads_are(tmp_path: Path) -> None:
    """4 heads of 24 for queries, whose keys and values together are 20 wide each."""
    answer = asked_for(model(tmp_path, **DEEPSEEK), "tp4-pp2-dp2", micro_batch=1, accumulation=4)
    assert answer.recommended == "tp4-pp2-dp2"


def test_products_overlap_nothing_that_is_not_split(tmp_path: Path) -> None:
    asked = asked_for(
        model(tmp_path, **LARGE), "tp8-dp2", batch=16, sequence_parallel=False, overlaps=("data", "tensor")
    ).strategies[0]
    assert asked.layout.overlapped == ("data",)
    off = asked_for(model(tmp_path, **LARGE), "tp8-dp2", batch=16, sequence_parallel=False, overlaps=())
    assert off.strategies[0].layout.overlapped == ()
    assert off.strategies[0].step is not None
    assert asked.step is not None
    assert off.strategies[0].step.expected_ms > asked.step.expected_ms


def test_more_gpus_than_heads_of_keys_share_a_matrix_with_megatron_alone(tmp_path: Path) -> None:
    shape = model(tmp_path, **LARGE, num_key_value_heads=4)
    answer = asked_for(shape, "tp8-dp2", micro_batch=1, accumulation=2)
    assert answer.recommended == "tp8-dp2"
    with pytest.raises(InputError, match="8 GPUs cannot share its 32 heads, 4 of keys"):
        asked_for(shape, "tp8-dp2", micro_batch=1, accumulation=2, framework="torchtitan")


def test_a_layout_of_one_gpu_is_answered_where_it_is_asked_for(tmp_path: Path) -> None:
    request = PlanRequest(CLUSTER, framework="megatron", layout="tp1")
    answer = plan(ask(model(tmp_path), gpus=1), request)
    assert answer.recommended == "dp1"
    with pytest.raises(InputError, match="several GPUs"):
        plan(ask(model(tmp_path), gpus=1), PlanRequest(CLUSTER, framework="megatron"))


def test_a_batch_that_the_layout_cannot_divide_is_refused(tmp_path: Path) -> None:
    """Other layouts of the 16 GPUs could; what was asked about would have been dropped."""
    with pytest.raises(InputError, match="7 sequences do not divide evenly over its 4 groups") as refused:
        asked_for(model(tmp_path, **LARGE), "tp4", batch=7)
    assert refused.value.hint == "nearest: --batch 8"


@pytest.mark.parametrize("framework", ["accelerate", "trainer", "deepspeed"])
def test_selective_checkpointing_is_refused_where_settings_are_for_blocks(
    framework: str, tmp_path: Path
) -> None:
    asked = ask(model(tmp_path), checkpointing="selective")
    with pytest.raises(InputError, match=f"{framework} checkpoints whole blocks"):
        plan(asked, PlanRequest(CLUSTER, framework=framework))
    printed = plan(asked, PlanRequest(CLUSTER)).configurations
    assert {one.framework for one in printed} == {"pytorch"}
