"""Call a function in a thread, one call ahead of whoever takes the results."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class OneAhead:
    """A thread that makes the next result while the last one is used; results come in order.

    It gains time where the function leaves the interpreter to others, once a call: after each such stretch
    it waits until the other thread does the same. ``close`` ends the thread after the call that it is at.
    """

    def __init__(self, function: Callable[[], bytes]) -> None:
        self._function = function
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[bytes | Exception] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tracedoc-ahead", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Begin the next call."""
        self._asked.put(True)

    def answer(self) -> bytes:
        """Return what the oldest call returned, or raise what it raised."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the thread."""
        self._asked.put(False)
        self._thread.join()

    def _work(self) -> None:
        while self._asked.get():
            try:
                self._results.put(self._function())
            except Exception as problem:
                self._results.put(problem)
