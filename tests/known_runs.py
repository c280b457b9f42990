"""Diagnoses of runs that no test changes, each made once: samples, and real traces beside the repository."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose


@cache
def diagnosis_of(path: Path, options: Options | None = None) -> Diagnosis:
    """The diagnosis of the run at a path."""
    return diagnose([path], options)
