"""Play the programs of simulated ranks: hosts that launch, streams in order, operations that meet.

It shares no code with tracedoc. All times are milliseconds. A host runs its instructions one after another
and never waits for its GPU but where the program says so; a stream runs what was launched on it in order; an
operation between ranks moves data once all of its ranks have reached it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

LATENCY = 0.008
"""From a launch to the start on an idle stream."""

COMPUTE = 7
COPY = 16


@dataclass(frozen=True)
class Host:
    """The host is busy: ``name`` is that of its operator or call, "" for code that no event shows."""

    ms: float
    name: str = ""
    category: str = "cpu_op"


@dataclass(frozen=True)
class Kernel:
    """A kernel on the compute stream, and what its launch costs the host."""

    ms: float
    launch_ms: float
    name: str
    op: str
    grid: int = 132


@dataclass(frozen=True)
class Meet:
    """One rank's part of an operation of ``members``; ``key`` is equal on all of its ranks, and unique.

    It starts after the compute that was launched before it (``after_compute``) and after what runs on its
    own ``stream``. ``ms`` is the transfer. ``peer`` is the other end of a send or receive.
    """

    op: str
    key: tuple[object, ...]
    group: str
    members: tuple[int, ...]
    nbytes: int
    ms: float
    launch_ms: float
    stream: int = 20
    after_compute: bool = True
    peer: int | None = None
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the rank's part of an operation."""

    key: tuple[object, ...]


@dataclass(frozen=True)
class Copy:
    """A copy to the device, which the compute stream waits for; a pageable one blocks the host."""

    ms: float
    nbytes: int
    launch_ms: float
    pageable: bool


@dataclass(frozen=True)
class Sync:
    """The host waits for the compute stream: a value of a tensor is asked for."""

    launch_ms: float


@dataclass(frozen=True)
class Free:
    """A call that waits for the whole device, and takes ``ms`` on top: ``cudaFree``."""

    ms: float


@dataclass(frozen=True)
class Mark:
    """A place in the program: ``begin:NAME`` and ``end:NAME`` of ranges, or ``thread:NAME``."""

    what: str


Instruction = Host | Kernel | Meet | Wait | Copy | Sync | Free | Mark


@dataclass
class Ran:
    """One thing that happened: on the host from ``launch`` to ``returned``, on the GPU from ``start``."""

    what: Instruction
    launch: float
    returned: float
    start: float = 0.0
    end: float = 0.0
    blocked: float = 0.0


@dataclass
class Played:
    """What every rank did, in program order, and when its GPU began and was done with each step."""

    ran: list[list[Ran]]
    step_ends: list[list[float]] = field(default_factory=list)
    step_begins: list[list[float]] = field(default_factory=list)

    def period(self, first: int) -> float:
        """Return the mean length of the steps from ``first`` on that another one follows, over all ranks.

        That is what a capture shows whole: from the first kernel of a step to that of the next one. Of a
        single step it is what the slowest rank needs.
        """
        steps = len(self.step_ends[0]) - first
        if steps > 1:
            return (
                sum(begins[-1] - begins[first] for begins in self.step_begins) / len(self.ran) / (steps - 1)
            )
        ends = [max(column) for column in zip(*self.step_ends, strict=True)]
        return ends[-1] - ends[first - 1]


@dataclass
class _Rank:
    program: list[Instruction]
    at: int = 0
    host: float = 0.0
    compute: float = 0.0
    copies: float = 0.0
    waiting: tuple[object, ...] | None = None
    ran: list[Ran] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    step_begins: list[float] = field(default_factory=list)


