"""Where in the step a cause is, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracedoc.play.path_walk import PARTS
from tracedoc.play.run_program import RunProgram
from tracedoc.ranks.code_places import beside_training
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Call
from tracedoc.topics.host.run import between_code, exchange_code, host_code, script_code, script_code_ms
from tracedoc.whatif.removal import OverSteps, Removal

MOST_SHARE = 0.5
"""A place that is named has this share of what a cause takes, and a rank of what the worst one has."""

IMPLIED = {
    "input.wait": "fetching a batch",
    "compute.recompute": "recomputation",
    "compute.optimizer": "the optimizer",
}
"""Where a cause is by its definition: that is no place to name."""


IN_THE_SCRIPT = ("order.reductions", "order.messages")
"""Of these, and of transfers, it is the function of a script that exchanges what ranks have by itself."""


def taken_by_rank(programs: Sequence[RunProgram], removals: Sequence[OverSteps]) -> npt.NDArray[np.float64]:
    """What a cause takes of the times of hosts and kernels, with the gaps before these, in ns.

    There is a row for each played step, and a column for each rank.
    """
    taken = np.zeros((len(programs), len(programs[0].layout.ranks)))
    for row, program in enumerate(programs):
        layout = program.layout
        of_point = layout.point_rank
        labels = dict.fromkeys(("dur", "gap"), layout.event_rank)
        labels |= dict.fromkeys(("lag", "own", "ready"), of_point)
        for one in filter(None, (over[row] for over in removals)):
            for name in labels.keys() & one.parts.keys():
                taken[row] += one.parts[name].spread(labels[name], taken.shape[1])
    return taken


def ranks_of(programs: Sequence[RunProgram], removals: Sequence[OverSteps]) -> tuple[int, ...]:
    """The ranks from which a cause takes most, of the programs of all played steps."""
    taken = taken_by_rank(programs, removals).sum(axis=0)
    worst, ranks = float(taken.max(initial=0.0)), programs[0].layout.ranks
    return tuple(rank for rank, ns in zip(ranks, taken.tolist(), strict=True) if ns >= MOST_SHARE * worst > 0)


def _code_of(run: RunView, cause: str, told_ms: float) -> str:
    """The function of the script that has most of a cause on the representative rank, "" for none known."""
    digest = run.representative_digest
    if cause == "compute.beside" and (beside := beside_training(run)) is not None:
        return str(beside.place)
    if cause.startswith("link.") or cause in IN_THE_SCRIPT:
        code = str(exchange_code(run))
        return code if code != "none" and run.source_steps else ""
    if cause not in ("host.pause", "host.between") or digest is None:
        return ""
    if not digest.is_cpu:
        code = str(host_code(run, digest))
        return "" if code == "none" else code
    if cause == "host.between":
        code = str(between_code(run, digest))
        return "" if code == "none" else code
    code_ms = script_code_ms(run, digest)
    most = isinstance(code_ms, float) and code_ms >= MOST_SHARE * told_ms
    return str(script_code(run, digest)) if most else ""


def place_of(
    run: RunView, cause: str, programs: Sequence[RunProgram], removals: Sequence[OverSteps], told_ms: float
) -> str:
    """Where a cause takes most of its time: in one stretch of the host, else in a part of the step; or "".

    Of what hosts do it is the function of the script, where that is known. Of several played steps it is the
    place with most of their time. ``told_ms`` is what the cause costs a step: where it takes more than that,
    most of what counts must lie there whichever that is.
    """
    code = _code_of(run, cause, told_ms)
    if code or cause == "host.between":  # which lies all over the step
        return code
    found: dict[str, float] = {}
    for place, program in enumerate(programs):
        parts = [part for one in removals if (part := one[place]) is not None]
        taken, where = _in_step(program, parts, told_ms * 1e6)
        found[where] = found.get(where, 0.0) + taken
    where = max(found, key=found.__getitem__, default="")
    return "" if where == IMPLIED.get(cause) else where


def _in_step(program: RunProgram, removals: Sequence[Removal], told_ns: float) -> tuple[float, str]:
    """What a cause takes of one step, in ns, and where."""
    layout, of_part = program.layout, program.layout.joins.event
    of_event, of_point = layout.event_rank, layout.point_rank
    columns = {
        "dur": (of_event, layout.event_part),
        "transfer": (of_event[of_part], layout.event_part[of_part]),
        "lag": (of_point, layout.part),
        "own": (of_point, layout.part),
    }
    taken = np.zeros(len(layout.ranks) * len(PARTS))
    at, longest = 0, 0
    for one in removals:
        for name, (rank, part) in columns.items():
            if name in one.parts:
                taken += one.parts[name].spread(rank * len(PARTS) + part, taken.size)
        lag = one.parts.get("lag")
        if lag is not None and lag.ns.max(initial=0) > longest:
            longest = int(lag.ns.max())
            at = int(np.arange(layout.points)[lag.where][lag.ns.argmax()])
    by_rank = taken.reshape(-1, len(PARTS))
    whole = float(taken.sum())
    if longest and longest >= MOST_SHARE * by_rank[of_point[at]].sum():
        return whole, _stretch(program, at)
    of_parts = by_rank.sum(axis=0)
    elsewhere = whole - of_parts.max()
    counts = min(whole, told_ns * np.count_nonzero(by_rank.sum(axis=1)))
    return whole, PARTS[int(of_parts.argmax())] if elsewhere <= (1 - MOST_SHARE) * counts > 0 else ""


def _stretch(program: RunProgram, at: int) -> str:
    """Where the host is before a point, and what it does there if a range says so."""
    layout = program.layout
    rank = int(layout.rank_of_point(np.array([at]))[0])
    base, note = int(layout.point_base[rank]), layout.notes[rank]
    part = PARTS[int(layout.part[at])]
    first = at == base or layout.part[at - 1] != layout.part[at] or layout.kind[at - 1] == Call.RANGE
    part = f"before {part}" if part and first else part
    label = dict(zip(note.label_at.tolist(), note.labels, strict=True)).get(at - base, "")
    return f"{part}: {label}" if part and label else part or label
