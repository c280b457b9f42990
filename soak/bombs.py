"""Measure the time and memory of diagnosing inputs that are valid, and hard: how they grow with the size.

    python soak/bombs.py [--share 1.0] [KIND...]

Each kind is written at a sixteenth, a quarter and all of its size (times ``--share``) and diagnosed by a
process of its own, which writes the terminal's answer and a page. A factor above 5 for four times the size
is a cliff.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LONGEST_S = 300
WORST_FACTOR = 5.0

Events = Iterator[str]
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def host(cat: str, name: str, ts: float, dur: float, thread: int = 1, args: str = "") -> str:
    """Return an event of the host, times in microseconds."""
    place = f'"pid":9,"tid":{thread},"ts":{ts},"dur":{dur},"args":{{{args}}}'
    return f'{{"ph":"X","cat":"{cat}","name":"{name}",{place}}}'


def gpu(name: str, ts: float, dur: float, link: int, stream: int = 7, args: str = "") -> str:
    """Return a kernel and its launch, 5 us before it."""
    more = f",{args}" if args else ""
    return (
        f'{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":9,"tid":1,"ts":{ts - 5},"dur":1,'
        f'"args":{{"correlation":{link}}}}},'
        f'{{"ph":"X","cat":"kernel","name":"{name}","pid":0,"tid":{stream},"ts":{ts},"dur":{dur},'
        f'"args":{{"device":0,"stream":{stream},"correlation":{link}{more}}}}}'
    )


def collective(op: str, size: int = 1, group: str = "0", ranks: str = "[0, 1]") -> str:
    """Return the arguments of a collective's kernel."""
    return (
        f'"Collective name":"{op}","In msg nelems":{size},"Out msg nelems":{size},"Group size":2,'
        f'"dtype":"Float","Process Group Name":"{group}","Process Group Ranks":"{ranks}"'
    )


# The kinds. All of them but the first have four steps of one length.


def steps(size: int) -> Events:
    """Steps of one kernel each."""
    for number in range(size):
        yield host("user_annotation", f"ProfilerStep#{number}", 100 * number, 99)
        yield gpu("gemm", 100 * number + 20, 50, number)


