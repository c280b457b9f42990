"""Send results to the files and streams that the user named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import click

from tracedoc.cli.completion import files
from tracedoc.errors import InputError, TracedocError

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.pipeline import ProgressEvent
    from tracedoc.report.sheet import Sheet

Command = TypeVar("Command", bound=Callable[..., object])

WIDEST = 110
"""Columns beyond which text gets hard to read."""

SHEET_FORMATS = {
    **{".txt": "text", ".json": "json", ".md": "markdown", ".html": "html", ".htm": "html"},
    **{".png": "png", ".svg": "svg", ".pdf": "pdf"},
}
"""The format of a comparison or history that the suffix of a file name implies."""

_REDRAW_S = 0.1
_QUIET = "tracedoc.quiet"


def format_option(*others: str) -> Callable[[Command], Command]:
    """Return the option ``-f`` of every command that prints data: text, json, and ``others``."""
    return click.option(
        "-f",
        "--format",
        "report_format",
        type=click.Choice(["text", "json", *others]),
        help="Format of stdout. [text]",
    )


def output_option(suffixes: str) -> Callable[[Command], Command]:
    """Return the option ``-o``; ``suffixes`` says in words which names it writes."""
    return click.option(
        "-o",
        "--output",
        "outputs",
        multiple=True,
        metavar="FILE",
        shell_complete=files,
        help=f"Write {suffixes}; - is stdout.",
    )


def quiet_option(command: Command) -> Command:
    """Add ``-q``: what is said beside the result, on stderr, is left out; errors are not."""
    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=_keep_quiet,
        help="Say nothing on stderr but errors.",
    )(command)


def _keep_quiet(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    context.meta[_QUIET] = wanted


def is_quiet() -> bool:
    """True where the command that runs was given ``-q``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def say(message: str) -> None:
    """Write a line beside the result to stderr, unless ``-q`` was given."""
    if not is_quiet():
        click.echo(message, err=True)


_OPTIONS = (
    format_option("html", "markdown", "sarif", "junit", "github", "codequality"),
    output_option(".html, .json, .txt, .md, .sarif, .xml (JUnit), .perfetto.json.gz, .png, .svg or .pdf"),
    click.option("--verdicts", is_flag=True, help="List what every rule said, with its numbers."),
    click.option(
        "--top",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="List the N kernels that lose most, and the N collectives that take most time.",
    ),
    click.option(
        "--redact/--no-redact",
        default=None,
        help="Hide host names and absolute paths. [in all but text and json]",
    ),
    click.option("--open", "browse", is_flag=True, help="Show the page in a browser."),
)


def report_options(command: Command) -> Command:
    """Add the options that say which reports of a diagnosis go where."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def json_text(value: object) -> str:
    """Return a value of ours as indented JSON with a final newline."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a report goes; ``-`` is stdout."""

    path: str
    format: str


def targets(
    report_format: str | None,
    outputs: Sequence[str],
    inputs: Sequence[str],
    suffixes: Mapping[str, str] | None = None,
) -> tuple[Target, ...]:
    """The places to write to, each with its format; without ``-o`` that is stdout.

    The suffix of a file decides its format, as ``suffixes`` say (those of a diagnosis unless given); ``-f``
    is for stdout and for other names. Raises :class:`InputError` early, before the work, for a file that
    would replace an input.
    """
    from tracedoc.report import render

    if suffixes is None:
        suffixes = render.SUFFIXES
    found = []
    used = False
    for path in outputs or ("-",):
        if path != "-":
            _check_file(path, inputs)
        implied = None if path == "-" else render.implied_format(path, suffixes)
        used = used or implied is None
        chosen = implied or report_format or ("text" if path == "-" else None)
        if chosen is None:
            *most, last = suffixes
            raise InputError(
                f"{path}: the name implies no format",
                f"end the name in {', '.join(most)} or {last}, or add -f",
            )
        found.append(Target(path, chosen))
    if report_format and not used:
        raise InputError(f"-f {report_format} has no effect: the names given to -o decide", "add: -o -")
    return tuple(found)


def write(
    diagnosis: Diagnosis,
    places: Sequence[Target],
    *,
    command: str,
    run: str = "RUN",
    verdicts: bool = False,
    top: int = 0,
    redact: bool | None = None,
    browse: bool = False,
) -> None:
    """Write every report of a diagnosis; with ``browse`` show the page, from a temporary file if need be."""
    from tracedoc.report.render import FILES_ONLY, render_file, render_pieces

    pages = [place.path for place in places if place.format == "html" and place.path != "-"]
    if browse and not pages:
        from tempfile import mkstemp

        handle, page = mkstemp(prefix="tracedoc-", suffix=".html")
        os.close(handle)
        pages = [page]
        places = (*places, Target(page, "html"))
    page_written = any(place.format == "html" for place in places)

    def rendered(report_format: str, width: int, color: bool) -> bytes | Iterable[str]:
        if report_format in FILES_ONLY:
            return render_file(diagnosis, report_format, redact=redact)
        return render_pieces(
            diagnosis,
            report_format,
            redact=redact,
            command=command,
            run=run,
            page_written=page_written,
            verdicts=verdicts,
            top=top,
            width=width,
            color=color,
        )

    drawn = any(place.format == "perfetto" for place in places)
    send(places, rendered, diagnosis.summary, {"perfetto": _where_to_look(diagnosis)} if drawn else {})
    if browse:
        import webbrowser

        if not webbrowser.open(Path(pages[0]).absolute().as_uri()):
            raise TracedocError("no browser can be opened here", f"open {pages[0]} in one")


