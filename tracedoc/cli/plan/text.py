"""Write a plan for a terminal, a pipe, or as Markdown: the answer first, the next command last."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from tracedoc.planner.candidates import Candidate, step_range, with_checkpointing
from tracedoc.planner.configurations import Configuration
from tracedoc.planner.memory import SPREAD
from tracedoc.planner.plan import Plan
from tracedoc.report.terminal import bullet, heading, printed_text, text_console
from tracedoc.units import format_count, format_gb, format_percent

_LEAST_NEEDED = ("activ.", "other", "states", "sent", "room")
_UNITS = "GB on each GPU, of 1e9 bytes as GPUs are sold; sent: by each GPU in a step"
_FITS = ("yes", "maybe", "unlikely", "no")
_HEADINGS = ("strategy", "fits", "total", "room", "states", "activ.", "other", "sent", "step")


def plan_text(plan: Plan, *, next_command: str, width: int = 0, color: bool = False) -> str:
    """Return the plan as text; without ``color`` it holds no escape sequence, ``width`` 0 means a pipe."""
    console = text_console(width, color=color)
    good = plan.recommended is not None
    console.print(Text(plan.summary, "bold" if good else "bold red"), soft_wrap=not width)
    console.print(Text(asked_line(plan), "dim"), soft_wrap=not width)
    heading(console, "Strategies", _UNITS)
    console.print(_table(plan, console.width))
    for note in _table_notes(plan):
        console.print(Text(note, "dim"))
    heading(
        console, "Why" if good else "What would fit", "" if good else "each change alone, the smallest first"
    )
    console.print(Text(plan.because))
    for line in _change_lines(plan):
        bullet(console, Text(line))
    if second := _second_opinion(plan):
        console.print(Text(second))
    if duration := _duration(plan):
        console.print(Text(duration))
    if plan.found:
        heading(console, "Searched", "the fastest that fit")
        for line in _found_lines(plan):
            bullet(console, Text(line))
    if plan.turning_points:
        heading(console, "What would change the answer", _kept(plan))
        for point in plan.turning_points:
            bullet(console, Text(point))
    for configuration in shown_configurations(plan):
        heading(console, "Configuration", configuration.title + _others(plan, configuration))
        if configuration.note:
            console.print(Text(configuration.note))
        for line in configuration.text.splitlines():
            # Code is never wrapped: a wrapped line cannot be pasted.
            console.print(Text(f"  {line}", "cyan"), soft_wrap=True)
    heading(console, "Assumed")
    for text in plan.assumptions:
        bullet(console, Text(text))
    return printed_text(console, next_command)


def plan_markdown(plan: Plan) -> str:
    """Return the plan as Markdown, with the configuration for every framework."""
    lines = [f"**{plan.summary}**", "", asked_line(plan), "", "| " + " | ".join(_HEADINGS) + " |"]
    lines.append("|" + "---|" * len(_HEADINGS))
    lines += ["| " + " | ".join(_cells(plan, c)) + " |" for c in plan.strategies]
    notes = [note.replace("* with", "\\* with") for note in _table_notes(plan)]
    lines += ["", f"{_UNITS}.", *(text for note in notes for text in ("", note)), "", plan.because]
    if changes := _change_lines(plan):
        lines += ["", "Each change alone, the smallest first:", "", *(f"- {line}" for line in changes)]
    lines += [text for line in (_second_opinion(plan), _duration(plan)) if line for text in ("", line)]
    if plan.found:
        lines += ["", "Searched, the fastest that fit:", "", *(f"- {line}" for line in _found_lines(plan))]
    if plan.turning_points:
        kept = f", {_kept(plan)}" if _kept(plan) else ""
        lines += ["", f"What would change the answer{kept}:", ""]
        lines += [f"- {point}" for point in plan.turning_points]
    for configuration in plan.configurations:
        lines += [
            "",
            " ".join(text for text in (f"{configuration.title}:", configuration.note) if text),
            "",
            f"```{configuration.language}",
            configuration.text,
            "```",
        ]
    lines += ["", "Assumed:", "", *(f"- {text}" for text in plan.assumptions)]
    return "\n".join(lines) + "\n"


def asked_line(plan: Plan) -> str:
    """Return the question in one line: model, training, machines."""
    asked = plan.asked
    what = "all of them trained"
    if not asked.training.lora_rank and asked.trainable_parameters < asked.parameters:
        what = f"{format_count(asked.trainable_parameters)} of them trained"
    if asked.training.lora_rank:
        kind = "QLoRA" if asked.training.base_bits == 4 else "LoRA"
        what = (
            f"{kind} of rank {asked.training.lora_rank} ({format_count(asked.trainable_parameters)} trained)"
        )
    gpu = asked.gpu or "GPU"
    nodes = f" in {asked.nodes} nodes" if asked.nodes > 1 else ""
    offload = f", offload {asked.training.offload}" if asked.training.offload != "none" else ""
    return (
        f"{format_count(asked.parameters)} parameters ({asked.model}), {what}{offload},"
        f" on {asked.gpus}x {gpu} of {format_gb(asked.gpu_memory_bytes)}{nodes}"
    )


def shown_configurations(plan: Plan) -> tuple[Configuration, ...]:
    """The chosen framework's configurations, or where it has nothing of its own those of plain PyTorch."""
    own = [c for c in plan.configurations if c.framework == plan.framework]
    return tuple(own or plan.configurations[:1])


