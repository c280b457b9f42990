"""Compute the model states of one GPU under a strategy: parameters, gradients, optimizer.

Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 5 and figure 1, is where the formulas come from.
Bytes are plain numbers; GB in the words of the planner is 1e9 of them, as GPUs are sold.
"""

from __future__ import annotations

import msgspec

from tracedoc.planner.setup import (
    NF4_BYTES,
    NF4_DOUBLE_BYTES,
    OPTIMIZERS,
    PRECISIONS,
    Question,
)
from tracedoc.planner.strategies import Strategy, shards

SPREAD = 0.08
"""How far peaks lie from what is predicted: nine of ten published ones within this share (make bench-plan).

None of the predictions was fitted to a peak, so it is what new runs can be expected to be off.
"""


class ModelStates(msgspec.Struct, frozen=True):
    """Bytes on one GPU, and on the host (memory or NVMe) for each GPU.

    ``copies`` is what is held beside the states from forward to backward: the 16-bit parameters that
    SHARD_GRAD_OP gathered (a node's share of them where they are kept in the node), or those that autocast
    makes of fp32 parameters.
    """

    parameters: float
    gradients: float
    optimizer: float
    copies: float = 0.0
    host: float = 0.0

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, as the published tables count them."""
        return self.parameters + self.gradients + self.optimizer


def model_states(question: Question, strategy: Strategy) -> ModelStates:
    """Return the model states of one GPU.

    In mixed precision DeepSpeed keeps parameters and gradients in 16 bits and the fp32 copy with the
    optimizer; plain PyTorch keeps fp32 parameters and gradients. Both are 16 bytes a parameter with Adam, but
    what ZeRO-1 leaves whole differs: 4 bytes there, 8 here. LoRA adapters are fp32 beside 16-bit weights.
    """
    training = question.training
    precision = PRECISIONS[training.precision]
    share = shards(strategy, question.gpus, question.nodes)
    part = {what: share if what in strategy.split else 1 for what in ("parameters", "gradients", "optimizer")}
    states = optimizer_bytes(question)
    if strategy.family == "deepspeed" and not question.frozen:
        weight, gradient = precision.compute, precision.gradient
        states += precision.master
    elif precision.autocast:
        weight = gradient = precision.master
    else:
        weight, gradient = precision.compute, precision.gradient
    trained = question.trainable
    base = frozen_bytes(question)
    parameters = (trained * weight + base) / part["parameters"]
    gradients = trained * gradient / part["gradients"]
    optimizer = trained * states / part["optimizer"]
    copies = 0.0
    if strategy.gathers == "whole":
        copies = trained * precision.compute + base
    elif strategy.kept_in_node:
        copies = (trained * precision.compute + base) / question.gpus_per_node
    elif strategy.family == "ddp" and precision.autocast:
        copies = float(trained * precision.compute)
    if training.optimizer_in_backward:
        # Freed as soon as it is used: those of a block, or of the largest matrix outside, are there at once.
        largest = max(question.model.block_parameters, question.model.vocabulary * question.model.hidden)
        gradients = min(gradients, largest * gradient / part["gradients"])
    host = 0.0
    if OPTIMIZERS[training.optimizer].paged:
        optimizer, host = 0.0, optimizer
    return _offloaded(ModelStates(parameters, gradients, optimizer, copies, host), training.offload, strategy)


def optimizer_bytes(question: Question) -> float:
    """Return the bytes of optimizer state for each trained parameter, without a master copy.

    Adafactor keeps a row and a column of fp32 for each matrix, counted as square (Shazeer and Stern 2018,
    arXiv 1804.04235). Muon updates the matrices of blocks; embeddings and head have AdamW's two states.
    """
    training, model = question.training, question.model
    optimizer = OPTIMIZERS[training.optimizer]
    full = optimizer.full
    if training.optimizer == "muon" and not question.frozen:
        full += model.outside_parameters / model.parameters
    factored = 4 * 2 / model.hidden if optimizer.factored else 0.0
    return full * PRECISIONS[training.precision].state + optimizer.one_byte + factored


def frozen_bytes(question: Question) -> float:
    """Return the bytes of the weights that LoRA leaves alone; 4 bits shrink only the matrices of blocks."""
    if not question.frozen:
        return 0.0
    wide = PRECISIONS[question.training.precision].compute
    if question.training.base_bits == 16:
        return float(question.frozen * wide)
    model = question.model
    inside = ((m, model.blocks if m.blocks is None else m.blocks) for m in model.linears)
    matrices = sum(m.inputs * m.outputs * m.count * times for m, times in inside)
    quantised = min(matrices, model.blocks * model.block_parameters)
    bytes_each = NF4_DOUBLE_BYTES if question.training.double_quantisation else NF4_BYTES
    return quantised * bytes_each + (question.frozen - quantised) * wide


def optimizers_with_a_byte(optimizer: str) -> str:
    """Return the 8-bit optimizer that stands in for one, empty where there is none."""
    return {"adamw": "adamw-8bit", "adam": "adamw-8bit", "paged-adamw": "paged-adamw-8bit"}.get(optimizer, "")


def can_offload(strategy: Strategy, offload: str) -> bool:
    """Return whether a strategy's framework can move this to the host.

    DeepSpeed moves the optimizer from stage 1 on, everything in stage 3, and it alone uses NVMe; on one GPU
    it is its stage 2 with one shard. FSDP moves everything or nothing (``CPUOffloadPolicy``), on one GPU as
    well.
    """
    if offload == "none":
        return not strategy.alone
    if offload == "optimizer":
        return strategy.family == "deepspeed"
    if offload == "all":
        return strategy.family == "fsdp" or strategy.id in ("zero-3", "single-zero-3")
    return strategy.id in ("zero-3", "single-zero-3")


def can_train(strategy: Strategy, question: Question) -> bool:
    """Return whether a strategy trains with this optimizer, and with adapters, at all.

    ``torch.optim.Adafactor`` has no version for sharded tensors, Muon needs whole matrices, and
    ``ZeroRedundancyOptimizer`` fails where a rank owns parameters without gradients.
    """
    optimizer = OPTIMIZERS[question.training.optimizer]
    if optimizer.whole_matrices and strategy.split and strategy.family != "deepspeed":
        return False
    if optimizer.whole_matrices and "parameters" in strategy.split:
        return False
    return not (strategy.id == "zero-redundancy" and (question.frozen or not optimizer.plain))


def offload_moves(question: Question, strategy: Strategy) -> float:
    """Return the bytes that are in host memory instead of on each GPU."""
    return model_states(question, strategy).host


def _offloaded(states: ModelStates, offload: str, strategy: Strategy) -> ModelStates:
    if offload == "none" or not can_offload(strategy, offload):
        return states
    if offload == "optimizer":
        # ZeRO-Offload keeps the gradients beside the optimizer, where they are split at all.
        moved = states.host + states.optimizer + (states.gradients if "gradients" in strategy.split else 0.0)
        kept = 0.0 if "gradients" in strategy.split else states.gradients
        return ModelStates(states.parameters, kept, 0.0, states.copies, moved)
    return ModelStates(0.0, 0.0, 0.0, states.copies, states.host + states.states)
