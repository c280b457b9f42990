"""Who asks for values, in a step that was recorded with Python stacks."""

from __future__ import annotations

from pathlib import Path

from tracedoc.ranks.source_step import SourceLine, asking_lines
from tracedoc.testing.builder import TraceBuilder
from tracedoc.trace.kineto import read_trace

ITEM = "<built-in method item of Tensor object at 0x7f656bafc410>"


def lines(tmp_path: Path, *frames: tuple[str, float, float]) -> tuple[SourceLine, ...]:
    builder = TraceBuilder(rank=0, device=None)
    for name, start, end in frames:
        builder.host(name, start, end, category="python_function")
    path = builder.write(tmp_path / "rank-0.json")
    return asking_lines(read_trace(path, python_functions=True))


def test_the_innermost_function_of_the_script_asks(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        ("train.py(40): main", 0, 100),
        ("lib/metrics.py(7): accuracy", 10, 50),
        (ITEM, 20, 21),
        (ITEM, 30, 31),
        ("<built-in method cpu of Tensor object at 0x7f>", 60, 61),
    )
    assert found == (
        SourceLine("lib/metrics.py", 7, "accuracy", "item", 2),
        SourceLine("train.py", 40, "main", "cpu", 1),
    )


def test_a_library_asks_for_its_caller(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        ("train.py(40): main", 0, 100),
        ("torch/nn/utils/clip_grad.py(9): clip_grad_norm_", 10, 50),
        ("contextlib.py(79): inner", 15, 45),
        (ITEM, 20, 21),
    )
    assert found == (SourceLine("train.py", 40, "main", "item", 1),)


def test_the_counters_of_an_optimizer_are_on_the_host(tmp_path: Path) -> None:
    found = lines(
        tmp_path, ("train.py(40): main", 0, 100), ("torch/optim/adamw.py(9): step", 10, 50), (ITEM, 20, 21)
    )
    assert found == ()


def test_a_barrier_is_where_the_script_calls_it(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        ("train.py(8): <module>", 0, 100),
        ("torch/distributed/c10d_logger.py(81): wrapper", 1, 9),
        ("torch/distributed/distributed_c10d.py(5148): barrier", 2, 8),
        ("train.py(3): synced", 10, 50),
        ("torch/distributed/distributed_c10d.py(5148): barrier", 20, 30),
        ("torch/distributed/distributed_c10d.py(3303): all_gather_object", 30, 40),
        ("torch/distributed/distributed_c10d.py(2900): all_reduce", 60, 90),
    )
    assert [(one.call, one.meets, str(one.place)) for one in found] == [
        ("all_gather_object", True, "`synced` (`train.py:3`)"),
        ("barrier", True, "`synced` (`train.py:3`)"),
        ("all_reduce", True, "`all_reduce` at the top level of `train.py`"),
        ("barrier", True, "`barrier` at the top level of `train.py`"),
    ]


def test_other_calls_are_none_of_it(tmp_path: Path) -> None:
    assert lines(tmp_path, ("train.py(40): main", 0, 100), ("<built-in method append of list>", 1, 2)) == ()


def test_a_function_that_returned_or_runs_on_another_thread_does_not_ask(tmp_path: Path) -> None:
    builder = TraceBuilder(rank=0, device=None)
    for name, start, end, thread in (
        ("train.py(40): main", 0, 100, "main"),
        ("train.py(50): returned", 10, 20, "main"),
        ("train.py(60): elsewhere", 5, 90, "other"),
        (ITEM, 30, 31, "main"),
        (ITEM, 40, 41, "third"),
    ):
        builder.host(name, start, end, category="python_function", thread=thread)
    trace = read_trace(builder.write(tmp_path / "rank-0.json"), python_functions=True)
    assert asking_lines(trace) == (SourceLine("train.py", 40, "main", "item", 1),)
