"""Read traces for a command: the options that say how, and the pipeline with a bar of progress."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from tracedoc.cli.completion import folders
from tracedoc.cli.output import progress_on_terminal, quiet_option
from tracedoc.errors import InputError, TracedocError, failure
from tracedoc.run.remote import is_remote

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.facts.measure_run import Measurements
    from tracedoc.pipeline import Options

_LARGEST_DIAGNOSIS = 256 << 20


def step_range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Return the first and last step of ``3-10``, or of one step; an option's callback."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise click.BadParameter(f"{value!r} is no range of steps such as 3-10", ctx, param)
    return int(match[1]), int(match[2] or match[1])


def names_in(text: str) -> tuple[str, ...]:
    """The names between the commas of an option's text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def byte_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of ``500MB`` or ``2GiB``, or of a plain number; an option's callback."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kMGT])(i?)B)?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size such as 500MB or 2GiB", ctx, param)
    power = "kMGT".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


_OPTIONS = (
    click.option("--steps", callback=step_range, metavar="A-B", help="Take only these steps, as 3-10."),
    click.option(
        "--cycle", type=int, metavar="N", help="Profiler cycle to take. [newest common to most ranks]"
    ),
    click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes. [one a core]"),
    click.option(
        "--executor", metavar="WHERE", help="Read on other machines: dask://HOST:PORT, dask://local, mpi."
    ),
    click.option("--strict", is_flag=True, help="Treat damaged files as errors."),
    click.option(
        "--max-bytes",
        callback=byte_count,
        metavar="SIZE",
        help="Refuse a file with more JSON, as 2GB. [gzip: 100 times its size]",
    ),
    click.option("--no-cache", is_flag=True, help="Read again what was measured before, and keep nothing."),
    quiet_option,
    click.option("--debug", is_flag=True, help="Show where errors come from."),
)


class Reading(TypedDict):
    """How traces are read: the fields of :class:`tracedoc.pipeline.Options` that several commands have."""

    steps: tuple[int, int] | None
    cycle: int | None
    jobs: int | None
    executor: str | None
    strict: bool
    max_bytes: int | None
    cache: bool


def reading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how traces are read; the command gets them as ``reading``."""

    @wraps(command)
    def with_reading(*, debug: bool, no_cache: bool, **values: Any) -> None:
        from tracedoc.executors.run import keep_until_given_back

        show_debug(debug)
        keep_numpy_to_one_thread()
        keep_until_given_back()
        values["cache"] = not no_cache
        reading = {name: values.pop(name) for name in Reading.__annotations__}
        command(reading=reading, **values)

    for option in reversed(_OPTIONS):
        with_reading = option(with_reading)
    return with_reading


def keep_numpy_to_one_thread() -> None:
    """Have numpy start no threads for linear algebra, of which there is none here; call before its import.

    A process of one thread can fork its workers, which is the fastest way to start them.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def run_pipeline(paths: tuple[str, ...], options: Options) -> Diagnosis:
    """Diagnose with a progress bar on a terminal; raise :class:`InputError` for what is no trace path."""
    from tracedoc.pipeline import diagnose as diagnose_paths

    for path in paths:
        _check_input(path)
    try:
        with progress_on_terminal() as progress:
            return diagnose_paths(paths, options, progress=progress)
    except (TracedocError, MemoryError):
        raise
    except Exception as error:
        raise TracedocError(
            f"a fault of tracedoc's ended the diagnosis: {failure('the diagnosis', error)}",
            "--debug shows where; please report it",
        ) from error


def run_measurement(paths: tuple[str, ...], options: Options) -> Measurements:
    """Measure a run with a progress bar on a terminal; raise :class:`InputError` for what is no trace."""
    from tracedoc.pipeline import measure

    for path in paths:
        _check_input(path)
    with progress_on_terminal() as progress:
        return measure(paths, options, progress=progress).measurements


def show_debug(debug: bool) -> None:
    """Send the log to stderr if asked."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")


def _check_input(path: str) -> None:
    if path == "-" or is_remote(path):
        return
    if not os.path.exists(path):
        raise InputError(f"{path or repr(path)} does not exist", "give a trace file or the folder of a run")
    if os.path.isfile(path) and is_diagnosis(path):
        shown = shlex.quote(path)
        raise InputError(f"{path} is a diagnosis, not a trace", f"to show it: tracedoc report {shown}")


def is_diagnosis(path: str) -> bool:
    """Whether a file is a diagnosis that tracedoc wrote, as JSON or as a page."""
    try:
        return holds_diagnosis(path) and diagnosis_in(path) is not None
    except (OSError, TracedocError):
        return False  # the reader will say what is wrong with it


def diagnosis_in(path: str) -> Diagnosis:
    """The diagnosis that a file holds, as JSON or a page; :class:`InputError` names the file for another."""
    if os.path.getsize(path) > _LARGEST_DIAGNOSIS:
        raise InputError(f"{path} is larger than a diagnosis gets", "give the folder of its run")
    with open(path, "rb") as file:
        return diagnosis_of(file.read(), path)


def diagnosis_of(data: bytes, name: str) -> Diagnosis:
    """The diagnosis that data hold, as JSON or a page; :class:`InputError` says ``name`` for others."""
    from tracedoc.diagnosis_json import diagnosis_in_page, from_json, is_page

    try:
        return from_json(diagnosis_in_page(data) if is_page(data) else data)
    except InputError as error:
        raise InputError(f"{name}: {error.message}", error.hint) from error


def run_or_diagnosis(path: str, options: Options) -> Diagnosis:
    """The diagnosis of a run, or the one that a file holds: JSON, or a page."""
    is_one = os.path.isfile(path) and holds_diagnosis(path)
    return diagnosis_in(path) if is_one else run_pipeline((path,), options)


def holds_diagnosis(path: str) -> bool:
    """True for a file that begins as a diagnosis or a page does, whole and of this version or not."""
    from tracedoc.diagnosis_json import is_page

    try:
        with open(path, "rb") as file:
            head = file.read(200)
    except OSError:
        return False
    begins = re.match(rb'\s*\{\s*"(summary|schema_version|tool_version)"', head)
    return begins is not None or is_page(head)


Command = TypeVar("Command", bound=Callable[..., object])


def rules_option(text: str = "Add rules of your own.") -> Callable[[Command], Command]:
    """The option ``--rules DIR``, which may be given several times, with ``text`` as its help."""
    return click.option(
        "--rules", "rule_directories", multiple=True, metavar="DIR", shell_complete=folders, help=text
    )
