"""Rank the strategies for a question, choose one by the decision rules, and say what would change that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.activations import Memory, peak_memory
from tracedoc.planner.hardware import Cluster
from tracedoc.planner.memory import can_offload
from tracedoc.planner.setup import Question, check
from tracedoc.planner.strategies import STRATEGIES, Strategy, possible
from tracedoc.planner.traffic import Step, predict, transfers
from tracedoc.units import format_count, format_gb, format_percent

UTILISATION = 0.40
"""Share of the peak that training of transformers commonly reaches in matrices (35 to 50 % is usual)."""

FRAMEWORKS = ("pytorch", "accelerate", "trainer", "deepspeed")
OBJECTIVES = ("speed", "memory")

MOST_GPUS = 4096
LARGER_GPUS_GB = (24, 32, 40, 48, 80, 96, 141, 192, 288)


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    when: list[str]
    choose: list[str]
    because: str


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    why: str


class _Decisions(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[_Rule]
    change: list[_Change]


@lru_cache(maxsize=1)
def _decisions() -> _Decisions:
    text = files("tracedoc.planner").joinpath("data/decisions.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Decisions)


class Wish(msgspec.Struct, frozen=True):
    """What is known of the machines, and what is wanted."""

    cluster: Cluster
    objective: str = "speed"
    framework: str = "pytorch"
    utilisation: float = UTILISATION
    measured_compute_ms: float | None = None
    """What the GPU of a captured run computed in a step, without recomputation; it replaces the estimate."""


class Candidate(msgspec.Struct, frozen=True):
    """One strategy on this question. ``headroom_bytes`` is negative where it does not fit.

    ``traffic_bytes`` is what each GPU sends in a step; ``step`` is ``None`` where GPU or link are not known.
    """

    strategy: str
    title: str
    family: str
    checkpointing: bool
    memory: Memory
    total_bytes: float
    fits: bool
    headroom_bytes: float
    traffic_bytes: float
    step: Step | None


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


class Advice(msgspec.Struct, frozen=True):
    """The answer: every strategy, best first; the chosen one with its reason, or what would make one fit."""

    question: Question
    wish: Wish
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    rule: str
    because: str
    changes: tuple[Change, ...]
    turning_points: tuple[str, ...]
    least: Candidate
    """Of the framework's strategies, the one that takes least."""
    faster: Candidate | None
    """A usable strategy that with nothing hidden is predicted ahead of the chosen one's middle."""


class Situation(msgspec.Struct, frozen=True):
    """The conditions that decision rules may name."""

    one_gpu: bool
    several_nodes: bool
    adapters: bool
    least_memory_asked: bool
    ddp_fits: bool
    whole_fits: bool
    sharding_surely_faster: bool
    whole_not_slower: bool
    network_slower_than_inside: bool
    hybrid_not_slower: bool


def advise(question: Question, wish: Wish) -> Advice:
    """Return the ranked strategies and the chosen one; raise :class:`InputError` for what cannot be."""
    check(question)
    if not any(can_offload(s, question.training.offload) for s in _usable(question, wish)):
        other = "all" if wish.framework != "deepspeed" and question.gpus > 1 else "none"
        raise InputError(
            f"{wish.framework} cannot offload {question.training.offload!r} on {_gpus(question.gpus)}",
            f"use --offload {other}, or --framework deepspeed on 2 GPUs or more",
        )
    candidates = rank(question, wish)
    chosen, rule, because = choose(candidates, question, wish)
    changes = () if chosen else tuple(_changes(question, wish))
    turning = tuple(_turning_points(question, wish, chosen)) if chosen else ()
    usable = [c for c in candidates if c.family in _families(wish.framework)]
    return Advice(
        question=question,
        wish=wish,
        candidates=candidates,
        chosen=chosen,
        rule=rule,
        because=because,
        changes=changes,
        turning_points=turning,
        least=min(usable, key=lambda c: c.total_bytes),
        faster=_faster(chosen, usable, wish) if chosen else None,
    )


