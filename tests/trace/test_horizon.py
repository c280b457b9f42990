"""Until when a trace is known: files that are cut off, and kernels that are missing at the end."""

from __future__ import annotations

import numpy as np

from tracedoc.trace.columns import Kind
from tracedoc.trace.horizon import cut_at, kernels_end


def known(*parts: tuple[Kind, int, range], peers: bool = False, named: bool = False) -> int:
    """The horizon of a file that holds events of a kind and a thread, one block after the other."""
    kind = np.concatenate([np.full(len(times), int(one), dtype=np.uint8) for one, _, times in parts])
    thread = np.concatenate([np.full(len(times), one) for _, one, times in parts])
    return cut_at(
        kind, np.concatenate([np.array(times) for *_, times in parts]), thread, peers=peers, named=named
    )


def test_operators_written_before_the_kernels_are_whole() -> None:
    blocks = (
        (Kind.CPU_OP, 1, range(0, 1000)),
        (Kind.RUNTIME, 1, range(0, 500)),
        (Kind.KERNEL, 7, range(5, 405)),
    )
    # Of the kernels the last 16 are taken for what may not be in order.
    assert known(*blocks) == 389


def test_calls_are_known_until_the_last_of_them_in_the_file() -> None:
    # A buffer of late calls was written first.
    blocks = (
        (Kind.CPU_OP, 1, range(0, 1000)),
        (Kind.RUNTIME, 1, range(900, 950)),
        (Kind.RUNTIME, 1, range(0, 200)),
    )
    assert known(*blocks) == 184


def test_of_threads_one_after_the_other_the_next_may_be_missing() -> None:
    assert known((Kind.CPU_OP, 1, range(10, 500)), (Kind.CPU_OP, 2, range(10, 300))) < 16


def test_one_thread_may_lack_those_that_communicate() -> None:
    block = (Kind.CPU_OP, 1, range(10, 500))
    assert known(block) == 484
    assert known(block, peers=True) == 10


def test_of_a_thread_that_is_named_and_not_written_nothing_is_known() -> None:
    blocks = (Kind.CPU_OP, 1, range(10, 500)), (Kind.ANNOTATION, 2, range(20, 300))
    assert known(*blocks, named=True) == 10


def test_kernels_that_are_missing_at_the_end_are_no_lost_ones() -> None:
    launched = np.arange(0, 1000, 10)
    missing = launched >= 700
    assert kernels_end(launched, missing) == 700
    lost = missing.copy()
    lost[20:22] = True  # two were lost before
    assert kernels_end(launched, lost) == 700


def test_a_few_kernels_that_ran_when_the_capture_was_over_end_nothing() -> None:
    launched = np.arange(100)
    assert kernels_end(launched, launched >= 99) is None
    assert kernels_end(launched[:0], launched[:0] > 0) is None
