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
allreduce  40-90  1MiB
rank 1:
  compute    30-70  x20
  allreduce  70-90  1MiB
"""


@pytest.mark.parametrize(
    ("waited_ms", "late"),
    [
        ((0, 0), True),  # asleep for 30 ms
        ((60, 65), True),  # asleep too: both have no core equally often
        ((5, 30), False),  # 25 of the 30 ms it had no core while the other had
    ],
)
def test_only_what_a_rank_waits_for_a_core_beyond_the_others_excuses_it(
    tmp_path: Path, waited_ms: tuple[int, int], late: bool
) -> None:
    ranks = {}
    for rank, builder in enumerate(parse_lanes(LATE, ranks=2, device=None)):
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
