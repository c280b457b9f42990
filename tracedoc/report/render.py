"""Render a diagnosis in a format by its name."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import json_pieces
from tracedoc.errors import InputError
from tracedoc.report.texts import redacted
from tracedoc.report.view import View, build_view

SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".txt": "text",
    ".md": "markdown",
    ".sarif": "sarif",
    ".xml": "junit",
    ".perfetto.json": "perfetto",
    ".perfetto.json.gz": "perfetto",
    ".png": "png",
    ".svg": "svg",
    ".pdf": "pdf",
}
"""The format that the end of a file name implies; the longest end that fits counts."""

FILES_ONLY = frozenset({"perfetto", "png", "svg", "pdf"})
"""Formats that are no text to read: only files get them, never stdout."""

_REDACTED_BY_DEFAULT = frozenset({"html", "markdown", "sarif", "junit", "github", "codequality"})
# JSON leaves these as they are, and a terminal that shows the JSON would obey them.
_OBEYED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


_RENDERERS = {
    "html": ("page", "render_html"),
    "markdown": ("forges", "render_markdown"),
    "sarif": ("forges", "render_sarif"),
    "junit": ("forges", "render_junit"),
    "github": ("forges", "render_annotations"),
    "codequality": ("forges", "render_code_quality"),
}
"""The module of each format and its function; imported where it is asked for: a page needs jinja2."""


def implied_format(path: str, suffixes: Mapping[str, str] = SUFFIXES) -> str | None:
    """Return the format that a file's name implies; ``None`` if its end is none of ``suffixes``."""
    name = Path(path).name.lower()
    fitting = [suffix for suffix in suffixes if name.endswith(suffix) and name != suffix]
    return suffixes[max(fitting, key=len)] if fitting else None


def render_file(diagnosis: Diagnosis, report_format: str, *, redact: bool | None = None) -> bytes:
    """The content of a file in one of :data:`FILES_ONLY`; ``redact`` defaults to yes.

    Raises :class:`InputError` where the diagnosis has no step to draw.
    """
    view = build_view(diagnosis, redact=redact is not False)
    if report_format == "perfetto":
        from tracedoc.report.perfetto import render_perfetto

        return render_perfetto(view)
    from tracedoc.report.figures import render_figure

    return render_figure(view, report_format)


def render(diagnosis: Diagnosis, report_format: str, *, redact: bool | None = None) -> str:
    """Return the report; ``redact`` defaults to yes for formats that are passed on: all but text and JSON."""
    return "".join(render_pieces(diagnosis, report_format, redact=redact))


def render_pieces(
    diagnosis: Diagnosis,
    report_format: str,
    *,
    redact: bool | None = None,
    command: str = "",
    run: str = "RUN",
    page_written: bool = False,
    verdicts: bool = False,
    top: int = 0,
    width: int = 0,
    color: bool = False,
) -> Iterator[str]:
    """Yield the text of :func:`render` in pieces: the JSON of many ranks is never held as a whole.

    The others are for text. ``command`` is the one that gave the answer, empty where it cannot be repeated;
    for ``run`` and what follows see :func:`tracedoc.report.terminal.render_text`.
    """
    hide = report_format in _REDACTED_BY_DEFAULT if redact is None else redact
    if report_format == "json":
        for piece in json_pieces(redacted(diagnosis) if hide else diagnosis):
            yield _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", piece)
        return
    view = build_view(diagnosis, redact=hide)
    if report_format != "text":
        module, function = _RENDERERS[report_format]
        yield getattr(import_module(f"tracedoc.report.{module}"), function)(view)
        return
    from tracedoc.report.terminal import render_text

    following = _next_command(view, command, page_written=page_written, verdicts=verdicts)
    yield render_text(
        view, next_command=following, run=run, verdicts=verdicts, top=top, width=width, color=color
    )


def _next_command(view: View, command: str, *, page_written: bool, verdicts: bool) -> str:
    """Return the command to type after reading the answer."""
    if command and view.findings and not page_written:
        return f"{command} -o report.html"
    if view.findings:
        return f"tracedoc explain {view.findings[0].finding.rule_id}"
    if view.diagnosis.budget is None and view.limits:
        return f"tracedoc explain {view.limits[0].code}"
    return f"{command} --verdicts" if command and not verdicts else "tracedoc rules list"


def write_report(
    diagnosis: Diagnosis, path: str, report_format: str | None = None, *, redact: bool | None = None
) -> None:
    """Write a report to a file; the format is that of the name unless given.

    Raises :class:`InputError` if the name implies no format or the file cannot be written.
    """
    chosen = report_format or implied_format(path)
    if chosen is None:
        raise InputError(
            f"{path}: the name implies no format", f"end the name in one of {', '.join(SUFFIXES)}"
        )
    save(
        path,
        render_file(diagnosis, chosen, redact=redact)
        if chosen in FILES_ONLY
        else render_pieces(diagnosis, chosen, redact=redact),
    )


def save(path: str, content: bytes | Iterable[str]) -> None:
    """Write text as UTF-8, or bytes, packed if the name ends in ``.gz``.

    Raises :class:`InputError` where the file cannot be written.
    """
    try:
        if isinstance(content, bytes):
            packed = path.lower().endswith(".gz")
            Path(path).write_bytes(gzip.compress(content, mtime=0) if packed else content)
            return
        with Path(path).open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.writelines(content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path} cannot be written: {reason}", "name a file in a folder that exists and may be written"
        ) from error
