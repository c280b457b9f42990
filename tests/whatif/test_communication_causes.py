"""What the order of collectives costs, and how often they are made, worked out by hand."""

from __future__ import annotations

import pytest

import tracedoc
from tests.whatif.test_ledger import MIB, PRODUCT, UPDATE, ledger_of, of, one_of
from tracedoc.predicted import Predicted
from tracedoc.testing import TraceBuilder


def test_gradients_reduced_after_the_backward_pass_are_an_order(tmp_path):
    """Four all-reduces of 10 ms after 4 x 10 ms of backward: as they become ready, only the last is exposed.

    30 ms of compute are 6 % slower beside them, as is assumed where it cannot be measured.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.backward(start - 0.01, start + 0.2)
        for one in range(4):
            at = start + 10.0 * one
            builder.kernel(PRODUCT, at, at + 10, launch_ms=start + 0.01 * one)
        for one in range(4):
            at = start + 40.0 + 10.0 * one
            launch_ms = start + 0.06 + 0.01 * one
            builder.collective("allreduce", at, at + 10, nbytes=16 * MIB, launch_ms=launch_ms)
        builder.optimizer(start + 0.21, start + 0.3)
        builder.kernel(UPDATE, start + 80, start + 82, launch_ms=start + 0.25)
        builder.runtime("cudaDeviceSynchronize", start + 0.3, start + 82.01)
        return start + 82.0

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "order.reductions").alone_ms[1] == pytest.approx(28.2, abs=0.2)
    assert of(ledger, "order.reductions") > 12.0  # the link is slow as well, which either would mend


def test_gathers_behind_reductions_are_an_order(tmp_path):
    """FSDP2 of three units of 10 ms each: a gather of 4 ms waits for the reduction of 8 ms before it.

    Forward takes 3 (4 + 10) ms, backward 10 + 2 (8 + 4 + 10) + 8. Each gather but the first of a pass hides
    behind the unit before, and the last but one reduction behind the last unit: 8 + 12 ms. 20 ms of compute
    are 6 % slower beside them.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        at, call = start, start
        for unit in "abc":
            hook = (f"FSDP::pre_forward (layers.{unit})", f"FSDP::all_gather (layers.{unit})")
            builder.collective(
                "allgather", at, at + 4, nbytes=32 * MIB, stream=20, launch_ms=call, within=hook
            )
            builder.kernel(PRODUCT, at + 4, at + 14, launch_ms=call + 0.1)
            at, call = at + 14, call + 0.2
        for unit in "cba":
            if unit != "c":
                hook = (f"FSDP::pre_backward (layers.{unit})", f"FSDP::all_gather (layers.{unit})")
                builder.collective(
                    "allgather", at, at + 4, nbytes=32 * MIB, stream=20, launch_ms=call, thread="autograd",
                    within=hook,
                )  # fmt: skip
                at += 4
            builder.backward(call + 0.05, call + 0.15)
            builder.kernel(PRODUCT, at, at + 10, launch_ms=call + 0.1, thread="autograd")
            hook = (f"FSDP::post_backward_reduce (layers.{unit})",)
            builder.collective(
                "reducescatter", at + 10, at + 18, nbytes=64 * MIB, stream=20, launch_ms=call + 0.2,
                thread="autograd", within=hook,
            )  # fmt: skip
            at, call = at + 18, call + 0.3
        builder.runtime("cudaDeviceSynchronize", call, at + 0.01)
        return at

    ledger = ledger_of(tmp_path, draw)
    gathers = one_of(ledger, "order.gathers")
    assert gathers.alone_ms[1] == pytest.approx(18.8, abs=0.1)
    assert gathers.share_ms > 9.0
    ahead = tracedoc.predict([tmp_path], ["gather-ahead units=1", "gather-ahead pass=backward units=2"]).alone
    both, backward = (one.gain_ms[1] for one in ahead if isinstance(one, Predicted))
    assert both == pytest.approx(18.8, abs=0.1)
    assert backward == pytest.approx(11.3, abs=0.1)  # 12 ms, beside which compute is 6 % slower


