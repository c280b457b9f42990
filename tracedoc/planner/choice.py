"""Choose a strategy by the decision rules, with its reason, and say what would change the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec.structs import replace

from tracedoc.planner.candidates import Candidate, asked_for, families, rank, step_range, with_checkpointing
from tracedoc.planner.layouts import Layout
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question
from tracedoc.units import format_count, format_gb, format_percent


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    when: list[str]
    choose: list[str]
    because: str
    whatever_time: bool = False


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    why: str


class _Decisions(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[_Rule]
    change: list[_Change]


@lru_cache(maxsize=1)
def decisions() -> _Decisions:
    """Return the rules and changes of the table."""
    text = files("tracedoc.planner").joinpath("data/decisions.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Decisions)


def choose(
    candidates: tuple[Candidate, ...], question: Question, request: PlanRequest
) -> tuple[Candidate | None, str, str]:
    """Return the candidate that the decision rules choose, the rule's id, and its reason in numbers."""
    usable = {c.strategy: c for c in candidates if c.family in families(request.framework)}
    # What surely fits goes first, then what fits as predicted. What fits only if it takes less is not chosen.
    doubt = min((c.doubt for c in usable.values()), default=3)
    fitting = {name: c for name, c in usable.items() if c.doubt == doubt}
    if doubt > 1:
        return None, "", ""
    asked = asked_for(usable.values(), question, request)
    if asked is not None and asked.doubt <= 1:
        name, text = _ASKED[bool(request.strategy)]
        return asked, name, text.format(**_numbers(asked, usable, question)).strip()
    known = situation(usable, fitting, question, request)
    for rule in decisions().rule:
        if not all(_holds(known, condition) for condition in rule.when):
            continue
        # What surely fits is ranked by what was asked for: the first is the fastest, or takes least.
        names = [next(iter(fitting)) if name in ("least", "fastest") else name for name in rule.choose]
        chosen = next((fitting[name] for name in names if name in fitting), None)
        if chosen is None or any(one.dominates(chosen) for one in fitting.values()):
            continue
        if rule.whatever_time or _is_fast_enough(chosen, fitting):
            because = rule.because.format(**_numbers(chosen, usable, question))
            return chosen, rule.id, because + _than_ddp(chosen, fitting.get("ddp"))
    return None, "", ""


def _than_ddp(chosen: Candidate, ddp: Candidate | None) -> str:
    """A sentence on DDP where it fits and is passed over for its time, else empty."""
    if ddp is None or ddp is chosen or ddp.step is None or chosen.step is None:
        return ""
    more = ddp.step.expected_ms / chosen.step.expected_ms - 1
    slower = f" DDP fits, too ({format_gb(ddp.total_bytes)}), and is predicted {format_percent(more)} slower."
    return slower if more > 0 else ""


def chosen_for(question: Question, request: PlanRequest) -> Candidate | None:
    """What the decision rules choose for a question, ``None`` where nothing is predicted to fit."""
    return choose(rank(question, request), question, request)[0]


_ASKED = (
    ("asked", "--layout asks for it: {total} of {memory} on each GPU, {schedule}. {bubble}"),
    (
        "searched",
        "Of the micro-batches, strategies and checkpointing that fit, those predicted as fast as the fastest"
        " to three percent leave this as the simplest ({total} of {memory}).",
    ),
)


def _is_fast_enough(chosen: Candidate, fitting: dict[str, Candidate]) -> bool:
    """Whether nothing that fits is clearly faster: by a tenth, and than the best of its range.

    Where no time is predicted, sharding that recomputes its activations is slower than sharding that does
    not.
    """
    if chosen.step is None:
        alike = not chosen.checkpointing or all(one.checkpointing for one in fitting.values())
        return alike or chosen.family == "ddp"
    fastest = min(one.step.expected_ms for one in fitting.values() if one.step is not None)
    return chosen.step.expected_ms <= 1.1 * fastest or chosen.step.best_ms <= fastest


def _holds(known: dict[str, bool], condition: str) -> bool:
    return known[condition.removeprefix("not ")] != condition.startswith("not ")


def situation(
    usable: dict[str, Candidate], fitting: dict[str, Candidate], question: Question, request: PlanRequest
) -> dict[str, bool]:
    """The conditions that decision rules may name."""
    ddp = usable.get("ddp")
    inside, across = request.cluster.inside, request.cluster.across
    return {
        "one_gpu": question.gpus == 1,
        "several_nodes": question.nodes > 1,
        "adapters": bool(question.training.lora_rank) or question.frozen > 9 * question.trainable,
        "least_memory_asked": request.objective == "memory",
        "ddp_fits": ddp is not None and ddp.doubt == 0,
        "whole_fits": "shard-grad-op" in fitting or "zero-2" in fitting,
        "offloaded": question.training.offload != "none",
        "network_slower_than_inside": across is None
        or inside is None
        or across.gbps * across.efficiency < inside.gbps * inside.efficiency,
        "layouts": request.framework in PARALLEL_FRAMEWORKS,
    }


