"""Read a Hugging Face ``config.json``: the shape of the model, and its parameters counted exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError, did_you_mean
from tracedoc.planner.shape import Linear, ModelShape

LARGEST_CONFIG_BYTES = 4 << 20


class _Config(msgspec.Struct, frozen=True):
    """The keys of one file, with errors that name it."""

    path: str
    keys: Mapping[str, object]

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.keys.get(name)
            if isinstance(value, bool) or value is None:
                continue
            if isinstance(value, int) and value > 0:
                return value
            raise InputError(
                f"{self.path}: {name} is {value!r}, no positive whole number",
                "correct the file, or use --params",
            )
        if default is None:
            raise InputError(
                f"{self.path} has no {names[0]!r}", "give the model's own config.json, or --params"
            )
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.keys.get(name)
        return value if isinstance(value, bool) else default

    def share(self, *names: str, default: float) -> float:
        for name in names:
            value = self.keys.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return default

    def text(self, *names: str) -> str:
        return next((v for name in names if isinstance(v := self.keys.get(name), str)), "")

    @property
    def architecture(self) -> str:
        names = self.keys.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""


def read_model_config(path: str | Path) -> ModelShape:
    """Return the shape that a ``config.json`` describes; a folder is searched for one.

    Raises :class:`InputError` for what is no such file, and for a ``model_type`` that is not known here.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        if file.stat().st_size > LARGEST_CONFIG_BYTES:
            raise InputError(f"{file} is too large for a config.json", "give the config, not the weights")
        keys = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", "give a config.json on disk, or --params"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", "give the model's config.json") from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise InputError(
            f"{file} names no model_type", "give the config.json of a Hugging Face model, or --params"
        )
    kind = keys["model_type"]
    if kind not in FAMILIES:
        raise InputError(
            f"{file}: models of type {kind!r} are not known{did_you_mean(kind, FAMILIES)}",
            f"use --params with its count; known: {', '.join(sorted(FAMILIES))}",
        )
    config = _Config(str(file), keys)
    shape = FAMILIES[kind](config)
    return replace(shape, name=config.text("_name_or_path").rsplit("/", 1)[-1] or kind)


