"""The command line where its streams, its folder or its interpreter are not as usual."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tracedoc.__main__
from tracedoc.diagnosis_json import from_json

RUN = "synthetic_ddp_tiny_batch"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors are closed as POSIX does")


@pytest.fixture
def trace(sample_traces: Path) -> str:
    return str(sample_traces / RUN / "rank-0.json.gz")


def tracedoc_in(repository: Path, *words: str, flags: tuple[str, ...] = (), **options: Any) -> Any:
    return subprocess.run(
        [sys.executable, *flags, "-m", "tracedoc", *words],
        env=os.environ | {"PYTHONPATH": str(repository)},
        check=False,
        timeout=60,
        **{"capture_output": True, **options},
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_trouble(closed: tuple[int, ...], trace: str, repository: Path):
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    done = tracedoc_in(repository, "diagnose", trace, preexec_fn=close)
    assert done.returncode == 0
    assert done.stderr == b""
    assert bool(done.stdout) == (1 not in closed)


def test_closed_standard_input_is_empty(repository: Path):
    done = tracedoc_in(repository, "diagnose", "-", preexec_fn=lambda: os.close(0))
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: - is empty")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_an_error(trace: str, repository: Path):
    with open("/dev/full", "wb") as full:
        done = tracedoc_in(
            repository, "diagnose", trace, capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        b"error: the result cannot be written: No space left on device",
        b"hint: write it elsewhere: -o FILE",
    ]


def test_a_folder_that_was_removed_has_no_settings(trace: str, repository: Path, tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    done = tracedoc_in(repository, "diagnose", trace, cwd=folder, preexec_fn=folder.rmdir)
    assert (done.returncode, done.stderr) == (0, b"")


def test_python_may_leave_docstrings_out(trace: str, repository: Path):
    done = tracedoc_in(repository, "diagnose", trace, flags=("-OO", "-B"))
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are text there")
@pytest.mark.parametrize("to_file", [False, True])
def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(
    to_file: bool, trace: str, repository: Path, tmp_path: Path
):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/rank-0\xff.json.gz")
    shutil.copy(trace, odd)
    out = tmp_path / "out.json"
    done = tracedoc_in(repository, "diagnose", odd, *(("-o", str(out)) if to_file else ("-f", "json")))
    assert done.returncode == 0
    text = out.read_bytes() if to_file else done.stdout
    assert json.loads(text)["run"]["sources"] == [str(tmp_path / "rank-0?.json.gz")]
    assert from_json(text).run.sources == (str(tmp_path / "rank-0?.json.gz"),)


def test_an_interrupt_counts_from_the_first_import_on(monkeypatch: pytest.MonkeyPatch):
    class Interrupted:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "tracedoc.cli":
                raise KeyboardInterrupt

    for name in [name for name in sys.modules if name.startswith("tracedoc.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        tracedoc.__main__.main()
    assert caught.value.code == 128 + signal.SIGINT
