"""Several gains together."""

from __future__ import annotations

import pytest

from tracedoc.diagnosis import Evidence, Finding, Gain
from tracedoc.spans import Spans
from tracedoc.whatif.combined import combined_gain_ms

MS = 1_000_000


def finding(name: str, gain: float, *places: tuple[int, int], rank: int = 0) -> Finding:
    evidence = tuple(Evidence(rank, 1, start * MS, end * MS, "idle") for start, end in places)
    worth = Gain(0.0, gain, "ceiling")
    return Finding(name, name, "warning", "high", "", "", "", "host", (rank,), (1,), evidence, worth, ())


@pytest.mark.parametrize(
    ("findings", "together"),
    [
        ([finding("a", 10, (0, 10))], 10),
        ([finding("a", 10, (0, 10)), finding("b", 5, (20, 25))], 15),
        ([finding("a", 10, (0, 10)), finding("b", 10, (0, 10))], 10),
        # a claims half of 0-20, b all of 0-10: 10 there and half of the other 10.
        ([finding("a", 10, (0, 20)), finding("b", 10, (0, 10))], 15),
        ([finding("a", 10, (0, 10)), finding("b", 8, (0, 8), rank=1)], 10),
        # What is seen in 10 ms cannot give 30 beside what is seen elsewhere: 10 and 25.
        ([finding("a", 30, (0, 10)), finding("b", 25, (20, 45))], 35),
        # Alone it may: the largest gain stands.
        ([finding("a", 30, (0, 10)), finding("b", 5, (20, 25))], 30),
    ],
)
def test_gains_over_the_same_time_are_not_added(findings: list[Finding], together: float) -> None:
    times = {
        one.id: {
            (one.ranks[0], 1): (Spans.from_pairs([(place.start_ns, place.end_ns) for place in one.evidence]))
        }
        for one in findings
    }
    assert combined_gain_ms(findings, times) == pytest.approx(together)
