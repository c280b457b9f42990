"""What of a file can be believed: where it is cut, in which unit it is, and what stands in it twice."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from tracedoc.errors import InputError
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.horizon import cut_at, kernels_end, went_back, without_length
from tracedoc.trace.kineto import read_trace


def known(*parts: tuple[Kind, int, range], peers: bool = False, named: bool = False) -> int:
    """The horizon of a file that holds events of a kind and a thread, one block after the other."""
    kind = np.concatenate([np.full(len(times), int(one), dtype=np.uint8) for one, _, times in parts])
    thread = np.concatenate([np.full(len(times), one) for _, one, times in parts])
    return cut_at(
        kind, np.concatenate([np.array(times) for *_, times in parts]), thread, peers=peers, named=named
    )


MS = 1_000_000


def calls(after: int, *, back_ms: int) -> tuple[np.ndarray, np.ndarray]:
    """When 400 calls of a thread start, one a ms, and their numbers; the clock goes back ``after`` some."""
    numbers = np.arange(400)
    times = MS * (numbers - back_ms * (numbers >= after))
    order = np.argsort(times, kind="stable")
    return times[order], numbers[order] + 1


def test_a_clock_goes_back_where_later_calls_have_earlier_times() -> None:
    # Call 299 starts at 299 ms, and the next one at 300 - 20 = 280 ms: 19 ms earlier.
    assert went_back(*calls(300, back_ms=20)) == (280 * MS, 19 * MS)
    assert went_back(*calls(300, back_ms=1)) is None
    assert went_back(*calls(300, back_ms=2)) is None  # by 1 ms: recorders may disagree by so much


def test_numbers_without_an_order_tell_nothing_of_the_clock() -> None:
    times, numbers = calls(400, back_ms=0)
    assert went_back(times, numbers[::-1]) is None
    assert went_back(times[:90], np.roll(numbers[:90], 1)) is None  # one call alone is out of order
    assert went_back(times[:90], np.roll(numbers[:90], -1)) is None


def test_a_clock_of_few_calls_goes_back_once() -> None:
    times, numbers = calls(400, back_ms=0)
    # Of 40 calls the first ten start at 30 to 39 ms, and the 11th at 0.
    assert went_back(times[:40], np.roll(numbers[:40], -10)) == (0, 39 * MS)


def test_operators_written_before_the_kernels_are_whole() -> None:
    blocks = (
        (Kind.CPU_OP, 1, range(0, 1000)),
        (Kind.RUNTIME, 1, range(0, 500)),
        (Kind.KERNEL, 7, range(5, 405)),
    )
    # Of the kernels the last 16 are taken for what may not be in order.
    assert known(*blocks) == 389


def test_calls_are_known_until_the_last_of_them_in_the_file() -> None:
    # A buffer of late calls was written first.
    blocks = (
        (Kind.CPU_OP, 1, range(0, 1000)),
        (Kind.RUNTIME, 1, range(900, 950)),
        (Kind.RUNTIME, 1, range(0, 200)),
    )
    assert known(*blocks) == 184


def test_of_threads_one_after_the_other_the_next_may_be_missing() -> None:
    assert known((Kind.CPU_OP, 1, range(10, 500)), (Kind.CPU_OP, 2, range(10, 300))) < 16


def test_one_thread_may_lack_those_that_communicate() -> None:
    block = (Kind.CPU_OP, 1, range(10, 500))
    assert known(block) == 484
    assert known(block, peers=True) == 10


def test_of_a_thread_that_is_named_and_not_written_nothing_is_known() -> None:
    blocks = (Kind.CPU_OP, 1, range(10, 500)), (Kind.ANNOTATION, 2, range(20, 300))
    assert known(*blocks, named=True) == 10


def test_kernels_that_are_missing_at_the_end_are_no_lost_ones() -> None:
    launched = np.arange(0, 1000, 10)
    missing = launched >= 700
    assert kernels_end(launched, missing) == 700
    lost = missing.copy()
    lost[20:22] = True  # two were lost before
    assert kernels_end(launched, lost) == 700


def test_a_few_kernels_that_ran_when_the_capture_was_over_end_nothing() -> None:
    launched = np.arange(100)
    assert kernels_end(launched, launched >= 99) is None
    assert kernels_end(launched[:0], launched[:0] > 0) is None


@pytest.mark.parametrize(
    ("lengths_us", "unknown"),
    [
        ([3.25, 0, 2, 0, 0], [1, 3, 4]),  # exact times: no kernel takes none
        ([3, 0, 2, 0, 0], [1]),  # kernel 0 takes three, kernel 2 always less than one
        ([0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),
        ([3, 4, 2, 1, 0], []),
    ],
)
def test_a_kernel_of_no_length_has_an_unknown_one_unless_times_are_rounded(
    lengths_us: list[float], unknown: list[int]
) -> None:
    lengths = np.array([round(1000 * one) for one in lengths_us])
    assert np.flatnonzero(without_length(lengths, np.array([0, 0, 1, 2, 2]))).tolist() == unknown


def operator(name: str, ts: float, dur: float = 10, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}


def read_text(text: str) -> Trace:
    return read_trace("t.json", stream=io.BytesIO(text.encode()))


def calls_of(unit: float, *, rest: float = 0.0) -> str:
    """1,000 operators a hundred microseconds apart, which last 1 to 20 us, in a unit."""
    lengths = (1 + number % 20 for number in range(1_000))
    times = ((100 * number * unit, length * unit + rest) for number, length in enumerate(lengths))
    return json.dumps([operator("aten::add", ts, dur) for ts, dur in times])


def test_times_in_another_unit_are_refused() -> None:
    with pytest.raises(InputError, match=r"in nanoseconds: the shortest .* would take 3 ms") as told:
        read_text(calls_of(1_000))
    assert "divide every ts and dur by 1,000" in told.value.hint
    with pytest.raises(InputError, match=r"in milliseconds: half .* would take less than 10 ns"):
        read_text(calls_of(0.001))
    assert len(read_text(calls_of(1))) == 1_000
    assert len(read_text(calls_of(1_000, rest=0.5))) == 1_000  # no clock of nanoseconds has halves


def test_events_that_stand_twice_count_once() -> None:
    """Operators as long as others, at the same time on their thread, have other ids."""
    alike = [operator("twin", 0, **{"External id": number}) for number in (1, 2)]
    once = [operator(f"op{number}", number, **{"External id": 10 + number}) for number in range(1, 101)]
    trace = read_text(json.dumps([*once, *alike, *once, operator("op7", 7, 11)]))
    assert sorted([trace.row_name(row) for row in range(len(trace))]) == sorted(
        [f"op{number}" for number in range(1, 101)] + ["twin", "twin", "op7"]
    )
    assert [limit.code for limit in trace.limits] == ["doubled-events"]
    assert trace.limits[0].message == "t.json: 100 events stand twice in the file, and count once"
    assert len(read_text(json.dumps([*once[1:], *once[1:]]))) == 198  # too few to say that a file was joined
