"""Logs of six machines, NCCL 2.18 to 2.30 and RCCL, written by hand in the forms of these versions."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tracedoc.collector import nccl
from tracedoc.collector.nccl import ask_nccl, read_nccl_log, summarise_log, without_ours
from tracedoc.run.machine import read_machine

DGX_2_18 = """\
a:4:4 [0] NCCL INFO Bootstrap : Using bond0:10.1.0.4<0>
a:4:4 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
NCCL version 2.18.6+cuda12.1
a:4:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB bond0:10.1.0.4<0>
a:4:9 [0] NCCL INFO Using network IB
a:4:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
a:4:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/IPC/read
a:4:9 [0] NCCL INFO Connected all rings
"""
NO_LIBRARY_2_20 = """\
b:4:4 [0] NCCL INFO cudaDriverVersion 12020
NCCL version 2.20.5+cuda12.4
b:4:9 [0] NCCL INFO Failed to open libibverbs.so[.1]
b:4:9 [0] NCCL INFO NET/Socket : Using [0]eno1:10.2.0.4<0> [1]ens3:10.3.0.4<0>
b:4:9 [0] NCCL INFO Using non-device net plugin version 0
b:4:9 [0] NCCL INFO Using network Socket
b:4:9 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/Socket/0
b:4:9 [0] NCCL INFO Channel 01/0 : 2[0] -> 0[0] [receive] via NET/Socket/1
"""
GAMING_2_25 = """\
c:4:4 [0] NCCL INFO Bootstrap: Using eno1:10.2.0.9<0>
c:4:4 [0] NCCL INFO NCCL version 2.25.1+cuda12.2
c:4:4 [0] NCCL INFO NET/IB : No device found.
c:4:4 [0] NCCL INFO NET/IB : Using [RO]; OOB eno1:10.2.0.9<0>
c:4:4 [0] NCCL INFO NET/Socket : Using [0]eno1:10.2.0.9<0>
c:4:4 [0] NCCL INFO Using network Socket
c:4:9 [0] graph/paths.cc:350 NCCL WARN P2P is disabled between connected GPUs 1 and 0. Check the driver.
c:4:9 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
c:4:9 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
"""
ROCE_2_27 = """\
d:4:4 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
d:4:4 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
d:4:4 [0] NCCL INFO NCCL_IB_HCA set to mlx5_2
d:4:4 [0] NCCL INFO NET/IB : Using [0]mlx5_2:1/RoCE [RO]; OOB eth0:10.4.0.4<0>
d:4:4 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_2'
d:4:4 [0] NCCL INFO Initialized NET plugin IB
d:4:4 [0] NCCL INFO Assigned NET plugin IB to comm
d:4:4 [0] NCCL INFO Using network IB
d:4:9 [0] NCCL INFO [Proxy Service] Device 0 CPU core 16
d:4:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0
d:4:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
CLOUD_2_30 = """\
e:4:4 [0] NCCL INFO NCCL version 2.30.1+cuda13.0
e:4:4 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 16 nics)
e:4:4 [0] NCCL INFO Initialized NET plugin AWS Libfabric
e:4:4 [0] NCCL INFO Using network AWS Libfabric
e:4:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
e:4:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
AMD_2_18 = """\
f:4:4 [0] NCCL INFO ROCr version 1.1
RCCL version 2.18.6+hip6.1 HEAD:d2b9e5a
f:4:9 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.5.0.4<0> [1]hsn1:10.5.0.5<0>
f:4:9 [0] NCCL INFO Using network Socket
f:4:9 [0] NCCL INFO Channel 02/0 : 1[c6000] -> 4[c1000] [send] via NET/Socket/1 comm 0x95cdeb0 nRanks 08
f:4:9 [0] NCCL INFO Channel 00/0 : 1[c6000] -> 0[c1000] via P2P/IPC comm 0x95cdeb0 nRanks 08
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (DGX_2_18, ("NCCL", "2.18.6+cuda12.1", "IB", {"NET/IB": 1, "P2P/IPC": 1}, True, 0)),
        (NO_LIBRARY_2_20, ("NCCL", "2.20.5+cuda12.4", "Socket", {"NET/Socket": 2}, False, 1)),
        (GAMING_2_25, ("NCCL", "2.25.1+cuda12.2", "Socket", {"SHM/direct": 2}, None, 2)),
        (ROCE_2_27, ("NCCL", "2.27.3+cuda12.9", "IB", {"NET/IB": 1, "P2P/CUMEM": 1}, False, 1)),
        (
            CLOUD_2_30,
            ("NCCL", "2.30.1+cuda13.0", "AWS Libfabric", {"NET/AWS Libfabric": 1, "P2P/CUMEM": 1}, True, 0),
        ),
        (AMD_2_18, ("RCCL", "2.18.6+hip6.1", "Socket", {"NET/Socket": 1, "P2P/IPC": 1}, False, 0)),
    ],
    ids=["dgx 2.18", "no library 2.20", "gaming 2.25", "roce 2.27", "cloud 2.30", "amd 2.18"],
)
def test_each_machine_tells_its_path(log: str, expected: tuple[Any, ...]) -> None:
    found = summarise_log(log.splitlines())
    version, network, transports, gdr, warnings = expected[1:]
    assert (found["library"], found["version"], found["network"]) == (expected[0], version, network)
    assert (found["transports"], found.get("gdr")) == (transports, gdr)
    assert len(found.get("warnings", ())) == warnings
    json.dumps(found)
    machine = read_machine({"nccl": found})
    assert len(machine.pairs) == len(found["links"])
    assert dict(machine.versions)["network of NCCL"] == network


