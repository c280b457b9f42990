"""Lanes of text become the traces that they draw."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tracedoc.testing import TraceBuilder
from tracedoc.testing.lane_words import LanesError
from tracedoc.testing.lanes import parse_lanes


def _spans(builder: TraceBuilder, category: str, start: str = "") -> list[tuple[float, float]]:
    """Return the intervals of the events, in ms since the first step began on the GPU."""
    events: list[dict[str, Any]] = json.loads(builder.to_json())["traceEvents"]
    return sorted(
        (round(e["ts"] / 1000 - 1_000_000, 6), round((e["ts"] + e["dur"]) / 1000 - 1_000_000, 6))
        for e in events
        if e.get("cat") == category and e["name"].startswith(start)
    )


def test_steps_repeat_and_a_first_kernel_closes_them() -> None:
    (one,) = parse_lanes("compute 10-60", ranks=1, steps=2)
    assert _spans(one, "kernel") == [(10, 60), (70, 110 + 10), (130, 130.001)]


def test_length_is_the_largest_end_or_what_is_set() -> None:
    (one,) = parse_lanes("step: 100\ncompute 0-60", ranks=1, steps=1)
    assert _spans(one, "kernel") == [(0, 60), (100, 100.001)]
    assert _spans(one, "user_annotation", "ProfilerStep") == [(-1, 99), (99, 199)]


def test_host_steps_are_the_gpu_steps_a_lead_earlier() -> None:
    (one,) = parse_lanes("lead: 20\ncompute 0-60 60-100", ranks=1, steps=1)
    assert _spans(one, "user_annotation", "ProfilerStep")[0] == (-20, 80)
    assert [start for start, _ in _spans(one, "cuda_runtime", "cudaLaunch")] == [-20, 40, 80]


def test_host_that_is_ahead_waits_while_the_gpu_is_busy() -> None:
    (one,) = parse_lanes("step: 100\ncompute 0-20 40-60", ranks=1, steps=1)
    # Launches at -1 and 39; the GPU idles from 20 to 40 and from 60 to 100.
    assert _spans(one, "cuda_runtime", "cudaEventSynchronize") == [(0, 20), (40, 60)]


def test_host_that_is_not_ahead_does_not_wait() -> None:
    (one,) = parse_lanes("lead: 0.01\ncompute 0-20 40-60", ranks=1, steps=1)
    assert _spans(one, "cuda_runtime", "cudaEventSynchronize") == []


def test_wait_leaves_room_for_launches() -> None:
    (one,) = parse_lanes("compute 0-60 60-100", ranks=1, steps=1)
    waits = _spans(one, "cuda_runtime", "cudaEventSynchronize")
    assert waits == [(0, 59), (59.02, 99), (99.02, 100.001)]


def test_every_host_step_holds_a_backward_node() -> None:
    (one,) = parse_lanes("compute 0-60", ranks=1, steps=3)
    nodes = _spans(one, "cpu_op", "autograd::engine::evaluate_function")
    assert len(nodes) == 4
    assert nodes[0] == (19, 39)


def test_launch_waits_for_the_loader() -> None:
    (one,) = parse_lanes("loader 0-40\ncompute 40-100", ranks=1, steps=1)
    assert _spans(one, "user_annotation", "enumerate") == [(0, 40), (100, 140)]
    assert [start for start, _ in _spans(one, "cuda_runtime", "cudaLaunch")] == [40, 140]


def test_host_step_begins_after_a_wait_at_the_end_of_the_one_before() -> None:
    (one,) = parse_lanes("compute 0-60\nsync 50-60", ranks=1, steps=1)
    assert _spans(one, "user_annotation", "ProfilerStep") == [(0, 60), (60, 120)]


def test_rank_section_replaces_lanes_of_the_same_name() -> None:
    first, second = parse_lanes(
        """
        compute    0-60
        allreduce  60-100
        loader     0-5
        rank 1:
        compute    0-90
        allreduce  90-100
        loader     -
        """,
        steps=1,
    )
    assert _spans(first, "kernel", "nccl") == [(60, 100)]
    assert _spans(second, "kernel", "nccl") == [(90, 100)]
    assert _spans(second, "kernel", "nvjet")[0] == (0, 90)
    assert _spans(second, "user_annotation", "enumerate") == []


def test_times_splits_an_interval_into_neighbours() -> None:
    (one,) = parse_lanes("compute 0-60 x3", ranks=1, steps=1)
    assert _spans(one, "kernel")[:3] == [(0, 20), (20, 40), (40, 60)]


def test_length_leaves_gaps_between_the_parts() -> None:
    (one,) = parse_lanes("compute 0-30 x3 5us", ranks=1, steps=1)
    assert _spans(one, "kernel")[:3] == [(0, 0.005), (10, 10.005), (20, 20.005)]


def test_size_is_the_whole_message() -> None:
    first, _ = parse_lanes("compute 0-10\nallgather 10-20 64MiB dtype=BFloat16", steps=1)
    text = first.to_json()
    assert '"In msg nelems": 16777216, "Out msg nelems": 33554432' in text


def test_ranks_close_with_the_same_collectives() -> None:
    first, second = parse_lanes(
        """
        compute   10-60
        allgather 0-20 30-40
        rank 1:
        compute   25-60
        allgather 10-20 30-40
        """,
        steps=1,
    )
    assert len(_spans(first, "kernel", "nccl")) == len(_spans(second, "kernel", "nccl")) == 3


def test_group_leaves_other_ranks_out() -> None:
    traces = parse_lanes("compute 0-10\nallreduce 0-5 ranks=0,1", ranks=3, steps=1)
    assert [len(_spans(one, "kernel", "nccl")) for one in traces] == [1, 1, 0]


def test_copies_say_what_they_are() -> None:
    (one,) = parse_lanes("compute 0-10\ncopy 0-5 3MiB pageable 6-7 DtoH", ranks=1, steps=1)
    assert _spans(one, "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)") == [(0, 5)]
    assert _spans(one, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)") == [(6, 7)]


def test_own_lead_stays_within_the_host_step() -> None:
    (one,) = parse_lanes("compute 0-10 10-20 lead=500", ranks=1, steps=2)
    steps = _spans(one, "user_annotation", "ProfilerStep")
    launches = [start for start, _ in _spans(one, "cuda_runtime", "cudaLaunch")]
    assert [sum(begin <= at < end for at in launches) for begin, end in steps] == [2, 2, 1]


def test_cpu_lanes_are_operators_and_gloo() -> None:
    first, _ = parse_lanes("compute 0-60\nallreduce 40-100", steps=1, device=None)
    assert _spans(first, "user_annotation", "ProfilerStep") == [(0, 100), (100, 200)]
    assert _spans(first, "user_annotation", "gloo:all_reduce") == [(40, 100)]
    assert _spans(first, "cpu_op", "aten::mm") == [(0, 40), (40.001, 60), (100, 100.001)]
    assert _spans(first, "cpu_op", "autograd::engine")[0] == (0, 60)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("compute 0-60\ncompte 0-1", 2, "unknown lane 'compte'"),
        ("compute 60-0", 1, "ends before it starts"),
        ("compute 64MiB", 1, "expected an interval"),
        ("compute 0-60 64MiB", 1, "says nothing about compute"),
        ("compute 0-1 x10 1ms", 1, "do not fit"),
        ("steps: 0\ncompute 0-1", 1, "whole number from 1"),
        ("compute 0-1\nrank 7:\ncompute 0-2", 3, "there is no rank 7"),
        ("", 1, "no length"),
    ],
)
def test_wrong_lanes_name_their_line(text: str, line: int, message: str) -> None:
    with pytest.raises(LanesError, match=message) as raised:
        parse_lanes(text)
    assert raised.value.line == line


def test_cpu_trace_has_no_copies() -> None:
    with pytest.raises(LanesError, match="CPU trace"):
        parse_lanes("copy 0-1", device=None)


def test_one_rank_has_no_collectives() -> None:
    with pytest.raises(LanesError, match="nobody to talk to"):
        parse_lanes("allreduce 0-1", ranks=1)
