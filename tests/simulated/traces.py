"""Write what simulated ranks did as Kineto traces, as a capture of some of their steps shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import pi, sin
from pathlib import Path
from random import Random

from tests.simulated.machine import COMPUTE, COPY, Copy, Free, Host, Kernel, Mark, Meet, Played, Ran, Sync
from tests.simulated.programs import WARM_UP
from tracedoc.testing import TraceBuilder

_READ_BACK_US = 1.5
_JITTER_EVERY_MS = 5.0


@dataclass(frozen=True)
class Capture:
    """What the profilers saw of a job: clocks by rank, ranks that are missing.

    A clock is some ms ahead, drifts, wanders to and fro (ms, and the ms of a period), and is some ms ahead or
    behind by chance.
    """

    ahead_ms: dict[int, float] = field(default_factory=dict)
    drift: dict[int, float] = field(default_factory=dict)
    ranks_a_host: int = 8
    missing: tuple[int, ...] = ()
    host_ops: bool = True
    wander: dict[int, tuple[float, float]] = field(default_factory=dict)
    jitter_ms: dict[int, float] = field(default_factory=dict)


def write_traces(played: Played, ranks: int, directory: Path, capture: Capture) -> Path:
    """Write ``rank-N.json`` for each captured rank into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        if rank not in capture.missing:
            builder = _Writer(rank, ranks, capture).written(played.ran[rank])
            text = builder.to_json()
            if not capture.host_ops:
                kept = (line for line in text.splitlines() if '"cat": "cpu_op"' not in line)
                text = "\n".join(kept)
            (directory / f"rank-{rank}.json").write_text(text)
    return directory


class _Writer:
    """Writes one rank's events."""

    def __init__(self, rank: int, ranks: int, capture: Capture) -> None:
        self.capture, self.rank = capture, rank
        self.builder = TraceBuilder(rank, ranks, host=f"node{rank // capture.ranks_a_host}")
        self.thread = "main"
        self.opened: dict[str, float] = {}

    def at(self, ms: float) -> float:
        """Return a time as this rank's clock stamps it."""
        capture, rank = self.capture, self.rank
        wander, period = capture.wander.get(rank, (0.0, 1.0))
        wrong = wander * sin(2 * pi * ms / period + rank)
        if rank in capture.jitter_ms:
            place, share = divmod(ms / _JITTER_EVERY_MS, 1.0)
            before, after = (Random(f"{rank}/{place + at}").uniform(-1.0, 1.0) for at in (0, 1))
            wrong += capture.jitter_ms[rank] * (before + (after - before) * share)
        return ms * (1 + capture.drift.get(rank, 0.0)) + capture.ahead_ms.get(rank, 0.0) + wrong

    def written(self, ran: list[Ran]) -> TraceBuilder:
        step = -1
        for one in ran:
            if isinstance(one.what, Mark) and one.what.what == "begin:step":
                step += 1
            if step >= WARM_UP:
                self._event(one, step)
        return self.builder

    def _event(self, one: Ran, step: int) -> None:
        add, begin, end = self.builder, self.at(one.launch), self.at(one.returned)
        linked = self.capture.host_ops
        match one.what:
            case Mark(what):
                self._mark(what, begin, step)
            case Host(_, name, category) if name and linked:
                if category == "loader":
                    add.loader(begin, end)
                else:
                    add.host(name, begin, end, thread=self.thread)
            case Kernel() as what:
                add.kernel(
                    what.name, self.at(one.start), self.at(one.end),
                    stream=COMPUTE, launch_ms=begin, thread=self.thread, op=what.op, grid=(what.grid, 1, 1),
                )  # fmt: skip
            case Meet() as what:
                add.collective(
                    what.op, self.at(one.start), self.at(one.end), nbytes=what.nbytes, group=what.group,
                    ranks=what.members, stream=what.stream, launch_ms=begin, thread=self.thread,
                    peer=what.peer, within=what.within,
                )  # fmt: skip
            case Copy() as what:
                add.copy(
                    "HtoD", self.at(one.start), self.at(one.end), what.nbytes,
                    pageable=what.pageable, stream=COPY, launch_ms=begin, thread=self.thread,
                )  # fmt: skip
            case Sync():
                start = self.at(one.start)
                add.copy(
                    "DtoH", start, start + _READ_BACK_US / 1000, 4,
                    stream=COMPUTE, launch_ms=begin, thread=self.thread,
                )  # fmt: skip
                add.runtime("cudaStreamSynchronize", begin + 0.006, max(end, begin + 0.007))
                add.host("aten::item", begin - 0.001, end)
            case Free():
                add.runtime("cudaFree", begin, end, thread=self.thread)
            case _:
                pass

    def _mark(self, what: str, at: float, step: int) -> None:
        kind, name = what.split(":", 1)
        if kind == "thread":
            if self.thread == "autograd" and self.capture.host_ops:
                self.builder.backward(self.opened.pop("autograd"), at)
            elif name == "autograd":
                self.opened["autograd"] = at
            self.thread = name
        elif kind == "begin":
            self.opened[name] = at
        elif name == "step":
            self.builder.step(step, self.opened.pop(name), at)
        elif not self.capture.host_ops:
            self.opened.pop(name)
        elif name == "optimizer":
            self.builder.optimizer(self.opened.pop(name), at)
        else:
            self.builder.host(name, self.opened.pop(name), at, category="user_annotation")
