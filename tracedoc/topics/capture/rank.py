"""Facts of one rank about its capture: the complete steps, and the device."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact
from tracedoc.step.device import device_name
from tracedoc.timeline.activity import is_library_operator
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.script_code import place_around
from tracedoc.timeline.strategy_signs import shows_forward_only
from tracedoc.trace.columns import Kind
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


@rank_fact(unit="bool")
def forward_only(timeline: RankTimeline) -> Value:
    """Whether the capture shows forward passes alone (inference, evaluation).

    Operators of a library, or kernels that have one of their own for the backward pass, and neither backward
    passes nor updates of parameters. Unknown where nothing of all that was recorded.
    """
    found = shows_forward_only(timeline)
    return Unknown("neither operators nor kernels show whether the job trains") if found is None else found


@rank_fact(unit="text")
def unused_gpu(timeline: RankTimeline) -> Value:
    """The GPUs that the trace of a CPU run lists, on which nothing was launched, as "Tesla T4" or
    "8 Tesla T4"; "none" where it lists none, and where a GPU computes."""
    devices = timeline.trace.info.devices if timeline.is_cpu else ()
    if not devices:
        return "none"
    name = devices[0].name or "GPU"
    return f"{len(devices)} {name}" if len(devices) > 1 else name


@rank_fact(unit="text", needs=("cpu",))
def cpu_work_place(timeline: RankTimeline) -> Value:
    """Where the script calls the longest operator of a CPU run: the innermost function or named range."""
    trace = timeline.trace
    if not timeline.is_cpu:
        return Unknown("a GPU computes")
    rows = trace.rows_named(is_library_operator, Kind.CPU_OP)
    place = place_around(trace, int(rows[trace.dur_ns[rows].argmax()])) if rows.size else None
    return str(place) if place is not None else Unknown("no function of the script is in the trace")


@rank_fact(unit="text", values=("kernels", "operators"))
def compute_calls(timeline: RankTimeline) -> Value:
    """What compute consists of: "kernels", in a CPU trace "operators"."""
    return "operators" if timeline.is_cpu else "kernels"
