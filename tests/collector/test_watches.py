"""The cheap watches of a whole run: the step log, the garbage collector, counters, clocks."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tracedoc.collector import environment, evidence
from tracedoc.collector.devices import HostCommands, summarise_samples
from tracedoc.collector.environment import difference, numbers, ranges, read_counters
from tracedoc.collector.evidence import CollectionWatch
from tracedoc.collector.steps import StepLogWriter, with_waits
from tracedoc.run import steplog
from tracedoc.run.steplog import parse_step_log, read_step_log
from tracedoc.run.untrusted import MissingError


def test_a_log_keeps_steps_and_pauses(tmp_path: Path) -> None:
    writer = StepLogWriter(tmp_path / "rank-3.steps", 3)
    writer.step(1_000)
    writer.step(1_250)
    writer.collection(2, 1_240, 100)
    writer.close()
    writer.step(9_999)
    log = read_step_log(tmp_path / "rank-3.steps")
    assert log is not None
    assert log.rank == 3
    assert log.of_kind(steplog.STEP) == [(1, 1_000, 0), (2, 1_250, 250)]
    assert log.of_kind(steplog.COLLECTION) == [(2, 1_240, 100)]


def test_a_log_keeps_what_a_step_waited_for_cores(tmp_path: Path) -> None:
    """Steps of 10 ms and more; the kernel is asked in each."""
    waited = iter((500, 560, None, 600, 600, 640))
    writer = StepLogWriter(tmp_path / "rank-0.steps", 0, lambda: next(waited))
    for end_ms in (10, 20, 35, 45, 60, 80):
        writer.step(end_ms * 1_000_000)
    log = read_step_log(tmp_path / "rank-0.steps")
    writer.close()
    assert log is not None
    assert log.of_kind(steplog.CORE_WAIT) == [(2, 20_000_000, 60), (6, 80_000_000, 40)]
    assert [number for number, _, _ in log.of_kind(steplog.STEP)] == [1, 2, 3, 4, 5, 6]


def test_short_steps_are_written_together_and_the_longest_ones_waited(tmp_path: Path) -> None:
    """Steps of 2, 2, 5 and 4 ms, with 5 ms of waiting for cores; they are written when 10 ms are over."""
    waited = iter((1_000_000, 6_000_000))
    writer = StepLogWriter(tmp_path / "rank-0.steps", 0, lambda: next(waited))
    kept = []
    for end_ms in (10, 12, 14, 19, 23):
        writer.step(end_ms * 1_000_000)
        log = read_step_log(tmp_path / "rank-0.steps")
        assert log is not None
        kept.append([number for number, _, _ in log.of_kind(steplog.STEP)])
    writer.close()
    assert kept == [[1], [1], [1], [1], [1, 2, 3, 4, 5]]
    assert [(number, length) for number, _, length in log.of_kind(steplog.CORE_WAIT)] == [
        (4, 3_000_000),
        (5, 2_000_000),
    ]


@pytest.mark.parametrize(
    ("lengths", "waited", "waits"),
    [
        ((2, 2, 6), 4, (0, 0, 4)),
        ((2, 2, 6), 7, (1, 1, 5)),
        ((6, 2, 4), 2, (2, 0, 0)),
        ((6, 2, 4), 3, (3, 0, 1)),  # 2.5 of the first and 0.5 of the third, each as long as before
        ((3, 3), 9, (3, 3)),
    ],
)
def test_steps_that_waited_are_equally_long_without_it(
    lengths: tuple[int, ...], waited: int, waits: tuple[int, ...]
) -> None:
    records = [(place, steplog.STEP, 100 + place, length) for place, length in enumerate(lengths)]
    found = {one[0]: one[3] for one in with_waits(records, waited) if one[1] == steplog.CORE_WAIT}
    assert tuple(found.get(place, 0) for place in range(len(lengths))) == waits


def test_steps_before_one_that_hangs_are_written_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracedoc.collector.steps.time.time_ns", lambda: 10_000_000)
    writer = StepLogWriter(tmp_path / "rank-0.steps", 0)
    for end_ns in (10_000_000, 12_000_000, 14_000_000):
        writer.step(end_ns)
    for now_ns, steps in ((19_000_000, 1), (20_000_000, 3)):
        monkeypatch.setattr("tracedoc.collector.steps.time.time_ns", lambda now_ns=now_ns: now_ns)
        writer.write()
        log = read_step_log(tmp_path / "rank-0.steps")
        assert log is not None
        assert len(log.of_kind(steplog.STEP)) == steps
    writer.close()


def test_a_full_log_keeps_the_newest_steps(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.steps"
    writer = StepLogWriter(path, 0)
    for end in range(1, steplog.CAPACITY + 11):
        writer.step(end)
    writer.close()
    log = read_step_log(path)
    assert log is not None
    steps = log.of_kind(steplog.STEP)
    assert len(steps) == steplog.CAPACITY
    assert (steps[0][0], steps[-1][0]) == (11, steplog.CAPACITY + 10)
    assert path.stat().st_size == steplog.HEADER.size + steplog.CAPACITY * steplog.RECORD.size


def test_a_cut_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.steps"
    writer = StepLogWriter(path, 0)
    writer.step(5)
    writer.step(7)
    writer.close()
    log = parse_step_log(path.read_bytes()[:-3])
    assert log is not None
    assert log.of_kind(steplog.STEP) == [(1, 5, 0)]


def test_other_bytes_are_no_log(tmp_path: Path) -> None:
    assert parse_step_log(b"") is None
    assert parse_step_log(b"x" * 100) is None
    with pytest.raises(MissingError):
        read_step_log(tmp_path / "none")


def test_collections_are_counted_and_long_ones_reported() -> None:
    pauses: list[tuple[int, int, int]] = []
    watch = CollectionWatch(lambda *pause: pauses.append(pause))
    callbacks = list(gc.callbacks)
    watch.begin()
    # Enough containers in a cycle that looking at them takes more than a millisecond.
    cycle: list[object] = [[index] for index in range(300_000)]
    gc.collect()
    watch.end()
    described = watch.describe()
    assert described["collections"][2] >= 1
    assert any(generation == 2 and length >= 1_000_000 for generation, _, length in pauses)
    assert round(described["longest_ms"][2] * 1e6) == max(length for g, _, length in pauses if g == 2)
    assert gc.callbacks == callbacks
    assert len(cycle) == 300_000


def test_counters_tell_what_was_added() -> None:
    assert difference({"a": 5, "b": 7, "c": 9}, {"a": 8, "b": 7, "c": 2}) == {"a": 3}
    before = read_counters()
    assert before["process.user_us"] > 0


def test_pressure_is_that_of_the_host_where_the_group_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_PRESSURE", tmp_path)
    monkeypatch.setattr(environment, "cgroup_file", lambda name, controller: None)
    (tmp_path / "io").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.21 total=342692585\nfull avg10=0.00 total=7\n"
    )
    counted = read_counters()
    assert counted["pressure.io_us"] == 342692585
    assert "pressure.memory_us" not in counted


def test_a_thread_tells_how_long_it_waited_for_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = tmp_path / "schedstat"
    monkeypatch.setattr(evidence, "_SCHEDULE", schedule)
    watch = evidence.CoreWait()
    watch.step(evidence.ThreadSchedule().scheduled_ns())
    assert watch.describe() is None
    schedule.touch()
    counted = evidence.ThreadSchedule()
    for ran_ms, waited_ms in [(100, 50), (160, 60), (300, 90)]:
        schedule.write_text(f"{ran_ms * 10**6} {waited_ms * 10**6} 7\n")
        watch.step(counted.scheduled_ns())
    assert watch.describe() == {"steps": 2, "ran_us": 200_000, "waited_us": 40_000}
    counted.close()
    assert counted.scheduled_ns() is None


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts this")
def test_each_thread_is_told_its_own_times() -> None:
    """This thread has run for longer than one that has just begun."""
    counted = evidence.ThreadSchedule()
    with ThreadPoolExecutor(1) as other:
        here, there, again = (
            counted.scheduled_ns(),
            other.submit(counted.scheduled_ns).result(),
            counted.scheduled_ns(),
        )
    counted.close()
    assert here is not None
    assert there is not None
    assert again is not None
    assert there[0] < here[0] <= again[0]


def test_throttling_is_a_share_of_the_samples() -> None:
    samples: list[tuple[int | None, int | None, int | None, int | None]] = [
        (1980, 500_000, 60, 0),
        (1980, 690_000, 71, 0x4),
        (1410, 700_000, 70, 0x4 | 0x40),
        (1980, 500_000, None, None),
    ]
    assert summarise_samples(samples) == {
        "samples": 4,
        "sm_clock_mhz_min": 1410,
        "sm_clock_mhz_median": 1980,
        "sm_clock_mhz_max": 1980,
        "power_w_median": 690.0,
        "power_w_max": 700.0,
        "temperature_c_max": 71,
        "throttled_frac": {"power cap": 0.6667, "hardware thermal slowdown": 0.3333},
    }
    assert summarise_samples([]) == {}


def test_a_program_that_fails_or_is_missing_answers_nothing() -> None:
    commands = HostCommands({"good": ("echo", "two GPUs"), "bad": ("false",), "absent": ("no-such-program",)})
    commands.begin()
    assert commands.answers(wait_seconds=30.0) == {"good": "two GPUs\n"}


def test_processors_are_told_as_ranges() -> None:
    assert ranges({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert ranges(set()) == ""


def test_a_disk_that_fails_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    writer = StepLogWriter(Path("/dev/full"), 0)
    writer.step(1)
    writer.close()


def test_one_slow_write_delays_no_record_and_a_slow_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    def slow_write(file: int, data: bytes, offset: int) -> int:
        nonlocal now
        now += 40_000_000
        return write(file, data, offset)

    write = os.pwrite
    monkeypatch.setattr("tracedoc.collector.steps.time.perf_counter_ns", lambda: now)
    monkeypatch.setattr("tracedoc.collector.steps.os.pwrite", slow_write)
    path = tmp_path / "rank-0.steps"
    writer = StepLogWriter(path, 0)  # its header takes 40 of the 50 ms that are free
    for end_ns in (10_000_000, 20_000_000, 30_000_000):
        writer.step(end_ns)
    log = read_step_log(path)
    assert log is not None
    assert [number for number, _, _ in log.of_kind(steplog.STEP)] == [1, 2]
    writer.step(10_000_000 + 100 * 70_000_000)  # 120 ms were spent, 70 more than are free
    log = read_step_log(path)
    assert log is not None
    assert [number for number, _, _ in log.of_kind(steplog.STEP)] == [1, 2, 3, 4]
