"""Write the golden files again: ``python -m tests.golden``, from the root of the repository.

``tests/report/golden`` holds hand-made diagnoses, ``tests/golden_answers`` what ``tracedoc diagnose`` prints
of every sample and of six real traces.
"""

from __future__ import annotations

from pathlib import Path

from tests.example_diagnoses import DIAGNOSES
from tracedoc.pipeline import Options, diagnose
from tracedoc.report.terminal import render_text
from tracedoc.report.view import build_view

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


def runs() -> dict[str, Path]:
    """Return the folder of each run that has a golden file and is here."""
    samples = {path.name: path for path in sorted(SAMPLES.iterdir()) if path.is_dir() and path.name[0] != "_"}
    return samples | {name: REAL / name for name in REAL_RUNS if (REAL / name).is_dir()}


def answer(folder: Path) -> str:
    """Return what is printed of a run; the name of the folder stands for its path."""
    return render_text(
        build_view(diagnose([folder], Options(cache=False))),
        next_command=f"tracedoc diagnose {folder.name} -o report.html",
    )


def shown(name: str) -> str:
    """Return what is printed of a hand-made diagnosis."""
    view = build_view(DIAGNOSES[name]())
    return render_text(view, next_command="tracedoc diagnose runs/a -o report.html")


if __name__ == "__main__":
    for name in HAND_MADE:
        (ROOT / "tests" / "report" / "golden" / f"{name}.txt").write_text(shown(name), encoding="utf-8")
    folder = ROOT / "tests" / "golden_answers"
    folder.mkdir(exist_ok=True)
    for name, path in runs().items():
        (folder / f"{name}.txt").write_text(answer(path), encoding="utf-8")
