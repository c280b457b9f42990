"""Load traces with HolisticTraceAnalysis and print their temporal breakdown; runs in HTA's environment."""

from __future__ import annotations

import sys

from hta.trace_analysis import TraceAnalysis

if __name__ == "__main__":
    analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])))
    print(analysis.get_temporal_breakdown(visualize=False).to_string())
