"""Ask HolisticTraceAnalysis about traces: a script of its own, run in a process of its own.

``hta_side.py FILE...`` writes one line of JSON for each file: its temporal breakdown in milliseconds, or the
error. It imports nothing of tracedoc, so that any Python that has HTA can run it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version


def breakdown(path: str) -> dict[str, float | str | None]:
    """HTA's breakdown of one file in ms and its overlap, 0 to 1, the last profiler step included."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=True)
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    percent = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    found: dict[str, float | str | None] = {
        ours: float(times[theirs]) / 1000
        for ours, theirs in (
            ("span_ms", "kernel_time(us)"),
            ("compute_ms", "compute_time(us)"),
            ("non_compute_ms", "non_compute_time(us)"),
            ("idle_ms", "idle_time(us)"),
        )
    }
    return found | {"overlap_frac": percent / 100 if percent == percent else None}


def main(paths: list[str]) -> None:
    """Answer for each file, one line each, as soon as it is known."""
    # Whole microseconds would hide differences of definition behind rounding.
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what HTA prints is no answer
    try:
        answers.write(json.dumps({"version": version("HolisticTraceAnalysis")}) + "\n")
        import hta.trace_analysis  # noqa: F401
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}) + "\n")
        return
    for path in paths:
        try:
            answer = breakdown(path)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
