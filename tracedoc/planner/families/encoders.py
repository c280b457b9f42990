"""Read encoders and encoder-decoders: BERT, RoBERTa, ViT, T5 and Whisper."""

from __future__ import annotations

from tracedoc.planner.families.config import Config, embeddings, kept_by, outputs, stacked, weights
from tracedoc.planner.shape import Linear, ModelShape


def read_bert(config: Config, kind: str) -> ModelShape:
    """Return the shape of BERT or RoBERTa, with the masked-language head if that is named, or a pooler."""
    hidden, blocks = config.number("hidden_size"), config.number("num_hidden_layers")
    width, vocabulary = config.number("intermediate_size"), config.number("vocab_size")
    heads = config.heads("num_attention_heads", hidden=hidden)
    positions = config.number("max_position_embeddings", default=512)
    of_attention = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
    )
    linears = (
        *(Linear(name, hidden, hidden) for name in of_attention),
        Linear("intermediate.dense", hidden, width),
        Linear("output.dense", width, hidden),
    )
    block = weights(linears) + outputs(linears) + 4 * hidden
    outside = (vocabulary + positions + config.number("type_vocab_size", default=2) + 2) * hidden
    masked = config.architecture.endswith(("MaskedLM", "PreTraining"))
    # Masked language model: one dense layer, its norm and a bias for each word; else the pooler.
    outside += hidden * hidden + hidden + (2 * hidden + vocabulary if masked else 0)
    head = {"bert": "cls.predictions.transform.dense", "roberta": "lm_head.dense"}[kind]
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        hidden=hidden,
        heads=heads,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=linears,
        outside_linears=(Linear(head if masked else "pooler.dense", hidden, hidden),),
        gated=False,
        rms_norm=False,
        fp32_loss=False,
        dropout=config.share("hidden_dropout_prob", default=0.1) > 0,
        mlp_tensors=kept_by(config.text("hidden_act"), "gelu"),
        has_logits=masked,
        context=positions - (2 if kind == "roberta" else 0),
        wrap_classes=({"bert": "BertLayer", "roberta": "RobertaLayer"}[kind],),
        layers_path=f"model.{kind}.encoder.layer" if masked else "model.encoder.layer",
        lora_targets=("query", "value"),
    )