def _numbers(chosen: Candidate, usable: dict[str, Candidate], question: Question) -> dict[str, str]:
    whole = usable.get("shard-grad-op") or usable.get("zero-2") or chosen
    unit = usable.get("full-shard") or usable.get("zero-3") or chosen
    ddp = usable.get("ddp") or chosen
    return {
        "unit_traffic": format_gb(unit.traffic_bytes),
        "strategy": chosen.title,
        "total": format_gb(chosen.total_bytes),
        "memory": format_gb(question.memory_bytes),
        "parameters": format_count(question.model.parameters),
        "trainable": format_count(question.trainable),
        "trainable_share": format_percent(question.trainable / question.model.parameters),
        "optimizer": format_gb(chosen.memory.states.optimizer),
        "traffic": format_gb(chosen.traffic_bytes),
        "step": step_range(chosen),
        "host": format_gb(chosen.memory.states.host * question.gpus_per_node),
        "ddp_total": format_gb(ddp.total_bytes),
        "whole_total": format_gb(whole.total_bytes),
        "schedule": chosen.layout.schedule,
        "bubble": _bubble(chosen.layout),
    }


def _bubble(layout: Layout) -> str:
    if layout.pipeline == 1:
        return ""
    return f"Stages wait {format_percent(layout.bubble)} of the step for its first and last micro-batches. "


MOST_GPUS_TRIED = 4096
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
    tight: bool = False
    """Whether it only may fit."""


def changes(question: Question, request: PlanRequest, *, tight: bool = False) -> list[Change]:
    """Return, for each kind of change, the smallest after which something fits with its reserve.

    Twice the GPUs come before what is moved to the host, more of them after it. With ``tight`` another
    framework is named as well that may fit. Where no change alone helps, each with a chunked loss.
    """
    found = list(_found(question, request, tight=tight))
    (possible, (loss, with_loss, chunked)) = _single(question, request)["loss"]
    if not found and possible:
        found = [
            replace(one, what=f"{loss} and {one.what}", option=f"{with_loss} {one.option}")
            for one in _found(chunked, request, tight=tight)
        ]
    moved = [one for one in found if one.id.startswith("offload")]
    many = next((one for one in found if one.id == "gpus" and one.gpus > 2 * question.gpus), None)
    if many is not None and moved:
        found.remove(many)
        found.insert(found.index(moved[-1]) + 1, many)
    return found


def _found(question: Question, request: PlanRequest, *, tight: bool) -> Iterator[Change]:
    other = "pytorch" if request.framework == "deepspeed" else "deepspeed"
    own = (request, replace(request, framework=other))
    alone = False
    for change in decisions().change:
        if change.id == "combined" and alone:
            continue
        requests = (replace(request, framework="torchtitan"),) if change.id == "parallel" else own
        for what, option, changed in _tries(change.id, question, request):
            if fitting := _first_fitting(changed, requests, tight=tight and change.id == "framework"):
                alone = alone or change.id in _COMBINED
                yield _change(change.id, what, change.why, option, changed, fitting)
                break


def _first_fitting(question: Question, requests: tuple[PlanRequest, ...], *, tight: bool) -> Candidate | None:
    answers = (chosen_for(question, request) for request in requests)
    return next((answer for answer in answers if answer is not None and answer.doubt <= tight), None)


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
        tight=chosen.tight,
    )


def _tries(id_: str, question: Question, request: PlanRequest) -> Iterator[Try]:
    """Ever larger changes of one kind, as many as there are."""
    if id_ in _LARGER:
        yield from _LARGER[id_](question, request)
        return
    possible, found = _single(question, request)[id_]
    if possible:
        yield found


