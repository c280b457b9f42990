"""Recognise pipeline parallelism: sends and receives between stages, and the order of micro-batches."""

from __future__ import annotations

from tracedoc.ranks.strategies.claim import Claim, per_step
from tracedoc.ranks.strategies.model_parallel import CONTEXT_GROUP
from tracedoc.timeline.strategy_signs import StrategySigns

P2P = ("send", "recv", "send_recv")

CALLS_A_PASS = 4
"""A stage sends and receives one activation and one gradient for each micro-batch; rings send far more."""

ONLY_PASSES_DATA = "send and receive between ranks"
PASSES_DATA_HOW = "a pipeline or ring attention: the trace does not tell"
"""The name and the evidence of ranks that pass data on without a sign of what for."""


def pipeline(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return a pipeline with its schedule and micro-batches, as far as the order of passes shows them."""
    traffic = [t for t in signs.select(P2P) if not CONTEXT_GROUP.search(t.group)]
    calls = sum(t.calls for t in traffic)
    evidence = [
        per_step(sum(t.calls for t in traffic if t.op == op), word)
        for op, word in (("send", "send"), ("recv", "receive"), ("send_recv", "send and receive"))
        if any(t.op == op for t in traffic)
    ]
    if signs.seen & {"schedule", "stage_pass"}:
        evidence.append("annotations of a pipeline schedule")
        confidence = "high"
    elif not calls:
        return None
    elif signs.passes > 1 and calls <= CALLS_A_PASS * signs.passes:
        confidence = "medium"
    else:
        return Claim(ONLY_PASSES_DATA, "unknown", "unknown", "low", (*evidence, PASSES_DATA_HOW))
    parts = [part for part in (_schedule(signs), _micro_batches(signs)) if part]
    evidence += [f"{signs.passes} backward passes a step"] if signs.passes else []
    name = f"pipeline parallel ({', '.join(parts)})" if parts else "pipeline parallel"
    return Claim(name, "pipeline", "unknown", confidence, tuple(evidence))


def _schedule(signs: StrategySigns) -> str:
    if "schedule" in signs.seen:
        return "interleaved or zero-bubble schedule"
    if signs.passes < 2:
        return ""
    return "1F1B" if signs.alternations else "GPipe"


def _micro_batches(signs: StrategySigns) -> str:
    return f"{signs.passes} micro-batches" if signs.passes > 1 else ""
