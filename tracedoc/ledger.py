"""The ledger: what each cause costs the mean captured step, as results to show and keep."""

from __future__ import annotations

import msgspec

from tracedoc.units import format_ms

Range = tuple[float, float, float]
"""Low, likely and high, in milliseconds."""

TRANSFER, UNSPLIT = "link.transfer", "link.unsplit"
"""What remains of communication: with no waiting in it, or such that may be waiting for peers."""

BUBBLE, UNSEEN = "pipeline.bubble", "pipeline.unseen"
"""What remains of waiting between stages: by the schedule, or whatever stages that were not captured do."""

UNKNOWN_WAITS = (UNSPLIT, UNSEEN)
"""Causes that may be waiting for what was not captured: nobody knows what a change would save of them."""

CAUSE_WORDS: dict[str, str] = {
    "slow_steps": "a few steps far longer than the others",
    "input.wait": "waiting for the next batch",
    "input.copies": "copies of the batch to the device",
    "host.sync": "waits of the host for the GPU",
    "host.first_calls": "first calls of kernels and libraries",
    "host.compile": "compilation of code",
    "host.gc": "garbage collection of Python",
    "host.pause": "host code (Python, files, sleep)",
    "host.allocator": "allocation of device memory",
    "host.offload": "parameters, gradients or optimizer on the host",
    "host.launch": "launch overhead on the host",
    "host.between": "overhead between operators (Python, dispatch)",
    "ranks.compute": "ranks that compute longer than their peers",
    "ranks.host": "ranks whose host is slower than its peers",
    "ranks.input": "ranks whose batch comes later than their peers'",
    "pipeline.imbalance": "pipeline stages of unequal work",
    BUBBLE: "the pipeline schedule's own bubble",
    UNSEEN: "waiting for pipeline stages that were not captured",
    "pipeline.transfer": "sends and receives between stages",
    "order.gathers": "late gathers of parameters",
    "order.reductions": "late reductions of gradients",
    "order.every_micro_batch": "reductions of gradients in every micro-batch",
    "order.extra": "barriers and messages that training does not need",
    "order.messages": "messages too small, or too large to overlap",
    "link.slow": "a link below what it should give",
    "link.latency": "latency of messages",
    TRANSFER: "exposed communication",
    UNSPLIT: "communication or waiting for peers",
    "compute.fp32": "matrix products outside the tensor cores",
    "compute.fp64": "work on 64-bit floats",
    "compute.untouched": "embedding rows that no sample touches",
    "compute.optimizer": "an optimizer of many small kernels",
    "compute.small_kernels": "kernels too small for the device",
    "compute.copies": "copies within the device",
    "compute.attention": "attention in separate kernels",
    "compute.layout": "copies that only reorder tensors",
    "compute.shapes": "matrix sizes that fit no tile",
    "compute.loss": "a loss of separate kernels",
    "compute.fusion": "chains of unfused kernels",
    "compute.recompute": "recomputation of activations",
    "compute.beside": "operators that the script calls beside training",
    "compute.padding": "padding of batches",
}
"""What each cause is, in plain words, by its id."""

CAUSE_IDS = (*dict.fromkeys(one.partition(".")[0] for one in CAUSE_WORDS), *CAUSE_WORDS)
"""Families of causes, and causes: what rules may name."""


INHERENT = (BUBBLE,)
"""Causes that a training strategy has by itself: told, but never a warning."""

PAID_FOR_MEMORY = ("compute.recompute",)
"""Causes that save memory: a warning only where a rule knows that memory is free."""

PACED_BY_HOST = ("host.launch", "host.pause", "host.between")
"""Causes that the profiler makes larger: what it records of each call takes the host time."""

WORTH = 0.02
"""A cause below this share of the step is not told: runs of one job differ by as much."""

HIDDEN_BELOW, SHARED_ABOVE = 0.5, 1.1
"""A cause is hidden by another if it gives less than this share of its part of the step alone, and costs time
that others cost as well if it gives more than that."""


MOSTLY_SHARED = 0.8
"""A cause is told by what tells another, where that saves at least this share of what mending it saves."""


class LedgerCause(msgspec.Struct, frozen=True):
    """What one cause costs the mean captured step.

    ``share_ms`` is its part of the step: all shares add up to the step less the ideal one. ``alone_ms`` is by
    how much the step is shorter without this cause alone (low, likely, high), ``last_ms`` what the cause
    would still cost if all others were gone. ``ranks`` are those that it is seen on, where these are not all;
    ``place`` is where in the step. ``partner`` is the id of the cause that hides it: mending one alone gives
    little, mending both more. ``shared_with`` is the id of one that costs the same time: mending either
    saves it, and each has a part of it as its share. ``told_by`` are the rules that name it.
    """

    id: str
    share_ms: float
    alone_ms: Range
    last_ms: float
    ranks: tuple[int, ...] = ()
    place: str = ""
    partner: str = ""
    told_by: tuple[str, ...] = ()
    shared_with: str = ""

    @property
    def words(self) -> str:
        """What it is, in plain words."""
        return CAUSE_WORDS.get(self.id, self.id)


class LedgerRow(msgspec.Struct, frozen=True):
    """What mending the causes of one finding saves after those of the rows before it, in ms.

    ``finding`` is its id, "" for a cause that no finding tells; ``hidden`` that of one whose causes hide its
    own and are hidden by them, so that a row is of both.
    """

    causes: tuple[str, ...]
    saves_ms: float
    finding: str = ""
    hidden: str = ""


class Ledger(msgspec.Struct, frozen=True):
    """One account of the mean captured step: ``step_ms`` is ``ideal_ms`` and the shares of all causes.

    Of the ideal step ``unexplained_ms`` is what the replay does not explain (negative where the replay takes
    longer than measured); the rest is compute at today's rate. ``causes`` have the largest share first.
    ``rows`` lead from this step to the ideal one, as findings stand; what they leave is of smaller causes.
    ``steps`` are those that were averaged. ``reason`` says why there is no ledger: then the rest is empty.
    """

    step_ms: float = 0.0
    ideal_ms: float = 0.0
    unexplained_ms: float = 0.0
    causes: tuple[LedgerCause, ...] = ()
    steps: tuple[int, ...] = ()
    confidence: str = ""
    reason: str = ""
    rows: tuple[LedgerRow, ...] = ()

    def told_by(self, words: str) -> tuple[str, ...]:
        """The rules that tell the cause of some words."""
        return next((one.told_by for one in self.causes if one.words == words), ())


def is_apart(share_ms: float, alone_ms: float) -> bool:
    """True where mending causes alone saves far less, or more, than their part of the step."""
    return not HIDDEN_BELOW * share_ms <= alone_ms <= SHARED_ABOVE * share_ms


def is_hidden(costs_ms: float, alone_ms: float) -> bool:
    """True where mending causes alone saves far less than they cost once others are mended."""
    return alone_ms < HIDDEN_BELOW * costs_ms


def is_mostly_shared(cause: LedgerCause) -> bool:
    """True where mending another cause saves most of what mending this one does.

    Of time that two causes share each has half as its part, which is so much less than what it saves alone.
    """
    shared_ms = 2 * (cause.alone_ms[1] - cause.share_ms)
    return shared_ms >= MOSTLY_SHARED * cause.alone_ms[1] > 0


def saved_words(alone_ms: float) -> str:
    """What mending one cause alone saves, or "nothing"."""
    return format_ms(alone_ms) if alone_ms > 0 else "nothing"
