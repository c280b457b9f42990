"""Say what host memory a node needs while a checkpoint is loaded, before its weights are sharded."""

from __future__ import annotations

from tracedoc.planner.candidates import Candidate
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.units import format_gb

WORTH_SAYING_BYTES = 30e9


def load_bytes_per_node(question: Question, chosen: Candidate, framework: str) -> float | None:
    """Return the bytes that the processes of a node hold while they load, ``None`` where that is not known.

    ``from_pretrained`` makes the whole model in host memory, in each process; Accelerate and the Trainer load
    it in one process and send it to the others under FSDP. 4-bit weights go to the GPU as they are read, and
    under ZeRO-3 a process keeps its part only.
    """
    training = question.training
    if chosen.family in PARALLEL_FRAMEWORKS or chosen.strategy in ("zero-3", "single-zero-3"):
        return None
    if training.base_bits == 4 or question.model.step is not None:
        return None
    one = float(question.model.parameters * _weight_bytes(question))
    alone = chosen.family == "fsdp" and framework in ("accelerate", "trainer")
    return one if alone else one * question.gpus_per_node


def _weight_bytes(question: Question) -> int:
    precision = PRECISIONS[question.training.precision]
    return precision.compute if question.frozen else precision.master or precision.compute


def loading_note(question: Question, chosen: Candidate, framework: str) -> str:
    """Return what loading takes in a sentence, and how it takes less; empty where that is little."""
    needed = load_bytes_per_node(question, chosen, framework)
    if needed is None or needed < WORTH_SAYING_BYTES:
        return ""
    one = question.model.parameters * _weight_bytes(question)
    where = "each node" if question.nodes > 1 else "the node"
    if needed <= one:
        return f"To load a checkpoint takes {format_gb(needed)} of host memory: one process holds the model."
    text = (
        f"To load a checkpoint takes {format_gb(needed)} of host memory in {where}: each of its"
        f" {question.gpus_per_node} processes holds the model"
    )
    if chosen.family != "fsdp":
        return f"{text}."
    less = "set_model_state_dict with broadcast_from_rank0"
    return f"{text}. On the meta device, filled by {less}, it is {format_gb(one)} in one process."
