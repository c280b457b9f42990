"""What a rank that runs is asked for, and what it tells when it hangs: the collectives that it entered."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tracedoc.collector.probe import loaded, probe
from tracedoc.collector.samples import script_frames
from tracedoc.run.flight import FLIGHT_SUFFIX, STACK_SUFFIX
from tracedoc.run.manifest import (
    LEAST_SECONDS_BETWEEN_LOOKS,
    SECONDS_BETWEEN_LOOKS,
    STEPS_SAMPLED,
    Request,
    read_request,
    replace_file,
)

_RECORDERS = (("_dump_fr_trace", FLIGHT_SUFFIX), ("_dump_nccl_trace", f".nccl{FLIGHT_SUFFIX}"))
"""The recorders of a process, and what the names of their dumps end with."""


def write_dumps(folder: Path, stem: str, stack: Sequence[str] = ()) -> None:
    """Write the dumps of a rank whose files begin with ``stem``, and the stack of its training thread.

    Where the process has no recorder, or the folder cannot be written, there is none; nothing is raised.
    """
    c10d = loaded("torch._C._distributed_c10d")
    for name, suffix in _RECORDERS:
        # Calls with their stacks, those that have ended too.
        content = probe(lambda name=name: getattr(c10d, name)(True, True, False))
        if isinstance(content, bytes) and content:
            target = folder / (stem + suffix)
            probe(replace_file, target, content)
            probe(replace_file, target.with_name(target.name + STACK_SUFFIX), "\n".join(stack).encode())


def remove_dumps(folder: Path, stem: str) -> None:
    """Remove what was written of a rank: it goes on, so that its dumps say nothing any more."""
    for _, suffix in _RECORDERS:
        for name in (stem + suffix, stem + suffix + STACK_SUFFIX):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


_SAMPLES = 40
_MOST_SECONDS_BETWEEN_SAMPLES = 1.0


class RequestWatch:
    """Looks for requests from a thread of its own, so that a rank that hangs answers too.

    Made on the thread that trains. ``on_request`` is called on its own thread; requests that lie there at
    the beginning are not answered.
    """

    def __init__(
        self, folder: Path, stem: str, on_request: Callable[[Request], None], steps: Callable[[], int]
    ) -> None:
        """``steps`` tells how many steps have ended."""
        self._thread = threading.get_ident()
        self._folder, self._stem, self._on_request = folder, stem, on_request
        self._answered = getattr(read_request(folder), "number", 0)
        self._ended = threading.Event()
        self._steps = steps
        self._step_s = SECONDS_BETWEEN_LOOKS

    def begin(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="tracedoc-requests", daemon=True).start()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def look(self) -> None:
        """Answer the request that lies there, once."""
        request = read_request(self._folder)
        if request is None or request.number <= self._answered:
            return
        self._answered = request.number
        target = self._folder / request.folder
        with contextlib.suppress(OSError):
            target.mkdir(exist_ok=True)
            if request.active:
                self._on_request(request)
            write_dumps(target, self._stem, self._sampled())

    def _sampled(self) -> list[str]:
        """The functions that the thread of the first step is in, most often first, and how often."""
        seen: Counter[str] = Counter()
        pause_s = min(self._step_s * STEPS_SAMPLED / _SAMPLES, _MOST_SECONDS_BETWEEN_SAMPLES)
        for _ in range(_SAMPLES):
            seen.update(script_frames(self._thread)[:1])
            if self._ended.wait(pause_s):
                break
        return [f"{frame} x{count}" for frame, count in seen.most_common()]

    def _watch(self) -> None:
        pause_s = SECONDS_BETWEEN_LOOKS
        counted, counted_at = self._steps(), time.monotonic()
        while not self._ended.wait(pause_s):
            before, before_at = counted, counted_at
            counted, now = self._steps(), time.monotonic()
            if counted > before:
                counted_at = now
                self._step_s = (now - before_at) / (counted - before)
                pause_s = min(max(self._step_s, LEAST_SECONDS_BETWEEN_LOOKS), SECONDS_BETWEEN_LOOKS)
            self.look()
