"""Ask HolisticTraceAnalysis, or its successor of the same module name, about traces; answer in JSON.

Runs in the peer's own environment: ``ask_peer.py breakdown FILE``, ``ask_peer.py stragglers DIRECTORY`` or
``ask_peer.py ranks DIRECTORY``. The answer is the last line of standard output.
"""

from __future__ import annotations

import json
import os
import sys

# Whole microseconds would hide differences of definition behind rounding.
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"


def main(question: str, path: str) -> None:
    from hta.trace_analysis import TraceAnalysis

    try:
        if question == "breakdown":
            analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=True)
            temporal = analysis.get_temporal_breakdown(visualize=False).iloc[0]
            overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
            answer = {name: float(temporal[name]) for name in temporal.index if name != "rank"}
            answer["overlap_pctg"] = float(overlap["comp_comm_overlap_pctg"])
        else:
            analysis = TraceAnalysis(trace_dir=path, include_last_profiler_step=True)
            answer = {"ranks": sorted(int(rank) for rank in analysis.t.get_all_traces())}
            if question == "stragglers":
                answer["stragglers"] = [int(rank) for rank in analysis.get_potential_stragglers()]
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
