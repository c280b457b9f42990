"""Rewrite the command outputs that the documents show, docs/facts.md and docs/rules/.

A document shows one between ``<!-- output: tracedoc ... -->`` and ``<!-- end of output -->``. Run from the
root of the repository: ``.venv/bin/python docs/refresh.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = re.compile(
    r"(<!-- output: tracedoc (?P<arguments>.*?) -->\n)(?P<shown>.*?)(<!-- end of output -->)", re.S
)


def documents() -> list[Path]:
    """Return every Markdown document of the repository that users or contributors read."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def output_of(arguments: str) -> str:
    """Return what ``tracedoc ARGUMENTS`` writes to standard output, without colours, 100 columns wide."""
    done = subprocess.run(
        [sys.executable, "-m", "tracedoc", *shlex.split(arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def refreshed(text: str) -> str:
    """Return a document's text with every shown output made anew."""
    return OUTPUT.sub(
        lambda match: f"{match[1]}```text\n{output_of(match['arguments'])}\n```\n{match[4]}", text
    )


if __name__ == "__main__":
    for made in ("docs/facts_page.py", "docs/rule_pages.py"):
        subprocess.run([sys.executable, made], cwd=REPOSITORY, check=True)
    for document in documents():
        document.write_text(refreshed(document.read_text(encoding="utf-8")), encoding="utf-8")
