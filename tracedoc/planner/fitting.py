"""Say whether a run that is known would fit, and how much faster it would be, if it were changed."""

from __future__ import annotations

import msgspec

from tracedoc.errors import InputError
from tracedoc.planner.activations import block_activations
from tracedoc.planner.layouts import STRATEGIES, data_parallel
from tracedoc.planner.memory import SPREAD, model_states
from tracedoc.planner.setup import OPTIMIZERS, PRECISIONS, Question, Training
from tracedoc.planner.shape import shape_from_parameters

ADVICE = ("do-not-shard", "do-not-reshard", "larger-micro-batch", "no-checkpointing", "optimizer-on-gpu")


class KnownRun(msgspec.Struct, frozen=True):
    """What is known of a run: ``None`` and "" where it is not.

    ``strategy`` is an id of :data:`tracedoc.planner.layouts.STRATEGIES`. ``peak_bytes`` is the measured
    peak of one GPU, everything in it; ``activation_bytes`` what of it comes and goes with the micro-batch,
    if that was measured. ``tokens`` and ``sequence`` are those of one GPU and micro-batch.
    """

    parameters: int | None
    gpus: int
    memory_bytes: float | None
    peak_bytes: float | None
    strategy: str
    nodes: int = 1
    trained_parameters: int | None = None
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    offload: str = "none"
    micro_batch: int | None = None
    sequence: int | None = None
    activation_bytes: float | None = None
    checkpointing: bool = False


class Fit(msgspec.Struct, frozen=True):
    """Whether a change surely fits on a GPU. ``fits`` is ``None`` where that is not known, for ``reason``.

    ``needed_bytes`` is the peak after the change, ``added_bytes`` what the change adds to the measured one;
    it ``fits`` where that leaves :data:`tracedoc.planner.memory.SPREAD` of what is added.
    """

    fits: bool | None
    needed_bytes: float | None
    memory_bytes: float | None
    added_bytes: float | None
    reason: str = ""


def what_fits(run: KnownRun, change: str) -> Fit:
    """Whether a run would still fit after one of :data:`ADVICE`.

    "do-not-shard" is DDP, "do-not-reshard" keeps gathered parameters until backward, "larger-micro-batch"
    doubles the micro-batch, "no-checkpointing" keeps all activations, "optimizer-on-gpu" ends offloading. A
    change that means nothing for the run (unsharded already, nothing offloaded) is not known to fit. Raises
    :class:`InputError` for names that are not known.
    """
    if change not in _ADDED:
        raise InputError(f"no change is called {change!r}", f"known: {', '.join(ADVICE)}")
    if run.strategy and run.strategy not in STRATEGIES:
        raise InputError(f"no strategy is called {run.strategy!r}", f"known: {', '.join(STRATEGIES)}")
    for value, name in ((run.memory_bytes, "the memory of the GPU"), (run.peak_bytes, "the peak of the run")):
        if value is None:
            return _unknown(run, f"{name} is not known")
    added = _ADDED[change](run)
    if isinstance(added, str):
        return _unknown(run, added)
    assert run.peak_bytes is not None
    assert run.memory_bytes is not None
    surely = run.peak_bytes + added * (1 + SPREAD) <= run.memory_bytes
    return Fit(surely, run.peak_bytes + added, run.memory_bytes, added)


def _unknown(run: KnownRun, reason: str) -> Fit:
    return Fit(None, None, run.memory_bytes, None, reason)


def _states(run: KnownRun, strategy: str) -> float | str:
    """Return the bytes of model states on one GPU, with the copies beside them, or why they are not known."""
    if run.parameters is None or run.parameters < 100_000:
        return "the parameters of the model are not known"
    if not run.strategy:
        return "the strategy of the run is not known"
    if run.precision not in PRECISIONS or run.optimizer not in OPTIMIZERS:
        return "the precision or the optimizer of the run is not known"
    return _state_bytes(_question(run), strategy, run)


def _question(run: KnownRun) -> Question:
    training = Training(
        precision=run.precision,
        optimizer=run.optimizer,
        offload=run.offload,
        sequence=run.sequence or 1,
        micro_batch=run.micro_batch or 1,
    )
    return Question(shape_from_parameters(run.parameters or 0), training, run.gpus, run.nodes, 1.0)


def _state_bytes(question: Question, strategy: str, run: KnownRun) -> float:
    """Return the states; of frozen parameters only their 16-bit weights are there."""
    all_states = model_states(question, data_parallel(question, strategy))
    total = all_states.states + all_states.copies
    if run.trained_parameters is None or run.parameters is None or run.trained_parameters >= run.parameters:
        return total
    share = run.trained_parameters / run.parameters
    weights = (run.parameters - run.trained_parameters) * PRECISIONS[run.precision].compute
    parts = question.gpus if "parameters" in STRATEGIES[strategy].split else 1
    return share * total + weights / parts


def _instead(run: KnownRun, strategy: str) -> float | str:
    before, after = _states(run, run.strategy), _states(run, strategy)
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else str(after)
    return after - before


def _do_not_shard(run: KnownRun) -> float | str:
    if run.strategy in ("ddp", "single"):
        return "nothing is sharded"
    return _instead(run, "ddp")


def _do_not_reshard(run: KnownRun) -> float | str:
    kept = {"full-shard": "shard-grad-op", "hsdp": "shard-grad-op", "zero-3": "zero-2"}.get(run.strategy)
    if kept is None:
        return "the parameters are not gathered twice"
    if run.strategy == "hsdp" and isinstance(run.parameters, int):
        # Inside the node the shards stay as they are; what is gathered is held beside them.
        return float(run.parameters * PRECISIONS[run.precision].compute)
    return _instead(run, kept)


def _activations(run: KnownRun) -> float | str:
    """The bytes that come and go with the micro-batch: as measured, else all that is not model states."""
    if run.activation_bytes is not None:
        return run.activation_bytes
    states = _states(run, run.strategy)
    if isinstance(states, str):
        return states
    assert run.peak_bytes is not None
    # Buffers and gathered units are counted as if they grew: that errs towards "does not fit".
    return max(0.0, run.peak_bytes - states)


def _no_checkpointing(run: KnownRun) -> float | str:
    if not run.checkpointing:
        return "activations are not checkpointed"
    if run.parameters is None or run.parameters < 100_000 or not (run.sequence and run.micro_batch):
        return "parameters or tokens of a micro-batch are not known"
    question = _question(run)
    layout = data_parallel(question, run.strategy or "ddp")
    blocks = question.model.blocks
    # One block is there already, as it is computed again.
    return (blocks - 1) * block_activations(question, layout)


def _optimizer_on_gpu(run: KnownRun) -> float | str:
    if run.offload == "none":
        return "nothing is offloaded"
    states = _states(run, run.strategy)
    if isinstance(states, str):
        return states
    question = _question(run)
    return model_states(question, data_parallel(question, run.strategy)).host


_ADDED = {
    "do-not-shard": _do_not_shard,
    "do-not-reshard": _do_not_reshard,
    "larger-micro-batch": _activations,
    "no-checkpointing": _no_checkpointing,
    "optimizer-on-gpu": _optimizer_on_gpu,
}
"""For each change the bytes that it adds on a GPU, or why that is not known."""
