"""Which file is which rank's, which cycle is judged, and what is refused."""

from __future__ import annotations

import pytest

from tracedoc.errors import InputError
from tracedoc.run.settle import Candidate, RankFile, settle


def codes(candidates: list[Candidate], cycle: int | None = None) -> list[str]:
    return [limit.code for limit in settle(candidates, cycle).limits]


def test_the_file_itself_is_believed_before_manifest_and_name() -> None:
    settled = settle(
        [
            Candidate("a", file_rank=1, manifest_rank=0, name_rank=0, world_size=3),
            Candidate("b", manifest_rank=0, name_rank=7, world_size=3),
            Candidate("c", name_rank=2, world_size=3),
        ]
    )
    assert settled.files == (RankFile(0, "b"), RankFile(1, "a"), RankFile(2, "c"))
    assert settled.limits == ()
    assert settled.cycle is None


def test_one_trace_without_any_hint_is_rank_0_without_a_word() -> None:
    settled = settle([Candidate("trace.json")])
    assert settled.files == (RankFile(0, "trace.json"),)
    assert settled.limits == ()


def test_traces_that_tell_no_rank_are_numbered_in_natural_order() -> None:
    settled = settle([Candidate("t10", group_hint="t10"), Candidate("t9", group_hint="t9")])
    assert settled.files == (RankFile(0, "t9"), RankFile(1, "t10"))
    assert [limit.code for limit in settled.limits] == ["rank-assumed"]


@pytest.mark.parametrize("communicates", [True, False])
def test_traces_that_tell_no_rank_may_be_of_different_jobs_unless_they_communicate(
    *, communicates: bool
) -> None:
    settled = settle([Candidate(name, communicates=communicates) for name in ("a.json", "b.json")])
    (limit,) = settled.limits
    assert ("different jobs" in limit.effect) != communicates


def process(name: str, start: int, end: int, **told: object) -> Candidate:
    return Candidate(name, group_hint=name, span_ns=(start, end), **told)  # type: ignore[arg-type]


def test_processes_captured_one_after_the_other_are_no_ranks_of_one_job() -> None:
    with pytest.raises(InputError, match="a and b are no ranks of one job") as caught:
        settle([process("a", 0, 50), process("b", 60, 90)])
    assert caught.value.hint == "pass one of them, as b"


@pytest.mark.parametrize(
    "candidates",
    [
        [process("a", 0, 50), process("b", 40, 90)],
        [process("a", 0, 50, communicates=True), process("b", 60, 90)],
        [process("a", 0, 50, world_size=2), process("b", 60, 90)],
        [process("a", 0, 50, name_rank=0), process("b", 60, 90)],
    ],
    ids=["at one time", "communicating", "of a job of two", "named as a rank"],
)
def test_processes_that_something_ties_together_are_ranks(candidates: list[Candidate]) -> None:
    assert [one.rank for one in settle(candidates).files] == [0, 1]


def test_newest_cycle_common_to_most_ranks_is_chosen() -> None:
    candidates = [
        Candidate(f"r{rank}-s{step}", file_rank=rank, world_size=2, first_step=step)
        for rank in (0, 1)
        for step in (3, 13)
    ]
    candidates.append(Candidate("r0-s23", file_rank=0, world_size=2, first_step=23))
    settled = settle(candidates)
    assert settled.files == (RankFile(0, "r0-s13"), RankFile(1, "r1-s13"))
    assert (settled.cycle, settled.cycles) == (13, (3, 13, 23))
    assert [limit.code for limit in settled.limits] == ["other-cycles"]


def test_a_few_of_many_cycles_are_named() -> None:
    settled = settle([Candidate(f"s{step}", file_rank=0, first_step=step) for step in range(0, 640, 10)])
    assert settled.limits[0].message.endswith("the others are 0, 10, 20, 30, 40, 50, and 57 more")


