"""Draw the bars of a sheet as a figure for slides and papers."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from tracedoc.report.figures.figure_style import HATCHES, colours, figure_bytes, new_figure, page_style
from tracedoc.report.sheets.sheet import Bar, Box, Sheet
from tracedoc.report.texts import one_line, plain

MOST_BARS = 60
"""A figure cannot be scrolled: of more bars the first ones are drawn."""

_FULL = 1000.0
_LEAST_WIDTH = 1.5
_PLAIN = {"predicted": ("compute", 0.45)}
"""Keys whose colour is a paler one of the page's."""


def sheet_figure(sheet: Sheet, file_format: str) -> bytes:
    """Return the figure as "png", "svg" or "pdf"."""
    bars = sheet.bars[:MOST_BARS]
    with page_style():
        figure = new_figure(9.0, 1.4 + 0.3 * len(bars) + (0.4 if sheet.legend else 0.0))
        axes = figure.subplots()
        for place, bar in enumerate(bars):
            _draw(axes, place, bar)
        axes.set_yticks(range(len(bars)), [plain(one_line(bar.label))[:60] for bar in bars], fontsize=8)
        _frame(axes, sheet, len(bars))
    return figure_bytes(figure, file_format)


def _draw(axes: Any, place: int, bar: Bar) -> None:
    for box in bar.boxes:
        axes.barh(place, max(box.width, _LEAST_WIDTH), left=box.x, height=0.72, linewidth=0, **_look(box))
    if bar.range is not None:
        axes.plot(bar.range, (place, place), color=colours()["ink"], linewidth=2, solid_capstyle="butt")
    axes.text(
        1.012 * _FULL, place, plain(one_line(bar.value)), va="center", fontsize=8, color=colours()["ink"]
    )


def _look(box: Box) -> dict[str, Any]:
    key, alpha = _PLAIN.get(box.key, (box.key, 1.0))
    look: dict[str, Any] = {"facecolor": colours().get(key, colours()["other"]), "alpha": alpha}
    if key in HATCHES:
        look |= {"hatch": HATCHES[key], "edgecolor": "white"}
    return look


def _frame(axes: Any, sheet: Sheet, count: int) -> None:
    axes.set_ylim(max(count, 1) - 0.4, -0.6)
    axes.set_xlim(0, _FULL)
    axes.set_xticks([])
    axes.tick_params(length=0, labelcolor=colours()["ink"])
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(colours()["soft"])
    title = fill(plain(one_line(sheet.answer)), 90)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colours()["ink"])
    axes.set_xlabel(plain(one_line(sheet.bars_caption)), loc="left", fontsize=8, color=colours()["soft"])
    if sheet.legend:
        from matplotlib.patches import Patch

        handles = [
            Patch(label=words, linewidth=0, **_look(Box(key, 0.0, 0.0))) for key, words in sheet.legend
        ]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=4, fontsize=7)
