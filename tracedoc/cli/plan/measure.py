"""Measure what GPUs, or CPUs, of this machine reach: products, copies and all-gathers, a process for each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import date
from importlib import import_module
from typing import Any

from tracedoc.errors import InputError
from tracedoc.planner.hardware import GPUS_OF_A_CPU, GPUS_OF_A_SWITCH, Gathered, Machine, keep

MODEL_WIDTH, MLP_WIDTH = 4096, 14336
"""Sizes of the products: those of a block of Llama 3 8B."""
TOKENS = {"cuda": 4096, "cpu": 64}
"""Tokens of the products: as many as a device multiplies at full rate, and in a moment."""
PRODUCT_SECONDS = 5.0
"""How long products run: until a GPU has its clock of long runs."""
COPIED_BYTES = 1 << 30
GATHERED_BYTES = 256 << 20
LATENCY_BYTES = 64 << 10
"""Bytes of a gather that takes next to nothing but its latency."""


def measured() -> str:
    """Measure, keep it for this host, and say it; empty in all processes but the first.

    Raises :class:`InputError` where there is no torch.
    """
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise InputError(
            f"torch cannot be imported: {error}", "run it with the python that trains"
        ) from error
    rank, device = int(os.environ.get("LOCAL_RANK", "0")), "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(rank)
    machine = measure(torch, device, PRODUCT_SECONDS)
    if rank:
        return ""
    gathers = "".join(
        f"; all-gather of {one.gpus} {one.gbps:.3g} GB/s, {one.latency * 1e6:.0f} us a call"
        for one in machine.gathered
    )
    rates = f"products {machine.product_tflops:.3g} TFLOP/s, memory {machine.copy_gbps:.3g} GB/s{gathers}"
    which = "for such GPUs" if device == "cuda" else "without --gpu"
    kept = f"Kept in {keep(machine)}; plans {which} on this machine take it."
    return f"{machine.device}: {rates}\n{kept}\n"


def measure(torch: Any, device: str, seconds: float) -> Machine:
    """What one GPU computes and copies, and what all of this node gather; every process takes part.

    On CPUs a process is what is measured, in fp32, with its part of the memory.
    """
    kind, name = torch.float32, device
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _processes())
    if device == "cuda":
        kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = properties.name, float(properties.total_memory)
    return Machine(
        host=socket.gethostname(),
        day=date.today().isoformat(),
        device=name,
        memory_bytes=memory,
        product_tflops=_products(torch, device, kind, seconds) / 1e12,
        copy_gbps=_copies(torch, device) / 1e9,
        gathered=_gathers(torch, device, kind),
    )


def _took(torch: Any, device: str, work: Callable[[], object]) -> float:
    """The seconds of one call, of ten after each other."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    start = now()
    for _ in range(10):
        work()
    return (now() - start) / 10


def _products(torch: Any, device: str, kind: Any, seconds: float) -> float:
    """FLOP/s of the products of a block, one after the other, at the end of so many seconds."""
    given = {"dtype": kind, "device": device}
    tokens = TOKENS[device]
    narrow, wide = torch.randn(tokens, MODEL_WIDTH, **given), torch.randn(tokens, MLP_WIDTH, **given)
    square, up = torch.randn(MODEL_WIDTH, MODEL_WIDTH, **given), torch.randn(MODEL_WIDTH, MLP_WIDTH, **given)

    def block() -> None:
        for _ in range(2):
            narrow @ square
            narrow @ up
        wide @ up.T

    end, rate = time.perf_counter() + seconds, 0.0
    flops = 2 * tokens * MODEL_WIDTH * (2 * MODEL_WIDTH + 3 * MLP_WIDTH)  # of the five products
    while not rate or time.perf_counter() < end:
        rate = flops / _took(torch, device, block)
    return rate


def _copies(torch: Any, device: str) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _took(torch, device, lambda: target.copy_(source))


def _gathers(torch: Any, device: str, kind: Any) -> tuple[Gathered, ...]:
    """All-gathers of all processes of this node, and of the first few where there are more."""
    local = _processes()
    if local < 2:
        return ()
    distributed = torch.distributed
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, local_rank = distributed.get_rank(), int(os.environ["LOCAL_RANK"])
    found = []
    for size in sorted({min(few, local) for few in (GPUS_OF_A_SWITCH, GPUS_OF_A_CPU, local)}):
        starts = range(0, distributed.get_world_size(), local)
        groups = [range(start, start + size) for start in starts]  # all processes make all groups
        for members, group in [(one, distributed.new_group(list(one))) for one in groups]:
            if rank in members:
                found.append(_gather(torch, device, kind, size, group))
    distributed.barrier()
    distributed.destroy_process_group()
    return tuple(found) if local_rank == 0 else ()


def _processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gather(torch: Any, device: str, kind: Any, size: int, group: Any) -> Gathered:
    def seconds(count: int) -> float:
        part = torch.zeros(count // size // kind.itemsize, dtype=kind, device=device)
        whole = torch.zeros(part.numel() * size, dtype=kind, device=device)
        gather = torch.distributed.all_gather_into_tensor
        return _took(torch, device, lambda: gather(whole, part, group=group))

    latency = seconds(LATENCY_BYTES)
    sent = GATHERED_BYTES * (size - 1) / size
    return Gathered(size, sent / max(1e-9, seconds(GATHERED_BYTES) - latency) / 1e9, latency)
