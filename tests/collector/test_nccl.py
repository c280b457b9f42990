"""Summaries of NCCL logs. The texts are written from the forms of NCCL's sources: no GPU made them."""

from __future__ import annotations

from pathlib import Path

from tracedoc.collector.nccl import read_nccl_log, summarise_log

TWO_NODES = """\
n1:9:8 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:9:8 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
n1:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:9:9 [0] NCCL INFO Using network IB
n1:9:9 [0] NCCL INFO ncclCommInitRank comm 0x55d rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 7000 - Init START
n1:9:9 [0] NCCL INFO NVLS multicast support is available on dev 0
n1:9:9 [0] NCCL INFO comm 0x55d rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
n1:9:9 [0] NCCL INFO Channel 00/02 :    0   7   6   5   4   3   2   1   9  10  11  12  13  14  15   8
n1:9:9 [0] NCCL INFO Channel 01/02 :    0   7   6   5   4   3   2   1   9  10  11  12  13  14  15   8
n1:9:9 [0] NCCL INFO P2P Chunksize set to 131072
n1:9:9 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:9:9 [0] NCCL INFO Channel 01/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
n1:9:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 7[7] via P2P/CUMEM/read
n1:9:9 [0] NCCL INFO Connected all rings
n1:9:9 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
"""

SLOW_HOST = """\
box:77:77 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.
box:77:77 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
box:77:90 [0] NCCL INFO NET/Socket : Using [0]eno1:192.168.1.4<0>
box:77:90 [0] NCCL INFO Using network Socket
NCCL version 2.18.1+cuda12.1
box:77:90 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via SHM/direct/direct
box:77:90 [0] NCCL INFO Channel 01 : 0[1000] -> 1[2000] via SHM/direct/direct
box:77:90 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
box:77:90 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 192.168.1.5 failed
"""


def test_two_nodes_over_infiniband_with_direct_access() -> None:
    found = summarise_log(TWO_NODES.splitlines())
    assert (found["library"], found["version"], found["network"]) == ("NCCL", "2.21.5+cuda12.4", "IB")
    assert found["transports"] == {"NET/IB": 2, "P2P/CUMEM": 2}
    assert found["links"] == [[0, 7, "P2P/CUMEM"], [9, 0, "NET/IB"]]
    assert found["gdr"] is True
    assert found["nvls"] is True
    assert found["rings"] == 2
    assert found["adapters"] == {"IB": ["mlx5_0", "mlx5_1"]}
    assert found["communicators"] == [{"ranks": 16, "nodes": 2, "local_ranks": 8}]
    assert found["channels"] == {"collective": 16, "nvls": 0, "p2p": 16}
    assert found["p2p_chunk_bytes"] == 131072


def test_one_host_without_peer_access() -> None:
    found = summarise_log(SLOW_HOST.splitlines())
    assert found["transports"] == {"SHM/direct": 2}
    assert found["settings"] == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert found["network"] == "Socket"
    assert (found["gdr"], found["pxn"]) == (False, False)
    assert found["warnings"] == ["socketStartConnect: Connect to 192.168.1.5 failed"]


def test_amd_names_itself() -> None:
    assert summarise_log(["RCCL version 2.18.3+hip6.0 HEAD:2f6d59e"])["library"] == "RCCL"


def test_a_cloud_plugin_with_a_space_in_its_name() -> None:
    line = "n:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA"
    assert summarise_log([line])["transports"] == {"NET/AWS Libfabric": 1}


def test_a_log_of_other_lines_tells_nothing() -> None:
    assert summarise_log(["hello", ""]) == {}


def test_the_log_of_this_process_is_found(tmp_path: Path) -> None:
    (tmp_path / "nccl.42.log").write_text(SLOW_HOST)
    (tmp_path / "nccl.43.log").write_text(TWO_NODES)
    environment = {"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p.log")}
    assert read_nccl_log(environment, 42)["version"] == "2.18.1+cuda12.1"
    assert read_nccl_log(environment, 44) == {}
    assert read_nccl_log({}, 42) == {}
