"""Paths become trace files with the right hints, and never silently fewer of them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracedoc.errors import InputError
from tracedoc.run.discover import TraceFile, discover

TRACE = '{"schemaVersion": 1, "traceEvents": []}'


def put(directory: Path, *names: str, text: str = TRACE) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if ".gz" in name else data)


def names(files: tuple[TraceFile, ...]) -> list[str]:
    return [Path(file.path).name for file in files]


@pytest.mark.parametrize(
    ("name", "rank", "order"),
    [
        ("rank-3.json.gz", 3, None),
        ("rank_12.json", 12, None),
        ("rank3.pt.trace.json", 3, None),
        ("worker3_step_12.1694128201557.pt.trace.json.gz", 3, 1694128201557),
        ("trace_r5.json", 5, None),
        ("rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 0, None),
        ("node7_11147.1694128201557123456.pt.trace.json", None, 1694128201557123456),
        ("rank2_step40.json", 2, 40),
        ("trace.json", None, None),
        ("frank3.json", None, None),
    ],
)
def test_names_hint_at_rank_and_order(tmp_path: Path, name: str, rank: int | None, order: int | None) -> None:
    put(tmp_path, name)
    (file,) = discover([str(tmp_path)]).files
    assert (file.rank_hint, file.order_hint) == (rank, order)
    assert not file.named


def test_a_folder_that_may_not_be_listed_is_an_error_and_below_another_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a/rank-0.json", "b/rank-1.json")
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return iter(listed(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="b cannot be read: Permission denied"):
        discover([str(tmp_path / "b")])
    run = discover([str(tmp_path)])
    assert names(run.files) == ["rank-0.json"]
    assert [limit.code for limit in run.limits] == ["not-a-trace"]
    assert "b cannot be read: Permission denied" in run.limits[0].message


def test_ranks_come_in_natural_order_and_other_files_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path, "rank-10.json.gz", "rank-2.json", "notes.txt", ".hidden.json", "diagnosis.json")
    run = discover([str(tmp_path)])
    assert names(run.files) == ["rank-2.json", "rank-10.json.gz"]
    assert run.limits == ()


def test_cycles_of_one_process_share_a_group(tmp_path: Path) -> None:
    put(tmp_path, "host_11.1700000000001.pt.trace.json", "host_11.1700000000002.pt.trace.json")
    first, second = discover([str(tmp_path)]).files
    assert first.group_hint == second.group_hint
    assert first.order_hint is not None
    assert second.order_hint is not None
    assert first.order_hint < second.order_hint


def test_rank_may_stand_in_the_name_of_the_folder(tmp_path: Path) -> None:
    put(tmp_path, "rank0/trace.json", "rank1/trace.json")
    assert [file.rank_hint for file in discover([str(tmp_path)]).files] == [0, 1]


def test_tensorboard_folders_are_looked_into(tmp_path: Path) -> None:
    put(tmp_path, "plugins/profile/2024_05_01/node0_1.pt.trace.json")
    assert names(discover([str(tmp_path)]).files) == ["node0_1.pt.trace.json"]


def test_leftovers_of_a_crash_count_only_where_the_rank_has_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "rank-0.json", "rank-0.json.tmp", "rank-1.json.part")
    run = discover([str(tmp_path)])
    assert names(run.files) == ["rank-0.json", "rank-1.json.part"]
    assert [limit.code for limit in run.limits] == ["unfinished-export"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("<html>", "not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "LFS"),
        ('{"schema": "1.1", "nodes": []}', "execution trace"),
        ('{"learning_rate": 0.1}', "not a trace"),
    ],
)
def test_what_is_no_trace_is_left_out_and_reported(tmp_path: Path, text: str, why: str) -> None:
    put(tmp_path, "rank-0.json")
    put(tmp_path, "rank-1.json", text=text)
    run = discover([str(tmp_path)])
    assert names(run.files) == ["rank-0.json"]
    (limit,) = run.limits
    assert limit.code == "not-a-trace"
    assert why in limit.message


def test_a_named_file_is_taken_whatever_its_name_or_content(tmp_path: Path) -> None:
    put(tmp_path, "odd.name", text="nonsense")
    (file,) = discover([str(tmp_path / "odd.name"), str(tmp_path / "odd.name")]).files
    assert file.named


def test_standard_input_is_a_file() -> None:
    (file,) = discover(["-"]).files
    assert file.path == "-"


def test_manifest_tells_ranks(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "b.json")
    put(
        tmp_path,
        "manifest.json",
        text='{"schema": 1, "ranks": {"1": {"file": "a.json", "host": "n0"}, "0": {"file": "b.json"}}}',
    )
    run = discover([str(tmp_path)])
    assert [file.manifest_rank for file in run.files] == [1, 0]
    assert run.manifest is not None
    assert [(r.rank, r.host) for r in run.manifest.ranks] == [(0, ""), (1, "n0")]


def test_a_damaged_manifest_is_a_limit(tmp_path: Path) -> None:
    put(tmp_path, "rank-0.json")
    put(tmp_path, "manifest.json", text="{")
    run = discover([str(tmp_path)])
    assert [limit.code for limit in run.limits] == ["bad-manifest"]
    assert names(run.files) == ["rank-0.json"]


def test_nothing_to_read_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no traces") as caught:
        discover([str(tmp_path)])
    assert caught.value.hint
    with pytest.raises(InputError, match="does not exist"):
        discover([str(tmp_path / "absent.json")])
    with pytest.raises(InputError, match="no path"):
        discover([])


def test_a_folder_without_traces_says_what_it_holds_instead(tmp_path: Path) -> None:
    put(tmp_path, "trace.json", text="<!DOCTYPE html>")
    with pytest.raises(InputError, match=r"holds no traces: .*trace\.json is not JSON"):
        discover([str(tmp_path)])


SILENT = '{"schema": 1, "ranks": {"0": {"file": "", "state": "nothing", "reason": "the job ended early"}}}'


def test_a_run_in_which_nothing_was_captured_says_why_and_is_not_its_baseline(tmp_path: Path) -> None:
    put(tmp_path, "manifest.json", text=SILENT)
    put(tmp_path / "baseline", "rank-0.json")
    with pytest.raises(InputError, match=r"nothing was captured in .*: rank 0: the job ended early"):
        discover([str(tmp_path)])


def one_rank(rank: int) -> str:
    return f'{{"schema": 1, "ranks": {{"{rank}": {{"file": "rank-{rank}.json"}}}}}}'


def test_a_folder_of_runs_is_not_one_run(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        put(tmp_path / name, "rank-0.json")
        put(tmp_path / name, "manifest.json", text=one_rank(0))
    put(tmp_path / "without-manifest", "rank-0.json")
    with pytest.raises(InputError, match="holds 3 runs") as caught:
        discover([str(tmp_path)])
    assert str(tmp_path) in caught.value.hint


def test_a_folder_of_the_nodes_of_a_run_is_one_run_with_their_manifests(tmp_path: Path) -> None:
    for rank, name in enumerate(("node-a", "node-b")):
        put(tmp_path / name, f"rank-{rank}.json")
        put(tmp_path / name, "manifest.json", text=one_rank(rank))
    run = discover([str(tmp_path)])
    assert [file.manifest_rank for file in run.files] == [0, 1]
    assert run.manifest is not None
    assert [entry.rank for entry in run.manifest.ranks] == [0, 1]


def test_real_folders_give_their_ranks(shared_traces: Path) -> None:
    files = discover([str(shared_traces / "dlrm_8rank_v100")]).files
    assert [file.rank_hint for file in files] == list(range(8))
    run = discover([str(shared_traces / "format_variants")])
    assert len(run.files) == 14
    assert [limit.code for limit in run.limits] == ["not-a-trace"]


def test_manifests_of_several_folders_are_one(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        put(tmp_path / name, f"rank-{number}.json")
        text = f'{{"schema": 1, "ranks": {{"{number}": {{"file": "rank-{number}.json", "host": "{name}"}}}}}}'
        put(tmp_path / name, "manifest.json", text=text)
    run = discover([str(tmp_path / "a"), str(tmp_path / "b")])
    assert run.manifest is not None
    assert [(entry.rank, entry.host) for entry in run.manifest.ranks] == [(0, "a"), (1, "b")]


def test_parts_of_a_manifest_are_no_traces(tmp_path: Path) -> None:
    put(tmp_path, "rank-0.json")
    put(tmp_path, "rank-0.manifest.json", text='{"schema": 1, "part": "rank"}')
    run = discover([str(tmp_path)])
    assert [Path(file.path).name for file in run.files] == ["rank-0.json"]
    assert run.limits == ()
