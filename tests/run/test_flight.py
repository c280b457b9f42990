"""Dumps of PyTorch's flight recorder: who is missing in which call, who is late, and what is refused."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracedoc
from tests.cli.test_cli import run as run_command
from tracedoc.errors import InputError
from tracedoc.run.flight import find_dumps, is_dump, parse_dump, read_dump
from tracedoc.run.hang import Standstill, read_standstill, standstill
from tracedoc.run.untrusted import UnusableError
from tracedoc.testing import parse_lanes

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "live_samples"
SECOND = 1_000_000_000
NOON = 1_767_268_800 * SECOND
"""2026-01-01 12:00:00 UTC."""

Entry = dict[str, Any]


def call(
    op: str, number: int, at_s: float = 0.0, *, group: str = "dp", done: bool = False, **more: Any
) -> Entry:
    """An entry of a recorder as torch 2.13 writes it; ``at_s`` are seconds after noon."""
    return {
        "profiling_name": f"nccl:{op}",
        "process_group": (f"id of {group}", group),
        "pg_id": 1,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "time_created_ns": NOON + int(at_s * SECOND),
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "frames": [
            {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/c10d.py", "line": 9},
            {"name": "main", "filename": "/home/me/train.py", "line": 88},
        ],
        **more,
    }


def dump(*entries: Entry, groups: dict[str, str] | None = None, **more: Any) -> bytes:
    """A dump as torch pickles it; ``groups`` are the ranks of groups as text."""
    config = {
        f"id of {name}": {"name": name, "desc": name, "ranks": ranks}
        for name, ranks in (groups or {"dp": "[0, 1, 2, 3]"}).items()
    }
    return pickle.dumps(
        {"version": "2.10", "pg_config": config, "entries": list(entries), **more}, protocol=2
    )


def told(*dumps: bytes, world: int | None = None, one_clock: bool = True) -> Standstill:
    return standstill(
        [parse_dump(content, rank) for rank, content in enumerate(dumps)], world, one_clock=one_clock
    )


def test_the_rank_that_never_entered_is_named_with_the_call_its_place_and_since_when_others_wait() -> None:
    inside = [
        dump(call("all_reduce", 5126, done=True), call("all_reduce", 5127, 130 + rank)) for rank in range(3)
    ]
    outside = dump(call("all_reduce", 5126, done=True))
    found = told(*inside, outside)
    assert found.lines == [
        "rank 3 never entered all_reduce 5,127 of group dp (called at train.py:88); the others wait since "
        "12:02:12 UTC; rank 3 last entered all_reduce 5,126 of group dp at train.py:88"
    ]
    assert (found.stuck[0].waiting, found.stuck[0].missing) == ((0, 1, 2), (3,))


def test_a_rank_that_waits_elsewhere_is_followed_to_the_cause() -> None:
    groups = {"dp": "[0, 1]", "tp": "[1, 2]"}
    found = told(
        dump(call("all_reduce", 7, 1), groups=groups),
        dump(call("all_reduce", 6, done=True), call("broadcast", 3, 2, group="tp"), groups=groups),
        dump(call("broadcast", 2, group="tp", done=True), groups=groups),
    )
    assert [(one.op, one.missing, one.follows) for one in found.stuck] == [
        ("broadcast", (2,), False),
        ("all_reduce", (1,), True),
    ]
    assert found.lines[0].startswith("rank 2 never entered broadcast 3 of group tp")


def test_groups_entered_in_different_orders_are_a_circle() -> None:
    groups = {"dp": "[0, 1]", "tp": "[0, 1]"}
    found = told(
        dump(call("all_reduce", 1), groups=groups), dump(call("all_reduce", 1, group="tp"), groups=groups)
    )
    assert "in a circle" in found.lines[0]
    assert all(one.follows for one in found.stuck)


def test_different_calls_under_one_number_are_told_by_rank() -> None:
    groups = {"dp": "[0, 1, 2]"}
    found = told(
        *(dump(call("all_reduce", 4), groups=groups) for _ in range(2)),
        dump(call("broadcast", 4), groups=groups),
    )
    assert "ranks 0-1 all_reduce Float[4]; rank 2 broadcast" in found.lines[0]


def test_a_device_that_has_not_begun_what_its_host_entered_is_told() -> None:
    groups = {"dp": "[0, 1]"}
    found = told(
        dump(call("all_reduce", 4, state="started"), groups=groups),
        dump(call("all_reduce", 4), groups=groups),
    )
    assert "rank 1 entered all_reduce 4 of group dp" in found.lines[0]
    assert "its device has not begun it" in found.lines[0]


def test_a_rank_without_a_dump_is_not_said_to_be_missing_in_the_call() -> None:
    found = told(dump(call("all_reduce", 4), groups={"dp": "[0, 1]"}))
    assert "there is no dump of rank 1" in found.lines[0]
    assert found.stuck[0].missing == ()


def test_ranks_of_a_group_whose_ranks_no_dump_says_may_be_none_of_it() -> None:
    found = told(dump(call("all_reduce", 4), pg_config={}), dump(pg_config={}))
    assert "rank 1 never entered a call of that group" in found.lines[0]
    assert found.stuck[0].missing == ()


def test_a_receive_without_its_send_names_the_sender() -> None:
    receive = call("recv 1<-0", 0, 5, p2p_seq_id=3, group="pp")
    groups = {"pp": "[4, 5]"}
    found = standstill([parse_dump(dump(groups=groups), 4), parse_dump(dump(receive, groups=groups), 5)])
    assert found.lines[0].startswith(
        "rank 4 never entered send 4->5 of group pp; rank 5 waits since 12:00:05 UTC"
    )


def test_the_parts_of_a_coalesced_call_end_with_it() -> None:
    parts = [call("send 0->1", 0, p2p_seq_id=3), call("coalesced", 0, p2p_seq_id=3, done=True)]
    assert told(dump(*parts, groups={"dp": "[0, 1]"}), dump(groups={"dp": "[0, 1]"})).stuck == ()


def test_what_the_group_says_it_finished_does_not_wait() -> None:
    status = {"1": {"last_completed_collective": "4"}}
    found = told(dump(call("all_reduce", 4), groups={"dp": "[0]"}, pg_status=status))
    assert found.lines == ["no rank waits: all calls in the dumps of rank 0 had ended"]


def timed_out(number: int) -> Entry:
    """A call that NCCL's watchdog gave up: it is retired, and its end was never seen."""
    return call("all_reduce", number, retired=True, time_discovered_completed_ns=None, timeout_ms=600_000)


