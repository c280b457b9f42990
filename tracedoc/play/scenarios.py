"""Read a program fast, likely and slow: three answers to what a capture leaves open.

Of a transfer that is what its bytes take, what it takes whatever they are, and waiting that it may hold.
"""

from __future__ import annotations

from statistics import median

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import CollectiveParts, RunProgram, Scenario, Split
from tracedoc.ranks.bandwidth import fit_line
from tracedoc.spans import Int64Array
from tracedoc.step.program import UNKNOWN_SHARE, Cause
from tracedoc.timeline.collective_table import NONE
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.vocabulary import busbw_factor

UNMEASURED_CONTENTION = {Scenario.FAST: 0.0, Scenario.LIKELY: 0.06, Scenario.SLOW: 0.15}
CONTENTION_MARGIN = {Scenario.FAST: 0.7, Scenario.LIKELY: 1.0, Scenario.SLOW: 1.3}


LEAD_SHARE = 0.02
LEAD_NS = 1_000_000
PACED_SHARE = 0.98
"""Where every launch is early by this share of the step, and this long, yet the host takes as long as the
step, it does not set the pace: something that the trace does not show holds it back for the GPU."""


BEHIND_SHARE = 0.2
"""Workers that are waited for this share of the time between two batches likely cannot keep up."""


def as_scenario(program: RunProgram, scenario: Scenario) -> RunProgram:
    """The program in one scenario.

    The slow one keeps what the causes leave unexplained, and orders that may or may not be needed; the fast
    one leaves out what gathers of no known unit may be needed for, and that ranks that were not captured may
    send no sooner. A wait for a batch tells no more than that it was not there: in the slow scenario workers
    take as long for each as between two of them, and a shorter step waits longer; in the fast one what was
    waited is what handing over takes.
    """
    program = with_batches(_without_idle_hosts(program), scenario)
    contention = _contention(program, scenario)
    if scenario is Scenario.FAST:
        sure = program.active & ~is_among(program.layout.cause_kind, (Cause.USE, Cause.ANSWER))
        return program.edited(scenario=scenario, contention=contention, active=sure)
    if scenario is Scenario.LIKELY:
        return program.edited(scenario=scenario, contention=contention)
    return as_measured(program).edited(scenario=scenario, contention=contention)


def with_batches(program: RunProgram, scenario: Scenario) -> RunProgram:
    """The program whose loader workers keep up as a scenario has it: always, if they seem to, or never."""
    point, waited = program.layout.batch_point, program.layout.batch_ns
    if scenario is Scenario.LIKELY:
        few = waited < BEHIND_SHARE * program.ready[point]
        point, waited = point[few], waited[few]
    if scenario is Scenario.SLOW or not point.size:
        return program
    own, ready = program.own.astype(np.int64), program.ready.astype(np.int64)
    own[point], ready[point] = waited, NONE
    return program.edited(own=own, ready=ready)


def as_measured(program: RunProgram) -> RunProgram:
    """Return the program with all causes that may hold, and the delays that they leave unexplained."""
    return program.edited(active=np.ones_like(program.active), delay=program.layout.delay)


def _contention(program: RunProgram, scenario: Scenario) -> float:
    if program.layout.joins.event.size == 0:
        return 0.0
    known = [one.contention for one in program.layout.notes if one.contention != UNKNOWN_SHARE]
    if not known:
        return UNMEASURED_CONTENTION[scenario]
    return median(known) * CONTENTION_MARGIN[scenario]


def _without_idle_hosts(program: RunProgram) -> RunProgram:
    """Return the program with no work left on the hosts that are ahead of their GPU all the time."""
    layout = program.layout
    ahead = np.array(
        [
            one.lead_ns >= max(LEAD_NS, LEAD_SHARE * one.step_ns) and one.lag_ns >= PACED_SHARE * one.step_ns
            for one in layout.notes
        ],
        dtype=bool,
    )
    if not ahead.any():
        return program
    idle = np.repeat(ahead, np.diff(layout.point_base))
    return program.edited(lag=np.where(idle, 0, program.lag))


FIT_MARGIN = 0.3
"""A fitted latency is this share larger or smaller in the outer scenarios."""

HALF_RATE_BYTES = 4 * 2**20
"""A message of this size moves at half the rate of a large one, on the transports that hold it longest."""

WITHOUT_BYTES_NS = 30_000
"""What a collective takes without bytes, on a usual link: some 20 to 50 us."""


def split_transfers(joins: CollectiveParts, scenario: Scenario) -> Split:
    """The time of each transfer that stays when its bytes become fewer, in one scenario."""
    moved = _moved(joins, scenario)
    latency = np.zeros(joins.event.size, dtype=np.float64)
    key = joins.kind.astype(np.int64) * 4096 + joins.group + 1
    for one in distinct(key).tolist():
        mine = np.flatnonzero(key == one)
        latency[mine] = _latency(joins.nbytes[mine], moved[mine], scenario)
    kept = np.minimum(latency, moved)
    fixed = joins.transfer_ns - moved + kept
    return Split(np.rint(fixed).astype(np.int64), np.rint(kept).astype(np.int64))