class _Operations:
    """Operations that ranks have reached and not all have finished, in the order of each stream."""

    def __init__(self) -> None:
        self.parts: dict[tuple[object, ...], dict[int, Ran]] = defaultdict(dict)
        self.queues: dict[tuple[int, int], list[tuple[object, ...]]] = defaultdict(list)
        self.free: dict[tuple[int, int], float] = defaultdict(float)
        self.ends: dict[tuple[object, ...], float] = {}

    def post(self, rank: int, part: Ran, what: Meet) -> None:
        self.parts[what.key][rank] = part
        self.queues[rank, what.stream].append(what.key)
        self._resolve(what.key)

    def _resolve(self, key: tuple[object, ...]) -> None:
        front = [key]
        while front:
            found = self.parts[front.pop()]
            whats = {rank: part.what for rank, part in found.items()}
            some = next(iter(whats.values()))
            assert isinstance(some, Meet)
            if len(found) < len(some.members) or some.key in self.ends:
                continue
            lanes = [(rank, what.stream) for rank, what in whats.items() if isinstance(what, Meet)]
            if any(self.queues[lane][0] != some.key for lane in lanes):
                continue
            for lane in lanes:
                found[lane[0]].start = max(found[lane[0]].start, self.free[lane])
            transfer = max(what.ms for what in whats.values() if isinstance(what, Meet))
            end = max(part.start for part in found.values()) + transfer
            self.ends[some.key] = end
            for lane in lanes:
                found[lane[0]].end = end
                self.free[lane] = end
                self.queues[lane].pop(0)
                if self.queues[lane]:
                    front.append(self.queues[lane][0])


def play(programs: list[list[Instruction]]) -> Played:
    """Run all programs; raises RuntimeError where ranks wait for each other for ever."""
    ranks = [_Rank(program) for program in programs]
    operations = _Operations()
    while any(rank.at < len(rank.program) for rank in ranks):
        before = [rank.at for rank in ranks]
        for number, rank in enumerate(ranks):
            while rank.at < len(rank.program) and _advance(number, rank, operations):
                rank.at += 1
        if before == [rank.at for rank in ranks]:
            raise RuntimeError("the ranks wait for each other")
    return Played(
        [rank.ran for rank in ranks],
        [rank.step_ends for rank in ranks],
        [rank.step_begins for rank in ranks],
    )


def _advance(number: int, rank: _Rank, operations: _Operations) -> bool:
    what = rank.program[rank.at]
    launched = rank.host
    match what:
        case Host():
            rank.host += what.ms
            rank.ran.append(Ran(what, launched, rank.host))
        case Kernel():
            rank.host += what.launch_ms
            start = max(launched + LATENCY, rank.compute)
            rank.compute = start + what.ms
            rank.ran.append(Ran(what, launched, rank.host, start, rank.compute))
            if len(rank.step_begins) == len(rank.step_ends):
                rank.step_begins.append(start)
        case Meet():
            rank.host += what.launch_ms
            start = max(launched + LATENCY, rank.compute if what.after_compute else 0.0)
            part = Ran(what, launched, rank.host, start)
            rank.ran.append(part)
            operations.post(number, part, what)
        case Wait():
            if what.key not in operations.ends:
                return False
            rank.compute = max(rank.compute, operations.ends[what.key])
        case Copy():
            start = max(launched + LATENCY, rank.copies)
            rank.copies = start + what.ms
            rank.host = (
                max(rank.copies, rank.host + what.launch_ms)
                if what.pageable
                else (rank.host + what.launch_ms)
            )
            rank.compute = max(rank.compute, rank.copies)
            rank.ran.append(Ran(what, launched, rank.host, start, rank.copies))
        case Sync():
            start = max(launched + LATENCY, rank.compute)
            rank.compute = start + 0.002
            rank.host = max(rank.compute + 0.004, launched + what.launch_ms)
            rank.ran.append(Ran(what, launched, rank.host, start, rank.compute))
        case Free():
            rank.host = max(rank.host, rank.compute) + what.ms
            rank.ran.append(Ran(what, launched, rank.host))
        case Mark():
            if what.what == "end:step":
                rank.step_ends.append(max(rank.compute, rank.host))
            rank.ran.append(Ran(what, launched, rank.host))
    return True
