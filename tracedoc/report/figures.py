"""How figures look, and a sheet drawn as one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from io import BytesIO
from textwrap import fill
from typing import Any

from tracedoc.report.sheet import FULL, Sheet, SheetBar
from tracedoc.report.texts import one_line, plain

HATCHES = {
    "transfer": "xxxx",
    "wait": "////",
    "pipeline": "||||",
    "unsplit": "++++",
    "copy": "....",
    "input": "----",
    "launch": "oo",
    "delay": "OO",
    "unclear": "..",
    "gc": "**",
    "loading": "xx",
    "operator": "//",
    "compile": "++",
    "allocator": "--",
    "sync": "\\\\\\\\",
    "longer": "///",
}
"""Patterns by the page's names of colours: of those that are alike in grey, one has a pattern."""

_INCHES = {"dpi": 150}
_UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "tracedoc",
    "svg.fonttype": "none",
    # A name with dollar signs is a name, not a formula.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


@cache
def colours() -> dict[str, str]:
    """Return the colours of the page in daylight, by their names in its style sheet."""
    sheet = (files("tracedoc.report") / "templates" / "report.css").read_text(encoding="utf-8")
    daylight = re.search(r":root \{(.*?)\}", sheet, re.S)
    assert daylight is not None
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", daylight[1]))


def paint(key: str) -> dict[str, Any]:
    """The look of a colour of the page: patterns in white, so that the colour stays."""
    style: dict[str, Any] = {"facecolor": colours().get(key, colours()["other"]), "linewidth": 0}
    if pattern := HATCHES.get(key):
        style |= {"hatch": pattern, "edgecolor": "white"}
    return style


@contextmanager
def page_style() -> Iterator[None]:
    """Draw within this: matplotlib then looks like the page, whatever the user's own settings are."""
    from matplotlib import style

    with warnings.catch_warnings(), style.context("default"), style.context(_STYLE):
        # A font without a letter of some name draws a box for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, of no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=colours()["card"], layout="constrained")


def figure_bytes(figure: Any, file_format: str) -> bytes:
    """Return a figure as "png", "svg" or "pdf": without a date, so that one figure has one file."""
    buffer = BytesIO()
    with page_style():
        figure.savefig(buffer, format=file_format, metadata=_UNDATED[file_format], **_INCHES)
    return buffer.getvalue()


# -- a sheet

MOST_BARS = 60
"""A figure cannot be scrolled: of more bars the first ones are drawn."""

_LEAST_WIDTH = 1.5
_PLAIN = {"predicted": ("compute", 0.45)}
"""Keys whose colour is a paler one of the page's."""


def sheet_figure(sheet: Sheet, file_format: str) -> bytes:
    """Return the figure as "png", "svg" or "pdf"."""
    bars = sheet.bars[:MOST_BARS]
    with page_style():
        lines = len(sheet.about) + 3 * bool(sheet.legend)
        figure = new_figure(9.0, 1.4 + 0.3 * len(bars) + 0.15 * lines)
        axes = figure.subplots()
        for place, bar in enumerate(bars):
            _draw(axes, place, bar)
        axes.set_yticks(range(len(bars)), [plain(one_line(bar.label))[:60] for bar in bars], fontsize=8)
        _frame(axes, sheet, len(bars))
    return figure_bytes(figure, file_format)


def _draw(axes: Any, place: int, bar: SheetBar) -> None:
    for box in bar.boxes:
        axes.barh(place, max(box.width, _LEAST_WIDTH), left=box.x, height=0.72, **_look(box.key))
    if bar.range is not None:
        axes.plot(bar.range, (place, place), color=colours()["ink"], linewidth=2, solid_capstyle="butt")
    axes.text(
        1.012 * FULL, place, plain(one_line(bar.value)), va="center", fontsize=8, color=colours()["ink"]
    )


def _look(name: str) -> dict[str, Any]:
    key, alpha = _PLAIN.get(name, (name, 1.0))
    return paint(key) | {"alpha": alpha}


def _frame(axes: Any, sheet: Sheet, count: int) -> None:
    axes.set_ylim(max(count, 1) - 0.4, -0.6)
    axes.set_xlim(0, FULL)
    axes.set_xticks([])
    axes.tick_params(length=0, labelcolor=colours()["ink"])
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(colours()["soft"])
    title = "\n".join(
        fill(plain(one_line(text)).replace("`", ""), 90) for text in (sheet.title, sheet.answer) if text
    )
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colours()["ink"])
    below = "\n".join(fill(plain(one_line(text)), 110) for text in (sheet.bars_caption, *sheet.about))
    axes.set_xlabel(below, loc="left", fontsize=8, color=colours()["soft"])
    if sheet.legend:
        from matplotlib.patches import Patch

        handles = [Patch(label=words, **_look(key)) for key, words in sheet.legend]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=4, fontsize=7)
