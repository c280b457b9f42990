"""Settings of DataLoaders, held by a variable or only by the loop."""

from __future__ import annotations

import pytest

from tracedoc.collector.frameworks import describe_loaders

data = pytest.importorskip("torch.utils.data", reason="describes live DataLoaders of torch")


def test_an_iterator_tells_what_its_loader_was_given() -> None:
    loader = data.DataLoader(list(range(12)), batch_size=4, shuffle=True, drop_last=True)
    iterator = iter(loader)
    (held,) = describe_loaders({"loader": [loader], "loader_iterator": [iterator]}, 16)
    (looped,) = describe_loaders({"loader": [], "loader_iterator": [iterator]}, 16)
    assert looped == {name: value for name, value in held.items() if name in looped}
    assert (looped["batch_size"], looped["num_workers"], looped["drop_last"]) == (4, 0, True)
    assert (looped["dataset"], looped["sampler"]) == ("list", "RandomSampler")


def test_no_more_loaders_are_described_than_asked_for() -> None:
    loaders = [data.DataLoader([1]) for _ in range(5)]
    assert len(describe_loaders({"loader": loaders}, 3)) == 3
