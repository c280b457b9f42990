"""Facts of one rank about its capture: the complete steps, and the device."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.step.device import device_name
from tracedoc.timeline.build import RankTimeline
from tracedoc.values import Unknown, Value


@rank_fact(unit="count")
def complete_steps(timeline: RankTimeline) -> Value:
    """Steps that were captured whole: their own beginning and that of the next one are in the trace."""
    if timeline.activity is None:
        return Unknown("no device activity was captured")
    return len(timeline.complete_windows)


@rank_fact(unit="text")
def device(timeline: RankTimeline) -> Value:
    """Name of the analysed device as the driver gives it; "CPU" in a CPU trace."""
    return device_name(timeline)


@rank_fact(unit="text", values=("kernels", "operators"))
def compute_calls(timeline: RankTimeline) -> Value:
    """What compute consists of: "kernels", in a CPU trace "operators"."""
    return "operators" if timeline.is_cpu else "kernels"
