"""What compiles again is named by the script's function, else by the region of compiled code behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.collector.frameworks import limit_hits
from tracedoc.testing import TraceBuilder
from tracedoc.trace.vocabulary import compiled_region


def compiling(*around: tuple[str, str], behind: str = "") -> TraceBuilder:
    """Return two finished steps of 100 ms; the second compiles from 120 to 150 ms."""
    builder = TraceBuilder(0, 1, device=None)
    for number in range(3):
        begin = 100 * number
        builder.step(number, begin, begin + 100).host("aten::mm", begin, begin + 10)
    for name, category in around:
        builder.host(name, 115, 155, category=category)  # type: ignore[arg-type]
    builder.host("_compile.compile_inner (dynamo_timed)", 120, 150)
    if behind:
        builder.host(behind, 151, 154)
    return builder


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        (compiling(("train.py(12): forward", "python_function")), "`forward` (`train.py:12`)"),
        (compiling(("the encoder", "user_annotation")), "the range `the encoder`"),
        (compiling(behind="Torch-Compiled Region: 2/3"), "compiled region 2, version 4"),
        (compiling(), "a function"),
    ],
    ids=["stack", "range", "region", "nothing"],
)
def test_what_compiles_again_is_named(tmp_path: Path, builder: TraceBuilder, said: str) -> None:
    measured = tracedoc.measure([builder.write(tmp_path / "rank-0.json")])
    assert measured.measurements.facts["recompiled"].value == said


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("Torch-Compiled Region: 0/1", (0, 1)),
        ("Torch-Compiled Region: !1/4/2", (4, 2)),
        ("Torch-Compiled Region", None),
        ("Torch-Compiled Region: 99999999999999/0", None),
    ],
)
def test_regions_of_compiled_code_have_numbers(name: str, numbers: tuple[int, int] | None) -> None:
    assert compiled_region(name) == numbers


def test_functions_that_dynamo_gave_up_are_counted_in_the_words_of_all_versions() -> None:
    refused = {
        "Dynamo recompile limit exceeded\n  Explanation: the code object was recompiled too many times": 2,
        "cache_size_limit reached": 1,
        "Attempted to call function marked as skipped": 5,
    }
    assert limit_hits(refused) == 3
