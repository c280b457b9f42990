"""Run the command line: ``python -m tracedoc``."""

from tracedoc.cli import main

main(prog_name="tracedoc")
