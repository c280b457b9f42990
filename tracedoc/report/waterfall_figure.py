"""Draw how one step becomes another, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from tracedoc.report.figure_style import colours, figure_bytes, new_figure, page_style
from tracedoc.report.texts import one_line
from tracedoc.units import format_ms

Change = tuple[str, float]
"""A part of the step, and by how many milliseconds it became longer."""


def render_waterfall(
    file_format: str, title: str, base: tuple[str, float], changes: Sequence[Change], head: tuple[str, float]
) -> bytes:
    """Return the waterfall as "png", "svg" or "pdf": from one step, through the changes, to the other.

    ``base`` and ``head`` are what the two sides are called and their steps in milliseconds; the changes
    lead from the first to the second.
    """
    with page_style():
        figure = new_figure(9, 1.1 + 0.33 * (len(changes) + 2))
        axis = figure.subplots()
        figure.suptitle(
            f"{fill(one_line(title), 100)}",
            x=0.01,
            ha="left",
            fontsize=11,
            fontweight="bold",
            color=colours()["ink"],
        )
        _draw(axis, base, changes, head)
    return figure_bytes(figure, file_format)


def _draw(axis: Any, base: tuple[str, float], changes: Sequence[Change], head: tuple[str, float]) -> None:
    ends = [base[1]]
    for _, ms in changes:
        ends.append(ends[-1] + ms)
    reach = max(*ends, head[1])
    _bar(axis, 0, 0.0, base[1], "compute", format_ms(base[1]), reach)
    for at, (_, ms) in enumerate(changes, 1):
        sign = "+" if ms > 0 else "-" if ms < 0 else ""
        # Longer is hatched: red and green are one grey.
        _bar(
            axis, at, ends[at - 1], ms, "transfer" if ms > 0 else "gain", f"{sign}{format_ms(abs(ms))}", reach
        )
        axis.plot([ends[at - 1]] * 2, [at - 1.4, at + 0.4], color=colours()["soft"], linewidth=0.6)
    last = len(changes) + 1
    axis.plot([ends[-1]] * 2, [last - 1.4, last + 0.4], color=colours()["soft"], linewidth=0.6)
    _bar(axis, last, 0.0, head[1], "compute", format_ms(head[1]), reach)
    axis.set_yticks(range(last + 1), [base[0], *(label for label, _ in changes), head[0]])
    axis.tick_params(colors=colours()["soft"], labelsize=8)
    axis.set_ylim(last + 0.6, -0.6)
    axis.set_xlim(min(0.0, *ends), 1.12 * reach)
    axis.set_xlabel("ms", fontsize=8, color=colours()["soft"])


def _bar(axis: Any, at: int, left: float, ms: float, key: str, text: str, reach: float) -> None:
    style: dict[str, Any] = {"facecolor": colours()[key], "linewidth": 0}
    if key == "transfer":
        style |= {"hatch": "////", "edgecolor": "white"}
    axis.barh(at, ms, left=left, height=0.8, **style)
    axis.text(max(left, left + ms) + 0.008 * reach, at, text, va="center", fontsize=8, color=colours()["ink"])
