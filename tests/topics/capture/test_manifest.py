"""What a manifest adds to a diagnosis: facts, limits, the strategy; and manifests that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tracedoc
from tracedoc.diagnosis import Diagnosis
from tracedoc.ranks.strategy import resolve_strategy
from tracedoc.ranks.strategy_kinds import Claim
from tracedoc.run.job import Job, RankJob, read_job
from tracedoc.run.manifest import read_manifest
from tracedoc.run.steplog import CAPACITY, COLLECTION, HEADER, MAGIC, RECORD, STEP, WINDOW, parse_step_log
from tracedoc.testing import TraceBuilder
from tracedoc.testing.cases import draw_log, write_job
from tracedoc.testing.lanes import parse_lanes
from tracedoc.topics.step.run import counted_steps
from tracedoc.values import Unknown

GIB = 1024**3


def diagnose(folder: Path, part: dict[str, Any], log: str = "", ranks: int = 2) -> Diagnosis:
    """Diagnose two ranks of five 100 ms steps that say ``part`` of themselves."""
    for builder in parse_lanes("compute 0-100", ranks=ranks):
        builder.write(folder / f"rank-{builder.rank}.json")
    write_job(folder, range(ranks), part, log)
    return tracedoc.diagnose([folder], tracedoc.Options(jobs=1))


def test_memory_is_that_of_the_whole_job(tmp_path: Path) -> None:
    memory = {"total_bytes": 80 * GIB, "peak_allocated_bytes": 50 * GIB, "allocation_retries": 3}
    facts = diagnose(tmp_path, {"memory": memory}).facts
    assert facts["tensor_memory_frac"].value == 50 / 80
    assert facts["allocation_retries"].value == 3


def test_settings_are_facts(tmp_path: Path) -> None:
    framework = {
        "loaders": [{"num_workers": 0}, {"num_workers": 4, "prefetch_factor": 2}],
        "ddp": [{"bucket_bytes_cap": 1024 * 1024}],
    }
    facts = diagnose(tmp_path, {"framework": framework}).facts
    assert facts["loader_workers"].value == 4
    assert facts["loader_prefetch_factor"].value == 2
    assert facts["ddp_bucket_bytes"].value == 1024 * 1024


@pytest.mark.parametrize(
    ("host", "workers"),
    [
        ({"cpus": 64, "cpus_allowed": 16, "affinity": "0-15"}, 7),  # two ranks share sixteen cores
        ({"cpus": 64, "cpus_allowed": 64, "affinity": "0-63"}, 8),
        ({"cpus": 64, "cpus_allowed": 64, "affinity": "0-63", "cgroup_cpus": 9.5}, 3),
        ({"cpus": 2, "cpus_allowed": 2, "affinity": "0-1"}, 1),
        ({}, 8),
    ],
)
def test_a_rank_is_told_as_many_loader_workers_as_it_has_cores(
    tmp_path: Path, host: dict[str, Any], workers: int
) -> None:
    facts = diagnose(tmp_path, {"environment": {"host": host}}).facts
    assert facts["suggested_loader_workers"].value == workers


@pytest.mark.parametrize(
    ("ran_us", "workers", "pace"),
    [
        (80_000, 1, 1.0),  # samples take all of a core, and there is one to spare
        (20_000, 4, 0.25),  # 20 ms of each 100 ms step are work, and 5 ms waiting for a core
        (None, 1, 1.0),
    ],
)
def test_samples_that_wait_for_a_disk_share_a_core(
    tmp_path: Path, ran_us: int | None, workers: int, pace: float
) -> None:
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(5):
            builder.step(number, number * 100, number * 100 + 100).loader(number * 100, number * 100 + 80)
            builder.host("aten::mm", number * 100 + 80, number * 100 + 100)
        builder.write(tmp_path / f"rank-{rank}.json")
    thread = {"steps": 5, "ran_us": ran_us * 5, "waited_us": 25_000} if ran_us else {}
    part = {
        "environment": {"host": {"cpus": 4, "cpus_allowed": 4, "affinity": "0-3"}},
        "step_ms": {"during": {"median_ms": 100.0, "steps": 5}},
        "window": {"training_thread": thread},
    }
    write_job(tmp_path, range(2), part, "")
    facts = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1)).facts
    assert facts["suggested_loader_workers"].value == workers
    assert facts["suggested_loader_interval_frac"].value == pace
    busy = (ran_us + 5_000) / 100_000 if ran_us else None
    assert facts["training_thread_busy_frac"].value == busy


def test_a_job_that_stays_slower_is_a_limit(tmp_path: Path) -> None:
    step_ms = {"before": {"median_ms": 100, "steps": 10}, "after": {"median_ms": 110, "steps": 10}}
    (limit,) = [one for one in diagnose(tmp_path, {"step_ms": step_ms}).limits if "slower" in one.code]
    assert limit.message == "steps took 10 % longer after the capture than before it"


@pytest.mark.parametrize(("after", "steps"), [(101, 10), (150, 3), (90, 10)])
def test_a_job_that_does_not_is_none(tmp_path: Path, after: float, steps: int) -> None:
    step_ms = {"before": {"median_ms": 100, "steps": 10}, "after": {"median_ms": after, "steps": steps}}
    limits = diagnose(tmp_path, {"step_ms": step_ms}).limits
    assert not [one for one in limits if one.code == "slower-after-capture"]


def test_steps_beside_the_profiler_weigh_by_their_number(tmp_path: Path) -> None:
    step_ms = {
        "before": {"median_ms": 90, "steps": 4},
        "during": {"median_ms": 120, "steps": 6},
        "after": {"median_ms": 104, "steps": 10},
    }
    facts = diagnose(tmp_path, {"step_ms": step_ms}).facts
    assert facts["unprofiled_step_ms"].value == 100
    assert facts["profiler_overhead_frac"].value == pytest.approx(0.2)


def test_outliers_that_come_regularly_have_a_period(tmp_path: Path) -> None:
    facts = diagnose(tmp_path, {}, "100 x9 300 " * 5).facts
    assert facts["logged_steps"].value == 45
    assert facts["logged_step_ms"].value == 100
    assert facts["step_outliers"].value == 5
    assert (facts["slow_steps_pattern"].value, facts["slow_steps_period"].value) == ("regular", 10)
    assert facts["slow_steps_cost_ms"].value == pytest.approx(5 * 200 / 45)


def test_outliers_between_those_that_come_regularly_do_not_hide_the_period(tmp_path: Path) -> None:
    """Steps 10, 20, 30, 40 and 50, and two accidents at 23 and 37: four of six gaps are of other lengths."""
    log = "100 x9 300 100 x9 300 100 x2 160 100 x6 300 100 x6 160 100 x2 300 100 x9 300 100 x5"
    facts = diagnose(tmp_path, {}, log).facts
    assert facts["step_outliers"].value == 7
    assert facts["slow_steps_period"].value == 10


def test_steps_in_which_a_rank_waits_for_one_that_is_recorded_do_not_count(tmp_path: Path) -> None:
    """Rank 0 records step 21, which takes 2 s so; rank 1 is a step ahead and waits in its step 22."""
    diagnose(tmp_path, {}, "100 x41")
    recorded = draw_log("100 x20 2000 100 x20", rank=0)
    began = HEADER.unpack_from(recorded)[3]
    for number, ms in ((0, 2_050), (1, 4_000)):
        recorded += RECORD.pack(number, WINDOW, began + ms * 1_000_000, 0)
    (tmp_path / "rank-0.steps").write_bytes(recorded)
    (tmp_path / "rank-1.steps").write_bytes(draw_log("100 x21 2100 100 x19", rank=1))
    facts = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1)).facts
    # 2 s after 4.0 s are for writing, so that all steps from 21 on are touched: 6 to 20 are left.
    reason = (
        "36 steps were logged after the first 5; without the 21 that the capture and the writing of its "
        "trace touched, 15 are left, fewer than 20"
    )
    assert facts["step_outliers"].unknown == facts["slow_steps_cost_ms"].unknown == reason


def test_the_longest_pause_is_told_by_rank(tmp_path: Path) -> None:
    facts = diagnose(tmp_path, {}, "100 x20  160 gc 60  100 x20").facts
    assert facts["worst_gc_pause_ms"].value == 60
    # Both ranks paused in that step, and it took 60 ms longer.
    assert facts["gc_cost_ms"].value == pytest.approx(60 / 36)


def test_the_longest_pause_told_is_that_of_any_rank(tmp_path: Path) -> None:
    """Rank 1 alone collects, for 60 ms in every step from the sixth on; both steps take 160 ms then."""
    diagnose(tmp_path, {}, "100 x5 160 x30")
    (tmp_path / "rank-1.steps").write_bytes(draw_log("100 x5 160 x30 gc 60", rank=1))
    found = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1))
    assert found.facts["worst_gc_pause_ms"].value == 60
    (finding,) = [one for one in found.findings if one.rule_id == "gc-pauses"]
    assert "the longest pause took 60 ms" in finding.message


def test_steps_that_the_capture_touches_do_not_count() -> None:
    """Steps of 1 s, a window from 10.5 to 12.5 s, and 18 MB to write: 0.9 s after 2 s of quiet, to 15.4 s."""
    began, second = 1_700_000_000 * 10**9, 10**9
    records = [(number, STEP, began + number * second, second) for number in range(1, 41)]
    records += [(0, WINDOW, began + 10 * second + second // 2, 0)]
    closed = [(1, WINDOW, began + 12 * second + second // 2, 0)]

    def counted(listed: list[tuple[int, int, int, int]], json_bytes: int) -> list[int] | Unknown:
        content = HEADER.pack(MAGIC, 0, CAPACITY, began) + b"".join(RECORD.pack(*one) for one in listed)
        steps = counted_steps(RankJob(0, json_bytes=json_bytes, log=parse_step_log(content)))
        return steps if isinstance(steps, Unknown) else steps.number.tolist()

    # Step 6 is the first after the warm-up; step 11 ends at 11 s, step 16 begins at 15 s.
    assert counted(records + closed, 18_000_000) == [6, 7, 8, 9, 10, *range(17, 41)]
    assert counted(records + closed, 0) == [6, 7, 8, 9, 10, *range(16, 41)]
    # Without an end the capture touches all that follows: five steps are left.
    assert counted(records, 0) == Unknown(
        "35 steps were logged after the first 5; without the 30 that the capture and the writing of its "
        "trace touched, 5 are left, fewer than 20"
    )


def test_without_a_manifest_nothing_is_known(tmp_path: Path) -> None:
    for builder in parse_lanes("compute 0-100", ranks=1):
        builder.write(tmp_path / "rank-0.json")
    facts = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1)).facts
    for name in ("unprofiled_step_ms", "debug_settings", "gc_cost_ms", "loader_workers"):
        assert facts[name].unknown == "no manifest: capture with `tracedoc collect`"


@pytest.mark.parametrize(
    "part",
    [
        {"environment": []},
        {"framework": "ddp", "memory": 3, "step_ms": [1]},
        {"framework": {"ddp": {"x": 1}, "loaders": [4, None]}, "nccl": {"transports": ["a"]}},
        {"memory": {"total_bytes": "80", "peak_reserved_bytes": True}, "step_ms": {"before": {"steps": -1}}},
        {"environment": {"variables": {"CUDA_LAUNCH_BLOCKING": 1}}, "json_bytes": -5, "step_log": "../x"},
    ],
)
def test_a_manifest_of_other_types_costs_no_answer(tmp_path: Path, part: dict[str, Any]) -> None:
    diagnosis = diagnose(tmp_path, part)
    assert diagnosis.budget is not None
    assert not [verdict for verdict in diagnosis.verdicts if verdict.outcome == "error"]
    assert diagnosis.facts["allocation_retries"].unknown


def test_a_step_log_beside_another_folder_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder, [0], {}, "100 x30")
    (folder / "rank-0.steps").rename(tmp_path / "rank-0.steps")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["ranks"]["0"]["step_log"] = "../rank-0.steps"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    job = read_job(read_manifest(folder))
    assert job is not None
    assert job.ranks[0].log is None


def claim(family: str, confidence: str = "low") -> Claim:
    return Claim(family.upper(), family, "unknown", confidence, ("seen in the trace",))


def test_a_collection_after_the_last_step_belongs_to_none() -> None:
    began, second = 1_700_000_000 * 10**9, 10**9
    records = [(number, STEP, began + number * second, second) for number in range(1, 31)]
    records.append((2, COLLECTION, began + 31 * second, second // 2))
    content = HEADER.pack(MAGIC, 0, CAPACITY, began) + b"".join(RECORD.pack(*one) for one in records)
    steps = counted_steps(RankJob(0, log=parse_step_log(content)))
    assert not isinstance(steps, Unknown)
    assert steps.number.tolist() == list(range(6, 31))
    assert not steps.paused_ns.any()


def test_a_file_that_is_no_step_log_is_none() -> None:
    assert parse_step_log(HEADER.pack(b"TDSTEPS9", 0, CAPACITY, 0) + RECORD.pack(1, STEP, 9, 9)) is None
    assert parse_step_log(HEADER.pack(MAGIC, 0, CAPACITY, 0)[:-1]) is None


def test_a_live_wrapper_settles_the_strategy() -> None:
    job = Job((RankJob(0, frameworks=("DDP",)),))
    confirmed = resolve_strategy(claim("ddp", "medium"), job)
    assert (confirmed.name, confirmed.confidence) == ("DDP", "high")
    assert confirmed.evidence == ("seen in the trace", "a live DDP wrapper, by the manifest")
    named = resolve_strategy(claim("unknown"), job)
    assert (named.name, named.family, named.sharding, named.confidence) == ("DDP", "ddp", "none", "high")
    assert resolve_strategy(claim("fsdp2", "high"), job).family == "fsdp2"
    assert resolve_strategy(claim("unknown"), Job()).family == "unknown"


def test_the_gpu_tells_why_its_clocks_were_lowered(tmp_path: Path) -> None:
    clocks = {"samples": 20, "throttled_frac": {"power cap": 0.25, "hardware thermal slowdown": 0.5}}
    facts = diagnose(tmp_path, {"window": {"clocks": clocks}}).facts
    assert facts["gpu_throttled_by"].value == "hardware thermal slowdown 50 %, power cap 25 %"


def test_a_gpu_that_was_not_sampled_tells_nothing(tmp_path: Path) -> None:
    assert "pynvml" in str(diagnose(tmp_path, {"window": {}}).facts["gpu_throttled_by"].unknown)


def test_a_log_whose_clock_was_set_back_counts_each_step_once(tmp_path: Path) -> None:
    """Steps 21 to 40 end before steps 1 to 20 by the clock, and five of them are logged twice."""
    diagnose(tmp_path, {}, "100 x41")
    content = draw_log("100 x40", rank=0)
    size = RECORD.size
    records = [content[place : place + size] for place in range(HEADER.size, len(content), size)]
    moved = [
        RECORD.pack(n, kind, end - 3 * 10**9, length)
        for n, kind, end, length in map(RECORD.unpack, records[20:])
    ]
    for rank in (0, 1):
        log = content[: HEADER.size] + b"".join([*records[:20], *moved, *moved[:5]])
        (tmp_path / f"rank-{rank}.steps").write_bytes(log)
    facts = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1)).facts
    assert facts["logged_steps"].value == 35
    assert (facts["step_outliers"].value, facts["logged_step_ms"].value) == (0, 100)
