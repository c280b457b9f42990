"""A run that can be replayed: its programs joined, in three scenarios, and how far that can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from tracedoc.play.in_a_row import Row
from tracedoc.play.joins import join_run
from tracedoc.play.path import Path, find_whole_path
from tracedoc.play.player import Played, Player
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.scenarios import as_measured, as_scenario
from tracedoc.play.solver import Cyclic
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest

Told = TypeVar("Told")

UNSURE, WRONG = 0.02, 0.05
"""A replay that misses the measured step by more than these shares is of low confidence, or none."""

UNEXPLAINED_UNSURE, UNEXPLAINED_WRONG, UNEXPLAINED_MOST = 0.05, 0.10, 0.25
"""The same for the share of the step that hangs on delays which nothing in the capture explains: above the
second, such delays stay in every scenario; above the third there is no replay."""

FAR_OFF = 0.2
"""A replay that misses the measured step by more than this share is worth less than the step played once."""

SURE_ERROR, UNEXPLAINED_SURE = 0.01, 0.02
"""Below these, and with all ranks, confidence is high."""

SHARED_CORES = "processes and loader workers that share cores slow each other down, which is not replayed"


class Refusal(msgspec.Struct, frozen=True):
    """Why a run cannot be replayed."""

    reason: str


class Base(msgspec.Struct, frozen=True, eq=False):
    """The program without a change in one scenario, and how long its step takes."""

    program: RunProgram
    step_ns: float


class RunReplay(msgspec.Struct, frozen=True, eq=False):
    """A run that can be replayed.

    ``step_ms`` is the measured step that all answers refer to, ``replayed_ms`` what the replay without a
    change makes of it; ``model_error_frac`` is their difference, ``unexplained_frac`` the share of the step
    that is not replayed but kept where delays stay unexplained. ``base`` are the programs by scenario.
    ``others`` are steps that are played behind this one, in a ``row``. ``apart`` if ranks do not meet in
    every step: the rank that stands for the run then has its steps, and others shorter ones. ``own_frac`` is
    the least and most of a captured step that a usual one takes, 1 where that is not known. ``varies`` has an
    entry for each kind of time of a step that is played for all, the most uneven first: how long it is in the
    captured steps, and by how much its mean over very many may differ from that, in ms.
    """

    step_ms: float
    replayed_ms: float
    model_error_frac: float
    unexplained_frac: float
    confidence: str
    periodic: bool
    step: int
    subject: int
    player: Player
    base: Mapping[Scenario, Base]
    path: Path
    notes: tuple[str, ...] = ()
    others: tuple[RunReplay, ...] = ()
    row: Row | None = None
    apart: bool = False
    own_frac: tuple[float, float] = (1.0, 1.0)
    varies: tuple[tuple[float, float], ...] = ()

    @property
    def program(self) -> RunProgram:
        """The program without a change, as it is likely."""
        return self.base[Scenario.LIKELY].program

    @property
    def steps(self) -> tuple[RunReplay, ...]:
        """The steps that are played: this one, and those that follow it in a row."""
        return (self, *self.others)

    @property
    def mean_ms(self) -> float:
        """The mean measured step of those played; ranks that pause in turn have steps of other lengths."""
        if not self.others:
            return self.step_ms
        ranks = slice(self.subject, self.subject + 1) if self.apart else slice(None)
        every = [note.step_ns for one in self.steps for note in one.program.layout.notes[ranks]]
        return float(np.mean(every)) / 1e6

    def mean_error_ms(self, gain_ms: float) -> float:
        """By how much a gain of the mean of very many steps may differ from that of this one."""
        error, left = 0.0, abs(gain_ms)
        for lasts, may_differ in self.varies:
            error += may_differ * min(left / lasts, 1.0)
            left = max(left - lasts, 0.0)
        return error

    def base_ns(self, scenario: Scenario) -> float:
        """The mean length of the steps without a change."""
        return self.base[scenario].step_ns if self.row is None else self.row.mean_ns[scenario]

    def play(self, programs: Sequence[Sequence[RunProgram]]) -> list[Played]:
        """Play lists of all steps' programs with changes; ``step_ns`` is the mean of the steps.

        Raises :class:`~tracedoc.play.solver.Cyclic` where something waits for itself.
        """
        if self.row is not None:
            return self.row.play(programs)
        return self.player.play([one for (one,) in programs])

    def play_each(
        self, programs: Iterator[Sequence[RunProgram]], tell: Callable[[Played], Told]
    ) -> Iterator[Told | None]:
        """Play lists of all steps' programs, and tell of each; ``None`` if something waits for itself.

        They are made as they are played, some at a time, and dropped: of many ranks each takes megabytes.
        """
        together = self.row.together if self.row else self.player.together(self.program)
        while told := self._told(list(islice(programs, together)), tell):
            yield from told

    def _told(
        self, some: Sequence[Sequence[RunProgram]], tell: Callable[[Played], Told]
    ) -> list[Told | None]:
        with suppress(Cyclic):
            return [tell(one) for one in self.play(some)]
        # What was raised is gone here, with all that it held.
        return [None] if len(some) == 1 else [self._told([one], tell)[0] for one in some]


def in_a_row(first: RunReplay, others: Sequence[RunReplay]) -> RunReplay:
    """The replay of a step with others of the same ranks behind it, which repeat themselves as well.

    Without any, or where their dependencies contradict each other, it is that of the step alone.
    """
    every = (first, *sorted(others, key=lambda one: (one.step < first.step, one.step)))
    alike = [one for one in every if one.periodic and (np.diff(one.program.layout.point_base) > 0).all()]
    if len(alike) < 2 or alike[0] is not first:
        return first
    row = Row(first.subject, [one.program.layout for one in alike])
    try:
        row.play_base([[one.base[scenario].program for one in alike] for scenario in Scenario])
    except Cyclic:
        return first
    return replace(first, others=tuple(alike[1:]), row=row)


def replay_run(run: RunView) -> RunReplay | Refusal:
    """Make a run's replay from its digests, or say why it cannot be."""
    representative = run.representative_digest
    if representative is None or representative.judged_step is None:
        return Refusal("no rank has a step to analyse")
    step = _common_step(run, representative)
    return step if isinstance(step, Refusal) else _replay_of(run, representative, step)


