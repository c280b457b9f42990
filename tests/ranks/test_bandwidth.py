"""Bandwidth of collectives against what their size should reach."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tracedoc.ranks.bandwidth import Seat, SizeCurve, fit_line, group_curves, size_curve, transfers
from tracedoc.ranks.matching import Matching, RankCollectives, match_collectives
from tracedoc.timeline.collective_table import CollectiveOp, CollectiveTable

MIB = 2**20
MS = 1_000_000
H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("mib", "measured"), [(16, 220), (32, 276), (128, 402)]
)  # 8x H200, all-reduce; the curve is that of rings, which the switch's own reduction exceeds
def test_the_curve_of_eight_ranks_is_near_what_was_measured(mib: int, measured: float) -> None:
    curve = size_curve(H200, 8)
    assert curve is not None
    expected = curve.expected_gbps(mib * MIB)
    assert expected is not None
    assert 0.7 * measured <= expected <= measured


def test_a_small_group_of_devices_wired_in_pairs_has_few_links() -> None:
    two, eight = size_curve("AMD Instinct MI300X", 2), size_curve("AMD Instinct MI300X", 8)
    assert two is not None
    assert eight is not None
    assert two.peak_gbps == pytest.approx(0.7 * 64)
    assert eight.peak_gbps == pytest.approx(0.7 * 448)
    assert two.expected_gbps(2**50, at_best=True) == pytest.approx(0.8 * 448, rel=0.01)
    # A call of two ranks takes 0.475 times as long as one of eight, however many links there are.
    assert two.half_bytes / 64 == pytest.approx(0.475 * eight.half_bytes / 448)


@pytest.mark.parametrize(("device", "link_gbps", "reached"), [("NVIDIA L40S", 31, 16), (H200, 450, 361)])
def test_devices_on_pcie_may_sit_on_two_sockets(device: str, link_gbps: float, reached: float) -> None:
    curve = size_curve(device, 4)
    assert curve is not None
    assert curve.peak_gbps is not None
    assert curve.peak_gbps < link_gbps
    assert curve.peak_gbps == pytest.approx(reached, rel=0.05)


def test_between_hosts_the_rate_is_not_known_and_small_is_larger() -> None:
    one, four = size_curve(H200, 8), size_curve(H200, 32, hosts=4)
    assert one is not None
    assert four is not None
    assert four.peak_gbps is None
    assert four.expected_gbps(MIB) is None
    assert four.half_bytes == pytest.approx(120 * MIB)
    assert size_curve("an unlisted device", 8) is None


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.475), (4, 0.6), (8, 1.0), (16, 1.0)])
def test_fewer_ranks_call_less_small_and_are_expected_no_more(ranks: int, share: float) -> None:
    # Latency of 8.4 us and 3.4 us for each of 2 (n - 1) hops: 15.2, 28.8 and 56 us, times n / 2 (n - 1).
    eight, few = size_curve(H200, 8), size_curve(H200, ranks)
    assert eight is not None
    assert few is not None
    assert few.half_bytes == pytest.approx(share * 20 * MIB, rel=1e-9)
    assert few.expected_gbps(16 * MIB) == eight.expected_gbps(16 * MIB)


def test_the_half_rate_size_is_where_latency_equals_transfer() -> None:
    # 40 us, and 1 us for each 100,000 bytes: half of the rate at 4,000,000 bytes.
    sizes = np.array([1, 1, 4, 10, 40], dtype=np.int64) * 1_000_000
    found = fit_line(sizes, 40_000 + sizes // 100)
    assert found is not None
    assert found.latency_ns == pytest.approx(40_000)
    assert found.half_bytes == pytest.approx(4_000_000)
    assert fit_line(sizes[:3], sizes[:3]) is None  # two sizes are no curve, but where two are enough
    two = fit_line(sizes[:3], 40_000 + sizes[:3] // 100, fewest=2)
    assert two is not None
    assert two.half_bytes == pytest.approx(found.half_bytes)
    assert fit_line(sizes, 50_000 - sizes // 1000) is None  # larger messages take no longer


@pytest.mark.parametrize(
    ("latency_us", "fitted"), [(1, None), (4, 0.4), (40, 4.0), (400, 40.0), (500, None)], ids=str
)  # at 100 GB/s 40 us are 4 MB; the table says 0.475 x 20 MiB at 360 GB/s for two ranks: 28 us
def test_a_fit_far_from_what_was_measured_is_noise(latency_us: int, fitted: float | None) -> None:
    sizes = [megabytes * 1_000_000 for megabytes in (1, 4, 10, 40)]
    table = CollectiveTable.of(
        [
            CollectiveOp(
                "all_reduce", (0, 1), "0", 2, size, "Float", number, 20,
                10 * number * MS, 10 * number * MS + latency_us * 1000 + size // 100, None, 1,
            )
            for number, size in enumerate(sizes)
        ]
    )  # fmt: skip
    found = match_collectives([RankCollectives(0, "a", table), RankCollectives(1, "a", table)], 2)
    (curve,) = group_curves(found, seats("a"))
    assert curve is not None
    expected = None if fitted is None else pytest.approx(fitted * 1e6, rel=1e-6)
    assert curve.fitted_half_bytes == expected


def seats(host: str) -> dict[int, Seat]:
    """Two ranks, each on a device of its own."""
    return {rank: Seat(H200, host, rank) for rank in (0, 1)}


def matching(*starts: int, size: int = 100_000_000, world: int = 2) -> Matching:
    """Return an all-reduce that each rank enters at a time in ms, and all leave at 10."""
    group = tuple(range(world))
    ranks = [
        RankCollectives(
            rank,
            "a",
            CollectiveTable.of(
                [
                    CollectiveOp(
                        "all_reduce", group, "0", world, size, "Float", 1, 20, start * MS, 10 * MS, None, 1
                    )
                ]
            ),
        )
        for rank, start in enumerate(starts)
    ]
    return match_collectives(ranks, world)


def test_bandwidth_counts_from_the_last_arrival() -> None:
    found = matching(0, 9)
    reached = transfers(found, group_curves(found, seats("a")))
    # 100 MB in 1 ms, times 2 (n - 1) / n = 1.
    assert reached.gbps.tolist() == [100.0]


@pytest.mark.parametrize(("world", "known"), [(8, True), (9, False)])
def test_more_ranks_than_a_host_has_may_be_on_several(world: int, known: bool) -> None:
    found = matching(0, 9, world=world)  # the hosts of two ranks are not named, the others not captured
    (curve,) = group_curves(found, seats(""))
    assert curve is not None
    assert (curve.peak_gbps is not None) == known


@pytest.mark.parametrize(
    ("ordinals", "known"), [((0, 1), True), ((3, 3), False), ((None, None), True)], ids=str
)
def test_ranks_on_devices_of_one_number_are_on_several_hosts(
    ordinals: tuple[int | None, int | None], known: bool
) -> None:
    found = matching(0, 9)
    (curve,) = group_curves(found, {rank: Seat(H200, "", one) for rank, one in enumerate(ordinals)})
    assert curve is not None
    assert (curve.peak_gbps is not None) == known


def test_a_transfer_that_the_clocks_cannot_tell_says_nothing_of_bandwidth() -> None:
    found = matching(0, 9)
    curves = group_curves(found, seats("a"))
    for residual_ns, expected in [(499_999, 1), (500_000, 0)]:  # the transfer took 1 ms
        doubtful = replace(found, clock=replace(found.clock, residual_ns=residual_ns))
        assert transfers(doubtful, curves).gbps.size == expected


def test_an_operation_that_lacks_a_rank_says_nothing_of_bandwidth() -> None:
    found = matching(0, 9, world=3)
    assert len(found) == 1
    curves = group_curves(found, seats("a"))
    assert transfers(found, curves).gbps.size == 0


def test_a_link_that_is_slow_at_every_size_needs_messages_as_large_as_others() -> None:
    """Half of its own rate is reached at 1 MiB, that of measured machines at 20."""
    assert SizeCurve(100.0, 20 * MIB, 20 * MIB, 1 * MIB).expected_gbps(20 * MIB) == 50.0
