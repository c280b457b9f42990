"""``tracedoc report``: show a diagnosis again, without the traces."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import quiet_option, report_options, targets, write
from tracedoc.cli.reading import diagnosis_of
from tracedoc.errors import InputError


@click.command(short_help="Show a diagnosis that was saved as JSON or as a page.")
@click.argument("diagnosis", metavar="DIAGNOSIS", shell_complete=files)
@report_options
@quiet_option
def report(
    diagnosis: str,
    report_format: str | None,
    outputs: tuple[str, ...],
    verdicts: bool,
    top: int,
    redact: bool | None,
    browse: bool,
) -> None:
    """Show a diagnosis that was saved as JSON or as a page; - is stdin.

    \b
    Examples:
      tracedoc report diagnosis.json
      tracedoc report diagnosis.json -o report.html
      tracedoc report report.html
      tracedoc report diagnosis.json --open
      tracedoc report diagnosis.json -f json --redact > to-share.json
    """
    places = targets(report_format, outputs, () if diagnosis == "-" else (diagnosis,))
    result = diagnosis_of(_read(diagnosis), "standard input" if diagnosis == "-" else diagnosis)
    write(
        result,
        places,
        command="" if diagnosis == "-" else shlex.join(["tracedoc", "report", diagnosis]),
        verdicts=verdicts,
        top=top,
        redact=redact,
        browse=browse,
    )


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{path} does not exist", "write one with: tracedoc diagnose RUN -o diagnosis.json"
        ) from error
    except IsADirectoryError as error:
        raise InputError(
            f"{path} is a folder, not a diagnosis",
            f"write one with: tracedoc diagnose {shlex.quote(path)} -o diagnosis.json",
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}", "give a file that you may read"
        ) from error
