"""Find what is predicted to train faster than all of these GPUs in this framework: fewer, or another one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.planner.candidates import Candidate, with_checkpointing
from tracedoc.planner.choice import chosen_for, halved
from tracedoc.planner.setup import PARALLEL_FRAMEWORKS, PlanRequest, Question
from tracedoc.units import format_percent

CLEARLY = 1.1
"""How many times the tokens a second are worth changing machines or framework for."""
MANY_GPUS = 64
"""From so many GPUs on other frameworks are compared with torchtitan, whose models are written for it."""


class Alternative(msgspec.Struct, frozen=True):
    """A faster way to train the same: ``times`` as many tokens a second as the best on all of the GPUs.

    ``what`` says it in a sentence, ``option`` asks for it on the command line.
    """

    what: str
    option: str
    strategy: str
    checkpointing: bool
    times: float
    tokens_per_second: float


def alternatives(question: Question, request: PlanRequest, best: Candidate) -> Iterator[Alternative]:
    """Yield the fastest way with fewer GPUs and the fastest framework, where they are clearly faster.

    ``best`` is what is fastest of the framework on all of the GPUs.
    """
    if best.tokens_per_second is None or request.objective == "memory":
        return
    for tries in (_fewer(question, request), _frameworks(question, request)):
        fitting = ((what, option, chosen_for(q, r)) for what, option, q, r in tries)
        timed = [
            (one.tokens_per_second, what, option, one)
            for what, option, one in fitting
            if one is not None and one.tokens_per_second and not one.tight
        ]
        for rate, what, option, one in sorted(timed, key=lambda found: -found[0])[:1]:
            times = rate / best.tokens_per_second
            if times >= CLEARLY:
                title = with_checkpointing(one.title, one.checkpointing, selective=one.selective)
                faster = f"{times:.2g} times as fast" if times >= 2 else f"{format_percent(times - 1)} faster"
                text = f"{what} predicted {faster}: {title} ({option})."
                yield Alternative(text, option, one.strategy, one.checkpointing, times, rate)


_Try = tuple[str, str, Question, PlanRequest]


def _fewer(question: Question, request: PlanRequest) -> Iterator[_Try]:
    """Half of the nodes, half of those, and so on; then half of a node."""
    local = question.gpus_per_node
    machines = [(nodes * local, nodes) for nodes in halved(question.nodes) if question.nodes % nodes == 0]
    for gpus, nodes in [*machines, *((gpus, 1) for gpus in halved(local))]:
        place = f" in {'one node' if nodes == 1 else f'{nodes} nodes'}" if question.nodes > 1 else ""
        what = f"{gpus} GPU{'s' if gpus > 1 else ''}{place} {'are' if gpus > 1 else 'is'}"
        option = f"--gpus {gpus}" + (f" --nodes {nodes}" if question.nodes > 1 else "")
        yield what, option, question.changed(gpus=gpus, nodes=nodes), request


def _frameworks(question: Question, request: PlanRequest) -> Iterator[_Try]:
    if question.gpus == 1 or request.framework in PARALLEL_FRAMEWORKS:
        return
    other = ("PyTorch", "DeepSpeed")[request.framework != "deepspeed"]
    for name in (other, "torchtitan") if question.gpus >= MANY_GPUS else (other,):
        yield f"{name} is", f"--framework {name.lower()}", question, replace(request, framework=name.lower())