def _llama_like(config: _Config, kind: str) -> ModelShape:
    """Llama and its kin: separate q, k, v, o, a gated MLP (or experts of them), RMS norms."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    heads = config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=8 if kind in ("mistral", "mixtral") else heads)
    head = config.number("head_dim", default=_HEAD_DIM.get(kind, hidden // heads))
    q, kv = heads * head, kv_heads * head
    experts, active, width = 1, 1, config.number("intermediate_size")
    router = 0
    if kind == "mixtral":
        experts, active = (
            config.number("num_local_experts", default=8),
            config.number("num_experts_per_tok", default=2),
        )
        router = hidden * experts
    elif kind == "qwen3_moe":
        experts, active = (
            config.number("num_experts", default=128),
            config.number("num_experts_per_tok", default=8),
        )
        width = config.number("moe_intermediate_size")
        router = hidden * experts
    linears = (
        Linear("q_proj", hidden, q),
        Linear("k_proj", hidden, kv),
        Linear("v_proj", hidden, kv),
        Linear("o_proj", q, hidden),
        Linear("gate_proj", hidden, width, experts),
        Linear("up_proj", hidden, width, experts),
        Linear("down_proj", width, hidden, experts),
    )
    biases = 0
    if kind == "qwen2":
        biases = q + 2 * kv
    elif config.flag("attention_bias", False):
        biases = q + 2 * kv + hidden
    if config.flag("mlp_bias", False):
        biases += 2 * width + hidden
    norms = (4 if kind == "gemma2" else 2) * hidden
    if kind in ("qwen3", "qwen3_moe"):
        norms += 2 * head
    block = _weights(linears) + router + biases + norms
    one_expert = 3 * hidden * width
    vocabulary = config.number("vocab_size")
    tied = config.flag("tie_word_embeddings", kind in ("gemma", "gemma2"))
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    total = blocks * block + outside
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total - blocks * (experts - active) * one_expert,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=outside,
        hidden=hidden,
        heads=heads,
        q_width=q,
        kv_width=kv,
        mlp_width=active * width,
        vocabulary=vocabulary,
        linears=linears,
        fused_qkv=kind == "phi3",
        context=config.number("max_position_embeddings", default=1 << 20),
        wrap_classes=(_CLASSES[kind],),
    )


def _gpt_like(config: _Config, kind: str) -> ModelShape:
    """GPT-2, GPT-NeoX, BLOOM and OPT: biases everywhere, layer norms, an MLP of two matrices."""
    hidden, blocks = config.number("n_embd", "hidden_size"), config.number("n_layer", "num_hidden_layers")
    heads = config.number("n_head", "num_attention_heads")
    width = config.number("n_inner", "intermediate_size", "ffn_dim", default=4 * hidden)
    names = _GPT_MATRICES[kind]
    if kind == "opt":
        if config.number("word_embed_proj_dim", default=hidden) != hidden:
            raise InputError(
                f"{config.path}: OPT with projected embeddings is not known", "use --params with its count"
            )
        attention = tuple(Linear(name, hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
    else:
        attention = (Linear(names[0], hidden, 3 * hidden), Linear(names[1], hidden, hidden))
    linears = (*attention, Linear(names[2], hidden, width), Linear(names[3], width, hidden))
    block = _weights(linears) + sum(m.outputs for m in linears) + 4 * hidden
    vocabulary = config.number("vocab_size")
    positions = config.number("n_positions", "max_position_embeddings", default=2048)
    outside = vocabulary * hidden + 2 * hidden
    if kind == "gpt2":
        outside += positions * hidden
    elif kind == "gpt_neox":
        outside += 0 if config.flag("tie_word_embeddings", False) else vocabulary * hidden
    elif kind == "bloom":
        outside += 2 * hidden
    elif kind == "opt":
        outside += (positions + 2) * hidden
    total = blocks * block + outside
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=outside,
        hidden=hidden,
        heads=heads,
        q_width=hidden,
        kv_width=hidden,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=linears,
        gated=False,
        rms_norm=False,
        dropout=config.share("resid_pdrop", "hidden_dropout", "dropout", default=_DROPOUT[kind]) > 0,
        fused_qkv=kind != "opt",
        mlp_tensors=_kept_by(config.text("activation_function", "hidden_act"), _ACTIVATION[kind]),
        context=None if kind == "bloom" else positions,
        wrap_classes=(_CLASSES[kind],),
        layers_path=_PATHS[kind],
        lora_targets=("q_proj", "v_proj") if kind == "opt" else (names[0],),
    )


def _bert_like(config: _Config, kind: str) -> ModelShape:
    """BERT and RoBERTa: the encoder with its pooler, or with the masked-language head if that is named."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    width, vocabulary = config.number("intermediate_size"), config.number("vocab_size")
    heads = config.number("num_attention_heads")
    positions = config.number("max_position_embeddings", default=512)
    linears = (
        *(Linear(name, hidden, hidden) for name in ("query", "key", "value", "attention.output.dense")),
        Linear("intermediate.dense", hidden, width),
        Linear("output.dense", width, hidden),
    )
    block = _weights(linears) + sum(m.outputs for m in linears) + 4 * hidden
    outside = (vocabulary + positions + config.number("type_vocab_size", default=2) + 2) * hidden
    masked = config.architecture.endswith(("MaskedLM", "PreTraining"))
    # Masked language model: one dense layer, its norm and a bias for each word; else the pooler.
    outside += hidden * hidden + hidden + (2 * hidden + vocabulary if masked else 0)
    total = blocks * block + outside
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=outside,
        hidden=hidden,
        heads=heads,
        q_width=hidden,
        kv_width=hidden,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=linears,
        gated=False,
        rms_norm=False,
        dropout=config.share("hidden_dropout_prob", default=0.1) > 0,
        mlp_tensors=_kept_by(config.text("hidden_act"), "gelu"),
        has_logits=masked,
        context=positions,
        wrap_classes=(_CLASSES[kind],),
        layers_path=f"model.{kind}.encoder.layer" if masked else "model.encoder.layer",
        lora_targets=("query", "value"),
    )


