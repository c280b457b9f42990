"""Write the program of each rank of a simulated job: what its host launches, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, exp
from statistics import fmean

from tests.simulated.machine import Copy, Free, Host, Instruction, Kernel, Mark, Meet, Sync, Wait
from tests.simulated.spec import Job

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>"
WARM_UP = 2
"""Steps before the capture."""

_OF_GRADIENTS = ("bucket", "scatter", "gradients")
"""Keys of operations that reduce gradients."""


def programs(job: Job) -> list[list[Instruction]]:
    """Return the program of every rank."""
    return [list(_Writer(job, rank).all_steps()) for rank in range(job.ranks)]


class _Writer:
    """Writes one rank's program."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.step = job, rank, 0
        inner = job.tensor
        self.stage = rank // (inner * job.replicas)
        self.replica = rank // inner % job.replicas
        base = self.stage * inner * job.replicas
        self.data = tuple(base + r * inner + rank % inner for r in range(job.replicas))
        self.model = tuple(rank - rank % inner + i for i in range(inner))
        self.part = 0
        even = job.change.get("even")
        self.even = even is not None and even in (-1.0, float(rank))

    def all_steps(self) -> Iterator[Instruction]:
        for step in range(WARM_UP + self.job.steps):
            self.step = step
            yield Mark("begin:step")
            yield from self._before_forward()
            yield from {"pipeline": self._pipeline, "fsdp": self._fsdp}.get(self.job.kind, self._replica)()
            yield from self._after()
            yield Mark("end:step")

    # What every kind of job does ------------------------------------------------------------------

    def _before_forward(self) -> Iterator[Instruction]:
        job = self.job
        loader = job.fault("loader")
        ms = 0.15 + (loader.amount * (1 + 0.1 * job.normal("loader", self.step, self.rank)) if loader else 0)
        late = job.fault("straggler-input")
        if late and late.rank == self.rank and not self.even:
            ms += late.amount * (1 + 0.1 * job.normal("late loader", self.step))
        yield Host(max(ms, 0.05) * job.change.get("loader", 1.0), "loader", "loader")
        copied = 20.0 if job.fault("pageable") and not job.change.get("pinned") else 2.0
        if job.fault("pageable"):
            copied = job.fault("pageable").amount  # type: ignore[union-attr]
        pageable = bool(job.fault("pageable")) and not job.change.get("pinned")
        yield Copy(copied / (6.0 if pageable else 25.0), int(copied * 2**20), job.launch_ms, pageable)
        slow = job.fault("straggler-host")
        if slow and slow.rank == self.rank and not self.even:
            yield Host(slow.amount * (1 + 0.05 * job.normal("slow host", self.step)))
        pauses = job.fault("pauses")
        if pauses and pauses.rank == self.rank and not self.even and job.draw("pause", self.step) < 0.5:
            yield Host(pauses.amount)
        turns = job.fault("rotating")
        if turns and not self.even and int(job.draw("turn", self.step) * job.ranks) == self.rank:
            yield Host(turns.amount * (0.7 + 0.6 * job.draw("turn length", self.step)))

    def _after(self) -> Iterator[Instruction]:
        job = self.job
        yield Mark("begin:optimizer")
        for number in range(3):
            yield self._kernel(max(0.05, 0.02 * job.layer_ms), ADAM, "aten::_fused_adamw_", ("adam", number))
        yield Mark("end:optimizer")
        if job.kind == "zero":
            size = job.layers * job.layer_mib / job.tensor
            key = self._key("gather")
            yield self._meet("allgather", key, self.data, size, 1.0)
            yield Wait(key)
        syncs = job.fault("syncs")
        if job.logs and not (syncs and job.change.get("syncs") == 0):
            yield Sync(job.launch_ms)

    def _scale(self, *place: object) -> float:
        """Return how much longer than usual this rank computes at a place."""
        job = self.job
        scale = exp(job.jitter * job.normal(self.rank, self.step, *place))
        slow = job.fault("straggler-compute") or job.fault("slow-worker")
        if slow and job.stages > 1 and job.replicas == 1:  # no more than a stage with more work, to look at
            scale *= self._stage_scale(slow.amount, slow.rank)
        elif slow and slow.rank == self.rank and not self.even:
            scale *= slow.amount
        heavy = job.fault("heavy-stage")
        if heavy:
            scale *= self._stage_scale(heavy.amount, heavy.rank)
        uneven = job.fault("uneven")
        if uneven:
            scale *= self._length(self.replica)
        return scale

    def _stage_scale(self, amount: float, stage: int) -> float:
        """Return how much longer than usual a stage computes if one has more to do than the others."""
        if self.job.change.get("balanced"):
            return 1 + (amount - 1) / self.job.stages
        return amount if stage == self.stage and not self.even else 1.0

    def _length(self, replica: int) -> float:
        """Return how much longer the samples of a replica are than usual, in this step and micro-batch."""
        job = self.job
        uneven = job.fault("uneven")
        assert uneven is not None
        parts = range(job.micro_batches)

        def length(replica: int, part: int) -> float:
            return exp(uneven.amount * job.normal("length", replica, self.step, part))

        if self.even:  # the same samples, dealt out evenly
            return fmean(length(one, part) for one in range(job.replicas) for part in parts)
        return length(replica, self.part)

    def _kernel(self, ms: float, name: str, op: str, place: tuple[object, ...]) -> Kernel:
        job = self.job
        bound = job.fault("launch-bound")
        launch = job.launch_ms * (bound.amount if bound else 1.0) * job.change.get("host", 1.0)
        launch *= exp(0.1 * job.normal("launch", self.rank, self.step, *place))
        uneven = job.fault("uneven")
        grid = round(132 * 8 * self._length(self.replica)) if uneven else 1056
        return Kernel(ms, launch, name, op, grid if name != ADAM else 1056)

    def _compute(self, ms: float, *place: object, backward: bool = False) -> Iterator[Instruction]:
        job = self.job
        pause = job.fault("pause-in-forward")
        if pause and pause.rank == self.rank and not self.even and not backward and place[0] == 1:
            yield Host(pause.amount)
        ms *= self._scale(*place, backward) / job.tensor
        count = job.kernels * (2 if backward else 1)
        tiny = job.fault("tiny-batch")
        if tiny:
            ms *= tiny.amount
        ms *= job.change.get("compute", 1.0)
        half = count // 2
        for number in range(count):
            gemm = number % 2 == 0
            share = (0.8 / (count - half) if gemm else 0.2 / half) * ms
            yield self._kernel(
                share, GEMM if gemm else ELEMENTWISE, "aten::mm" if gemm else "aten::add",
                (*place, backward, number),
            )  # fmt: skip
        syncs = job.fault("syncs")
        layer = place[0]
        asks = syncs is not None and job.change.get("syncs") != 0 and not backward
        if asks and isinstance(layer, int) and layer % max(int(8 / syncs.amount), 1) == 0:
            yield Sync(job.launch_ms)
        churn = job.fault("allocator")
        if churn and not job.change.get("calm") and not backward and place and place[0] == 1:
            yield Free(churn.amount)

    def _key(self, *place: object) -> tuple[object, ...]:
        return (self.step, *place, self.data)

    def _meet(
        self,
        op: str,
        key: tuple[object, ...],
        members: tuple[int, ...],
        mib: float,
        share: float,
        **more: object,
    ) -> Meet:
        job = self.job
        carried = mib * job.change.get("gradient bytes", 1.0) if key[1] in _OF_GRADIENTS else mib
        ms = job.transfer_ms(carried, share * (len(members) - 1) / len(members))
        ms *= exp(0.5 * job.jitter * job.normal("transfer", *key))
        ms *= 1 - job.change.get(f"no {key[1]}", 0.0)
        group = "0" if len(members) == job.ranks else "_".join(map(str, members))
        return Meet(
            op, key, group, members, max(int(mib * 2**20) // 64 * 64, 64), ms,
            1.5 * job.launch_ms * job.change.get("host", 1.0), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    # Replicas, sharded optimizers, tensor parallelism ---------------------------------------------

    def _replica(self) -> Iterator[Instruction]:
        for part in range(self.job.micro_batches):
            self.part = part
            if self.job.kind == "ddp":
                yield Mark("begin:DistributedDataParallel.forward")
            yield from self._forward(range(self.job.layers))
            if self.job.kind == "ddp":
                yield Mark("end:DistributedDataParallel.forward")
            last = self.part == self.job.micro_batches - 1 or bool(self.job.fault("every-micro-batch"))
            yield from self._backward(range(self.job.layers), reduces=last and self.job.replicas > 1)

    def _forward(self, layers: range) -> Iterator[Instruction]:
        for layer in layers:
            yield from self._compute(self.job.layer_ms, layer, self.part)
            yield from self._across_layer(layer, "forward")

    def _across_layer(self, layer: int, way: str) -> Iterator[Instruction]:
        if self.job.tensor > 1:
            for half in range(2):
                key = (self.step, "tensor", layer, self.part, way, half, self.model)
                yield self._meet("allreduce", key, self.model, self.job.activation_mib, 2.0, stream=24)
                yield Wait(key)

    def _backward(self, layers: range, *, reduces: bool) -> Iterator[Instruction]:
        job = self.job
        giant = job.fault("giant-bucket")
        small = job.fault("small-buckets")
        bucket = 1e9 if giant else small.amount if small else job.bucket_mib
        pending, number, keys = 0.0, 0, []
        yield Mark("thread:autograd")
        for layer in reversed(layers):
            yield from self._compute(2 * job.layer_ms, layer, self.part, backward=True)
            yield from self._across_layer(layer, "backward")
            pending += job.layer_mib / job.tensor
            while reduces and (pending >= bucket or (layer == layers[0] and pending > 0)):
                size = min(pending, bucket)
                key = self._key("bucket", self.part, number)
                op = "reducescatter" if job.kind == "zero" else "allreduce"
                yield self._meet(op, key, self.data, size, 1.0 if job.kind == "zero" else 2.0)
                keys.append(key)
                pending, number = pending - size, number + 1
        yield Mark("thread:main")
        for key in keys:
            yield Wait(key)

    # Sharded parameters ---------------------------------------------------------------------------

    def _units(self) -> list[tuple[str, list[int], float]]:
        """Return the sharded units in order: name, layers, and the share of their bytes."""
        job = self.job
        if job.fault("coarse-wrap"):
            return [("root", list(range(job.layers)), float(job.layers))]
        fine = job.fault("fine-wrap")
        if not fine:
            return [(f"layers.{layer}", [layer], 1.0) for layer in range(job.layers)]
        parts = int(fine.amount)
        return [
            (f"layers.{layer}.parts.{part}", [layer] if part == 0 else [], 1.0 / parts)
            for layer in range(job.layers)
            for part in range(parts)
        ]

    def _fsdp(self) -> Iterator[Instruction]:
        job = self.job
        units = self._units()
        for way in ("forward", "backward"):
            if way == "backward":
                yield Mark("thread:autograd")
            ordered = units if way == "forward" else units[::-1]
            backward = way == "backward"
            reductions = []
            ahead = int(job.prefetch and not job.fault("no-prefetch")) + int(
                job.change.get(f"ahead {way}", 0)
            )
            gathered = 0
            for place, (name, layers, size) in enumerate(ordered):
                label = "" if name == "root" else f" ({name})"
                hook = f"FSDP::pre_{way}{label}"
                if place == gathered:
                    yield self._gather(name, size, way, (hook, f"FSDP::all_gather{label}"), ahead=place == 0)
                    gathered += 1
                yield Wait(self._key("gather", name, way))
                for following, _, more in ordered[gathered : place + ahead + 1]:
                    fetch = (hook, f"FSDP::{way}_prefetch for {following}", f"FSDP::all_gather ({following})")
                    yield self._gather(following, more, way, fetch, ahead=True)
                gathered = max(gathered, min(place + ahead + 1, len(ordered)))
                shared = layers or [int(name.split(".")[1])]
                parts = len([1 for _, _, s in ordered if s == size]) / job.layers if size < 1 else 1.0
                for layer in shared:
                    ms = job.layer_ms / parts * (2 if backward else 1)
                    count = job.kernels
                    yield from self._compute(ms, layer, name, backward=backward) if count else ()
                if backward:
                    key = self._key("scatter", name)
                    yield self._meet(
                        "reducescatter", key, self.data, 2 * size * job.layer_mib, 1.0, stream=22,
                        within=(f"FSDP::post_backward_reduce{label}",),
                    )  # fmt: skip
                    reductions.append(key)
            if backward:
                yield Mark("thread:main")
                for key in reductions:
                    yield Wait(key)

    def _gather(self, name: str, size: float, way: str, within: tuple[str, ...], *, ahead: bool) -> Meet:
        key = self._key("gather", name, way)
        return self._meet(
            "allgather", key, self.data, size * self.job.layer_mib, 1.0,
            after_compute=not ahead, within=within,
        )  # fmt: skip

    # Pipelines ------------------------------------------------------------------------------------

    def _pipeline(self) -> Iterator[Instruction]:
        """Write one forward and one backward of each micro-batch and chunk, in the order of 1F1B.

        Chunk c of rank r is part c * stages + r of the model. With several chunks on each rank micro-batches
        pass in rounds of as many as there are stages, each round through all chunks.
        """
        job = self.job
        count = job.micro_batches * job.chunks
        ahead = job.stages - self.stage - 1
        if job.chunks > 1:
            ahead = 2 * ahead + (job.chunks - 1) * job.stages
        ahead = min(ahead, count)
        order = [("F", k) for k in range(ahead)]
        for k in range(count - ahead):
            order += [("F", k + ahead), ("B", k)]
        order += [("B", k) for k in range(count - ahead, count)]
        own = range(ceil(job.layers / job.stages / job.chunks))
        for way, k in order:
            chunk, self.part = self._turn(k)
            if way == "B":
                chunk = job.chunks - 1 - chunk
            before, after = (-1, 1) if way == "F" else (1, -1)
            yield from self._stage_link(way, chunk, before, receives=True)
            if way == "F":
                yield from self._forward(own)
            else:
                yield from self._backward(own, reduces=False)
            yield from self._stage_link(way, chunk, after, receives=False)
        if job.replicas > 1:
            key = self._key("gradients", self.stage)
            size = job.chunks * len(own) * job.layer_mib / job.tensor
            yield self._meet("allreduce", key, self.data, size, 2.0)
            yield Wait(key)

    def _turn(self, k: int) -> tuple[int, int]:
        """Return the chunk and the micro-batch of the k-th forward pass of a rank."""
        if self.job.chunks == 1:
            return 0, k
        rounds, within = divmod(k, self.job.stages * self.job.chunks)
        return within // self.job.stages, rounds * self.job.stages + within % self.job.stages

    def _stage_link(self, way: str, chunk: int, towards: int, *, receives: bool) -> Iterator[Instruction]:
        job = self.job
        stage = chunk * job.stages + self.stage
        if not 0 <= stage + towards < job.stages * job.chunks:
            return
        wide = job.replicas * job.tensor
        other = (self.rank + towards * wide) % job.ranks
        ends = (other, self.rank) if receives else (self.rank, other)
        edge = min(stage, stage + towards)
        key = (self.step, way, self.part, edge, ends)
        stream = 30 + 2 * other + receives  # as NCCL has them: what two ranks send each other keeps its order
        meet = self._meet(
            "recv" if receives else "send", key, tuple(sorted(ends)), job.activation_mib, 2.0,
            stream=stream, peer=other, after_compute=not receives,
        )  # fmt: skip
        yield meet
        if receives:
            yield Wait(key)
