"""Read single values of a ``config.json``, with errors that name file and key, and count matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tracedoc.errors import InputError
from tracedoc.planner.shape import Linear, ModelShape


class Config(msgspec.Struct, frozen=True):
    """The keys of one file, with errors that name it."""

    path: str
    keys: Mapping[str, object]

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of these keys that is there: a positive whole number."""
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

    def count(self, name: str, *, default: int) -> int:
        """Return a key that may be 0 as well."""
        return 0 if self.keys.get(name) == 0 else self.number(name, default=default)

    def flag(self, name: str, default: bool) -> bool:
        """Return a key that is true or false."""
        value = self.keys.get(name)
        return value if isinstance(value, bool) else default

    def share(self, *names: str, default: float) -> float:
        """Return the first of these keys that is a number."""
        for name in names:
            value = self.keys.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return default

    def text(self, *names: str) -> str:
        """Return the first of these keys that is a text, or an empty one."""
        return next((v for name in names if isinstance(v := self.keys.get(name), str)), "")

    def windows(self, kind: str) -> tuple[int, float]:
        """Return the positions that a windowed block sees and the share of such blocks; 0 and 0: none."""
        size, share = _WINDOWS.get(kind, (0, 0.0))
        if self.keys.get("sliding_window", size) is None:
            return 0, 0.0
        types = self.keys.get("layer_types")
        if isinstance(types, list) and types:
            share = types.count("sliding_attention") / len(types)
        size = self.count("sliding_window", default=size)
        return (size, share) if size and share else (0, 0.0)

    @property
    def architecture(self) -> str:
        """The class of the model that the file names, empty where it names none."""
        names = self.keys.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    def heads(self, *names: str, hidden: int) -> int:
        """Return the number of attention heads; the hidden size has to divide by it."""
        heads = self.number(*names)
        if hidden % heads and "head_dim" not in self.keys:
            near = min((n for n in range(1, hidden + 1) if hidden % n == 0), key=lambda n: abs(n - heads))
            raise InputError(
                f"{self.path}: {heads} heads do not divide the hidden size {hidden}",
                f"the nearest number that does: {near}",
            )
        return heads

    def kv_heads(self, heads: int, *, default: int) -> int:
        """Return the heads of keys and values, which several query heads may share."""
        kv_heads = self.number("num_key_value_heads", default=min(default, heads))
        if kv_heads > heads or heads % kv_heads:
            raise InputError(
                f"{self.path}: {kv_heads} key-value heads do not divide {heads} heads",
                "num_key_value_heads is a divisor of num_attention_heads",
            )
        return kv_heads

    def experts(self, *names: str, default: int, active: int) -> tuple[int, int]:
        """The experts of a block, and those of them that a token meets."""
        experts = self.number(*names, default=default)
        met = self.number("num_experts_per_tok", "experts_per_token", default=min(active, experts))
        if met > experts:
            raise InputError(
                f"{self.path}: a token cannot meet {met} of {experts} experts",
                f"num_experts_per_tok is {experts} at most",
            )
        return experts, met


_WINDOWS = {
    "mistral": (4096, 1.0),
    "phi3": (0, 1.0),
    "gemma2": (4096, 1 / 2),
    "gemma3_text": (4096, 5 / 6),
    "gpt_oss": (128, 1 / 2),
}
"""What Transformers assumes where a file is silent: positions that a windowed block sees, 0 for no window,
and the share of blocks that are."""


def weights(linears: Iterable[Linear]) -> int:
    """Return the weights of these matrices in one block, those of all experts among them."""
    return sum(m.weights for m in linears)


def outputs(linears: Iterable[Linear]) -> int:
    """Return the biases that these matrices have, one for each output."""
    return sum(m.outputs * m.count for m in linears)


def embeddings(config: Config, vocabulary: int, hidden: int, *, tied: bool) -> int:
    """Return the weights of the words' embedding and of the head, which are one where they are ``tied``.

    ``tied`` is what Transformers assumes where the file is silent.
    """
    return vocabulary * hidden * (1 if config.flag("tie_word_embeddings", tied) else 2)


def kept_by(activation: str, default: str) -> float:
    """The number of tensors of the MLP's width are kept around an activation, its result among them.

    ReLU needs its result only. Transformers writes the approximations of GELU as chains of operations, each
    of which keeps what it multiplied.
    """
    return KEPT_BY_ACTIVATION.get(activation or default, 2.0)


KEPT_BY_ACTIVATION = {"relu": 1.0, "gelu_new": 5.5, "gelu_fast": 8.0}
"""Tensors of the MLP's width, in 16 bits; most activations are one operation, which keeps its input."""


def stacked(
    kind: str,
    stacks: tuple[tuple[int, int], ...],
    outside: int,
    *,
    hidden: int,
    inactive: int = 0,
    q_width: int | None = None,
    kv_width: int | None = None,
    **rest: Any,
) -> ModelShape:
    """The shape of a model of so many blocks of so many weights each, and ``outside`` of them.

    A token meets all weights but the ``inactive``. Queries and keys are as wide as the model if not given.
    """
    total = sum(blocks * block for blocks, block in stacks) + outside
    return ModelShape(
        name=kind,
        parameters=total,
        active_parameters=total - inactive,
        blocks=sum(blocks for blocks, _ in stacks),
        block_parameters=max(block for blocks, block in stacks if blocks),
        outside_parameters=outside,
        hidden=hidden,
        q_width=hidden if q_width is None else q_width,
        kv_width=hidden if kv_width is None else kv_width,
        **rest,
    )
