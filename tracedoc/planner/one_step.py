"""Hold what a training step allocates and computes, where that was counted and not derived."""

from __future__ import annotations

import msgspec

_OF_ITS_RESULT = 1.2
"""A block that keeps less than so much of its result has its activations checkpointed already."""


class OneStep(msgspec.Struct, frozen=True):
    """Bytes and FLOPs of one micro-batch of ``tokens`` tokens (samples, where a model reads none).

    ``block_bytes`` is what the forward passes of all ``blocks`` keep, their results included, of which
    ``output_bytes`` are these results and ``input_bytes`` is what goes in; ``activation_bytes`` the most that
    is live beside parameters and gradients. ``trained`` parameters get gradients.
    """

    tokens: int
    trained: int
    blocks: int
    block_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    matmul_flops: int
    attention_flops: int

    @property
    def checkpointed(self) -> bool:
        """Whether the step recomputes its blocks already."""
        return self.blocks > 0 and self.block_bytes < _OF_ITS_RESULT * self.output_bytes

    def kept(self, tokens: int, *, checkpointing: bool) -> float:
        """Return the bytes that forward keeps in blocks: with checkpointing what goes into them."""
        kept = min(self.block_bytes, self.input_bytes) if checkpointing else self.block_bytes
        return kept * tokens / self.tokens

    def beside(self, tokens: int) -> float:
        """Return the bytes outside of blocks at the peak: loss, logits, what a head works on."""
        return max(0, self.activation_bytes - self.block_bytes) * tokens / self.tokens

    def one_block(self, tokens: int) -> float:
        """Return what the forward pass of one block keeps."""
        return self.block_bytes / max(1, self.blocks) * tokens / self.tokens
