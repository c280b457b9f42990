"""Chains of short kernels, on steps whose numbers are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.testing import parse_lanes

SHORT = "name=vectorized_elementwise_kernel"


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (f"0-0.45   0.45-0.55 x50 {SHORT}   0.55-1", 0.098),  # the first of a chain stays
        ("0-0.9 x3   0.9-1 x50", 0.0),  # matrix products are not fused
        (f"0-0.9 x3   0.9-1 x20 {SHORT}", 0.0),  # of 5 us each
        (f"0-0.9   0.9-0.904 x2 {SHORT}   0.904-0.994   0.994-1 x3 {SHORT}", 0.006),
    ],
)
def test_what_chains_of_short_kernels_take(tmp_path: Path, lanes: str, expected: float) -> None:
    (rank,) = parse_lanes(f"step: 1\nlead: 0.02\ncompute {lanes}", ranks=1)
    facts = tracedoc.measure([rank.write(tmp_path / "rank-0.json")]).measurements.facts
    assert facts["short_kernel_ms"].value == pytest.approx(expected)
    assert facts["short_chains_ms"].value == pytest.approx(expected)
    assert facts["short_kernel_idle_ms"].value == 0


@pytest.mark.parametrize(
    ("kernels", "short"),
    [
        ("0-1 x100 9us", True),
        ("0-1 x50 11us", False),
        (f"0-1 x100 9us {SHORT}", False),
        # 50 products of 30 us and as many sums of 2 us.
        (f"0-2 x50 30us  2-2.1 x50 {SHORT}", False),
    ],
)
def test_matrix_products_alone_are_shorter_than_a_launch_or_not(
    tmp_path: Path, kernels: str, short: bool
) -> None:
    (builder,) = parse_lanes(f"lead: 1\ncompute {kernels}", ranks=1)
    facts = tracedoc.measure([builder.write(tmp_path / "rank-0.json")]).measurements.facts
    assert facts["has_short_matrix_kernels"].value is short
