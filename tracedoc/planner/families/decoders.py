"""Read decoders: Llama and its kin, GPT-2, NeoX, GPT-J, BLOOM, OPT, Falcon, MPT, and mixtures of experts."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.families.config import Config, embeddings, kept_by, outputs, stacked, weights
from tracedoc.planner.shape import Linear, ModelShape


def attention(config: Config, kind: str, *, fused: bool = False) -> tuple[tuple[Linear, ...], int, int, int]:
    """Return the matrices of attention, its heads, and the widths of queries and of keys."""
    hidden = config.number("hidden_size")
    heads = config.heads("num_attention_heads", hidden=hidden)
    kv_heads = config.kv_heads(heads, default=_KV_HEADS.get(kind, heads))
    head = config.number("head_dim", default=_HEAD_DIM.get(kind, hidden // heads))
    q, kv = heads * head, kv_heads * head
    first = (
        (Linear("self_attn.qkv_proj", hidden, q + 2 * kv),)
        if fused
        else (
            Linear("self_attn.q_proj", hidden, q),
            Linear("self_attn.k_proj", hidden, kv),
            Linear("self_attn.v_proj", hidden, kv),
        )
    )
    return (*first, Linear("self_attn.o_proj", q, hidden)), heads, q, kv


def read_llama(config: Config, kind: str) -> ModelShape:
    """Return the shape of a dense model of this family."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    fused = kind == "phi3"
    of_attention, heads, q, kv = attention(config, kind, fused=fused)
    width = config.number("intermediate_size")
    gate_and_up = (
        (Linear("mlp.gate_up_proj", hidden, 2 * width),)
        if fused
        else (Linear("mlp.gate_proj", hidden, width), Linear("mlp.up_proj", hidden, width))
    )
    linears = (*of_attention, *gate_and_up, Linear("mlp.down_proj", width, hidden))
    biases = 0
    if kind == "qwen2":
        biases = q + 2 * kv
    elif config.flag("attention_bias", False):
        biases = q + 2 * kv + hidden
    if config.flag("mlp_bias", False):
        biases += 2 * width + hidden
    gemma = kind.startswith("gemma")
    norms = (4 if kind in _FOUR_NORMS else 2) * hidden
    if kind in ("qwen3", "gemma3_text"):
        norms += 2 * q // heads
    block = weights(linears) + biases + norms
    vocabulary = config.number("vocab_size")
    outside = embeddings(config, vocabulary, hidden, tied=gemma) + hidden
    activation = config.text("hidden_activation", "hidden_act")
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        hidden=hidden,
        heads=heads,
        q_width=q,
        kv_width=kv,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=linears,
        fused_qkv=fused,
        norms=4 if kind in _FOUR_NORMS else 2,
        head_norms=kind in ("qwen3", "gemma3_text"),
        rotary=True,
        norm_bytes=8 if gemma else 0,
        dense_attention=kind == "gemma2",
        softcapped=kind == "gemma2" and config.share("final_logit_softcapping", default=30.0) > 0,
        mlp_tensors=2 + (2 if activation != "relu" else 1),
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=(CLASSES[kind],),
        lora_targets=("qkv_proj",) if fused else ("q_proj", "v_proj"),
    )


_KV_HEADS = {"mistral": 8, "mixtral": 8, "gpt_oss": 8, "gemma3_text": 4, "gemma2": 4, "qwen3_moe": 4}
# Head sizes that Transformers assumes where the file is silent; else hidden / heads.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128, "gpt_oss": 64}
_FOUR_NORMS = ("gemma2", "gemma3_text")

CLASSES = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "phi3": "Phi3DecoderLayer",
}
"""The class that owns a block's parameter tensors: one FSDP unit each."""


class _Gpt(msgspec.Struct, frozen=True):
    """What distinguishes one of these models: names, biases, norms, and where the blocks are."""

    attention: tuple[str, ...]
    up: str
    down: str
    block_class: str
    layers: str
    activation: str = "gelu"
    dropout: float = 0.0
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    norms: int = 2
    tied: bool = True
    learned_positions: int = -1
    """Positions with an embedding beside those of the config; -1: no embedding of positions."""
    norm_after_embedding: bool = False
    head_bias: bool = False
    dense_attention: bool = False
    """Whether the reference implementation computes attention scores itself, without a fused kernel."""


