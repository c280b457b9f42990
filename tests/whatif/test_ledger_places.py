"""Where in the step a cause is."""

from __future__ import annotations

from tests.whatif.test_ledger import PRODUCT, ledger_of, one_of
from tracedoc.testing import TraceBuilder


def test_a_place_is_named_that_has_most_of_a_cause(tmp_path):
    """30 ms before the backward pass, in a range; 30 of 40 launches are in it, and none is most of them."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        at = start
        for number in range(40):
            if number == 10:
                builder.host("save_samples", at - 0.5, at + 29.0, category="user_annotation")
                at += 30.0
                builder.backward(at - 0.1, at + 30.0, thread="main")
            builder.kernel(PRODUCT, at + 0.01, at + 0.11, launch_ms=at)
            at += 1.0
        builder.runtime("cudaDeviceSynchronize", at - 0.9, at - 0.88)
        return at - 0.88

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "host.pause").place == "the range `save_samples`"
    assert one_of(ledger, "host.launch").place == "the backward pass"


def test_no_place_is_told_of_messages_that_are_mostly_hidden(tmp_path):
    """Compute hides the 30 ms of the backward pass, and nothing the 10 ms of the forward pass."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        builder.kernel(PRODUCT, start, start + 10, launch_ms=start - 0.05)
        builder.collective("alltoall", start + 10, start + 20, nbytes=2 << 30, launch_ms=start - 0.04)
        builder.kernel(PRODUCT, start + 20, start + 25, launch_ms=start - 0.03)
        builder.backward(start - 0.02, start + 0.2)
        builder.kernel(PRODUCT, start + 25, start + 58, launch_ms=start)
        builder.collective("alltoall", start + 26, start + 56, nbytes=6 << 30, launch_ms=start + 0.1)
        builder.runtime("cudaDeviceSynchronize", start + 0.3, start + 58.01)
        return start + 58.01

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "link.transfer").place == ""
