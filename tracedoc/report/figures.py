"""How figures look: a sheet, and the ranks of a diagnosis on one clock with their budgets and waits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from io import BytesIO
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt

from tracedoc.diagnosis import Diagnosis, RankReport
from tracedoc.errors import InputError
from tracedoc.report.charts.bars import by_cause
from tracedoc.report.charts.drawing import level_of
from tracedoc.report.clock import LATEST_MS, CommonClock
from tracedoc.report.sheet import FULL, Sheet, SheetBar
from tracedoc.report.step_parts import IDEAL, TODAY, UNTOLD, Waterfall, segments
from tracedoc.report.texts import one_line, plain
from tracedoc.report.view import FindingView, View, build_view
from tracedoc.report.words import STATES, states_of
from tracedoc.tables import PathStretch, Picture, PictureRow, Waits
from tracedoc.units import format_ms

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


NUMBERED_FINDINGS = 3
"""Findings that are numbered in the timeline."""

MOST_ROWS = 64
"""Ranks that a figure shows, the first ones."""

_LABELLED_ROWS = 24
_LONGEST_TITLE = 400
_ROWS_NAMED = 4
"""Ranks of one finding whose labels stand out."""

_LEGEND_COLUMNS = 4

_ENDS = {TODAY: "soft", IDEAL: "gain", UNTOLD: "other"}
"""Colours of the lines of the waterfall that no finding tells."""

_NOT_BESIDE = 0.8
"""What stands beside a bar that ends further to the right stands to its left, or within a longer one."""

Panel = Callable[[Any], None]


def render_figure(view: View, file_format: str) -> bytes:
    """Return the figure of a diagnosis as "png", "svg" or "pdf"; see :func:`diagnosis_figure`."""
    return figure_bytes(diagnosis_figure(view), file_format)


def figure_of(diagnosis: Diagnosis) -> Any:
    """The figure of a diagnosis, as matplotlib has it; see :func:`diagnosis_figure`."""
    return diagnosis_figure(build_view(diagnosis))


def diagnosis_figure(view: View) -> Any:
    """A matplotlib figure of what costs the step, the drawn step of all ranks, their budgets and waits.

    Parts that the capture does not have are left out. Raises :class:`InputError` where it has none of them.
    """
    panels = _panels(view)
    if not panels:
        raise InputError("there is no step to draw", "tracedoc diagnose says what the capture lacks")
    with page_style():
        lines = filter(None, (view.name, view.diagnosis.summary))
        title = "\n".join(fill(_shortened(line), 110) for line in lines)
        heights = [height for height, _ in panels]
        figure = new_figure(10, sum(heights) + 0.55 + 0.2 * title.count("\n"))
        figure.suptitle(
            f"{title}\n", x=0.01, ha="left", fontsize=11, fontweight="bold", color=colours()["ink"]
        )
        axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axis, (_, draw) in zip(axes, panels, strict=True):
            axis.tick_params(colors=colours()["soft"], labelsize=8)
            draw(axis)
        below = "\n".join(_shortened(line) for line in (view.about, view.run, view.throughput) if line)
        figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=colours()["soft"])
    return figure


def _panels(view: View) -> list[tuple[float, Panel]]:
    """Return heights in inches, and what draws the panel."""
    picture = view.diagnosis.detail.picture
    panels: list[tuple[float, Panel]] = []
    fall = view.waterfall
    if fall is not None and fall.lines:
        panels.append((_height(len(fall.lines)) + 0.5, lambda axis: _waterfall(axis, fall)))
    if picture is not None and picture.rows and 0 < picture.span_ms < LATEST_MS:
        panels.append((_height(len(picture.rows)) + 0.9, lambda axis: _timeline(axis, picture, view)))
    ranks = view.diagnosis.ranks
    budgets = [one for one in ranks if one.budget and 0 < one.budget.step_ms < LATEST_MS][:MOST_ROWS]
    if budgets:
        panels.append((_height(len(budgets)) + 0.9, lambda axis: _budgets(axis, budgets)))
    waits = view.diagnosis.detail.waits
    table = _wait_table(waits)
    if panels:
        lines = -(-(len(_words(view)) + 1) // _LEGEND_COLUMNS)
        panels.append((0.15 + 0.19 * lines, lambda axis: _legend(axis, view)))
    if waits is not None and table is not None:
        panels.append((_height(len(table)) + 0.7, lambda axis: _heat_map(axis, waits, table)))
    return panels


def _waterfall(axis: Any, fall: Waterfall) -> None:
    """Draw what each cause costs, from today's step to the ideal one."""
    for at, line in enumerate(fall.lines):
        colour = colours()[_ENDS.get(line.key, line.key)]
        axis.barh(at, max(line.share, 0.002), left=line.start, height=0.7, color=colour)
        note = f"  finding {line.number}" if line.number else ""
        inside, right = line.share > _NOT_BESIDE, line.start + line.share < _NOT_BESIDE
        axis.text(
            line.start + (line.share + 0.005 if right else 0.005 if inside else -0.005), at,
            f"{format_ms(line.ms)}  {line.percent}{note}", va="center",
            ha="left" if right or inside else "right", fontsize=8,
            color="white" if inside else colours()["ink"],
        )  # fmt: skip
    axis.set_yticks(range(len(fall.lines)), [fill(one_line(line.words), 46) for line in fall.lines])
    axis.set_xticks([])
    axis.set_xlim(0, 1)
    axis.set_ylim(len(fall.lines) - 0.4, -0.6)
    axis.spines["bottom"].set_visible(False)
    _heading(axis, f"What costs the step: {fall.of}", "")