def replay_closest(run: RunView) -> RunReplay | Refusal:
    """Replay a run whatever it misses: of the steps that most ranks have, that which it comes closest to.

    Ranks that do not have it count as missing.
    """
    representative = run.representative_digest
    if representative is None or representative.judged_step is None:
        return Refusal("no rank has a step to analyse")
    ranks_of = {
        one.step: sum(any(one.step == other.step for other in digest.programs) for digest in run.digests)
        for one in representative.programs
    }
    if not ranks_of:
        return Refusal(f"rank {representative.rank}: {representative.unplayable}")
    most = max(ranks_of.values())
    found = [
        _replay_of(run, representative, step, lenient=True)
        for step, ranks in ranks_of.items()
        if ranks == most
    ]
    made = [one for one in found if isinstance(one, RunReplay)]
    return min(made, key=lambda one: one.model_error_frac) if made else found[0]


def replay_other(run: RunView, first: RunReplay, step: int) -> RunReplay | Refusal:
    """Replay another step of the ranks of a replay, which answers refer to by its own length."""
    representative = run.representative_digest
    assert representative is not None
    ranks = first.program.layout.ranks
    having = [one.rank for one in run.digests if any(step == program.step for program in one.programs)]
    if having != list(ranks):
        return Refusal(f"other ranks have step {step}")
    found = _replay_of(run, representative, step)
    if isinstance(found, Refusal):
        return found
    return replace(found, step_ms=found.program.layout.notes[found.subject].step_ns / 1e6)


