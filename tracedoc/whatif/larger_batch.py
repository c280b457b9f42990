"""What twice the batch saves of a step, and how much of that no other mend would save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from tracedoc.ledger import TRANSFER, UNSPLIT, Range
from tracedoc.play.run_program import Scenario
from tracedoc.play.run_replay import RunReplay
from tracedoc.play.solver import Cyclic
from tracedoc.ranks.run_view import RunView
from tracedoc.topics.communication.run import comm_split
from tracedoc.topics.host.rank import LAUNCH_NS, has_short_matrix_kernels, mean_kernel_ms
from tracedoc.topics.links.run import expected_transfer_gbps
from tracedoc.values import Unknown
from tracedoc.whatif.changes.change import NotApplicable
from tracedoc.whatif.changes.kernels import double_batch
from tracedoc.whatif.changes.registry import parse_request
from tracedoc.whatif.ledger import book_of
from tracedoc.whatif.ledger_entries import Entry, taken_by
from tracedoc.whatif.predictions import predict
from tracedoc.whatif.removal import without

LAUNCHES = "host.launch"


def per_step_causes(run: RunView, causes: Sequence[str]) -> tuple[str, ...]:
    """Of causes that cost the same for few samples as for many those that do in this run.

    Launches do where a larger batch is what kernels lack to be longer than them: kernels, or matrix products
    alone, are shorter than a usual launch. Else it is the host that is slow.
    """
    digest = run.representative_digest
    mean, short = (mean_kernel_ms.of(digest), has_short_matrix_kernels.of(digest)) if digest else (None, None)
    few = short is True or (isinstance(mean, float) and mean * 1e6 < LAUNCH_NS)
    return tuple(one for one in causes if few or one != LAUNCHES)


class Doubled(msgspec.Struct, frozen=True):
    """What twice the batch saves of the step for the same samples: low, likely and high, in ms.

    Where the ``rate_is_known`` of the links the low end is surely saved; else it leaves communication out,
    which may have a mend of its own.
    """

    saves: Range
    rate_is_known: bool = True


def larger_batch(run: RunView, per_step: Collection[str]) -> Doubled | None:
    """What twice the batch saves of the step, or ``None`` where it is not predicted.

    Low and likely are at most what it saves of a step without all causes that have another mend. The causes
    ``per_step`` stay, which cost the same for few samples as for many, and what a link takes at its usual
    rate. Where that rate is not known communication goes for the low end alone, and where it is not known how
    much of it is waiting, for the likely one as well.
    """
    book = book_of(run)
    if not book.replays:
        return None
    replay = book.replays[0]
    (today,) = predict(replay, [[parse_request("double-batch")]])
    if isinstance(today, NotApplicable):
        return None
    low, likely, high = today.gain_ms
    left = (TRANSFER, UNSPLIT)
    mended = [one for one in book.entries if one.id not in (*per_step, *left) and not one.members]
    transfers = [one for one in book.entries if one.id in left]
    split = comm_split(run) == "transfer"
    rate_is_known = not transfers or (split and not isinstance(expected_transfer_gbps(run), Unknown))
    least = _saved_ms(replay, mended if rate_is_known else mended + transfers)
    usual = _saved_ms(replay, mended) if split and not rate_is_known else least
    if least is None or usual is None:
        return None
    saves = min(low, *least.values()), min(likely, usual[Scenario.LIKELY]), high
    return Doubled(saves, rate_is_known or not split)


def _saved_ms(replay: RunReplay, mended: Iterable[Entry]) -> dict[Scenario, float] | None:
    """What twice the batch saves of the step without some causes, in each scenario."""
    taken = [step for one in taken_by(mended) if (step := one[0]) is not None]
    saved = {}
    for scenario in Scenario:
        base = replay.base[scenario]
        before = without(base.program, taken)
        try:
            played = replay.player.play([before, double_batch(before)])
        except (Cyclic, NotApplicable):
            return None
        once_ns, twice_ns = (one.step_ns for one in played)
        saved[scenario] = replay.step_ms * (once_ns - twice_ns / 2) / base.step_ns
    return saved
