"""What merging and splitting sharded units makes of a step, on traces whose answer is worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.predicted import NotPredicted, Predicted
from tracedoc.testing import TraceBuilder

MIB = 1 << 20


def sharded(folder: Path, units: list[tuple[str, int]], *, kernels: int, fixed_ms: float) -> Path:
    """Two ranks of FSDP2, whose units (name, MiB) are gathered in the forward pass, and reduced after it.

    A transfer takes ``fixed_ms`` and 1 ms for each MiB; gradients have twice the bytes. Compute waits for
    each gather, which waits for the compute before; reductions run on a stream of their own, beside compute.
    Each unit computes ``kernels`` times 10 ms in both passes. The host launches all at once, and waits at the
    end.
    """
    for rank in range(2):
        builder, begin = TraceBuilder(rank, 2), 1.0
        for index in range(4):
            at, call, reduced = begin, begin, 0.0
            for name, mib in units:
                end = at + fixed_ms + mib
                hook = (f"FSDP::pre_forward ({name})", f"FSDP::all_gather ({name})")
                builder.collective(
                    "allgather", at, end, nbytes=mib * MIB, stream=20, launch_ms=call, within=hook
                )
                at, call = end, call + 0.1
                for _ in range(kernels):
                    builder.kernel("sgemm", at, at + 10, launch_ms=call)
                    at, call = at + 10, call + 0.1
            for name, mib in units[::-1]:
                backward = call - 0.05
                for _ in range(kernels):
                    builder.kernel("dgemm", at, at + 10, launch_ms=call, thread="autograd")
                    at, call = at + 10, call + 0.1
                builder.backward(backward, call)
                reduced = max(at, reduced) + fixed_ms + 2 * mib
                builder.collective(
                    "reducescatter", reduced - fixed_ms - 2 * mib, reduced, nbytes=2 * mib * MIB, stream=22,
                    launch_ms=call, thread="autograd", within=(f"FSDP::post_backward_reduce ({name})",),
                )  # fmt: skip
                call += 0.1
            builder.runtime("cudaDeviceSynchronize", call, reduced + 0.01)
            builder.step(index, begin - 0.5, reduced + 0.4)
            begin = reduced + 1.0
        builder.write(folder / f"rank-{rank}.json")
    return folder


def test_units_of_a_block_save_the_latency_of_all_but_one_call(tmp_path):
    """A gather takes 2 + 1 ms, a reduction 2 + 2: two sizes show that 2 ms of each are latency.

    Today: 4 (3 + 10) forward, 40 backward, of the last reduction 4 ms behind it. With two blocks a gather
    takes 4 ms and the last reduction 6: 2 (4 + 20) + 40 + 6. With 1.5 times as much latency, all of a gather,
    it takes 3 and 5 ms; with half of it, 5 and 7. Of 12 ms of reductions beside compute 6 or 7 are left,
    which slow it by 6 or 15 %: 0.3 and 0.6 ms less.
    """
    units = [(f"layers.{layer}.{part}", 1) for layer in range(2) for part in ("attention", "mlp")]
    (one,) = tracedoc.predict([sharded(tmp_path, units, kernels=1, fixed_ms=2)], ["merge-units"]).alone
    assert isinstance(one, Predicted)
    assert [ms - 1 for ms in one.step_ms] == pytest.approx([91, 93.7, 96.4], abs=0.1)
    assert one.step_ms[1] + one.gain_ms[1] == pytest.approx(97, abs=0.1)


def test_blocks_that_are_one_unit_have_nothing_to_merge(tmp_path):
    units = [(f"layers.{layer}", 2) for layer in range(3)]
    (one,) = tracedoc.predict([sharded(tmp_path, units, kernels=1, fixed_ms=1)], ["merge-units"]).alone
    assert isinstance(one, NotPredicted)
    assert "no block has several units" in one.reason


def test_a_unit_that_is_split_travels_beside_its_own_compute(tmp_path):
    """One unit of 40 MiB: gathered in 40 ms, computed in 40 and 40, reduced in 80.

    In four it is gathered in 10 ms each, of which all but the first are hidden. A piece is reduced in 20 ms
    and ready every 10: the last one ends 80 ms after the first was ready, or 50 after the backward pass.
    """
    run = sharded(tmp_path, [("layers.0", 40)], kernels=4, fixed_ms=0)
    (one,) = tracedoc.predict([run], ["split-units count=4"]).alone
    assert isinstance(one, Predicted)
    assert one.step_ms[1] + one.gain_ms[1] == pytest.approx(201, abs=0.1)
    assert one.step_ms[0] == pytest.approx(1 + 10 + 40 + 40 + 50, abs=0.1)
    assert one.step_ms[0] < one.step_ms[1] < one.step_ms[2] < 170


def test_a_gather_begins_where_the_copy_into_its_buffer_does(tmp_path):
    """FSDP2: a gather is called when the unit before has been launched, and runs beside what that computes.

    Three blocks of two units, each gathered in 10 ms and taken out in 1; then the buffer of the next one is
    filled in 0.5, on a stream of its own. They compute 20 ms and 4, so that the next block's first gather is
    exposed: 10 + 3 (1 + 20 + 1 + 10.5) - 6.5 ms. A block in one is gathered in 20 ms, beside the 26 of the
    block before: 20 + 3 (1 + 20 + 1 + 4).
    """
    units = [f"layers.{layer}.{part}" for layer in range(3) for part in ("attention", "mlp")]
    for rank in range(2):
        builder, begin = TraceBuilder(rank, 2), 1.0
        for index in range(4):
            at, call, free = begin + 0.5, begin, begin
            for number, name in enumerate(units):
                gathered, hook = at + 10, (f"FSDP::pre_forward ({name})", f"FSDP::all_gather ({name})")
                builder.kernel("fill", at - 0.5, at, stream=21, launch_ms=call)
                builder.collective(
                    "allgather", at, gathered, nbytes=10 * MIB, stream=20, launch_ms=call + 0.01, within=hook
                )
                taken = max(gathered, free) + 1
                free = taken + (4 if number % 2 else 20)
                builder.kernel("take", taken - 1, taken, launch_ms=call + 0.02)
                builder.kernel("sgemm", taken, free, launch_ms=call + 0.03)
                at, call = taken + 0.5, call + 0.05
            builder.runtime("cudaDeviceSynchronize", call, free + 0.01)
            builder.step(index, begin - 0.5, free + 0.4)
            begin = free + 1.0
        builder.write(tmp_path / f"rank-{rank}.json")
    (one,) = tracedoc.predict([tmp_path], ["merge-units"]).alone
    assert isinstance(one, Predicted)
    assert one.step_ms[1] + one.gain_ms[1] == pytest.approx(1.5 + 101, abs=0.1)
    assert one.step_ms[1] == pytest.approx(1.5 + 98, abs=0.2)
