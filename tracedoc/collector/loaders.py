"""Read the settings of DataLoaders, also of those that only a loop still holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracedoc.collector.probe import Plain, attributes, known, probe


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
