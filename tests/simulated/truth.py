"""What is true of a simulated job: what each fault costs, and what each rule's cause would give back.

The cause is removed, with the same chances, and the job is played again.
"""

from __future__ import annotations

from dataclasses import replace

from tests.simulated.machine import play
from tests.simulated.programs import WARM_UP, programs
from tests.simulated.spec import Job

_EXPOSED = ("exposed-communication", "exposed-parameter-gather", "exposed-tensor-parallel")
"""Rules about communication with no compute beside it; the sharper ones say what it moves."""

RULES_OF_FAULT = {
    "straggler-host": ("straggler-rank", "rank-zero-work", "ranks.host"),
    "straggler-compute": ("straggler-rank", "ranks.compute"),
    "straggler-input": ("straggler-rank", "input-stall", "ranks.input"),
    "pauses": ("straggler-rank", "rank-zero-work", "rotating-straggler", "slow-captured-step", "ranks.host"),
    "rotating": ("rotating-straggler", "ranks.host"),
    "uneven": ("uneven-work", "rotating-straggler", "ranks.compute"),
    "heavy-stage": ("stage-imbalance", "pipeline.imbalance"),
    "slow-worker": ("straggler-rank", "ranks.compute"),
    "slow-link": ("slow-interconnect", "sharded-gather-stall", "link.slow", *_EXPOSED),
    "exposed-comm": ("sharded-gather-stall", "link.transfer", *_EXPOSED),
    "small-buckets": ("small-gradient-buckets", "small-collectives", "order.messages", "link.latency"),
    "giant-bucket": ("late-gradient-reduction", "tail-all-reduce", "order.messages", "order.reductions"),
    "every-micro-batch": ("reduction-every-micro-batch", "order.every_micro_batch"),
    "fine-wrap": ("fine-fsdp-wrapping", "small-collectives", "order.messages", "link.latency"),
    "coarse-wrap": ("coarse-fsdp-wrapping", "order.messages"),
    "no-prefetch": ("sharded-gather-stall", "missing-backward-prefetch", "order.gathers"),
    "launch-bound": ("host-bound-launches", "tiny-kernels", "host.launch"),
    "tiny-batch": ("tiny-batch", "host-bound-launches", "tiny-kernels"),
    "syncs": ("blocking-syncs", "host.sync"),
    "loader": ("input-stall", "input.wait"),
    "pageable": ("pageable-copies", "input.copies"),
    "allocator": ("allocator-churn", "host.allocator"),
}
"""Which rules name a fault, and which entries of the ledger, where findings tell these without a rule."""

OF_A_RANK = ("straggler-host", "straggler-compute", "straggler-input", "slow-worker")
"""Faults of one rank, which has to be named."""

_NO_TRANSFER = {"link": 1e9, "latency": 0.0}