def _others(plan: Plan, shown: Configuration) -> str:
    others = dict.fromkeys(c.framework for c in plan.configurations if c.framework != shown.framework)
    return f"; --framework {'|'.join(others)} for the others" if others else ""


def _table(plan: Plan, width: int) -> Table:
    """Return the strategies as a table; what does not fit the width is left out, never cut."""
    rows: list[tuple[str, ...]] = [("  strategy", *_HEADINGS[1:])]
    for candidate in plan.strategies:
        cells = _cells(plan, candidate)
        rows.append((("> " if candidate.strategy == plan.recommended else "  ") + cells[0], *cells[1:]))
    widths = [max(len(row[number]) for row in rows) for number in range(len(_HEADINGS))]
    shown = list(range(len(_HEADINGS)))
    for name in _LEAST_NEEDED:
        if sum(widths[number] + 2 for number in shown) - 2 > width:
            shown.remove(_HEADINGS.index(name))
    table = Table.grid(padding=(0, 2))
    for number in shown:
        table.add_column(justify="left" if number < 2 else "right", no_wrap=True)
    table.add_row(*(Text(rows[0][number], "dim") for number in shown))
    for candidate, row in zip(plan.strategies, rows[1:], strict=True):
        chosen = candidate.strategy == plan.recommended
        style = "bold green" if chosen else ("" if candidate.fits else "dim")
        table.add_row(*(Text(row[number], style) for number in shown))
    return table


