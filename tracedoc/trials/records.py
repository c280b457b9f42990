"""Outcomes of trials, kept as data: a line for each fix, so that predictions can be judged on real jobs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

import tracedoc
from tracedoc.cache import cache_folder
from tracedoc.diagnosis import Diagnosis
from tracedoc.predicted import Trials

RECORDS_NAME = "trials.jsonl"
"""The file in the user's cache folder."""


def record(found: Trials, diagnosis: Diagnosis, path: Path | None) -> None:
    """Add a line for each fix to the records in the user's cache, and to a file where one is named.

    No line names a host, a folder or the command. Raises :class:`OSError` for the named file alone.
    """
    run = diagnosis.run
    about = {
        "tracedoc": tracedoc.__version__,
        "device": run.device,
        "world_size": run.world_size,
        "strategy": run.strategy.family,
    }
    lines = [msgspec.json.encode({**about, **msgspec.to_builtins(one)}) + b"\n" for one in found.tried]
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(folder / RECORDS_NAME, lines)
    if path is not None:
        _append(path, lines)


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(lines)
