"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tracedoc.__main__ import collect_seldom
from tracedoc.judge import load
from tracedoc.judge.load import Vocabulary

# A busy machine is no reason to fail.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# No test depends on what was measured before, or leaves anything with the user.
os.environ["TRACEDOC_CACHE"] = "off"

# One worker a core: the threads of torch would wait for each other in loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of tests start processes: without bytecode each of them compiles tracedoc anew, which takes 0.7 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As in a process of tracedoc's own; what pytest keeps of thousands of tests is never looked through.
collect_seldom()


def pytest_collection_finish() -> None:
    """Leave what was collected to the end of the process."""
    gc.freeze()


REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def rule_files_are_read_once() -> Iterator[None]:
    """Hundreds of tests read all rules: a file is read again where it or the facts have changed."""
    kept: dict[tuple[object, ...], object] = {}
    read = load._read
    latest: list[object] = [None, None]

    def once(path: Path, known: Vocabulary) -> object:
        if not path.is_file():
            return read(path, known)
        if latest[0] is not known:
            latest[:] = known, hash(tuple(known.facts))
        state = path.stat()
        key = (path, state.st_ino, state.st_mtime_ns, state.st_size, latest[1])
        if key not in kept:
            kept[key] = read(path, known)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_read", once)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Return the folder of real traces beside the repository; skip the test where it is absent."""
    traces = REPOSITORY / ".." / "shared" / "traces"
    if not traces.is_dir():
        pytest.skip("the real traces (../shared/traces) are not on this machine")
    return traces.resolve()


@pytest.fixture(scope="session")
def sample_traces() -> Path:
    """Return the folder of sample runs that the repository ships."""
    return REPOSITORY / "sample_traces"
