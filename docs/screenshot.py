"""Draw the heads of pages with headless Chromium: docs/report.png of a sample, docs/pages/ of other runs.

``.venv/bin/python docs/screenshot.py [NAME...]`` after the page or its words have changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SAMPLE = REPOSITORY / "sample_traces"


def simulated(kind: str, ranks: int, fault: tuple[str, int, float], **job: Any) -> Callable[[Path], Path]:
    """Return what writes the traces of a simulated job with one fault (name, rank, amount) into a folder."""

    def write(folder: Path) -> Path:
        from tests.simulated.machine import play
        from tests.simulated.programs import programs
        from tests.simulated.spec import Fault, Job
        from tests.simulated.traces import Capture, write_traces

        drawn = Job(1, kind, ranks, faults=(Fault(*fault),), **job)
        return write_traces(play(programs(drawn)), ranks, folder, Capture())

    return write


RUNS: dict[str, Callable[[Path], Path]] = {
    "report": lambda folder: SAMPLE / "synthetic_ddp_tiny_batch",
    "pages/straggler": simulated("ddp", 8, ("straggler-host", 5, 40.0), layers=12, steps=5),
    "pages/fsdp": lambda folder: SAMPLE / "synthetic_zero3_gather_stall",
    "pages/single-gpu": simulated("ddp", 1, ("loader", -1, 60.0), layers=12, steps=5),
    "pages/pipeline": simulated(
        "pipeline", 8, ("heavy-stage", 3, 1.6), stages=4, layers=8, micro_batches=8, kernels=4, steps=4
    ),
    "pages/64-ranks": simulated("ddp", 64, ("straggler-host", 61, 40.0), layers=12, steps=5),
}
"""What is drawn, by the name of the picture; sizes are in :data:`VIEWS`."""

VIEWS = {"-1280": (1280, 1250), "-390": (390, 1500)}
REPORT_VIEW = {"": (1100, 1350)}


def main() -> None:
    """Write the pictures, or say that there is no browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    names = sys.argv[1:] or list(RUNS)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=browser, args=["--disable-gpu"])
        for name in names:
            page = Path(scratch, name.replace("/", "-")).with_suffix(".html")
            run = RUNS[name](page.with_suffix(""))
            subprocess.run(
                [sys.executable, "-m", "tracedoc", "diagnose", run, "-q", "--no-cache", "-o", page],
                cwd=REPOSITORY,
                check=True,
            )
            for suffix, size in (REPORT_VIEW if name == "report" else VIEWS).items():
                draw(chromium, page, REPOSITORY / "docs" / f"{name}{suffix}.png", size)
        chromium.close()


def draw(chromium: Any, page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Write the head of a page as a PNG."""
    width, height = size
    tab = chromium.new_page(viewport={"width": width, "height": height})
    tab.goto(page.as_uri())
    picture.parent.mkdir(exist_ok=True)
    tab.screenshot(path=str(picture))
    tab.close()


if __name__ == "__main__":
    main()
