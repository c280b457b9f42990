"""Read Llama and its kin: separate or fused q, k, v, a gated MLP, RMS norms."""

from __future__ import annotations

from tracedoc.planner.config_file import Config
from tracedoc.planner.families.counting import embeddings, weights
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


def read(config: Config, kind: str) -> ModelShape:
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
    total = blocks * block + outside
    activation = config.text("hidden_activation", "hidden_act")
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=outside,
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

READERS = ((read, tuple(CLASSES)),)
