"""Try fixes in turns with the job as it is, until each is decided or the time is used up."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from tracedoc.collector.launcher import is_one_of_several
from tracedoc.predicted import FAILED, HUNG, NOT_MADE, UNDECIDED, Tried
from tracedoc.trials import one_run
from tracedoc.trials.fixes import LEAST_PAIRS, Candidate, outcome
from tracedoc.trials.one_run import Job, NoRunError, Ran

MOST_PAIRS = 6
PAIRS_ALIKE = 3
"""Turns of each fix where several nodes have to go on alike, which see only steps of their own."""
LEAST_STEPS = 5
"""A script that ends by itself after fewer timed steps is too short to be tried."""
SILENCE = 10.0
"""A fix may be silent for so many times the longest silence of the job as it is: compiling takes long."""


@dataclass(frozen=True)
class Progress:
    """How far trials are: what runs, its step, of how many, and what is known of the fixes so far."""

    title: str
    step: int
    steps: int
    known: tuple[Tried, ...]


class _OverError(Exception):
    """The time for trials is over."""


AS_IT_IS = "as it is"


class Turns:
    """The trials of some fixes on one job; what is known stays there when they are interrupted."""

    def __init__(
        self, job: Job, fixes: Sequence[Candidate], budget_s: float, tell: Callable[[Progress], None]
    ) -> None:
        self._job, self._fixes, self._tell = job, list(fixes), tell
        self._deadline = time.monotonic() + budget_s
        self._base: list[Ran] = []
        self._pairs: dict[str, list[tuple[Ran, Ran]]] = {one.fix: [] for one in fixes}
        self._number = 0
        self._alike = is_one_of_several(job.command, job.environ)
        self.ended = ""

    @property
    def steps(self) -> int:
        """How many steps of a run are timed, at most."""
        return self._job.steps

    @property
    def known(self) -> tuple[Tried, ...]:
        """What is known of each fix by now."""
        return tuple(outcome(one, self._pairs[one.fix], self._base) for one in self._fixes)

    def take(self) -> None:
        """Take all turns. Raises :class:`NoRunError` where the job cannot be timed as it is.

        KeyboardInterrupt passes through: every process has ended then.
        """
        with tempfile.TemporaryDirectory(prefix="tracedoc-try-") as folder:
            try:
                while open_fixes := [one for one in self._fixes if self._is_open(one)]:
                    for fix in open_fixes:
                        if not self._alike and not self._fits_budget():
                            raise _OverError(one_run.OUT_OF_TIME)
                        self._turn(fix, Path(folder))
            except _OverError as error:
                self.ended = str(error)
            except KeyboardInterrupt:
                self.ended = "interrupted"
                raise

    def _is_open(self, fix: Candidate) -> bool:
        pairs = self._pairs[fix.fix]
        if self._alike:
            return len(pairs) < PAIRS_ALIKE
        verdict = outcome(fix, pairs, self._base).verdict
        if verdict in (FAILED, HUNG, NOT_MADE):
            return False
        return len(pairs) < LEAST_PAIRS or (verdict == UNDECIDED and len(pairs) < MOST_PAIRS)

    def _fits_budget(self) -> bool:
        """Whether a turn will end in time, as the longest so far: the first always begins."""
        turns = [before.seconds + after.seconds for pairs in self._pairs.values() for before, after in pairs]
        return time.monotonic() + max(turns, default=0.0) < self._deadline

    def _turn(self, fix: Candidate, folder: Path) -> None:
        base = self._run(AS_IT_IS, None, folder, float("inf"))
        if base.short and len(base.steps_ms) >= LEAST_STEPS:
            self._job = replace(self._job, steps=len(base.steps_ms), seconds=0.0)
            base = replace(base, problem="")
        if base.problem:
            self._check_time(base)
            if self._base:
                raise _OverError(f"the job failed as it is, which it had not before: {base.problem}")
            raise NoRunError(f"the job cannot be timed as it is: {base.problem}", _BY_HAND)
        self._base.append(base)
        as_long = ceil(self._job.seconds * 1000 / statistics.median(base.steps_ms))
        self._job = replace(self._job, steps=max(self._job.steps, as_long), seconds=0.0)
        longest_s = max(ran.silent_s for ran in self._base)
        ran = self._run(fix.title, fix, folder, max(one_run.LEAST_SILENCE_S, SILENCE * longest_s))
        if ran.problem and not ran.hung:
            self._check_time(ran)
        self._pairs[fix.fix].append((base, ran))

    def _check_time(self, ran: Ran) -> None:
        """Raise where a run was ended because the time is used up: that says nothing of the job."""
        if ran.problem == one_run.OUT_OF_TIME:
            raise _OverError(ran.problem)

    def _run(self, title: str, fix: Candidate | None, folder: Path, silence_s: float) -> Ran:
        self._number += 1
        scratch = folder / str(self._number)
        steps = self._job.wait + self._job.steps
        known = self.known

        def tell(step: int) -> None:
            self._tell(Progress(title, step, steps, known))

        tell(0)
        try:
            return one_run.run_once(
                self._job,
                fix.changes if fix else (),
                scratch,
                deadline=self._deadline,
                silence_s=silence_s,
                tell=tell,
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


_BY_HAND = "run it once without tracedoc; -- COMMAND, --cwd and --env say how it is started"
