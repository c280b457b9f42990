"""Where ranks run, by what their manifest says, and the line that places them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.run.job import Job, Loader, RankJob
from tracedoc.run.machine import LoaderWindow, Machine, parse_cpus
from tracedoc.topics.host.placement import core_crowd, fair_cores, placement_line
from tracedoc.values import Unknown

FOUR = {"usable": parse_cpus("0-3"), "first_threads": parse_cpus("0-3")}
TWO_SOCKETS = {
    "usable": parse_cpus("0-7"),
    "first_threads": parse_cpus("0-3"),
    "nodes": {0: parse_cpus("0-1,4-5"), 1: parse_cpus("2-3,6-7")},
}


def run_of(
    *allowed: str,
    host: Mapping[str, Any],
    gpus: tuple[int | None, ...] = (),
    command: str = "",
    torch: str = "2.8.0",
    hosts: tuple[str, ...] = (),
) -> Any:
    """A run of ranks that may use these processors, on GPUs of these nodes."""
    ranks = tuple(
        RankJob(
            rank,
            host=hosts[rank] if hosts else "a",
            versions={"torch": torch},
            affinity=cpus,
            cores=len(parse_cpus(cpus)),
            threads=1,
            machine=Machine(allowed=parse_cpus(cpus), gpu_node=gpus[rank] if gpus else None, **host),
        )
        for rank, cpus in enumerate(allowed)
    )
    digests = [SimpleNamespace(rank=rank) for rank in range(len(ranks))]
    return SimpleNamespace(job=Job(ranks, command=command), digests=digests)


@pytest.mark.parametrize(
    ("allowed", "crowds"),
    [
        (("0", "0"), ["pinned together"] * 2),
        (("0", "1"), ["pinned to few"] * 2),  # of four
        (("0-1", "1-2"), ["pinned together"] * 2),
        (("0-1", "2-3"), ["others"] * 2),
        (("0-3", "0-3"), ["others"] * 2),
        (("0-3",) * 5, ["more ranks than cores"] * 5),
        (("2",), ["pinned to few"]),
        (("", "0-3"), ["none", "others"]),
    ],
)
def test_masks_tell_who_takes_the_cores(allowed: tuple[str, ...], crowds: list[str]) -> None:
    assert list(core_crowd.by_rank(run_of(*allowed, host=FOUR)).values()) == crowds


@pytest.mark.parametrize(("wanted_us", "crowd"), [(900_000, "loader workers"), (100_000, "others")])
def test_loader_workers_that_sleep_take_no_cores(wanted_us: int, crowd: str) -> None:
    """Two workers for two cores, in a second of which they want a core for as long together."""
    worker = {"ran_us": wanted_us // 2, "waited_us": 0}
    machine = Machine(
        allowed=parse_cpus("0-1"),
        usable=parse_cpus("0-1"),
        loader=LoaderWindow(wall_us=1_000_000, workers=(worker, worker)),
    )
    rank = RankJob(0, host="a", cores=2, threads=1, machine=machine, loader=Loader(workers=2))
    run: Any = SimpleNamespace(job=Job((rank,)), digests=[SimpleNamespace(rank=0)])
    assert core_crowd.by_rank(run) == {"0": crowd}


def test_ranks_of_other_hosts_take_no_cores() -> None:
    run = run_of("0-3", "0-3", host=FOUR, hosts=("a", "b"))
    assert list(fair_cores.by_rank(run).values()) == [4, 4]


def test_threads_of_one_core_are_one() -> None:
    assert list(fair_cores.by_rank(run_of("0-7", "0-7", host=TWO_SOCKETS)).values()) == [2, 2]


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (run_of("0", host=FOUR, command="python train.py"), "taskset -c 0-3 python train.py"),
        (
            run_of("0-1", host=TWO_SOCKETS, gpus=(1,), command="python train.py"),
            "numactl --physcpubind=2-3,6-7 --membind=1 python train.py",
        ),
        (
            run_of("0", "0", host=FOUR, command="srun -n 2 python train.py"),
            "srun --cpu-bind=mask_cpu:0x3,0xc -n 2 python train.py",
        ),
        (
            run_of(
                *("0-7", "0-7"),
                host=TWO_SOCKETS,
                gpus=(0, 1),
                command="torchrun --nproc_per_node 2 train.py",
                torch="2.10.1+cu129",
            ),
            "torchrun --numa-binding=node --nproc_per_node 2 train.py",
        ),
    ],
)
def test_the_line_is_that_of_the_launcher(run: Any, line: str) -> None:
    assert placement_line(run) == line


@pytest.mark.parametrize(
    ("run", "own"),
    [
        (run_of("0", "0", host=FOUR, command="torchrun train.py"), [{0, 1}, {2, 3}]),
        # Each beside its GPU, with both threads of its cores.
        (run_of("0-7", "0-7", host=TWO_SOCKETS, gpus=(1, 0)), [{2, 3, 6, 7}, {0, 1, 4, 5}]),
        (run_of("0-7", "0-7", host=TWO_SOCKETS, gpus=(1, 1)), [{2, 6}, {3, 7}]),
    ],
)
def test_lines_of_the_script_give_each_rank_its_cores(
    run: Any, own: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines run as they are printed, on each rank."""
    import os

    given: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: given.append(cpus))
    for rank in range(len(own)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        exec(str(placement_line(run)), {})
    assert given == own


def test_fewer_cores_than_ranks_have_no_line() -> None:
    assert isinstance(placement_line(run_of("0", "0", host={"usable": parse_cpus("0")})), Unknown)


@pytest.mark.parametrize("text", ["a", "0-99999999", "3;4", "-1"])
def test_what_is_no_list_of_processors_names_none(text: str) -> None:
    assert parse_cpus(text) == frozenset()
