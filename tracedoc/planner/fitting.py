"""Say whether a run that shards its model would fit on its GPUs without."""

from __future__ import annotations

import msgspec

from tracedoc.planner.layouts import data_parallel
from tracedoc.planner.memory import SPREAD, model_states
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters


class Fit(msgspec.Struct, frozen=True):
    """Whether a change surely fits on a GPU. ``fits`` is ``None`` where that is not known, for ``reason``.

    ``added_bytes`` is what the change adds to the measured peak; it ``fits`` where that leaves
    :data:`tracedoc.planner.memory.SPREAD` of what is added.
    """

    fits: bool | None
    added_bytes: float | None
    reason: str = ""


def unsharded(
    strategy: str,
    *,
    parameters: int | None,
    gpus: int,
    memory_bytes: float | None,
    peak_bytes: float | None,
    precision: str = "bf16-mixed",
) -> Fit:
    """Whether a run of a sharding strategy that uses AdamW would still fit as DDP.

    ``strategy`` is an id of :data:`tracedoc.planner.layouts.STRATEGIES`; ``peak_bytes`` the measured peak of
    one GPU, everything in it. What is ``None`` is not known.
    """
    for value, name in ((memory_bytes, "the memory of the GPU"), (peak_bytes, "the peak of the run")):
        if value is None:
            return Fit(None, None, f"{name} is not known")
    if parameters is None or parameters < 100_000:
        return Fit(None, None, "the parameters of the model are not known")
    assert memory_bytes is not None
    assert peak_bytes is not None
    question = Question(shape_from_parameters(parameters), Training(precision=precision), gpus, 1, 1.0)
    now, then = (model_states(question, data_parallel(question, name)) for name in (strategy, "ddp"))
    added = then.states + then.copies - now.states - now.copies
    return Fit(peak_bytes + added * (1 + SPREAD) <= memory_bytes, added)
