"""Every length of time by which one thing is told to wait for another, or not, with the reason for each.

A name stands for one value in all of tracedoc. Times are nanoseconds. What a run shows of itself (its usual
latency, its usual gap) is measured instead, within the bounds given here.
"""

from __future__ import annotations

NEVER = -(1 << 60)
"""Earlier than any time, with room to add to it."""

CLOCKS_NS = 20_000
"""The clocks of host and GPU agree this well: a call that returns this much before the GPU's last event ends
has waited for it."""

ROUNDED_NS = 1_000
"""Times may be rounded to a microsecond: what follows on a thread may seem to begin so much too early."""

EARLY_NS = 3_000
"""On one GPU, what waits may be recorded to start this much before the end of what it waited for: profilers
round times to a microsecond, and the last blocks of a kernel run on while the next one starts."""

EXPLAINED_NS = 3_000
"""A start that is later than all that explains it by no more than this is explained: launches and gaps
scatter so much."""

USUAL_LATENCY_NS = 10_000
LONGEST_LATENCY_NS = 50_000
"""From a launch to the start on an idle stream: 7 to 14 us are measured, up to 40 are usual somewhere; beyond
50 us something else waits."""

LONG_LAUNCH_NS = 1_000_000
"""A launch takes 5 to 10 us. One that lasts this long beside an idle GPU loads its kernel, or its thread was
taken off its core; with a full queue the GPU is busy meanwhile."""

SLOWEST_LAUNCH_NS = 100_000
"""From one launch to the next a host takes 5 to 50 us; one that takes longer is mostly at something else."""

QUIET_NS = 200_000
"""An operator that only launches, or only looks at shapes, takes less; one that calls nothing for this long
computes on the CPU."""

PAUSE_NS = 1_000_000
"""Between two calls of a host that launches lie microseconds of Python; after this it does something else."""

USUAL_GAP_NS = 1_500
LONGEST_GAP_NS = 10_000
"""From one event of a stream to the next that was queued: 1 to 3 us are measured."""

RELEASE_NS = 20_000
"""What starts, or returns, this soon after something ended, with nothing else to explain when, was waiting
for it."""

WINDOW_NS = 40_000
WINDOW_SHARE = 0.02
"""What may have held up a start that is late is looked for among what ended this long before it, at most, or
within this share of the delay."""

TIES_NS = 20_000
"""Of events that ended within this time of each other, the likelier kind was waited for."""

COPY_SLACK_NS = 15_000
"""The recorded end of a copy may lie this much behind the start of what waited for it."""

STAGED_SHARE = 0.05
"""A call may return before its copy from pageable memory has ended, by this share of the copy."""

ROOM_DELAY_NS = 100_000
TAIL_NS = 12_000
"""A start that is later by more than the first may have waited for room beside a kernel, whose last blocks
then run for the second beside it."""

ISSUE_LAG_NS = 6_000
"""From the end of what a collective waits for to its start, at most."""

RETURN_LAG_NS = 15_000
"""From the end of what a blocked call waits for to its return, at most."""

BLOCKED_NS = 20_000
"""A call that synchronises and returns sooner than this did not wait."""

FULL_QUEUE = 800
ROOM_IN_QUEUE_NS = 50_000
"""With this many launches outstanding, a launch that takes so long waits for room in the queue."""

SILENT_NS = 1_000_000
GOES_ON_NS = 300_000
"""A host of which nothing is recorded for the first, and that goes on this soon after all that it launched
has ended, was waiting for the GPU though no call says so."""

CPU_IDLE_NS = 100_000
"""A time without operators that is shorter is the host's own."""

CPU_GOES_ON_NS = 500_000
CPU_GOES_ON_SHARE = 0.1
"""A process that computes on shared cores goes on so soon after what it waited for has ended, or within this
share of the whole time."""

CPU_UNWOUND_SHARE = 0.25
"""A collective on the CPU may end after who waits for it goes on, by this share of its length: its thread has
lost its core to the one that it woke."""

CPU_START_NS = 100_000
"""What it takes at most until a thread of gloo that has nothing to do takes up what was issued."""

PREFETCHED_SHARE = 0.1
"""A kind of collective is called ahead of the compute before it, and waits for none of it, where more than
this share of it starts before that has ended. Of 46 runs with such starts, 43 that prefetch have them in more
than a fifth; with less, it is the host that is late, or a few times that do not fit."""
