"""Choose a strategy by the decision rules, and give its reason in numbers."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import msgspec

from tracedoc.planner.candidates import Candidate, Wish, families, step_range
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS, Layout
from tracedoc.planner.setup import Question
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


class Situation(msgspec.Struct, frozen=True):
    """The conditions that decision rules may name."""

    one_gpu: bool
    several_nodes: bool
    adapters: bool
    least_memory_asked: bool
    ddp_fits: bool
    whole_fits: bool
    offloaded: bool
    network_slower_than_inside: bool
    layouts: bool


def choose(
    candidates: tuple[Candidate, ...], question: Question, wish: Wish
) -> tuple[Candidate | None, str, str]:
    """Return the candidate that the decision rules choose, the rule's id, and its reason in numbers."""
    usable = {c.strategy: c for c in candidates if c.family in families(wish.framework)}
    # What surely fits goes first, then what fits as predicted. What fits only if it takes less is not chosen.
    doubt = min((c.doubt for c in usable.values()), default=3)
    fitting = {name: c for name, c in usable.items() if c.doubt == doubt}
    if doubt > 1:
        return None, "", ""
    situation = _situation(usable, fitting, question, wish)
    for rule in decisions().rule:
        if not all(_holds(situation, condition) for condition in rule.when):
            continue
        named = {"least": min(fitting, key=lambda n: fitting[n].total_bytes), "fastest": next(iter(fitting))}
        names = [named.get(name, name) for name in rule.choose]
        chosen = next((fitting[name] for name in names if name in fitting), None)
        if chosen is not None and (rule.whatever_time or _is_fast_enough(chosen, fitting)):
            return chosen, rule.id, rule.because.format(**_numbers(chosen, usable, question))
    return None, "", ""


def _is_fast_enough(chosen: Candidate, fitting: dict[str, Candidate]) -> bool:
    """Return whether nothing that fits is clearly faster: by a tenth, and than the best of its range.

    Where no time is predicted, sharding that recomputes its activations is slower than sharding that does
    not.
    """
    if chosen.step is None:
        alike = not chosen.checkpointing or all(one.checkpointing for one in fitting.values())
        return alike or chosen.family == "ddp"
    fastest = min(one.step.expected_ms for one in fitting.values() if one.step is not None)
    return chosen.step.expected_ms <= 1.1 * fastest or chosen.step.best_ms <= fastest


def _holds(situation: Situation, condition: str) -> bool:
    value: bool = getattr(situation, condition.removeprefix("not "))
    return value != condition.startswith("not ")


def _situation(
    usable: dict[str, Candidate], fitting: dict[str, Candidate], question: Question, wish: Wish
) -> Situation:
    ddp = usable.get("ddp")
    inside, across = wish.cluster.inside, wish.cluster.across
    return Situation(
        one_gpu=question.gpus == 1,
        several_nodes=question.nodes > 1,
        adapters=bool(question.training.lora_rank) or question.frozen > 9 * question.trainable,
        least_memory_asked=wish.objective == "memory",
        ddp_fits=ddp is not None and ddp.doubt == 0,
        whole_fits="shard-grad-op" in fitting or "zero-2" in fitting,
        offloaded=question.training.offload != "none",
        network_slower_than_inside=across is None
        or inside is None
        or across.gbps * across.efficiency < inside.gbps * inside.efficiency,
        layouts=wish.framework in PARALLEL_FRAMEWORKS,
    )


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
