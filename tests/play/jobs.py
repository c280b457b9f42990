"""Random jobs for the simulator, and the fixes that can be applied to them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.play.fluid import Job, Op

MIB = 1 << 20

KINDS = ("ddp", "sharded", "loader", "zero3", "pipeline", "rotating", "giant", "fine", "coarse")
PARTS = 3
"""Units of each layer where layers are wrapped too finely."""

OF_A_PARAMETER = 0.2
"""Of the time in a unit's hook, this share comes again for each part of a merged unit."""


def draw_job(seed: int) -> Job:
    """Return a job of one of these kinds, with a straggler or contention in some."""
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
        if kind in ("fine", "coarse"):
            step = sharded_step(kind, layers, host, work, size)
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


def sharded_step(kind: str, layers: int, host: float, work: float, size: int) -> list[Op]:
    """Return a step of FSDP: a unit for each part of a layer (fine), for each layer, or for all (coarse).

    A unit is gathered while the one before computes, and reduced when its gradients are there.
    """
    units = {
        "fine": [
            (f"layers.{layer}.{part}", [(layer, part)]) for layer in range(layers) for part in range(PARTS)
        ],
        "layers": [
            (f"layers.{layer}.all", [(layer, part) for part in range(PARTS)]) for layer in range(layers)
        ],
        "coarse": [("all.0", [(layer, part) for layer in range(layers) for part in range(PARTS)])],
    }[kind]
    ops: list[Op] = []
    reduced = []
    for way, ms in (("f", work), ("b", 2 * work)):
        name, part = ("pre_forward", "") if way == "f" else ("pre_backward", "backward")
        ordered = units if way == "f" else units[::-1]
        before: list[str] = []
        for unit, parts in ordered:
            hook = f"FSDP::{name} ({unit})"
            costs = host * (1 + OF_A_PARAMETER * (len(parts) - 1))
            nbytes = size // PARTS * len(parts)
            # It may be gathered once the unit before begins to compute.
            needs = (before[-2],) if len(before) > 1 else ()
            ops += [
                Op("work", costs, hook=(hook,)),
                Op("comm", stream=20, name="allgather", key=f"{way}g{unit}", nbytes=nbytes, needs=needs,
                   part=part, hook=(hook, f"FSDP::all_gather ({unit})")),
            ]  # fmt: skip
            for layer, place in parts if way == "f" else parts[::-1]:
                key = f"{way}{layer}.{place}"
                ops += [
                    Op("work", host / 2),
                    Op("kernel", ms / PARTS, name=f"{way}wd_{layer}_{place}", key=key, part=part,
                       needs=(f"{way}g{unit}",)),
                ]  # fmt: skip
            before.append(key)
            if way == "b":
                hook = f"FSDP::post_backward_reduce ({unit})"
                ops += [
                    Op("work", costs, hook=(hook,)),
                    Op("comm", stream=24, name="reducescatter", key=f"r{unit}", nbytes=2 * nbytes,
                       needs=(key,), part=part, hook=(hook,)),
                ]  # fmt: skip
                reduced.append(f"r{unit}")
    ops += [Op("work", host), Op("kernel", 0.3 * work, name="adam", key="o", needs=tuple(reduced))]
    return [*ops, Op("sync"), Op("work", 0.1)]


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
    if name in ("merge-units", "split-units"):
        return replace(job, step={rank: _by_layers(ops) for rank, ops in job.step.items()})
    if name == "keep-gathered":
        kept = {rank: [op for op in ops if not op.key.startswith("h")] for rank, ops in job.step.items()}
        free = {rank: [_without_gather(op) for op in ops] for rank, ops in kept.items()}
        return replace(job, step=free)
    raise ValueError(change)


def _by_layers(step: list[Op]) -> list[Op]:
    """Return a step of FSDP whose units are its layers, with the same kernels."""
    kernels = {op.key: op for op in step if op.kind == "kernel"}
    gathered = sum(op.nbytes for op in step if op.name == "allgather") // 2
    layers = len({key.split(".")[0] for key in kernels if key.startswith("f")})
    host = 2 * next(op.ms for op in step if op.kind == "work" and not op.hook)
    made = sharded_step("layers", layers, host, 1.0, gathered // layers)
    return [replace(op, ms=kernels[op.key].ms) if op.kind == "kernel" else op for op in made]


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
        "fine": ("merge-units", "even-ranks"),
        "coarse": (f"split-units count={_layers(seed)}", "even-ranks"),
        "giant": (f"cap-buckets mib={_quarter_mib(seed):.3f}",) if kind == "giant" else (),
    }
    return (
        "faster-link by=2",
        "faster-host by=0.5",
        "faster-kernels by=2",
        *fitting.get(kind, ("even-ranks",)),
    )


def _layers(seed: int) -> int:
    return len({op.key.split(".")[0] for op in draw_job(seed).step[0] if op.name.startswith("fwd")})


def _quarter_mib(seed: int) -> float:
    """Return what a quarter of a job's one reduction has, and a little more."""
    return max(op.nbytes for op in draw_job(seed).step[0]) / 4 / MIB + 0.01
