"""What a process of tracedoc's own does with freed memory: page faults, as the system counts them."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tracedoc.executors.run import _WORTH_RETURNING

NAME, VERSION = platform.libc_ver()
pytestmark = pytest.mark.skipif(
    NAME != "glibc" or tuple(map(int, VERSION.split(".")[:2])) < (2, 33),
    reason="glibc alone keeps what was freed, and says how much since 2.33",
)

START = """\
import resource
from tracedoc.executors.run import give_back, keep_until_given_back

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work(size):
    before = pages()
    [bytearray(64 << 10) for _ in range(size >> 16)]
    give_back()
    return pages() - before
"""


def pages_of(script: str, repository: Path) -> int:
    """Return the number that a script prints."""
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(repository)},
        check=True,
        timeout=60,
    )
    return int(done.stdout)


def test_the_pages_of_a_small_file_are_used_again(repository: Path):
    size = _WORTH_RETURNING // 4
    script = f"keep_until_given_back(); work({size}); print(work({size}))"
    assert pages_of(script, repository) < size // mmap.PAGESIZE / 10


def test_the_pages_of_a_large_file_go_back(repository: Path):
    size = 2 * _WORTH_RETURNING
    script = f"keep_until_given_back(); work({size}); print(work({size}))"
    assert pages_of(script, repository) > size // mmap.PAGESIZE / 2


def test_an_array_takes_the_pages_of_a_smaller_one_before_it(repository: Path):
    """Of 1 to 10 MB, each larger than all before: the largest in all, not their sum."""
    script = "before = pages()\nfor mb in range(1, 11): bytearray(mb << 20)\nprint(pages() - before)"
    assert mmap.PAGESIZE * pages_of(script, repository) > 40 << 20
    assert mmap.PAGESIZE * pages_of(f"keep_until_given_back()\n{script}", repository) < 15 << 20
