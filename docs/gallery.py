"""Write the gallery of the site: by symptom, what tracedoc says of every sample run, with figure and page.

``.venv/bin/python docs/gallery.py build/gallery [SAMPLE...]``; ``make docs`` does it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

import tracedoc
from tracedoc.diagnosis import Diagnosis
from tracedoc.report.render import render_pieces, write_report
from tracedoc.report.texts import one_line

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLES = REPOSITORY / "sample_traces"
HEALTHY = "Nothing is wrong, or nothing that is worth a change"


def samples() -> list[str]:
    """Return the names of all sample runs."""
    return sorted(path.parent.name for path in SAMPLES.glob("*/README.md"))


def write_gallery(folder: Path, names: list[str]) -> None:
    """Write ``gallery.md``, each sample under the symptom of its first finding, and its figure and page."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {one["symptom"]: [] for one in _symptoms()} | {HEALTHY: []}
    for name in names:
        diagnosis = tracedoc.diagnose(SAMPLES / name)
        found[symptom_of(diagnosis)] += _entry(folder, name, diagnosis)
    lines = [
        "# Gallery of answers",
        "",
        "By what you see of a job: what `tracedoc diagnose` says of the sample runs of the repository, made",
        "with this version. The synthetic ones are of GPUs; those of CPUs were recorded from small jobs.",
        "[The list of rules](rules/README.md) has those that may explain a symptom without a picture here.",
        "",
    ]
    for symptom, entries in found.items():
        lines += [f"## {symptom}", "", *entries] if entries else []
    (folder / "gallery.md").write_text("\n".join(lines), encoding="utf-8")


def symptom_of(diagnosis: Diagnosis) -> str:
    """The first symptom that the first finding of a rule may explain."""
    findings = [one for one in diagnosis.findings if one.topic != "capture" and "." not in one.rule_id]
    for finding in findings[:1]:
        for one in _symptoms():
            if finding.rule_id in one["rules"] or finding.topic == one.get("topic"):
                return str(one["symptom"])
    return HEALTHY


def _symptoms() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((REPOSITORY / "docs" / "symptoms.yaml").read_text())
    return found


def _entry(folder: Path, name: str, diagnosis: Diagnosis) -> list[str]:
    title = (SAMPLES / name / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    write_report(diagnosis, str(folder / f"{name}.html"))
    write_report(diagnosis, str(folder / f"{name}.png"))
    command = f"tracedoc diagnose sample_traces/{name}"
    answer = "".join(render_pieces(diagnosis, "text", redact=True, command=command)).rstrip("\n")
    return [
        f"### {title}",
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
