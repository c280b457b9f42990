"""Notice that a job is asked to end, or that time is up, even while its main thread hangs in a collective."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

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