def _replay_of(
    run: RunView, representative: RankDigest, step: int, *, lenient: bool = False
) -> RunReplay | Refusal:
    there = [digest for digest in run.digests if any(one.step == step for one in digest.programs)]
    program = join_run(run, there, step)
    subject = program.layout.ranks.index(representative.rank)
    assert representative.judged_step is not None
    step_ms = representative.judged_step.budget.window_ns / 1e6
    try:
        if lenient:
            step_ms = program.layout.notes[subject].step_ns / 1e6
            again = _replayed(run, program, subject, step_ms, lenient=True)
            once = _replayed(run, program.played_once(), subject, step_ms, lenient=True)
            assert isinstance(again, RunReplay)
            assert isinstance(once, RunReplay)
            closer = again.model_error_frac <= max(FAR_OFF, once.model_error_frac)
            return again if closer else once
        found = _replayed(run, program, subject, step_ms)
        if (
            isinstance(found, Refusal)
            and program.layout.periodic
            and len(program.layout.framed) == len(there)
        ):
            # Ranks whose steps differ do not repeat them; the one that was captured may be played alone.
            once = _replayed(run, program.played_once(), subject, step_ms)
            return found if isinstance(once, Refusal) else once
        return found
    except Cyclic:
        return Refusal("the recorded dependencies contradict each other")


def _common_step(run: RunView, representative: RankDigest) -> int | Refusal:
    """Return the step to replay: the judged one if every rank has its program."""
    for digest in run.digests:
        if not digest.programs:
            return Refusal(f"rank {digest.rank}: {digest.unplayable}")
    common = set.intersection(*({one.step for one in digest.programs} for digest in run.digests))
    step = next((one.step for one in representative.programs if one.step in common), None)
    return Refusal("the ranks have no analysed step in common") if step is None else step


def _replayed(
    run: RunView, program: RunProgram, subject: int, step_ms: float, *, lenient: bool = False
) -> RunReplay | Refusal:
    player = Player(subject)
    own = program.layout.notes[subject]
    measured = own.step_ns if program.layout.periodic or own.framed else own.span_ns
    lengths = [one.step_ns for one in program.layout.notes] if program.layout.periodic else [measured]

    def missed(step_ns: float) -> float:
        # A rank is away in one step, and those that wait for it in the next: repeated, both are one.
        return max(min(lengths) - step_ns, step_ns - max(lengths), 0.0) / max(measured, 1)

    bare, kept = (one.step_ns for one in player.play([program, as_measured(program)]))
    unexplained = max(1 - bare / max(kept, 1e-9), 0.0)
    if unexplained > UNEXPLAINED_MOST and not lenient:
        return Refusal(f"nothing in the capture explains {100 * unexplained:.0f} % of the step")
    keeps = unexplained > UNEXPLAINED_WRONG or (missed(bare) > WRONG and missed(kept) <= WRONG)
    error = missed(kept if keeps else bare)
    if error > WRONG and not lenient:
        replayed = (kept if keeps else bare) / 1e6
        return Refusal(f"the replay of the step takes {replayed:.3g} ms, not {measured / 1e6:.3g}")
    scenarios = [as_scenario(program, scenario) for scenario in Scenario]
    notes: tuple[str, ...] = (SHARED_CORES,) if own.is_cpu else ()
    if keeps:
        scenarios = [as_measured(one) for one in scenarios]
        notes += (f"{100 * unexplained:.0f} % of the step hangs on delays that nothing explains: they stay",)
    played = {one.program.scenario: one for one in player.play_base(scenarios)}
    likely = played[Scenario.LIKELY]
    return RunReplay(
        step_ms=step_ms,
        replayed_ms=likely.step_ns / 1e6,
        model_error_frac=error,
        unexplained_frac=unexplained,
        confidence="low" if keeps or lenient else _confidence(run, program, error, unexplained),
        periodic=program.layout.periodic,
        step=own.step,
        subject=subject,
        player=player,
        base={scenario: Base(one.program, one.step_ns) for scenario, one in played.items()},
        path=find_whole_path(likely, subject),
        notes=notes,
        apart=run.meets_rarely,
    )


def _confidence(run: RunView, program: RunProgram, error: float, unexplained: float) -> str:
    once = not program.layout.periodic
    cpu = any(one.is_cpu for one in program.layout.notes)
    if cpu or error > UNSURE or unexplained > UNEXPLAINED_UNSURE or (once and not program.layout.framed.size):
        return "low"
    everyone = run.world_size is None or len(run.digests) >= run.world_size
    matched = bool((program.layout.joins.op >= 0).all()) or len(run.digests) == 1
    sure = error <= SURE_ERROR and unexplained <= UNEXPLAINED_SURE
    return "high" if everyone and matched and sure and not once else "medium"
