"""Where in the step a cause is."""

from __future__ import annotations

from tests.whatif.test_ledger import PRODUCT, ledger_of, one_of
from tracedoc.testing import TraceBuilder


def test_a_place_is_named_that_has_most_of_a_cause(tmp_path):
    """30 ms before the backward pass, in a range; half of 40 launches are in it, and none is most of them."""

    def draw(builder: TraceBuilder, rank: int, index: int, start: float) -> float:
        at = start
        for number in range(40):
            if number == 20:
                builder.host("save_samples", at - 0.5, at + 29.0, category="user_annotation")
                at += 30.0
                builder.backward(at - 0.1, at + 20.0, thread="main")
            builder.kernel(PRODUCT, at + 0.01, at + 0.11, launch_ms=at)
            at += 1.0
        builder.runtime("cudaDeviceSynchronize", at - 0.9, at - 0.88)
        return at - 0.88

    ledger = ledger_of(tmp_path, draw)
    assert one_of(ledger, "host.pause").place == "the range `save_samples`"
    assert one_of(ledger, "host.launch").place == "the backward pass"
