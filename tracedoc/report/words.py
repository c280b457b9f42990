"""What reports call the states of a rank and the resources of a step, and their colours."""

from __future__ import annotations

from tracedoc.diagnosis import Finding, Gain
from tracedoc.idle_causes import WORDS
from tracedoc.ledger import Range, is_hidden, saved_words
from tracedoc.predicted import LEAST_SHARE, SAME_SAMPLES, PathPiece, Predicted, enlarges_batch
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


def states_of(device: str | None) -> dict[str, tuple[str, str]]:
    """:data:`STATES` in the words of a device: a CPU is idle for other reasons than a GPU."""
    if device != "CPU":
        return STATES
    on_cpu = {f"idle {cause}": words.on_cpu for cause, words in WORDS.items() if words.on_cpu}
    return {name: (key, on_cpu.get(name, words)) for name, (key, words) in STATES.items()}


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


def predicted_words(predicted: Predicted, after_plan_ms: Range | None = None) -> str:
    """The step with a fix, ``54.9 -> about 31 ms (29 to 35)``, and what most of it is then.

    Of one that helps only after fixes of the plan, the step ``after_plan_ms`` with them and it.
    """
    most = f"mostly {resource_name(predicted.then_limited_by)}" if predicted.then_limited_by else ""
    if predicted.helps:
        return f"{_change_words(predicted)}{most and f', then {most}'}"
    if after_plan_ms is not None:
        return (
            f"{format_step_change(predicted.before_ms, after_plan_ms)} with the plan; alone it saves nothing"
        )
    pace = "the host" if predicted.then_limited_by == "host" else most.removeprefix("mostly ")
    return f"saves nothing alone{pace and f': {pace} sets the pace'}"


def _change_words(predicted: Predicted) -> str:
    """Today's step and that with a fix; of a larger batch it is that of as many samples as today."""
    same = SAME_SAMPLES if enlarges_batch(predicted.change) else ""
    return f"{format_step_change(predicted.before_ms, predicted.step_ms)}{same}"


ABOUT = 0.03
"""The ends of a gain that differ by no more than this share are told as one, and a smaller share of the step
is told as what is saved: as a step it would read like today's."""


WITHOUT = " without it"
"""What ends a change of the step that is no fix, but the absence of what was found."""


SAVES_MORE = 1.25
"""A fix that saves so many times what its finding costs takes time of other causes too."""

FINDINGS_NOTE = "each cost counts after the findings before it; each step is with that fix alone"


def cost_text(
    finding: Finding,
    step_ms: float | None,
    fix: Predicted | None = None,
    *,
    overlaps: str = "",
    number: int = 1,
) -> str:
    """What a finding costs the step, in words; "" where the ledger has none of its causes.

    That is what mending it saves after the findings before it, of which it is the one with this ``number``.
    Where it saves nothing then, those cost the same time; of what they hide today it is told what mending it
    alone saves, but for a ``fix`` that helps. ``overlaps`` is the finding with the cause that hides it or
    costs the same time.
    """
    overlaps = overlaps or finding.overlaps
    if finding.told_ms is None or not step_ms:
        return f"counts with {overlaps}" if overlaps else ""
    before = {1: "others", 2: "finding 1"}.get(number, f"findings 1-{number - 1}")
    told_ms, alone_ms = finding.told_ms, finding.alone_ms or 0.0
    same = number > 1 and told_ms < LEAST_SHARE * step_ms < alone_ms
    told_ms = alone_ms if same else told_ms
    told, alone = saved_words(told_ms), saved_words(alone_ms)
    costs = f"costs {told} of the {format_ms(step_ms)} step ({format_percent(told_ms / step_ms)})"
    if same:
        costs += f", the same time as {overlaps or before}"
    elif finding.is_pair and overlaps:
        costs += f" together with {overlaps}: each hides the other, and mending this one alone saves {alone}"
    elif finding.alone_ms is not None and is_hidden(finding.told_ms, finding.alone_ms):
        mended, hides = ("is mended", "hides") if number == 2 else ("are mended", "hide")
        helps = fix is not None and fix.helps
        costs += f" once {before} {mended}{'' if helps else f', which {hides} it today'}"
        if finding.alone_ms > 0 and not helps:
            costs += f"; alone it saves {alone}"
    elif finding.together_ms is not None and overlaps:
        costs += f", {format_ms(finding.together_ms)} together with {overlaps}, which it hides"
    if fix is not None and fix.helps and fix.gain_ms[1] > SAVES_MORE * told_ms:
        costs += "; its fix also saves time of other causes"
    return costs


def is_told_by_cost(finding: Finding) -> bool:
    """True where the costs that stand before it say as much as a gain that is no fix's."""
    gain, told_ms = finding.gain, finding.told_ms
    if gain is None or told_ms is None:
        return False
    return gain.basis == "ledger" or (gain.likely_ms is None and gain.high_ms >= told_ms)


def played_text(fix: Predicted | None) -> str:
    """The step with a fix that was played, in words; "" where none was, or it saves nothing."""
    return _change_words(fix) if fix and fix.helps else ""


def gain_text(gain: Gain | None, step_ms: float | None = None) -> str:
    """What a finding saves, in words; "" for nothing.

    A gain that was played reads as a change of the step of ``step_ms``, others as ``saves up to 31 ms a
    step``, of the mean step where that is another one. What the causes cost is not told again where it
    is small, or may be nothing.
    """
    if gain is None or gain.high_ms <= 0:
        return ""
    of_ms = gain.mean_step_ms or step_ms
    if gain.likely_ms is not None and of_ms:
        if gain.likely_ms < LEAST_SHARE * of_ms:
            return "saves nothing alone"
        if gain.likely_ms < ABOUT * of_ms or (gain.basis == "ledger" and gain.low_ms < LEAST_SHARE * of_ms):
            return "" if gain.basis == "ledger" else f"saves about {format_ms(gain.likely_ms)} a step"
        after_ms = tuple(max(of_ms - ms, 0.0) for ms in (gain.high_ms, gain.likely_ms, gain.low_ms))
        change = format_step_change(of_ms, (after_ms[0], after_ms[1], after_ms[2]))
        return change if gain.basis == "replay" else f"{change}{WITHOUT}"
    high = format_ms(gain.high_ms)
    of = "a step" if gain.mean_step_ms is None else f"of the mean step of {format_ms(gain.mean_step_ms)}"
    if gain.low_ms <= 0:
        return f"saves up to {high} {of}"
    low = format_ms(gain.low_ms)
    if gain.high_ms - gain.low_ms <= ABOUT * gain.high_ms:
        return f"saves about {high} {of}"
    return f"saves {low.removesuffix(high[high.index(' ') :])} to {high} {of}"


def shares_of(path: dict[str, float]) -> str:
    """Return the shares of a critical path: ``compute 62 %, communication 30 %, host 8 %``."""
    shown = [(name, share) for name, share in path.items() if share >= 0.005]
    return ", ".join(f"{resource_name(name)} {format_percent(share)}" for name, share in shown)


def piece_words(piece: PathPiece, *, ranks: bool) -> str:
    """Return one kind of work on the path: ``18.3 ms  compute, rank 2: the backward pass``."""
    where = f", rank {piece.rank}" if ranks else ""
    what = f": {piece.what}" if piece.what else ""
    return f"{format_ms(piece.ms):>8}  {resource_name(piece.resource)}{where}{what}"
