"""Read mixtures of experts: Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3."""

from __future__ import annotations

from msgspec.structs import replace

from tracedoc.planner.families.config import Config, embeddings, stacked, weights
from tracedoc.planner.families.decoders import attention
from tracedoc.planner.shape import Linear, ModelShape


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
        mlp_tensors=6,
        dense_attention=True,
        score_bytes=2,
        norm_bytes=8,
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=("GptOssDecoderLayer",),
    )


def read_deepseek(config: Config, kind: str) -> ModelShape:
    """Return the shape of DeepSeek-V3: latent attention, dense blocks first, then experts and shared ones.

    The largest block is one with experts. PEFT adapts attention, routers and experts, not what is dense.
    """
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    nope, rope = config.number("qk_nope_head_dim", default=128), config.number("qk_rope_head_dim", default=64)
    value, kv_rank = config.number("v_head_dim", default=128), config.number("kv_lora_rank", default=512)
    q_rank = config.number("q_lora_rank", default=1536)
    dense = min(blocks, config.count("first_k_dense_replace", default=3))
    experts, active = config.experts("n_routed_experts", default=256, active=8)
    shared = config.count("n_shared_experts", default=1)
    width, dense_width = (
        config.number("moe_intermediate_size", default=2048),
        config.number("intermediate_size"),
    )
    q = heads * (nope + rope)
    of_attention = (
        Linear("self_attn.q_a_proj", hidden, q_rank),
        Linear("self_attn.q_b_proj", q_rank, q),
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
        wrap_classes=("DeepseekV3DecoderLayer",),
        lora_targets=("q_b_proj", "kv_b_proj"),
    )


READERS = (
    (read_mixture, ("mixtral", "qwen3_moe")),
    (read_gpt_oss, ("gpt_oss",)),
    (read_deepseek, ("deepseek_v3",)),
)
