"""Sets of time that travel between processes."""

from __future__ import annotations

import pickle

from tracedoc.digest.packed_spans import PackedSpans
from tracedoc.spans import Spans

ORIGIN = 1_700_000_000_000_000_000


def test_spans_come_back_as_they_were_and_empty_ones_are_left_out() -> None:
    compute = Spans.from_pairs([(ORIGIN, ORIGIN + 5), (ORIGIN + 9, ORIGIN + 4_000_000_000)])
    long = Spans.from_pairs([(ORIGIN - 3, ORIGIN + 5_000_000_000)])
    packed = PackedSpans({"compute": compute, "same": compute, "idle": Spans.empty(), "long": long})
    back = pickle.loads(pickle.dumps(packed))
    assert dict(back) == {"compute": compute, "same": compute, "long": long}


def test_packed_spans_take_half_the_bytes() -> None:
    many = Spans.from_pairs((ORIGIN + 10 * i, ORIGIN + 10 * i + 5) for i in range(400))
    packed = PackedSpans({"compute": many, "idle": many})
    assert len(pickle.dumps(packed)) < 400 * 8 + 500
