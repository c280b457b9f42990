"""The trace for Perfetto: its format, its clock, what it shows, and that it is never taken for a run."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.example_diagnoses import DIAGNOSES, healthy, sharded
from tests.known_runs import diagnosis_of
from tracedoc.cli import main
from tracedoc.diagnosis import Detail, Diagnosis, Evidence
from tracedoc.diagnosis_json import to_json
from tracedoc.errors import InputError
from tracedoc.report.clock import place_to_look
from tracedoc.report.render import implied_format, render_file, write_report
from tracedoc.report.view import build_view
from tracedoc.tables import PathStretch, Picture, PictureRow

STRAGGLER = next(one for one in sharded().findings if one.rule_id == "straggler-rank")
Slice = tuple[str, float, float]


def drawn(*rows: PictureRow, **changes: Any) -> Diagnosis:
    """Return the sharded run with a picture of step 5, which begins at 800 ms of each rank's trace."""
    picture = Picture(step=5, span_ms=420.0, aligned=True, rows=rows, left_out=5)
    return replace(sharded(), detail=Detail(picture=picture), **changes)


ROW_0 = PictureRow(0, 0.0, 400.0, {"compute": ((0.0, 250.0),), "transfer": ((240.0, 300.0),)})
ROW_5 = PictureRow(5, 20.0, 420.0, {"backward": ((20.0, 100.0),), "idle allocator": ((90.0, 420.0),)})


def trace(diagnosis: Diagnosis) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render_file(diagnosis, "perfetto"))
    return found


