"""What twice the batch saves that no other mend would, on steps whose answer is worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.ledger import Range
from tracedoc.pipeline import Options
from tracedoc.testing import parse_lanes
from tracedoc.whatif.larger_batch import larger_batch

PER_STEP = ("host.launch", "link.latency", "compute.small_kernels")


def saved(folder: Path, lanes: str, *, ranks: int = 2, hosts: int = 1, missing: int = 0) -> Range:
    """What twice the batch saves of a step that is drawn, in ms; the last ranks may be missing."""
    builders = parse_lanes(f"lead: 4\n{lanes}", ranks=ranks, hosts=hosts)
    for builder in builders[: ranks - missing]:
        builder.write(folder / f"rank-{builder.rank}.json")
    found = larger_batch(tracedoc.measure([folder], Options(jobs=1)).measurements.run, PER_STEP)
    assert found is not None
    return found.saves


def test_half_of_the_optimizer_is_saved(tmp_path: Path) -> None:
    """Passes take 120 ms for twice the batch, less 50 or 5 us for each of 60 kernels; the optimizer 40."""
    lanes = """
        compute    0-60 x60
        backward   20-56
        optimizer  60-100 x4
    """
    assert saved(tmp_path, lanes, ranks=1) == pytest.approx((20.0, 20.15, 21.5), abs=0.02)


REDUCED = """
    compute    0-30 x30
    backward   6-26
    allreduce  30-70  {size} x2
    optimizer  70-80  x4
"""
"""Gradients travel behind the passes, for as long as NVLink needs for 6 GiB twice."""


def test_what_a_full_link_takes_is_shared(tmp_path: Path) -> None:
    """For twice the batch 58.5 ms of passes at best, 40 of gradients, 10 of the optimizer: 25.75 are saved.

    Gradients that travel beside the backward pass leave less to share: 20 of their 40 ms and the optimizer.
    """
    low, likely, high = saved(tmp_path, REDUCED.format(size="6GiB"))
    assert 10.0 < low < likely < 25.0
    assert high == pytest.approx(25.75, abs=0.05)


def test_what_a_slow_link_takes_is_its_own_to_mend(tmp_path: Path) -> None:
    """128 MiB need less than a millisecond: what is left to share is the optimizer."""
    low, likely, high = saved(tmp_path, REDUCED.format(size="64MiB"))
    assert (low, likely) == pytest.approx((5.1, 5.1), abs=0.1)
    assert high == pytest.approx(25.75, abs=0.05)


def test_communication_of_which_the_waiting_is_not_known_is_not_counted(tmp_path: Path) -> None:
    low, likely, _ = saved(tmp_path, REDUCED.format(size="6GiB"), missing=1)
    assert (low, likely) == pytest.approx((5.0, 5.08), abs=0.01)


def test_communication_of_which_the_rate_is_not_known_is_likely_shared_and_not_surely(tmp_path: Path) -> None:
    """As on a link that is full the likely end, as on a fast one the low end."""
    low, likely, high = saved(tmp_path, REDUCED.format(size="6GiB"), hosts=2)
    assert low == pytest.approx(5.0, abs=0.5)
    assert 10.0 < likely < 25.0
    assert high == pytest.approx(25.75, abs=0.05)
