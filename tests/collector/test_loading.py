"""The watch over data loaders: who was waited for, what the kernel counts, and what batches hold."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.collector import loading
from tracedoc.collector.evidence import Evidence
from tracedoc.collector.loading import LoaderWatch, awaited, count_tokens, read_worker

torch = pytest.importorskip("torch", reason="watches DataLoaders of torch")
data = torch.utils.data


def masked(*lengths: int) -> Any:
    return torch.stack([(torch.arange(10) < length).long() for length in lengths])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.ones(2, 10, dtype=torch.long), "attention_mask": masked(4, 6)}, (10, 20)),
        ({"text": {"ids": torch.ones(2, 10, dtype=torch.long), "lengths": torch.tensor([4, 6])}}, (10, 20)),
        ({"input_ids": torch.ones(16, dtype=torch.long), "cu_seqlens": torch.tensor([0, 4, 16])}, (16, 16)),
        ([torch.ones(2, 10, dtype=torch.long), torch.ones(2, 10)], None),
        ({"images": torch.ones(2, 3, 4, 4), "mask": masked(4, 6)}, None),  # of a loss, perhaps
        ({"lengths": torch.tensor([400, 600]), "ids": torch.ones(2, 10, dtype=torch.long)}, None),
    ],
)
def test_tokens_are_told_by_masks_lengths_and_bounds(batch: Any, tokens: tuple[int, int] | None) -> None:
    assert count_tokens(batch) == tokens


def test_a_batch_on_a_device_is_not_touched() -> None:
    assert count_tokens({"attention_mask": masked(3, 4).to("meta")}) is None


@pytest.mark.parametrize(("tasks", "worker"), [({5: (2,)}, 2), ({5: (2, "data")}, 2), ({}, -1)])
def test_the_worker_of_the_next_batch_is_waited_for(tasks: dict[int, Any], worker: int) -> None:
    assert awaited(SimpleNamespace(_task_info=tasks, _rcvd_idx=5)) == worker


def test_a_loader_without_workers_waits_for_none() -> None:
    assert awaited(SimpleNamespace()) == -1


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> LoaderWatch:
    """A watch over loaders of this process, which are as before afterwards."""
    home = data.dataloader
    monkeypatch.setattr(home._BaseDataLoaderIter, "__next__", home._BaseDataLoaderIter.__next__)
    monkeypatch.setattr(home._BaseDataLoaderIter, "_next_index", home._BaseDataLoaderIter._next_index)
    monkeypatch.setattr(home.DataLoader, "_get_iterator", home.DataLoader._get_iterator)
    found = LoaderWatch()
    found.begin()
    return found


def test_a_loader_of_another_make_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the methods that are watched none is replaced, and the first step tells of the rest."""
    home = data.dataloader
    usual = home._BaseDataLoaderIter.__next__
    monkeypatch.delattr(home._BaseDataLoaderIter, "_next_index")
    rank: Any = SimpleNamespace(loader=LoaderWatch(), device=None)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert "framework" in Evidence.on_first_step(rank, optimizer)
    assert home._BaseDataLoaderIter.__next__ is usual


def test_batches_iterators_and_tokens_are_counted(watch: LoaderWatch) -> None:
    rows = [{"attention_mask": mask} for mask in masked(5, 5, 10, 10)]
    loader = data.DataLoader(rows, batch_size=2)
    assert len(list(loader)) == 2
    watch.open()
    assert len(list(loader)) == 2
    found, so_far = watch.close(), watch.so_far()
    assert found["tokens"] == [[10, 20], [20, 20]]
    assert so_far is not None
    assert (so_far["batches"], so_far["starts"], list(so_far["waits_ms"])) == (4, 2, ["-1"])
    assert (
        0 < so_far["index_ms"] < so_far["waits_ms"]["-1"] + 10
    )  # the end of each epoch is chosen, not waited for
    assert watch.tensors == [{"name": "attention_mask", "shape": [2, 10], "dtype": "int64", "device": "cpu"}]


def test_workers_are_counted_by_the_kernel_between_two_moments(
    watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 71 runs 30 ms and waits 10; 72 is gone and 73 new."""
    times = {71: {"ran_us": 5_000, "waited_us": 0}, 72: {"ran_us": 1, "waited_us": 1}}
    monkeypatch.setattr(loading, "read_worker", lambda pid: dict(times.get(pid, {})))
    monkeypatch.setattr(loading, "affinity_of", lambda pid: "0-1")
    iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=71), SimpleNamespace(pid=72)])
    watch.took(iterator, 0, 1_000_000, None)
    watch.open()
    times[71] = {"ran_us": 35_000, "waited_us": 10_000}
    times[73] = {"ran_us": 1, "waited_us": 1}
    iterator._workers[1] = SimpleNamespace(pid=73)
    watch.took(iterator, 1, 3_000_000, None)
    found, so_far = watch.close(), watch.so_far()
    assert found["workers"] == [{"ran_us": 30_000, "waited_us": 10_000}]
    assert (found["fresh"], found["cpus"]) == (1, ["0-1"])
    assert so_far is not None
    assert so_far["waits_ms"] == {"0": 1.0, "1": 3.0}


def test_what_the_kernel_counts_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "schedstat").write_text("5000000 2000000 9\n")
    (folder / "io").write_text("rchar: 900\nwchar: 1\nread_bytes: 4096\n")
    monkeypatch.setattr(loading, "_PROCESSES", tmp_path)
    assert read_worker(7) == {
        "ran_us": 5000,
        "waited_us": 2000,
        "rchar": 900,
        "read_bytes": 4096,
    }
    assert read_worker(8) == {}


def test_a_fork_tells_nothing(watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    watch.took(SimpleNamespace(), 0, 1, None)
    assert watch.so_far() is None
