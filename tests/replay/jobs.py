"""Random jobs for the simulator, and the fixes that can be applied to them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.replay.fluid import Job, Op

MIB = 1 << 20

KINDS = ("ddp", "sharded", "loader", "zero3", "pipeline", "rotating", "giant")


def draw_job(seed: int) -> Job:
    """Return a job of one of seven kinds, with a straggler or contention in some."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 2, 4))
    kind = KINDS[seed % len(KINDS)]
    layers = rng.choice((4, 8)) if kind == "giant" else rng.randint(4, 8)
    host = rng.choice((0.02, 0.05, 0.3))
    work = rng.uniform(0.5, 3.0)
    size = int(rng.uniform(8, 120) * MIB)
    late: tuple[int, ...] = ()
    if kind == "pipeline":
        ranks = rng.choice((2, 4))
        stages = [rng.uniform(0.8, 1.4) if rng.random() < 0.5 else 1.0 for _ in range(ranks)]
        micro = rng.randint(3, 6)
        every = {rank: pipeline_stage(rank, stages, micro, host, work, size // 8) for rank in range(ranks)}
    else:
        step = _step(kind, layers, host, work, size, rng)
        every = {rank: list(step) for rank in range(ranks)}
    if kind == "rotating":
        late = tuple(rng.sample(range(ranks), ranks))
    elif kind != "pipeline" and rng.random() < 0.4:
        slow = rng.randrange(ranks)
        factor = rng.uniform(1.1, 1.5)
        every[slow] = [replace(op, ms=op.ms * factor) if op.kind == "kernel" else op for op in every[slow]]
    return Job(
        ranks, every,
        gbps=rng.choice((20.0, 60.0, 200.0)),
        latency_ms=rng.uniform(0.01, 0.05),
        contention=rng.choice((0.0, 0.0, 0.1)),
        jitter=rng.choice((0.0, 0.01)),
        seed=seed,
        late=late,
        late_by=rng.uniform(1.15, 1.5),
    )  # fmt: skip


def _step(kind: str, layers: int, host: float, work: float, size: int, rng: random.Random) -> list[Op]:
    ops: list[Op] = []
    if kind == "loader":
        ops.append(Op("load", rng.uniform(5, 40)))
    for layer in range(layers):
        needs: tuple[str, ...] = ()
        if kind in ("sharded", "zero3"):
            before = (f"f{layer - 1}",) if layer else ()
            ops += [
                Op("work", host),
                _gather(layer, size, before),
            ]
            needs = (f"g{layer}",)
        ops += [Op("work", host), Op("kernel", work, name=f"fwd_{layer}", key=f"f{layer}", needs=needs)]
    reduced = []
    for layer in reversed(range(layers)):
        needs = ()
        if kind == "zero3" and layer < layers - 1:
            ops += [Op("work", host), _gather(layer, size, (f"b{layer + 1}",), "backward")]
            needs = (f"h{layer}",)
        ops += [
            Op("work", host),
            Op("kernel", 2 * work, name=f"bwd_{layer}", key=f"b{layer}", part="backward", needs=needs),
        ]
        op = "reducescatter" if kind in ("sharded", "zero3") else "allreduce"
        if kind != "giant":
            ops += [Op("work", host), _reduction(op, layer, size)]
            reduced.append(f"r{layer}")
    if kind == "giant":
        ops += [Op("work", host), _reduction("allreduce", 0, layers * size)]
        reduced.append("r0")
    ops += [Op("work", host), Op("kernel", 0.3 * work, name="adam", key="o", needs=tuple(reduced))]
    ops += [Op("sync"), Op("work", 0.1)]
    return ops


def _gather(layer: int, size: int, before: tuple[str, ...], part: str = "") -> Op:
    key = f"h{layer}" if part else f"g{layer}"
    return Op("comm", stream=20, name="allgather", key=key, nbytes=size, needs=before, part=part)


def _reduction(name: str, layer: int, size: int) -> Op:
    return Op("comm", stream=24, name=name, key=f"r{layer}", nbytes=size, needs=(f"b{layer}",))


def pipeline_stage(
    rank: int, stages: list[float], micro: int, host: float, work: float, size: int
) -> list[Op]:
    """Return the step of one stage: all micro-batches forward, then all backward."""
    last, ops = len(stages) - 1, []
    for way, pass_ms in (("f", work), ("b", 2 * work)):
        before, behind = (rank - 1, rank + 1) if way == "f" else (rank + 1, rank - 1)
        for one in range(micro):
            needs: tuple[str, ...] = ()
            if 0 <= before <= last:
                ops += [Op("work", host), _passed("recv", way, one, before, rank, size, ())]
                needs = (f"{way}{one}@{before}",)
            key, part = f"{way}k{one}", "backward" if way == "b" else ""
            ops += [
                Op("work", host),
                Op("kernel", pass_ms * stages[rank], name=f"{way}wd_{one}", key=key, part=part, needs=needs),
            ]
            if 0 <= behind <= last:
                ops += [Op("work", host), _passed("send", way, one, rank, behind, size, (key,))]
    ops += [Op("work", host), Op("kernel", 0.3 * work, name="adam", key="o")]
    return [*ops, Op("sync"), Op("work", 0.1)]


def _passed(name: str, way: str, one: int, source: int, target: int, size: int, needs: tuple[str, ...]) -> Op:
    stream = {"recv": 20, "send": 21}[name] + (2 if way == "b" else 0)
    ranks = tuple(sorted((source, target)))
    return Op(
        "comm", stream=stream, name=name, key=f"{way}{one}@{source}", nbytes=size, needs=needs, ranks=ranks
    )


def fixed(job: Job, change: str) -> Job:
    """Return the job with a fix applied, as someone who edits the training script would."""
    name, *words = change.split()
    by = float(words[0].split("=")[1]) if words else 1.0
    if name == "faster-link":
        return replace(job, gbps=job.gbps * by)
    if name == "faster-host":
        return replace(job, host=job.host * by)
    if name == "faster-kernels":
        return _each(job, lambda op: replace(op, ms=op.ms / by) if op.kind == "kernel" else op)
    if name == "feed-input":
        return _each(job, lambda op: replace(op, ms=0.05) if op.kind == "load" else op)
    if name == "no-sync":
        steps = {rank: [op for op in ops if op.kind != "sync"] for rank, ops in job.step.items()}
        return replace(job, step=steps)
    if name == "even-ranks":
        sums = {rank: sum(op.ms for op in ops if op.kind == "kernel") for rank, ops in job.step.items()}
        best = min(sums, key=lambda rank: sums[rank])
        return replace(job, late=(), step={rank: list(job.step[best]) for rank in job.step})
    if name == "share-work":
        sums = {rank: sum(op.ms for op in ops if op.kind == "kernel") for rank, ops in job.step.items()}
        mean = sum(sums.values()) / len(sums)
        return replace(job, step={
            rank: [replace(op, ms=op.ms * mean / sums[rank]) if op.kind == "kernel" else op for op in ops]
            for rank, ops in job.step.items()
        })  # fmt: skip
    if name == "cap-buckets":
        return replace(job, step={rank: _in_quarters(ops) for rank, ops in job.step.items()})
    if name == "keep-gathered":
        kept = {rank: [op for op in ops if not op.key.startswith("h")] for rank, ops in job.step.items()}
        free = {rank: [_without_gather(op) for op in ops] for rank, ops in kept.items()}
        return replace(job, step=free)
    raise ValueError(change)


def _in_quarters(step: list[Op]) -> list[Op]:
    """Return a step whose one reduction goes in four, each after a quarter of the backward pass."""
    (whole,) = (op for op in step if op.name == "allreduce")
    every = sum(op.part == "backward" for op in step) // 4
    ops: list[Op] = []
    computed, reduced = 0, []
    for op in step:
        if op is whole:
            continue
        ops.append(replace(op, needs=tuple(reduced)) if op.key == "o" else op)
        if op.part == "backward" and (computed := computed + 1) % every == 0:
            reduced.append(f"r{op.key}")
            ops.append(replace(whole, key=f"r{op.key}", nbytes=whole.nbytes // 4, needs=(op.key,)))
    return ops


def _without_gather(op: Op) -> Op:
    return replace(op, needs=tuple(need for need in op.needs if not need.startswith("h")))


def _each(job: Job, edit) -> Job:
    return replace(job, step={rank: [edit(op) for op in ops] for rank, ops in job.step.items()})


def changes_of(seed: int) -> tuple[str, ...]:
    """Return the fixes that fit the job of a seed."""
    kind = KINDS[seed % len(KINDS)]
    fitting = {
        "zero3": ("keep-gathered", "even-ranks"),
        "loader": ("feed-input", "even-ranks"),
        "pipeline": ("share-work",),
        "giant": (f"cap-buckets mib={_quarter_mib(seed):.3f}",) if kind == "giant" else (),
    }
    return (
        "faster-link by=2",
        "faster-host by=0.5",
        "faster-kernels by=2",
        *fitting.get(kind, ("even-ranks",)),
    )


def _quarter_mib(seed: int) -> float:
    """Return what a quarter of a job's one reduction has, and a little more."""
    return max(op.nbytes for op in draw_job(seed).step[0]) / 4 / MIB + 0.01
