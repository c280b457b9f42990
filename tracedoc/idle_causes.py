"""What a device was idle for: the causes, and the words that reports have for them."""

from __future__ import annotations

from typing import NamedTuple

CAUSES = (
    "input", "allocator", "sync", "loading", "compile", "gc", "profiler", "operator", "launch", "dependency",
    "unknown",
)  # fmt: skip
"""In order of precedence: the first that holds at a nanosecond is its cause.

input: a data loader is waited for; allocator: device memory is allocated or freed; sync: the host waited for
the GPU, which therefore ran out of work (:mod:`tracedoc.timeline.syncs`); loading: a kernel, a module or a
library is called for the first time; compile: code is compiled, or a graph captured; gc: Python collects
garbage; profiler: the profiler's own work; operator: an operator computes on the CPU, and launches nothing
(:mod:`tracedoc.timeline.idle`); launch: the next GPU event was not launched yet, or the call that launches
it has not returned; dependency: it was launched, yet nothing runs (gaps inside a CUDA graph among them);
unknown: its launch was not seen.
"""

LATE_LAUNCH = ("optimizer", "dispatch", "python")
"""What "launch" consists of, by what the launching threads did.

optimizer: inside ``Optimizer.step``; dispatch: inside an operator or a runtime call; python: in neither, so
in Python or in code of another library.
"""


class CauseWords(NamedTuple):
    """The words for one cause: of the idle time, of what the host does in it, and of it in a CPU run."""

    idle: str
    host: str
    on_cpu: str = ""


WORDS = {
    "input": CauseWords("waiting for the data loader", "waits for input"),
    "allocator": CauseWords("memory allocation", "allocates or frees device memory"),
    "sync": CauseWords("the host blocks on the GPU", "waits for the GPU"),
    "loading": CauseWords("kernels and libraries are loaded", "loads kernels and libraries"),
    "operator": CauseWords("operators on the CPU", "computes in an operator on the CPU"),
    "compile": CauseWords("code is compiled", "compiles"),
    "gc": CauseWords("garbage collection", "collects garbage", "Python collects garbage"),
    "profiler": CauseWords("the profiler itself", "serves the profiler"),
    "launch": CauseWords("the next kernel is not launched yet", "launches"),
    "optimizer": CauseWords("not launched yet: the optimizer", "is in the optimizer"),
    "dispatch": CauseWords("not launched yet: operators", "is inside an operator"),
    "python": CauseWords("not launched yet: Python", "runs Python between operators"),
    "dependency": CauseWords("between launched kernels", "is ahead of the GPU"),
    "unknown": CauseWords(
        "cause unknown",
        "not visible in the trace",
        "no operator runs: Python, a sleep, or I/O",
    ),
}
"""A finding of its own speaks of most of them; ``on_cpu`` is there for those that no rule judges."""
