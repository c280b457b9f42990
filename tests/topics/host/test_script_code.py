"""In a CPU run the script's own code outside operators is named, where every rank is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.testing.lanes import parse_lanes

STEPS = 3
ALIKE = """
step: 100
compute    0-{begin}   x20
allreduce  90-100  1MiB
"""


def diagnosed(
    folder: Path, quiet_ms: float, *, waited: float = 0.0, ranks: tuple[int, ...] = (0, 1)
) -> Diagnosis:
    """Diagnose two ranks that compute until ``quiet_ms`` before the reduction at 90 of 100 ms.

    ``ranks`` are in the range ``encode`` meanwhile; threads wait ``waited`` of the time for a core.
    """
    entries = {}
    for rank, builder in enumerate(
        parse_lanes(ALIKE.format(begin=90 - quiet_ms), ranks=2, device=None, steps=STEPS)
    ):
        for start in range(0, 100 * STEPS, 100) if rank in ranks else ():
            builder.host("encode", start + 90 - quiet_ms, start + 90, category="user_annotation")
        builder.write(folder / f"rank-{rank}.json")
        thread = {"steps": STEPS, "ran_us": 1_000_000 * (1 - waited), "waited_us": 1_000_000 * waited}
        thread = {name: int(value) for name, value in thread.items()}
        entries[str(rank)] = {
            "file": f"rank-{rank}.json",
            "host": "node",
            "environment": {},
            "window": {"training_thread": thread},
        }
    (folder / MANIFEST_NAME).write_text(json.dumps({"schema": MANIFEST_SCHEMA, "ranks": entries}))
    return diagnose([folder], Options(jobs=1))


@pytest.mark.parametrize(
    ("quiet_ms", "waited", "named"),
    [
        (40, 0.0, True),
        (40, 0.5, True),  # 20 ms of them it may have run
        (12, 0.0, True),
        (8, 0.0, False),
        (12, 0.5, False),
    ],
)
def test_code_that_all_ranks_are_in_is_named(
    tmp_path: Path, quiet_ms: float, waited: float, *, named: bool
) -> None:
    diagnosis = diagnosed(tmp_path, quiet_ms, waited=waited)
    found = [one for one in diagnosis.findings if one.rule_id == "script-code"]
    assert bool(found) == named
    if found:
        assert "the range `encode`" in found[0].message
        assert found[0].gain is not None
        # As unsure as two runs on CPUs, which differ by a tenth.
        assert found[0].gain.likely_ms == pytest.approx(quiet_ms)
        assert found[0].gain.high_ms == pytest.approx(1.1 * quiet_ms)


def test_a_rank_that_is_in_it_for_longer_does_not_make_the_others_be(tmp_path: Path) -> None:
    facts = diagnosed(tmp_path, 40, ranks=(1,)).facts
    assert facts["script_code"].values == {"0": "none", "1": "the range `encode`"}
    assert facts["script_code_ms"].values == {"0": 0.0, "1": pytest.approx(40)}


@pytest.mark.parametrize(
    ("begins", "fix"), [(0, "Let PyTorch do what lines of `update`"), (60, "Take `update`")]
)
def test_a_function_that_calls_the_optimizer_cannot_go_as_a_whole(
    tmp_path: Path, begins: float, fix: str
) -> None:
    """The optimizer runs until 59 ms, and no operator from 60 to 90 ms, which `update` has."""
    (builder,) = parse_lanes("step: 100\ncompute 0-60 x20  90-100", ranks=1, device=None, steps=STEPS)
    for start in range(0, 100 * STEPS, 100):
        builder.host("train.py(9): update", start + begins, start + 90, category="python_function")
        builder.host("Optimizer.step#SGD.step", start + 50, start + 59, category="user_annotation")
    found = diagnose([builder.write(tmp_path / "rank-0.json")], Options(jobs=1)).findings
    (told,) = [one for one in found if one.rule_id == "script-code"]
    assert told.fixes[0].title.startswith(fix)
