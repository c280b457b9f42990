"""Write comparisons and histories to their places, and read the diagnoses that they are made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracedoc.cli.output import Target, json_text, say, send
from tracedoc.errors import InputError

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.report.sheets.sheet import Sheet

FORMATS = {
    **{".txt": "text", ".json": "json", ".md": "markdown", ".html": "html", ".htm": "html"},
    **{".png": "png", ".svg": "svg", ".pdf": "pdf"},
}
"""The format that the suffix of a file name implies."""

_LARGEST_DIAGNOSIS = 256 << 20


def are_shared(places: Sequence[Target]) -> bool:
    """Return whether others read some of it: then hosts and absolute paths are hidden, as in a diagnosis."""
    return any(place.format not in ("text", "json") for place in places)


def diagnosis_in(path: str) -> Diagnosis:
    """Return the diagnosis that a file holds; raise :class:`InputError` naming the file for another."""
    from tracedoc.diagnosis_json import from_json
    from tracedoc.report.page.embedded import diagnosis_in_page, is_page

    if os.path.getsize(path) > _LARGEST_DIAGNOSIS:
        raise InputError(f"{path} is larger than a diagnosis gets", "give the folder of its run")
    with open(path, "rb") as file:
        data = file.read()
    try:
        return from_json(diagnosis_in_page(data) if is_page(data) else data)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from error


def write_sheet(places: Sequence[Target], value: object, sheet: Sheet, shared: Sheet) -> None:
    """Write a sheet to its places; ``shared`` is the one without hosts, ``value`` what JSON holds."""
    from tracedoc.report.figures.figure_style import FIGURE_FORMATS
    from tracedoc.report.figures.sheet_figure import sheet_figure
    from tracedoc.report.page.sheet_page import sheet_page
    from tracedoc.report.render import save_bytes
    from tracedoc.report.sheets.sheet import sheet_markdown, sheet_text

    def rendered(chosen: str, width: int, color: bool) -> list[str]:
        if chosen == "json":
            return [json_text(value)]
        if chosen == "html":
            return [sheet_page(shared)]
        return [sheet_markdown(shared) if chosen == "markdown" else sheet_text(sheet, width)]

    figures = [place for place in places if place.format in FIGURE_FORMATS]
    for place in figures:
        save_bytes(place.path, sheet_figure(shared, place.format))
    send([place for place in places if place not in figures], rendered, sheet.answer)
    for place in figures:
        say(f"wrote {place.path}")
