"""Facts about sharded units, on lanes worked out by hand and on real CPU runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing.lanes import parse_lanes

BLOCKS = """
strategy: fsdp2
lead: 30
backward   40-120
allgather  0-40 256MiB x4 2ms unit=layers.*   40-120 256MiB x4 2ms prefetch unit=layers.*
compute    2-42 x4 8ms unit=layers.*          42-122 x4 18ms unit=layers.*
"""


def drawn(folder: Path, text: str, *, ranks: int = 2) -> Diagnosis:
    for builder in parse_lanes(text, ranks=ranks):
        builder.write(folder / f"rank-{builder.rank}.json")
    return diagnose([folder], Options(jobs=1))


def value(diagnosis: Diagnosis, fact: str) -> object:
    return diagnosis.facts[fact].value


def test_units_blocks_and_parameters(tmp_path: Path) -> None:
    diagnosis = drawn(tmp_path, BLOCKS)
    assert value(diagnosis, "fsdp_units") == value(diagnosis, "fsdp_blocks") == 4
    assert value(diagnosis, "median_unit_bytes") == value(diagnosis, "block_bytes") == 256 * 2**20
    assert value(diagnosis, "estimated_parameters") == 4 * 128 * 2**20  # 2 bytes each
    assert value(diagnosis, "gathers_per_unit") == 2
    assert value(diagnosis, "regather_frac") == 1
    assert value(diagnosis, "backward_prefetch_frac") == 1
    assert value(diagnosis, "blocks_in_code") == "model.layers"
    assert value(diagnosis, "prefetch_elements") == 2 * 128 * 2**20


def test_rows_of_units_hold_medians_and_come_in_the_order_of_the_passes(tmp_path: Path) -> None:
    rows = drawn(tmp_path, BLOCKS).detail.units
    assert [(row.name, row.phase) for row in rows] == [
        *((f"layers.{k}", "forward") for k in range(4)),
        *((f"layers.{k}", "backward") for k in (3, 2, 1, 0)),
    ]
    second = rows[1]
    assert (second.nbytes, second.gathers_per_step, second.units_ahead) == (256 * 2**20, 1, 0)
    assert second.gather_ms == pytest.approx(2)
    assert (second.wait_ms, second.transfer_ms) == (pytest.approx(0), pytest.approx(2))
    assert second.compute_beside_ms == pytest.approx(8)
    assert second.stall_ms == pytest.approx(2)
    # Launched 30 ms before its start, which is when the compute before it ends.
    assert second.launch_lag_ms == pytest.approx(-30)


def test_one_rank_cannot_tell_waiting_from_transfer(tmp_path: Path) -> None:
    parse_lanes(BLOCKS, ranks=2)[0].write(tmp_path / "rank-0.json")
    diagnosis = diagnose([tmp_path], Options(jobs=1, replay=False))
    assert [(row.wait_ms, row.transfer_ms) for row in diagnosis.detail.units] == [(None, None)] * 8


@pytest.mark.parametrize(
    ("run", "framework", "per_unit", "again"),
    [
        ("fsdp1", "FSDP1", 1.8, 0.8),  # 9 gathers of 5 units; the root is not gathered again
        ("fsdp1_sgo", "FSDP1", 1.0, 0.0),
        ("fsdp2", "FSDP2", 1.8, 0.8),
        ("fsdp2_norsh", "FSDP2", 1.0, 0.0),
        ("fsdp2_mp", "FSDP2", 1.8, 0.8),  # 18 gathers in two micro-batches
        ("hsdp", "FSDP2", 1.8, 0.8),
    ],
)
def test_real_runs_gather_each_unit_as_often_as_they_should(
    shared_traces: Path, run: str, framework: str, per_unit: float, again: float
) -> None:
    diagnosis = diagnosis_of(shared_traces / "cpu_gloo" / run)
    assert value(diagnosis, "sharding_framework") == framework
    assert value(diagnosis, "fsdp_units") == 5
    assert value(diagnosis, "gathers_per_unit") == pytest.approx(per_unit)
    assert value(diagnosis, "regather_frac") == pytest.approx(again)
    assert value(diagnosis, "estimated_parameters") == 4 * 526_080 + 2_570
    assert not {"sharding"} & {finding.topic for finding in diagnosis.findings}


@pytest.mark.parametrize("run", ["ddp", "tp", "pp", "ds1", "ds2", "ac", "comp"])
def test_runs_without_sharded_parameters_are_not_judged_for_them(shared_traces: Path, run: str) -> None:
    diagnosis = diagnosis_of(shared_traces / "cpu_gloo" / run)
    assert diagnosis.facts["fsdp_units"].unknown is not None
    outcomes = {v.rule_id: v.outcome for v in diagnosis.verdicts}
    for rule in ("fine-fsdp-wrapping", "coarse-fsdp-wrapping", "sharded-gather-stall"):
        assert outcomes[rule] == "not_applicable"
