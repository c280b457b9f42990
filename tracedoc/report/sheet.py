"""A sheet: an answer, bars, tables and lists, as comparisons show them; as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

import msgspec

from tracedoc.report.charts.bars import Box
from tracedoc.report.forges import comment, fold, safe
from tracedoc.report.texts import one_line, plain

Row = tuple[str, ...]

FULL = 1000.0
"""The length of the longest bar."""


class SheetBar(msgspec.Struct, frozen=True):
    """A labelled bar with its value in words; ``range`` is a stretch that is predicted, in thousandths."""

    label: str
    value: str
    boxes: tuple[Box, ...]
    range: tuple[float, float] | None = None


class SheetTable(msgspec.Struct, frozen=True):
    """Rows below their titles; the columns from the second on are numbers, up to ``numbers`` of them."""

    titles: Row
    rows: tuple[Row, ...]
    numbers: int
    caption: str = ""


class Sheet(msgspec.Struct, frozen=True):
    """All that a comparison, a series or a history shows; ``bars`` are for pages and figures.

    ``title`` names the runs: it stands above the answer and on the page's tab; ``about`` says when and how
    they were captured. ``counts`` is what the lists hold in a line, for where they are folded.
    """

    answer: str
    notes: tuple[str, ...] = ()
    bars: tuple[SheetBar, ...] = ()
    bars_caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    tables: tuple[SheetTable, ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    counts: str = ""
    title: str = ""
    about: tuple[str, ...] = ()


def sheet_text(sheet: Sheet, width: int) -> str:
    """Return a sheet as text; 0 is the width off a terminal."""
    columns = width or 100
    lines = [fill(plain(one_line(sheet.answer)), columns)]
    lines += [fill(plain(one_line(sheet.title)), columns)] if sheet.title else []
    lines += [fill(plain(one_line(note)), columns) for note in (*sheet.about, *sheet.notes)]
    for table in sheet.tables:
        lines += [""] + ([fill(plain(one_line(table.caption)), columns)] if table.caption else [])
        lines += _aligned(table, columns)
    for title, items in sheet.lists:
        lines += ["", title]
        lines += [
            fill(plain(one_line(item)), columns, initial_indent="-  ", subsequent_indent="   ")
            for item in items
        ]
    return "\n".join(lines) + "\n"


def sheet_markdown(sheet: Sheet) -> str:
    """Return a sheet as a comment: the answer, notes and tables, and the lists folded.

    Names from the runs read as just that text.
    """
    lines = [f"### {safe(sheet.answer)}"]
    for note in (*((sheet.title,) if sheet.title else ()), *sheet.about, *sheet.notes):
        lines += ["", safe(note)]
    for table in sheet.tables:
        lines += ["", *([safe(table.caption), ""] if table.caption else [])]
        lines += [f"| {' | '.join(table.titles)} |", "|---" + "|--:" * table.numbers + _rest(table)]
        lines += [f"| {' | '.join(safe(cell) for cell in row)} |" for row in table.rows]
    if sheet.counts:
        lines += ["", safe(sheet.counts)]
    folds = (
        fold(safe(title), "\n".join(f"- {safe(item)}" for item in items)) for title, items in sheet.lists
    )
    return comment("\n".join(lines), folds)


def _rest(table: SheetTable) -> str:
    return "|---" * (len(table.titles) - 1 - table.numbers) + "|"


def _aligned(table: SheetTable, columns: int) -> Iterator[str]:
    """Yield the rows in columns; a last cell that does not fit stands below its row."""
    rows = [tuple(plain(one_line(cell)) for cell in row) for row in (table.titles, *table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.titles))]
    for row in rows:
        cells = [
            f"{cell:>{widths[place]}}" if 1 <= place <= table.numbers else f"{cell:<{widths[place]}}"
            for place, cell in enumerate(row)
        ]
        line = "  ".join(cells).rstrip()
        if len(line) <= columns or len(row) == table.numbers + 1 or not row[-1]:
            yield line
            continue
        yield "  ".join(cells[:-1]).rstrip()
        yield fill(row[-1], columns, initial_indent="    ", subsequent_indent="    ")
