"""What the words of an answer mean; ``tracedoc explain WORD`` prints it."""

from __future__ import annotations

ANSWER_WORDS: dict[str, str] = {
    "analysed": (
        "An analysed step was captured completely: the next step's beginning is in the trace too. The "
        "median one stands for a rank, and the rank with the lower median for the run; every time and share "
        "of an answer refers to that step."
    ),
    "bound": (
        "A bound is the most that a fix could save: all of the time that it is about, and not more than the "
        "host's own work allows. The real saving is at most that. A replayed number is a prediction "
        "instead."
    ),
    "bubble": (
        "The bubble is the time in which a pipeline stage waits while the pipeline fills and drains. With p "
        "equal stages and m micro-batches it is (p - 1) / (m + p - 1) of the step; more micro-batches make "
        "it smaller."
    ),
    "compute-bound": (
        "The GPU computes for most of the step, and communication and input are hidden behind it. Faster "
        "kernels, lower precision or more GPUs make the step shorter; a faster link does not."
    ),
    "confidence": (
        "How far the capture supports the answer. high: every rank was captured, each with three complete "
        "steps or more. medium: ranks are missing, or there are fewer steps. low: no complete step was "
        "captured."
    ),
    "critical": (
        "A critical finding saves 15 % of the step or more. A warning saves 5 % or more; a note saves less, "
        "or its capture is too poor to say more. With medium confidence a finding is a warning at most, "
        "with low confidence a note. The critical path is another thing: tracedoc explain critical-path."
    ),
    "critical-path": (
        "The chain of work that decides how long the step takes: whatever is not on it could be slower or "
        "faster without changing the step. Its shares say what limits the step: host, compute, "
        "communication, input."
    ),
    "finding": (
        "A finding is a rule whose condition holds in this run: a cause, its cost, the places where it was "
        "measured, and fixes. tracedoc explain RULE RUN shows one with all its fixes."
    ),
    "idle": (
        "The GPU is idle while no kernel and no copy runs. Each piece of idle time has one cause: the data "
        "loader, memory allocation, synchronisation, compilation, launches that come too late, or another "
        "stream."
    ),
    "input-bound": (
        "The step waits for the data loader: the device is idle until the next batch is ready. More loader "
        "workers, or cheaper samples, shorten it."
    ),
    "launch-bound": (
        "The host launches kernels more slowly than the GPU finishes them, so the GPU runs dry between "
        "them. Larger batches, torch.compile, CUDA graphs or fused optimizers help; a faster GPU does not."
    ),
    "mfu": (
        "Model FLOPs utilisation: the arithmetic of the matrix products of a step, divided by what the GPU "
        "could do in that time at the peak rate of their precision."
    ),
    "note": ("See critical: tracedoc explain critical."),
    "plan": (
        "The plan lists fixes in the order in which they pay. Each was replayed on top of those before it, "
        "so its numbers are not added up twice."
    ),
    "preview": (
        "A preview rule is shown like any other, and never makes tracedoc diagnose --fail-on fail. It "
        "becomes stable when enough real runs have confirmed it."
    ),
    "replayed": (
        "The analysed step is played again from its trace with a fix made: kernels, launches and "
        "collectives keep their lengths and their order, and the step ends when the last one has run. The "
        "range covers what the trace does not fix, such as how much two streams slow each other."
    ),
    "straggler": (
        "A straggler is a rank that arrives late at collectives from work of its own, so that the others "
        "wait for it. The others show long collectives, the straggler short ones; a faster network changes "
        "nothing."
    ),
    "transfer": (
        "The part of a collective after its last rank has arrived: the data moves. Before that the other "
        "ranks wait. With the trace of one rank alone the two cannot be separated."
    ),
    "waiting": (
        "The part of a collective until its last rank arrives. It belongs to the rank that is late, not to "
        "the network: tracedoc explain straggler."
    ),
    "warm-up-in-window": (
        "Steps of the warm-up are left out: one in which kernels are loaded or compiled does not stand for "
        "the others, and the limit cold-start says where the capture holds no other."
    ),
    "warning": ("See critical: tracedoc explain critical."),
}
"""Explanation by word."""
