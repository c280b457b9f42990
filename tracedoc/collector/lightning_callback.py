"""A callback of the Lightning Trainer that captures a few steps of the training."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from tracedoc.collector.inprocess import collect


def collect_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Return a Lightning callback: ``Trainer(callbacks=[collect_callback("runs/x")])``.

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
