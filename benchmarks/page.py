"""Measure what a page costs after the diagnosis: seconds, memory and bytes, of runs of several sizes.

``.venv/bin/python benchmarks/page.py [KEEP]``; with a folder, runs and pages are kept there.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.simulated.machine import play
from tests.simulated.programs import programs
from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture, write_traces
from tracedoc.diagnosis_json import from_json
from tracedoc.report.render import write_report

SIZES = ((8, 5), (64, 5))
"""Ranks and steps."""


def straggling(ranks: int, steps: int) -> Job:
    """Return a data-parallel job in which the host of the third rank from the end is slow."""
    late = Fault("straggler-host", rank=ranks - 3, amount=40.0)
    return Job(seed=1, kind="ddp", ranks=ranks, layers=12, steps=steps, faults=(late,))


def write_run(job: Job, folder: Path) -> Path:
    """Write the traces of a job."""
    return write_traces(play(programs(job)), job.ranks, folder, Capture())


def render_page(diagnosis: Path, page: Path) -> dict[str, float]:
    """Render a page from the JSON of a diagnosis, and say what that took; for a process of its own."""
    loaded = from_json(diagnosis.read_text(encoding="utf-8"))
    begin = time.perf_counter()
    write_report(loaded, str(page))
    return {
        "seconds": time.perf_counter() - begin,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "page_mb": page.stat().st_size / 1e6,
        "json_mb": diagnosis.stat().st_size / 1e6,
    }


def main() -> None:
    """Print a row of the table in README.md for each size."""
    if len(sys.argv) == 4 and sys.argv[1] == "render":
        print(json.dumps(render_page(Path(sys.argv[2]), Path(sys.argv[3]))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        for ranks, steps in SIZES:
            run, diagnosis = kept / f"ranks-{ranks}", kept / f"ranks-{ranks}.json"
            write_run(straggling(ranks, steps), run)
            subprocess.run(
                [sys.executable, "-m", "tracedoc", "diagnose", run, "-q", "--no-cache", "-o", diagnosis],
                check=True,
            )
            command = [sys.executable, __file__, "render", diagnosis, diagnosis.with_suffix(".html")]
            took = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"| {ranks} x {steps} | {took['seconds']:.2f} s | {took['peak_mb']:.0f} MB "
                f"| {took['page_mb']:.2f} MB | {took['json_mb']:.2f} MB |"
            )


if __name__ == "__main__":
    main()
