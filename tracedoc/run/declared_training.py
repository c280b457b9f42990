"""What a rank's manifest says of its training, as settings by name: model, optimizer, precision, batch.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Entry = Mapping[str, object]

PARAMETERS, TRAINED = "parameters", "trained parameters"
BLOCKS, BLOCK_PARAMETERS, BLOCK_CLASS = "blocks", "parameters of a block", "class of the blocks"
HELD_DTYPE, MIXED_PRECISION = "type of parameters", "mixed precision"
OPTIMIZER, CHECKPOINTING = "optimizer", "gradient checkpointing"
MICRO_BATCH, SEQUENCE = "sequences of a micro-batch", "tokens of a sequence"

_LONGEST_SETTING = 100


def training_settings(part: Entry) -> dict[str, str]:
    """The settings by name that one rank's part tells; what is missing or of another type is left out."""
    return dict(_settings(part))


def _settings(part: Entry) -> Iterator[tuple[str, str]]:
    framework = _entry(part, "framework")
    model = _entry(framework, "model")
    block = _entry(model, "block")
    counts = (
        (PARAMETERS, model.get("parameters")),
        (TRAINED, model.get("trained_parameters")),
        (BLOCKS, block.get("count")),
        (BLOCK_PARAMETERS, block.get("parameters")),
    )
    for name, value in (*counts, *_batch(part)):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60:
            yield name, str(value)
    optimizers = framework.get("optimizers")
    first = optimizers[0] if isinstance(optimizers, list) and optimizers else {}
    first = first if isinstance(first, dict) else {}
    dtypes = list(_entry(model, "parameter_dtypes"))
    texts = (
        (BLOCK_CLASS, block.get("class")),
        (HELD_DTYPE, dtypes[0] if dtypes else None),
        (MIXED_PRECISION, _mixed_precision(framework)),
        (OPTIMIZER, first.get("inner") or first.get("name")),
    )
    for name, value in texts:
        if isinstance(value, str) and 0 < len(value) <= _LONGEST_SETTING:
            yield name, value
    checkpointing = model.get("gradient_checkpointing")
    if isinstance(checkpointing, bool):
        yield CHECKPOINTING, "yes" if checkpointing else "no"


def _mixed_precision(framework: Entry) -> object:
    said = _entry(framework, "accelerate").get("mixed_precision")
    trainer = _entry(framework, "trainer")
    return next((short for short in ("bf16", "fp16") if said == short or trainer.get(short) is True), None)


def _batch(part: Entry) -> tuple[tuple[str, object], ...]:
    """Return the shape of the first tensor of whole numbers with two dimensions: the ids of tokens."""
    batch = part.get("batch")
    for tensor in batch if isinstance(batch, list) else ():
        if not isinstance(tensor, dict):
            continue
        shape, dtype = tensor.get("shape"), str(tensor.get("dtype"))
        if isinstance(shape, list) and len(shape) == 2 and dtype.endswith(("int64", "int32")):
            return (MICRO_BATCH, shape[0]), (SEQUENCE, shape[1])
    return ()


def _entry(entry: Entry, key: str) -> Entry:
    found = entry.get(key)
    return found if isinstance(found, dict) else {}
