"""Hold that the first fix of a finding is one for what was seen, where several causes look alike."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.diagnosis import Finding, Fix
from tracedoc.judge.fixes import misfits
from tracedoc.judge.load import load_rules
from tracedoc.judge.rule import Rule
from tracedoc.ranks.code_places import may_feed_model
from tracedoc.run.job import Job, RankJob
from tracedoc.run.machine import read_samples
from tracedoc.testing.cases import write_job
from tracedoc.testing.lanes import parse_lanes
from tracedoc.timeline.script_code import CodePlace
from tracedoc.values import Unknown


@pytest.mark.parametrize("rule", load_rules(), ids=lambda rule: rule.id)
def test_a_fix_has_a_condition_or_its_rule_says_why_not(rule: Rule) -> None:
    free = [fix.title for fix in rule.fixes if not fix.when and not fix.unless]
    assert bool(free) == bool(rule.fits), free


def finding(folder: Path, rule: str, lanes: str, ranks: int = 2, dtype: str = "BFloat16") -> Finding:
    """Return what a rule finds in five steps of these lanes, whose collectives carry one type."""
    for builder in parse_lanes(lanes, ranks=ranks):
        path = folder / f"rank-{builder.rank}.json"
        builder.write(path)
        path.write_text(path.read_text().replace("BFloat16", dtype))
    found = tracedoc.diagnose([folder], tracedoc.Options(jobs=1, select=(rule,))).findings
    return next(one for one in found if one.rule_id == rule)


def test_exposed_gradients_are_told_to_hide(tmp_path: Path) -> None:
    """30 ms of gradients after the backward pass, 10 ms of a broadcast before the forward pass."""
    lanes = """
        host       10-20  name=DistributedDataParallel.forward
        broadcast  0-10   4MiB
        backward   25-70
        compute    10-70
        allreduce  70-100 256MiB
    """
    first = finding(tmp_path, "exposed-communication", lanes, dtype="Float").fixes[0]
    assert first.title == "Reduce gradients in bf16"
    # Those that travel in 16 bits already cannot be halved again.
    others = finding(tmp_path, "exposed-communication", lanes).fixes
    assert "Reduce gradients in bf16" not in [fix.title for fix in others]


def test_exposed_collectives_beside_the_gradients_are_told_to_go(tmp_path: Path) -> None:
    """5 ms of gradients; 20 ms of a broadcast before the forward pass, 10 ms of all-gathers at the end."""
    lanes = """
        host       20-30  name=DistributedDataParallel.forward
        broadcast  0-20   4MiB
        backward   40-80
        compute    20-85
        allreduce  85-90  256MiB
        allgather  90-100 1KiB x5
    """
    found = finding(tmp_path, "exposed-communication", lanes)
    assert found.fixes[0].title == "Remove communication that carries no gradients"
    assert "above all: 1 broadcast, 20 ms" in found.fixes[0].advice
    assert not any("bf16_compress_hook" in fix.change for fix in found.fixes)


def test_what_sharded_layers_exchange_is_not_told_to_go(tmp_path: Path) -> None:
    """30 ms of all-to-alls belong to the model, 5 ms are gradients."""
    lanes = """
        host       20-30  name=DistributedDataParallel.forward
        alltoall   0-30   2GiB x3
        backward   40-80
        compute    30-95
        allreduce  95-100 256MiB
    """
    titles = [fix.title for fix in finding(tmp_path, "exposed-all-to-all", lanes).fixes]
    assert "Remove communication that carries no gradients" not in titles
    assert not any(title.startswith("Reduce gradients") for title in titles)


def test_a_rank_that_runs_more_kernels_is_not_first_told_to_sort_its_samples(tmp_path: Path) -> None:
    lanes = """
        lead: 40
        compute    0-70  x20
        allreduce  70-100  64MiB
        rank 2:
          compute    0-95  x30
          allreduce  95-100  64MiB
    """
    first, second, *_ = finding(tmp_path, "straggler-rank", lanes, ranks=4).fixes
    assert first.title == "Remove what only this rank runs"
    assert second.title == "Give every rank the same work"


@pytest.mark.parametrize(
    ("loads", "workers", "cores", "first", "number"),
    [
        (
            40,
            0,
            16,
            "Load batches in worker processes",
            2,
        ),  # 40 ms of loading in 60 ms of training, twice as fast
        (80, 0, 16, "Load batches in worker processes", 7),  # 80 in 20; eight cores a rank, one for training
        (80, 0, 4, "Load batches in worker processes", 1),  # two ranks share them: one beside training
        (40, 2, 16, "More loader workers", 4),  # two are busy for 100 ms each, for 60 of training
        (40, 2, 2, "Make a sample cheaper", None),
    ],
)
def test_workers_are_suggested_by_what_loading_takes_beyond_those_there_are(
    tmp_path: Path, loads: int, workers: int, cores: int, first: str, number: int | None
) -> None:
    lanes = f"""
        step:      100
        loader     0-{loads} {"workers" if workers else ""}
        compute    {loads}-100  x20
    """
    loader = {"num_workers": workers, "prefetch_factor": 2 if workers else None}
    host = {"cpus": cores, "cpus_allowed": cores, "affinity": f"0-{cores - 1}"}
    write_job(tmp_path, [0, 1], {"framework": {"loaders": [loader]}, "environment": {"host": host}}, "")
    fix = finding(tmp_path, "input-stall", lanes).fixes[0]
    assert fix.title == first
    assert number is None or f"num_workers={number}," in fix.change


@pytest.mark.parametrize(
    ("sampler_ms", "first"),
    [(30.0, "Choose samples at less cost"), (3.0, "Load batches in worker processes")],
)
def test_workers_do_not_choose_samples(tmp_path: Path, sampler_ms: float, first: str) -> None:
    """Of 33 ms in the loader the sampler of the script takes most, or little."""
    waits = {"batches": 1, "waits_ms": {"-1": 33.0}, "index_ms": sampler_ms}
    part = {"loader": waits, "window": {"loader": {"wall_us": 500_000}}}
    write_job(tmp_path, [0, 1], {"framework": {"loaders": [{"num_workers": 0}]}, **part}, "")
    lanes = "step: 100\nloader 0-40\ncompute 40-100"
    fixes = finding(tmp_path, "input-stall", lanes).fixes
    assert fixes[0].title.startswith(first)


@pytest.mark.parametrize(("called", "feeds"), [(18, True), (19, True), (22, False)])
def test_code_before_the_model_may_feed_it(called: int, feeds: bool) -> None:
    """The loop calls the model in line 19."""
    main = "train.py(14): main"
    module = "torch/nn/modules/module.py(1782): _call_impl@1789"
    stacks = {"1": 30.0, "2": 9.0}
    step = {"step": 9, "whole": True, "long": False, "stacks": stacks}
    frames = [[], ["train.py(3): encode@5", f"{main}@{called}"], [module, f"{main}@19"]]
    entry = {"frames": frames, "sampled": [step], "loop": [f"{main}@21"]}
    job = Job((RankJob(0, samples=read_samples(entry)),))
    encode = CodePlace("train.py", 3, "encode", loading=False, time_ns=1)
    assert may_feed_model(job, encode) is feeds


def test_code_that_no_sample_shows_is_not_judged() -> None:
    assert isinstance(may_feed_model(Job(()), None), Unknown)


@pytest.mark.parametrize(
    ("strategy", "distance"),
    [("DDP with ZeroRedundancyOptimizer", 3), ("ZeRO-1", 1), ("DeepSpeed ZeRO-3", 1)],
)
def test_settings_of_deepspeed_are_for_its_jobs(strategy: str, distance: int) -> None:
    fix = Fix("deepspeed", "Overlap", "{}", "none")
    assert misfits([fix], strategy, ()) == [distance]
