"""Parts of ranks and launchers make one manifest, also where processes died or nodes share no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.run.manifest import (
    Manifest,
    join_manifests,
    merge_parts,
    rank_stem,
    read_manifest,
    write_json,
    write_manifest,
)


def rank(number: int, state: str = "complete", restart: int = 0, **more: object) -> dict[str, object]:
    stem = rank_stem(number, restart)
    file = {"file": f"{stem}.json.gz"} if state in ("complete", "partial") else {}
    return {
        "schema": 1,
        "part": "rank",
        "rank": number,
        "restart": restart,
        "level": "full",
        "host": "n0",
        "state": state,
        "reason": "",
        **file,
        **more,
    }


def node(ended: bool = True, host: str = "n0") -> dict[str, object]:
    return {"schema": 1, "part": "node", "run": "r", "host": host, **({"ended": "now"} if ended else {})}


def put(folder: Path, *parts: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        write_json(folder / f"{part['part']}-{number}.manifest.json", part)
    return folder


def files(manifest: Manifest | None) -> list[tuple[int, str]]:
    assert manifest is not None
    return [(entry.rank, entry.file) for entry in manifest.ranks]


def test_parts_merge_into_one_manifest_that_reads_back(tmp_path: Path) -> None:
    times = {"before": {"median_ms": 10.5, "steps": 10}, "during": {"median_ms": 12, "steps": 6}}
    steps = {"first": 6, "recorded": 6, "asked": 6, "total": 40}
    put(tmp_path, rank(1), rank(0, step_ms=times, steps=steps), node())
    written = write_manifest(tmp_path)
    read = read_manifest(tmp_path)
    assert read == written
    assert files(read) == [(0, "rank-0.json.gz"), (1, "rank-1.json.gz")]
    first = written.ranks[0]
    assert first.before is not None
    assert (first.before.median_ms, first.before.steps, first.after) == (10.5, 10, None)
    assert (first.steps_first, first.steps_recorded, first.steps_total) == (6, 6, 40)
    assert (written.state, written.run, len(written.nodes)) == ("complete", "r", 1)


def test_parts_that_no_launcher_merged_are_merged_when_read(tmp_path: Path) -> None:
    put(tmp_path, rank(0), rank(1, "partial"), node(ended=False))
    manifest = read_manifest(tmp_path)
    assert files(manifest) == [(0, "rank-0.json.gz"), (1, "rank-1.json.gz")]
    assert manifest is not None
    assert manifest.state == "partial"


def test_a_capture_under_way_is_lost_once_its_launcher_has_ended() -> None:
    under_way = merge_parts([rank(0, "recording"), node(ended=False)])["ranks"]
    lost = merge_parts([rank(0, "recording"), node()])["ranks"]
    assert isinstance(under_way, dict)
    assert isinstance(lost, dict)
    assert under_way["0"]["state"] == "recording"
    assert lost["0"]["state"] == "nothing"
    assert lost["0"]["reason"] == "the process ended without a word while its capture was recording"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["complete", "complete"], "complete"),
        (["complete", "nothing"], "partial"),
        (["partial", "partial"], "partial"),
        (["nothing", "nothing"], "nothing"),
        ([], "nothing"),
    ],
)
def test_a_run_is_as_complete_as_its_ranks(states: list[str], expected: str) -> None:
    parts = [rank(number, state) for number, state in enumerate(states)]
    assert merge_parts([*parts, node()])["state"] == expected


def test_ranks_that_were_not_asked_for_do_not_make_a_run_partial(tmp_path: Path) -> None:
    put(tmp_path, rank(0), rank(1, "nothing", level=""), node())
    manifest = write_manifest(tmp_path)
    assert manifest.state == "complete"
    assert [entry.rank for entry in manifest.silent] == [1]


def test_one_attempt_of_a_restarted_job_counts_for_all_ranks(tmp_path: Path) -> None:
    put(
        tmp_path,
        rank(0, "partial"),
        rank(1, "complete"),
        rank(0, "complete", restart=1),
        rank(1, "complete", restart=1),
        rank(0, "waiting", restart=2),
        rank(1, "waiting", restart=2),
        node(),
    )
    assert files(write_manifest(tmp_path)) == [
        (0, "rank-0.restart-1.json.gz"),
        (1, "rank-1.restart-1.json.gz"),
    ]


def test_a_damaged_part_costs_that_rank_only(tmp_path: Path) -> None:
    put(tmp_path, rank(0), node())
    (tmp_path / "rank-1.manifest.json").write_text('{"schema": 1, "par')
    assert files(write_manifest(tmp_path)) == [(0, "rank-0.json.gz")]


def test_folders_of_several_nodes_join(tmp_path: Path) -> None:
    a = write_manifest(put(tmp_path / "a", rank(0), node(host="n0")))
    b = write_manifest(put(tmp_path / "b", rank(1, host="n1"), rank(0, "nothing"), node(host="n1")))
    joined = join_manifests([a, b])
    assert joined is not None
    assert [(entry.rank, entry.host) for entry in joined.ranks] == [(0, "n0"), (1, "n1")]
    assert (joined.silent, len(joined.nodes), joined.state) == ((), 2, "partial")
    assert join_manifests([]) is None
    assert [entry.folder for entry in joined.ranks] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_file_that_cannot_be_written_leaves_nothing_half_done(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "gone" / "x.json", {"a": 2})
    path.rename(tmp_path / "kept.json")
    path.mkdir()
    with pytest.raises(OSError):
        write_json(path, {"a": 2})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept.json", "x.json"]


def test_a_rank_of_more_digits_than_any_job_has_is_left_out(tmp_path: Path) -> None:
    ranks = {number: {"file": f"{number[:9]}.json"} for number in ("2", "99999999", "9" * 5000)}
    write_json(tmp_path / "manifest.json", {"schema": 1, "ranks": ranks})
    assert files(read_manifest(tmp_path)) == [(2, "2.json")]
