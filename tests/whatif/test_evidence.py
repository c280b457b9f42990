"""Where a finding points: rank, step and place in the trace, as a viewer of it shows them."""

from __future__ import annotations

from pathlib import Path

import tracedoc
from tracedoc.diagnosis import Diagnosis, Evidence
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes

MS = 1_000_000


def drawn(folder: Path, text: str, *, ranks: int = 2, select: tuple[str, ...] = ()) -> Diagnosis:
    for builder in parse_lanes(text, ranks=ranks):
        builder.write(folder / f"rank-{builder.rank}.json")
    return tracedoc.diagnose([folder], tracedoc.Options(jobs=1, select=select))


def places(diagnosis: Diagnosis, rule: str) -> list[Evidence]:
    return [place for one in diagnosis.findings if one.rule_id == rule for place in one.evidence]


def shown(evidence: list[Evidence]) -> list[tuple[int, int | None, float, float, float | None]]:
    """Return rank, step, and start, end and value in ms of each place."""
    return [(e.rank, e.step, e.start_ns / MS, e.end_ns / MS, e.value) for e in evidence]


def test_a_place_counts_from_the_first_event_of_the_trace(tmp_path: Path) -> None:
    diagnosis = drawn(tmp_path, "compute 0-60\nallreduce 60-100 14336MiB")
    found = places(diagnosis, "exposed-communication")
    # Five steps of 100 ms: the third one is judged. The trace begins with a launch 1 ms before the first.
    assert shown(found) == [(0, 2, 261, 301, 40)]
    assert found[0].unit == "ms"


def test_the_longest_places_come_in_order_of_time(tmp_path: Path) -> None:
    # Eleven gaps of 1 to 6 ms; the first and the last are the longest.
    lengths = [6, 1, 2, 1, 3, 1, 2, 1, 3, 1, 5]
    now, lanes = 0, []
    for length in lengths:
        lanes.append(f"compute {now}-{now + 3}\nallreduce {now + 3}-{now + 3 + length} 64MiB")
        now += 3 + length
    text = "\n".join([*lanes, f"backward 0-{now}", f"step: {now}"])
    diagnosis = drawn(tmp_path, text, select=("exposed-communication",))
    values = [place.value for place in places(diagnosis, "exposed-communication")]
    assert (values[0], values[-1]) == (6, 5)
    assert sorted(values, reverse=True)[:5] == [6, 5, 3, 3, 2]
    starts = [place.start_ns for place in places(diagnosis, "exposed-communication")]
    assert starts == sorted(starts)


def test_a_stall_for_input_is_the_idle_time_and_not_the_loader_s(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index in range(1, 6):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 60, start + 70)
        builder.loader(start + 5, start + 45)  # 10 ms of it beside the compute of the step before
        builder.kernel("first", start + 50, start + 115, launch_ms=start + 49.99)
    diagnosis = tracedoc.diagnose([builder.write(tmp_path / "rank-0.json")])
    # Step 2 is the lower median of four, on the GPU from 250 to 350; the trace begins at 100.
    assert shown(places(diagnosis, "input-stall")) == [(0, 2, 215, 245, 30)]


def test_who_waits_for_a_late_rank_and_where_that_rank_was(tmp_path: Path) -> None:
    lanes = "compute 0-60\nallreduce 60-100 64MiB\nrank 1:\ncompute 0-90\nallreduce 90-100 64MiB"
    found = shown(places(drawn(tmp_path, lanes), "straggler-rank"))
    # Rank 0 waits from 60 to 90 of the judged step, for what rank 1 does then.
    assert (0, 2, 261, 291, 30) in found
    assert {rank for rank, *_ in found} == {0, 1}
