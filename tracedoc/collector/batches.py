"""Look once at what a DataLoader hands out: the shapes and types of one batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tracedoc.collector.probe import Plain, known, loaded, plain, probe

MAX_TENSORS = 32
MAX_DEPTH = 4


class BatchWatch:
    """Watches the next batch of any DataLoader of this process, then steps aside."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.tensors: list[Plain] = []

    def begin(self) -> None:
        """Watch from now on; without a DataLoader in use nothing happens."""
        home = getattr(loaded("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)
        if home is None:
            return
        usual = home.__next__

        def watched(iterator: Any) -> Any:
            batch = usual(iterator)
            if home.__next__ is watched:
                home.__next__ = usual
            if not self.tensors and os.getpid() == self._owner:
                self.tensors = probe(describe_batch, batch) or []
            return batch

        home.__next__ = watched


def describe_batch(batch: Any) -> list[Plain]:
    """Return name, shape and dtype of each tensor in a batch: nested lists and dicts are looked into."""
    found = []
    for name, tensor in _tensors(batch, "", 0):
        found.append(
            known(
                name=name,
                shape=[int(length) for length in tensor.shape],
                dtype=plain(tensor.dtype),
                device=plain(tensor.device),
                pinned=probe(tensor.is_pinned) or None,
            )
        )
        if len(found) == MAX_TENSORS:
            break
    return found


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    torch = loaded("torch")
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < MAX_DEPTH and isinstance(value, Mapping):
        for key in list(value)[:MAX_TENSORS]:
            yield from _tensors(value[key], f"{name}.{key}"[:80].lstrip("."), depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, list | tuple):
        for number, item in enumerate(value[:MAX_TENSORS]):
            yield from _tensors(item, f"{name}.{number}"[:80].lstrip("."), depth + 1)
