"""Write tests for rules: build traces by hand or as lanes, and run the cases of a rule."""

from tracedoc.testing.builder import TraceBuilder
from tracedoc.testing.lanes import LanesError, parse_lanes

__all__ = ["LanesError", "TraceBuilder", "parse_lanes"]
