"""What samples of a loader's workers show, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tracedoc.collector import loading
from tracedoc.collector.loading import forget_workers, read_workers, watch_loop


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(loading, "FIRST_S", 0.0001)
    monkeypatch.setattr(loading, "FIRST_WRITTEN", 1)
    return tmp_path


def decode(until: Any) -> None:
    """Stay until it is time."""
    while not until():
        pass


def fetch(until: Any) -> None:
    decode(until)


def get(until: Any) -> None:
    decode(until)


def loop_of(does: Any) -> Any:
    """A module as torch's, whose loop does something."""

    def _worker_loop(until: Any) -> None:
        does(until)

    return SimpleNamespace(_worker_loop=_worker_loop)


def test_a_worker_that_makes_a_batch_shows_its_functions_and_leaves_nothing(folder: Path) -> None:
    module = loop_of(fetch)
    watch_loop(module)
    seen: list[Any] = []
    module._worker_loop(lambda: seen or seen.extend(read_workers([os.getpid()])["stacks"]))
    frames = [frame for one in seen for frame in one["frames"]]
    first = decode.__code__.co_firstlineno
    assert any(f"test_loader_workers.py({first}): decode@" in frame for frame in frames)
    assert frames[-1].partition(": ")[2].startswith("fetch@")
    assert seen[0]["ms"] > 0
    assert list(folder.iterdir()) == []


def test_a_worker_that_waits_for_work_shows_nothing(folder: Path) -> None:
    module = loop_of(get)
    watch_loop(module)
    module._worker_loop(lambda: any(folder.iterdir()))
    assert not any(thread.name == "tracedoc-worker" for thread in threading.enumerate() if not thread.daemon)
    assert read_workers([os.getpid()])["stacks"] == []


def test_the_loop_keeps_its_name_by_which_it_is_started_anew() -> None:
    module = loop_of(fetch)
    name = module._worker_loop.__qualname__
    watch_loop(module)
    assert module._worker_loop.__qualname__ == name


def test_workers_are_added_up_and_damaged_files_passed_over() -> None:
    words = {"stacks": [{"ms": 3, "frames": ["data.py(1): load@2"]}], "made_ms": 3, "disk_ms": 1}
    files = [json.dumps({**words, "seen_ms": seen}) for seen in (4, 6)] + ["{", '[{"ms": "much"}]']
    for pid, text in enumerate(files, 1):
        Path(loading._path(pid)).write_text(text)
    stacks = [{"ms": 6.0, "frames": ["data.py(1): load@2"]}]
    found = {"stacks": stacks, "made_ms": 6.0, "disk_ms": 2.0, "made_frac": 0.75}
    assert read_workers([1, 2, 3, 4, 5]) == found
    forget_workers([1, 2, 3, 4, 5])
    assert read_workers([1, 2])["stacks"] == []


@pytest.mark.parametrize(("state", "waits"), [("D", True), ("S", False), ("R", False)])
def test_a_worker_whose_thread_cannot_be_interrupted_waits_for_a_disk(
    state: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "state_of", lambda path: state)
    module = loop_of(fetch)
    watch_loop(module)
    seen: dict[str, Any] = {}
    module._worker_loop(lambda: seen.update(read_workers([os.getpid()])) or seen["made_ms"] > 0)
    assert (seen["disk_ms"] == seen["made_ms"]) == waits
    assert seen["disk_ms"] == 0 or waits


def test_the_state_stands_behind_a_name_with_brackets(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (pt data) w) D 1 7 7 0")
    assert loading.state_of(str(tmp_path / "stat")) == "D"


def test_threads_switch_as_usual_after_a_sample() -> None:
    usual = sys.getswitchinterval()
    module = loop_of(fetch)
    watch_loop(module)
    module._worker_loop(lambda: read_workers([os.getpid()])["made_ms"] > 0)
    assert sys.getswitchinterval() == usual
