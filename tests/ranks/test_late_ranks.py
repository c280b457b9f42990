"""What is called the cause of a late rank, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tracedoc.topics.straggler.late_ranks import Straggler
from tracedoc.topics.straggler.work import CAUSES

MS = 1_000_000


def late(**excess_us: list[int]) -> Straggler:
    """Return a rank that costs 8 ms in each of four steps."""
    columns = [excess_us.get(cause, [0, 0, 0, 0]) for cause in CAUSES]
    return Straggler(
        rank=3,
        steps=(1, 2, 3, 4),
        gain_ns=np.array([8 * MS] * 4),
        operations=(0,),
        excess_us=np.array(columns, dtype=np.int64).T,
    )


@pytest.mark.parametrize(
    ("kernels", "cause"),
    [
        # In every one of four steps: 30 % of 8 ms are 2400 us.
        ([0, 2400, 2400, 2400], ""),
        ([2400, 2400, 2400, 2400], "kernels"),
        ([2399, 2399, 2399, 2399], ""),
        # In all: 30 % of 32 ms are 9600 us.
        ([0, 0, 0, 9600], "kernels"),
        ([0, 0, 0, 9599], ""),
        ([-9600, 0, 0, 0], ""),
    ],
)
def test_a_cause_explains_a_third_of_the_waiting(kernels: list[int], cause: str) -> None:
    assert late(kernels=kernels).cause == cause


@pytest.mark.parametrize(("other", "cause"), [(20_000, "kernels"), (20_001, "")])
def test_a_cause_is_half_of_all_that_took_longer(other: int, cause: str) -> None:
    first, second = CAUSES[1:3]
    found = late(kernels=[0, 0, 0, 20_000], **{first: [0, 0, 10_000, 0], second: [0, other - 10_000, 0, 0]})
    assert found.cause == cause


def test_what_recurs_comes_before_what_adds_up_to_more() -> None:
    other = CAUSES[1]
    found = late(kernels=[3000, 3000, 3000, 3000], **{other: [0, 0, 0, 50_000]})
    assert found.cause == "kernels"
    assert found.cause_ns.tolist() == [3 * MS] * 4
