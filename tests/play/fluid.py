"""A simulator of training jobs that knows the truth: in time order, and with no code of the replay's.

A job is a list of instructions for each rank's host. Hosts, streams and links are advanced together by time,
as fluids: a kernel has an amount of work, and works slower while a transfer runs on its GPU. The same job
with a fix applied is simulated again: that is what a prediction is held against. What is written to traces
is only what a profiler sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tracedoc.testing import TraceBuilder

STEPS = 5
LATENCY_MS = 0.008
CALL_MS = 0.005


@dataclass
class Op:
    """One instruction of a host: ``kind`` is work, kernel, comm, wait, sync, load or copy.

    ``hook`` names the range of a sharding framework that work is done in, or ranges around a transfer's call.
    """

    kind: str
    ms: float = 0.0
    stream: int = 7
    name: str = "sgemm"
    key: str = ""
    nbytes: int = 0
    needs: tuple[str, ...] = ()
    part: str = ""
    ranks: tuple[int, ...] = ()
    hook: tuple[str, ...] = ()


@dataclass
class Job:
    """What is simulated: the instructions of one step by rank, and the speeds of the machine.

    The ranks of ``late`` compute ``late_by`` times as long, one of them in each step, in turns; before that
    their host is away for ``away_ms``.
    """

    ranks: int
    step: dict[int, list[Op]]
    gbps: float = 100.0
    latency_ms: float = 0.03
    contention: float = 0.0
    host: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    late: tuple[int, ...] = ()
    late_by: float = 1.0
    away_ms: float = 0.0

    def is_late(self, rank: int, step: int) -> bool:
        """Whether it is the turn of a rank to be late."""
        return bool(self.late) and self.late[step % len(self.late)] == rank


@dataclass
class Event:
    """A kernel or transfer of one rank: when it was launched, started and ended."""

    op: Op
    rank: int
    launched: float
    step: int
    start: float = -1.0
    end: float = -1.0
    left: float = 0.0


@dataclass
class Host:
    """Where one rank's host is in its instructions."""

    ops: list[tuple[int, Op]]
    at: int = 0
    free: float = 0.0
    syncs: list[tuple[float, float]] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)
    hooks: list[tuple[str, float, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


class Simulation:
    """All ranks of a job, from the first instruction to the last event."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = random.Random(job.seed)
        self.hosts = [
            Host([(step, op) for step in range(STEPS) for op in job.step[rank]]) for rank in range(job.ranks)
        ]
        self.queues: dict[tuple[int, int], list[Event]] = {}
        self.done: dict[tuple[int, int, str], float] = {}
        self.events: list[Event] = []
        self.now = 0.0

    def run(self) -> Simulation:
        """Advance until every host and every stream is done."""
        while True:
            moved = True
            while moved:
                advanced = [self._advance_host(rank) for rank in range(self.job.ranks)]
                moved = self._start_events() or any(advanced)
            running = self._running()
            times = [one.left * self._slowness(one) for one in running]
            later = [host.free - self.now for host in self.hosts if host.at < len(host.ops)]
            later += [
                queue[0].launched + LATENCY_MS - self.now
                for queue in self.queues.values()
                if queue and queue[0].start < 0
            ]
            ahead = [t for t in (*times, *later) if t > 1e-9]
            if not ahead:
                break
            self._pass(min(ahead), running)
        return self

    def _jittered(self, ms: float) -> float:
        return ms * max(self.random.gauss(1.0, self.job.jitter), 0.2) if self.job.jitter else ms

    def _advance_host(self, rank: int) -> bool:
        host = self.hosts[rank]
        if host.at >= len(host.ops) or host.free > self.now + 1e-9:
            return False
        step, op = host.ops[host.at]
        if len(host.steps) <= step:
            host.steps.append(self.now)
            if self.job.away_ms and self.job.is_late(rank, step):
                host.free = self.now + self.job.away_ms
                return True
        if op.kind == "sync":
            begun = host.syncs[-1][0] if host.syncs and host.syncs[-1][1] < 0 else self.now
            if any(queue for (owner, _), queue in self.queues.items() if owner == rank):
                if not host.syncs or host.syncs[-1][1] >= 0:
                    host.syncs.append((self.now, -1.0))
                return False
            if host.syncs and host.syncs[-1][1] < 0:
                host.syncs[-1] = (begun, self.now)
                host.free = self.now + CALL_MS
            else:
                host.syncs.append((self.now, self.now + CALL_MS))
                host.free = self.now + CALL_MS
        elif op.kind in ("work", "load"):
            host.free = self.now + self._jittered(op.ms) * (self.job.host if op.kind == "work" else 1.0)
            if op.kind == "load":
                host.loads.append((self.now, host.free))
            host.hooks += [(name, self.now, host.free) for name in op.hook]
        else:
            event = Event(op, rank, self.now, step)
            event.left = self._jittered(op.ms)
            if op.kind == "kernel" and self.job.is_late(rank, step):
                event.left *= self.job.late_by
            if op.kind == "comm":
                event.left = self.job.latency_ms + op.nbytes / (self.job.gbps * 1e6)
            self.queues.setdefault((rank, op.stream), []).append(event)
            self.events.append(event)
            host.free = self.now + CALL_MS
        host.at += 1
        return True

    def _start_events(self) -> bool:
        started = False
        for (rank, _), queue in self.queues.items():
            if not queue or queue[0].start >= 0:
                continue
            event = queue[0]
            if event.launched + LATENCY_MS > self.now + 1e-9:
                continue
            if all((rank, event.step, need) in self.done for need in event.op.needs):
                event.start, started = self.now, True
        return started

    def _running(self) -> list[Event]:
        heads = [queue[0] for queue in self.queues.values() if queue and queue[0].start >= 0]
        return [one for one in heads if one.op.kind != "comm" or self._complete(one)]

    def _complete(self, event: Event) -> bool:
        """Return whether all ranks of a collective have come to it."""
        ranks = event.op.ranks or tuple(range(self.job.ranks))
        heads = {(e.rank, e.op.key, e.step) for q in self.queues.values() for e in q[:1] if e.start >= 0}
        return all((rank, event.op.key, event.step) in heads for rank in ranks)

    def _slowness(self, event: Event) -> float:
        if event.op.kind != "kernel" or not self.job.contention:
            return 1.0
        beside = any(one.op.kind == "comm" and one.rank == event.rank for one in self._running())
        return 1.0 + self.job.contention * beside

    def _pass(self, ms: float, running: list[Event]) -> None:
        rates = [self._slowness(one) for one in running]
        self.now += ms
        for one, slowness in zip(running, rates, strict=True):
            one.left -= ms / slowness
            if one.left <= 1e-9:
                one.end = self.now
                self.queues[one.rank, one.op.stream].pop(0)
                if one.op.key:
                    self.done[one.rank, one.step, one.op.key] = self.now

    def step_ms(self) -> float:
        """Return the length of a settled step: between the first kernels of the last two, on rank 0."""
        first = [
            min(e.start for e in self.events if e.rank == 0 and e.step == step and e.op.kind == "kernel")
            for step in (1, STEPS - 1)
        ]
        return (first[1] - first[0]) / (STEPS - 2)

    def write(self, folder: Path) -> Path:
        """Write what a profiler would have seen."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, host in enumerate(self.hosts):
            builder = TraceBuilder(rank, self.job.ranks)
            ends = [*host.steps[1:], max(host.free, host.steps[-1] + 0.1)]
            for index, (start, end) in enumerate(zip(host.steps, ends, strict=True)):
                builder.step(index, start, end)
            for start, end in host.loads:
                builder.loader(start, end)
            for name, start, end in host.hooks:
                builder.host(name, start, end, category="user_annotation")
            for start, end in host.syncs:
                builder.runtime("cudaDeviceSynchronize", start, end)
            for event in sorted((e for e in self.events if e.rank == rank), key=lambda e: e.launched):
                self._write_event(builder, event)
            builder.write(folder / f"rank-{rank}.json")
        return folder

    def _write_event(self, builder: TraceBuilder, event: Event) -> None:
        op = event.op
        if op.part == "backward":
            builder.backward(event.launched - 0.0005, event.launched + CALL_MS, thread="main")
        if op.kind == "comm":
            group = "0" if not op.ranks else "g" + "-".join(map(str, op.ranks))
            builder.collective(
                op.name, event.start, event.end,
                nbytes=op.nbytes, stream=op.stream, launch_ms=event.launched,
                group=group, ranks=op.ranks or None, within=op.hook,
            )  # fmt: skip
            return
        builder.kernel(op.name, event.start, event.end, stream=op.stream, launch_ms=event.launched)
