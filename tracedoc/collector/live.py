"""What reaches a rank from outside while it runs: requests for captures and dumps, and that it has to end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

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


def write_dumps(folder: Path, stem: str, stack: Sequence[str]) -> None:
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


SIGTERM = "SIGTERM"
"""The reason given for a capture that a signal cut short."""

LONGEST_LAST_WORDS_S = 20.0
"""How long a process that is asked to end is kept for its trace: launchers kill after 30 seconds."""

_DONE = b"\0"


class EndWatch:
    """Calls ``save(reason)`` once, before SIGTERM takes effect or when ``seconds`` have passed.

    Python runs signal handlers between two bytecodes of the main thread, so never while that waits in a
    collective. A byte on the wakeup pipe arrives all the same, and a thread reads it. After ``save`` the
    signal does what it would have done without us: end the process, or call the handler that the job set.
    """

    def __init__(self, save: Callable[[str], None], seconds: float) -> None:
        self._save = save
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous: Any = None
        self._handled = threading.Event()
        self._catches = False
        self._owns_wakeup = False
        self._pid = os.getpid()
        self._busy = False
        self._pending = False

    def begin(self) -> None:
        """Start to watch; on the main thread for SIGTERM too, on others for the time alone."""
        if threading.current_thread() is threading.main_thread():
            self._catch()
        threading.Thread(target=self._wait, name="tracedoc-end-watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching, and put back what was there."""
        self._release()
        with contextlib.suppress(OSError):
            os.write(self._writer, _DONE)
            if not self._owns_wakeup:
                os.close(self._writer)

    def forked(self) -> None:
        """Undo in a forked child what the parent set up: its signals are its own."""
        self._release()

    @contextlib.contextmanager
    def held_back(self) -> Any:
        """Let a signal that arrives meanwhile, on this thread, take effect afterwards."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            if self._pending:
                self._pending = False
                self._save(SIGTERM)
                self._pass_on(None)

    def _catch(self) -> None:
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous == signal.SIG_IGN:
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._handle)
        self._catches = True
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if before != -1:
            # The application's event loop uses it: the hung case is not handled, so that the loop stays.
            signal.set_wakeup_fd(before)
        else:
            self._owns_wakeup = True

    def _release(self) -> None:
        # Only the main thread may; from another, the handler stays and passes signals on.
        if threading.current_thread() is not threading.main_thread():
            return
        if self._owns_wakeup:
            self._owns_wakeup = False
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writer):
                signal.set_wakeup_fd(current)
        if self._catches and signal.getsignal(signal.SIGTERM) == self._handle:
            self._catches = False
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled.set()
        if os.getpid() != self._pid:
            self._pass_on(frame)
        elif self._busy:
            self._pending = True
        else:
            self._save(SIGTERM)
            self._pass_on(frame)

    def _pass_on(self, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(signal.SIGTERM, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait(self) -> None:
        reason = ""
        while not reason:
            left = self._deadline - time.monotonic()
            ready = select.select([self._reader], [], [], max(0.0, left))[0]
            received = os.read(self._reader, 64) if ready else b""
            if bytes([signal.SIGTERM]) in received:
                reason = SIGTERM
            elif _DONE in received:
                os.close(self._reader)
                return
            elif not ready:
                reason = f"{self._seconds:g} s of recording had passed (--max-seconds)"
        # In a thread of its own, for it may hang with the device.
        saving = threading.Thread(target=self._save, args=(reason,), name="tracedoc-last-words", daemon=True)
        saving.start()
        saving.join(LONGEST_LAST_WORDS_S)
        if reason == SIGTERM and self._previous == signal.SIG_DFL and not self._handled.wait(0.5):
            # The main thread hangs, and Python's own way to restore a signal is the main thread's alone.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
