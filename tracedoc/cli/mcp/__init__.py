"""``tracedoc mcp``: the answers of the other commands as tools of an agent."""

from __future__ import annotations

import select
import sys

import click

from tracedoc.cli.completion import folders
from tracedoc.errors import TracedocError, how_to_install


@click.command(short_help="Serve answers to an agent (Model Context Protocol, stdio).")
@click.argument("allowed", metavar="[FOLDER]...", nargs=-1, shell_complete=folders)
@click.option(
    "--allow-run", is_flag=True, help="Allow the agent to start training commands (tools collect and try)."
)
@click.option("--redact/--no-redact", default=True, help="Hide host names and absolute paths. [yes]")
def mcp(allowed: tuple[str, ...], allow_run: bool, redact: bool) -> None:
    """Serve diagnoses to an agent over stdin and stdout, in the Model Context Protocol.

    An agent's program starts this command itself. Tools read runs in the
    FOLDERs and below, wherever links lead, and nothing else; without one,
    in the folder where the command starts. They change nothing: to capture a
    job and to try fixes needs --allow-run, by which the agent may start any
    command as you.

    \b
    Examples:
      tracedoc mcp runs
      claude mcp add tracedoc -- tracedoc mcp "$PWD/runs"
      tracedoc mcp runs --allow-run
    """
    from tracedoc.cli.mcp.tools import Tools
    from tracedoc.cli.reading import keep_numpy_to_one_thread

    keep_numpy_to_one_thread()
    tools = Tools(allowed or (".",), redact=redact, is_client_gone=has_hung_up)
    try:
        from tracedoc.cli.mcp.server import server_of
    except ImportError as error:
        raise TracedocError(f"what serves agents is not installed: {error}", how_to_install("mcp")) from None
    server_of(tools, allow_run=allow_run).run("stdio")


def has_hung_up() -> bool:
    """True once the client has closed its end of stdin."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
