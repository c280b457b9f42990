"""What DataLoaders bring: their settings, and the shapes and types of one batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tracedoc.collector.probe import Plain, attributes, known, loaded, plain, probe


def describe_loaders(live: Mapping[str, list[Any]], most: int) -> list[Plain]:
    """Return the settings of the live DataLoaders, ``most`` of them at most.

    ``for batch in DataLoader(...)`` keeps only the iterator, so without a DataLoader those are described.
    """
    loaders = live.get("loader", [])[:most]
    if loaders:
        return [describe_loader(one) for one in loaders]
    return [describe_iterator(one) for one in live.get("loader_iterator", [])[:most]]


def describe_loader(loader: Any) -> Plain:
    """Return the settings of one DataLoader."""
    found = attributes(
        loader,
        "batch_size",
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "drop_last",
        "timeout",
        "in_order",
    )
    sampler = getattr(loader, "sampler", None)
    replicas = probe(getattr, sampler, "num_replicas")
    inner = probe(lambda: int(loader.batch_sampler.batch_size))
    return known(
        **{"batch_size": inner, **found},
        batches=probe(len, loader),
        dataset=type(getattr(loader, "dataset", None)).__name__,
        sampler=type(sampler).__name__,
        sampler_replicas=replicas,
        collate=probe(lambda: getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)),
        start_method=probe(lambda: loader.multiprocessing_context.get_start_method()),
    )


def describe_iterator(iterator: Any) -> Plain:
    """Return the settings that the iterator of a DataLoader has taken over from it."""
    names = (
        "_num_workers",
        "_pin_memory",
        "_persistent_workers",
        "_prefetch_factor",
        "_drop_last",
        "_timeout",
    )
    sampler: Any = getattr(iterator, "_index_sampler", None)
    inner = getattr(sampler, "sampler", sampler)
    return known(
        batch_size=probe(lambda: int(sampler.batch_size)),
        **attributes(iterator, *names, "_in_order"),
        dataset=type(getattr(iterator, "_dataset", None)).__name__,
        sampler=type(inner).__name__,
        sampler_replicas=probe(getattr, inner, "num_replicas"),
    )


MAX_TENSORS = 32
BATCH_DEPTH = 4


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
    elif depth < BATCH_DEPTH and isinstance(value, Mapping):
        for key in list(value)[:MAX_TENSORS]:
            yield from _tensors(value[key], f"{name}.{key}"[:80].lstrip("."), depth + 1)
    elif depth < BATCH_DEPTH and isinstance(value, list | tuple):
        for number, item in enumerate(value[:MAX_TENSORS]):
            yield from _tensors(item, f"{name}.{number}"[:80].lstrip("."), depth + 1)