_GPTS = {
    "gpt2": _Gpt(
        ("attn.c_attn", "attn.c_proj"), "mlp.c_fc", "mlp.c_proj", "GPT2Block", "model.transformer.h",
        activation="gelu_new", dropout=0.1, learned_positions=0,
    ),
    "gpt_neox": _Gpt(
        ("attention.query_key_value", "attention.dense"), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "GPTNeoXLayer", "model.gpt_neox.layers", tied=False,
    ),
    "gptj": _Gpt(
        ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"), "mlp.fc_in", "mlp.fc_out",
        "GPTJBlock", "model.transformer.h",
        activation="gelu_new", attention_bias=False, norms=1, tied=False, head_bias=True,
        dense_attention=True,
    ),
    "bloom": _Gpt(
        ("self_attention.query_key_value", "self_attention.dense"), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "BloomBlock", "model.transformer.h", norm_after_embedding=True, dense_attention=True,
    ),
    "opt": _Gpt(
        ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj"), "fc1", "fc2",
        "OPTDecoderLayer", "model.model.decoder.layers", activation="relu", dropout=0.1, learned_positions=2,
    ),
    "falcon": _Gpt(
        ("self_attention.query_key_value", "self_attention.dense"), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "FalconDecoderLayer", "model.transformer.h",
    ),
    "mpt": _Gpt(
        ("attn.Wqkv", "attn.out_proj"), "ffn.up_proj", "ffn.down_proj", "MptBlock",
        "model.transformer.blocks",
        attention_bias=False, mlp_bias=False, norm_bias=False, dense_attention=True,
    ),
}  # fmt: skip


def read_gpt(config: Config, kind: str) -> ModelShape:
    """Return the shape of a model of this family."""
    family = _GPTS[kind]
    hidden = config.number("n_embd", "hidden_size", "d_model")
    blocks = config.number("n_layer", "num_hidden_layers", "n_layers")
    heads = config.heads("n_head", "num_attention_heads", "n_heads", hidden=hidden)
    width = config.number(
        "n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size",
        default=hidden * config.number("expansion_ratio", default=4),
    )  # fmt: skip
    if kind == "opt" and config.number("word_embed_proj_dim", default=hidden) != hidden:
        raise InputError(
            f"{config.path}: OPT with projected embeddings is not known", "use --params with its count"
        )
    kv, norms = hidden, family.norms
    biased = family.attention_bias, family.mlp_bias
    if kind == "falcon":
        kv, norms = _falcon(config, hidden, heads)
        biased = (config.flag("bias", False),) * 2
    *first, last = family.attention
    wide = [hidden + 2 * kv] if len(first) == 1 else [hidden] * len(first)
    attention = (
        *(Linear(name, hidden, size) for name, size in zip(first, wide, strict=True)),
        Linear(last, hidden, hidden),
    )
    mlp = (Linear(family.up, hidden, width), Linear(family.down, width, hidden))
    one_norm = hidden * (2 if family.norm_bias else 1)
    block = weights((*attention, *mlp)) + norms * one_norm
    block += outputs(attention) * biased[0] + outputs(mlp) * biased[1]
    vocabulary = config.number("vocab_size")
    positions = config.number("n_positions", "max_position_embeddings", "max_seq_len", default=2048)
    outside = embeddings(config, vocabulary, hidden, tied=family.tied) + one_norm * (
        2 if family.norm_after_embedding else 1
    )
    if family.learned_positions >= 0:
        outside += (positions + family.learned_positions) * hidden
    outside += vocabulary if family.head_bias else 0
    rates = config.share("resid_pdrop", "hidden_dropout", "dropout", default=family.dropout)
    activation = config.text("activation_function", "hidden_act")
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        hidden=hidden,
        heads=heads,
        kv_width=kv,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=(*attention, *mlp),
        gated=False,
        rms_norm=False,
        dropout=rates > 0,
        fused_qkv=len(first) == 1,
        norms=norms,
        rotary=family.learned_positions < 0 and kind not in ("bloom", "mpt"),
        math_attention=kind == "falcon" and kv < hidden,
        dense_attention=family.dense_attention and not _fused(config),
        mlp_tensors=kept_by(activation, family.activation),
        context=None if kind in ("bloom", "mpt") else positions,
        wrap_classes=(family.block_class,),
        layers_path=family.layers,
        lora_targets=("q_proj", "v_proj") if len(first) == 3 else (first[0].split(".")[-1],),
    )


