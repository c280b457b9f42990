"""What makes a rank late is found in that rank's own stacks, and what all ranks do in those of several."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tracedoc.collector.options import Options as CollectOptions
from tracedoc.collector.recorder import is_source_rank
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.testing.builder import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.topics.straggler.causes import STACKS_ON_ALL

ON_TIME = """
step: 100
compute    0-40   x20
allreduce  40-90  1MiB
"""
LATE = """
  rank {}:
    {}
    compute    30-70  x20
    allreduce  70-90  1MiB
"""
"""A rank that is 30 ms in no operator before each forward pass; the others wait 30 ms for it."""

MORE = """
  rank {}:
    compute    0-70   x35
    allreduce  70-90  1MiB
"""
"""A rank that is 30 ms in 15 operators more than the others, which wait 30 ms for it."""

Frame = tuple[str, float, float]
MAIN = ("train.py(30): main", 0, 100)
SAVE = ("train.py(4): save_samples", 0, 30)
LOAD = ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 30)


def stacks(folder: Path, rank: int, frames: tuple[Frame, ...]) -> str:
    """Write a step of 100 ms with these frames as the collector does, and return the file's name.

    Operators cover the step from 30 ms on.
    """
    builder = TraceBuilder(rank=rank, device=None)
    builder.host("ProfilerStep#26", 0, 100, category="user_annotation")
    builder.host("aten::mm", 30, 100, category="cpu_op")
    for name, start, end in frames:
        kinds = {".py(": "python_function", "aten::": "cpu_op"}
        kind = next((kind for part, kind in kinds.items() if part in name), "user_annotation")
        builder.host(name, start, end, category=kind)
    plain = builder.write(folder / "stacks.json")
    name = f"rank-{rank}.source.gz"
    (folder / name).write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return name


def diagnosed(
    folder: Path,
    late: tuple[int, ...],
    recorded: dict[int, tuple[Frame, ...]],
    *,
    ranks: int = 2,
    before: str = "",
    lanes_of_late: str = LATE,
    loop: tuple[str, ...] = (),
) -> Diagnosis:
    """Diagnose a run with these late ranks, all the time or each in its turn, of which some recorded stacks.

    ``before`` is the lane that a late rank has before its forward pass. ``loop`` are the frames that sampled
    stacks show around every step.
    """
    lanes = ON_TIME + "".join(lanes_of_late.format(rank, before) for rank in late)
    entries: dict[str, dict[str, object]] = {}
    for rank, builder in enumerate(parse_lanes(lanes, ranks=ranks, device=None)):
        builder.write(folder / f"rank-{rank}.json")
        entries[str(rank)] = {"file": f"rank-{rank}.json", "environment": {}}
        if loop:
            entries[str(rank)]["samples"] = {
                "steps": 40,
                "long": 0,
                "loop": [*loop],
                "frames": [[]],
                "sampled": [],
            }
        if rank in recorded:
            entries[str(rank)]["source"] = stacks(folder, rank, recorded[rank])
    (folder / MANIFEST_NAME).write_text(json.dumps({"schema": MANIFEST_SCHEMA, "ranks": entries}))
    return diagnose([folder], Options(jobs=1))


def named(diagnosis: Diagnosis, rank: int) -> object:
    return diagnosis.facts["straggler_code"].values[str(rank)]


def test_the_function_of_the_loop_is_nothing_to_take_out_of_the_step(tmp_path: Path) -> None:
    """Rank 1 is 30 ms longer in main itself, which runs all steps; but what main calls there is named."""
    loop = ("train.py(30): main@35",)
    (tmp_path / "plain").mkdir()
    plain = diagnosed(tmp_path / "plain", (1,), {1: (MAIN,)}, loop=loop)
    assert named(plain, 1) == "none"
    (tmp_path / "sleeps").mkdir()
    sleeps = (MAIN, ("time.py(1): sleep", 0, 30))
    assert (
        named(diagnosed(tmp_path / "sleeps", (1,), {1: sleeps}, loop=loop), 1)
        == "`sleep` in `main` (`train.py:30`)"
    )


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_s_own_stacks_name_its_function(tmp_path: Path, late: int) -> None:
    diagnosis = diagnosed(tmp_path, (late,), {late: (MAIN, SAVE), 1 - late: (MAIN,)})
    assert named(diagnosis, late) == "`save_samples` (`train.py:4`)"
    assert diagnosis.facts["straggler_recapture"].values[str(late)] == "none"
    (found,) = [
        one for one in diagnosis.findings if one.rule_id == ("straggler-rank" if late else "rank-zero-work")
    ]
    assert "30 ms" in found.message
    assert "`save_samples` (`train.py:4`)" in found.message
    assert found.fixes[0].title == "Take `save_samples` (`train.py:4`) out of the step"


def test_operators_that_only_the_late_rank_starts_name_their_function(tmp_path: Path) -> None:
    """Both start one in main; rank 1 starts 15 in log_metrics, through a function of torch, for 30 ms."""
    log = ("train.py(15): log_metrics", 0, 30)
    norm = ("torch/functional.py(9): norm", 0, 30)
    more = tuple(("aten::norm", 2.0 * at, 2.0 * at + 2) for at in range(15))
    recorded = {0: (MAIN,), 1: (MAIN, log, norm, *more)}
    diagnosis = diagnosed(tmp_path, (1,), recorded, lanes_of_late=MORE)
    assert diagnosis.facts["straggler_cause"].values["1"] == "more kernels"
    assert named(diagnosis, 1) == "`log_metrics` (`train.py:15`)"
    (found,) = [one for one in diagnosis.findings if one.rule_id == "straggler-rank"]
    assert "30 ms more than rank 0 in `log_metrics` (`train.py:15`)" in found.message
    assert [fix.title for fix in found.fixes] == ["Take `log_metrics` (`train.py:15`) out of the step"]
    assert diagnosis.facts["uneven_work_code"].value == "`log_metrics` (`train.py:15`)"
    alike = tmp_path / "alike"
    alike.mkdir()
    both = diagnosed(alike, (1,), {0: recorded[1], 1: recorded[1]}, lanes_of_late=MORE)
    assert named(both, 1) == "none"


@pytest.mark.parametrize("lanes", [LATE, MORE])
def test_what_ranks_do_in_turn_is_named_by_the_one_that_did_it_in_the_step_with_stacks(
    tmp_path: Path, lanes: str
) -> None:
    late = lanes.replace("rank {}:", "rank {0} step {1}:").replace("{}", "")
    turns = "".join(late.format(n % 2, n) for n in range(6))
    operators = tuple(("aten::norm", 2.0 * at, 2.0 * at + 2) for at in range(15)) if lanes is MORE else ()
    recorded = {0: (MAIN, ("aten::mm", 0, 28)), 1: (MAIN, SAVE, *operators)}
    diagnosis = diagnosed(tmp_path, (0,), recorded, lanes_of_late=f"steps: 6\n{turns}")
    assert diagnosis.facts["straggler_turn_code"].value == "`save_samples` (`train.py:4`)"
    assert "in `save_samples` (`train.py:4`)" in diagnosis.findings[0].message
    first = diagnosis.findings[0]
    assert "`save_samples` (`train.py:4`)" in first.fixes[0].title
    assert first.gain is not None
    assert first.gain.likely_ms == pytest.approx(30)  # of which the rank whose turn it is waits for none


def test_operators_of_the_turn_are_named_where_pauses_are_nowhere_in_the_stacks(tmp_path: Path) -> None:
    """Ranks pause for 30 ms in turn; in the step with stacks rank 1 runs operators of a function instead."""
    late = LATE.replace("rank {}:", "rank {0} step {1}:").replace("{}", "")
    turns = "".join(late.format(n % 2, n) for n in range(6))
    operators = tuple(("aten::norm", 2.0 * at, 2.0 * at + 2) for at in range(15))
    recorded = {0: (MAIN,), 1: (MAIN, SAVE, *operators)}
    diagnosis = diagnosed(tmp_path, (0,), recorded, lanes_of_late=f"steps: 6\n{turns}")
    assert diagnosis.facts["straggler_turn_code"].value == "`save_samples` (`train.py:4`)"


def test_a_rank_without_stacks_is_unknown_and_says_so(tmp_path: Path) -> None:
    """As runs of earlier versions are, in which rank 0 alone recorded them."""
    diagnosis = diagnosed(tmp_path, (1,), {0: (MAIN, SAVE)})
    assert named(diagnosis, 1) == "none"
    (found,) = [one for one in diagnosis.findings if one.rule_id == "straggler-rank"]
    assert "save_samples" not in found.message
    assert found.fixes[0].change == "tracedoc collect -- COMMAND   # names the function, with Python stacks"


def test_a_late_loader_is_named_from_its_own_rank_s_stacks(tmp_path: Path) -> None:
    """What the loader of another rank does is no reason why this one is late."""
    late = (MAIN, LOAD, ("data.py(8): decode", 1, 30))
    other = (MAIN, LOAD, ("data.py(20): shuffle", 1, 30))
    diagnosis = diagnosed(tmp_path, (1,), {0: other, 1: late}, before="loader 0-30")
    assert diagnosis.facts["straggler_cause"].values["1"] == "input"
    assert named(diagnosis, 1) == "`decode` (`data.py:8`)"
    alone = tmp_path / "alone"
    alone.mkdir()
    assert named(diagnosed(alone, (1,), {0: other}, before="loader 0-30"), 1) == "none"


def test_what_all_ranks_do_makes_none_of_them_late(tmp_path: Path) -> None:
    """All are 25 ms in the function, the late one 30: the 5 ms do not explain 30."""
    usual = ("train.py(4): save_samples", 0, 25)
    assert named(diagnosed(tmp_path, (1,), {0: (MAIN, usual), 1: (MAIN, SAVE)}), 1) == "none"


def test_with_stacks_of_the_late_rank_alone_its_time_counts_whole(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, (1,), {1: (MAIN, SAVE)})
    assert named(diagnosis, 1) == "`save_samples` (`train.py:4`)"


@pytest.mark.parametrize("line", [43, 44])
def test_a_function_that_runs_since_before_is_the_same_at_another_line(tmp_path: Path, line: int) -> None:
    """The loop itself is 30 ms outside operators on rank 1 and 5 ms on rank 0."""
    early = (("train.py(43): main", 0, 100), ("torch/nn/linear.py(9): forward", 5, 100))
    diagnosis = diagnosed(tmp_path, (1,), {0: early, 1: ((f"train.py({line}): main", 0, 100),)})
    assert named(diagnosis, 1) == f"`main` (`train.py:{line}`)"


def test_functions_of_one_name_are_told_apart_by_their_lines(tmp_path: Path) -> None:
    """Both are in forward of line 9 for 30 ms; the late one is in that of line 40 for as long."""
    usual = (MAIN, ("net.py(9): forward", 0, 30))
    own = (MAIN, ("net.py(9): forward", 0, 2), ("net.py(40): forward", 2, 30))
    assert named(diagnosed(tmp_path, (1,), {0: usual, 1: own}), 1) == "`forward` (`net.py:40`)"


def test_code_is_common_if_every_rank_that_recorded_stacks_is_in_it(tmp_path: Path) -> None:
    """Rank 0 alone saves: that makes it late, not what keeps all of them; both are 2 ms in main."""
    save = ("train.py(4): save_samples", 2, 30)
    diagnosis = diagnosed(tmp_path, (0,), {0: (MAIN, save), 1: (MAIN,)})
    assert diagnosis.facts["script_code"].values == dict.fromkeys("01", "`main` (`train.py:30`)")
    assert max(diagnosis.facts["script_code_ms"].values.values()) <= 2
    both = tmp_path / "both"
    both.mkdir()
    alike = diagnosed(both, (), {0: (MAIN, SAVE), 1: (MAIN, SAVE)})
    assert alike.facts["script_code"].values == dict.fromkeys("01", "`save_samples` (`train.py:4`)")
    assert set(alike.facts["straggler_code"].values.values()) == {"none"}


def test_of_many_steps_with_stacks_only_those_that_tell_something_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracedoc import pipeline

    read: list[str] = []
    usual = pipeline.read_source_step
    monkeypatch.setattr(
        pipeline, "read_source_step", lambda path: (read.append(Path(path).name), usual(path))[1]
    )
    recorded = dict.fromkeys(range(4), (MAIN,)) | {2: (MAIN, SAVE)}
    assert named(diagnosed(tmp_path, (2,), recorded, ranks=4), 2) == "`save_samples` (`train.py:4`)"
    assert read == ["rank-0.source.gz", "rank-1.source.gz", "rank-2.source.gz"]


def test_a_late_first_rank_is_compared_with_the_next(tmp_path: Path) -> None:
    recorded = {0: (MAIN, SAVE), 1: (MAIN,), 2: (MAIN,)}
    assert named(diagnosed(tmp_path, (0,), recorded, ranks=3), 0) == "`save_samples` (`train.py:4`)"


def test_a_large_job_is_recorded_again_with_the_late_rank(tmp_path: Path) -> None:
    late, ranks = 9, 12
    diagnosis = diagnosed(tmp_path, (late,), {0: (MAIN,), 2: (MAIN,)}, ranks=ranks)
    again = diagnosis.facts["straggler_recapture"].values
    assert again == {str(r): "tracedoc collect --ranks 0,9" if r == late else "none" for r in range(ranks)}


def test_small_jobs_record_stacks_on_all_ranks() -> None:
    """What the facts say of the collector holds."""
    options = CollectOptions(folder="")
    assert all(is_source_rank(options, rank, STACKS_ON_ALL) for rank in range(STACKS_ON_ALL))
    assert not is_source_rank(options, 1, STACKS_ON_ALL + 1)
    assert is_source_rank(CollectOptions(folder="", ranks="0,777"), 777, 1024)
