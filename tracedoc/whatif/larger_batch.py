"""What twice the batch saves of a step, and how much of that no other mend would save."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tracedoc.ledger import Range
from tracedoc.play.run_program import Scenario
from tracedoc.play.solver import Cyclic
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.communication.run import comm_split
from tracedoc.topics.host.rank import LAUNCH_NS, has_short_matrix_kernels, mean_kernel_ms
from tracedoc.topics.links.run import expected_transfer_gbps
from tracedoc.values import Unknown
from tracedoc.whatif.changes.change import Arguments, NotApplicable
from tracedoc.whatif.changes.kernels import double_batch
from tracedoc.whatif.changes.registry import parse_request
from tracedoc.whatif.ledger import book_of, taken_by
from tracedoc.whatif.predictions import predict
from tracedoc.whatif.removal import without

LAUNCHES, TRANSFER = "host.launch", "link.transfer"


def per_step_causes(run: RunView, causes: Sequence[str]) -> tuple[str, ...]:
    """Of causes that cost the same for few samples as for many those that do in this run.

    Launches do where a larger batch is what kernels lack to be longer than them: kernels, or matrix products
    alone, are shorter than a usual launch. Else it is the host that is slow.
    """
    digest = run.representative_digest
    mean, short = (mean_kernel_ms.of(digest), has_short_matrix_kernels.of(digest)) if digest else (None, None)
    few = short is True or (isinstance(mean, float) and mean * 1e6 < LAUNCH_NS)
    return tuple(one for one in causes if few or one != LAUNCHES)


def larger_batch(run: RunView, per_step: Collection[str]) -> Range | None:
    """What twice the batch saves of the step for the same samples: low, likely and high, in ms.

    Low and likely are at most what it saves of a step without all causes that have another mend. The causes
    ``per_step`` stay, which cost the same for few samples as for many, and what a link takes at its usual
    rate; where that rate, or how much is waiting, is not known, communication goes. ``None`` where it is not
    predicted.
    """
    book = book_of(run)
    if not book.replays:
        return None
    replay = book.replays[0]
    (today,) = predict(replay, [[parse_request("double-batch")]])
    if isinstance(today, NotApplicable):
        return None
    unsure = comm_split(run) != "transfer" or isinstance(expected_transfer_gbps(run), Unknown)
    mended = [
        one
        for one in book.entries
        if (unsure if one.id == TRANSFER else one.id not in per_step and not one.members)
    ]
    taken = [step for one in taken_by(mended) if (step := one.steps[0]) is not None]
    saved = {}
    for scenario in Scenario:
        base = replay.base[scenario]
        before = without(base.program, taken)
        after = double_batch(before, Arguments({}, replay.splits))
        if isinstance(after, NotApplicable):
            return None
        try:
            once_ns, twice_ns = (one.step_ns for one in replay.player.play([before, after]))
        except Cyclic:
            return None
        saved[scenario] = replay.step_ms * (once_ns - twice_ns / 2) / base.step_ns
    low, likely, high = today.gain_ms
    return min(low, *saved.values()), min(likely, saved[Scenario.LIKELY]), high
