"""Make everything anew that is made from the code and kept: ``make refresh``; then read what changed.

These are the JSON schemas, the golden files of the tests, and the outputs that documents show between
``<!-- output: tracedoc ... -->`` and ``<!-- end of output -->``.
"""

from __future__ import annotations

import json
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
    """What ``tracedoc ARGUMENTS`` writes to standard output, without colours, 100 columns wide.

    Arguments that end in ``| head -N`` give the first N lines of it.
    """
    arguments, _, most = arguments.partition(" | head -")
    done = subprocess.run(
        [sys.executable, "-m", "tracedoc", *shlex.split(arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()[: int(most) if most else None])


def refreshed(text: str) -> str:
    """Return a document's text with every shown output made anew."""
    return OUTPUT.sub(
        lambda match: f"{match[1]}```text\n{output_of(match['arguments'])}\n```\n{match[4]}", text
    )


def schemas() -> dict[Path, str]:
    """The text of each JSON schema that is kept, by its file."""
    from tracedoc.diagnosis_json import json_schema
    from tracedoc.judge.load import rule_schema

    return {
        REPOSITORY / "rules" / "rule.schema.json": json.dumps(rule_schema(), indent=1) + "\n",
        REPOSITORY / "tracedoc" / "schema" / "diagnosis-2.json": json_schema(),
    }


if __name__ == "__main__":
    for file, text in schemas().items():
        file.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tests.golden"], cwd=REPOSITORY, check=True)
    for document in documents():
        document.write_text(refreshed(document.read_text(encoding="utf-8")), encoding="utf-8")
