"""A manifest and the files that it names come from strangers: nothing of them ends or stalls a diagnosis."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

import tracedoc
from tracedoc.run.job import read_job
from tracedoc.run.manifest import MAX_MANIFEST_BYTES, merge_parts, parse_manifest, read_manifest
from tracedoc.run.steplog import HEADER, MAGIC, MAX_LENGTH_NS, RECORD, STEP, parse_step_log
from tracedoc.run.untrusted import MissingError, UnusableError, inside, plain_json, read_bounded
from tracedoc.testing import parse_lanes
from tracedoc.testing.cases import draw_log


def run_with(folder: Path, part: dict[str, object], **manifest: object) -> Path:
    """Write a rank's trace, and a manifest in which the rank says ``part``."""
    folder.mkdir(exist_ok=True)
    (builder,) = parse_lanes("compute 0-60", ranks=1)
    builder.write(folder / "rank-0.json")
    entry = {"file": "rank-0.json", "environment": {}, **part}
    content = {"schema": 1, "ranks": {"0": entry}, **manifest}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def codes(folder: Path) -> list[str]:
    return [limit.code for limit in tracedoc.diagnose([folder]).limits]


@pytest.mark.parametrize("key", ["source", "step_log"])
@pytest.mark.parametrize("name", ["a\0b", "../other.steps", "/dev/zero", "..", "x" * 9000])
def test_a_name_that_is_no_file_of_the_run_is_a_limit(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "other.steps").write_bytes(draw_log("100 x50"))
    run = run_with(tmp_path / "run", {key: name})
    assert "bad-job-file" in codes(run)
    job = read_job(read_manifest(run))
    assert job is not None
    assert (job.sources, job.ranks[0].log) == ({}, None)


@pytest.mark.parametrize("key", ["source", "step_log"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, key: str) -> None:
    run = run_with(tmp_path / "run", {key: "pipe"})
    os.mkfifo(run / "pipe")
    assert "bad-job-file" in codes(run)


@pytest.mark.parametrize("target", ["/dev/zero", "../secret", "step-log"])
def test_a_link_to_elsewhere_or_to_itself_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_bytes(draw_log("100 x50"))
    run = run_with(tmp_path / "run", {"step_log": "step-log"})
    (run / "step-log").symlink_to(target)
    assert "bad-job-file" in codes(run)


def test_a_log_larger_than_any_is_not_read(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", {"step_log": "rank-0.steps"})
    with (run / "rank-0.steps").open("wb") as file:
        file.write(draw_log("100 x50"))
        file.truncate(1 << 40)
    assert "bad-job-file" in codes(run)


@pytest.mark.parametrize("name", ["rank-0.steps", "\ud800.steps"])
def test_a_log_that_is_not_there_is_nothing_to_speak_of(tmp_path: Path, name: str) -> None:
    assert "bad-job-file" not in codes(run_with(tmp_path / "run", {"step_log": name}))


def test_several_files_that_are_not_used_make_one_limit(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", {"step_log": "..", "source": "a/b"})
    (limit,) = [one for one in tracedoc.diagnose([run]).limits if one.code == "bad-job-file"]
    assert (
        limit.message == "the source of rank 0 is not the name of a file of the run's folder, and 1 more such"
    )


@pytest.mark.parametrize("name", ["a\0b", "\ud800.json", "../" * 2000])
def test_a_trace_of_an_impossible_name_costs_its_entry_only(tmp_path: Path, name: str) -> None:
    assert tracedoc.diagnose([run_with(tmp_path / "run", {"file": name})]).budget is not None


def test_the_manifest_may_be_a_pipe_or_endless(tmp_path: Path) -> None:
    for number, make in enumerate((os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir)):
        run = run_with(tmp_path / str(number), {})
        (run / "manifest.json").unlink()
        make(run / "manifest.json")
        assert "bad-manifest" in codes(run)


def test_a_part_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.manifest.json")
    assert read_manifest(tmp_path) is None


def test_parts_beyond_the_size_of_all_are_left_out(tmp_path: Path) -> None:
    part = {"schema": 1, "part": "rank", "rank": 0, "file": "rank-0.json"}
    (tmp_path / "a.manifest.json").write_text(json.dumps(part))
    with (tmp_path / "b.manifest.json").open("w") as file:
        file.write(json.dumps({**part, "rank": 1}))
        file.truncate(MAX_MANIFEST_BYTES)
    found = read_manifest(tmp_path)
    assert found is not None
    assert [entry.rank for entry in found.ranks] == [0]


def test_parts_of_any_types_merge() -> None:
    for odd in (None, True, -1, 1.5, "x", [], {}, [[]], {"a": []}):
        for key in ("rank", "state", "level", "restart", "file", "part", "ended", "run", "reason"):
            part = {"schema": 1, "part": "rank", "rank": 0, key: odd}
            merged = merge_parts([part, {"schema": 1, "part": "node", key: odd}])
            assert parse_manifest(json.dumps(merged).encode(), "manifest.json").path == "manifest.json"


def test_numbers_and_texts_of_a_stranger_become_plain() -> None:
    deep = "[" * 40 + "]" * 40
    text = f'{{"a": 1e999, "b": {"9" * 30}, "c": "\\ud83d", "d": NaN, "e": "{"x" * 20_000}", "f": {deep}}}'
    plain = plain_json(text.encode())
    assert isinstance(plain, dict)
    assert (plain["a"], plain["b"], plain["c"], plain["d"], len(plain["e"])) == (
        None,
        None,
        "?",
        None,
        10_000,
    )
    assert "[" * 31 + "None" in repr(plain["f"])
    assert plain_json(b"[1e308, -1e308, 1e18, -0.5]") == [None, None, 1e18, -0.5]
    for bad in (b"", b"\xff\xfe", b"[" * 100_000, b"9" * 5000):
        with pytest.raises(ValueError):
            plain_json(bad)


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert read_bounded(path, 4) == b"four"
    with pytest.raises(UnusableError, match="larger"):
        read_bounded(path, 3)
    with pytest.raises(UnusableError, match="regular"):
        read_bounded(tmp_path, 3)
    with pytest.raises(MissingError):
        read_bounded(tmp_path / "none", 3)
    (tmp_path / "link").symlink_to("file")
    assert inside(tmp_path, "link") == tmp_path / "link"


def test_records_of_impossible_times_are_left_out() -> None:
    header = HEADER.pack(MAGIC, 0, 65_536, 0)
    day = MAX_LENGTH_NS
    times = [(day, day), (-1, 0), (5, 6), (day + 2, day + 1), (2**62, 1), (2**63 - 1, -(2**63)), (9, 9)]
    records = [RECORD.pack(number, STEP, end, length) for number, (end, length) in enumerate(times)]
    log = parse_step_log(header + b"".join(records))
    assert log is not None
    assert log.of_kind(STEP) == [(6, 9, 9), (0, day, day)]
    assert parse_step_log(struct.pack("<8sIIq", MAGIC, 2**32 - 1, 0, 0)) is None
