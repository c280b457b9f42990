"""Where the host spends time outside operators: the innermost function of the script, or a named range."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tracedoc.pipeline import Options, diagnose
from tracedoc.ranks.run_view import build_run_view, ended_early
from tracedoc.ranks.source_step import places_of_source_step
from tracedoc.testing.builder import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.timeline.script_code import CodePlace, place_of_stack
from tracedoc.trace.kineto import read_trace
from tracedoc.worker import digest_file


def places(tmp_path: Path, *events: tuple[str, float, float, str]) -> list[tuple[str, bool, float]]:
    """Return function, whether it loads, and ms, of a step from 0 to 100 ms with these host events."""
    builder = TraceBuilder(rank=0, device=None)
    builder.host("ProfilerStep#7", 0, 100, category="user_annotation")
    for name, start, end, category in events:
        builder.host(name, start, end, category=category)
    trace = read_trace(builder.write(tmp_path / "rank-0.json"), python_functions=True)
    return [(str(one), one.loading, one.time_ns / 1e6) for one in places_of_source_step(trace)]


def test_the_innermost_function_of_the_script_has_the_time(tmp_path: Path) -> None:
    """60 ms sleep in write_metrics; of main's other 40 ms an operator covers 30."""
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("train.py(4): write_metrics", 10, 70, "python_function"),
        ("json/__init__.py(183): dumps", 11, 20, "python_function"),
        ("<built-in function sleep>", 20, 70, "python_function"),
        ("aten::mm", 70, 100, "cpu_op"),
    )
    assert found == [("`write_metrics` (`train.py:4`)", False, 60), ("`main` (`train.py:30`)", False, 10)]


def test_time_in_torch_is_not_the_script_s(tmp_path: Path) -> None:
    """In backward() the host waits for other ranks: that is no code of main."""
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("torch/_tensor.py(566): backward", 20, 100, "python_function"),
    )
    assert found == [("`main` (`train.py:30`)", False, 20)]


def test_time_in_an_engine_is_not_the_script_s_but_what_it_saves_is(tmp_path: Path) -> None:
    """The engine works for the model until 50 ms, and then saves for 20 ms as main asked it to."""
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("deepspeed/utils/nvtx.py(14): wrapped_fn", 20, 50, "python_function"),
        ("deepspeed/runtime/engine.py(2100): step", 20, 50, "python_function"),
        (
            "deepspeed/runtime/checkpoint_engine/engine.py(20): save",
            50,
            70,
            "python_function",
        ),
    )
    main = "`main` (`train.py:30`)"
    assert found == [(main, False, 50), (f"`save` in {main}", False, 20)]


def test_a_folder_whose_name_ends_like_a_framework_s_is_the_script_s(tmp_path: Path) -> None:
    found = places(tmp_path, ("pytorch/train.py(3): main", 0, 100, "python_function"))
    assert found == [("`main` (`pytorch/train.py:3`)", False, 100)]


def test_a_data_set_is_found_inside_the_loader(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        (loader, 10, 60, "user_annotation"),
        ("torch/utils/data/dataloader.py(720): __next__", 10, 60, "python_function"),
        ("data.py(8): __getitem__", 12, 58, "python_function"),
        ("PIL/Image.py(3000): open", 12, 58, "python_function"),
    )
    assert ("`__getitem__` (`data.py:8`)", True, 46) in found


def test_a_script_without_functions_is_named_by_what_it_calls(tmp_path: Path) -> None:
    """Of 100 ms at the top level torch saves for 50 and the host sleeps for 30; an operator covers 15."""
    found = places(
        tmp_path,
        ("train.py(8): <module>", 0, 100, "python_function"),
        ("torch/serialization.py(944): save", 0, 50, "python_function"),
        ("torch/serialization.py(1183): _save", 1, 49, "python_function"),
        ("<built-in function sleep>", 50, 80, "python_function"),
        ("aten::mm", 80, 95, "cpu_op"),
    )
    assert found == [
        ("`save` at the top level of `train.py`", False, 50),
        ("`sleep` at the top level of `train.py`", False, 30),
        ("code at the top level of `train.py`", False, 5),
    ]


def test_a_function_that_runs_the_whole_step_is_named_by_what_it_calls(tmp_path: Path) -> None:
    """Two calls of 30 ms are two places: the loop's function says neither."""
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("logging/__init__.py(1479): info", 0, 30, "python_function"),
        ("<built-in method write of _io.TextIOWrapper object at 0x7f>", 1, 29, "python_function"),
        ("<built-in function sleep>", 40, 70, "python_function"),
        ("aten::mm", 70, 100, "cpu_op"),
    )
    assert found == [
        ("`info` in `main` (`train.py:30`)", False, 30),
        ("`sleep` in `main` (`train.py:30`)", False, 30),
        ("`main` (`train.py:30`)", False, 10),
    ]


LOOP = "lightning/pytorch/loops/fit_loop.py(208): run"


