"""What the process that judges keeps of each rank: little, and of many ranks no more than of few."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import tracedoc.pipeline
from tracedoc.pipeline import diagnose
from tracedoc.report.render import render_pieces
from tracedoc.step.rank_digest import RankDigest
from tracedoc.worker import digest_file

DIGEST_BYTES = 38_000
"""A pickled digest of a few steps with some tens of collectives takes less; 14,000 of it are the programs of
four steps with 400 GPU events each, by which they are replayed and the critical path is placed."""

RANK_BYTES = 260_000
"""One more rank costs less at the peak: its digest, its part of matching, facts and report, and of the
replay: the columns of its program (400 calls and as many GPU events here take 24,000), and of the changed
ones that the ledger plays together, until they fill a batch."""

FURTHER_RANK_BYTES = 120_000
"""One more rank costs less where there are so many that their changed programs are played one by one."""


@pytest.fixture(scope="module")
def digest(sample_traces: Path) -> RankDigest:
    return digest_file(str(sample_traces / "synthetic_ddp_tiny_batch" / "rank-0.json.gz"))


def test_a_digest_is_small(digest: RankDigest):
    assert len(pickle.dumps(digest)) < DIGEST_BYTES


@pytest.mark.parametrize(
    ("few", "many", "rank_bytes"),
    [
        (16, 48, RANK_BYTES),
        pytest.param(64, 128, FURTHER_RANK_BYTES, marks=pytest.mark.soak),  # traced, that takes its time
    ],
)
def test_each_further_rank_costs_as_little_as_those_before(
    digest: RankDigest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, many: int, rank_bytes: int
):
    def run_each(work: Any, sizes: Mapping[str, int], **options: Any) -> Iterator[tuple[str, RankDigest]]:
        for rank, path in enumerate(sizes):
            yield path, _of_rank(digest, rank, path, len(sizes))

    monkeypatch.setattr(tracedoc.pipeline, "run_each", run_each)
    paths = [tmp_path / f"rank-{rank}.json" for rank in range(many)]
    for path in paths:
        path.touch()
    assert _peak_bytes(paths) - _peak_bytes(paths[:few]) < (many - few) * rank_bytes


def _of_rank(digest: RankDigest, rank: int, path: str, ranks: int) -> RankDigest:
    """Return the digest as another process would send it for another rank, where all is somewhat later."""
    own = pickle.loads(pickle.dumps(digest))
    table = own.collectives
    later = rank * 1000
    everyone = tuple(range(ranks))
    moved = dataclasses.replace(
        table,
        kinds=tuple(replace(kind, group=everyone, group_size=ranks) for kind in table.kinds),
        start_ns=table.start_ns + later,
        end_ns=table.end_ns + later,
    )
    return replace(own, rank=rank, source=path, world_size=ranks, collectives=moved)


def _peak_bytes(paths: list[Path]) -> int:
    diagnose(paths[:2])  # what is imported late and kept for good is not counted
    gc.collect()  # what other tests left is not collected in between
    tracemalloc.start()
    for piece in render_pieces(diagnose(paths), "json"):
        assert piece
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
