"""Draw docs/report.png, the head of the page of a sample run, with headless Chromium.

``.venv/bin/python docs/screenshot.py`` after the page or its words have changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = "sample_traces/synthetic_ddp_tiny_batch"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 1450


def main() -> None:
    """Write the picture, or say that there is no browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch, "report.html")
        subprocess.run(
            [sys.executable, "-m", "tracedoc", "diagnose", RUN, "-q", "-o", str(page)],
            cwd=REPOSITORY,
            check=True,
        )
        picture = REPOSITORY / "docs" / "report.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()],
            check=True,
            capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
