"""What each limit means, and how to capture a run without it."""

from __future__ import annotations

LIMITS: dict[str, str] = {
    "clocks-not-aligned": (
        "The clocks of the hosts differ by an amount that the matched collectives do not settle: the "
        "residual is more than 10 % of the median wait. Ranks on different hosts are then not compared in "
        "time, and waiting is not told from transfer between them. Time synchronisation (chrony, PTP) on "
        "the hosts helps."
    ),
    "collectives-not-matched": (
        "Some collectives of one rank have no partner in the traces of the others: ranks are missing, "
        "captured different steps, or the sequence numbers disagree. For these, waiting and transfer "
        "cannot be told apart. Capture the same steps on every rank of a group."
    ),
    "cpu-trace": (
        "The trace holds no GPU: compute is the time in operators on the stepping threads, communication "
        "is gloo. A healthy small CPU job is exposed for more than half of its step, so rules on shares of "
        "time are notes at most. Counts, loader waits and arrival order are judged as usual."
    ),
    "no-complete-step": (
        "No step lies whole within the capture. The longest one is judged from its first to its last GPU "
        "event, and every finding has low confidence. Capture at least three active steps: "
        "schedule(wait=1, warmup=2, active=4)."
    ),
    "no-gpu-activity": (
        "The trace holds no GPU events, or none of a kind that is understood, so nothing is said about "
        "device time; in particular not that the device is idle. Pass ProfilerActivity.CUDA to the "
        "profiler, and check that no other tool held the GPU's counters (CUPTI allows one)."
    ),
    "profiler-steps-rejected": (
        "The ProfilerStep ranges hold no backward pass, or their lengths differ more than tenfold, so they "
        "do not mark training steps. Steps come from the optimizer or are inferred. Call profiler.step() "
        "once at the end of each iteration."
    ),
    "steps-by-host-clock": (
        "Under 10 % of the kernels have a launch in the trace, so GPU events were given to steps by the "
        "host's clock. The host may run ahead by more than 100 ms; budgets of single steps are then "
        "shifted, while the budget of the whole capture is exact. Record CPU activity as well."
    ),
}
"""Explanation by code; ``tracedoc explain CODE`` prints it."""