def _fused(config: Config) -> bool:
    """Whether the file asks for a fused kernel, as the files of llm-foundry's MPT do."""
    settings = config.keys.get("attn_config")
    return isinstance(settings, dict) and settings.get("attn_impl") in ("flash", "triton")


def _falcon(config: Config, hidden: int, heads: int) -> tuple[int, int]:
    """Return the width of keys and the norms of a block, which differ between the two sizes of Falcon."""
    head = hidden // heads
    if config.flag("new_decoder_architecture", False):
        kv_heads = config.number("num_kv_heads", default=heads)
        return kv_heads * head, config.number("num_ln_in_parallel_attn", default=2)
    norms = 1 if config.flag("parallel_attn", True) else 2
    return (head if config.flag("multi_query", True) else hidden), norms


def _expert_matrices(
    hidden: int, width: int, experts: int, names: tuple[str, str, str]
) -> tuple[Linear, ...]:
    # Transformers keeps the experts of a block in two tensors; PEFT gives the first, two matrices in one,
    # adapters of twice the rank.
    gate, up, down = names
    first = Linear("mlp.experts.gate_up_proj", hidden, 2 * width, experts, ranks=2, needs=(gate, up))
    return first, Linear("mlp.experts.down_proj", width, hidden, experts, needs=(down,))


def read_mixture(config: Config, kind: str) -> ModelShape:
    """Return the shape of Mixtral or Qwen3-MoE: every block has experts."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    of_attention, heads, q, kv = attention(config, kind)
    mixtral = kind == "mixtral"
    if mixtral:
        experts, active = config.experts("num_local_experts", default=8, active=2)
        width = config.number("intermediate_size")
    else:
        experts, active = config.experts("num_experts", "num_local_experts", default=128, active=8)
        width = config.number("moe_intermediate_size")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = Linear("mlp.gate", hidden, experts)
    linears = (*of_attention, router, *_expert_matrices(hidden, width, experts, names))
    norms = 2 * hidden + (0 if mixtral else 2 * q // heads)
    biases = q + 2 * kv + hidden if config.flag("attention_bias", False) else 0
    block = weights(linears) + norms + biases
    vocabulary = config.number("vocab_size")
    outside = embeddings(config, vocabulary, hidden, tied=False) + hidden
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        inactive=blocks * (experts - active) * 3 * hidden * width,
        hidden=hidden,
        heads=heads,
        q_width=q,
        kv_width=kv,
        mlp_width=active * width,
        vocabulary=vocabulary,
        linears=linears,
        head_norms=not mixtral,
        experts_met=active,
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=("MixtralDecoderLayer" if mixtral else "Qwen3MoeDecoderLayer",),
    )


def read_gpt_oss(config: Config, kind: str) -> ModelShape:
    """Return the shape of gpt-oss: biases everywhere, attention with sinks. PEFT adapts attention only."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    of_attention, heads, q, kv = attention(config, kind)
    experts, active = config.experts("num_local_experts", default=128, active=4)
    width = config.number("intermediate_size")
    linears = (
        *of_attention,
        Linear("mlp.router", hidden, experts, adapted=False),
        Linear("mlp.experts.gate_up_proj", hidden, 2 * width, experts, adapted=False),
        Linear("mlp.experts.down_proj", width, hidden, experts, adapted=False),
    )
    biases = (q + 2 * kv + hidden) + experts + experts * (2 * width + hidden)
    block = weights(linears) + biases + heads + 2 * hidden
    vocabulary = config.number("vocab_size")
    outside = embeddings(config, vocabulary, hidden, tied=False) + hidden
    one_expert = 3 * hidden * width + 2 * width + hidden
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        inactive=blocks * (experts - active) * one_expert,
        hidden=hidden,
        heads=heads,
        q_width=q,
        kv_width=kv,
        mlp_width=active * width,
        vocabulary=vocabulary,
        linears=linears,
        experts_met=active,
        experts_biased=True,
        mlp_tensors=6,
        dense_attention=True,
        score_bytes=2,
        norm_bytes=8,
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=("GptOssDecoderLayer",),
    )


