"""Hold parameter counts against published ones, and against the models that Transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracedoc.errors import InputError
from tracedoc.planner.families import read_model_config
from tracedoc.planner.shape import lora_parameters, shape_from_parameters

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (LLAMA_7B, 6_738_415_616),
    "Llama-3-8B": (
        LLAMA_7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
        8_030_261_248,
    ),
    "Mistral-7B": (
        LLAMA_7B | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
        7_241_732_096,
    ),
    "Mistral-7B, key heads not given": (
        LLAMA_7B | {"model_type": "mistral", "intermediate_size": 14336},
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        LLAMA_7B
        | {"model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "vocab_size": 102400,
        },
        15_706_484_224,
    ),
    "Qwen2-7B": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
    ),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
        },
        124_439_808,
    ),
    "GPT-2 XL": (
        {
            "model_type": "gpt2",
            "n_embd": 1600,
            "n_layer": 48,
            "n_head": 25,
            "vocab_size": 50257,
            "n_positions": 1024,
        },
        1_557_611_200,
    ),
    "GPT-NeoX-20B": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
        },
        20_554_567_680,
    ),
    "BLOOM": (
        {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880},
        176_247_271_424,
    ),
    "BERT base": (
        {
            "model_type": "bert",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
        109_482_240,
    ),
    "T5 small": (
        {
            "model_type": "t5",
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "vocab_size": 32128,
        },
        60_506_624,
    ),
}


def test_a_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    keys, count = PUBLISHED["GPT-NeoX-20B"]
    assert shape_of(tmp_path, keys | {"tie_word_embeddings": True}).parameters == count - 50432 * 6144


def shape_of(folder: Path, keys: dict[str, Any]):
    (folder / "config.json").write_text(json.dumps(keys))
    return read_model_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str, tmp_path: Path) -> None:
    keys, count = PUBLISHED[name]
    assert shape_of(tmp_path, keys).parameters == count


def test_a_token_meets_two_of_mixtrals_eight_experts(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, PUBLISHED["Mixtral-8x7B"][0])
    assert shape.active_parameters == 12_879_925_248


def test_the_class_that_owns_a_block_is_named(tmp_path: Path) -> None:
    assert shape_of(tmp_path, LLAMA_7B).wrap_classes == ("LlamaDecoderLayer",)
    assert shape_of(tmp_path, PUBLISHED["T5 small"][0]).wrap_classes == ("T5Block",)


def test_lora_of_rank_8_on_q_and_v_of_llama_7b_trains_4_million(tmp_path: Path) -> None:
    """4,194,304 is what PEFT prints for Llama-7B with r=8 and its default targets."""
    assert lora_parameters(shape_of(tmp_path, LLAMA_7B), 8, ("q_proj", "v_proj")) == 4_194_304


def test_lora_on_all_matrices_of_llama_7b(tmp_path: Path) -> None:
    """Rank 16: 32 x 16 x (4 x 8192 + 3 x 15104) = 39,976,960, as PEFT prints it."""
    assert lora_parameters(shape_of(tmp_path, LLAMA_7B), 16, ("all-linear",)) == 39_976_960


@pytest.mark.parametrize("parameters", [63e6, 125e6, 1e9, 7e9, 70e9, 175e9, 1e12])
def test_an_assumed_shape_holds_exactly_the_parameters_asked_for(parameters: float) -> None:
    shape = shape_from_parameters(int(parameters))
    assert shape.blocks * shape.block_parameters + shape.outside_parameters == int(parameters)
    assert 0 < shape.outside_parameters < 0.6 * parameters
    assert shape.assumed


def test_an_unknown_model_type_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'lama' are not known \(did you mean 'llama'") as caught:
        shape_of(tmp_path, LLAMA_7B | {"model_type": "lama"})
    assert "--script" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 3}', '{"model_type": "llama"}', "\x00"])
def test_what_is_no_config_is_an_error_with_a_hint(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        read_model_config(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("value", [0, -1, 1.5, "12", True])
def test_a_size_that_is_none_is_an_error(value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        shape_of(tmp_path, LLAMA_7B | {"hidden_size": value})


def test_a_name_of_the_hub_is_read_from_the_cache_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--meta-llama--Llama-2-7b" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_7B))
    assert read_model_config("meta-llama/Llama-2-7b").parameters == 6_738_415_616
    with pytest.raises(InputError, match="meta-llama/Llama-2-70b is not in ") as caught:
        read_model_config("meta-llama/Llama-2-70b")
    assert caught.value.hint.endswith("hf download meta-llama/Llama-2-70b config.json")


def test_a_model_that_is_not_known_is_sent_to_its_script(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "unet"}))
    with pytest.raises(InputError, match="'unet' are not known") as caught:
        read_model_config(file)
    assert caught.value.hint.startswith('--script "train.py" takes any model that trains')


@pytest.mark.parametrize(
    ("keys", "seen"),
    [
        ({"model_type": "llama"}, (0, 0.0)),
        ({"model_type": "mistral"}, (4096, 1.0)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0.0)),  # from version 0.2 on
        ({"model_type": "gemma3_text", "sliding_window": 1024}, (1024, 5 / 6)),
        ({"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}, (0, 0.0)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 512,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            },
            (512, 0.75),
        ),
    ],
)
def test_windows_of_attention_are_read(keys: dict[str, Any], seen: tuple[int, float], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B | keys))
    shape = read_model_config(file)
    assert (shape.window, shape.windowed) == pytest.approx(seen)
