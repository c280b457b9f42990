"""A thread of the script that runs Python beside training is named, where the device is idle meanwhile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.run.job import RankJob
from tracedoc.run.machine import LoaderWindow, Machine
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.testing.builder import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.topics.host.run import busy_threads, interpreter_held_frac
from tracedoc.values import Unknown

ALIKE = """
step: 100
compute    0-{begin}   x20
allreduce  90-100  1MiB
"""


def diagnosed(folder: Path, held_ms: float, *, quiet_ms: float = 40, calls: str = "") -> Diagnosis:
    """Diagnose two ranks that compute until ``quiet_ms`` before the reduction at 90 of 100 ms.

    In the step with stacks no operator runs for its first 50 ms, and another thread is in ``aggregate`` for
    ``held_ms`` of them, in which it ``calls`` something of C.
    """
    entries = {}
    for rank, builder in enumerate(parse_lanes(ALIKE.format(begin=90 - quiet_ms), ranks=2, device=None)):
        builder.write(folder / f"rank-{rank}.json")
        stacks = TraceBuilder(rank=rank, device=None)
        stacks.host("ProfilerStep#26", 0, 100, category="user_annotation")
        stacks.host("aten::mm", 50, 100, category="cpu_op")
        stacks.host("train.py(30): main", 0, 100, category="python_function")
        for name in ("threading.py(1002): _bootstrap", "metrics.py(9): aggregate", calls):
            if name:
                stacks.host(name, 0, held_ms, category="python_function", thread="metrics")
        plain = stacks.write(folder / "stacks.json")
        (folder / f"rank-{rank}.source.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        environment = {
            "host": {"cpus": 4, "affinity": "0-3"},
            "threads": {"torch": 4},
        }
        entries[str(rank)] = {
            "file": f"rank-{rank}.json",
            "host": "node",
            "environment": environment,
            "source": f"rank-{rank}.source.gz",
        }
    (folder / MANIFEST_NAME).write_text(json.dumps({"schema": MANIFEST_SCHEMA, "ranks": entries}))
    return diagnose([folder], Options(jobs=1, replay=False))


@pytest.mark.parametrize(
    ("counted", "share"), [({"asked": 400, "held": 100}, 0.25), ({"asked": 40, "held": 40}, None), ({}, None)]
)
def test_the_interpreter_is_held_for_a_share_of_those_who_ask(
    counted: dict[str, int], share: float | None
) -> None:
    found = interpreter_held_frac(RankJob(0, machine=Machine(interpreter=counted)))
    assert isinstance(found, Unknown) if share is None else found == share


@pytest.mark.parametrize(
    ("held_ms", "quiet_ms", "gain_ms"),
    [
        (30, 40, 30),
        (100, 40, 40),  # longer than the device is idle
        (8, 40, None),
    ],
)
def test_python_of_another_thread_is_named(
    tmp_path: Path, held_ms: float, quiet_ms: float, gain_ms: float | None
) -> None:
    found = [
        one
        for one in diagnosed(tmp_path, held_ms, quiet_ms=quiet_ms).findings
        if one.rule_id == "interpreter-held"
    ]
    assert bool(found) == (gain_ms is not None)
    if found:
        assert "`aggregate` (`metrics.py:9`)" in found[0].message
        assert found[0].gain is not None
        assert found[0].gain.high_ms == pytest.approx(gain_ms)


def test_a_thread_that_waits_in_c_code_holds_nothing(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, 40, calls="<built-in method acquire of _thread.lock object at 0x7f>")
    assert diagnosis.facts["background_code"].value == "none"


def test_ranks_that_name_the_same_cores_share_them(tmp_path: Path) -> None:
    facts = diagnosed(tmp_path, 0).facts
    assert facts["operator_threads"].values == {"0": 4, "1": 4}
    assert facts["fair_threads"].values == {"0": 2, "1": 2}


def test_threads_that_run_beside_training_are_named_by_their_share() -> None:
    """Of 500 ms the saver ran 300, the uploader 60 and the bar 5."""
    threads = {"saver": 300_000, "uploader": 60_000, "tqdm": 5_000}
    machine = Machine(threads=threads, loader=LoaderWindow(wall_us=500_000))
    assert busy_threads(RankJob(0, machine=machine)) == "saver (60 %), uploader (12 %)"
    assert isinstance(busy_threads(RankJob(0)), Unknown)
