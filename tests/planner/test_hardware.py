"""Hold that GPUs, links and quantities are found by the names that people type, and nonsense is answered."""

from __future__ import annotations

import pytest

from tracedoc.cli.plan.sources import parse_count, parse_size
from tracedoc.errors import InputError
from tracedoc.planner.hardware import (
    find_gpu,
    find_link,
    gpu_of_device,
    gpus,
    link_of,
    links,
    network_of,
    replace_gbps,
    sold_as,
)
from tracedoc.trace.devices import DEVICE_PEAKS, device_peak


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA L4", "L4"),
        ("a100", "A100 SXM 80GB"),
        ("A100 40gb", "A100 SXM 40GB"),
        ("A100 40 GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 96GB", "H100 96GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A30", "A30"),
        ("AMD Instinct MI350X", "MI350X"),
        ("h100 pcie", "H100 PCIe"),
        (" H100--PCIe_", "H100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA A100-PG509-200", "A100 SXM 40GB"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("v100", "V100 32GB"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ],
)
def test_gpus_are_found_by_the_names_in_use(name: str, gpu: str) -> None:
    assert find_gpu(name).name == gpu


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'h100'") as caught:
        find_gpu("H10O")
    assert "--gpu-memory" in caught.value.hint
    assert gpu_of_device("NVIDIA GeForce RTX 3090 Ti") is None


def test_every_row_names_its_source_and_a_link_of_the_table() -> None:
    names = {link.name for link in links()}
    assert all(gpu.source and gpu.link in names and gpu.memory_gb > 0 for gpu in gpus())
    assert all(link.source and 0 < link.efficiency <= 1 for link in links())


def test_every_gpu_of_the_table_is_known_to_those_that_traces_are_judged_by() -> None:
    assert [gpu.name for gpu in gpus() if device_peak(gpu.name) is None] == []


def test_peaks_and_links_agree_with_those_that_traces_are_judged_by() -> None:
    for gpu in gpus():
        peak = device_peak(gpu.name)
        assert peak is not None
        assert peak.fp16_tflops == gpu.half_tflops, gpu.name
        assert peak.fp32_tflops == gpu.fp32_tflops, gpu.name
        assert peak.hbm_gbps == gpu.hbm_gbps, gpu.name
        assert (peak.bf16_tflops is not None) == gpu.bf16, gpu.name
        # Boards of a GH200 differ in what joins their GPUs.
        assert peak.link_gbps in (None, pytest.approx(link_of(gpu).gbps, rel=0.02)), gpu.name


def test_devices_of_traces_have_the_same_peaks_in_a_plan() -> None:
    compared = {name: gpu for name in DEVICE_PEAKS if (gpu := gpu_of_device(name)) is not None}
    assert {"h100", "h100 pcie", "v100 pcie", "mi300x"} <= set(compared)
    for name, gpu in compared.items():
        assert DEVICE_PEAKS[name].fp16_tflops == gpu.half_tflops, name
        link = DEVICE_PEAKS[name].link_gbps
        assert link in (None, pytest.approx(link_of(gpu).gbps, rel=0.02)), name


def test_devices_of_one_name_are_told_apart_by_their_memory() -> None:
    wide = gpu_of_device("NVIDIA H100", 102_085_492_736)
    assert wide is not None
    assert wide.name == "H100 96GB"
    usual = gpu_of_device("NVIDIA H100", 84_930_000_000)
    assert usual is not None
    assert usual.name == "H100"


def test_memory_is_what_cuda_reports_of_the_device() -> None:
    """As totalGlobalMem in captures of these devices, to a tenth of a gigabyte."""
    reported = {"H100": 84.93e9, "A100 SXM 40GB": 42.4e9, "MI300X": 206.1e9, "V100 32GB": 34.1e9}
    reported |= {"H100 96GB": 102.09e9, "V100 16GB": 16.95e9}
    for name, size in reported.items():
        assert find_gpu(name).memory_bytes == pytest.approx(size, abs=0.1e9), name


def test_nodes_of_sxm_gpus_are_joined_by_their_usual_network() -> None:
    assert find_gpu("A100").network == "ib-8x200g"
    assert find_gpu("H100").network == "ib-8x400g"
    assert find_gpu("L40S").network == "roce-100g"
    assert {gpu.network for gpu in gpus()} <= {link.name for link in links() if link.across}


