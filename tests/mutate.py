"""Change definitions one at a time, as mutants.yaml lists them, and hold that a test fails for each.

    python tests/mutate.py [WORD...]

With words, only mutants whose names hold one of them. Each runs in a copy of the repository. A mutant
survives where its tests pass: then no test states the definition, and one is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

REPOSITORY = Path(__file__).resolve().parents[1]
PARTS = ("tracedoc", "rules", "tests", "sample_traces", "pyproject.toml")
MUTANTS = REPOSITORY / "tests" / "mutants.yaml"
LONGEST_S = 300
TESTS_FAILED = 1
"""What pytest exits with where tests ran and some failed; other codes mean that they could not run."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One definition read wrongly: ``mutant`` in place of ``line``, and the tests of which one must fail."""

    name: str
    file: str
    line: str
    mutant: str
    tests: str


def run_tests(copy: Path, tests: str) -> int:
    """Run tests in a copy of the repository; return pytest's exit code, 1 where they take too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED
    return done.returncode


def trial(copy: Path, mutant: Mutant) -> str:
    """Return what is wrong with the tests of a mutant, "" if one of them fails as it should."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.line) != 1:
        return f"{mutant.file} holds its line {text.count(mutant.line)} times: bring mutants.yaml up to date"
    path.write_text(text.replace(mutant.line, mutant.mutant), encoding="utf-8")
    try:
        code = run_tests(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == 0:
        return "survived: no test states this definition"
    return "" if code == TESTS_FAILED else f"the tests could not run (pytest ended with {code})"


def main(words: Sequence[str]) -> int:
    """Try the mutants with one of these words in their names; return how many are not killed."""
    mutants = msgspec.yaml.decode(MUTANTS.read_bytes(), type=list[Mutant])
    mutants = [one for one in mutants if not words or any(word in one.name for word in words)]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy, traces = Path(folder) / "repository", REPOSITORY.parent / "shared"
        copy.mkdir()
        if traces.is_dir():  # without the real traces, tests of them hold nothing
            (Path(folder) / "shared").symlink_to(traces)
        for part in PARTS:
            source = REPOSITORY / part
            if source.is_dir():
                shutil.copytree(source, copy / part)
            else:
                shutil.copy(source, copy / part)
        for tests in sorted({one.tests for one in mutants}):
            if run_tests(copy, tests):
                print(f"{tests} fails without a mutant", file=sys.stderr)
                return 1
        for mutant in mutants:
            began = time.monotonic()
            problem = trial(copy, mutant)
            print(f"{'ok' if not problem else 'FAILED':7}{time.monotonic() - began:5.1f} s  {mutant.name}")
            if problem:
                print(f"       {problem}", flush=True)
            wrong += bool(problem)
    print(f"{len(mutants)} mutants: {len(mutants) - wrong} killed, {wrong} not")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