def test_a_library_that_runs_the_steps_is_no_call_of_the_script(tmp_path: Path) -> None:
    """A trainer calls the model: what it calls beside is told as its own, not as a call of the script.

    Its logger takes 30 ms; training_step 45, of which operators cover 20; its loop has the other 25.
    """
    found = places(
        tmp_path,
        ("train.py(3): <module>", 0, 100, "python_function"),
        (LOOP, 0, 100, "python_function"),
        ("lightning/pytorch/loggers/csv_logs.py(5): save", 10, 40, "python_function"),
        ("model.py(4): training_step", 45, 90, "python_function"),
        ("nn.Module: Linear_0", 50, 80, "python_function"),
        ("aten::mm", 50, 60, "cpu_op"),
        ("aten::mm", 70, 80, "cpu_op"),
    )
    run = "`run` (`lightning/pytorch/loops/fit_loop.py:208`)"
    assert found == [
        (f"`save` in {run}", False, 30),
        (run, False, 25),
        ("`training_step` (`model.py:4`)", False, 25),
    ]


def test_a_sampled_stack_of_a_trainer_ends_in_its_loop() -> None:
    script = "train.py(3): <module>"
    stack = ("lightning/pytorch/loggers/csv_logs.py(5): save@9", f"{LOOP}@217", f"{script}@39")
    loop = {LOOP, script}
    assert str(place_of_stack(stack, loop)) == "`save` in `run` (`lightning/pytorch/loops/fit_loop.py:217`)"
    assert place_of_stack(("torch/nn/modules/module.py(7): _call_impl@9", *stack[1:]), loop) is None


def test_a_comprehension_is_part_of_its_function(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("data.py(9): tokens", 10, 90, "python_function"),
        ("data.py(10): <listcomp>", 11, 89, "python_function"),
        ("data.py(10): <genexpr>", 20, 80, "python_function"),
    )
    assert found == [("`tokens` (`data.py:9`)", False, 80), ("`main` (`train.py:30`)", False, 20)]


def test_time_of_the_collector_is_nobody_s(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        ("train.py(30): main", 0, 100, "python_function"),
        ("/opt/tracedoc/collector/steps.py(64): counted", 10, 90, "python_function"),
    )
    assert found == [("`main` (`train.py:30`)", False, 20)]


def test_a_named_range_stands_where_there_are_no_frames(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        ("write_metrics", 10, 70, "user_annotation"),
        ("Optimizer.step#SGD.step", 80, 100, "user_annotation"),
    )
    assert found == [("the range `write_metrics`", False, 60)]


def test_a_place_reads_as_code() -> None:
    assert str(CodePlace("a/train.py", 4, "f", loading=False, time_ns=1)) == "`f` (`a/train.py:4`)"


@pytest.mark.parametrize(("steps", "early"), [(5, False), (4, False), (2, True)])
def test_a_rank_that_ends_early_is_told_first(tmp_path: Path, steps: int, early: bool) -> None:
    """Steps of 100 ms: one step less may be chance, three are not."""
    for rank, count in ((0, 5), (1, steps)):
        builder = parse_lanes("compute 0-60\nallreduce 60-100 64MiB", ranks=2, steps=count)[rank]
        builder.write(tmp_path / f"rank-{rank}.json")
    digests = [digest_file(str(tmp_path / f"rank-{rank}.json")) for rank in (0, 1)]
    assert [one.code for one in ended_early(build_run_view(digests, 2))] == ["ended-early"] * early
    unmarked = [structs.replace(digest, step_source="optimizer") for digest in digests]
    assert ended_early(build_run_view(unmarked, 2)) == []
    # A rank whose last step is that of the others, and whole, has all: another one does more behind it.
    whole = [structs.replace(digest, last_step=4) for digest in digests]
    assert ended_early(build_run_view(whole, 2)) == []
    summary = diagnose([tmp_path], Options(replay=False)).summary
    assert summary.startswith("Rank 1 ended up to 300 ms before the others") is early


@pytest.mark.parametrize(
    ("inside", "named", "ms"),
    [
        ([("data.py(5): __getitem__", 0.09)] * 40, "`__getitem__` (`data.py:5`)", 3.6),
        ([("torch/optim/optimizer.py(60): step", 3.6)], "code at the top level of `train.py`", 0.5),
        ([], "code at the top level of `train.py`", 4.1),
    ],
)
def test_short_calls_and_torchs_own_code_are_told_from_the_loop(
    tmp_path: Path, inside: list[tuple[str, float]], named: str, ms: float
) -> None:
    """For 4.1 of 10 ms no operator runs: the loop's own code, many calls of 90 us each, or torch at work."""
    builder = TraceBuilder(device=None)
    for index in range(1, 5):
        start = 10.0 * index
        builder.step(index, start, start + 10).host("aten::mm", start + 0.1, start + 5.9)
        at = start + 5.95
        for frame, lasts in inside:
            builder.host(frame, at, at + lasts, category="python_function")
            at += lasts + 0.005
        builder.host("aten::add", start + 9.9, start + 10)
    builder.host("train.py(12): <module>", 9.0, 51.0, category="python_function")
    path = builder.write(tmp_path / "rank-0.json")
    facts = diagnose([path], Options(jobs=1)).facts
    assert facts["script_code"].value == named
    assert facts["script_code_ms"].value == pytest.approx(ms)
