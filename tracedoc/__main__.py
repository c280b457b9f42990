"""Run the command line: ``tracedoc``, or ``python -m tracedoc``."""

import sys


def main() -> None:
    """Run a command and exit; an interrupt counts from the first import on."""
    try:
        from tracedoc.cli import main as commands
    except KeyboardInterrupt:
        sys.exit(130)
    commands(prog_name="tracedoc")


if __name__ == "__main__":
    main()
