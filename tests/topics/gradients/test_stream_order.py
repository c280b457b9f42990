"""Gradients on the compute stream, and the order of gathers: numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.facts.catalog import FactTable
from tracedoc.spans import Spans
from tracedoc.testing import TraceBuilder, parse_lanes
from tracedoc.trace.devices import spans_hosts
from tracedoc.values import Unknown

LATE_RANK = """
    lead: 1
    backward   39-95
    compute    0-40 x10  40-50 x5  60-70 x5  80-90 x5
    allreduce  50-60 64MiB stream=7  70-80 64MiB stream=7  90-100 64MiB stream=7
    rank 1:
    compute    0-40 x10  40-56 x5  60-76 x5  80-90 x5
    allreduce  56-60 64MiB stream=7  76-80 64MiB stream=7  90-100 64MiB stream=7
"""


def facts_of(tmp_path: Path, lanes: str, *, ranks: int = 2, hosts: int = 1) -> FactTable:
    builders = parse_lanes(lanes, ranks=ranks, hosts=hosts)
    paths = [one.write(tmp_path / f"rank-{one.rank}.json") for one in builders]
    return tracedoc.measure(paths).measurements.facts


def test_waiting_for_a_late_rank_is_no_transfer_on_the_compute_stream(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, LATE_RANK)
    assert facts["compute_stream_reductions"].values == {"0": 2, "1": 2}
    # Rank 0 waits 6 ms of each 10; behind the first reduction are 20 ms of backward compute, enough for both.
    assert facts["compute_stream_reduction_ms"].values["0"] == pytest.approx(20)
    assert facts["compute_stream_transfer_ms"].values["0"] == pytest.approx(8)


def test_without_a_backward_pass_nothing_is_known_of_its_stream(tmp_path: Path) -> None:
    one = TraceBuilder(0, 1).step(0, 0, 50).kernel("k", 0, 50).step(1, 50, 100).kernel("k", 50, 100)
    facts = tracedoc.measure([one.write(tmp_path / "rank-0.json")]).measurements.facts
    assert isinstance(facts["compute_stream_reduction_ms"].value, Unknown)


def test_ranks_of_a_host_are_counted(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "compute 0-60\nallreduce 60-100 64MiB", ranks=4, hosts=2)
    assert facts["ranks_per_host"].value == 2
    assert facts["half_gpus"].value == 2


@pytest.mark.parametrize(
    ("device", "spans"),
    [("NVIDIA GB200", True), ("NVIDIA GH200 480GB", True), ("NVIDIA H100 80GB HBM3", False), ("B200", False)],
)
def test_nvlink_ends_at_the_host_but_in_racks(device: str, spans: bool) -> None:
    assert spans_hosts(device) is spans


def test_the_first_part_of_a_set_of_time() -> None:
    spans = Spans.from_pairs([(0, 10), (20, 30)])
    assert spans.first_ns(14).pairs() == [(0, 10), (20, 24)]
    assert spans.first_ns(0).pairs() == []
    assert spans.first_ns(100) == spans