def test_links_are_found_by_name_or_bandwidth() -> None:
    assert find_link("NVLink4", across=False).gbps == 450
    assert find_link("ib-8x400g", across=True).gbps == 400
    assert find_link("100Gbit/s", across=True).gbps == 12.5
    assert find_link("100Gbps", across=True).gbps == 12.5
    assert find_link("100gbps", across=True).gbps == 12.5
    assert find_link("200 gbit/s", across=True).gbps == 25
    assert find_link("500MB/s", across=True).gbps == 0.5
    assert find_link("1.8TB/s", across=False).gbps == 1800
    assert find_link("20GB/s", across=False).gbps == 20
    assert link_of(find_gpu("H800")).gbps == 200
    with pytest.raises(InputError, match="did you mean 'pcie4'"):
        find_link("pci4", across=False)


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("24 GiB", 24 * 2**30), ("80gb", 80e9), ("0.5TB", 0.5e12)]
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("24 GiBB", "24GiB"),
        ("24", "24GB"),
        ("24G", "24GB"),
        ("-24GB", "24GB"),
        ("0GB", "24GB"),
        ("much", "24GB"),
        ("", "24GB"),
        ("nanGB", "24GB"),
    ],
)
def test_what_is_no_size_is_answered_with_one(text: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(text, "--gpu-memory")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "count"),
    [("7e9", 7 * 10**9), ("7B", 7 * 10**9), ("350M", 350 * 10**6), ("124_439_808", 124439808)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--params") == count


@pytest.mark.parametrize("text", ["-7e9", "0", "7X", "seven", "1e99", "1e400", "nan", ""])
def test_what_is_no_count_is_an_error(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_count(text, "--params")
    assert "--params" in caught.value.hint


def test_gpus_of_one_cpu_reach_each_other_faster_over_pcie() -> None:
    """80 % of 31.5 GB/s in a switch, 63 % of one CPU, 40 % across; cards for games go through host memory."""
    server, game = link_of(find_gpu("A100 PCIe 80GB")), link_of(find_gpu("RTX 4090"))
    assert server.reached(2) == pytest.approx(0.80 * 31.5)
    assert server.reached(4) == pytest.approx(0.63 * 31.5)
    assert server.reached(8) == pytest.approx(0.40 * 31.5)
    assert game.reached(2) == game.reached(4) == pytest.approx(0.56 * 31.5)
    measured = replace_gbps(server, 11.0, measured=True)
    assert measured.reached(2) == measured.reached(8) == 11.0


def test_groups_between_each_other_share_what_leads_out_of_their_switch() -> None:
    """0 and 2 beside 1 and 3: half of 80 %. 0 and 4 beside three others: a quarter of 1.2 links of CPUs."""
    link, nvlink = link_of(find_gpu("A100 PCIe 80GB")), link_of(find_gpu("B200"))
    assert link.reached(2, 2) == pytest.approx(0.40 * 31.5)
    assert link.reached(4, 2) == pytest.approx(0.40 * 31.5)
    assert link.reached(2, 4) == pytest.approx(1.2 / 4 * 31.5)
    assert nvlink.reached(2, 4) == nvlink.reached(8) == pytest.approx(0.8 * 900)


def test_a_name_that_is_not_known_gets_the_three_nearest() -> None:
    with pytest.raises(InputError, match="no GPU is known as 'Titan RTX'") as caught:
        find_gpu("Titan RTX")
    nearest = caught.value.hint.removeprefix("nearest: ").partition(";")[0].split(", ")
    assert len(nearest) == 3
    assert all("RTX" in name for name in nearest)


def test_memory_as_sold_is_the_least_that_such_gpus_report() -> None:
    """80 GB are 84.93e9 bytes on an H100 and 84.97e9 on an A100; no GPU of 12 GB is in the table."""
    assert sold_as(80) == pytest.approx(84.93e9)
    assert sold_as(24) == pytest.approx(23.5e9)
    assert sold_as(12) == 12e9


def test_a_rack_has_the_adapters_of_as_many_nodes() -> None:
    assert network_of("ib-8x400g", 8).gbps == network_of("ib-8x400g", 4).gbps == 400
    assert network_of("ib-8x400g", 64).gbps == 3200
