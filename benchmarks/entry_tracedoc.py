"""Load one trace and print its capture budget: what the benchmark times as tracedoc."""

from __future__ import annotations

import sys

from tracedoc.timeline.build import build_timeline
from tracedoc.trace.kineto import read_trace


def main(path: str) -> None:
    """Print how the capture splits, in ms, and the length of every step."""
    timeline = build_timeline(read_trace(path))
    activity = timeline.activity
    assert activity is not None
    budget = activity.budget(activity.start_ns, activity.end_ns)
    print(budget)
    print([round((window.end_ns - window.start_ns) / 1e6, 3) for window in timeline.windows])


if __name__ == "__main__":
    main(sys.argv[1])