def _t5(config: _Config, kind: str) -> ModelShape:
    """T5: blocks of two kinds; the decoder's, with a second attention, is the larger one."""
    hidden, encoder = config.number("d_model"), config.number("num_layers")
    decoder = config.number("num_decoder_layers", default=encoder)
    heads, width = config.number("num_heads"), config.number("d_ff")
    inner, vocabulary = heads * config.number("d_kv"), config.number("vocab_size")
    gated = config.text("feed_forward_proj").startswith("gated")
    attention = (
        *(Linear(name, hidden, inner) for name in ("q", "k", "v")),
        Linear("o", inner, hidden),
    )
    mlp = (
        *(Linear(name, hidden, width) for name in (("wi_0", "wi_1") if gated else ("wi",))),
        Linear("wo", width, hidden),
    )
    encoder_block = _weights(attention) + _weights(mlp) + 2 * hidden
    decoder_block = 2 * _weights(attention) + _weights(mlp) + 3 * hidden
    tied = config.flag("tie_word_embeddings", True)
    bias = 2 * config.number("relative_attention_num_buckets", default=32) * heads
    outside = vocabulary * hidden * (1 if tied else 2) + 2 * hidden + bias
    total = encoder * encoder_block + decoder * decoder_block + outside
    blocks = encoder + decoder
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total,
        blocks=blocks,
        block_parameters=decoder_block,
        outside_parameters=outside,
        hidden=hidden,
        heads=heads,
        q_width=inner,
        kv_width=inner,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=(*attention, *mlp),
        gated=gated,
        dropout=config.share("dropout_rate", default=0.1) > 0,
        mlp_tensors=2 + _kept_by("gelu_new", "") if gated else 1,
        attentions=(encoder + 2 * decoder) / blocks,
        wrap_classes=(_CLASSES[kind],),
        layers_path="[*model.encoder.block, *model.decoder.block]",
        lora_targets=("q", "v"),
    )


def _weights(linears: tuple[Linear, ...]) -> int:
    return sum(m.inputs * m.outputs * m.count for m in linears)


def _kept_by(activation: str, default: str) -> float:
    """Return how many tensors of the MLP's width are kept around an activation, its result among them.

    ReLU needs its result only. Transformers writes ``gelu_new`` as a chain of operations, each of which
    keeps what it multiplied: 5.5 in 16 bits.
    """
    name = activation or default
    return {"relu": 1.0, "gelu_new": 5.5}.get(name, 2.0)


_DROPOUT = {"gpt2": 0.1, "gpt_neox": 0.0, "bloom": 0.0, "opt": 0.1}
_ACTIVATION = {"gpt2": "gelu_new", "gpt_neox": "gelu", "bloom": "gelu", "opt": "relu"}
# Head sizes that Transformers assumes where the file is silent; else hidden / heads.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "qwen3": 128}

_CLASSES = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "bloom": "BloomBlock",
    "opt": "OPTDecoderLayer",
    "bert": "BertLayer",
    "roberta": "RobertaLayer",
    "t5": "T5Block",
}
"""The class that owns a block's parameter tensors: one FSDP unit each."""

_GPT_MATRICES = {
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "gpt_neox": ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bloom": ("query_key_value", "self_attention.dense", "dense_h_to_4h", "dense_4h_to_h"),
    "opt": ("", "", "fc1", "fc2"),
}
_PATHS = {
    "gpt2": "model.transformer.h",
    "gpt_neox": "model.gpt_neox.layers",
    "bloom": "model.transformer.h",
    "opt": "model.model.decoder.layers",
}

_READERS: dict[Callable[[_Config, str], ModelShape], tuple[str, ...]] = {
    _llama_like: ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "phi3"),
    _gpt_like: ("gpt2", "gpt_neox", "bloom", "opt"),
    _bert_like: ("bert", "roberta"),
    _t5: ("t5",),
}


def _reader(read: Callable[[_Config, str], ModelShape], kind: str) -> Callable[[_Config], ModelShape]:
    return lambda config: read(config, kind)


FAMILIES: dict[str, Callable[[_Config], ModelShape]] = {
    kind: _reader(read, kind) for read, kinds in _READERS.items() for kind in kinds
}
"""How to read each ``model_type``."""
