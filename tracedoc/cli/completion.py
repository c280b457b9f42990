"""``tracedoc completion``: the script that lets a shell complete commands."""

from __future__ import annotations

import click

from tracedoc.errors import TracedocError


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    Examples:
      tracedoc completion bash >> ~/.bashrc
      tracedoc completion zsh >> ~/.zshrc
      tracedoc completion fish > ~/.config/fish/completions/tracedoc.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise TracedocError(f"no completion for {shell}", "use bash, zsh or fish")
    click.echo(kind(ctx.find_root().command, {}, "tracedoc", "_TRACEDOC_COMPLETE").source())
