"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason to fail.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# No test depends on what was measured before, or leaves anything with the user.
os.environ["TRACEDOC_CACHE"] = "off"

REPOSITORY = Path(__file__).resolve().parents[1]


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
