"""Changes of what collectives move, and of the link that they move it over."""

from __future__ import annotations

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import is_among
from tracedoc.trace.vocabulary import P2P_OPS
from tracedoc.whatif.changes.change import PASSES, Mask, NotApplicable, Parameter, as_change

KINDS = ("all", "gradients", "parameters")

OF_SAMPLES = ("all_to_all", *sorted(P2P_OPS))
"""Collectives that carry what is computed from samples: embeddings, tokens, activations of stages."""

_OF = Parameter("of", "which collectives: all, gradients, or parameters (gathers)", "all", choices=KINDS)


def collectives_of(program: RunProgram, kind: str) -> Mask:
    """Mask over parts: those of collectives of a kind (gradients, gathered parameters, or all)."""
    joins = program.layout.joins
    if kind == "gradients":
        return joins.gradients
    if kind == "parameters":
        return np.asarray(joins.named("all_gather") & ~joins.gradients)
    return np.ones(joins.event.size, dtype=bool)


def grow_with_batch(program: RunProgram) -> Mask:
    """Mask over parts: those of collectives that carry samples, or sums over ranks within a pass.

    Sums of a backward pass are such sums, and no parameters' gradients, where their group sums as many bytes
    in a forward pass: its ranks split layers.
    """
    layout, joins = program.layout, program.layout.joins
    part = layout.event_part[joins.event]
    within = joins.named("all_reduce") & is_among(part, PASSES) & ~joins.extra
    message = joins.nbytes * (len(joins.group_sizes) + 1) + joins.group
    of_layers = within & (part == Phase.FORWARD) & (joins.group >= 0) & (joins.nbytes > 0)
    split = is_among(message, message[of_layers])
    return np.asarray(joins.named(*OF_SAMPLES) | (within & (~joins.gradients | split)))


@as_change(
    _OF,
    Parameter("by", "the factor, below 1 for fewer bytes", 0.5, 0.01, 10.0),
    assuming="the latency of a call stays, and casts cost nothing",
)
def scale_bytes(program: RunProgram, of: str, by: float) -> RunProgram:
    """Collectives move this many times their bytes, as with compression or a smaller type."""
    chosen = collectives_of(program, of)
    if not chosen.any():
        what = "collective" if of == "all" else f"collective that moves {of}"
        raise NotApplicable(f"the step has no {what}")
    return with_bytes(program, chosen, by)


@as_change(
    _OF,
    Parameter("by", "the factor, above 1 for a faster link", 2.0, 0.1, 100.0),
    assuming="the latency of a call stays",
)
def faster_link(program: RunProgram, of: str, by: float) -> RunProgram:
    """The link moves bytes this many times as fast."""
    return scale_bytes(program, of, 1.0 / by)


def with_bytes(program: RunProgram, chosen: Mask, factor: float) -> RunProgram:
    """The program whose chosen collectives move this many times their bytes; latency stays."""
    # Another change may have been made before: what it left of the transfer is scaled.
    kept = np.minimum(program.split.fixed_ns, program.transfer)
    moved = np.rint((program.transfer - kept) * factor).astype(np.int64)
    return program.edited(transfer=np.where(chosen, kept + moved, program.transfer))