def read_deepseek(config: Config, kind: str) -> ModelShape:
    """Return the shape of DeepSeek-V2 or V3: latent attention, dense blocks first, then experts, some shared.

    Small ones compute queries in one matrix. The largest block is one with experts. PEFT adapts attention,
    routers and experts, not what is dense.
    """
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    nope, rope = config.number("qk_nope_head_dim", default=128), config.number("qk_rope_head_dim", default=64)
    value, kv_rank = config.number("v_head_dim", default=128), config.number("kv_lora_rank", default=512)
    direct = "q_lora_rank" in config.keys and config.keys["q_lora_rank"] is None
    q_rank = 0 if direct else config.number("q_lora_rank", default=1536)
    dense = min(blocks, config.count("first_k_dense_replace", default=3))
    experts, active = config.experts("n_routed_experts", default=256, active=8)
    shared = config.count("n_shared_experts", default=1)
    width, dense_width = (
        config.number("moe_intermediate_size", default=2048),
        config.number("intermediate_size"),
    )
    q = heads * (nope + rope)
    latent = (Linear("self_attn.q_a_proj", hidden, q_rank), Linear("self_attn.q_b_proj", q_rank, q))
    of_attention = (
        *((Linear("self_attn.q_proj", hidden, q),) if direct else latent),
        Linear("self_attn.kv_a_proj_with_mqa", hidden, kv_rank + rope),
        Linear("self_attn.kv_b_proj", kv_rank, heads * (nope + value)),
        Linear("self_attn.o_proj", heads * value, hidden),
    )
    sparse = blocks - dense
    names = ("gate_proj", "up_proj", "down_proj")
    in_sparse = (
        Linear("mlp.gate", hidden, experts, blocks=sparse),
        *(replace(m, blocks=sparse) for m in _expert_matrices(hidden, width, experts, names)),
        Linear("mlp.shared_experts.gate_proj", hidden, shared * width, blocks=sparse, adapted=False),
        Linear("mlp.shared_experts.up_proj", hidden, shared * width, blocks=sparse, adapted=False),
        Linear("mlp.shared_experts.down_proj", shared * width, hidden, blocks=sparse, adapted=False),
    )
    in_dense = (
        Linear("mlp.gate_proj", hidden, dense_width, blocks=dense, adapted=False),
        Linear("mlp.up_proj", hidden, dense_width, blocks=dense, adapted=False),
        Linear("mlp.down_proj", dense_width, hidden, blocks=dense, adapted=False),
    )
    norms = 2 * hidden + q_rank + kv_rank
    block = weights(of_attention) + weights(in_sparse) + norms
    dense_block = weights(of_attention) + weights(in_dense) + norms
    vocabulary = config.number("vocab_size")
    outside = embeddings(config, vocabulary, hidden, tied=False) + hidden
    return stacked(
        kind,
        ((sparse, block), (dense, dense_block)),
        outside,
        inactive=sparse * (experts - active) * 3 * hidden * width,
        hidden=hidden,
        heads=heads,
        q_width=q,
        kv_width=heads * (nope + rope + value) // 2,
        mlp_width=(active + shared) * width,
        vocabulary=vocabulary,
        linears=(*of_attention, *in_sparse, *in_dense),
        experts_met=active,
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=(f"Deepseek{kind[-2:].upper()}DecoderLayer",),
        lora_targets=("q_proj" if direct else "q_b_proj", "kv_b_proj"),
    )


READERS = (
    (read_llama, tuple(CLASSES)),
    (read_gpt, tuple(_GPTS)),
    (read_mixture, ("mixtral", "qwen3_moe")),
    (read_gpt_oss, ("gpt_oss",)),
    (read_deepseek, ("deepseek_v2", "deepseek_v3")),
)