TWO_GROUPS = """\
a:4:4 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
a:4:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB bond0:10.1.0.4<0>
a:4:8 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 16 cudaDev 0 commId 0x1 - Init START
a:4:9 [0] NCCL INFO ncclCommInitRankConfig comm 0x66 rank 0 nranks 4 cudaDev 0 commId 0x2 - Init START
a:4:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
a:4:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0/GDRDMA
a:4:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[0] [send] via NET/IB/1/GDRDMA
"""


def test_each_group_tells_its_cards() -> None:
    found = summarise_log(TWO_GROUPS.splitlines())
    assert found["cards"] == {"4": ["mlx5_0", "mlx5_3"], "16": ["mlx5_0"]}
    assert read_machine({"nccl": found}).cards == {"4": ("mlx5_0", "mlx5_3"), "16": ("mlx5_0",)}


def test_what_looks_like_a_secret_is_left_out() -> None:
    lines = [
        "a:4:4 [0] NCCL INFO NCCL_AUTH_TOKEN set by environment to hunter2.",
        "a:4:4 [0] NCCL INFO NCCL_NET_PLUGIN set by environment to hf_abcdefghij0123456789.",
        "a:4:4 [0] NCCL WARN cannot fetch with hf_abcdefghij0123456789",
        "a:4:4 [0] NCCL INFO NCCL_IB_HCA set to mlx5_2",
    ]
    found = summarise_log(lines)
    assert "hunter2" not in json.dumps(found)
    assert "hf_" not in json.dumps(found)
    assert found["settings"]["NCCL_IB_HCA"] == "mlx5_2"


# -- who is asked for a log


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folders of this person and of logs are empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(nccl.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"LOCAL_RANK": "0"}, True),
        ({"SLURM_LOCALID": "0"}, True),
        ({"LOCAL_RANK": "3"}, False),
        ({}, False),  # a launcher, whose children would all inherit it
        ({"LOCAL_RANK": "0", "NCCL_DEBUG": "WARN"}, False),
        ({"LOCAL_RANK": "0", "NCCL_DEBUG_SUBSYS": "COLL"}, False),
    ],
)
def test_the_first_rank_of_a_node_is_asked_where_the_user_asked_nothing(
    given: dict[str, str], asked: bool
) -> None:
    environment = dict(given)
    ask_nccl(environment)
    assert ("NCCL_DEBUG_FILE" in environment) is asked
    assert without_ours(environment) == given


def test_a_file_of_nccls_own_settings_is_heeded(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    environment = {"LOCAL_RANK": "0"}
    ask_nccl(environment)
    assert environment == {"LOCAL_RANK": "0"}


def test_a_log_that_nobody_asked_for_is_read_once_and_removed(tmp_path: Path) -> None:
    environment = {"LOCAL_RANK": "0"}
    ask_nccl(environment)
    path = Path(environment["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", "42"))
    path.write_text(DGX_2_18)
    found = read_nccl_log(environment, 42)
    assert (found["version"], "file" in found, list(tmp_path.iterdir())) == ("2.18.6+cuda12.1", False, [])
