"""One more step, with Python stacks, on up to eight ranks: it shows where in the script the host spends time.

Stacks slow a step, so they are kept out of the captured ones, and come last, when all steps are timed. Only
the host is recorded: no device has to be watched a second time. The ranks wait for each other, so they record
the same step where they can: one slow step costs what one of them would cost alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tracedoc.collector.guard import ForeignProfilers
from tracedoc.collector.options import Options, listed_ranks
from tracedoc.collector.recorder import HOST_ONLY, Recorder, compress, local_path

SUFFIX = ".source.gz"
"""Not the name of a trace, for it is none of the run's."""


MOST_RANKS = 8
"""So many ranks record the step at most: each writes a file of its own."""

_FIRST_TRIES = 4


def is_source_rank(options: Options, rank: int, world_size: int) -> bool:
    """Return whether a rank is among those that record a step with stacks.

    All are, up to :data:`MOST_RANKS`. Beyond, it is every second, fourth, eighth one and so on, so that the
    first rank of a node is among them wherever there is room: nodes mostly have 2, 4, 8 or 16. Of ranks
    that were asked for (``--ranks``) the same holds, in their order.
    """
    chosen = listed_ranks(options.ranks)
    among = range(world_size) if chosen is None else sorted(one for one in chosen if one < world_size)
    every = 1
    while len(among) > every * MOST_RANKS:
        every *= 2
    return options.source_step and not options.with_stack and rank in among[::every]


def common_step(earliest: int, ready: int) -> int:
    """Return the number of the step to record, for a rank that is ready at the end of step ``ready``.

    ``earliest`` is when a rank is ready whose trace was written at once. Others are later, each by another
    number of steps, so they may begin 0, 4, 8, 16, ... steps from there.
    """
    later = ready - earliest
    return earliest + (max(_FIRST_TRIES, 1 << (later - 1).bit_length()) if later > 0 else 0)


class SourceStep:
    """The extra step of a rank: begun at the end of a step, ended at the end of the next."""

    def __init__(self, torch: ModuleType, options: Options, foreign: ForeignProfilers, *, stem: str) -> None:
        wanted = replace(options, with_stack=True, record_shapes=False, profile_memory=False)
        self._recorder = Recorder(torch, wanted, HOST_ONLY, foreign)
        self._options, self._stem = options, stem
        self._writer: threading.Thread | None = None

    def begin(self, number: int) -> None:
        """Record from now on; ``number`` is that of the step."""
        self._recorder.arm()
        self._recorder.begin(number)

    def drop(self) -> None:
        """Stop, and keep nothing."""
        self._recorder.stop(hurried=True)

    def end(self, written: Callable[[str], None]) -> None:
        """Stop, and write the file; another thread calls ``written`` with its name when it is complete."""
        grown = self._recorder.grown_bytes()
        self._recorder.stop()
        if self._recorder.is_empty or grown > self._options.max_mb * 1e6:
            return
        folder = Path(self._options.folder)
        raw = local_path(f"{self._stem}.source", 2 * grown, folder)
        try:
            self._recorder.save(raw)
        except OSError:
            raw.unlink(missing_ok=True)
            raise
        deadline = time.monotonic() + self._options.max_seconds

        def write() -> None:
            with contextlib.suppress(OSError):
                compress(raw, folder / (self._stem + SUFFIX), deadline)
                written(self._stem + SUFFIX)

        self._writer = threading.Thread(target=write, name="tracedoc-source", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Wait until the file is written, for as long as writing may take."""
        if self._writer is not None:
            self._writer.join(self._options.max_seconds)
