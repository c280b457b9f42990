"""The critical path is drawn where its work was measured, through the ranks that the step waits for."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.play.run_replay import RunReplay
from tracedoc.spans import Spans
from tracedoc.tables import PathStretch
from tracedoc.testing import parse_lanes
from tracedoc.whatif import path_in_picture
from tracedoc.whatif.predictions import run_replay

Stretch = tuple[int, str, float, float]


def diagnosed(folder: Path, text: str, *, ranks: int) -> Diagnosis:
    for builder in parse_lanes(text, ranks=ranks):
        builder.write(folder / f"rank-{builder.rank}.json")
    return tracedoc.diagnose([folder])


def path_of(found: Diagnosis) -> list[Stretch]:
    """Return rank, resource, beginning and end of each stretch, in tenths of a millisecond."""
    picture = found.detail.picture
    assert picture is not None
    return [(one.rank, one.resource, round(one.start_ms, 1), round(one.end_ms, 1)) for one in picture.path]


def test_path_passes_through_the_late_rank(tmp_path: Path):
    """Rank 1 computes 80 ms, the others 60; the transfer of 10 ms begins when it comes."""
    found = diagnosed(
        tmp_path,
        """
        lead: 5
        compute    0-60  90-100
        allreduce  60-90
        rank 1:
        compute    0-80  90-100
        allreduce  80-90
        """,
        ranks=3,
    )
    path = path_of(found)
    assert path[0] == (1, "compute", 0.0, 80.0)
    (transfer, last) = path[1:]
    assert transfer[1:] == ("communication", 80.0, 90.0)
    assert last[1:] == ("compute", 90.0, 100.0)


def test_path_passes_through_the_heavy_stage(tmp_path: Path):
    """Stage 0 sends its activations at 20 ms, and gets their gradients when stage 1 has worked 60 ms."""
    found = diagnosed(
        tmp_path,
        """
        lead: 5
        compute  0-20  86-100
        send     20-23 peer=1
        recv     20-86 peer=1
        rank 1:
        compute  23-83
        recv     0-23 peer=0
        send     83-86 peer=0
        """,
        ranks=2,
    )
    path = path_of(found)
    assert path[0] == (0, "compute", 0.0, 20.0)
    assert (1, "compute", 23.0, 83.0) in path
    assert path[-1] == (0, "compute", 86.0, 100.0)
    assert [one[1:] for one in path if one[1] == "communication"] == [
        ("communication", 20.0, 23.0),
        ("communication", 83.0, 86.0),
    ]


def test_path_passes_through_the_host_that_launches_late(tmp_path: Path):
    """A kernel of 1 ms follows every 10 ms, each launched 0.1 ms before: the host never waits for any."""
    lanes = "lead: 0.1\ncompute 0-1 10-11 20-21 30-31 40-41 50-51 60-61 70-71 80-81 90-91\nstep: 100"
    found = diagnosed(tmp_path, lanes, ranks=1)
    assert path_of(found) == [(0, "host", 0.0, 99.9)]
    assert found.replay is not None
    assert found.replay.path["host"] >= 0.99


def test_path_without_a_replay_is_not_drawn(tmp_path: Path):
    (builder,) = parse_lanes("compute 0-50\nstep: 100", ranks=1)
    file = builder.write(tmp_path / "rank-0.json")
    found = tracedoc.diagnose([file], tracedoc.Options(replay=False))
    assert found.detail.picture is not None
    assert found.detail.picture.path == ()


def test_a_path_over_ranks_needs_one_clock(tmp_path: Path):
    lanes = "lead: 5\ncompute 0-20 86-100\nsend 20-23 peer=1\nrecv 20-86 peer=1\n"
    lanes += "rank 1:\ncompute 23-83\nrecv 0-23 peer=0\nsend 83-86 peer=0"
    found = diagnosed(tmp_path, lanes, ranks=2)
    run = tracedoc.measure([tmp_path]).measurements.run
    replay, picture = run_replay(run), found.detail.picture
    assert isinstance(replay, RunReplay)
    assert picture is not None
    assert path_in_picture.path_in_picture(run, replay, picture) == picture.path
    assert path_in_picture.path_in_picture(run, replay, replace(picture, aligned=False)) == ()
    assert path_in_picture.path_in_picture(run, replay, replace(picture, step=picture.step + 1)) == ()


def test_a_path_of_many_pieces_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lanes = "lead: 5\n" + "compute " + " ".join(f"{at}-{at + 1}" for at in range(0, 100, 2)) + "\n"
    lanes += "allreduce " + " ".join(f"{at + 1}-{at + 2}" for at in range(0, 100, 2))
    whole = path_of(diagnosed(tmp_path, lanes, ranks=2))
    assert len(whole) == 100
    monkeypatch.setattr(path_in_picture, "MOST_STRETCHES", 60)
    assert len(path_of(diagnosed(tmp_path, lanes, ranks=2))) <= 60


# -- real captures


def measured_on(found: Diagnosis, one: PathStretch) -> Spans:
    """Return in nanoseconds when the picture shows work of a stretch's resource on its rank."""
    picture = found.detail.picture
    assert picture is not None
    row = next(row for row in picture.rows if row.rank == one.rank)
    if one.resource == "compute":
        names = ["forward", "recompute", "backward", "optimizer", "compute"]
    elif one.resource == "communication":
        names = ["communication"]
    else:
        names = []
    pairs = [pair for name in names for pair in row.spans_ms.get(name, ())]
    return Spans.from_pairs([(round(1e6 * start), round(1e6 * end)) for start, end in pairs])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("dlrm_8rank_v100", 7),  # the straggler
        ("published_pipeline_8rank", 7),  # of the heavy stage
        ("fsdp2_h100_4rank", 2),  # whose host is slow
    ],
)
def test_pieces_lie_on_work_that_was_measured_there(name: str, rank: int, shared_traces: Path):
    """The picture is made from the kernels of the trace and knows nothing of the replay."""
    found = diagnosis_of(shared_traces / name)
    picture, replay = found.detail.picture, found.replay
    assert picture is not None
    assert replay is not None
    assert replay.step_ms is not None
    drawn = on_work = work = 0.0
    shares: dict[str, float] = {}
    ranks: dict[int, float] = {}
    for one in picture.path:
        length = one.end_ms - one.start_ms
        drawn += length
        shares[one.resource] = shares.get(one.resource, 0.0) + length
        ranks[one.rank] = ranks.get(one.rank, 0.0) + length
        if one.resource in ("compute", "communication"):
            inside = measured_on(found, one).clip(round(1e6 * one.start_ms), round(1e6 * one.end_ms))
            work, on_work = work + length, on_work + inside.total_ns / 1e6
    assert on_work >= 0.97 * work - 0.005
    assert drawn == pytest.approx(replay.step_ms, rel=0.06)
    assert ranks[rank] > 0.4 * drawn
    for resource, share in replay.path.items():
        assert shares.get(resource, 0.0) / drawn == pytest.approx(share, abs=0.02), resource
