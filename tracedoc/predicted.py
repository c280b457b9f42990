"""What a change is predicted to give, and what it gave when it was tried, as results to show and keep."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tracedoc.ledger import Ledger, Range

CPU_RUNS_DIFFER = 0.10
"""Steps of two runs of a job on CPUs, which share their cores with everything else, differ by this share."""


WARMER_SHARE = 0.45
"""What stays of a step takes by so much less at most where pauses go that leave caches and cores cold: 10 to
45 % are measured (benchmarks/README.md, fixes of real jobs)."""


def as_runs_differ(
    gain_ms: Range, step_ms: float, own_frac: tuple[float, float], warmer_ms: float = 0.0
) -> Range:
    """A gain on CPUs of a captured step, of which ``own_frac`` is the job's own, at least and at most.

    As unsure as two runs, by what it takes or leaves. Of the job's own step what goes is a larger share, by
    what the profiler adds, or is shorter itself, by all that is not usual; what stays is shortened with the
    step at most, so that it never vanishes. It is shorter by up to ``warmer_ms`` where no pause precedes it.
    """
    least, own = own_frac
    low, likely, high = gain_ms
    spread = CPU_RUNS_DIFFER * max(min(likely, step_ms - likely), 0.0)
    low, high = low - spread, max(min(high + spread, step_ms), high)
    high += max(min(warmer_ms, likely, WARMER_SHARE * (step_ms - high)), 0.0)
    most = min(high / own, step_ms - own * (step_ms - high))
    return min(low, max(low - (1 - least) * step_ms, 0.0)), likely, max(high, most)


LEAST_SHARE = 0.01
"""A gain below this share of the step is within the spread of any measurement."""


LARGER_BATCH = ("double-batch", "more-micro-batches")
"""Changes after which a step trains on twice the samples."""

SAME_SAMPLES = " for the same samples"
"""Behind the step of such a change."""


def enlarges_batch(change: str) -> bool:
    """True for a change, as ``tracedoc whatif`` takes it, after which a step trains on more samples."""
    return change.partition(" ")[0] in LARGER_BATCH


class Predicted(msgspec.Struct, frozen=True, tag_field="state", tag="predicted"):
    """The step after a change, and what it saves, as ``(low, likely, high)`` in milliseconds.

    ``change`` is what was replayed, as ``tracedoc whatif`` takes it. ``then_limited_by`` is the resource with
    the largest share of the critical path after it, "" for the processor of a CPU run. A change that does
    more work a step is counted for as much work as today.
    """

    change: str
    step_ms: Range
    gain_ms: Range
    then_limited_by: str
    confidence: str
    assumptions: tuple[str, ...] = ()

    @property
    def before_ms(self) -> float:
        """Today's step, of which the likely gain is a part."""
        return self.step_ms[1] + self.gain_ms[1]

    @property
    def helps(self) -> bool:
        """Whether it likely saves :data:`LEAST_SHARE` of the step."""
        return self.gain_ms[1] >= LEAST_SHARE * self.before_ms


class NotPredicted(msgspec.Struct, frozen=True, tag_field="state", tag="not-predicted"):
    """Why a change is not predicted for this run."""

    change: str
    reason: str


class PathPiece(msgspec.Struct, frozen=True):
    """One kind of work on the critical path: ``ms`` of it on ``rank``, and what it is where that is known."""

    resource: str
    rank: int
    ms: float
    what: str = ""


class ReplayReport(msgspec.Struct, frozen=True):
    """How the analysed step was replayed.

    ``state`` is "used", or "refused" for ``reason``; then the rest is empty. ``step_ms`` is the measured
    step, ``replayed_ms`` the replayed one. ``path`` holds the shares of the critical path by resource
    ("compute", "communication", "copy", "host", "input", "sync", "allocator"), ``path_ranks`` by rank, and
    ``longest`` its longest kinds of work. ``notes`` list what was assumed. ``more_ranks`` is the step on
    twice and four times as many ranks, each with the work of today's.
    """

    state: str
    reason: str = ""
    step: int | None = None
    step_ms: float | None = None
    replayed_ms: float | None = None
    model_error_frac: float | None = None
    unexplained_frac: float | None = None
    confidence: str = ""
    path: dict[str, float] = msgspec.field(default_factory=dict)
    path_ranks: dict[str, float] = msgspec.field(default_factory=dict)
    longest: tuple[PathPiece, ...] = ()
    notes: tuple[str, ...] = ()
    more_ranks: tuple[Predicted | NotPredicted, ...] = ()


