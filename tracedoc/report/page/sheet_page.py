"""Write a sheet as one HTML page that requests nothing and runs no script."""

from __future__ import annotations

from tracedoc.report.page.html import template
from tracedoc.report.sheets.sheet import Sheet


def sheet_page(sheet: Sheet) -> str:
    """Return the page; all text is escaped."""
    return template("sheet.html.j2").render(sheet=sheet)