def tracks(diagnosis: Diagnosis) -> dict[tuple[str, str], list[Slice]]:
    """Return the slices of each track, by the names of process and thread, in milliseconds."""
    events = trace(diagnosis)["traceEvents"]
    names = {
        (event["pid"], event["tid"] if event["name"] == "thread_name" else 0): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            where = names[event["pid"], 0], names[event["pid"], event["tid"]]
            end = event["ts"] + event["dur"]
            found[where].append((event["name"], event["ts"] / 1000, end / 1000))
    return found


# What Perfetto reads of JSON, by its documents (other-formats.md) and its importer: "X" with microseconds in
# "ts" and "dur"; "s", "t" and "f" of one category, name and numeric id are one flow, each tied to the slice
# that is open on its thread at that instant, the last one so only with "bp": "e"; "M" names processes and
# threads. Slices of a thread must nest.

WITH_PICTURE = [name for name in DIAGNOSES if DIAGNOSES[name]().detail.picture]


@pytest.mark.parametrize("name", WITH_PICTURE)
def test_events_have_the_fields_of_the_format(name: str) -> None:
    content = trace(DIAGNOSES[name]())
    assert content["displayTimeUnit"] in ("ms", "ns")
    events = content["traceEvents"]
    fields = {
        "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
        "M": {"ph", "name", "pid", "tid", "args"},
        "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
        "t": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
        "f": {"ph", "cat", "name", "id", "pid", "tid", "ts", "bp"},
    }
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    for event in events:
        assert set(event) == fields[event["ph"]]
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert 0 < event["pid"] < 2**32, "Perfetto keeps process 0 for itself"
        assert 0 <= event["tid"] < 2**32
        assert event.get("dur", 0) >= 0


@pytest.mark.parametrize("name", WITH_PICTURE)
def test_every_thread_and_process_has_one_name(name: str) -> None:
    events = trace(DIAGNOSES[name]())["traceEvents"]
    named = [(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"]
    assert len(named) == len(set(named))
    for event in events:
        if event["ph"] == "M":
            key = "name" if event["name"].endswith("_name") else "sort_index"
            assert event["name"] in (f"process_{key}", f"thread_{key}")
            assert type(event["args"][key]) is (str if key == "name" else int)
        else:
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert ("process_name", event["pid"], 0) in named
    threads = {event["tid"]: event["pid"] for event in events}
    assert all(threads[event["tid"]] == event["pid"] for event in events if event["tid"]), (
        "one number, one thread"
    )


def test_critical_path_is_one_flow_through_the_ranks() -> None:
    events = trace(sharded())["traceEvents"]
    flow = [event for event in events if event["ph"] in "stf"]
    assert [event["ph"] for event in flow] == ["s", "t", "t", "t", "f"]
    assert len({(event["cat"], event["name"], event["id"]) for event in flow}) == 1
    assert type(flow[0]["id"]) is int
    assert flow[-1]["bp"] == "e"
    found = []
    for one in flow:
        (around,) = (
            event
            for event in events
            if event["ph"] == "X" and event["tid"] == one["tid"]
            if event["ts"] < one["ts"] < event["ts"] + event["dur"]
        )
        found.append((around["pid"] - 2, around["name"]))
    assert found == [
        (0, "compute: the forward pass"),
        (5, "memory allocation"),
        (5, "host"),
        (5, "compute: the backward pass"),
        (5, "communication: reduce_scatter"),
    ]
    assert [one["ts"] for one in flow] == sorted(one["ts"] for one in flow)


def test_a_path_in_one_place_needs_no_flow() -> None:
    diagnosis = drawn(ROW_0)
    alone = replace(diagnosis.detail.picture, path=(PathStretch(0, "host", 0.0, 400.0),))
    events = trace(replace(diagnosis, detail=Detail(picture=alone)))["traceEvents"]
    assert not [event for event in events if event["ph"] in "stf"]
    assert tracks(replace(diagnosis, detail=Detail(picture=alone)))["rank 0", "critical path"]


@pytest.mark.parametrize("name", ["synthetic_ddp_tiny_batch", "cpu_ddp_slow_metrics"])
def test_slices_of_a_track_nest(name: str, sample_traces: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.perfetto.json.gz"
    result = CliRunner().invoke(main, ["diagnose", str(sample_traces / name), "-o", str(file)])
    assert result.exit_code == 0
    assert "open it at https://ui.perfetto.dev, and look at rank " in result.stderr
    assert file.stat().st_size < 100_000
    by_track = defaultdict(list)
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        if event["ph"] == "X":
            by_track[event["tid"]].append((event["ts"], -event["dur"]))
    assert len(by_track) > 8
    for slices in by_track.values():
        open_ends: list[float] = []
        for start, negative in sorted(slices):
            while open_ends and open_ends[-1] <= start + 0.002:  # what rounding to nanoseconds leaves
                open_ends.pop()
            assert not open_ends or start - negative <= open_ends[-1] + 0.002
            open_ends.append(start - negative)


def test_each_instant_of_the_budget_has_one_name() -> None:
    """The picture has begun 800 ms earlier on the clock: steps 3 and 4 are shown too."""
    found = tracks(drawn(ROW_0, ROW_5))
    # 250 ms of compute cover the transfer that begins beside it, as on the page.
    assert sorted(found["rank 0", "budget"], key=lambda one: one[1]) == [
        ("compute", 800, 1050),
        ("exposed transfer", 1050, 1100),
    ]
    assert sorted(found["rank 5", "budget"], key=lambda one: one[1]) == [
        ("backward", 820, 900),
        ("memory allocation", 900, 1220),
    ]


def test_all_ranks_have_one_clock() -> None:
    """Rank 5 begins step 5 at 800 ms of its own trace, and 20 ms after rank 0."""
    found = tracks(drawn(ROW_0, ROW_5))
    assert found["rank 0", "steps"][2] == ("step 5", 800, 1200)
    assert found["rank 5", "steps"][2] == ("step 5", 820, 1220)
    straggler = "1. Every rank waits for one rank"
    assert found["rank 5", straggler] == [("cudaMalloc in backward", 832, 920)]
    assert found["rank 0", straggler] == [("all-gather waits for rank 5", 820, 910)]


def test_the_place_to_look_is_that_of_the_named_rank() -> None:
    assert place_to_look(build_view(drawn(ROW_0, ROW_5))) == "rank 5, 832.0 ms"
    assert place_to_look(build_view(drawn(ROW_0))) == "rank 0, 820.0 ms", "rank 5 is not drawn"
    nowhere = replace(STRAGGLER, evidence=())
    assert place_to_look(build_view(drawn(ROW_0, ROW_5, findings=(nowhere,)))) == "rank 5, 820.0 ms"
    assert place_to_look(build_view(drawn(ROW_0, ROW_5, findings=()))) == ""


def test_finding_without_a_place_is_marked_on_its_ranks() -> None:
    nowhere = replace(STRAGGLER, evidence=())
    found = tracks(drawn(ROW_0, ROW_5, findings=(nowhere,)))
    title = "1. Every rank waits for one rank"
    assert found["rank 5", title] == [(title, 820, 1220)]
    assert ("rank 0", title) not in found


def test_slices_say_their_finding_and_how_to_read_on() -> None:
    slices = [event for event in trace(drawn(ROW_0, ROW_5))["traceEvents"] if event["ph"] == "X"]
    place = next(event for event in slices if event["name"] == "cudaMalloc in backward")
    assert place["args"]["finding"] == "straggler-rank/rank-5"
    assert place["args"]["of its trace"] == "812000000 to 900000000 ns since its first event"
    whole = next(event for event in slices if event["args"].get("severity") == "critical")
    assert whole["args"]["explain"] == "tracedoc explain straggler-rank"


def test_plan_is_a_stack_of_shorter_and_shorter_steps(sample_traces: Path) -> None:

    found = diagnosis_of(sample_traces / "synthetic_ddp_tiny_batch")
    stack = tracks(found)["tracedoc", "plan: the step after each fix"]
    assert stack[0][0].startswith("step now: ")
    assert stack[1][0].startswith("1. ")
    assert all(inner[2] <= outer[2] for outer, inner in pairwise(stack))


def test_size_is_bounded_and_what_is_left_out_is_said() -> None:
    many = tuple(Evidence(5, 5, 1000 * at, 1000 * at + 900, "wait", None) for at in range(100_000))
    diagnosis = drawn(ROW_0, ROW_5, findings=(replace(STRAGGLER, evidence=many),))
    content = render_file(diagnosis, "perfetto")
    assert len(content) < 500_000
    assert "400 longest places" in json.loads(content)["otherData"]["thinned"]
    assert "5 ranks are not shown" in json.loads(content)["otherData"]["thinned"]


@pytest.mark.parametrize("end", [1e300, -1e300, 5.0])
def test_impossible_times_are_left_out(end: float) -> None:
    row = replace(ROW_0, spans_ms={"transfer": ((10.0, end),)}, end_ms=end)
    assert all(start <= stop < 1e12 for one in tracks(drawn(row)).values() for _, start, stop in one)


def test_names_of_hosts_and_paths_are_hidden() -> None:
    place = replace(STRAGGLER.evidence[0], what="open /home/anna/x.bin on gpu-node-b")
    shown = drawn(ROW_0, ROW_5, findings=(replace(STRAGGLER, evidence=(place,)),))
    assert b"open x.bin on host-2" in render_file(shown, "perfetto")
    assert b"open /home/anna/x.bin on gpu-node-b" in render_file(shown, "perfetto", redact=False)


def test_file_is_the_same_each_time(tmp_path: Path) -> None:
    first, again = tmp_path / "a.perfetto.json.gz", tmp_path / "b.perfetto.json.gz"
    write_report(drawn(ROW_0, ROW_5), str(first))
    write_report(drawn(ROW_0, ROW_5), str(again))
    assert first.read_bytes() == again.read_bytes()
    plain = tmp_path / "c.perfetto.json"
    write_report(drawn(ROW_0, ROW_5), str(plain))
    assert plain.read_bytes() == gzip.decompress(first.read_bytes())


def test_without_a_step_the_other_files_are_written_and_the_error_is_clear(tmp_path: Path) -> None:
    nothing = replace(healthy(), detail=Detail())
    with pytest.raises(InputError, match="no step"):
        render_file(nothing, "perfetto")
    file = tmp_path / "diagnosis.json"
    file.write_text(to_json(nothing), encoding="utf-8")
    wanted = [str(tmp_path / "run.perfetto.json.gz"), str(tmp_path / "comment.md")]
    result = CliRunner().invoke(main, ["report", str(file), "-o", wanted[0], "-o", wanted[1]])
    assert result.exit_code == 2
    assert "error: there is no step to show in Perfetto" in result.stderr
    assert (tmp_path / "comment.md").exists()


def test_it_is_no_trace_of_a_job(tmp_path: Path) -> None:
    view = tmp_path / "run.perfetto.json.gz"
    write_report(drawn(ROW_0, ROW_5), str(view))
    renamed = tmp_path / "rank-9.json.gz"
    renamed.write_bytes(view.read_bytes())
    for file in (view, renamed):
        result = CliRunner().invoke(main, ["diagnose", str(file)])
        assert result.exit_code == 2
        assert "was written by tracedoc for Perfetto, and is no trace of a job" in result.stderr


def test_beside_the_traces_it_changes_nothing(sample_traces: Path, tmp_path: Path) -> None:
    for file in (sample_traces / "cpu_ddp_straggler").glob("*.gz"):
        (tmp_path / file.name).symlink_to(file)
    write_report(drawn(ROW_0, ROW_5), str(tmp_path / "run.perfetto.json.gz"))
    write_report(drawn(ROW_0, ROW_5), str(tmp_path / "rank-7.perfetto.json"))
    from tracedoc.run.discover import discover

    run = discover([str(tmp_path)])
    assert [Path(file.path).name for file in run.files] == ["rank-0.json.gz", "rank-1.json.gz"]
    assert run.limits == ()


@pytest.mark.parametrize(
    ("name", "implied"),
    [
        ("run.perfetto.json.gz", "perfetto"),
        ("RUN.PERFETTO.JSON", "perfetto"),
        ("run.json", "json"),
        ("run.json.gz", None),
        (".json", None),
        ("perfetto", None),
    ],
)
def test_the_end_of_a_name_implies_a_format(name: str, implied: str | None) -> None:
    assert implied_format(f"folder.md/{name}") == implied
