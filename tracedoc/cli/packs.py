"""The option by which a command takes rule packs beside tracedoc's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from tracedoc.cli.completion import folders

Command = TypeVar("Command", bound=Callable[..., object])


def rules_option(text: str = "Add rules of your own.") -> Callable[[Command], Command]:
    """Return what adds ``--rules DIR``, which may be given several times, with ``text`` as its help."""
    return click.option(
        "--rules", "rule_directories", multiple=True, metavar="DIR", shell_complete=folders, help=text
    )
