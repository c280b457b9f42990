"""Write tests for rules: build traces by hand or as lanes, and run the cases of a rule."""

from tracedoc.testing.builder import TraceBuilder
from tracedoc.testing.cases import CaseResult, load_cases, run_case_file
from tracedoc.testing.lane_words import LanesError
from tracedoc.testing.lanes import parse_lanes

__all__ = [
    "CaseResult",
    "LanesError",
    "TraceBuilder",
    "load_cases",
    "parse_lanes",
    "run_case_file",
]