def test_a_cycle_can_be_asked_for() -> None:
    candidates = [Candidate(f"s{step}", file_rank=0, first_step=step) for step in (3, 13)]
    assert settle(candidates, 3).files == (RankFile(0, "s3"),)
    with pytest.raises(InputError, match="cycle 5 was not recorded") as caught:
        settle(candidates, 5)
    assert caught.value.hint == "choose one of: 3, 13"


def test_cycles_without_steps_are_told_apart_by_their_time() -> None:
    candidates = [
        Candidate(f"p{rank}.{time}", file_rank=rank, world_size=2, order_hint=time)
        for rank in (0, 1)
        for time in (1000 + rank, 2000 + rank)
    ]
    settled = settle(candidates)
    assert settled.files == (RankFile(0, "p0.2000"), RankFile(1, "p1.2001"))
    assert (settled.cycle, settled.cycles) == (1, (0, 1))


def test_two_files_of_one_rank_are_never_silently_one() -> None:
    with pytest.raises(InputError, match=r"a\.json and b\.json are both rank 0"):
        settle([Candidate("a.json", file_rank=0), Candidate("b.json", file_rank=0)])


def test_two_captures_of_one_rank_of_several_cannot_be_renamed() -> None:
    with pytest.raises(InputError, match="are both rank 0") as caught:
        settle([Candidate(name, file_rank=0, world_size=2) for name in ("a.json", "b.json")])
    assert caught.value.hint.endswith("pass one file of each rank")


def test_of_files_in_different_folders_one_folder_is_to_be_passed() -> None:
    days = ("friday", "monday", "tuesday")
    with pytest.raises(InputError, match=r"these are 3 runs: friday/a\.json and") as caught:
        settle([Candidate(f"{day}/a.json", file_rank=0) for day in days])
    assert caught.value.hint == "pass one of the folders"


def test_files_that_all_claim_rank_0_of_1_are_told_apart_by_name() -> None:
    settled = settle([Candidate(f"rank{i}", file_rank=0, name_rank=i, world_size=1) for i in (0,)])
    assert settled.files == (RankFile(0, "rank0"),)
    settled = settle([Candidate(f"rank{i}", file_rank=0, name_rank=i) for i in (0, 1)])
    assert settled.files == (RankFile(0, "rank0"), RankFile(1, "rank1"))
    assert [limit.code for limit in settled.limits] == ["rank-assumed"]


def test_traces_of_different_jobs_are_refused() -> None:
    with pytest.raises(InputError, match="different jobs"):
        settle([Candidate("a", file_rank=0, world_size=2), Candidate("b", file_rank=1, world_size=8)])
    with pytest.raises(InputError, match="different backends"):
        settle([Candidate("a", file_rank=0, backend="nccl"), Candidate("b", file_rank=1, backend="gloo")])
    with pytest.raises(InputError, match="rank 8 of a job with 8 ranks"):
        settle([Candidate("a", file_rank=8, world_size=8)])


def test_missing_ranks_are_a_limit() -> None:
    settled = settle([Candidate(f"r{r}", file_rank=r, world_size=8) for r in (0, 1, 2, 4)])
    (limit,) = settled.limits
    assert limit.code == "missing-ranks"
    assert limit.message == "ranks 3, 5-7 of 8 are missing"
    assert limit.effect == "waiting and late ranks are known among ranks 0-2, 4 at most"
    assert codes([Candidate("r0", name_rank=0), Candidate("r2", name_rank=2)]) == ["missing-ranks"]
    assert codes([Candidate("r70", name_rank=70)]) == []


def test_ranks_recorded_at_different_steps_are_reported() -> None:
    assert codes([Candidate("a", file_rank=0, first_step=3), Candidate("b", file_rank=1, first_step=5)]) == [
        "different-steps"
    ]


def test_a_trace_that_tells_no_rank_gets_the_first_free_number() -> None:
    settled = settle([Candidate("a", file_rank=0), Candidate("b", file_rank=1), Candidate("c")])
    assert settled.files == (RankFile(0, "a"), RankFile(1, "b"), RankFile(2, "c"))