def _height(rows: int) -> float:
    return max(0.6, min(0.28 * rows, 6.0))


# -- the drawn step


def _timeline(axis: Any, picture: Picture, view: View) -> None:
    rows = picture.rows[:MOST_ROWS]
    # Each state is one patch for all ranks: thousands of them would take matplotlib half a minute.
    for state, (key, _) in STATES.items():
        _bars(axis, rows, state, -0.4, 0.8, paint(key))
    _bars(axis, rows, "communication", 0.4, 0.1, {"facecolor": colours()["ink"], "linewidth": 0})
    draw_path(axis, picture.path, [row.rank for row in rows], picture.span_ms)
    _mark(axis, rows, picture, view)
    few = max(1, min(_ROWS_NAMED, len(rows) // 2))
    marked = (item.finding.ranks for item in view.findings[:NUMBERED_FINDINGS])
    named = {rank for ranks in marked if len(ranks) <= few for rank in ranks}
    _rank_labels(axis, [row.rank for row in rows], named)
    axis.set_xlim(0, picture.span_ms)
    clock = "all ranks on one clock" if picture.aligned else "each rank from its own beginning"
    _heading(axis, f"Step {picture.step}, {clock}", "ms")


def _bars(
    axis: Any, rows: Sequence[PictureRow], state: str, lift: float, height: float, paint: dict[str, Any]
) -> None:
    """Draw when each rank was in a state, as bars ``lift`` below its row and ``height`` high."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        ((start, low), (end, low), (end, low + height), (start, low + height), (start, low))
        for low, row in ((at + lift, row) for at, row in enumerate(rows))
        for start, end in row.spans_ms.get(state, ())
        if -LATEST_MS < start < end < LATEST_MS
    ]
    if corners:
        codes = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY) * len(corners)
        axis.add_patch(PathPatch(Path(np.array(corners).reshape(-1, 2), codes), **paint))


def _mark(axis: Any, rows: Sequence[PictureRow], picture: Picture, view: View) -> None:
    """Number the longest place of the first findings, on the rank where it is longest of all."""
    clock = CommonClock(picture, view.diagnosis)
    places = {row.rank: at for at, row in enumerate(rows)}
    for item in view.findings[:NUMBERED_FINDINGS]:
        found = _longest_place(item, picture, clock, set(places))
        if found is None:
            continue
        rank, start, end = found
        at = places[rank]
        colour = colours().get(item.finding.severity, colours()["note"])
        axis.plot([start, end], [at, at], color=colour, linewidth=1.2, solid_capstyle="butt")
        axis.text(
            (start + end) / 2, at, str(item.number), ha="center", va="center", fontsize=8, color="white",
            fontweight="bold", bbox={"boxstyle": "circle,pad=0.2", "facecolor": colour, "edgecolor": "white"},
        )  # fmt: skip


def _longest_place(
    item: FindingView, picture: Picture, clock: CommonClock, ranks: set[int]
) -> tuple[int, float, float] | None:
    named = ranks & set(item.finding.ranks) or ranks
    found = []
    for place in item.finding.evidence:
        interval = clock.of_place(place)
        if interval is not None and place.rank in named:
            start, end = max(interval.start_ms, 0.0), min(interval.end_ms, picture.span_ms)
            if start < end:
                found.append((end - start, place.rank, start, end))
    if found:
        return max(found)[1:]
    # Without a place: the step of the first rank that it names, where it names not all of them.
    if not item.finding.evidence and len(item.finding.ranks) < len(ranks):
        row = next((row for row in picture.rows if row.rank in item.finding.ranks), None)
        return (row.rank, row.start_ms, min(row.end_ms, picture.span_ms)) if row is not None else None
    return None


# -- where steps go


def _budgets(axis: Any, reports: Sequence[RankReport]) -> None:
    for at, report in enumerate(reports):
        assert report.budget is not None
        left = 0.0
        for part in by_cause(segments(report.budget), report.budget, report.device):
            if 0 < part.ms < LATEST_MS:
                axis.barh(at, part.ms, left=left, height=0.8, **paint(part.key))
                left += part.ms
    _rank_labels(axis, [report.rank for report in reports], set())
    _heading(axis, "Where the median step of each rank goes", "ms")


# -- who waits in which step


def _wait_table(waits: Waits | None) -> npt.NDArray[np.float64] | None:
    """Exposed waiting in ms by rank and step, NaN where unknown; ``None`` where nobody waits."""
    if waits is None or len(waits.ranks) < 2 or len({len(waits.steps), *map(len, waits.wait_ms)}) > 1:
        return None
    table = np.array(waits.wait_ms[:MOST_ROWS], dtype=np.float64)
    table[~((table >= 0) & (table < LATEST_MS))] = np.nan
    return table if np.nansum(table) > 0 else None


def _heat_map(axis: Any, waits: Waits, table: npt.NDArray[np.float64]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("waits", [colours()["paper"], colours()["wait"], "#5f2c00"])
    unknown = shades.with_extremes(bad=colours()["rule"])
    image = axis.imshow(table, aspect="auto", cmap=unknown, vmin=0.0, interpolation="nearest")
    bar = axis.figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=8, colors=colours()["soft"])
    bar.set_label("ms", fontsize=8, color=colours()["soft"])
    if table.size <= 200:
        for (row, column), ms in np.ndenumerate(table):
            if not np.isnan(ms):
                dark = ms > 0.55 * np.nanmax(table)
                axis.text(
                    column, row, format_ms(ms).removesuffix(" ms"), ha="center", va="center", fontsize=7,
                    color="white" if dark else colours()["ink"],
                )  # fmt: skip
    axis.set_xticks(range(len(waits.steps)), map(str, waits.steps))
    _rank_labels(axis, waits.ranks[: len(table)], set())
    _heading(axis, "Exposed waiting for peers, by rank and step", "step")


# -- shared


def _rank_labels(axis: Any, ranks: Sequence[int], named: set[int]) -> None:
    every = max(1, -(-len(ranks) // _LABELLED_ROWS))
    shown = [at for at, rank in enumerate(ranks) if at % every == 0 or rank in named]
    axis.set_yticks(shown, [f"rank {ranks[at]}" for at in shown])
    for label, at in zip(axis.get_yticklabels(), shown, strict=True):
        if ranks[at] in named:
            label.set(fontweight="bold", color=colours()["critical"])
    axis.set_ylim(len(ranks) - 0.4, -0.6)


def _heading(axis: Any, title: str, unit: str) -> None:
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold", color=colours()["ink"])
    axis.set_xlabel(unit, fontsize=8, color=colours()["soft"])


def _legend(axis: Any, view: View) -> None:
    """Write what the colours of all panels mean, in a panel of its own."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = _words(view)
    handles: list[Any] = [Patch(label=text, **paint(key)) for key, text in words.items()]
    rows = view.diagnosis.detail.picture.rows if view.diagnosis.detail.picture is not None else ()
    if any("communication" in row.spans_ms for row in rows):
        handles.append(Line2D([], [], color=colours()["ink"], label="communication, hidden or not"))
    if view.diagnosis.detail.picture is not None and view.diagnosis.detail.picture.path:
        handles.append(Line2D([], [], color=colours()["ink"], linewidth=1.1, label=LABEL))
    axis.axis("off")
    axis.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.0, 0.5), borderaxespad=0.0,
        ncols=_LEGEND_COLUMNS, fontsize=8, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip


def _words(view: View) -> dict[str, str]:
    """The words of each colour in this figure, those of the budget first."""
    found: dict[str, dict[str, None]] = {}
    for report in view.diagnosis.ranks:
        budget = report.budget
        for part in by_cause(segments(budget), budget, report.device) if budget is not None else ():
            found.setdefault(part.key, {})[part.label] = None
    picture = view.diagnosis.detail.picture
    drawn = {state for row in picture.rows for state in row.spans_ms} if picture is not None else set()
    for state, (key, label) in states_of(view.diagnosis.run.device).items():
        if state in drawn:
            found.setdefault(key, {})[label] = None
    return {key: ", ".join(labels) for key, labels in found.items()}


def _shortened(text: str) -> str:
    line = one_line(text).replace("`", "")
    return line if len(line) <= _LONGEST_TITLE else f"{line[:_LONGEST_TITLE]} ..."


LABEL = "critical path"


def draw_path(axis: Any, path: Sequence[PathStretch], ranks: Sequence[int], span_ms: float) -> None:
    """Draw one line through rows of height 1 at 0, 1, ..., along the work of each stretch."""
    from matplotlib.patheffects import withStroke

    places = {rank: place for place, rank in enumerate(ranks)}
    times: list[float] = []
    rows: list[float] = []
    for one in path:
        if one.rank not in places or not 0 <= one.start_ms <= one.end_ms <= span_ms:
            continue
        at = places[one.rank] - 0.5 + level_of(one) / 10
        if rows:
            times.append(one.start_ms)
            rows.append(rows[-1])
        times += (one.start_ms, one.end_ms)
        rows += (at, at)
    if times:
        halo = [withStroke(linewidth=2.4, foreground="white")]
        axis.plot(times, rows, color=colours()["ink"], linewidth=1.1, path_effects=halo, label=LABEL)
