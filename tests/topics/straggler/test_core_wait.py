"""A rank that is late because it had no core is no straggler, whatever it was at when it lost it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracedoc.pipeline import Options, diagnose
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.testing import parse_lanes

LATE = """
step: 100
compute    0-40   x20
allreduce  40-{end}  1MiB
rank 1:
  compute    {late}-{come}  x20
  allreduce  {come}-{end}  1MiB
"""


@pytest.mark.parametrize(
    ("late_ms", "waited_ms", "late"),
    [
        (30, (0, 0), True),  # asleep for 30 ms
        (30, (60, 65), True),  # asleep too: both have no core equally often
        (30, (5, 30), False),  # 25 of the 30 ms it had no core while the other had
        (50, (5, 35), True),  # 30 of 50: what is left is a fifth of the step
        (50, (5, 45), False),  # 40 of 50: a tenth
    ],
)
def test_only_what_a_rank_waits_for_a_core_beyond_the_others_excuses_it(
    tmp_path: Path, late_ms: int, waited_ms: tuple[int, int], late: bool
) -> None:
    drawn = LATE.format(late=late_ms, come=late_ms + 40, end=late_ms + 50)
    ranks = {}
    for rank, builder in enumerate(parse_lanes(drawn, ranks=2, device=None)):
        builder.write(tmp_path / f"rank-{rank}.json")
        thread = {"steps": 6, "ran_us": 600_000, "waited_us": waited_ms[rank] * 6_000}
        ranks[str(rank)] = {
            "file": f"rank-{rank}.json",
            "host": "node",
            "environment": {},
            "window": {"training_thread": thread},
        }
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"schema": MANIFEST_SCHEMA, "ranks": ranks}))
    found = diagnose([tmp_path], Options(jobs=1, select=("straggler-rank",))).findings
    assert [one.ranks for one in found] == ([(1,)] if late else [])
