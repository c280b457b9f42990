"""What would fit into GPU memory, from a manifest and the units of a drawn step."""

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import parse_lanes
from tracedoc.testing.cases import write_job
from tracedoc.values import Unknown, Value

GB = 1_000_000_000

LANES = """
strategy: fsdp2
lead: 30
backward   42-122
allgather  0-2 256MiB unit=l0   4-34 256MiB x3 2ms unit=l*
compute    2-42 x4 unit=l*      42-122 x4 unit=l*
allgather  38-40 256MiB unit=l3  50-110 256MiB x3 2ms prefetch unit=l*
"""


def facts(folder: Path, *, peak: float | None) -> dict[str, Value]:
    for number, builder in enumerate(parse_lanes(LANES, ranks=2)):
        builder.write(folder / f"rank-{number}.json")
    if peak is not None:
        memory = {"total_bytes": 80 * GB, "peak_allocated_bytes": int(peak * GB)}
        write_job(folder, (0, 1), {"memory": memory}, "")
    found = tracedoc.measure([folder]).measurements.facts
    return {name: fact.value for name, fact in found.items()}


def test_units_that_stay_gathered_take_all_but_the_two_that_are_there(tmp_path: Path) -> None:
    found = facts(tmp_path, peak=40)
    assert found["all_units_bytes"] == 1 << 30
    assert found["gathered_bytes"] == 1 << 29
    assert found["tensor_memory_frac"] == 0.5
    assert found["fits_gathered"] is True


@pytest.mark.parametrize(("peak", "fits"), [(73.0, True), (73.1, False)])
def test_staying_gathered_fits_up_to_what_is_usable(tmp_path: Path, peak: float, fits: bool) -> None:
    # 73.6 GB are usable, 0.537 GB more would be held.
    assert facts(tmp_path, peak=peak)["fits_gathered"] is fits


def test_unsharded_means_all_states_on_each_gpu(tmp_path: Path) -> None:
    found = facts(tmp_path, peak=40)
    # 537 M parameters at 16 bytes are 8.6 GB; half of that, and the gathered units, are there today.
    added = found["unsharded_bytes"]
    assert isinstance(added, float)
    assert 4.0 * GB < added < 6.5 * GB
    assert found["fits_unsharded"] is True
    assert facts(tmp_path, peak=72)["fits_unsharded"] is False


def test_without_a_manifest_nothing_is_said_to_fit(tmp_path: Path) -> None:
    found = facts(tmp_path, peak=None)
    for name in ("fits_gathered", "fits_unsharded", "tensor_memory_frac"):
        assert isinstance(found[name], Unknown)
    assert found["gathered_bytes"] == 1 << 29
