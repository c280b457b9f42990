"""Runs of hundreds of ranks: nothing in the answer grows faster than the ranks do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc.pipeline
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.whatif.evidence import MAX_FOUND
from tracedoc.worker import digest_file

RANKS = 300


@pytest.fixture(scope="module")
def many(sample_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """The diagnosis of a run in which every rank did what one rank of a sample did."""
    digest = digest_file(str(sample_traces / "synthetic_ddp_tiny_batch" / "rank-0.json.gz"))
    everyone = tuple(range(RANKS))
    kinds = tuple(replace(k, group=everyone, group_size=RANKS) for k in digest.collectives.kinds)
    operations = digest.collectives.with_kinds(kinds)
    folder = tmp_path_factory.mktemp("many")
    paths = [folder / f"rank-{rank}.json" for rank in everyone]
    for path in paths:
        path.touch()

    def copies(work, sizes, **options):
        for rank, path in enumerate(sizes):
            yield path, replace(digest, rank=rank, source=path, world_size=RANKS, collectives=operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracedoc.pipeline, "run_each", copies)
        return diagnose(paths, Options(select=("host-bound-launches",)))


def test_every_rank_is_judged_and_every_group_matched(many: Diagnosis):
    assert many.run.ranks_seen == tuple(range(RANKS))
    assert [one.code for one in many.limits] == ["host-profiled"]
    waits = many.facts["exposed_comm_unsplit_ms"].values
    assert set(waits.values()) == {0.0}


def test_a_finding_on_every_rank_keeps_some_places_of_each(many: Diagnosis):
    (finding,) = [finding for finding in many.findings if finding.rule_id == "host-bound-launches"]
    places = Counter(place.rank for place in finding.evidence)
    assert set(places) == set(range(RANKS))
    assert len(finding.evidence) <= MAX_FOUND
    assert len(set(places.values())) == 1
