"""Simulate ranks that compute and communicate, tick by tick; it shares no code with tracedoc.

One tick is a millisecond. Each rank has a compute stream and a communication stream. A collective occupies
the communication stream of each of its ranks from when that rank reaches it (and its stream is free) until
the last one has come and the data has moved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compute:
    """Work on the compute stream: ticks by rank."""

    ticks: dict[int, int]


@dataclass(frozen=True)
class Meet:
    """A collective of each of several disjoint groups; ``blocks`` if compute waits for its end."""

    groups: tuple[tuple[int, ...], ...]
    transfer: int
    nbytes: int
    blocks: bool
    step: int
    op: str = "all_reduce"


@dataclass
class Part:
    """One rank's part of one collective."""

    group: tuple[int, ...]
    number: int  # the place of its Meet in the program
    step: int
    op: str
    nbytes: int
    issued: int
    start: int
    end: int = -1


@dataclass
class Simulated:
    """What happened: parts and busy ticks of the compute stream, by rank."""

    parts: dict[int, list[Part]] = field(default_factory=dict)
    computing: dict[int, set[int]] = field(default_factory=dict)

    def meeting(self, group: tuple[int, ...], number: int) -> dict[int, Part]:
        """Return the parts of one collective by rank."""
        return {r: p for r in group for p in self.parts[r] if p.number == number}


def simulate(ranks: int, program: list[Compute | Meet]) -> Simulated:
    """Run ``program`` on all ranks; each runs its own share of it in order."""
    done = Simulated({r: [] for r in range(ranks)}, {r: set() for r in range(ranks)})
    now = dict.fromkeys(range(ranks), 0)
    free = dict.fromkeys(range(ranks), 0)
    for number, item in enumerate(program):
        if isinstance(item, Compute):
            for rank, ticks in item.ticks.items():
                done.computing[rank] |= set(range(now[rank], now[rank] + ticks))
                now[rank] += ticks
            continue
        for group in item.groups:
            parts = []
            for rank in group:
                part = Part(
                    group, number, item.step, item.op, item.nbytes, now[rank], max(now[rank], free[rank])
                )
                done.parts[rank].append(part)
                parts.append(part)
            end = max(part.start for part in parts) + item.transfer
            for rank, part in zip(group, parts, strict=True):
                part.end = end
                free[rank] = end
                if item.blocks:
                    now[rank] = end
    return done


def mesh(rows: int, columns: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the groups along both dimensions of a mesh of ranks."""
    inner = tuple(tuple(range(r * columns, (r + 1) * columns)) for r in range(rows))
    outer = tuple(tuple(range(c, rows * columns, columns)) for c in range(columns))
    return inner, outer


def balanced_program(
    seed: int, rows: int, columns: int, *, steps: int = 3, asynchronous: bool = False
) -> list[Compute | Meet]:
    """Return a program in which all ranks do the same work, so that without a delay nobody waits."""
    draw = random.Random(seed)
    everyone = range(rows * columns)
    dimensions = (*mesh(rows, columns), (tuple(everyone),))
    program: list[Compute | Meet] = []
    for step in range(steps):
        for _ in range(draw.randint(2, 6)):
            program.append(Compute(dict.fromkeys(everyone, draw.randint(1, 9))))
            groups = draw.choice(dimensions)
            if len(groups[0]) > 1:
                op = draw.choice(("all_reduce", "all_gather", "reduce_scatter"))
                blocks = not asynchronous or draw.random() < 0.5
                size = draw.choice((1024, 4096))
                program.append(Meet(groups, draw.randint(1, 4), size, blocks, step, op))
        program.append(Compute(dict.fromkeys(everyone, draw.randint(1, 9))))
        program.append(Meet((tuple(everyone),), draw.randint(1, 4), 512, True, step))
    return program


def delayed(
    program: list[Compute | Meet], seed: int, ranks: int, ticks: int
) -> tuple[list[Compute | Meet], int]:
    """Return the program with one compute of one rank made longer, and that rank."""
    draw = random.Random(seed)
    place = draw.choice([i for i, item in enumerate(program) if isinstance(item, Compute)])
    rank = draw.randrange(ranks)
    item = program[place]
    assert isinstance(item, Compute)
    changed = Compute(item.ticks | {rank: item.ticks[rank] + ticks})
    return [*program[:place], changed, *program[place + 1 :]], rank


def uneven_program(seed: int, rows: int, columns: int, *, steps: int = 3) -> list[Compute | Meet]:
    """Return a program in which every compute takes each rank a different time."""
    draw = random.Random(seed)
    program = balanced_program(seed, rows, columns, steps=steps, asynchronous=True)
    return [
        Compute({rank: draw.randint(1, 20) for rank in item.ticks}) if isinstance(item, Compute) else item
        for item in program
    ]
