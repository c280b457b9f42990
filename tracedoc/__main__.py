"""Run the command line: ``tracedoc``, or ``python -m tracedoc``."""

import atexit
import gc
import sys

ALLOCATIONS = 250_000
"""The collector of cycles runs after so many new objects: to import what a command needs makes 50,000."""


def collect_seldom() -> None:
    """Let Python look for cycles seldom, and not once more as the process ends: a command drops few."""
    gc.set_threshold(ALLOCATIONS)
    atexit.register(gc.freeze)


def main() -> None:
    """Run a command and exit; an interrupt counts from the first import on."""
    collect_seldom()
    try:
        from tracedoc.cli import main as commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands(prog_name="tracedoc")


if __name__ == "__main__":
    main()
