"""Write the golden files again; ``make refresh`` does it, and everything else that is made from the code.

``tests/report/golden`` holds hand-made diagnoses as text and as what forges read, ``tests/golden_answers``
what ``tracedoc diagnose`` prints of every sample and of six real traces, of two samples what forges read, and
of three the outline of the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.example_diagnoses import DIAGNOSES
from tests.known_runs import diagnosis_of
from tests.page_outline import outline
from tracedoc.diagnosis import Diagnosis
from tracedoc.report.render import render
from tracedoc.report.terminal import render_text
from tracedoc.report.view import build_view

REFRESH = "run make refresh, and read what changed"
"""What a test says whose golden file differs."""

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "sample_traces"
REAL = ROOT.parent / "shared" / "traces"
"""Real traces are too large for the repository; where they are absent their files cannot be made again."""

REAL_RUNS = (
    "ddp_resnet_a100_2rank_r0",
    "ddp_resnet_mi300_8rank_r0",
    "dlrm_8rank_v100",
    "dlrm_v100_2rank_r1",
    "fsdp2_h100_4rank",
    "published_pipeline_8rank",
)
HAND_MADE = ("sharded", "healthy", "cpu")
FOR_FORGES = {"md": "markdown", "sarif": "sarif", "xml": "junit", "codequality.json": "codequality"}
"""The suffix of a golden file, and its format."""
OUTLINED = ("cpu_ddp_straggler", "synthetic_ddp_tiny_batch", "synthetic_zero3_gather_stall")
"""Samples of whose pages the outline is kept: two ranks on CPUs, one GPU, and sharded units."""
SHOWN_TO_FORGES = ("cpu_ddp_slow_metrics", "synthetic_fsdp2_healthy")
"""Samples whose answers are kept as forges read them: one with a line of its script, one without a fault."""


def runs() -> dict[str, Path]:
    """Return the folder of each run that has a golden file and is here."""
    samples = {path.name: path for path in sorted(SAMPLES.iterdir()) if path.is_dir() and path.name[0] != "_"}
    return samples | {name: REAL / name for name in REAL_RUNS if (REAL / name).is_dir()}


def answers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield suffixes and texts of the golden files of a run; the name of the folder stands for its path."""
    found = diagnosis_of(folder)
    yield (
        "txt",
        render_text(build_view(found), next_command=f"tracedoc diagnose {folder.name} -o report.html"),
    )
    if folder.name in SHOWN_TO_FORGES:
        yield from for_forges(found)
    if folder.name in OUTLINED:
        yield "outline", outline(render(found, "html"))


def for_forges(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield suffixes and texts of a diagnosis as forges read it."""
    for suffix, report_format in FOR_FORGES.items():
        yield suffix, render(diagnosis, report_format)


def shown(name: str) -> str:
    """Return what is printed of a hand-made diagnosis."""
    view = build_view(DIAGNOSES[name]())
    return render_text(view, next_command="tracedoc diagnose runs/a -o report.html")


if __name__ == "__main__":
    for name in HAND_MADE:
        page = outline(render(DIAGNOSES[name](), "html"))
        for suffix, text in (("txt", shown(name)), ("outline", page), *for_forges(DIAGNOSES[name]())):
            (ROOT / "tests" / "report" / "golden" / f"{name}.{suffix}").write_text(text, encoding="utf-8")
    folder = ROOT / "tests" / "golden_answers"
    folder.mkdir(exist_ok=True)
    for name, path in runs().items():
        for suffix, text in answers(path):
            (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8")
