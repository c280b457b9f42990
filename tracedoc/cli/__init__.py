"""The command line: modules of commands, and how errors become words and exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import pairwise
from keyword import iskeyword
from typing import Any

import click

from tracedoc import __version__
from tracedoc.cli.output import drop_stdout
from tracedoc.errors import TracedocError

EXIT_CANNOT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE = 141  # 128 + SIGPIPE: the reader went away, which is no condition that was asked for

# What click 8.2 raises for a group without a command; 8.1 prints the help itself.
_HELP_INSTEAD: tuple[type[click.ClickException], ...] = tuple(
    getattr(click.exceptions, name) for name in ("NoArgsIsHelpError",) if hasattr(click.exceptions, name)
)


COMMANDS = (
    "collect", "diagnose", "compare", "history", "whatif", "try", "kernels", "plan", "report", "facts",
    "explain", "rules", "watch", "mcp", "completion",
)  # fmt: skip
"""What can be run; ``tracedoc.cli.NAME`` defines ``NAME``, and is imported where it is asked for."""

_ELSEWHERE = {"history": "compare", "kernels": "facts", "report": "diagnose", "try": "whatif"}
"""The modules of commands that stand with another, or whose name no module can have."""


class Commands(click.Group):
    """The group of commands; every error of ours ends as two lines on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, ``None`` for any other name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"tracedoc.cli.{_ELSEWHERE.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        return command

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        **extra: Any,
    ) -> None:
        """Run a command and exit; click's own handling would print other words and codes."""
        extra.pop("standalone_mode", None)
        _replace_closed_streams()
        try:
            with _one_process_of(sys.argv[1:] if args is None else args):
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except TracedocError as error:
            import logging

            logging.getLogger("tracedoc").debug("where this was raised", exc_info=True)
            _say(error.message, error.hint)
            code = EXIT_CANNOT
        except _HELP_INSTEAD as error:
            click.echo(error.format_message(), err=True)
            code = EXIT_CANNOT
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "tracedoc"
            message, nearest = _without_guess(error.format_message())
            _say(_sentence(message), f"did you mean: {nearest}" if nearest else f"see: {path} --help")
            code = EXIT_CANNOT
        except click.ClickException as error:
            _say(_sentence(error.format_message()))
            code = EXIT_CANNOT
        except (click.Abort, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        except MemoryError:
            _say("there is not enough memory for this", "read fewer files at once, with --jobs 1")
            code = EXIT_CANNOT
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named; a reader of stdout that went away ends it quietly."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            drop_stdout()
            ctx.exit(EXIT_PIPE)
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; an unknown one is answered with the nearest name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean: tracedoc {near[0]}" if near else "see: tracedoc --help"
            if os.path.exists(name):
                hint = f"did you mean: tracedoc diagnose {name}"
            raise TracedocError(f"no command {name!r}", hint)
        return super().resolve_command(ctx, args)


def _one_process_of(args: Sequence[str]) -> AbstractContextManager[None]:
    """A context that keeps a command for the first process of an MPI job; each would answer for itself."""
    if "--executor=mpi" not in args and ("--executor", "mpi") not in pairwise(args):
        return nullcontext()
    from tracedoc.executors.clusters import mpi_job

    return mpi_job()


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed; Python has ``None`` there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _say(message: str, hint: str = "") -> None:
    from tracedoc.report.texts import plain  # names in messages come from files

    click.echo(f"error: {plain(message)}", err=True)
    if hint:
        click.echo(f"hint: {plain(hint)}", err=True)


def _without_guess(message: str) -> tuple[str, str]:
    # click adds its guess to the message, in words that differ from version to version.
    match = re.fullmatch(
        r"(.+?)\.? \(?(?:Did you mean(?: one of)?|Possible options):? (.+?)\??\)?", message.strip()
    )
    return (match[1], match[2].replace("'", "")) if match else (message, "")


def _sentence(message: str) -> str:
    # click ends messages with a full stop, begins them with a capital, and lists choices on lines of their
    # own; ours do none of it.
    message = " ".join(message.split()).removesuffix(".")
    return message[:1].lower() + message[1:]


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from tracedoc.trace.reader import reader_name  # with numpy, which help needs not

        click.echo(f"tracedoc {__version__} ({reader_name()} reader)")
        context.exit()


@click.group(
    "tracedoc",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version.",
)
def main() -> None:
    """Say why multi-GPU training is slow, what to change, and how much it would give back.

    \b
    Examples:
      tracedoc collect -- torchrun train.py     capture a few steps of a job
      tracedoc diagnose runs/a                  the answer for a folder of traces
      tracedoc diagnose runs/a -o report.html   the same as a page
      tracedoc compare runs/a runs/b            what a change did
      tracedoc history runs                     the runs of a folder
      tracedoc whatif runs/a no-sync            the step with a change, replayed
      tracedoc try runs/a                       the job started again with its fixes
      tracedoc kernels runs/a                   what its kernels reach
      tracedoc plan --params 7B --gpu H100      which training strategy fits
      tracedoc explain exposed-communication    what a finding means, and its fixes
      tracedoc mcp runs                         the answers, for an agent

    \b
    Exit codes: 0 done, 1 a condition that you asked for holds (--fail-on,
    rules check, rules test), 2 could not do it.
    """
