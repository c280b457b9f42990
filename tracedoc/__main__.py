"""Run the command line: ``tracedoc``, or ``python -m tracedoc``."""

import atexit
import gc
import sys

ALLOCATIONS = 50_000
"""The collector of cycles runs after so many new objects: a command drops few in cycles, and ends soon."""


def main() -> None:
    """Run a command and exit; an interrupt counts from the first import on."""
    gc.set_threshold(ALLOCATIONS)
    atexit.register(gc.freeze)  # nothing is looked through once more as the process ends
    try:
        from tracedoc.cli import main as commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands(prog_name="tracedoc")


if __name__ == "__main__":
    main()
