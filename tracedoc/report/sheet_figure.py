"""Draw the bars of a sheet as a figure for slides and papers."""

from __future__ import annotations

from io import BytesIO
from textwrap import fill
from typing import Any

from tracedoc.report.sheet import Sheet
from tracedoc.report.texts import one_line, plain

FIGURES = {".png": "png", ".svg": "svg"}
"""The kinds of figures by the suffix of their file."""

MOST_BARS = 60

_COLOURS = {
    "compute": "#4a78b0",
    "recompute": "#8c86d8",
    "transfer": "#d9513c",
    "unsplit": "#d9513c",
    "wait": "#e9a23b",
    "pipeline": "#9a6fb0",
    "copy": "#8c6d54",
    "input": "#c9428b",
    "launch": "#8fa3b8",
    "idle": "#c3c9d1",
    "predicted": "#a9c1dd",
    "other": "#59626d",
}
_INK, _SOFT = "#1b2026", "#59626d"


def figure_bytes(sheet: Sheet, kind: str) -> bytes:
    """Return the figure as "png" (200 dots an inch) or "svg"; of very many bars the first ones."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = sheet.bars[:MOST_BARS]
    # Names from the runs are text: no formulas. Times and ids would make each file another one.
    with rc_context({"text.parse_math": False, "svg.hashsalt": "tracedoc", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 1.3 + 0.3 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        for place, bar in enumerate(bars):
            for box in bar.boxes:
                colour = _COLOURS.get(box.key, _COLOURS["other"])
                axes.barh(place, max(box.width, 1.5), left=box.x, height=0.72, color=colour)
            if bar.range is not None:
                axes.plot(bar.range, (place, place), color=_INK, linewidth=2, solid_capstyle="butt")
            axes.text(1012, place, plain(one_line(bar.value)), va="center", fontsize=8, color=_INK)
        axes.set_yticks(range(len(bars)), [plain(one_line(bar.label))[:60] for bar in bars], fontsize=8)
        _frame(axes, sheet)
        buffer = BytesIO()
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _frame(axes: Any, sheet: Sheet) -> None:
    axes.invert_yaxis()
    axes.set_xlim(0, 1000)
    axes.set_xticks([])
    axes.tick_params(length=0, labelcolor=_INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(_SOFT)
    axes.set_title(fill(plain(one_line(sheet.answer)), 95), loc="left", fontsize=9, color=_INK)
    axes.set_xlabel(plain(one_line(sheet.bars_caption)), loc="left", fontsize=8, color=_SOFT)
    if sheet.legend:
        from matplotlib.patches import Patch

        handles = [
            Patch(color=_COLOURS.get(key, _COLOURS["other"]), label=words) for key, words in sheet.legend
        ]
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0, -0.08), ncols=4, fontsize=7, frameon=False
        )
