"""What a rank may do in a step: the colour and the words of each state."""

from __future__ import annotations

from tracedoc.idle_causes import WORDS

STATES: dict[str, tuple[str, str]] = {
    "idle unknown": ("idle", "idle, cause unknown"),
    "idle dependency": ("idle", WORDS["dependency"].idle),
    "idle launch": ("launch", WORDS["launch"].idle),
    "idle profiler": ("delay", WORDS["profiler"].idle),
    "idle gc": ("delay", WORDS["gc"].idle),
    "idle compile": ("delay", WORDS["compile"].idle),
    "idle allocator": ("delay", WORDS["allocator"].idle),
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
