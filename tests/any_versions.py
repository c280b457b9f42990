"""Hold that runs are diagnosed, shown and compared alike with any versions of what tracedoc needs.

``make oldest`` and ``make newest`` run it as ``python -m tests.any_versions``, without pytest: what the tests
themselves need would ask for versions of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import tracedoc
from tests.golden import ROOT, SAMPLES, answers

DIAGNOSED = (
    "cpu_ddp_slow_metrics",
    "cpu_ddp_straggler",
    "synthetic_fsdp2_fine_wrapping",
    "synthetic_fsdp2_healthy",
)
RUN = "sample_traces/cpu_ddp_straggler"
COMMANDS = (
    f"diagnose {RUN} -o FOLDER/page.html -o FOLDER/figure.png -o FOLDER/figure.svg",
    f"compare {RUN} sample_traces/cpu_ddp_healthy -o - -o FOLDER/change.html -o FOLDER/change.png",
    f"facts {RUN}",
    "plan --params 7e9 --gpus 4 --gpu A100",
    "rules check rules",
)
TABLES = ("steps", "ranks", "findings", "collectives", "kernels")


def main() -> None:
    """Try everything; the first thing that differs or fails ends the run."""
    print(*sorted(f"{found.name}=={found.version}" for found in distributions()))
    for name in DIAGNOSED:
        for suffix, text in answers(SAMPLES / name):
            golden = (ROOT / "tests" / "golden_answers" / f"{name}.{suffix}").read_text(encoding="utf-8")
            assert text == golden, f"{name}.{suffix} differs from its golden file:\n{text}"
    diagnosis = tracedoc.diagnose([ROOT / RUN])
    assert all(len(diagnosis.to_frame(table).columns) > 1 for table in TABLES)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            arguments = command.replace("FOLDER", folder).split()
            done = subprocess.run(
                [sys.executable, "-m", "tracedoc", *arguments],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"tracedoc {command}\n{done.stderr}"
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    assert len(sizes) == 5
    assert min(sizes.values()) > 10_000, sizes
    print("every answer, page, figure, table and comparison is as it should be")


if __name__ == "__main__":
    main()