def _single(question: Question, request: PlanRequest) -> dict[str, tuple[bool, Try]]:
    """The kinds of change that have one step only: whether it is one here, and what it is."""
    training, model, several = question.training, question.model, question.gpus > 1
    other = "PyTorch" if request.framework == "deepspeed" else "DeepSpeed"
    layouts = request.framework in PARALLEL_FRAMEWORKS
    byte = {"adamw": "adamw-8bit", "adam": "adamw-8bit", "paged-adamw": "paged-adamw-8bit"}.get(
        training.optimizer, ""
    )
    lora, adaptable, rank = training.lora_rank, model.step is None, training.lora_rank or 16
    eager = training.loss == "eager" and model.has_logits
    scores = not training.fused_attention and not model.dense_attention
    kept = training.checkpointing in ("off", "selective")
    on_gpu = training.offload == "none"

    def one(possible: object, what: str, option: str, **changed: object) -> tuple[bool, Try]:
        return bool(possible), (what, option, question.changed(**changed))

    return {
        "framework": one(several, f"{other} instead", f"--framework {other.lower()}"),
        "parallel": one(
            several and not layouts,
            "matrices, blocks or sequences split as well",
            "--framework torchtitan",
        ),
        "fused-attention": one(scores, "fused attention", "", fused_attention=True),
        "loss": one(eager, "a chunked loss", "--loss chunked", loss="chunked"),
        "checkpointing": one(kept, "activation checkpointing", "--checkpointing auto", checkpointing="auto"),
        "optimizer-8bit": one(byte and not lora, "8-bit AdamW", f"--optimizer {byte}", optimizer=byte),
        "offload-optimizer": one(on_gpu, "optimizer on the host", "--offload optimizer", offload="optimizer"),
        "offload-all": one(
            on_gpu or training.offload == "optimizer",
            "all model states on the host",
            "--offload all",
            offload="all",
        ),
        "nvme": one(
            training.offload != "nvme" and several,
            "model states on NVMe",
            "--offload nvme",
            offload="nvme",
        ),
        "lora": one(adaptable and not lora, "LoRA of rank 16", "--lora-rank 16", lora_rank=16),
        "qlora": one(
            adaptable and training.base_bits == 16,
            f"QLoRA of rank {rank} on 4-bit weights",
            "--qlora",
            lora_rank=rank,
            base_bits=4,
        ),
    }


def _micro_batch(question: Question, request: PlanRequest) -> Iterator[Try]:
    training = question.training
    for size in halved(training.micro_batch):
        rounds = training.accumulation * training.micro_batch // size
        what = f"micro-batch {size} instead of {training.micro_batch}, accumulated {rounds} times"
        option = f"--micro-batch {size} --accumulation {rounds}"
        yield what, option, question.changed(micro_batch=size, accumulation=rounds)


def _combined(question: Question, request: PlanRequest) -> Iterator[Try]:
    """Changes that alter the training little, together: a smaller micro-batch, chunked loss, 8-bit Adam."""
    names: list[str] = []
    options: list[str] = []
    combined = question
    for name in _COMBINED:
        tries = list(_tries(name, combined, request))
        if tries:
            what, option, combined = tries[-1]
            names.append(what)
            options.append(option)
            if len(names) > 1:
                yield " and ".join(names), " ".join(options), combined


_COMBINED = ("loss", "micro-batch", "optimizer-8bit")


def _gpus(question: Question, request: PlanRequest) -> Iterator[Try]:
    gpus = 2 * question.gpus
    while gpus <= MOST_GPUS_TRIED:
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


def _gpu_memory(question: Question, request: PlanRequest) -> Iterator[Try]:
    for size in LARGER_GPUS_GB:
        if size * 1e9 > question.memory_bytes:
            yield f"GPUs of {size} GB", f"--gpu-memory {size}GB", question.changed(memory_bytes=size * 1e9)


def _sequence(question: Question, request: PlanRequest) -> Iterator[Try]:
    for size in halved(question.training.sequence):
        if size >= 128 and question.model.step is None:
            what = f"sequences of {size} instead of {question.training.sequence}"
            yield what, f"--seq {size}", question.changed(sequence=size)


_LARGER: dict[str, Callable[[Question, PlanRequest], Iterator[Try]]] = {
    "micro-batch": _micro_batch,
    "combined": _combined,
    "gpus": _gpus,
    "gpu-memory": _gpu_memory,
    "sequence": _sequence,
}
"""The kinds of change that have several steps."""


def halved(value: int) -> Iterator[int]:
    """Yield half of a value, half of that, and so on down to 1."""
    while value > 1:
        value //= 2
        yield value


def turning_points(question: Question, request: PlanRequest, chosen: Candidate) -> Iterator[str]:
    """Yield, for each thing that may change, the nearest value with another answer."""
    for group in _turns(question, request):
        answers = (_turn(what, changed, request, chosen) for what, changed in group)
        if first := next((answer for answer in answers if answer), ""):
            yield first


def _turns(question: Question, request: PlanRequest) -> Iterator[list[tuple[str, Question]]]:
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
    yield [(what, q) for what, _, q in _gpus(question, request) if q.gpus <= 8 * question.gpus]


def _turn(what: str, changed: Question, request: PlanRequest, chosen: Candidate) -> str:
    """The other answer in words, empty where it stays."""
    other = chosen_for(changed, request)
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
