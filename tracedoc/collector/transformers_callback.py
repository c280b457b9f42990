"""A callback of the Hugging Face Trainer that captures a few steps of the training."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from tracedoc.collector.inprocess import collect


def collect_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Return a callback of the Trainer: ``Trainer(..., callbacks=[collect_callback("runs/x")])``.

    The options are those of :func:`tracedoc.collect`.

    It counts optimizer steps, not the micro-batches that gradients are accumulated over.
    """
    capture = collect(folder, **options)

    class CollectCallback(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        """Steps a capture with the Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.step(kwargs.get("optimizer"))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.__exit__(None, None, None)

    return CollectCallback()