def test_a_call_that_timed_out_waits_though_nccl_counts_it_as_the_last_that_ended() -> None:
    status = {"1": {"last_enqueued_collective": "8", "last_completed_collective": "7"}}
    others = dump(call("all_reduce", 6, done=True), timed_out(7), call("all_reduce", 8), pg_status=status)
    late = dump(call("all_reduce", 6, done=True))
    found = told(others, others, others, late)
    assert [(one.number, one.missing) for one in found.stuck] == [(7, (3,))]
    groups = {"dp": "[0, 1]"}
    gloo = call("all_reduce", 7, profiling_name="gloo:all_reduce", retired=True)
    assert told(dump(gloo, groups=groups), dump(gloo, groups=groups)).stuck == ()


def test_a_coalesced_call_whose_parts_are_not_listed_is_a_call() -> None:
    groups = {"dp": "[0, 1]"}
    found = told(dump(call("coalesced", 4, is_p2p=False), groups=groups), dump(groups=groups))
    assert found.lines[0].startswith("rank 1 never entered coalesced 4 of group dp")


def test_nccl_dumps_are_read_as_torch_reads_them() -> None:
    """Who is missing is what PyTorch's own analyser says of the same values, pickled or as JSON."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    groups = {"dp": "[0, 1, 2, 3]", "tp": "[2, 3]"}

    def entries(*calls: Entry) -> list[Entry]:
        common = {"p2p_seq_id": 0, "output_sizes": [[4]], "output_dtypes": ["Float"], "is_p2p": False}
        return [
            {
                **one,
                **common,
                "record_id": at,
                "op_id": at + 1,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": NOON + 1 if one["state"] == "completed" else None,
            }
            for at, one in enumerate(calls)
        ]

    first = call("all_reduce", 1, done=True)
    inner = call("all_gather", 1, group="tp", pg_id=2, done=True)
    ranks = [entries(first, timed_out(2)), entries(first, timed_out(2))]
    ranks += [entries(first, inner, timed_out(2)), entries(first, inner)]
    dumps = [pickle.loads(dump(*one, groups=groups)) for one in ranks]
    found = standstill([parse_dump(pickle.dumps(one, 2), rank) for rank, one in enumerate(dumps)])
    as_json = standstill([parse_dump(json.dumps(one).encode(), rank) for rank, one in enumerate(dumps)])
    details = {
        str(rank): {**one, "rank": rank, "host_name": f"host{rank}"}
        for rank, one in enumerate(copy.deepcopy(dumps))
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    known = builder.build_db(details, options, "2.10").collectives
    (torch_says,) = [one for one in known if one.missing_ranks]
    assert [(one.number, set(one.missing)) for one in found.stuck] == [
        (torch_says.collective_seq_id, torch_says.missing_ranks)
    ]
    assert found.stuck[0].missing == as_json.stuck[0].missing == (3,)


def entered(*late_ms: float, skew_ms: float = 0.0) -> tuple[bytes, bytes]:
    """Two ranks that enter a call every 100 ms, the second one later by ``late_ms``."""
    groups = {"dp": "[0, 1]"}
    calls = [[call("all_reduce", n, n / 10, done=True) for n in range(len(late_ms))]]
    calls.append(
        [call("all_reduce", n, n / 10 + (late + skew_ms) / 1e3, done=True) for n, late in enumerate(late_ms)]
    )
    return dump(*calls[0], groups=groups), dump(*calls[1], groups=groups)


def test_the_rank_that_others_wait_for_is_told_with_its_share_of_the_time() -> None:
    late = told(*entered(0, 20, 0, 20, 0, 20)).late
    assert late is not None
    assert (late.rank, late.late_ms) == (1, 20.0)
    # 60 ms of the 520 ms from the first call to the last rank in the last one.
    assert late.frac == pytest.approx(60 / 520)


def test_late_is_after_all_others_and_not_after_the_first() -> None:
    groups = {"dp": "[0, 1, 2]"}
    dumps = [
        dump(*(call("all_reduce", n, n / 10 + late, done=True) for n in range(6)), groups=groups)
        for late in (0, 0.040, 0.045)
    ]
    late = told(*dumps).late
    assert late is not None
    assert (late.rank, late.late_ms) == (2, 5.0)


def test_a_clock_that_is_ahead_makes_no_rank_late() -> None:
    ahead = entered(0, 0, 0, 0, 0, 0, skew_ms=30)
    assert told(*ahead, one_clock=False).late is None
    late = told(*entered(0, 20, 0, 20, 0, 20, skew_ms=30), one_clock=False).late
    assert late is not None
    assert late.frac == pytest.approx(60 / 550)


def test_times_that_are_no_numbers_are_not_known_and_make_nobody_late() -> None:
    groups = {"dp": "[0, 1]"}
    strange = [
        json.dumps(
            {
                "pg_config": {"id of dp": {"ranks": groups["dp"]}},
                "entries": [call("all_reduce", n, done=True, time_created_ns=when) for n in range(6)],
            }
        ).encode()
        for when in (float("nan"), NOON)
    ]
    assert told(*strange).lines == [
        "no rank waits: all calls in the dumps of ranks 0-1 had ended",
        "when rank 0 entered calls is not known, and so not who is late",
    ]
    stuck = told(dump(call("all_reduce", 4, time_created_ns=None), groups=groups), dump(groups=groups))
    assert stuck.lines[0].endswith("; rank 0 waits")


def test_ranks_that_come_together_are_not_told_late() -> None:
    assert told(*entered(1, 1, 1, 1, 1, 1)).late is None


class Hostile:
    """Unpickling it would run a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch owned",)