def rank(question: Question, wish: Wish) -> tuple[Candidate, ...]:
    """Return every strategy that means something here, those that fit first, then by the objective."""
    found = [
        _candidate(question, strategy, wish)
        for strategy in possible(question.gpus, question.nodes)
        if can_offload(strategy, question.training.offload)
    ]
    order = list(STRATEGIES)

    def key(candidate: Candidate) -> tuple[bool, float, int]:
        if not candidate.fits or wish.objective == "memory" or candidate.step is None:
            first = candidate.total_bytes if not candidate.fits or wish.objective == "memory" else 0.0
            return not candidate.fits, first, order.index(candidate.strategy)
        return False, candidate.step.middle_ms, order.index(candidate.strategy)

    return tuple(sorted(found, key=key))


def choose(
    candidates: tuple[Candidate, ...], question: Question, wish: Wish
) -> tuple[Candidate | None, str, str]:
    """Return the candidate that the decision rules choose, the rule's id, and its reason in numbers."""
    usable = {c.strategy: c for c in candidates if c.family in _families(wish.framework)}
    fitting = {name: c for name, c in usable.items() if c.fits}
    if not fitting:
        return None, "", ""
    situation = _situation(usable, question, wish)
    for rule in _decisions().rule:
        if not all(_holds(situation, condition) for condition in rule.when):
            continue
        least = min(fitting.values(), key=lambda c: c.total_bytes)
        names = [least.strategy if name == "least" else name for name in rule.choose]
        chosen = next((fitting[name] for name in names if name in fitting), None)
        if chosen is not None:
            return chosen, rule.id, rule.because.format(**_numbers(chosen, usable, question))
    return None, "", ""


def _candidate(question: Question, strategy: Strategy, wish: Wish) -> Candidate:
    wanted = question.training.checkpointing
    if wanted == "auto" and wish.objective == "memory":
        wanted = "on"
    for checkpointing in {"on": (True,), "off": (False,)}.get(wanted, (False, True)):
        memory = peak_memory(question, strategy, checkpointing=checkpointing)
        if memory.total <= question.memory_bytes:
            break
    return Candidate(
        strategy=strategy.id,
        title=strategy.title,
        family=strategy.family,
        checkpointing=checkpointing,
        memory=memory,
        total_bytes=memory.total,
        fits=memory.total <= question.memory_bytes,
        headroom_bytes=question.memory_bytes - memory.total,
        traffic_bytes=sum(t.sent for t in transfers(question, strategy)),
        step=predict(
            question,
            strategy,
            wish.cluster,
            checkpointing=checkpointing,
            utilisation=wish.utilisation,
            measured_compute_ms=wish.measured_compute_ms,
        ),
    )


def _faster(chosen: Candidate, usable: list[Candidate], wish: Wish) -> Candidate | None:
    timed = [(c.step.worst_ms, c) for c in usable if c.fits and c.step is not None]
    if chosen.step is None or wish.objective == "memory" or not timed:
        return None
    worst, fastest = min(timed, key=lambda pair: pair[0])
    return fastest if worst < chosen.step.middle_ms else None


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _families(framework: str) -> tuple[str, ...]:
    # A project on DeepSpeed stays there; stage 0 is DDP.
    return ("ddp", "deepspeed") if framework == "deepspeed" else ("ddp", "fsdp")


def _usable(question: Question, wish: Wish) -> list[Strategy]:
    return [s for s in possible(question.gpus, question.nodes) if s.family in _families(wish.framework)]


def _holds(situation: Situation, condition: str) -> bool:
    value: bool = getattr(situation, condition.removeprefix("not "))
    return value != condition.startswith("not ")


