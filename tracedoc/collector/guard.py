"""Give way to a profiler that the job opens itself: ours ends its session before that begins.

Two profiler sessions at a time end badly: the second silently takes over, and exporting the emptied first
one crashes the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class ForeignProfilers:
    """The profiler sessions that are not ours: whether one is open, and a call before one opens."""

    def __init__(self, torch: ModuleType, before_one_opens: Callable[[], None]) -> None:
        self.seen = 0
        self.active = False
        self._torch = torch
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before_one_opens = before_one_opens
        self._own_thread = 0

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Mark what this thread does to a profiler as our own doing."""
        before, self._own_thread = self._own_thread, threading.get_ident()
        try:
            yield
        finally:
            self._own_thread = before

    def one_is_open(self) -> bool:
        """True if a profiler of the job is armed or records; asked while ours does neither."""
        autograd = self._torch.autograd
        return bool(self._open) or autograd.profiler._is_profiler_enabled or autograd._profiler_enabled()

    def watch(self) -> None:
        """Wrap the two points that every profiler session of torch goes through, and its end."""
        profiler = self._torch.autograd.profiler
        prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__
        start = profiler._run_on_profiler_start

        def _prepare_trace(session: Any) -> Any:
            self._opens(session)
            return prepare(session)

        def __exit__(session: Any, *exception: Any) -> Any:  # noqa: N807
            try:
                return leave(session, *exception)
            finally:
                self._open.discard(session)
                self.active = bool(self._open)

        def _run_on_profiler_start() -> Any:
            # emit_nvtx and emit_itt have no _prepare_trace.
            self._opens(None)
            return start()

        profiler.profile._prepare_trace = _prepare_trace
        profiler.profile.__exit__ = __exit__
        profiler._run_on_profiler_start = _run_on_profiler_start

    def _opens(self, session: Any) -> None:
        if self._own_thread == threading.get_ident():
            return
        if session is not None:
            self.seen += 1
            self._open.add(session)
            self.active = True
        self._before_one_opens()