def persistent() -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return "elsewhere" if obj == "x" else None

    target = io.BytesIO()
    Pickler(target, 2).dump({"entries": ["x"], "pg_config": {}})
    return target.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (dump(pg_status=Hostile()), "more than plain values"),
        (persistent(), "more than plain values"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "damaged"),
        (dump(call("all_reduce", 1))[:-20], "damaged"),
        (b"\x80\x02]q\x00.", "no entries"),
        (pickle.dumps({"version": "1.4", "entries": [{"seq_id": 1}]}, 2), "has format 1.4"),
        (b'{"entries": 3}', "no entries"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_dump_is_refused_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnusableError, match=why):
        parse_dump(content, 0)
    assert list(tmp_path.iterdir()) == []


def test_values_of_a_stranger_become_plain() -> None:
    doubled: list[Any] = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    strange = call("all_reduce", 1, input_sizes=doubled, time_created_ns="x", frames=[3, {"filename": 4}])
    found = parse_dump(dump(strange, 3, call("", -1)), 0)  # type: ignore[arg-type]
    assert [one.entered_ns for one in found.calls] == [0, NOON]


def test_dumps_are_found_by_what_they_hold_and_ranks_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_12").write_bytes(dump(call("all_reduce", 1)))
    (tmp_path / "rank-3.json").write_text('{"pg_status": {}, "entries": []}')
    (tmp_path / "rank-4.pkl").write_bytes(pickle.dumps([1, 2]))
    assert [(path.name, read_dump(path).rank) for path in find_dumps(tmp_path)] == [
        ("nccl_trace_rank_12", 12),
        ("rank-3.json", 3),
    ]
    assert not is_dump(tmp_path / "missing")


