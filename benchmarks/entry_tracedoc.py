"""Load traces and print how each capture and its steps split: what the benchmark times as tracedoc."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tracedoc.__main__ import collect_seldom

# As the command line does, before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
collect_seldom()

from tracedoc.executors.run import keep_until_given_back, run_each  # noqa: E402
from tracedoc.timeline import activity, launches, steps  # noqa: E402
from tracedoc.trace.kineto import read_trace  # noqa: E402


def breakdown(path: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the budget of a GPU's capture and of each of its steps, in ns."""
    trace = read_trace(path, on_bytes=on_bytes)
    host = steps.find_host_steps(trace)
    linked = launches.link_launches(trace)
    events = activity.classify_gpu_events(trace, linked)
    device = activity.busiest_device(events)
    stream = activity.compute_stream(events, device)
    position, _ = steps.assign_steps(trace, events, host)
    own = events.on(device)
    boundary = own.kernels & (own.stream == stream)
    windows = steps.gpu_windows(own, position[events.device == device], boundary, host)
    busy = activity.device_activity(events, device)
    extents = [(busy.start_ns, busy.end_ns), *((window.start_ns, window.end_ns) for window in windows)]
    return "\n".join(str(busy.budget(start, end)) for start, end in extents)


if __name__ == "__main__":
    keep_until_given_back()
    sizes = {path: os.stat(path).st_size for path in sys.argv[1:]}
    for path, words in run_each(breakdown, sizes, jobs=2):
        print(path, words)
