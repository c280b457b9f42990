"""What was made of files is kept for the next command, and never used for anything else."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tracedoc import cache, pipeline, worker
from tracedoc.diagnosis_json import to_json
from tracedoc.errors import InputError
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule_cache import kept_rules
from tracedoc.pipeline import Options, diagnose

RUN = "synthetic_ddp_tiny_batch"
OPTIONS = Options(cache=True, jobs=1)

Read = Callable[..., str]

RULE = """
id: long-steps
title: Longer steps than usual
topic: capture
status: preview
since: "0.2"
scope: run
needs: [kernels]
params:
  most: {{value: {most}, unit: ms, why: "of a test"}}
when: step_ms > most
severity: note
message: "A step of {{step_ms}}."
why: It is a test.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Turn the cache on, for files of any size."""
    place = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(place))
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)
    monkeypatch.setattr(pipeline, "kept_rules", load_rules)  # most tests look at what is kept of traces
    return place


@pytest.fixture
def run(sample_traces: Path, tmp_path: Path) -> Path:
    """Return a copy of a run whose files were written long ago."""
    copy = tmp_path / "run"
    shutil.copytree(sample_traces / RUN, copy)
    for file in copy.iterdir():
        os.utime(file, (1e9, 1e9))
    return copy


@pytest.fixture
def read(run: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return what diagnoses the run, and says which files were read for it."""
    reads: list[str] = []
    inner = worker.read_trace

    def noted(path: str, **options: object) -> object:
        reads.append(Path(path).name)
        return inner(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "read_trace", noted)

    def diagnosed(options: Options = OPTIONS) -> str:
        reads.clear()
        found = to_json(diagnose([run], options))
        return " ".join(sorted(reads)) + "|" + found

    return diagnosed


def files_of(answer: str) -> list[str]:
    return answer.split("|")[0].split()


def test_a_second_diagnosis_reads_no_trace_and_says_the_same(folder: Path, read: Read, run: Path) -> None:
    first, second = read(), read()
    assert files_of(first) == sorted(path.name for path in run.glob("rank*"))
    assert files_of(second) == []
    assert first.split("|", 1)[1] == second.split("|", 1)[1]


def test_a_changed_file_is_read_again_and_the_others_are_not(folder: Path, read: Read, run: Path) -> None:
    read()
    changed = sorted(run.glob("rank*"))[0]
    os.utime(changed, (1e9 + 5, 1e9 + 5))
    assert files_of(read()) == [changed.name]


def test_other_options_and_another_reader_are_kept_apart(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = files_of(read())
    assert files_of(read(Options(cache=True, jobs=1, steps=(1, 3)))) == everything
    monkeypatch.setattr(worker, "reader_name", lambda: "another")
    assert files_of(read()) == everything


def test_other_code_reads_again(folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = files_of(read())
    monkeypatch.setattr(cache, "_version", lambda: "0.2.0")
    assert files_of(read()) == everything


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"cut", b"other"])
def test_a_damaged_entry_is_read_again_and_replaced(folder: Path, read: Read, damage: bytes) -> None:
    whole = read()
    for entry in folder.iterdir():
        content = entry.read_bytes()
        entry.write_bytes(content[:-9] if damage == b"cut" else damage)
    if damage == b"other":
        for entry in folder.iterdir():
            entry.write_bytes(cache.encode(pipeline.ProgressEvent(1, 2, 3, 4)))
    assert read() == whole
    assert files_of(read()) == []


def test_a_file_that_was_just_written_is_not_kept(
    folder: Path, read: Read, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_SETTLED_S", 600.0)  # a busy machine takes its time to look
    for file in run.glob("rank*"):
        os.utime(file, (time.time(), time.time()))
    read()
    assert not folder.exists()


def test_small_files_pipes_and_missing_ones_are_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small.json"
    small.write_bytes(b"[]")
    os.utime(small, (1e9, 1e9))
    monkeypatch.setattr(cache, "LEAST_BYTES", 1 << 20)
    assert cache.slot_of(str(small)) is None
    assert cache.slot_of(str(tmp_path / "missing.json")) is None
    assert cache.slot_of(str(tmp_path)) is None


def test_errors_are_not_kept(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"x" * 5000)
    os.utime(broken, (1e9, 1e9))
    for _ in range(2):
        with pytest.raises(InputError, match="is not JSON"):
            diagnose([broken], OPTIONS)
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions are Unix's")
def test_entries_are_private_and_a_folder_that_others_write_is_not_used(folder: Path, read: Read) -> None:
    everything = files_of(read())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()} == {0o600}
    folder.chmod(0o777)
    assert files_of(read()) == everything


def test_the_cache_is_bounded(folder: Path, read: Read, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read()
    sizes = [entry.stat().st_size for entry in folder.iterdir()]
    for entry in folder.iterdir():
        os.utime(entry, (1e9, 1e9))
    monkeypatch.setattr(cache, "MOST_BYTES", sum(sizes))
    changed = sorted(run.glob("rank*"))[0]
    os.utime(changed, (1e9 + 5, 1e9 + 5))
    read()
    assert sum(entry.stat().st_size for entry in folder.iterdir()) <= sum(sizes)


def test_a_folder_that_cannot_be_made_costs_nothing(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)
    assert files_of(read()) == files_of(read())


def test_nothing_is_kept_unless_asked_for(folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    read(Options(jobs=1))
    assert not folder.exists()
    monkeypatch.setenv(cache.VARIABLE, "off")
    read()
    assert not folder.exists()


def test_the_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, "")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "tracedoc"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "tracedoc"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache.cache_folder() == tmp_path / "Library" / "Caches" / "tracedoc"


def test_rules_are_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pack = tmp_path / "pack"
    pack.mkdir()
    file = pack / "long-steps.yaml"
    file.write_text(RULE.format(most=3))
    os.utime(file, (1e9, 1e9))
    first = kept_rules((str(pack),))
    monkeypatch.setattr("tracedoc.judge.load.load_rules", None)
    assert kept_rules((str(pack),)) == first == load_rules((str(pack),))
    assert first[-1].params["most"].value == 3


def test_changed_rules_are_read_again(folder: Path, tmp_path: Path):
    pack = tmp_path / "pack"
    pack.mkdir()
    file = pack / "long-steps.yaml"
    for changed, most in enumerate((3, 4)):
        file.write_text(RULE.format(most=most))
        os.utime(file, (1e9 + changed, 1e9 + changed))
        assert kept_rules((str(pack),))[-1].params["most"].value == most


def test_rules_that_have_just_been_written_are_not_kept(folder: Path, tmp_path: Path):
    file = tmp_path / "long-steps.yaml"
    file.write_text(RULE.format(most=3))
    kept_rules((str(tmp_path),))
    assert not [*folder.glob("*")]