def _situation(usable: dict[str, Candidate], question: Question, wish: Wish) -> Situation:
    ddp = usable.get("ddp")
    sharded = [c for name, c in usable.items() if c.fits and name not in ("ddp", "single")]
    whole = usable.get("shard-grad-op") or usable.get("zero-2")
    unit = usable.get("full-shard") or usable.get("zero-3")
    hybrid = usable.get("hsdp")
    inside, across = wish.cluster.inside, wish.cluster.across
    return Situation(
        one_gpu=question.gpus == 1,
        several_nodes=question.nodes > 1,
        adapters=bool(question.training.lora_rank),
        least_memory_asked=wish.objective == "memory",
        ddp_fits=ddp is not None and ddp.fits,
        whole_fits=whole is not None and whole.fits,
        # Faster with all its communication exposed than DDP with none: recomputation is what DDP pays then.
        sharding_surely_faster=ddp is not None
        and ddp.checkpointing
        and any(c.step and ddp.step and c.step.worst_ms < ddp.step.best_ms for c in sharded),
        whole_not_slower=_not_slower(whole, unit),
        network_slower_than_inside=across is None
        or inside is None
        or across.gbps * across.efficiency < inside.gbps * inside.efficiency,
        hybrid_not_slower=_not_slower(hybrid, whole) and _not_slower(hybrid, unit),
    )


def _not_slower(one: Candidate | None, other: Candidate | None) -> bool:
    if one is None or not one.fits:
        return False
    if other is None or not other.fits:
        return True
    if one.step is None or other.step is None:
        return one.checkpointing <= other.checkpointing
    # Within a tenth a prediction tells nothing, and the rule stands.
    return one.step.middle_ms <= 1.1 * other.step.middle_ms


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
        "ddp_total": format_gb(ddp.total_bytes),
        "whole_total": format_gb(whole.total_bytes),
    }


def _changes(question: Question, wish: Wish) -> Iterator[Change]:
    other = "pytorch" if wish.framework == "deepspeed" else "deepspeed"
    own = (wish, replace(wish, framework=other))
    for change in _decisions().change:
        for what, option, changed in _steps(change.id, question, wish):
            answers = (choose(rank(changed, w), changed, w)[0] for w in own)
            chosen = next((answer for answer in answers if answer is not None), None)
            if chosen is not None:
                yield Change(
                    id=change.id,
                    what=what,
                    why=change.why,
                    option=option,
                    strategy=chosen.title,
                    checkpointing=chosen.checkpointing,
                    total_bytes=chosen.total_bytes,
                    memory_bytes=changed.memory_bytes,
                    host_bytes_per_node=chosen.memory.states.host * changed.gpus_per_node,
                )
                break


