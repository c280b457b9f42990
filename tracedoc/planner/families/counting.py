"""Count what the matrices of a block and the embeddings hold."""

from __future__ import annotations

from collections.abc import Iterable

from tracedoc.planner.config_file import Config
from tracedoc.planner.shape import Linear


def weights(linears: Iterable[Linear]) -> int:
    """Return the weights of these matrices in one block, those of all experts among them."""
    return sum(m.inputs * m.outputs * m.count for m in linears)


def outputs(linears: Iterable[Linear]) -> int:
    """Return the biases that these matrices have, one for each output."""
    return sum(m.outputs * m.count for m in linears)


def embeddings(config: Config, vocabulary: int, hidden: int, *, tied: bool) -> int:
    """Return the weights of the words' embedding and of the head, which are one where they are ``tied``.

    ``tied`` is what Transformers assumes where the file is silent.
    """
    return vocabulary * hidden * (1 if config.flag("tie_word_embeddings", tied) else 2)


def kept_by(activation: str, default: str) -> float:
    """Return how many tensors of the MLP's width are kept around an activation, its result among them.

    ReLU needs its result only. Transformers writes the approximations of GELU as chains of operations, each
    of which keeps what it multiplied.
    """
    return KEPT_BY_ACTIVATION.get(activation or default, 2.0)


KEPT_BY_ACTIVATION = {"relu": 1.0, "gelu_new": 5.5, "gelu_fast": 8.0}
"""Tensors of the MLP's width, in 16 bits; most activations are one operation, which keeps its input."""
