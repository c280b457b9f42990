"""What the codes of limits and the words of an answer mean."""

from __future__ import annotations

LIMITS: dict[str, str] = {
    "bad-job-file": (
        "The manifest names a file (a log of steps, or the step with Python stacks) that cannot be used: it "
        "lies outside the run's folder, is no regular file, is too large, or is damaged. What it would add, "
        "such as outliers among all steps, is unknown; the rest stands."
    ),
    "bad-manifest": (
        "manifest.json in the run's folder cannot be used. The run is read as if there were none: ranks "
        "come from the traces and from file names."
    ),
    "clocks-not-aligned": (
        "The clocks of the hosts differ by an amount that the matched collectives do not settle: their ends "
        "remain apart by more than a third of the longest one, or nothing connects two hosts. Ranks on "
        "different hosts are then not compared in time, and waiting is not separated from transfer between "
        "them. Clocks that are merely uncertain are no limit: waits longer than that are told from transfer, "
        "and gains have a margin. Time synchronisation (chrony, PTP) on the hosts helps."
    ),
    "cold-start": (
        "The GPU idles while kernels are launched that run for the first time: their code is loaded then, "
        "once in the life of the job. The step is longer than those that follow, and what looks like a slow "
        "host is not. Profile after some steps of warm-up (`tracedoc collect --wait`)."
    ),
    "collectives-disagree": (
        "Ranks of one process group recorded different operations, or different sizes, under one sequence "
        "number. Such a job is wrong or about to hang: one rank ran, say, an all-reduce where another ran a "
        "broadcast. Different operations are not matched. Look at the branches of the training loop that "
        "depend on the rank."
    ),
    "collectives-not-matched": (
        "Some collectives of one rank have no partner in the traces of the others, or would end before all "
        "their ranks have started: ranks are missing, captured different steps, or the sequence numbers "
        "disagree. For these, waiting and transfer cannot be separated. Capture the same steps on every "
        "rank of a group."
    ),
    "cpu-trace": (
        "The run holds no GPU activity: compute is the time in operators on the stepping threads, "
        "communication is gloo. A healthy small CPU job has exposed communication for more than half of its "
        "step, so findings about shares of time are notes at most. Counts, loader waits and arrival order "
        "count as usual."
    ),
    "damaged-events": (
        "Pieces of the file are not valid JSON and were skipped; the events around them were read. What "
        "the pieces recorded is missing, so idle time near them may be no idle time. Copies that broke "
        "off or files written by two processes look like this."
    ),
    "different-steps": (
        "The ranks were recorded from different steps on. Collectives are matched only where the recordings "
        "overlap. Give every rank the same schedule(wait, warmup, active), and call profiler.step() equally "
        "often on all of them."
    ),
    "idle-with-work-queued": (
        "For a large part of the step, work was queued and nothing seemed to run. Kernels inside CUDA "
        "graphs may be missing from the trace, or the GPU waited for another device. That idle time is "
        "unreliable, and so are the findings that rest on it."
    ),
    "impossible-times": (
        "Some events have a time or a duration that cannot be: not a number, beyond any clock, or "
        "negative. Events without a possible time are left out; those with a negative duration count as "
        "instants."
    ),
    "internal-error": (
        "A part of the answer failed by a fault of tracedoc's own. It is missing, and the rest stands "
        "without it. Run again with --debug, which shows where, and please report it."
    ),
    "job-failed": (
        "The job did not end well: the command's exit code was not 0. The message names the rank that ended "
        "first, as far as the launcher (torchrun) or the ranks themselves recorded it, with the number of "
        "the last step that it finished, counted from 0. What was captured before is analysed as usual."
    ),
    "job-unfinished": (
        "The manifest was merged from what the ranks had written so far, because `tracedoc collect` did not "
        "see the end of the job. It still runs, or it and the collector were killed together."
    ),
    "lost-kernels": (
        "Some launches have no kernel in the trace: the profiler's buffers overflowed, or it recorded some "
        "streams or devices only. What looks idle may have been busy, so no launch-bound finding is given. "
        "Record fewer steps at a time."
    ),
    "lost-rank": (
        "The process that read a trace was killed, or ran out of memory, also when it read that trace "
        "alone. The file is left out, and its rank counts as missing; the others stand. Systems end the "
        "largest process when memory gets short: read the file on a machine with more of it, or capture "
        "fewer steps."
    ),
    "missing-ranks": (
        "The run has more ranks than traces. Waiting and late ranks are known among those that are there, "
        "as far as their operations can be matched; where the traces name no groups of ranks, that takes "
        "all ranks. A missing one may be the one that the others wait for, and rank 0 is often not like the "
        "rest. Profile every rank, in the same steps."
    ),
    "no-complete-step": (
        "No step lies completely within the capture. The longest one is analysed from its first to its last "
        "GPU event, and every finding has low confidence. Capture at least three active steps: "
        "schedule(wait=1, warmup=2, active=4)."
    ),
    "no-gpu-activity": (
        "The trace holds no GPU events, so device time is unknown; an idle device is not implied. Pass "
        "ProfilerActivity.CUDA to the profiler, and check that no other tool held the GPU's counters (CUPTI "
        "allows one)."
    ),
    "ended-early": (
        "A rank's trace ends more than a step before those of the others: it crashed, was stopped, or called "
        "profiler.step() fewer times. Look at its log first; the steps that all ranks have are analysed."
    ),
    "not-a-trace": (
        "A file that was found beside the traces is not one, and was left out. Name the trace files "
        "themselves to choose other ones."
    ),
    "other-cycles": (
        "The folder holds several profiler cycles of each rank, as tensorboard_trace_handler writes them. "
        "Only one is analysed: the newest that most ranks have. Choose another with --cycle."
    ),
    "other-device": (
        "The two runs that are compared ran on different devices. What changed is that of the device and of "
        "everything else together. Compare runs on the same kind of machine."
    ),
    "other-strategy": (
        "The two runs that are compared split the model differently, such as DDP and FSDP. The parts of the "
        "step compare, collectives of one kind do not."
    ),
    "other-version": (
        "The two runs that are compared ran with different versions of PyTorch, CUDA or ROCm. Kernels and "
        "collectives may be others for that reason alone. Compare on one version, or change nothing else."
    ),
    "other-work": (
        "Fewer than half of the kernels' time has the same names in the two runs that are compared. They may "
        "be different models, batches or versions."
    ),
    "profiler-steps-rejected": (
        "The ProfilerStep ranges hold no backward pass, or their lengths differ more than tenfold, so they "
        "do not mark training steps. Steps come from the optimizer or are inferred. Call profiler.step() "
        "once at the end of each iteration."
    ),
    "rank-assumed": (
        "The traces do not name their rank, or all name the same one, so ranks come from file names or from "
        "their order. Ranks in the report may not be those of the job. Initialise torch.distributed before "
        "the profiler starts, or put the rank into the file name: rank-3.json.gz."
    ),
    "slower-after-capture": (
        "On every rank the median of ten steps after the capture is more than 2 % above that of ten steps "
        "before it. On a GPU the profiler can leave CUPTI attached: the collector sets TEARDOWN_CUPTI=1 "
        "against that. Later steps may also be other ones (longer sequences, a second phase of training)."
    ),
    "steps-by-host-clock": (
        "Under 10 % of the kernels have a launch in the trace, so GPU events were given to steps by the "
        "host's clock. The host may run ahead by more than 100 ms; budgets of single steps are then "
        "shifted, while the budget of the whole capture is exact. Record CPU activity as well."
    ),
    "steps-inferred": (
        "Neither ProfilerStep, nor an optimizer, nor a data loader marks the steps, so they are inferred "
        "from the kernels of the compute stream: what repeats from one end of the capture to the other is "
        "taken as a step. Lengths and shares hold; where a step begins may differ from the training loop. "
        "Give the profiler a schedule, and call profiler.step() once at the end of each iteration."
    ),
    "truncated-trace": (
        "The file ends in the middle: the job was stopped while it wrote, or a copy broke off. The complete "
        "events in it are used; the last step is incomplete. Events are not in order of time in a file, so "
        "earlier steps can lack events too. Copy it again, or capture fewer steps."
    ),
    "unfinished-export": (
        "The file is what an export left that did not finish. The complete events in it are read. Let the "
        "process live until the profiler has written its trace."
    ),
    "unknown-device": (
        "The trace records device activity of an unknown kind, such as a new accelerator. How busy that "
        "device was is not reported; what the host did is read. A newer tracedoc may know the device."
    ),
    "unread-file": (
        "A file could not be read at all and is left out; the others stand. Its rank counts as missing. "
        "The message says what is wrong with it."
    ),
}
"""Explanation by code; ``tracedoc explain CODE`` prints it."""


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
    "warning": ("See critical: tracedoc explain critical."),
}
"""Explanation by word."""