class Truth:
    """The step of a job, and of the same job without a cause, in ms."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._periods: dict[str, float] = {}
        self.played = play(programs(job))
        self.step_ms = self.played.period(WARM_UP)

    def gain_of_fault(self, name: str) -> float:
        """Return what the step loses without one of the job's faults."""
        lone_stage = name == "slow-worker" and self.job.replicas == 1
        if name == "heavy-stage" or lone_stage:  # its work stays, shared by all stages
            return self._gain(f"fault {name}", self.job.changed(balanced=1.0))
        if name == "uneven":  # the samples stay, dealt out evenly
            return self._gain("even", self.job.changed(even=-1.0))
        if name == "exposed-comm":
            return self._gain("no transfer", self.job.changed(**_NO_TRANSFER))
        return self._gain(f"fault {name}", self.job.without(name))

    def gain_of_rule(self, rule: str, ranks: tuple[int, ...]) -> float | None:
        """Return what removing the cause that a rule names would give back; ``None`` where not defined."""
        job = self.job
        changed: Job | None = None
        if rule in ("straggler-rank", "rank-zero-work"):
            changed = job.changed(even=float(ranks[0])) if ranks else None
        elif rule in ("rotating-straggler", "uneven-work", "slow-captured-step"):
            changed = job.changed(even=-1.0)
        elif rule == "stage-imbalance":
            changed = job.changed(balanced=1.0)
        elif rule in ("host-bound-launches", "tiny-kernels", "unfused-optimizer"):
            changed = job.changed(host=0.03)
        elif rule == "tiny-batch":
            return self._doubled()
        elif rule == "blocking-syncs":
            changed = replace(job, logs=False).changed(syncs=0.0)
        elif rule == "host-away":
            changed = job.without("straggler-host").without("pauses").without("rotating")
        elif rule == "input-stall":
            changed = job.without("straggler-input").changed(loader=0.0)
        elif rule == "pageable-copies":
            changed = job.changed(pinned=1.0)
        elif rule == "allocator-churn":
            changed = job.changed(calm=1.0)
        elif rule == "missing-backward-prefetch":
            changed = job.changed(**{"ahead backward": 1.0})
        elif rule in _MENDED_BY:
            found = [name for name in _MENDED_BY[rule] if job.fault(name)]
            changed = job.without(found[0]) if found else None
        elif rule in _ONE_PURPOSE:
            changed = job.changed(**{f"no {_ONE_PURPOSE[rule]}": 1.0})
        elif rule in _TRANSFERS:
            changed = job.changed(**_NO_TRANSFER)
        return None if changed is None else self._gain(f"{rule} {ranks}", changed)

    def gain_of_change(self, change: str) -> float | None:
        """Return what a change, as ``tracedoc whatif`` takes it, gives back; ``None`` where not defined."""
        name, *given = change.split()
        values = dict(one.split("=") for one in given)
        if name == "double-batch":
            return self._doubled()
        changed = self._changed(name, values)
        return None if changed is None else self._gain(change, changed)

    def _changed(self, name: str, values: dict[str, str]) -> Job | None:
        job = self.job
        if name == "scale-bytes" and values["of"] == "gradients":
            return job.changed(**{"gradient bytes": float(values["by"])})
        if name == "gather-ahead":
            passes = ("forward", "backward") if values["pass"] == "both" else (values["pass"],)
            return job.changed(**{f"ahead {one}": float(values["units"]) for one in passes})
        if name == "cap-buckets":
            found = [one for one in ("small-buckets", "giant-bucket") if job.fault(one)]
            return replace(job.without(found[0]), bucket_mib=float(values["mib"])) if found else None
        if name == "even-rank":
            return job.changed(even=float(values["rank"]))
        if name == "reduce-once":
            return job.without("every-micro-batch")
        if name == "no-sync":
            return replace(job, logs=False).changed(syncs=0.0)
        alone = {
            "even-ranks": {"even": -1.0},
            "share-work": {"even": -1.0},
            "compile-model": {"host": 0.4},
            "capture-graph": {"host": 0.03},
            "feed-input": {"loader": 0.0},
            "pin-copies": {"pinned": 1.0},
            "calm-allocator": {"calm": 1.0},
        }
        return job.changed(**alone[name]) if name in alone else None

    def _gain(self, key: str, job: Job) -> float:
        if key not in self._periods:
            self._periods[key] = play(programs(job)).period(WARM_UP)
        return self.step_ms - self._periods[key]

    def _doubled(self) -> float:
        """Return what doubling the batch gives, counted per unit of today's work."""
        return self.step_ms - play(programs(self.job.changed(compute=2.0))).period(WARM_UP) / 2


_TRANSFERS = ("exposed-communication", "small-collectives")
_ONE_PURPOSE = {"exposed-parameter-gather": "gather", "exposed-tensor-parallel": "tensor"}
"""Rules about one kind of transfer: that kind takes no time, the others take what they took."""
_MENDED_BY = {
    "late-gradient-reduction": ("giant-bucket",),
    "tail-all-reduce": ("giant-bucket",),
    "slow-interconnect": ("slow-link",),
    "sharded-gather-stall": ("no-prefetch",),
    "small-gradient-buckets": ("small-buckets",),
    "reduction-every-micro-batch": ("every-micro-batch",),
    "fine-fsdp-wrapping": ("fine-wrap",),
    "coarse-fsdp-wrapping": ("coarse-wrap",),
}
