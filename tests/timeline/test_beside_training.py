"""The function of the script whose operators training does not need, in a step with Python stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.ranks.source_step import read_source_step
from tracedoc.testing.builder import TraceBuilder

NODE = "autograd::engine::evaluate_function: AddmmBackward0"
FORWARD = (
    ("nn.Module: Net_0", 30, 60),
    ("torch/nn/modules/module.py(1780): _call_impl", 30, 60),
    ("model.py(9): forward", 31, 59),
    ("aten::addmm", 31, 59),
)
"""The model, which takes 28 of the 30 ms of its module."""

BACKWARD = ((NODE, 60, 90), ("aten::mm", 62, 80))
OPTIMIZER = (("Optimizer.step#SGD.step", 90, 100), ("train.py(70): step", 90, 100), ("aten::add_", 91, 99))
UPDATE = (("train.py(4): update", 0, 30), ("average.py(8): blend", 1, 29), ("aten::mul_", 2, 28))

Row = tuple[str, float, float]


def found(tmp_path: Path, *rows: Row) -> tuple[str, float, float] | None:
    """The function that is named in a step of 100 ms, and its shares outside and in the backward pass."""
    builder = TraceBuilder(rank=0, device=None)
    builder.host("ProfilerStep#26", 0, 100, category="user_annotation")
    builder.host("train.py(30): main", 0, 100, category="python_function")
    for name, start, end in (*rows, *FORWARD, *BACKWARD, *OPTIMIZER):
        if ".py(" in name or name.startswith("nn.Module"):
            builder.host(name, start, end, category="python_function")
        elif name.startswith(("Optimizer", "enumerate")):
            builder.host(name, start, end, category="user_annotation")
        else:
            builder.host(name, start, end, category="cpu_op")
    (one, *rest) = (*read_source_step(str(builder.write(tmp_path / "stacks.json"))).beside, None)
    assert len(rest) < 2
    return None if one is None else (str(one.place), one.forward_frac, one.backward_frac)


def test_training_alone_is_not_beside_itself(tmp_path: Path) -> None:
    assert found(tmp_path) is None


def test_what_the_loop_calls_is_named_by_its_innermost_function(tmp_path: Path) -> None:
    """Of 26 + 28 ms at operators outside the backward pass 26 are in it."""
    place, outside, backward = found(tmp_path, *UPDATE) or pytest.fail("nothing is named")
    assert place == "`blend` (`average.py:8`)"
    assert outside == pytest.approx(26 / 54)
    assert backward == 0


def test_the_function_around_several_is_named_where_none_has_half(tmp_path: Path) -> None:
    thirds = [(f"metrics.py({one}): part{one}", 10 * one, 10 * one + 9) for one in range(3)]
    rows = [("aten::sum", start + 1, end) for _, start, end in thirds]
    named = found(tmp_path, ("train.py(4): update", 0, 30), *thirds, *rows)
    assert named is not None
    assert named[0] == "`update` (`train.py:4`)"


def test_hooks_of_modules_and_of_gradients_are_beside(tmp_path: Path) -> None:
    """The one takes 1 ms of the module's 30, the other 8 of the 30 of the backward pass."""
    module = (("checks.py(3): check_output", 59, 60), ("aten::isnan", 59, 60))
    assert (found(tmp_path, *module) or [""])[0] == "`check_output` (`checks.py:3`)"
    gradient = (("watch.py(5): log_histogram", 81, 89), ("aten::histc", 81, 89))
    assert found(tmp_path, *gradient) == ("`log_histogram` (`watch.py:5`)", 0, pytest.approx(8 / 30))


@pytest.mark.parametrize(
    "rows",
    [
        # The function of a module that has no ``forward`` of its own is its ``forward``.
        (("nn.Module: Patched_0", 0, 20), ("patch.py(2): fast_norm", 0, 20), ("aten::mul", 0, 20)),
        # A step of the model for another purpose is no less the model.
        (("train.py(6): predict", 0, 29), ("nn.Module: Net_1", 1, 29), ("aten::mm", 2, 20)),
        # The data loader has findings of its own.
        (("enumerate(DataLoader)#x", 0, 29), ("data.py(6): collate", 1, 29), ("aten::stack", 2, 20)),
        # What ranks send goes with its messages.
        (("train.py(6): reduced", 0, 29), ("c10d::allreduce_", 1, 2), ("aten::stack", 2, 20)),
        # The backward pass of an operator of the script, and activations that are computed again.
        (("operator.py(6): backward", 81, 89), ("aten::mul", 82, 88)),
        (
            ("torch/utils/checkpoint.py(9): unpack", 81, 89),
            ("model.py(8): block", 82, 88),
            ("aten::mul", 82, 88),
        ),
    ],
)
def test_what_belongs_to_training_is_not(tmp_path: Path, rows: tuple[Row, ...]) -> None:
    assert found(tmp_path, *rows) is None
