"""Captured steps that are far longer than the others: which, on whom, and what the host does in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tracedoc
from tracedoc.diagnosis import Diagnosis
from tracedoc.testing import TraceBuilder

PRODUCT = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_tn"
AWAY_MS = 400.0


def doing(builder: TraceBuilder, what: str, start: float, end: float) -> None:
    """What fills the time in which a rank launches nothing."""
    if what == "nothing":
        return
    if what == "loader":
        builder.loader(start, end)
    elif what.startswith("cuda"):
        builder.runtime(what, start, end)
    else:
        if "evaluate" in what:
            for begin in (start, start + 200.0):
                builder.kernel(PRODUCT, begin, begin + 190.0, launch_ms=begin - 0.01)
        builder.host(what, start, end, category="python_function" if ".py(" in what else "user_annotation")


def diagnose(
    folder: Path,
    *,
    what: str = "nothing",
    away: tuple[int, ...] = (),
    after_steps: tuple[int, ...] = (3,),
    steps: int = 6,
    away_ms: float = AWAY_MS,
    longest_ms: float = 0.0,
    slower_from: int = 99,
    slower: tuple[int, ...] = (0, 1, 2, 3),
    update_every: int = 0,
    meanwhile: str = "",
) -> Diagnosis:
    """Diagnose four ranks whose steps take 81 ms: 60 of compute, 20 of an all-reduce, 1 between two steps.

    The ranks ``away`` launch nothing for ``away_ms`` after some steps, rank 3 for ``longest_ms`` if that is
    more; others then wait for them in the next. From ``slower_from`` on compute takes 24 ms longer on ranks
    that are ``slower``, whose host is in ``meanwhile``. Every so many steps have an update of 30 ms. The last
    step is not complete.
    """

    def gone(rank: int) -> float:
        return 0.0 if rank not in away else max(longest_ms, away_ms) if rank == 3 else away_ms

    for rank in range(4):
        builder, start = TraceBuilder(rank, 4), 1.0
        for index in range(steps):
            slow = index >= slower_from and slower
            computed = start + (84.0 if slow and rank in slower else 60.0)
            meet = start + (84.0 if slow else 60.0)
            before = index - 1 in after_steps and away
            waits = max(away_ms, longest_ms) - gone(rank) if before else 0.0
            end = meet + 20.0 + waits
            builder.kernel(PRODUCT, start, computed, launch_ms=start - 0.01)
            builder.backward(start + 0.02, start + 0.1)
            builder.collective("allreduce", computed, end, nbytes=64 << 20, launch_ms=start + 0.03)
            builder.runtime("cudaDeviceSynchronize", start + 0.2, end + 0.01)
            if slow and meanwhile:
                builder.host(meanwhile, start + 0.15, end + 0.02)
            if update_every and (index + 1) % update_every == 0:
                builder.optimizer(end + 0.02, end + 30.0)
                builder.kernel("adam_foreach", end + 0.1, end + 30.0, launch_ms=end + 0.05)
                end += 30.0
            after = end + 1.0
            if index in after_steps and rank in away:
                doing(builder, what, after, after + gone(rank) - 1.0)
                after += gone(rank)
            builder.step(index, start - 0.5, after - 0.6)
            start = after
        if ".py(" in what:
            builder.host("train.py(9): main", 0.4, start, category="python_function")
        builder.write(folder / f"rank-{rank}.json")
    return tracedoc.diagnose([folder], tracedoc.Options(jobs=1))


def values(diagnosis: Diagnosis, *names: str) -> tuple[Any, ...]:
    return tuple(diagnosis.facts[name].value for name in names)


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("what", "kind", "told"),
    [
        ("train.py(88): save_checkpoint", "host", "`save_checkpoint` (`train.py:88`)"),
        ("eval.py(3): evaluate", "compute", "`evaluate` (`eval.py:3`)"),
        ("evaluation", "host", "the range `evaluation`"),
        ("gc.collect(2)", "gc", "the range `gc.collect(2)`"),
        ("cudaMalloc", "allocator", "`cudaMalloc`"),
        ("nothing", "host", None),
    ],
)
def test_a_stall_that_all_ranks_share(tmp_path: Path, what: str, kind: str, told: str | None) -> None:
    """One of five complete steps takes 400 ms longer: 80 of the mean, and nobody is a straggler."""
    found = diagnose(tmp_path, what=what, away=ALL)
    names = (
        "long_steps_captured",
        "long_steps_pattern",
        "long_step_kind",
        "long_step_ranks",
        "long_step_doing",
    )
    assert values(found, *names) == ("3", "one", kind, "every rank", told)
    assert values(found, "longest_step", "longest_step_doing") == (3, told)
    assert found.facts["long_step_excess_ms"].value == pytest.approx(AWAY_MS, abs=0.1)
    first = found.findings[0]
    assert (first.rule_id, first.severity) == ("slow-captured-step", "critical")
    assert first.gain is not None
    assert first.gain.likely_ms == pytest.approx(80.0, abs=0.1)
    assert not [one for one in found.findings if one.topic == "straggler"]


def test_one_rank_that_writes_while_the_others_wait(tmp_path: Path) -> None:
    """Rank 0 is away for 400 ms at the end of step 3; the others wait for it in the all-reduce of step 4."""
    found = diagnose(tmp_path, what="train.py(88): save_checkpoint", away=(0,))
    names = ("long_steps_captured", "long_step_kind", "long_step_ranks", "long_step_doing")
    assert values(found, *names) == ("3", "host", "rank 0", "`save_checkpoint` (`train.py:88`)")
    assert found.ledger is not None
    late = found.ledger.causes[0]
    assert (late.id, late.ranks, late.share_ms) == ("ranks.host", (0,), pytest.approx(400 / 5))
    assert found.findings[0].rule_id == "occasional-rank-work"
    assert "Rank 0 alone runs `save_checkpoint` (`train.py:88`) in step 3" in found.findings[0].message


def test_a_loader_that_stalls_once_is_waiting_for_input(tmp_path: Path) -> None:
    found = diagnose(tmp_path, what="loader", away=ALL)
    assert found.ledger is not None
    waits = next(one for one in found.ledger.causes if one.id == "input.wait")
    assert waits.share_ms == pytest.approx(AWAY_MS / 5, abs=1.0)
    assert waits.place == "above all in step 3"
    assert waits.told_by == ("occasional-input-stall",)


@pytest.mark.parametrize(
    ("after_steps", "pattern", "fix"),
    [
        ((0,), "the first", "Capture later steps"),
        ((0, 1, 4), "the first", "Capture later steps"),
        ((1,), "one", "Do it less often, or beside the training thread"),
        ((0, 3, 4), "several", "Do it less often, or beside the training thread"),
    ],
)
def test_the_first_steps_of_a_job_are_warm_up(
    tmp_path: Path, after_steps: tuple[int, ...], pattern: str, fix: str
) -> None:
    """Of eight complete steps from the very first on."""
    found = diagnose(tmp_path, away=ALL, after_steps=after_steps, steps=9)
    assert found.facts["long_steps_pattern"].value == pattern
    assert found.findings[0].fixes[0].title == fix


def test_compute_that_is_slower_from_one_step_on(tmp_path: Path) -> None:
    """Two of five complete steps compute 24 ms longer: 9.6 of the mean. The host does not cause that."""
    found = diagnose(tmp_path, slower_from=3, meanwhile="wait_for_all")
    names = ("long_steps_captured", "long_steps_pattern", "long_step_kind", "long_step_doing")
    assert values(found, *names) == ("3-4", "from one on", "the same kernels", None)


def test_what_comes_every_third_step(tmp_path: Path) -> None:
    """Three of nine complete steps are 50 ms longer: 16.7 of the mean."""
    log = "train.py(70): log_metrics"
    found = diagnose(tmp_path, what=log, away=ALL, after_steps=(1, 4, 7), steps=10, away_ms=50.0)
    names = ("long_steps_pattern", "long_steps_period", "long_step_doing", "long_steps_captured")
    assert values(found, *names) == ("regular", 3, "`log_metrics` (`train.py:70`)", "1, 4, 7")
    message = next(one.message for one in found.findings if one.rule_id == "slow-captured-step")
    assert "every 3 steps one takes up to 50 ms longer than the others (steps 1, 4, 7)" in message
    assert not [one for one in found.findings if one.topic == "straggler"]


@pytest.mark.parametrize("after_steps", [(2, 9), (1, 4, 8), (2, 3, 4), (4, 6, 8)])
def test_long_steps_that_follow_no_order(tmp_path: Path, after_steps: tuple[int, ...]) -> None:
    """Two are always at one distance; three at others, side by side, or where one that is due is usual."""
    found = diagnose(tmp_path, away=ALL, after_steps=after_steps, steps=12)
    assert values(found, "long_steps_pattern", "long_steps_period") == ("several", None)


def test_a_loader_that_stalls_in_every_third_step(tmp_path: Path) -> None:
    """Its workers refill: the ranks stall together, and none is late."""
    found = diagnose(tmp_path, what="loader", away=ALL, after_steps=(1, 4, 7), steps=10, away_ms=50.0)
    assert found.ledger is not None
    waits = next(one for one in found.ledger.causes if one.id == "input.wait")
    assert waits.share_ms == pytest.approx(50 / 3, abs=0.5)
    assert waits.told_by == ("occasional-input-stall",)
    assert not [one for one in found.findings if one.topic == "straggler"]


def test_stalls_of_any_length_that_ranks_share_are_no_lateness(tmp_path: Path) -> None:
    """All compile once: 400 ms, one rank 60 more, for which the others wait in the next step."""
    compiles = "_compile.compile_inner (dynamo_timed)"
    found = diagnose(tmp_path, what=compiles, away=ALL, away_ms=400.0, longest_ms=460.0)
    names = ("long_steps_captured", "long_step_kind", "long_step_ranks", "long_step_doing")
    assert values(found, *names) == ("3", "compile", "every rank", f"the range `{compiles}`")
    assert found.findings[0].rule_id == "slow-captured-step"
    assert not [one for one in found.findings if one.topic == "straggler"]


def test_most_steps_may_be_the_slow_ones(tmp_path: Path) -> None:
    """From the third of seven complete steps on: 5 of 7 times 24 ms."""
    found = diagnose(tmp_path, slower_from=2, steps=8)
    names = ("long_steps_captured", "long_steps_pattern", "long_step_kind", "long_step_ranks")
    assert values(found, *names) == ("2-6", "from one on", "the same kernels", "every rank")
    finding = next(one for one in found.findings if one.rule_id == "slow-captured-step")
    assert finding.gain is not None
    assert finding.gain.likely_ms == pytest.approx(24 * 5 / 7, abs=0.1)


def test_every_other_step_may_be_the_slow_one(tmp_path: Path) -> None:
    """Of seven complete steps the first, the last, and two between."""
    log = "train.py(70): log_metrics"
    found = diagnose(tmp_path, what=log, away=ALL, after_steps=(0, 2, 4, 6), steps=8, away_ms=50.0)
    names = ("long_steps_captured", "long_steps_period", "long_step_doing")
    assert values(found, *names) == ("0, 2, 4, 6", 2, "`log_metrics` (`train.py:70`)")


def test_one_rank_that_computes_longer_from_one_step_on(tmp_path: Path) -> None:
    """Its kernels take 84 ms instead of 60 in the last three of six complete steps: 12 of the mean."""
    found = diagnose(tmp_path, slower_from=3, slower=(2,), steps=7)
    assert values(found, "straggler_when", "straggler_main_rank") == ("from step 3 on", "2")
    finding = next(one for one in found.findings if one.rule_id == "rotating-straggler")
    assert "rank 2 is late from step 3 on; rank 2's kernels take longer then" in finding.message
    assert finding.fixes[0].change == "nvidia-smi dmon -s pucvt"
    assert finding.gain is not None
    assert finding.gain.likely_ms == pytest.approx(12.0, abs=0.2)


def test_one_rank_that_is_away_in_every_third_step(tmp_path: Path) -> None:
    found = diagnose(tmp_path, away=(0,), after_steps=(1, 4, 7), steps=10, away_ms=50.0)
    assert values(found, "straggler_when") == ("every 3 steps (2, 5, 8)",)
    assert "; every 3 steps (2, 5, 8)" in next(
        one.message for one in found.findings if one.rule_id == "rank-zero-work"
    )


@pytest.mark.parametrize("what", ["train.py(70): log_metrics", "nothing"])
def test_of_two_steps_one_is_long_by_a_tenth_if_it_alone_stands_still(tmp_path: Path, what: str) -> None:
    found = diagnose(tmp_path, what=what, away=ALL, after_steps=(1,), steps=3, away_ms=30.0)
    assert values(found, "captured_steps", "long_steps_captured") == (2, "1")
    assert values(found, "longest_step_pause_ms") == (pytest.approx(31.0, abs=0.1),)


def test_of_two_steps_neither_is_long_that_computes_a_third_longer(tmp_path: Path) -> None:
    found = diagnose(tmp_path, slower_from=1, steps=3)
    assert values(found, "captured_steps", "long_steps_count") == (2, 0)


def test_steps_with_an_update_are_no_slow_ones(tmp_path: Path) -> None:
    """Every fourth of twelve micro-batches runs the optimizer, for 30 ms."""
    found = diagnose(tmp_path, steps=13, update_every=4)
    assert values(found, "long_steps_count") == (0,)
    assert not {"slow-captured-step", "slow_steps"} & {one.rule_id for one in found.findings}


def test_a_long_step_is_compared_with_steps_of_its_kind(tmp_path: Path) -> None:
    """Of the steps without an update one is 50 ms longer, of those with one none."""
    found = diagnose(tmp_path, steps=13, update_every=4, away=ALL, after_steps=(5,), away_ms=50.0)
    assert values(found, "long_steps_captured") == ("5",)
    assert found.facts["long_step_excess_ms"].value == pytest.approx(50.0, abs=0.1)


def test_even_steps_have_no_long_one(tmp_path: Path) -> None:
    facts = diagnose(tmp_path).facts
    assert facts["long_steps_count"].value == 0
    assert facts["captured_steps"].value == 5
    assert facts["long_steps_pattern"].unknown == "no captured step is far longer than the others"


@pytest.mark.parametrize(
    ("operators", "kind", "fix"),
    [
        (10, "the same operators", "See what else runs on the host in that step"),
        (20, "compute", "See what else is computed in that step"),
    ],
)
def test_whether_a_step_of_a_cpu_is_long_by_more_operators(
    tmp_path: Path, operators: int, kind: str, fix: str
) -> None:
    """Ten operators take 50 ms a step; those of the fourth of six steps take 100 ms."""
    builder, start = TraceBuilder(0, 1, device=None), 1.0
    for index in range(6):
        count, length = (operators, 100.0) if index == 3 else (10, 50.0)
        for place in range(count):
            begin = start + place * length / count
            builder.host("aten::mm", begin, begin + length / count, category="cpu_op")
        builder.step(index, start, start + length)
        start += length + 0.01
    builder.write(tmp_path / "rank-0.json")
    found = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1))
    assert values(found, "long_steps_captured", "long_step_kind") == ("3", kind)
    assert found.findings[0].fixes[0].title == fix


@pytest.mark.parametrize(("code", "told"), [("eval.py(4): evaluate", "2, 5"), ("aten::stack", None)])
def test_a_function_that_runs_in_few_steps_makes_them_long_however_much_others_differ(
    tmp_path: Path, code: str, told: str | None
) -> None:
    """Of steps that take 5 to 31 ms two are in a function for 18 ms; their lengths alone do not tell."""
    builder, start = TraceBuilder(0, 1, device=None), 0.0
    for index, length in enumerate((9.0, 13.0, 25.0, 21.0, 13.0, 31.0, 5.0, 13.0, 13.0)):
        builder.step(index, start, start + length)
        builder.host("aten::mm", start, start + 2)
        builder.backward(start + 2, start + 3)
        builder.host("aten::add", start + 3, start + length)
        if index in (2, 5):
            category = "python_function" if ".py(" in code else "cpu_op"
            builder.host(code, start + length - 18, start + length, category=category)
        start += length
    builder.write(tmp_path / "rank-0.json")
    found = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1))
    assert values(found, "long_steps_captured") == (told,)
    if told:
        # The usual step takes 13 ms: the two take 12 and 18 ms longer, of eight complete ones.
        slow = next(one for one in found.ledger.causes if one.id == "slow_steps")
        assert slow.alone_ms[1] == pytest.approx(30 / 8, rel=0.02)
