"""What a simulated training job is, and which faults it has."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache

KINDS = ("ddp", "fsdp", "zero", "tensor", "pipeline")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong; ``rank`` and ``amount`` mean what the fault's name says."""

    name: str
    rank: int = -1
    amount: float = 0.0


@dataclass(frozen=True)
class Job:
    """All that decides what a job does: times in ms, sizes in MiB, the link in GB/s.

    Everything that is drawn while it runs depends on ``seed`` and on the place only, so that a job without
    one of its faults meets the same chances. ``change`` holds what a counterfactual alters.
    """

    seed: int
    kind: str
    ranks: int
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    layers: int = 8
    micro_batches: int = 1
    steps: int = 5
    layer_ms: float = 4.0
    kernels: int = 6
    launch_ms: float = 0.012
    layer_mib: float = 50.0
    activation_mib: float = 16.0
    link_gbps: float = 300.0
    latency_ms: float = 0.02
    jitter: float = 0.02
    bucket_mib: float = 100.0
    prefetch: bool = True
    logs: bool = True
    faults: tuple[Fault, ...] = ()
    change: dict[str, float] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.ranks // (self.tensor * self.stages)

    def fault(self, name: str) -> Fault | None:
        """Return the fault of that name, if the job has it."""
        return next((fault for fault in self.faults if fault.name == name), None)

    def without(self, name: str) -> Job:
        """Return the same job without one of its faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.name != name))

    def changed(self, **change: float) -> Job:
        """Return the same job with something altered by a counterfactual."""
        return replace(self, change={**self.change, **change})

    def draw(self, *place: object) -> float:
        """Return a chance in [0, 1) that belongs to a place."""
        return _draw(self.seed, place)

    def normal(self, *place: object) -> float:
        """Return a normally distributed number that belongs to a place."""
        return _normal(self.seed, place)

    def transfer_ms(self, mib: float, share: float, group: tuple[int, ...] | None = None) -> float:
        """Return how long ``mib`` travel; ``share`` is what of them crosses the link of one rank."""
        rate = self.link_gbps
        if self.fault("slow-link"):
            rate /= self.fault("slow-link").amount  # type: ignore[union-attr]
        rate *= self.change.get("link", 1.0)
        return self.latency_ms * self.change.get("latency", 1.0) + share * mib * 1.048576 / rate


@cache
def _draw(seed: int, place: tuple[object, ...]) -> float:
    return random.Random(f"{seed}/{place}").random()


@cache
def _normal(seed: int, place: tuple[object, ...]) -> float:
    return random.Random(f"{seed}/{place}").gauss(0.0, 1.0)
