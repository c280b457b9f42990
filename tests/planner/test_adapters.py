"""Hold the parameters of adapters against those that PEFT makes, for every matrix that it can adapt."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tracedoc.planner.families import read_model_config
from tracedoc.planner.shape import ModelShape, lora_parameters

RANK = 4
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
KEY_VALUES = {"num_key_value_heads": 2, "intermediate_size": 96}
GEMMA = WIDE | KEY_VALUES | {"num_hidden_layers": 2, "head_dim": 32}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "LlamaForCausalLM", WIDE | KEY_VALUES | {"num_hidden_layers": 2}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", WIDE | KEY_VALUES | {"num_hidden_layers": 2, "head_dim": 32}),
    "Gemma 3": ("gemma3_text", "Gemma3ForCausalLM", GEMMA),
    "Phi-3": ("phi3", "Phi3ForCausalLM", WIDE | KEY_VALUES | {"num_hidden_layers": 2, "pad_token_id": 0}),
    "Mixtral": (
        "mixtral", "MixtralForCausalLM", WIDE | KEY_VALUES | {"num_hidden_layers": 2, "num_local_experts": 4},
    ),
    "Qwen3-MoE": (
        "qwen3_moe", "Qwen3MoeForCausalLM",
        GEMMA | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        "gpt_oss", "GptOssForCausalLM",
        WIDE | KEY_VALUES | {"num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 32},
    ),
    "DeepSeek-V3": (
        "deepseek_v3", "DeepseekV3ForCausalLM",
        WIDE | {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
                "num_experts_per_tok": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
                "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
                "num_hidden_layers": 3},
    ),
    "DeepSeek-V2": (
        "deepseek_v2", "DeepseekV2ForCausalLM",
        WIDE | {"intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
                "num_experts_per_tok": 2, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 8,
                "n_shared_experts": 2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                "first_k_dense_replace": 1, "num_hidden_layers": 3},
    ),
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128}),
    "GPT-NeoX": (
        "gpt_neox", "GPTNeoXForCausalLM", WIDE | {"num_hidden_layers": 2, "intermediate_size": 256},
    ),
    "GPT-J": (
        "gptj", "GPTJForCausalLM",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "vocab_size": 128},
    ),
    "Falcon": ("falcon", "FalconForCausalLM", WIDE | {"num_hidden_layers": 2}),
    "OPT": (
        "opt", "OPTForCausalLM",
        WIDE | {"num_hidden_layers": 2, "ffn_dim": 256, "word_embed_proj_dim": 64},
    ),
    "BERT": ("bert", "BertForMaskedLM", WIDE | {"num_hidden_layers": 2, "intermediate_size": 256}),
    "ViT": ("vit", "ViTForImageClassification", {"hidden_size": 64, "num_attention_heads": 4,
                                                "num_hidden_layers": 2, "intermediate_size": 256}),
    "T5": (
        "t5", "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3,
         "vocab_size": 128},
    ),
    "Whisper": (
        "whisper", "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
}  # fmt: skip


def real(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (make loaders)")
    return importlib.import_module(name)


def targets_of(shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """Yield each name that means a matrix of a block alone, and all of them."""
    yield ("all-linear",)
    named = {linear.names: linear for linear in shape.linears}
    shared = {name for names, linear in named.items() if not linear.adapted for name in names}
    for names in named:
        if not shared & set(names):
            yield names


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_counted_as_peft_makes_them(name: str, tmp_path: Path) -> None:
    library, peft = real("transformers"), real("peft")
    import torch

    kind, architecture, keys = MODELS[name]
    config = library.AutoConfig.for_model(kind, architectures=[architecture], **keys)
    config.save_pretrained(tmp_path)
    shape = read_model_config(tmp_path)
    for targets in targets_of(shape):
        with torch.device("meta"):
            model = getattr(library, architecture)(config)
            asked = "all-linear" if targets == ("all-linear",) else list(targets)
            adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=asked))
        real_count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert lora_parameters(shape, RANK, targets) == real_count, targets
        assert shape.parameters == sum(p.numel() for p in model.parameters()) - real_count
