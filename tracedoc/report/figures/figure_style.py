"""How figures look: the colours of the page, patterns where they are alike in grey, the same bytes twice."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

FIGURE_FORMATS = ("png", "svg", "pdf")

HATCHES = {
    "transfer": "xxxx",
    "wait": "////",
    "pipeline": "||||",
    "unsplit": "++++",
    "copy": "....",
    "input": "----",
    "launch": "oo",
    "delay": "OO",
    "sync": "\\\\\\\\",
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
    sheet = (files("tracedoc.report.page") / "templates" / "report.css").read_text(encoding="utf-8")
    daylight = re.search(r":root \{(.*?)\}", sheet, re.S)
    assert daylight is not None
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", daylight[1]))


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
