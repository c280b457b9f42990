"""Shell completion: the command that prints the script, and what a parameter completes to."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

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
    kind = get_completion_class(shell)
    if kind is None:
        raise TracedocError(f"no completion for {shell}", "use bash, zsh or fish")
    click.echo(kind(ctx.find_root().command, {}, "tracedoc", "_TRACEDOC_COMPLETE").source())


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave a parameter to the shell, which completes files and folders."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave a parameter to the shell, which completes folders."""
    return [CompletionItem(incomplete, type="dir")]
