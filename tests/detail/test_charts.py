"""What charts show is measured: waits by rank and step, transfers, calls of units, memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tracedoc
from tests.known_runs import diagnosis_of
from tracedoc.step.drawn import STRETCHES
from tracedoc.testing import TraceBuilder, parse_lanes


def detail(builders: list[TraceBuilder], folder: Path) -> tracedoc.diagnosis.Detail:
    paths = [builder.write(folder / f"rank-{rank}.json") for rank, builder in enumerate(builders)]
    return tracedoc.diagnose(paths, tracedoc.Options(jobs=1, replay=False)).detail


LATE = """
compute    0-50
allreduce  50-100 64MiB
rank 1:
compute    0-80
allreduce  80-100 64MiB
"""


def test_the_rank_that_computes_longer_is_waited_for(tmp_path: Path):
    waits = detail(parse_lanes(LATE, ranks=2), tmp_path).waits
    assert waits.ranks == (0, 1)
    # Rank 0 comes to each all-reduce 30 ms before rank 1.
    assert set(waits.wait_ms[0]) == {30.0}
    assert set(waits.waited_for[0]) == {1}
    assert set(waits.wait_ms[1]) == {0.0}
    assert set(waits.waited_for[1]) == {None}


def test_one_rank_waits_for_nobody_who_is_known(tmp_path: Path):
    (only, _) = parse_lanes(LATE, ranks=2)
    assert detail([only], tmp_path).waits is None


def test_transfers_count_from_the_last_arrival(tmp_path: Path):
    transfers = detail(parse_lanes(LATE, ranks=2), tmp_path).transfers
    (row,) = transfers.rows
    # 64 MiB in 20 ms; for two ranks an all-reduce crosses each link once.
    assert (row.op, row.ranks, row.nbytes) == ("all_reduce", 2, 64 << 20)
    assert row.low_gbps == row.gbps == row.high_gbps == pytest.approx((64 << 20) / 20e6)
    assert row.expected_gbps is not None
    curve = transfers.curves[0]
    assert row.expected_gbps == pytest.approx(curve.peak_gbps * row.nbytes / (row.nbytes + curve.half_bytes))


def test_units_of_a_sharded_run_lie_in_the_analysed_step(sample_traces: Path):
    found = diagnosis_of(sample_traces / "synthetic_fsdp2_fine_wrapping").detail.unit_timeline
    assert {call.kind for call in found.calls} == {"gather", "reduction"}
    assert all(0 <= call.start_ms < call.end_ms <= found.span_ms for call in found.calls)
    assert [call.start_ms for call in found.calls] == sorted(call.start_ms for call in found.calls)
    assert any(call.stall_end_ms is not None for call in found.calls)


def memory_trace(folder: Path, counts: int) -> Path:
    """Write a step with so many counts of memory, one each 10 us: 1, 2, 3... bytes in tensors."""
    (builder,) = parse_lanes("compute 0-100", ranks=1)
    document = json.loads(builder.to_json())
    first = min(event["ts"] for event in document["traceEvents"] if "ts" in event)
    document["traceEvents"] += [
        {
            "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1,
            "ts": first + 10.0 * count,
            "args": {
                "Total Allocated": count + 1, "Total Reserved": 10_000, "Bytes": 1, "Addr": 1,
                "Device Id": 0, "Device Type": 1,
            },
        }
        for count in range(counts)
    ]  # fmt: skip
    path = folder / "rank-0.json"
    path.write_text(json.dumps(document))
    return path


def test_memory_is_drawn_count_by_count_where_there_are_few(tmp_path: Path):
    memory = tracedoc.diagnose([memory_trace(tmp_path, 4)]).detail.memory
    assert memory.allocated == (1, 2, 3, 4)
    assert memory.reserved == (10_000,) * 4
    assert np.diff(memory.times_ms).round(6).tolist() == [0.01] * 3


def test_memory_of_many_counts_keeps_the_peak_of_each_stretch(tmp_path: Path):
    memory = tracedoc.diagnose([memory_trace(tmp_path, 5000)]).detail.memory
    assert STRETCHES / 2 < len(memory.allocated) <= STRETCHES
    assert memory.allocated[-1] == 5000
    assert list(memory.allocated) == sorted(memory.allocated)


def test_memory_that_was_not_recorded_is_not_drawn(tmp_path: Path):
    assert detail(parse_lanes("compute 0-100", ranks=1), tmp_path).memory is None


def test_of_very_many_ranks_those_that_are_waited_for_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tracedoc.detail.charts.MOST_RANKS", 2)
    lanes = LATE.replace("rank 1:", "rank 3:")
    waits = detail(parse_lanes(lanes, ranks=4), tmp_path).waits
    assert waits.ranks == (0, 3)
    assert waits.left_out_ranks == 2


@pytest.mark.parametrize(("most", "closed_ms", "pieces"), [(1000, 0.1, 20), (30, 1.6, 1)])
def test_a_picture_closes_gaps_until_it_has_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, closed_ms: float, pieces: int
):
    monkeypatch.setattr("tracedoc.detail.charts.MOST_INTERVALS", most)
    # 20 kernels of 1 ms that start 2 ms apart: the gaps between them are 1 ms.
    lanes = "step: 150\nlead: 30\ncompute 0-40 x20 1ms 100-150"
    picture = detail(parse_lanes(lanes, ranks=1), tmp_path).picture
    assert picture.closed_ms == pytest.approx(closed_ms)
    assert len(picture.rows[0].spans_ms["forward"]) == pieces
