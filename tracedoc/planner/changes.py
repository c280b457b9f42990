"""Say what would change the answer: what would fit instead, and where another strategy begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.planner.candidates import Candidate, Wish, rank, with_checkpointing
from tracedoc.planner.choice import choose, decisions
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS
from tracedoc.planner.setup import Question

MOST_GPUS = 4096
LARGER_GPUS_GB = (24, 32, 40, 48, 80, 96, 141, 192, 288)

Try = tuple[str, str, Question]
"""A change in words, the options that ask for it, and the question that it makes."""


class Change(msgspec.Struct, frozen=True):
    """One change alone after which something fits, and what that would be.

    ``option`` asks for it on the command line.
    """

    id: str
    what: str
    why: str
    option: str
    strategy: str
    checkpointing: bool
    total_bytes: float
    memory_bytes: float
    host_bytes_per_node: float
    step_ms: float | None = None
    """The predicted step after it, ``None`` where no time is predicted."""
    gpus: int = 1
    selective: bool = False


def changes(question: Question, wish: Wish) -> list[Change]:
    """Return, for each kind of change, the smallest after which something fits with its reserve.

    Twice the GPUs come before what is moved to the host, more of them after it.
    """
    found = list(_found(question, wish))
    moved = [one for one in found if one.id.startswith("offload")]
    many = next((one for one in found if one.id == "gpus" and one.gpus > 2 * question.gpus), None)
    if many is not None and moved:
        found.remove(many)
        found.insert(found.index(moved[-1]) + 1, many)
    return found


def _found(question: Question, wish: Wish) -> Iterator[Change]:
    other = "pytorch" if wish.framework == "deepspeed" else "deepspeed"
    own = (wish, replace(wish, framework=other))
    alone = False
    for change in decisions().change:
        if change.id == "combined" and alone:
            continue
        wishes = (replace(wish, framework="torchtitan"),) if change.id == "parallel" else own
        for what, option, changed in _TRIES[change.id](question, wish):
            if fitting := _first_fitting(changed, wishes):
                alone = alone or change.id in _COMBINED
                yield _change(change.id, what, change.why, option, changed, fitting)
                break


def _first_fitting(question: Question, wishes: tuple[Wish, ...]) -> Candidate | None:
    answers = (choose(rank(question, wish), question, wish)[0] for wish in wishes)
    return next((answer for answer in answers if answer is not None and not answer.tight), None)


def _change(id_: str, what: str, why: str, option: str, question: Question, chosen: Candidate) -> Change:
    return Change(
        id=id_,
        what=what,
        why=why,
        option=option,
        strategy=chosen.title,
        checkpointing=chosen.checkpointing,
        total_bytes=chosen.total_bytes,
        memory_bytes=question.memory_bytes,
        host_bytes_per_node=chosen.memory.states.host * question.gpus_per_node,
        gpus=question.gpus,
        step_ms=chosen.step.expected_ms if chosen.step else None,
        selective=chosen.selective,
    )


def _framework(question: Question, wish: Wish) -> Iterator[Try]:
    if question.gpus > 1:
        other = "PyTorch" if wish.framework == "deepspeed" else "DeepSpeed"
        yield f"{other} instead", f"--framework {other.lower()}", question


def _parallel(question: Question, wish: Wish) -> Iterator[Try]:
    if question.gpus > 1 and wish.framework not in PARALLEL_FRAMEWORKS:
        yield "matrices, blocks or sequences split as well", "--framework torchtitan", question


def _fused_attention(question: Question, wish: Wish) -> Iterator[Try]:
    if not question.training.fused_attention and not question.model.dense_attention:
        yield "fused attention", "", question.changed(fused_attention=True)


def _loss(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.loss == "eager" and question.model.has_logits:
        yield "a chunked loss", "--loss chunked", question.changed(loss="chunked")


def _checkpointing(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.checkpointing in ("off", "selective"):
        yield "activation checkpointing", "--checkpointing auto", question.changed(checkpointing="auto")


def _micro_batch(question: Question, wish: Wish) -> Iterator[Try]:
    training = question.training
    for size in halved(training.micro_batch):
        rounds = training.accumulation * training.micro_batch // size
        what = f"micro-batch {size} instead of {training.micro_batch}, accumulated {rounds} times"
        option = f"--micro-batch {size} --accumulation {rounds}"
        yield what, option, question.changed(micro_batch=size, accumulation=rounds)


def _optimizer_8bit(question: Question, wish: Wish) -> Iterator[Try]:
    name = optimizers_with_a_byte(question.training.optimizer)
    if name and not question.training.lora_rank:
        yield "8-bit AdamW", f"--optimizer {name}", question.changed(optimizer=name)


def optimizers_with_a_byte(optimizer: str) -> str:
    """Return the 8-bit optimizer that stands in for one, empty where there is none."""
    return {"adamw": "adamw-8bit", "adam": "adamw-8bit", "paged-adamw": "paged-adamw-8bit"}.get(optimizer, "")


def _combined(question: Question, wish: Wish) -> Iterator[Try]:
    """Yield what changes the training little, together: a smaller micro-batch, chunked loss, 8-bit Adam."""
    names: list[str] = []
    options: list[str] = []
    combined = question
    for name in _COMBINED:
        tries = list(_TRIES[name](combined, wish))
        if tries:
            what, option, combined = tries[-1]
            names.append(what)
            options.append(option)
            if len(names) > 1:
                yield " and ".join(names), " ".join(options), combined


_COMBINED = ("loss", "micro-batch", "optimizer-8bit")


def _gpus(question: Question, wish: Wish) -> Iterator[Try]:
    gpus = 2 * question.gpus
    while gpus <= MOST_GPUS:
        nodes = max(question.nodes, -(-gpus // max(8, question.gpus_per_node)))
        nodes = next(n for n in range(nodes, gpus + 1) if gpus % n == 0)
        option = f"--gpus {gpus}" + (f" --nodes {nodes}" if nodes > 1 else "")
        more = f" in {nodes} nodes" if nodes > question.nodes else ""
        yield (
            f"{gpus} GPUs{more} instead of {question.gpus}",
            option,
            question.changed(gpus=gpus, nodes=nodes),
        )
        gpus *= 2


def _offload_optimizer(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.offload == "none":
        yield "optimizer on the host", "--offload optimizer", question.changed(offload="optimizer")


def _offload_all(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.offload in ("none", "optimizer"):
        yield "all model states on the host", "--offload all", question.changed(offload="all")


def _nvme(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.offload != "nvme" and question.gpus > 1:
        yield "model states on NVMe", "--offload nvme", question.changed(offload="nvme")


def _gpu_memory(question: Question, wish: Wish) -> Iterator[Try]:
    for size in LARGER_GPUS_GB:
        if size * 1e9 > question.memory_bytes:
            yield f"GPUs of {size} GB", f"--gpu-memory {size}GB", question.changed(memory_bytes=size * 1e9)


def _lora(question: Question, wish: Wish) -> Iterator[Try]:
    if not question.training.lora_rank and question.model.step is None:
        yield "LoRA of rank 16", "--lora-rank 16", question.changed(lora_rank=16)


def _qlora(question: Question, wish: Wish) -> Iterator[Try]:
    if question.training.base_bits == 16 and question.model.step is None:
        size = question.training.lora_rank or 16
        what = f"QLoRA of rank {size} on 4-bit weights"
        yield what, "--qlora", question.changed(lora_rank=size, base_bits=4)


def _sequence(question: Question, wish: Wish) -> Iterator[Try]:
    for size in halved(question.training.sequence):
        if size >= 128 and question.model.step is None:
            what = f"sequences of {size} instead of {question.training.sequence}"
            yield what, f"--seq {size}", question.changed(sequence=size)


_TRIES: dict[str, Callable[[Question, Wish], Iterator[Try]]] = {
    "framework": _framework,
    "fused-attention": _fused_attention,
    "loss": _loss,
    "checkpointing": _checkpointing,
    "micro-batch": _micro_batch,
    "optimizer-8bit": _optimizer_8bit,
    "combined": _combined,
    "parallel": _parallel,
    "offload-optimizer": _offload_optimizer,
    "offload-all": _offload_all,
    "gpus": _gpus,
    "gpu-memory": _gpu_memory,
    "lora": _lora,
    "qlora": _qlora,
    "sequence": _sequence,
    "nvme": _nvme,
}
"""For each kind of change, ever larger ones."""


def halved(value: int) -> Iterator[int]:
    """Yield half of a value, half of that, and so on down to 1."""
    while value > 1:
        value //= 2
        yield value


def turning_points(question: Question, wish: Wish, chosen: Candidate) -> Iterator[str]:
    """Yield, for each thing that may change, the nearest value with another answer."""
    for group in _turns(question, wish):
        answers = (_turn(what, changed, wish, chosen) for what, changed in group)
        if first := next((answer for answer in answers if answer), ""):
            yield first


def _turns(question: Question, wish: Wish) -> Iterator[list[tuple[str, Question]]]:
    training = question.training
    longest = question.model.context or 1 << 17
    sequences = [training.sequence * 2**n for n in range(1, 8) if training.sequence * 2**n <= longest]
    if question.model.step is None:
        yield [(f"sequences of {n}", question.changed(sequence=n)) for n in sequences]
    sizes = (training.micro_batch * 2**e for e in range(1, 8))
    yield [(f"micro-batch {n}", question.changed(micro_batch=n)) for n in sizes]
    for smaller in (True, False):
        ordered = reversed(LARGER_GPUS_GB) if smaller else iter(LARGER_GPUS_GB)
        # "80 GB" is 79 to 85e9 bytes: a size that is nearly this one is no other size.
        apart = [gb for gb in ordered if (gb * 1.07e9 < question.memory_bytes) == smaller]
        apart = [gb for gb in apart if smaller or gb * 1e9 > question.memory_bytes]
        yield [(f"GPUs of {gb} GB", question.changed(memory_bytes=gb * 1e9)) for gb in apart]
    fewer = [n for n in halved(question.gpus) if n % question.nodes == 0 and n >= question.nodes]
    yield [("1 GPU" if n == 1 else f"{n} GPUs", question.changed(gpus=n)) for n in fewer]
    yield [(what, q) for what, _, q in _gpus(question, wish) if q.gpus <= 8 * question.gpus]


def _turn(what: str, changed: Question, wish: Wish, chosen: Candidate) -> str:
    """Return what the answer becomes, or nothing where it stays."""
    other, _, _ = choose(rank(changed, wish), changed, wish)
    if other is None:
        return f"{what}: nothing fits"
    if other.strategy == "single" != chosen.strategy:
        return f"{what}: everything fits on it"
    if (other.strategy, other.checkpointing) == (chosen.strategy, chosen.checkpointing):
        return ""
    same = other.strategy == chosen.strategy and not other.checkpointing
    without = ", without activation checkpointing" if same else ""
    return (
        f"{what}: {with_checkpointing(other.title, other.checkpointing, selective=other.selective)}{without}"
    )