class PlanStep(msgspec.Struct, frozen=True):
    """One fix of a plan: the step with it and all fixes before it, and what it adds to what they save.

    ``fix`` is the finding's id and the number of its fix, as ``exposed-communication/0``;
    ``replay_of_step_ms`` the measured step without any.
    """

    fix: str
    title: str
    change: str
    step_ms: Range
    gain_ms: Range
    then_limited_by: str
    replay_of_step_ms: float = 0.0


class WhatIf(msgspec.Struct, frozen=True):
    """The answer of ``tracedoc whatif``: the replay, and the step after each change.

    ``alone`` has an entry for each change that was asked for, made alone; ``together`` each of them on top of
    those before it. ``ledger`` is what each cause costs, where no change was asked for.
    """

    replay: ReplayReport
    alone: tuple[Predicted | NotPredicted, ...] = ()
    together: tuple[Predicted, ...] = ()
    ledger: Ledger | None = None


# -- what was tried

TRIED_NAME = "tried.json"
"""The file in a run's folder that keeps what was tried on its job."""

KEPT, LESS, MORE, FASTER = "kept its promise", "less than predicted", "more than predicted", "faster"
NO_EFFECT, SLOWER, UNDECIDED = "no effect", "slower", "not decided"
NOT_MADE, FAILED, HUNG = "not made", "failed", "hung"
"""Verdicts on a fix; the last three have no steps to compare."""

GAINED = frozenset({KEPT, LESS, MORE, FASTER})


class Tried(msgspec.Struct, frozen=True):
    """A fix that was tried in turns with the job as it is; times are of a step, in milliseconds.

    ``fix`` is the finding's id and the number of its fix, or the change itself where someone gave that.
    ``predicted_ms`` is the gain that was stated, from and to, of a step of ``predicted_of_ms``; ``None``
    without one. ``gain_ms`` is the realised one with its interval of 95 %: low, likely, high. ``training``
    says whether the job computed the same, and ``same_training`` whether that is as the fix says. Memory is
    the peak of a rank in bytes, before and after.
    """

    fix: str
    title: str
    change: str
    verdict: str
    why: str = ""
    predicted_ms: tuple[float, float] | None = None
    predicted_of_ms: float = 0.0
    before_ms: float | None = None
    after_ms: float | None = None
    gain_ms: Range | None = None
    runs: int = 0
    training: str = ""
    same_training: bool = True
    memory_bytes: tuple[int | None, int | None] = (None, None)

    @property
    def side(self) -> str:
        """Where the realised gain lies against the predicted one, in ms or as a share: less, more or kept.

        A profiler makes steps longer, and not all causes grow with them. "" where one of the two is missing.
        """
        if self.predicted_ms is None or self.gain_ms is None:
            return ""
        scales = {1.0}
        if self.predicted_of_ms > 0 and self.before_ms:
            scales.add(self.before_ms / self.predicted_of_ms)
        low, high = (choose(scales) for choose in (min, max))
        least = min(self.predicted_ms[0] * low, self.predicted_ms[0] * high)
        most = max(self.predicted_ms[1] * low, self.predicted_ms[1] * high)
        if self.gain_ms[2] < least:
            return LESS
        return MORE if self.gain_ms[0] > most else KEPT

    @property
    def recommended(self) -> bool:
        """Whether the steps became shorter, and the training is what the fix says."""
        return self.verdict in GAINED and self.same_training


class Trials(msgspec.Struct, frozen=True):
    """All that was tried in one go; ``left_out`` are fixes that cannot be tried: id, title, reason.

    ``command`` started the job, each time for ``steps`` measured steps. ``ended`` says why it ended before
    all was decided, "" where it did not.
    """

    command: str
    steps: int
    tried: tuple[Tried, ...] = ()
    left_out: tuple[tuple[str, str, str], ...] = ()
    ended: str = ""


def read_tried(folder: Path) -> tuple[Tried, ...]:
    """What was tried on the job of a run; nothing where the file is missing or none of ours."""
    try:
        return msgspec.json.decode((folder / TRIED_NAME).read_bytes(), type=Trials).tried
    except (OSError, msgspec.MsgspecError):
        return ()


def keep_tried(folder: Path, found: Trials) -> None:
    """Keep what was tried beside the run's traces, the newest of each fix; raises :class:`OSError`."""
    newest = {one.change: one for one in (*read_tried(folder), *found.tried)}
    kept = msgspec.structs.replace(found, tried=tuple(newest.values()))
    (folder / TRIED_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
