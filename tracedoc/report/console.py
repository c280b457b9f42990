"""The console that a text is laid out on: a terminal of some width, or a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 100
"""Columns where the width is not known."""


def text_console(width: int, *, color: bool) -> Console:
    """Return a console that keeps what is printed; ``width`` 0 means a pipe.

    Without ``color`` no escape sequence is printed. Nothing is taken for markup or an emoji: names come from
    files.
    """
    return Console(
        file=StringIO(),
        width=width or PIPE_WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def heading(console: Console, title: str, rest: str = "") -> None:
    """Print the heading of a part, with words beside it."""
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {rest}" if rest else "", "dim")))


def printed_text(console: Console, next_command: str) -> str:
    """Return what was printed on a console of :func:`text_console`, and the next command as its last line."""
    console.print()
    console.print(Text.assemble(("next: ", "dim"), (next_command, "bold")), soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
