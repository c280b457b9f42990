"""What reports call the states of a rank and the resources of a step, and their colours."""

from __future__ import annotations

from tracedoc.idle_causes import WORDS
from tracedoc.predicted import SAME_SAMPLES, PathPiece, Predicted
from tracedoc.units import format_ms, format_percent, format_step_change

STATES: dict[str, tuple[str, str]] = {
    "idle unknown": ("unclear", "idle, cause unknown"),
    "idle dependency": ("idle", WORDS["dependency"].idle),
    "idle launch": ("launch", WORDS["launch"].idle),
    "idle profiler": ("delay", WORDS["profiler"].idle),
    "idle gc": ("gc", WORDS["gc"].idle),
    "idle compile": ("compile", WORDS["compile"].idle),
    "idle loading": ("loading", WORDS["loading"].idle),
    "idle operator": ("operator", WORDS["operator"].idle),
    "idle allocator": ("allocator", WORDS["allocator"].idle),
    "idle sync": ("sync", WORDS["sync"].idle),
    "idle input": ("input", WORDS["input"].idle),
    "copy": ("copy", "exposed copies"),
    "unsplit": ("unsplit", "communication (transfer or waiting)"),
    "wait": ("wait", "waiting for peers"),
    "pipeline": ("pipeline", "waiting in the pipeline"),
    "transfer": ("transfer", "exposed transfer"),
    "compute": ("compute", "compute"),
    "forward": ("forward", "forward"),
    "recompute": ("recompute", "recomputation"),
    "backward": ("backward", "backward"),
    "optimizer": ("optimizer", "optimizer"),
}
"""Colour and words of what a rank may do, in the order of painting: what comes later covers the rest."""


RESOURCES = {
    "compute": "compute",
    "communication": "communication",
    "copy": "copies",
    "host": "host",
    "input": "input",
    "sync": "waiting for the GPU",
    "allocator": "memory allocation",
    "unexplained": "unexplained delays",
}
"""Resources of the critical path as reports name them."""


def resource_name(resource: str) -> str:
    """Return a resource as reports name it."""
    return RESOURCES.get(resource, resource)


def predicted_words(predicted: Predicted) -> str:
    """The step with a fix, ``54.9 -> about 31 ms (29 to 35)``, and what limits it then."""
    limit = f"limited by {resource_name(predicted.then_limited_by)}" if predicted.then_limited_by else ""
    if predicted.gain_ms[1] <= 0:
        return f"saves nothing alone{limit and f': the step is {limit}'}"
    change = format_step_change(predicted.before_ms, predicted.step_ms)
    same = SAME_SAMPLES if predicted.change.startswith("double-batch") else ""
    return f"{change}{same}{limit and f', then {limit}'}"


def shares_of(path: dict[str, float]) -> str:
    """Return the shares of a critical path: ``compute 62 %, communication 30 %, host 8 %``."""
    shown = [(name, share) for name, share in path.items() if share >= 0.005]
    return ", ".join(f"{resource_name(name)} {format_percent(share)}" for name, share in shown)


def piece_words(piece: PathPiece, *, ranks: bool) -> str:
    """Return one kind of work on the path: ``18.3 ms  compute, rank 2: the backward pass``."""
    where = f", rank {piece.rank}" if ranks else ""
    what = f": {piece.what}" if piece.what else ""
    return f"{format_ms(piece.ms):>8}  {resource_name(piece.resource)}{where}{what}"
