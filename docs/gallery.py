"""Write the gallery of the site: what tracedoc says of every sample run, with its figure and its page.

``.venv/bin/python docs/gallery.py build/gallery [SAMPLE...]``; ``make docs`` does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tracedoc
from tracedoc.report.render import render_pieces, write_report
from tracedoc.report.texts import one_line

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLES = REPOSITORY / "sample_traces"


def samples() -> list[str]:
    """Return the names of all sample runs."""
    return sorted(path.parent.name for path in SAMPLES.glob("*/README.md"))


def write_gallery(folder: Path, names: list[str]) -> None:
    """Write ``gallery.md``, and a figure and a page for each sample."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Gallery of answers",
        "",
        "What `tracedoc diagnose` says of each sample run that the repository ships, made with this version.",
        "The synthetic ones are of GPUs; those of CPUs were recorded from small jobs.",
        "",
    ]
    for name in names:
        lines += _entry(folder, name)
    (folder / "gallery.md").write_text("\n".join(lines), encoding="utf-8")


def _entry(folder: Path, name: str) -> list[str]:
    title = (SAMPLES / name / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    diagnosis = tracedoc.diagnose(SAMPLES / name)
    write_report(diagnosis, str(folder / f"{name}.html"))
    write_report(diagnosis, str(folder / f"{name}.png"))
    command = f"tracedoc diagnose sample_traces/{name}"
    answer = "".join(render_pieces(diagnosis, "text", redact=True, command=command)).rstrip("\n")
    return [
        f"## {title}",
        "",
        f"> {one_line(diagnosis.summary)}",
        "",
        f"![Ranks on one clock, their budgets and their waits in {name}](gallery/{name}.png)",
        "",
        f"[The page](gallery/{name}.html)",
        "",
        f"<details markdown><summary>{command}</summary>",
        "",
        "```text",
        *(line.rstrip() for line in answer.splitlines()),
        "```",
        "",
        "</details>",
        "",
    ]


if __name__ == "__main__":
    write_gallery(Path(sys.argv[1]), sys.argv[2:] or samples())