def test_a_dump_beside_the_traces_comes_first_in_the_answer(tmp_path: Path) -> None:
    for rank, lanes in enumerate(parse_lanes("compute 0-60\nallreduce 60-80", ranks=2)):
        lanes.write(tmp_path / f"rank-{rank}.json")
        calls = [call("all_reduce", 1, done=True), *([call("all_reduce", 2)] if rank == 0 else [])]
        (tmp_path / f"comm_lib_trace_rank_{rank}").write_bytes(dump(*calls, groups={"dp": "[0, 1]"}))
    diagnosis = tracedoc.diagnose([tmp_path])
    assert diagnosis.summary.startswith("The job hung: rank 1 never entered all_reduce 2 of group dp")
    assert diagnosis.limits[0].code == "job-hung"
    (tmp_path / "comm_lib_trace_rank_0").write_bytes(dump(call("all_reduce", 1, done=True)))
    assert "hung" not in tracedoc.diagnose([tmp_path]).summary


def test_damaged_dumps_cost_what_they_say_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "trace_rank_0").write_bytes(dump(call("all_reduce", 2), groups={"dp": "[0, 1]"}))
    (tmp_path / "trace_rank_1").write_bytes(dump(call("all_reduce", 2))[:-9])
    assert "trace_rank_1 is no dump" in read_standstill(find_dumps(tmp_path)).lines[-1]
    with pytest.raises(InputError, match="is no dump"):
        read_standstill([tmp_path / "trace_rank_1"])


def test_dumps_alone_are_answered_as_text_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "trace_rank_0").write_bytes(dump(call("all_reduce", 2), groups={"dp": "[0, 1]"}))
    (tmp_path / "trace_rank_1").write_bytes(dump(call("all_reduce", 1, done=True), groups={"dp": "[0, 1]"}))
    shown = run_command("diagnose", str(tmp_path))
    assert shown.output.startswith("Rank 1 never entered all_reduce 2 of group dp (called at train.py:88)")
    answer = json.loads(run_command("diagnose", str(tmp_path), "-f", "json").output)
    assert answer["flight_recorder"]["stuck"][0]["missing"] == [1]
    assert run_command("diagnose", str(tmp_path), "-f", "html").exit_code == 2


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared traces are not here")
def test_what_torch_writes_of_a_gloo_job() -> None:
    found = read_standstill(find_dumps(SAMPLES), one_clock=True)
    assert found.ranks == (0, 1)
    assert found.lines[0] == "no rank waits: all calls in the dumps of ranks 0-1 had ended"
