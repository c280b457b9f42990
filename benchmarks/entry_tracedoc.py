"""Load traces and print how each capture and its steps split: what the benchmark times as tracedoc."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tracedoc.executors import begin_workers, run_each


def breakdown(path: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the budget of the capture in ms, and the length of every step."""
    from tracedoc.timeline.build import build_timeline
    from tracedoc.trace.kineto import read_trace

    timeline = build_timeline(read_trace(path, on_bytes=on_bytes))
    activity = timeline.activity
    assert activity is not None
    budget = activity.budget(activity.start_ns, activity.end_ns)
    return f"{budget} {[round((window.end_ns - window.start_ns) / 1e6, 3) for window in timeline.windows]}"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(breakdown(sys.argv[1]))
    else:
        from entry_tracedoc import breakdown  # by the name that workers can import

        sizes = {path: Path(path).stat().st_size for path in sys.argv[1:]}
        begin_workers(sizes, 2)
        for path, words in run_each(breakdown, sizes, jobs=2):
            print(path, words)
