"""Hold activation memory against the published formula, and what PyTorch really saves and allocates."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tracedoc.planner.activations import block_activations
from tracedoc.planner.families import read_model_config
from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.memory import frozen_share, peak_memory, unit_bytes
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import ModelShape, shape_from_parameters

TOKENS = 256
BATCH = 2


def gpt(hidden: int, heads: int) -> ModelShape:
    """Return a block as in the paper: layer norms, an MLP of four times the width, dropout."""
    return ModelShape(
        name="GPT",
        parameters=12 * hidden * hidden,
        active_parameters=12 * hidden * hidden,
        blocks=1,
        block_parameters=12 * hidden * hidden,
        outside_parameters=0,
        hidden=hidden,
        heads=heads,
        q_width=hidden,
        kv_width=hidden,
        mlp_width=4 * hidden,
        vocabulary=16,
        linears=(),
        gated=False,
        rms_norm=False,
        dropout=True,
        fused_qkv=True,
        mlp_tensors=2,
    )


def test_a_gpt_block_takes_what_korthikanti_et_al_publish() -> None:
    """s b h (34 + 5 a s / h): 2048 x 4 x 12288 x (34 + 80) for GPT-3 at sequence 2048, 96 heads."""
    training = Training(precision="bf16", sequence=2048, micro_batch=4, fused_attention=False)
    question = Question(gpt(12288, 96), training, 1, 1, 80e9)
    expected = 2048 * 4 * 12288 * (34 + 5 * 96 * 2048 / 12288)
    assert block_activations(question, data_parallel(question, "single")) == pytest.approx(expected)


def test_fused_attention_drops_the_quadratic_term() -> None:
    """34 s b h, and four bytes of log-sum-exp for each head and token."""
    training = Training(precision="bf16", sequence=2048, micro_batch=1)
    question = Question(gpt(4096, 32), training, 1, 1, 80e9)
    expected = 2048 * (34 * 4096 + 4 * 32)
    assert block_activations(question, data_parallel(question, "single")) == pytest.approx(expected)


def test_checkpointing_keeps_about_a_tenth() -> None:
    question = Question(shape_from_parameters(int(7e9)), Training(), 8, 1, 80e9)
    layout = data_parallel(question, "full-shard")
    whole, kept = (peak_memory(question.changed(checkpointing=on), layout) for on in ("off", "on"))
    assert kept.activations < 0.12 * whole.activations


@pytest.mark.parametrize(
    ("targets", "numbers"),
    [
        # 16-bit inputs of both norms in fp32, q, k, v, the output and their input; three tensors of the MLP.
        ((), (4 + 4) * 4096 + 2 * 5 * 4096 + 2 * 3 * 10922),
        # Adapters on every matrix need its input as well: that of the MLP, and of its last matrix.
        (("all-linear",), (4 + 4) * 4096 + 2 * 5 * 4096 + 2 * 4096 + 2 * 4 * 10922),
    ],
)
def test_lora_keeps_the_inputs_of_adapted_matrices_only(targets: tuple[str, ...], numbers: int) -> None:
    shape = shape_from_parameters(int(7e9))
    assert (shape.hidden, shape.heads, shape.mlp_width) == (4096, 32, 10922)
    question = Question(shape, Training(lora_rank=16, lora_targets=targets, sequence=1000), 8, 1, 80e9)
    expected = 1000 * (numbers + 4 * 32)  # and the log-sum-exp of each head
    assert block_activations(question, data_parallel(question, "ddp")) == pytest.approx(expected)


def test_a_gathered_weight_of_4_bits_takes_4_bits() -> None:
    shape = shape_from_parameters(int(7e9))
    question = Question(shape, Training(lora_rank=16, base_bits=4), 8, 1, 80e9)
    inside = shape.blocks * 4096 * (4 * 4096 + 3 * 10922)
    expected = (inside * 4.127 / 8 + (7e9 - inside) * 2) / 7e9
    assert frozen_share(question) == pytest.approx(expected, rel=1e-3)


def test_full_sharding_gathers_two_blocks_and_the_root() -> None:
    """LoRA, so that no gradients of weights are there: 2 bytes x (2 x 200 + 100) M."""
    shape = shape_from_parameters(int(7e9))
    question = Question(shape, Training(lora_rank=16), 8, 1, 80e9)
    _, backward = unit_bytes(question, data_parallel(question, "full-shard"))
    assert backward == pytest.approx(2 * (2 * shape.block_parameters + shape.outside_parameters))


def test_deepspeed_buckets_follow_the_published_rule() -> None:
    """4.5 x for overlap_comm, 2 bytes, 2 buckets: 9 GB for 5e8 elements, so 0.9 GB for the 5e7 printed."""
    question = Question(shape_from_parameters(int(7e9)), Training(), 8, 1, 80e9)
    assert unit_bytes(question, data_parallel(question, "zero-2"))[0] == pytest.approx(0.9e9)


# What follows trains small models of Transformers on CPU.

SMALL = {
    "llama": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gemma": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "gpt_neox": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
    "gpt2": {"n_embd": 256, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {
        "hidden_size": 256,
        "ffn_dim": 1024,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 256,
        "dropout": 0.0,
    },
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16-mixed": "float32"}


def transformers() -> Any:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make loaders)")
    return importlib.import_module("transformers")


def small(
    kind: str, blocks: int, folder: Path, precision: str, vocabulary: int = 512
) -> tuple[Any, Question]:
    """Return a small model, and the question that describes it."""
    library = transformers()
    import torch

    depth = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    config = library.AutoConfig.for_model(kind, vocab_size=vocabulary, **SMALL[kind], **{depth: blocks})
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(getattr(torch, DTYPES[precision])).train()
    training = Training(precision=precision, sequence=TOKENS // BATCH, micro_batch=BATCH)
    return model, Question(read_model_config(folder), training, 1, 1, 80e9)


def loss_of(model: Any, vocabulary: int, precision: str) -> Any:
    import torch

    ids = torch.randint(0, vocabulary, (BATCH, TOKENS // BATCH))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def saved_bytes(model: Any, precision: str) -> int:
    """Return the bytes that a forward pass keeps for backward, without parameters."""
    import torch

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in parameters:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, 512, precision)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_block_saves_what_was_computed(kind: str, precision: str, tmp_path: Path) -> None:
    one, _ = small(kind, 1, tmp_path, precision)
    three, question = small(kind, 3, tmp_path, precision)
    real = (saved_bytes(three, precision) - saved_bytes(one, precision)) / 2
    if precision == "bf16-mixed":  # the 16-bit copies of weights count as states
        real -= 2 * question.model.block_parameters
    assert block_activations(question, data_parallel(question, "single")) == pytest.approx(real, rel=0.10)


KEY_VALUES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
}
HEADS = KEY_VALUES | {"head_dim": 64}
EAGER = {
    "n_embd": 256,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "rotary_dim": 16,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", KEY_VALUES),
    "qwen3": ("qwen3", HEADS),
    "gemma2": ("gemma2", HEADS),
    "gemma3": ("gemma3_text", HEADS),
    "phi3": ("phi3", KEY_VALUES | {"pad_token_id": 0}),
    "gpt_neox, gelu_fast": ("gpt_neox", SMALL["gpt_neox"] | {"hidden_act": "gelu_fast"}),
    "gptj": ("gptj", EAGER),
    "bloom": ("bloom", {"hidden_size": 256, "n_head": 4}),
    "falcon": ("falcon", {"hidden_size": 256, "num_attention_heads": 4}),
    "mpt": ("mpt", {"d_model": 256, "n_heads": 4}),
    "mixtral": ("mixtral", KEY_VALUES | {"num_local_experts": 4}),
    "bert": (
        "bert",
        {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_other_models_save_what_was_computed_within_10_percent(name: str, tmp_path: Path) -> None:
    kind, keys = OTHERS[name]
    depth = {"gptj": "n_layer", "bloom": "n_layer", "mpt": "n_layers"}.get(kind, "num_hidden_layers")
    library = transformers()
    import torch

    saved = []
    for blocks in (1, 3):
        config = library.AutoConfig.for_model(kind, vocab_size=512, **keys, **{depth: blocks})
        config.save_pretrained(tmp_path)
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        saved.append(saved_bytes(model, "bf16"))
    training = Training(precision="bf16", sequence=TOKENS // BATCH, micro_batch=BATCH)
    question = Question(read_model_config(tmp_path), training, 1, 1, 80e9)
    real = (saved[1] - saved[0]) / 2
    assert block_activations(question, data_parallel(question, "single")) == pytest.approx(real, rel=0.10)


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        ("fp32", False),
        ("bf16", True),
        ("bf16-mixed", False),
        pytest.param("bf16", False, marks=pytest.mark.soak),
        pytest.param("bf16-mixed", True, marks=pytest.mark.soak),
    ],
)
def test_the_peak_of_a_training_step_is_predicted_within_15_percent(
    precision: str, checkpointing: bool, tmp_path: Path
) -> None:
    model, question = small("llama", 4, tmp_path, precision, vocabulary=1024)
    import torch

    if checkpointing:
        question = question.changed(checkpointing="on")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss_of(model, 1024, precision).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    steady = sum(p.numel() * p.element_size() for p in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    steady += sum(value.numel() * value.element_size() for value in states)
    memory = peak_memory(question, data_parallel(question, "single"))
    predicted = memory.total - memory.reserve - memory.context
    assert predicted == pytest.approx(steady + allocated_peak(step), rel=0.15)


def allocated_peak(step: Any) -> int:
    """Return the most bytes that a step had allocated at once, beside what was there before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    records = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for record in sorted(records, key=lambda e: e.start_ns()):
        now += record.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("kind", "architecture", "keys"),
    [
        ("llama", "LlamaForCausalLM", {"num_hidden_layers": 2}),
        ("llama", "LlamaForCausalLM", {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
        ("mistral", "MistralForCausalLM", {"num_hidden_layers": 2}),
        ("mixtral", "MixtralForCausalLM", {"num_hidden_layers": 2}),
        ("qwen2", "Qwen2ForCausalLM", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
        ("qwen3", "Qwen3ForCausalLM", {"num_hidden_layers": 2}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2}),
        ("gemma", "GemmaForCausalLM", {"num_hidden_layers": 2}),
        ("gemma2", "Gemma2ForCausalLM", {"num_hidden_layers": 2}),
        ("phi3", "Phi3ForCausalLM", {"num_hidden_layers": 2}),
        ("gpt2", "GPT2LMHeadModel", {"n_layer": 2}),
        ("gpt_neox", "GPTNeoXForCausalLM", {"num_hidden_layers": 2}),
        ("bloom", "BloomForCausalLM", {"n_layer": 2}),
        ("opt", "OPTForCausalLM", {"num_hidden_layers": 2}),
        ("bert", "BertModel", {"num_hidden_layers": 2}),
        ("bert", "BertForMaskedLM", {"num_hidden_layers": 2}),
        ("roberta", "RobertaForMaskedLM", {"num_hidden_layers": 2}),
        ("t5", "T5ForConditionalGeneration", {"num_layers": 2, "num_decoder_layers": 3}),
    ],
)
def test_parameters_are_counted_as_transformers_builds_them(
    kind: str, architecture: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    library = transformers()
    import torch

    config = library.AutoConfig.for_model(kind, architectures=[architecture], **keys)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(library, architecture)(config)
    shape = read_model_config(tmp_path)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    blocks = [m for m in model.modules() if type(m).__name__ in shape.wrap_classes]
    assert len(blocks) == shape.blocks
    assert list(eval(shape.layers_path, {"model": model})) == blocks
    adapted = [name for name, _ in model.named_modules() if name.endswith(tuple(shape.lora_targets))]
    assert adapted