def _steps(change: str, question: Question, wish: Wish) -> Iterator[tuple[str, str, Question]]:
    """Yield ever larger changes of one kind, with the options that ask for them."""
    training = question.training
    full = not training.lora_rank
    if change == "framework" and question.gpus > 1:
        other = "PyTorch" if wish.framework == "deepspeed" else "DeepSpeed"
        yield f"{other} instead", f"--framework {other.lower()}", question
    elif change == "fused-attention" and not training.fused_attention:
        yield "fused attention", "", question.changed(fused_attention=True)
    elif change == "checkpointing" and training.checkpointing == "off":
        yield "activation checkpointing", "--checkpointing auto", question.changed(checkpointing="auto")
    elif change == "micro-batch":
        for size in _halved(training.micro_batch):
            what = f"micro-batch {size} instead of {training.micro_batch}"
            yield what, f"--micro-batch {size}", question.changed(micro_batch=size)
    elif change == "optimizer-8bit" and full and training.optimizer in ("adamw", "adam"):
        yield "8-bit AdamW", "--optimizer adamw-8bit", question.changed(optimizer="adamw-8bit")
    elif change == "gpus":
        gpus = 2 * question.gpus
        while gpus <= MOST_GPUS:
            nodes = max(question.nodes, -(-gpus // max(8, question.gpus_per_node)))
            nodes = next(n for n in range(nodes, gpus + 1) if gpus % n == 0)
            option = f"--gpus {gpus}" + (f" --nodes {nodes}" if nodes > 1 else "")
            more = f" in {nodes} nodes" if nodes > question.nodes else ""
            what = f"{gpus} GPUs{more} instead of {question.gpus}"
            yield what, option, question.changed(gpus=gpus, nodes=nodes)
            gpus *= 2
    elif change == "offload-optimizer" and training.offload == "none" and question.gpus > 1:
        yield "optimizer on the host", "--offload optimizer", question.changed(offload="optimizer")
    elif change == "offload-all" and training.offload in ("none", "optimizer") and question.gpus > 1:
        yield "all model states on the host", "--offload all", question.changed(offload="all")
    elif change == "gpu-memory":
        for size in LARGER_GPUS_GB:
            if size * 1e9 > question.memory_bytes:
                yield (
                    f"GPUs of {size} GB",
                    f"--gpu-memory {size}GB",
                    question.changed(memory_bytes=size * 1e9),
                )
    elif change == "lora" and full:
        yield "LoRA of rank 16", "--lora-rank 16", question.changed(lora_rank=16)
    elif change == "qlora" and training.base_bits == 16:
        size = training.lora_rank or 16
        what = f"QLoRA of rank {size} on 4-bit weights"
        yield what, "--qlora", question.changed(lora_rank=size, base_bits=4)
    elif change == "sequence":
        for size in _halved(training.sequence):
            if size >= 128:
                what = f"sequences of {size} instead of {training.sequence}"
                yield what, f"--seq {size}", question.changed(sequence=size)
    elif change == "nvme" and training.offload != "nvme" and question.gpus > 1:
        yield "model states on NVMe", "--offload nvme", question.changed(offload="nvme")


def _halved(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _turning_points(question: Question, wish: Wish, chosen: Candidate) -> Iterator[str]:
    """Yield, for each thing that may change, the nearest value with another answer."""
    training = question.training
    longest = question.model.context or 1 << 17
    sequences = [training.sequence * 2**n for n in range(1, 8) if training.sequence * 2**n <= longest]
    smaller = [gb for gb in reversed(LARGER_GPUS_GB) if gb * 1e9 < question.memory_bytes]
    larger = [gb for gb in LARGER_GPUS_GB if gb * 1e9 > question.memory_bytes]
    fewer = [n for n in _halved(question.gpus) if n % question.nodes == 0 and n >= question.nodes]
    tries: tuple[list[tuple[str, Question]], ...] = (
        [(f"sequences of {n}", question.changed(sequence=n)) for n in sequences],
        [
            (f"micro-batch {n}", question.changed(micro_batch=n))
            for n in (training.micro_batch * 2**e for e in range(1, 8))
        ],
        [(f"GPUs of {gb} GB", question.changed(memory_bytes=gb * 1e9)) for gb in smaller],
        [(f"GPUs of {gb} GB", question.changed(memory_bytes=gb * 1e9)) for gb in larger],
        [(_gpus(n), question.changed(gpus=n)) for n in fewer],
        [(w, q) for w, _, q in _steps("gpus", question, wish) if q.gpus <= 8 * question.gpus],
    )
    for group in tries:
        for what, changed in group:
            other, _, _ = choose(rank(changed, wish), changed, wish)
            if other is None:
                yield f"{what}: nothing fits"
                break
            if other.strategy == "single" != chosen.strategy:
                yield f"{what}: everything fits on it"
                break
            if (other.strategy, other.checkpointing) != (chosen.strategy, chosen.checkpointing):
                same = other.strategy == chosen.strategy and not other.checkpointing
                without = ", without activation checkpointing" if same else ""
                yield f"{what}: {with_checkpointing(other.title, other.checkpointing)}{without}"
                break


def with_checkpointing(title: str, checkpointing: bool) -> str:
    """Return a strategy in words, and whether activations are checkpointed."""
    return f"{title} with activation checkpointing" if checkpointing else title