TWO_SIZES_SPREAD = 1.5
"""Latency of a call is taken from a line through two sizes, if they differ so much."""

FIT_SHARES = (1.5, 1.0, 0.5)
"""Of a latency by two sizes, so much counts, from the most to the least."""

_ALIKE = (("all_gather", "reduce_scatter"), ("all_reduce",))
"""Collectives of one :func:`busbw_factor`, whose sizes make one line."""


def call_latency(program: RunProgram, scenario: Scenario) -> Int64Array:
    """Return the nanoseconds of each transfer that one call less saves: most of them in the fast scenario.

    Of all-gathers, reduce-scatters and all-reduces that is what a line through two sizes says, else the
    curve of the group's link, and at most all beyond its full rate. Where no rate is known, as between
    processes of a host, it may be all beyond the fastest transfer; between hosts where sizes tell nothing
    either. Other collectives save the latency of their :class:`Split`, which is least in the fast scenario.
    None saves more than its transfer.
    """
    joins, transfer_ns = program.layout.joins, program.transfer
    least, likely, most = (one.latency_ns.astype(np.float64) for one in joins.splits)
    for kinds in _ALIKE:
        chosen = joins.named(*kinds) & (joins.nbytes > 0) & (transfer_ns > 0)
        for group in distinct(joins.group[chosen]).tolist():
            mine = np.flatnonzero(chosen & (joins.group == group))
            sizes, moved = joins.nbytes[mine].astype(np.float64), transfer_ns[mine].astype(np.float64)
            link = joins.links[group] if 0 <= group < len(joins.links) else None
            if link is not None:
                likely[mine] = np.maximum(moved * link.half_bytes / (sizes + link.half_bytes), least[mine])
                if link.peak_gbps:
                    # Large messages that are slow are so for their bytes.
                    factor = busbw_factor(kinds[0], joins.group_sizes[group])
                    beyond = np.where(sizes < link.half_bytes, moved - factor * sizes / link.peak_gbps, 0)
                    most[mine] = np.maximum(most[mine], np.maximum(beyond, FIT_SHARES[0] * likely[mine]))
            line = fit_line(sizes, moved, fewest=2, spread=TWO_SIZES_SPREAD)
            if line is not None:
                fitted = max(line.latency_ns, 0.0)
                most[mine], likely[mine], least[mine] = (share * fitted for share in FIT_SHARES)
            if link is None or (not link.peak_gbps and line is None):
                # The link moves bytes as fast as in its fastest transfer, at least.
                beyond = moved - sizes * (moved / sizes).min()
                most[mine] = np.maximum(most[mine], beyond)
                likely[mine] = np.maximum(likely[mine], beyond / 2)
    found = {Scenario.FAST: np.maximum(most, likely), Scenario.LIKELY: likely, Scenario.SLOW: least}[scenario]
    kept: Int64Array = np.rint(np.minimum(found, transfer_ns)).astype(np.int64)
    return kept


def _moved(joins: CollectiveParts, scenario: Scenario) -> npt.NDArray[np.float64]:
    """Nanoseconds of each part that are transfer; where peers are missing, part of it may be waiting.

    Then all of it is transfer in the fast scenario, else only what the shortest of its size takes: the same
    bytes take the same time.
    """
    length = joins.transfer_ns.astype(np.float64)
    lone = np.flatnonzero((joins.op == NONE) | ~joins.complete)
    if lone.size == 0 or scenario is Scenario.FAST:
        return length
    least = length.copy()
    key = np.stack((joins.kind[lone].astype(np.int64), joins.nbytes[lone]))
    _, kind = np.unique(key, axis=1, return_inverse=True)
    kind = kind.ravel()
    shortest = np.full(int(kind.max()) + 1, np.inf)
    np.minimum.at(shortest, kind, length[lone])
    least[lone] = shortest[kind]
    return np.asarray(least)


def _latency(
    nbytes: Int64Array, moved: npt.NDArray[np.float64], scenario: Scenario
) -> npt.NDArray[np.float64]:
    known = nbytes > 0
    line = fit_line(nbytes[known], moved[known])
    if line is not None:
        factor = {Scenario.FAST: 1 - FIT_MARGIN, Scenario.LIKELY: 1.0, Scenario.SLOW: 1 + FIT_MARGIN}
        return np.full(nbytes.size, max(line.latency_ns, 0.0) * factor[scenario])
    if scenario is Scenario.FAST:
        return np.zeros(nbytes.size)
    share = np.where(known, HALF_RATE_BYTES / (HALF_RATE_BYTES + np.maximum(nbytes, 0)), 1.0)
    bound = share * moved
    return bound if scenario is Scenario.SLOW else np.minimum(bound / 2, WITHOUT_BYTES_NS)