def read_vit(config: Config, kind: str) -> ModelShape:
    """Return the shape of a ViT that classifies; its sequence is the patches of an image and one more."""
    hidden, blocks = config.number("hidden_size", default=768), config.number("num_hidden_layers", default=12)
    heads = config.number("num_attention_heads", default=12)
    width = config.number("intermediate_size", default=3072)
    image, patch = config.number("image_size", default=224), config.number("patch_size", default=16)
    channels, labels = config.number("num_channels", default=3), config.keys.get("id2label")
    classes = len(labels) if isinstance(labels, dict) and labels else 2
    of_attention = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
    linears = (
        *(Linear(name, hidden, hidden) for name in of_attention),
        Linear("mlp.fc1", hidden, width),
        Linear("mlp.fc2", width, hidden),
    )
    tokens = (image // patch) ** 2 + 1
    block = weights(linears) + outputs(linears) + 4 * hidden
    outside = (channels * patch * patch + 1) * hidden + (1 + tokens) * hidden + 2 * hidden
    outside += (hidden + 1) * classes
    return stacked(
        kind,
        ((blocks, block),),
        outside,
        hidden=hidden,
        heads=heads,
        mlp_width=width,
        vocabulary=classes,
        linears=linears,
        outside_linears=(Linear("classifier", hidden, classes),),
        gated=False,
        rms_norm=False,
        dropout=config.share("hidden_dropout_prob", default=0.0) > 0,
        mlp_tensors=kept_by(config.text("hidden_act"), "gelu"),
        has_logits=False,
        context=tokens,
        wrap_classes=("ViTLayer",),
        layers_path="model.vit.layers",
        lora_targets=("q_proj", "v_proj"),
    )


def read_t5(config: Config, kind: str) -> ModelShape:
    """Return the shape of T5, of whose two kinds of blocks the decoder's is the larger one."""
    hidden, encoder = config.number("d_model"), config.number("num_layers")
    decoder = config.number("num_decoder_layers", default=encoder)
    heads, width = config.number("num_heads"), config.number("d_ff")
    inner, vocabulary = heads * config.number("d_kv", default=64), config.number("vocab_size")
    gated = config.text("feed_forward_proj").startswith("gated")
    own = _t5_attention("SelfAttention", hidden, inner)
    cross = _t5_attention("EncDecAttention", hidden, inner, decoder)
    mlp = (
        *(
            Linear(f"DenseReluDense.{name}", hidden, width)
            for name in (("wi_0", "wi_1") if gated else ("wi",))
        ),
        Linear("DenseReluDense.wo", width, hidden),
    )
    encoder_block = weights(own) + weights(mlp) + 2 * hidden
    decoder_block = weights(own) + weights(cross) + weights(mlp) + 3 * hidden
    bias = 2 * config.number("relative_attention_num_buckets", default=32) * heads
    outside = embeddings(config, vocabulary, hidden, tied=True) + 2 * hidden + bias
    blocks = encoder + decoder
    return stacked(
        kind,
        ((encoder, encoder_block), (decoder, decoder_block)),
        outside,
        hidden=hidden,
        heads=heads,
        q_width=inner,
        kv_width=inner,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=(*own, *cross, *mlp),
        gated=gated,
        dropout=config.share("dropout_rate", default=0.1) > 0,
        attention_dropout=config.share("dropout_rate", default=0.1) > 0,
        mlp_dropout=config.share("dropout_rate", default=0.1) > 0,
        math_attention=True,
        fp32_loss=False,
        mlp_tensors=2 + kept_by("gelu_new", "") if gated else 1,
        attentions=(encoder + 2 * decoder) / blocks,
        norms=(2 * encoder + 3 * decoder) / blocks,
        wrap_classes=("T5Block",),
        layers_path="[*model.encoder.block, *model.decoder.block]",
        lora_targets=("q", "v"),
    )


def _t5_attention(name: str, hidden: int, inner: int, blocks: int | None = None) -> tuple[Linear, ...]:
    first = (Linear(f"{name}.{one}", hidden, inner, blocks=blocks) for one in ("q", "k", "v"))
    return (*first, Linear(f"{name}.o", inner, hidden, blocks=blocks))


def read_whisper(config: Config, kind: str) -> ModelShape:
    """Return the shape of Whisper: ``--seq`` counts the text; the sound has 1500 positions at most."""
    hidden = config.number("d_model")
    encoder, decoder = config.number("encoder_layers"), config.number("decoder_layers")
    heads = config.heads("encoder_attention_heads", "decoder_attention_heads", hidden=hidden)
    width = config.number("encoder_ffn_dim", "decoder_ffn_dim", default=4 * hidden)
    vocabulary = config.number("vocab_size")
    own = _whisper_attention("self_attn", hidden)
    cross = _whisper_attention("encoder_attn", hidden, decoder)
    mlp = (Linear("fc1", hidden, width), Linear("fc2", width, hidden))
    # Keys have no bias.
    attention = weights(own) + outputs(own) - hidden + 2 * hidden
    encoder_block = attention + weights(mlp) + outputs(mlp) + 2 * hidden
    decoder_block = encoder_block + attention
    sound, text = (
        config.number("max_source_positions", default=1500),
        config.number("max_target_positions", default=448),
    )
    mels = config.number("num_mel_bins", default=80)
    outside = 3 * hidden * (mels + hidden) + 2 * hidden + (sound + text + vocabulary) * hidden + 4 * hidden
    blocks = encoder + decoder
    return stacked(
        kind,
        ((encoder, encoder_block), (decoder, decoder_block)),
        outside,
        hidden=hidden,
        heads=heads,
        mlp_width=width,
        vocabulary=vocabulary,
        linears=(*own, *cross, *mlp),
        gated=False,
        rms_norm=False,
        dropout=config.share("dropout", default=0.0) > 0,
        attentions=(encoder + 2 * decoder) / blocks,
        norms=(2 * encoder + 3 * decoder) / blocks,
        encoder_blocks=encoder,
        encoder_tokens=sound,
        mlp_tensors=kept_by(config.text("activation_function"), "gelu"),
        fp32_loss=False,
        context=text,
        wrap_classes=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        layers_path="[*model.model.encoder.layers, *model.model.decoder.layers]",
    )


def _whisper_attention(name: str, hidden: int, blocks: int | None = None) -> tuple[Linear, ...]:
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    return tuple(Linear(f"{name}.{one}", hidden, hidden, blocks=blocks) for one in names)


READERS = (
    (read_bert, ("bert", "roberta")),
    (read_vit, ("vit",)),
    (read_t5, ("t5",)),
    (read_whisper, ("whisper",)),
)