def in_steps(size: int) -> Iterator[tuple[int, float, str]]:
    """Yield numbers with their times, and a step's range where one begins; 10 us apart."""
    each = max(1, size // 4)
    for number in range(size):
        begins = number % each == 0
        step = host("user_annotation", f"ProfilerStep#{number // each}", 10 * number, 10 * each - 1)
        yield number, 10.0 * number + 6, f"{step}," if begins else ""


def collectives(size: int) -> Events:
    """Collectives of a few bytes."""
    for number, ts, begun in in_steps(size):
        yield begun + gpu(ALL_REDUCE, ts, 3, number, 13, collective("allreduce"))


def groups(size: int) -> Events:
    """Process groups, each with a collective."""
    for number, ts, begun in in_steps(size):
        yield begun + gpu(
            ALL_REDUCE, ts, 3, number, 13, collective("allreduce", 1000, str(number), f"[0, {number + 1}]")
        )


def names(size: int) -> Events:
    """Kernels of a name each."""
    for number, ts, begun in in_steps(size):
        yield begun + gpu(f"void kernel_{number}<float>(int)", ts, 3, number)


def gathers(size: int) -> Events:
    """All-gathers of FSDP, each of a unit of its own."""
    for number, ts, begun in in_steps(size):
        unit = f"layers.{number}"
        yield begun + host("user_annotation", f"FSDP::pre_forward ({unit})", ts - 5.5, 2)
        yield host("user_annotation", f"FSDP::all_gather ({unit})", ts - 5.2, 1)
        yield gpu(ALL_GATHER, ts, 3, number, 13, collective("_allgather_base", 100_000))
        yield host("cpu_op", "aten::mm", ts - 3, 1)
        yield gpu("gemm", ts + 2.5, 1, size + number)


def same_gathers(size: int) -> Events:
    """All-gathers of FSDP1 without names, of sizes that all differ."""
    for number, ts, begun in in_steps(size):
        yield begun + host("user_annotation", "FullyShardedDataParallel._pre_forward", ts - 5.5, 2)
        yield gpu(ALL_GATHER, ts, 3, number, 13, collective("_allgather_base", 100_000 + number))
        yield gpu("gemm", ts + 2.5, 1, size + number)


def reductions(size: int) -> Events:
    """Reductions of DDP, each in a backward pass of its own."""
    for number, ts, begun in in_steps(size):
        yield begun + host("cpu_op", "DistributedDataParallel.forward", ts - 5.9, 0.3)
        yield host("cpu_op", "autograd::engine::evaluate_function: MulBackward0", ts - 5.5, 4, 2)
        yield gpu(ALL_REDUCE, ts, 3, number, 13, collective("allreduce", 1_000_000))


def streams(size: int) -> Events:
    """Communication, each on a stream of its own."""
    for number, ts, begun in in_steps(size):
        yield begun + gpu(ALL_REDUCE, ts, 3, number, 100 + number, collective("allreduce", 1000))


def kinds(size: int) -> Events:
    """Collectives, each of a size and a type of its own."""
    for number, ts, begun in in_steps(size):
        args = collective("allreduce", 1000 + number).replace('"Float"', f'"Float{number}"')
        yield begun + gpu(ALL_REDUCE, ts, 3, number, 13, args)


def threads(size: int) -> Events:
    """Operators, each on a thread of its own."""
    for number, ts, begun in in_steps(size):
        yield begun + host("cpu_op", "aten::mm", ts, 3, 100 + number)
        yield gpu("gemm", ts, 3, number)


def nested(size: int) -> Events:
    """Operators inside each other."""
    for number in range(size):
        yield host("cpu_op", f"aten::op{number % 50}", number, 3 * size - 2 * number)
    for number in range(4):
        yield host("user_annotation", f"ProfilerStep#{number}", number * size, size - 1)
        yield gpu("gemm", number * size + 10, size / 2, number)


def at_once(size: int) -> Events:
    """Kernels that all run at one time on one stream."""
    for number in range(4):
        yield host("user_annotation", f"ProfilerStep#{number}", number * size, size - 1)
    for number in range(size):
        yield gpu("gemm", 100, size, number)


def syncs(size: int) -> Events:
    """Calls that block on the device, each in an operator of its own name."""
    for number, ts, begun in in_steps(size):
        yield begun + host("cpu_op", f"aten::item{number}", ts - 3, 5)
        yield host("cuda_runtime", "cudaStreamSynchronize", ts - 2, 3, 1, f'"correlation":{size + number}')
        yield gpu("gemm", ts - 1, 2, number)


def gloo(size: int) -> Events:
    """Transfers of gloo in a CPU trace."""
    for _, ts, begun in in_steps(size):
        yield begun + host("cpu_op", "c10d::allreduce_", ts - 3, 1)
        yield host("user_annotation", "gloo:all_reduce", ts, 3, 5)
        yield host("cpu_op", "autograd::engine::evaluate_function: MulBackward0", ts - 5, 1, 2)


@dataclass(frozen=True)
class Kind:
    """An input that is hard, and the size that its diagnosis should stand."""

    events: Callable[[int], Events]
    size: int
    header: str = '"deviceProperties":[{"id":0,"name":"NVIDIA H100 80GB HBM3"}],'


KINDS = {
    "steps": Kind(steps, 100_000),
    "collectives": Kind(collectives, 1_000_000),
    "process groups": Kind(groups, 100_000),
    "kernel names": Kind(names, 1_000_000),
    "FSDP2 units": Kind(gathers, 16_000),
    "FSDP1 gathers": Kind(same_gathers, 16_000),
    "DDP reductions": Kind(reductions, 16_000),
    "communication streams": Kind(streams, 16_000),
    "kinds of collective": Kind(kinds, 16_000),
    "threads": Kind(threads, 16_000),
    "nested operators": Kind(nested, 200_000),
    "kernels at once": Kind(at_once, 400_000),
    "blocking calls": Kind(syncs, 100_000),
    "gloo transfers": Kind(gloo, 200_000, ""),
}


@dataclass(frozen=True)
class Measured:
    """What a diagnosis took: processor time, memory, the size of the page, and how it ended."""

    seconds: float
    mb: float
    page_mb: float
    code: int


def write(kind: Kind, size: int, path: Path) -> None:
    """Write a trace of a kind."""
    with path.open("w", encoding="utf-8") as file:
        backend = "nccl" if kind.header else "gloo"
        file.write(f'{{"schemaVersion":1,{kind.header}')
        file.write(f'"distributedInfo":{{"backend":"{backend}","rank":0,"world_size":2}},"traceEvents":[')
        for number, event in enumerate(kind.events(size)):
            file.write(("" if number == 0 else ",\n") + event)
        file.write("]}")


def diagnose(path: Path) -> Measured:
    """Diagnose a file in a process of its own."""
    page = path.with_suffix(".html")
    command = [sys.executable, "-m", "tracedoc", "diagnose", str(path), "-o", "-", "-o", str(page)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    # Of its own processor time: a busy machine may give it little.
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.stderr is not None
    words = child.stderr.read().decode()
    if child.returncode not in (0, 1) or "Traceback" in words:
        print(f"  {path.name}: {child.returncode}: {words[-1500:]}", flush=True)
    size = page.stat().st_size / 1e6 if page.exists() else 0.0
    return Measured(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3, size, child.returncode)


def main() -> int:
    """Measure the kinds that the command line names; return how many are cliffs or fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--share", type=float, default=1.0)
    given = parser.parse_args()
    bad = 0
    print("| kind | size | processor | per fourfold | memory | page |\n|---|---|---|---|---|---|", flush=True)
    for name, kind in KINDS.items():
        if given.kinds and name not in given.kinds:
            continue
        before: Measured | None = None
        for part in (16, 4, 1):
            size = max(4, int(kind.size * given.share / part))
            with tempfile.TemporaryDirectory(prefix="bomb-") as folder:
                path = Path(folder) / "rank-0.json"
                write(kind, size, path)
                now = diagnose(path)
            factor = now.seconds / before.seconds if before else 0.0
            bad += factor > WORST_FACTOR or now.code not in (0, 1)
            shown = f"{factor:.1f}" if before else ""
            took = f"{now.seconds:.1f} s | {shown} | {now.mb:.0f} MB | {now.page_mb:.2f} MB"
            print(f"| {name} | {size:,} | {took} |", flush=True)
            before = now
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