def test_on_a_link_that_is_busy_all_the_time_no_gather_is_late(tmp_path):
    """FSDP2 of three units of 2 ms each, all gathers and reductions of 10 ms, one right behind the other."""
    calls = (
        ("allgather", "a", 0), ("forward", "a", 10), ("allgather", "b", 10), ("forward", "b", 20),
        ("allgather", "c", 20), ("forward", "c", 30), ("allgather", "b", 30), ("backward", "c", 32),
        ("reducescatter", "c", 40), ("allgather", "a", 50), ("backward", "b", 40), ("reducescatter", "b", 60),
        ("backward", "a", 60), ("reducescatter", "a", 70),
    )  # fmt: skip

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for number, (what, unit, after) in enumerate(calls):
            at, call = start + after, start + 0.1 * number
            thread = "main" if number < 6 else "autograd"
            if what == "backward":
                builder.backward(call - 0.01, call + 0.05)
            if what in ("forward", "backward"):
                builder.kernel(PRODUCT, at, at + 2, launch_ms=call, thread=thread, op="aten::linear")
            else:
                hook = (
                    f"FSDP::{'all_gather' if what == 'allgather' else 'post_backward_reduce'} (layers.{unit})"
                )
                builder.collective(
                    what,
                    at,
                    at + 10,
                    nbytes=32 * MIB,
                    stream=20,
                    launch_ms=call,
                    thread=thread,
                    within=(hook,),
                )
        builder.runtime("cudaDeviceSynchronize", start + 1.5, start + 80.01)
        return start + 80.0

    ledger = ledger_of(tmp_path, draw)
    assert of(ledger, "order.gathers") < 0.1
    assert of(ledger, "link.") > 60.0


def test_gradients_that_are_reduced_once_are_brought_into_buckets_once(tmp_path):
    """Of two micro-batches each computes 10 + 10 ms, copies gradients for 4 ms and reduces them for 8.

    With one reduction a step takes 12 ms less.
    """

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for number in range(2):
            at, call = start + 32.0 * number, start - 0.3 + number
            builder.host("DistributedDataParallel.forward", call, call + 0.1)
            builder.kernel(PRODUCT, at, at + 10, launch_ms=call + 0.05, op="aten::linear")
            builder.backward(call + 0.2, call + 0.3)
            builder.kernel(PRODUCT, at + 10, at + 20, launch_ms=call + 0.25, thread="autograd")
            builder.kernel(
                "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>()", at + 20, at + 24,
                launch_ms=call + 0.35, thread="autograd", op="torch::distributed::reducer::mul_out",
            )  # fmt: skip
            builder.collective(
                "allreduce", at + 24, at + 32, nbytes=64 * MIB, launch_ms=call + 0.4, thread="autograd"
            )
        builder.optimizer(start + 2, start + 2.2)
        builder.kernel(UPDATE, start + 64, start + 66, launch_ms=start + 2.1)
        builder.runtime("cudaDeviceSynchronize", start + 2.3, start + 66.01)
        return start + 66.0

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "order.every_micro_batch").alone_ms[1] == pytest.approx(12.0, abs=0.1)


def test_a_long_search_for_unused_parameters_is_told_as_that(tmp_path):
    """Twice 20 kernels of 1 ms; the host searches for 8 ms between them, and waits for the last."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        for one in range(40):
            at = start + one + (8.0 if one >= 20 else 0.0)
            launched = start + 0.01 * one + (27.7 if one >= 20 else -0.1)
            builder.kernel(PRODUCT, at, at + 1, launch_ms=launched)
        builder.host("torch.distributed.ddp.reducer::search_unused_parameters", start + 20.0, start + 27.8)
        builder.runtime("cudaStreamSynchronize", start + 0.2, start + 19.9)
        builder.backward(start + 27.85, start + 28.2)
        builder.collective("allreduce", start + 36, start + 46, nbytes=64 * MIB, launch_ms=start + 28.15)
        builder.runtime("cudaStreamSynchronize", start + 28.3, start + 48.01)
        return start + 48.0

    ledger_of(tmp_path, draw)
    found = {one.rule_id: one for one in tracedoc.diagnose([tmp_path]).findings}
    assert found["unused-parameter-search"].severity == "warning"
    assert "host-away" not in found