def _cells(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    memory = candidate.memory
    states = memory.states.states + memory.states.copies - memory.absent
    other = memory.working + memory.units + memory.reserve + memory.context
    return (
        candidate.title + (_MARKS[candidate.selective] if candidate.checkpointing else ""),
        _FITS[candidate.doubt],
        _gb(candidate.total_bytes),
        _gb(candidate.headroom_bytes),
        _gb(states),
        _gb(memory.activations),
        _gb(other),
        _sent(candidate.traffic_bytes) if plan.asked.gpus > 1 else "-",
        step_range(candidate) or "-",
    )


_MARKS = (" *", " +")
"""Of what checkpoints activations: all, or selectively."""


def _gb(value: float) -> str:
    size = value / 1e9
    return f"{size:.0f}" if abs(size) >= 999.5 else f"{size:.1f}"


def _sent(value: float) -> str:
    return f"{value / 1e9:.3f}" if value < 0.0995e9 else _gb(value)


def _parts(plan: Plan) -> str:
    """The parts of the memory of the recommended strategy, or of the nearest, the largest first."""
    first = next(c for c in plan.strategies if c.strategy == (plan.recommended or plan.least))
    memory, states = first.memory, first.memory.states
    working = "loss and logits" if memory.moment == "loss" else "one block in backward"
    late = memory.moment == "last block"
    parts = (
        ("parameters", states.parameters),
        ("gradients", states.gradients - (0.0 if late else memory.absent)),
        ("optimizer", states.optimizer),
        ("16-bit copies", states.copies - (memory.absent if late else 0.0)),
        ("activations", memory.activations),
        (working, memory.working),
        ("gathered units and buckets", memory.units),
        ("reserve", memory.reserve),
        ("context", memory.context),
    )
    shown = sorted((part for part in parts if part[1] >= 0.05e9), key=lambda part: -part[1])
    return f"{first.title}: " + ", ".join(f"{name} {_gb(size)}" for name, size in shown)


def _table_notes(plan: Plan) -> list[str]:
    marked = {c.selective for c in plan.strategies if c.checkpointing}
    notes = [
        f"{_MARKS[kind].strip()}{with_checkpointing('', True, selective=kind)}" for kind in sorted(marked)
    ]
    if any(c.tight for c in plan.strategies):
        within = format_percent(SPREAD)
        notes.append(
            f"maybe, unlikely: just below or above the memory; predictions hold to {within} in 9 of 10 runs"
        )
    host = max((c.memory.states.host for c in plan.strategies), default=0.0)
    if host:
        place = "NVMe" if plan.asked.training.offload == "nvme" else "host memory"
        per_node = host * plan.asked.gpus / plan.asked.nodes
        notes.append(f"and up to {format_gb(per_node)} of {place} in each node")
    return [*notes, _parts(plan)]


def _change_lines(plan: Plan) -> list[str]:
    lines = []
    for change in plan.changes:
        place = "NVMe" if change.id == "nvme" else "host memory"
        size = format_gb(change.host_bytes_per_node)
        host = f", {size} of {place} in each node" if change.host_bytes_per_node else ""
        then = with_checkpointing(change.strategy, change.checkpointing, selective=change.selective)
        of = f"{format_gb(change.total_bytes)} of {format_gb(change.memory_bytes)}"
        lines.append(f"{change.what}: {then}, {of}{host}; {change.why}")
    return lines


def _duration(plan: Plan) -> str:
    """Return tokens a second, and how long the tokens that were asked about take."""
    if plan.tokens_per_second is None:
        return ""
    unit = "tokens" if plan.asked.training.sequence > 1 else "samples"
    text = f"{format_count(plan.tokens_per_second)} {unit}/s on all GPUs"
    if plan.days is not None:
        text += f"; {plan.days:.3g} days for all {unit}"
    if plan.cost is not None:
        text += f", {plan.cost:,.0f} at that price"
    return f"{text}."


def _found_lines(plan: Plan) -> list[str]:
    kept = {"off": "", "selective": ", selective checkpointing", "on": ", checkpointing"}
    return [
        f"{one.title}, micro-batch {one.micro_batch}"
        + (f" x {one.accumulation}" if one.accumulation > 1 else "")
        + f"{kept[one.checkpointing]}: {format_count(one.tokens_per_second)} tokens/s,"
        f" {format_gb(one.total_bytes)}"
        for one in plan.found
    ]


def _kept(plan: Plan) -> str:
    """The micro-batch that the search found, which stays in what would change the answer."""
    return f"with micro-batch {plan.found[0].micro_batch}" if plan.found else ""


def _second_opinion(plan: Plan) -> str:
    faster = next((c for c in plan.strategies if c.strategy == plan.faster), None)
    if faster is None:
        return ""
    title = with_checkpointing(faster.title, faster.checkpointing, selective=faster.selective)
    chosen = next(c for c in plan.strategies if c.strategy == plan.recommended)
    assert faster.step is not None
    assert chosen.step is not None
    less = format_percent(1 - faster.step.expected_ms / chosen.step.expected_ms)
    simpler = f" {chosen.title} is the simpler of the two;" if chosen.family == "ddp" else ""
    return (
        f"{title} is predicted {less} faster ({step_range(faster)}), but that is not certain:{simpler}"
        " measure both before you decide."
    )
