"""Callbacks of the Trainers of Hugging Face and Lightning that capture a few steps of the training."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from tracedoc.collector.inprocess import collect


def transformers_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Hugging Face: ``Trainer(..., callbacks=[transformers_callback("runs/x")])``.

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


def lightning_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Lightning: ``Trainer(callbacks=[lightning_callback("runs/x")])``.

    The options are those of :func:`tracedoc.collect`.

    It counts optimizer steps (``trainer.global_step``), not the batches that gradients are accumulated over.
    Both names of the package will do: the one that is imported, else ``lightning``.
    """
    capture = collect(folder, **options)
    old = "lightning" not in sys.modules and "pytorch_lightning" in sys.modules
    home = import_module("pytorch_lightning" if old else "lightning.pytorch")

    class CollectCallback(home.Callback):  # type: ignore[misc, name-defined]
        """Steps a capture with the Trainer."""

        _seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._seen = trainer.global_step
            capture.__enter__()

        def on_train_batch_end(self, trainer: Any, *rest: Any, **named: Any) -> None:
            if trainer.global_step != self._seen:
                self._seen = trainer.global_step
                capture.step(next(iter(trainer.optimizers), None))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            capture.__exit__(None, None, None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            capture.__exit__(type(exception), exception, None)

    return CollectCallback()
