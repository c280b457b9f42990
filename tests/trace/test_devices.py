"""Hold that a device is judged by its own row of the table, and not by that of a neighbour in name."""

from __future__ import annotations

import pytest

from tracedoc.trace.devices import DEVICE_PEAKS, device_peak, multiprocessor


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100 80gb"),
        ("A100-SXM-80GB", "a100 80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-PG509-200", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100 pcie"),
        ("NVIDIA A100 80GB PCIe", "a100 pcie 80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 NVL", "h100 nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200 nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200 144g"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-PCIE-32GB", "v100 pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "rtx a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx 3090"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"),
        ("NVIDIA GeForce RTX 5090", "rtx 5090"),
        ("AMD Instinct MI250X/MI250", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_device_has_the_peaks_of_its_own_row(name: str, row: str) -> None:
    assert device_peak(name) is DEVICE_PEAKS[row]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Quadro RTX 6000",
        "NVIDIA T4G",
        "AMD Instinct MI300A",
        "ARTEMIS",
        "",
    ],
)
def test_devices_that_only_look_like_a_listed_one_have_no_peak(name: str) -> None:
    assert device_peak(name) is None


def test_peaks_that_differ_between_neighbours() -> None:
    def half(name: str) -> float | None:
        peak = device_peak(name)
        return peak and peak.fp16_tflops

    assert (half("NVIDIA A10"), half("NVIDIA A10G")) == (125, 70)
    assert (half("NVIDIA H200"), half("NVIDIA H20")) == (989, 148)
    assert (half("NVIDIA H100 80GB HBM3"), half("NVIDIA H100 PCIe")) == (989, 756)
    assert (half("NVIDIA L4"), half("NVIDIA L40"), half("NVIDIA L40S")) == (121, 181, 362)
    assert (half("NVIDIA RTX A6000"), half("NVIDIA RTX 6000 Ada Generation")) == (155, 364)


def test_only_what_has_bf16_tensor_cores_states_a_bf16_peak() -> None:
    without = {key for key, peak in DEVICE_PEAKS.items() if peak.bf16_tflops is None}
    assert without == {"v100", "v100 pcie", "t4"}


# Multiprocessors as data sheets have them, and the compute capability.
LISTED = [
    ("v100", "Tesla V100-SXM2-32GB", 80, (7, 0)),
    ("t4", "Tesla T4", 40, (7, 5)),
    ("a100", "NVIDIA A100-SXM4-40GB", 108, (8, 0)),
    ("a30", "NVIDIA A30", 56, (8, 0)),
    ("a10", "NVIDIA A10", 72, (8, 6)),
    ("a40", "NVIDIA A40", 84, (8, 6)),
    ("rtx 3080", "NVIDIA GeForce RTX 3080", 68, (8, 6)),
    ("rtx 3090", "NVIDIA GeForce RTX 3090", 82, (8, 6)),
    ("l4", "NVIDIA L4", 58, (8, 9)),
    ("l40s", "NVIDIA L40S", 142, (8, 9)),
    ("rtx 4090", "NVIDIA GeForce RTX 4090", 128, (8, 9)),
    ("h100", "NVIDIA H100 80GB HBM3", 132, (9, 0)),
    ("h100 pcie", "NVIDIA H100 PCIe", 114, (9, 0)),
    ("h200", "NVIDIA H200", 132, (9, 0)),
    ("b200", "NVIDIA B200", 148, (10, 0)),
    ("rtx 5090", "NVIDIA GeForce RTX 5090", 170, (12, 0)),
    ("mi250x", "AMD Instinct MI250X", 110, (9, 0)),
    ("mi210", "AMD Radeon Graphics", 104, (9, 0)),
    ("mi300x", "AMD Instinct MI300X", 304, (9, 4)),
    ("mi325x", "AMD Instinct MI325X", 304, (9, 4)),
    ("mi350x", "AMD Instinct MI350X", 256, (9, 5)),
    ("mi355x", "AMD Instinct MI355X", 256, (9, 5)),
]


@pytest.mark.parametrize("listed", LISTED, ids=lambda one: one[0])
def test_ranges_by_capability_hold_what_data_sheets_say(listed: tuple) -> None:
    """The table of multiprocessors is for devices that are not listed; of those that are it must be right."""
    key, name, count, capability = listed
    vendor = "amd" if "AMD" in name else "nvidia"
    peak, one = DEVICE_PEAKS[key], multiprocessor(vendor, name, *capability, 64 << 30)
    assert one is not None
    slow, fast = (count * one.tensor * ghz / 1e3 for ghz in one.clock_ghz)
    assert slow * 0.99 <= peak.fp16_tflops <= fast * 1.01
    narrow, wide = (count * gbps for gbps in one.memory_gbps)
    assert narrow * 0.99 <= peak.hbm_gbps <= wide * 1.01
    if peak.fp32_tflops:
        assert one.tensor / one.plain == pytest.approx(peak.fp16_tflops / peak.fp32_tflops, rel=0.3)


@pytest.mark.parametrize(
    ("vendor", "name", "capability"),
    [
        ("nvidia", "NVIDIA GeForce GTX 1660", (7, 5)),
        ("nvidia", "NVIDIA GeForce MX450", (7, 5)),
        ("nvidia", "NVIDIA T1000", (7, 5)),
        ("nvidia", "NVIDIA GeForce RTX 2070 with Max-Q Design", (7, 5)),
        ("nvidia", "Quadro RTX 5000 Laptop GPU", (7, 5)),
        ("nvidia", "NVIDIA Thor", (11, 0)),
        ("amd", "AMD Instinct MI100", (9, 0)),
        ("amd", "Radeon RX 7900 XTX", (11, 0)),
        ("amd", "AMD Radeon RX 9070 XT", (12, 0)),
    ],
)
def test_devices_of_which_a_capability_says_nothing(vendor: str, name: str, capability: tuple) -> None:
    assert multiprocessor(vendor, name, *capability, 32 << 30) is None


@pytest.mark.parametrize(
    ("name", "count", "capability", "tflops", "gbps"),
    [
        # 30 multiprocessors of 512 operations at 1.283 to 1.703 GHz, 76 at 1.455 to 2.04, 26 at 1.455 to 2.5
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 30, (8, 6), (19.7, 26.2), 336),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, (8, 9), (56.6, 79.4), 576),
        ("NVIDIA GeForce RTX 5060 Laptop GPU", 26, (12, 0), (19.4, 33.2), 384),
    ],
)
def test_a_laptop_has_the_range_of_all_power_limits(
    name: str, count: int, capability: tuple, tflops: tuple[float, float], gbps: float
) -> None:
    one = multiprocessor("nvidia", name, *capability)
    assert one is not None
    slow, fast = (count * one.tensor * ghz / 1e3 for ghz in one.clock_ghz)
    assert slow <= tflops[0] < tflops[1] <= fast
    narrow, wide = (count * each for each in one.memory_gbps)
    assert narrow <= gbps <= wide
