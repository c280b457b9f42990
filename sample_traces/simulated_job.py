"""Decide when each event of a training job happens, on ranks that nothing ran on.

Host threads launch, streams run in order, and a collective waits for its last rank; the speeds are below.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from tracedoc.testing.builder import TraceBuilder

SEED = 20
RANKS = 4
DEVICE = "NVIDIA H100 80GB HBM3"

RING_GBPS = 361.0  # bus bandwidth of large all-gathers and reduce-scatters inside a node
ALLREDUCE_GBPS = 480.0
HALF_SIZE_BYTES = 20 * 2**20  # the message size that gets half of that
LAUNCH_LATENCY_MS = 0.004
OP_HOST_MS = 0.014  # one eager operator on the host
COLLECTIVE_HOST_MS = 0.040
KERNEL_JITTER = 0.004  # standard deviation, as a share
HOST_JITTER = 0.02

COMPUTE, COPY, GATHER, SCATTER, REDUCE = 7, 16, 20, 24, 28  # streams


def transfer_ms(op: str, nbytes: int, ranks: int = RANKS) -> float:
    """Return how long a collective of ``nbytes`` takes once all ranks are there."""
    factor = (ranks - 1) / ranks * (2 if op == "allreduce" else 1)
    peak = ALLREDUCE_GBPS if op == "allreduce" else RING_GBPS
    return factor * (nbytes + HALF_SIZE_BYTES) / (peak * 1e6)


class Job:
    """All ranks of one job, advanced together, operation by operation."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(f"{SEED} {name}")
        self.builders = [TraceBuilder(rank, RANKS, device=DEVICE) for rank in range(RANKS)]
        self.host = [self.random.uniform(0, 0.01) for _ in range(RANKS)]  # each rank's host clock, ms
        self.free: dict[int, list[float]] = {}  # when each stream has nothing queued, by rank
        self.thread = "main"

    def pause(self, ms: float) -> None:
        """Let every host work for ``ms``."""
        for rank in range(RANKS):
            self.host[rank] += ms * max(self.random.gauss(1, HOST_JITTER), 0.5)

    @contextmanager
    def range(self, name: str, category: str = "user_annotation") -> Iterator[None]:
        """Put a host range around what happens inside."""
        starts, thread = list(self.host), self.thread
        self.pause(0.003)
        yield
        self.pause(0.003)
        for builder, start, end in zip(self.builders, starts, self.host, strict=True):
            builder.host(name, start, end, thread=thread, category=category)  # type: ignore[arg-type]

    @contextmanager
    def node(self, name: str) -> Iterator[None]:
        """Put an autograd node around what happens inside."""
        with self.range(f"autograd::engine::evaluate_function: {name}", "cpu_op"), self.range(name, "cpu_op"):
            yield

    def kernel(
        self,
        name: str,
        ms: float,
        op: str,
        *,
        dims: list[list[int]] | None = None,
        stream: int = COMPUTE,
        after: list[float] | None = None,
    ) -> list[float]:
        """Launch a kernel on every rank; return when it ends on each."""
        ends: list[float] = []
        free = self.free.setdefault(stream, [0.0] * RANKS)
        for rank, builder in enumerate(self.builders):
            start = max(self.host[rank] + LAUNCH_LATENCY_MS, free[rank], after[rank] if after else 0.0)
            end = start + ms * max(self.random.gauss(1, KERNEL_JITTER), 0.5)
            builder.kernel(
                name, start, end,
                stream=stream, launch_ms=self.host[rank], thread=self.thread, op=op,
                dims=dims, types=["c10::BFloat16"] * len(dims) if dims else None,
            )  # fmt: skip
            free[rank] = end + 0.001
            ends.append(end)
        self.pause(OP_HOST_MS)
        return ends

    def collective(
        self, op: str, nbytes: int, *, stream: int, after: list[float], dtype: str = "BFloat16"
    ) -> list[float]:
        """Launch a collective on every rank; it ends everywhere when the last arrival's transfer does."""
        free = self.free.setdefault(stream, [0.0] * RANKS)
        starts = [max(self.host[rank] + LAUNCH_LATENCY_MS, free[rank], after[rank]) for rank in range(RANKS)]
        done = max(starts) + transfer_ms(op, nbytes)
        ends = [done + self.random.uniform(0, 0.002) for _ in range(RANKS)]
        for rank, builder in enumerate(self.builders):
            builder.collective(
                op, starts[rank], ends[rank],
                nbytes=nbytes, dtype=dtype, stream=stream, launch_ms=self.host[rank], thread=self.thread,
            )  # fmt: skip
            free[rank] = ends[rank] + 0.001
        self.pause(COLLECTIVE_HOST_MS)
        return ends

    def wait(self, call: str, until: list[float]) -> None:
        """Block every host in ``call`` until the given times."""
        for rank, builder in enumerate(self.builders):
            end = max(self.host[rank] + 0.002, until[rank])
            builder.runtime(call, self.host[rank], end, thread=self.thread)
            self.host[rank] = end + 0.002

    def fetch_batch(self, tokens: int) -> None:
        """Take a batch from a loader that has it ready, and copy it to the GPU."""
        with self.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            self.pause(0.08)
        for rank, builder in enumerate(self.builders):
            start = max(self.host[rank] + LAUNCH_LATENCY_MS, self.free.setdefault(COPY, [0.0] * RANKS)[rank])
            end = start + 0.003
            builder.copy("HtoD", start, end, 8 * tokens, stream=COPY, launch_ms=self.host[rank])
            self.free[COPY][rank] = end
        self.pause(OP_HOST_MS)

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Put ``ProfilerStep#index`` around a step."""
        with self.range(f"ProfilerStep#{index}"):
            yield

    @contextmanager
    def autograd(self) -> Iterator[None]:
        """Let the autograd thread do what happens inside, as during ``loss.backward()``."""
        self.pause(0.05)
        self.thread = "autograd"
        yield
        self.thread = "main"
        self.pause(0.02)

    def finish(self) -> list[TraceBuilder]:
        """End the capture as the profiler does, with a device synchronisation."""
        last = [max(times[rank] for times in self.free.values()) for rank in range(RANKS)]
        self.wait("cudaDeviceSynchronize", last)
        return self.builders
