"""Draw the critical path over the rows of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracedoc.picture import PathStretch
from tracedoc.report.figures.figure_style import colours
from tracedoc.report.picture.path_line import level_of

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
