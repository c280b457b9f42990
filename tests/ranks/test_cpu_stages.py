"""What stages that share cores take: their own time, not that of transfers they need not wait for."""

from __future__ import annotations

from pathlib import Path

from tracedoc.pipeline import Options, measure
from tracedoc.testing import TraceBuilder
from tracedoc.topics.pipeline.stages import waiting_for_transfers


def test_a_send_that_travels_beside_a_sleep_is_not_waited_for(tmp_path: Path) -> None:
    """From 10 to 12 ms the rank waits for a receive; then it sleeps until 25, and computes until 35."""
    builder = TraceBuilder(0, 2, device=None)
    for index in range(3):
        start = 40.0 * index
        builder.step(index, start, start + 40)
        builder.collective("send", start, start + 30, nbytes=64, peer=1)
        builder.collective("recv", start + 10, start + 12, nbytes=64, peer=1)
        builder.host("aten::mm", start + 25, start + 35)
        builder.optimizer(start + 35, start + 40)
    builder.write(tmp_path / "rank-0.json")
    (digest,) = measure([tmp_path], Options(jobs=1)).measurements.run.digests
    window = digest.steps[0]
    waits = waiting_for_transfers(digest).clip(window.start_ns, window.end_ns)
    assert [(begin - window.start_ns, end - window.start_ns) for begin, end in waits.pairs()] == [
        (10_000_000, 12_000_000)
    ]
