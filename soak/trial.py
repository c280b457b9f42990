"""Try one thing many times: a seed for each, a clock against hangs, and each kind of failure told once."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LONGEST_S = 30
"""Of processor time: on a busy machine a trial may have to wait for it."""

LONGEST_WAIT_S = 600
"""Of any time, for trials that wait for something that never comes."""


class HangsError(BaseException):
    """A trial took longer than :data:`LONGEST_S`; no ``except Exception`` can swallow it."""


@contextmanager
def clock() -> Iterator[None]:
    """Raise :class:`HangsError` in what takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangsError

    before = {number: signal.signal(number, ring) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def repeat(what: str, numbers: range, trial: Callable[[int], str]) -> int:
    """Call ``trial`` with every number; return how many calls raised what no caller expects.

    ``trial`` returns the outcome in a word, which is counted. Ctrl-C ends it early, with the figures so far.
    """
    outcomes: Counter[str] = Counter()
    failures: dict[str, list[int]] = {}
    slowest, began, tried = (0.0, -1), time.monotonic(), 0
    for done, number in enumerate(numbers, start=1):
        start = time.process_time()
        try:
            with clock():
                outcomes[trial(number)] += 1
        except KeyboardInterrupt:
            break
        except (Exception, HangsError) as error:
            place = _place(error)
            if place not in failures:
                print(f"FAILED {what} {number}: {place}", flush=True)
                traceback.print_exc(limit=-8)
            failures.setdefault(place, []).append(number)
        tried = done
        slowest = max(slowest, (time.process_time() - start, number))
        if done % 500 == 0:
            print(f"{what}: {done} of {len(numbers)}, {sum(map(len, failures.values()))} failed", flush=True)
    for place, failed in failures.items():
        print(f"{len(failed):6} x {place}  (numbers {failed[:6]})")
    count = sum(map(len, failures.values()))
    outcome = ", ".join(f"{word} {times}" for word, times in outcomes.most_common())
    print(
        f"{what}: {tried} tried in {time.monotonic() - began:.0f} s, {count} failed; {outcome}; "
        f"slowest {slowest[0]:.1f} s of processor time ({slowest[1]})",
        flush=True,
    )
    sys.stdout.flush()
    return count


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tracedoc/" in frame.filename]
    frame = own[-1] if own else last
    if isinstance(error, AssertionError):
        return f"{error}"[:160]
    return f"{type(error).__name__} at {frame.filename.rpartition('/tracedoc/')[2]}:{frame.lineno}"
