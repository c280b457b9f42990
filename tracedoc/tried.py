"""What came of fixes that were tried on the job itself, as results to show and keep."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tracedoc.ledger import Range

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
