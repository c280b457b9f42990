"""Show a diagnosis in a notebook: the answer, where the step goes, and the findings."""

from __future__ import annotations

from functools import cache

from jinja2 import Template

from tracedoc.diagnosis import Diagnosis
from tracedoc.report.page.html import template
from tracedoc.report.view import build_view

LIMITS_SHOWN = 3
"""Limits that a cell shows; the page has them all."""


def notebook_html(diagnosis: Diagnosis) -> str:
    """Return HTML for a cell: no scripts, no styles but its own, every text escaped."""
    view = build_view(diagnosis)
    return _template().render(view=view, limits=view.limits[:LIMITS_SHOWN], more=view.limits[LIMITS_SHOWN:])


@cache
def _template() -> Template:
    return template("notebook.html.j2")