def _where_to_look(diagnosis: Diagnosis) -> str:
    from tracedoc.report.clock import place_to_look
    from tracedoc.report.view import build_view

    place = place_to_look(build_view(diagnosis))
    return f": open it at https://ui.perfetto.dev{f', and look at {place}' if place else ''}"


def are_shared(places: Sequence[Target]) -> bool:
    """Whether others read some of it: then hosts and absolute paths are hidden, as in a diagnosis."""
    return any(place.format not in ("text", "json") for place in places)


def write_sheet(places: Sequence[Target], value: object, sheet: Sheet, shared: Sheet) -> None:
    """Write a sheet to its places; ``shared`` is the one without hosts, ``value`` what JSON holds."""

    def rendered(chosen: str, width: int, color: bool) -> bytes | Iterable[str]:
        from tracedoc.report.sheet import sheet_markdown, sheet_text

        if chosen in ("text", "markdown"):
            return [sheet_text(sheet, width) if chosen == "text" else sheet_markdown(shared)]
        if chosen == "json":
            return [json_text(value)]
        if chosen == "html":
            from tracedoc.report.page import sheet_page

            return [sheet_page(shared)]
        from tracedoc.report.figures import sheet_figure

        return sheet_figure(shared, chosen)

    send(places, rendered, sheet.answer)


def send(
    places: Sequence[Target],
    rendered: Callable[[str, int, bool], bytes | Iterable[str]],
    summary: str,
    remarks: Mapping[str, str] | None = None,
) -> None:
    """Write everything to its place, what is no text last; off stdout, say the answer on stderr.

    ``rendered`` returns the text for a format, a width (0 off a terminal), and with colours or without, in
    pieces: that of many ranks is never held as a whole. ``remarks`` are what to say of a file by its format.
    """
    from tracedoc.report.render import FILES_ONLY, save
    from tracedoc.report.texts import one_line, plain

    texts = [place for place in places if place.format not in FILES_ONLY]
    for place in texts:
        if place.path == "-":
            screen = sys.stdout.isatty()
            for text in rendered(place.format, text_width() if screen else 0, screen and wants_color()):
                assert isinstance(text, str)
                to_stdout(text, place.format)
        else:
            save(place.path, rendered(place.format, 0, False))
    if all(place.path != "-" for place in places):
        say(one_line(plain(summary)))
    for place in (*texts, *(place for place in places if place.format in FILES_ONLY)):
        if place.format in FILES_ONLY:
            save(place.path, rendered(place.format, 0, False))
        if place.path != "-":
            say(f"wrote {place.path}{(remarks or {}).get(place.format, '')}")


def to_stdout(text: str | bytes, report_format: str = "text") -> None:
    """Write a result to stdout: files in UTF-8, text in what the terminal can show."""
    encoding = "utf-8" if report_format != "text" else (sys.stdout.encoding or "utf-8")
    try:
        # The name of a file may hold bytes that are no text.
        errors = "replace" if encoding == "utf-8" else "strict"
        data = text if isinstance(text, bytes) else text.encode(encoding, errors)
    except UnicodeEncodeError:
        from tracedoc.report.terminal import to_ascii

        data = to_ascii(str(text)).encode("ascii")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise InputError(
            f"the result cannot be written: {error.strerror}", "write it elsewhere: -o FILE"
        ) from None


def show(value: object, report_format: str | None, text: Callable[[], str]) -> None:
    """Write a result to stdout: as JSON if that was asked for, else as text."""
    if report_format == "json":
        to_stdout(json_text(value), "json")
    else:
        to_stdout(text())


def in_columns(rows: Sequence[Sequence[str]], *, numbers: Container[int] = ()) -> list[str]:
    """Rows as lines, each column as wide as its widest cell; those with ``numbers`` end in one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [
            f"{cell:>{width}}" if place in numbers else f"{cell:{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def drop_stdout() -> None:
    """Redirect stdout to the null device: Python flushes it at exit, and would complain then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wants_color() -> bool:
    """True where stdout shows colours; https://no-color.org is honoured."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def text_width() -> int:
    """Return the columns to use on the terminal."""
    import shutil

    return max(40, min(WIDEST, shutil.get_terminal_size((100, 24)).columns))


@contextmanager
def progress_on_terminal() -> Iterator[Callable[[ProgressEvent], None] | None]:
    """Yield a function that draws progress on stderr; ``None`` with ``-q``, or where it is no terminal."""
    if not sys.stderr.isatty() or is_quiet():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Drawn here, not by a thread of the bar's own: workers are forked while there is but one thread.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("reading", total=None)
        drawn = 0.0

        def show(event: ProgressEvent) -> None:
            nonlocal drawn
            ranks = f"{event.done_ranks} of {event.total_ranks} ranks"
            bar.update(task, description=ranks, completed=event.done_bytes, total=event.total_bytes)
            if (now := monotonic()) - drawn >= _REDRAW_S:
                bar.refresh()
                drawn = now

        yield show


def _check_file(path: str, inputs: Sequence[str]) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder", "name a file in it")
    if not os.path.isdir(folder):
        raise InputError(
            f"{path} cannot be written: there is no folder {folder}", f"create it: mkdir -p {folder}"
        )
    for source in inputs:
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise InputError(f"{path} is an input and would be replaced", "give -o another name")
