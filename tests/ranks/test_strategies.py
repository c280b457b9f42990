"""The strategy of a run is named only where its traces show it, and look-alikes keep their own names."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.known_runs import diagnosis_of
from tracedoc.ranks.strategy import decide
from tracedoc.ranks.strategy_kinds import FAMILIES
from tracedoc.timeline.build import build_timeline
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import StrategySigns, Traffic, strategy_signs
from tracedoc.trace.kineto import read_trace

MIB = 2**20
F, B, OPT, OTHER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER

# What the README beside the traces says of each run: name, family, sharding.
RUNS = {
    "ddp": ("DDP", "ddp", "none"),
    "nw_acc": ("DDP", "ddp", "none"),
    "fsdp2": ("FSDP2 (reshard after forward)", "fsdp2", "full"),
    "fsdp2_norsh": ("FSDP2 (no reshard after forward)", "fsdp2", "gradients"),
    "fsdp2_mp": ("FSDP2 (reshard after forward)", "fsdp2", "full"),
    "hsdp": ("FSDP2 HSDP (reshard after forward)", "fsdp2", "hybrid-full"),
    "fsdp1": ("FSDP1 (FULL_SHARD)", "fsdp1", "full"),
    "fsdp1_sgo": ("FSDP1 (SHARD_GRAD_OP)", "fsdp1", "gradients"),
    "tp": ("tensor parallel (TP 2)", "tp", "unknown"),
    "pp": ("pipeline parallel (1F1B, 4 micro-batches)", "pipeline", "unknown"),
    "ac": ("DDP", "ddp", "none"),
    "comp": ("DDP", "ddp", "none"),
    "gan": ("DDP", "ddp", "none"),
    "acc": ("DDP", "ddp", "none"),
    "ds1": ("ZeRO-1", "zero-1", "optimizer"),
    "ds2": ("ZeRO-2", "zero-2", "gradients"),
    "ds3": ("DeepSpeed ZeRO-3", "zero-3", "full"),
    "ds3sg": ("DeepSpeed ZeRO-3", "zero-3", "full"),
    "patho_none": ("DDP", "ddp", "none"),
    "patho_straggler": ("DDP", "ddp", "none"),
    "patho_slowloader": ("DDP", "ddp", "none"),
    "patho_smallbucket": ("DDP", "ddp", "none"),
    "crash1": ("DDP", "ddp", "none"),
}
# Backward passes a step, and calls a step by operation and phase.
COUNTS: dict[str, tuple[int, dict[tuple[str, Phase], int]]] = {
    "ddp": (1, {("all_reduce", B): 9}),
    "nw_acc": (4, {("all_reduce", B): 9}),
    "fsdp2": (1, {("all_gather", F): 5, ("all_gather", B): 4, ("reduce_scatter", B): 5}),
    "fsdp2_norsh": (1, {("all_gather", F): 5, ("reduce_scatter", B): 5}),
    "fsdp2_mp": (
        2,
        {("all_gather", F): 10, ("all_gather", B): 8, ("reduce_scatter", B): 5, ("all_reduce", OTHER): 1},
    ),
    "hsdp": (
        1,
        {("all_gather", F): 5, ("all_gather", B): 4, ("reduce_scatter", B): 5, ("all_reduce", B): 5},
    ),
    "fsdp1": (1, {("all_gather", F): 5, ("all_gather", B): 4, ("reduce_scatter", B): 5}),
    "fsdp1_sgo": (1, {("all_gather", F): 5, ("reduce_scatter", B): 5}),
    "tp": (1, {("all_reduce", F): 4, ("all_reduce", B): 4}),
    "patho_smallbucket": (1, {("all_reduce", B): 9}),
    "ds1": (2, {("all_reduce", B): 1, ("all_reduce", OTHER): 2, ("all_gather", OPT): 1}),
    "ds2": (2, {("all_reduce", B): 2, ("all_reduce", OTHER): 2, ("all_gather", OPT): 1}),
}
TECHNIQUES: dict[str, dict[str, object]] = {
    "ac": {"activation_checkpointing": True},
    "ddp": {"activation_checkpointing": False, "compiled": False},
    "comp": {"compiled": True},
    "acc": {"micro_batches": 2, "reducing_micro_batches": 1},
    "fsdp2_mp": {
        "parameter_dtype": "bfloat16",
        "reduction_dtype": "float32",
        "matrix_dtype": "bfloat16",
        "micro_batches": 2,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_are_recognised(shared_traces: Path, name: str) -> None:
    strategy = diagnosis_of(shared_traces / "cpu_gloo" / name).run.strategy
    assert (strategy.name, strategy.family, strategy.sharding) == RUNS[name]
    assert strategy.evidence


@pytest.mark.parametrize("name", COUNTS)
def test_signs_hold_the_counts_of_the_step(shared_traces: Path, name: str) -> None:
    trace = read_trace(str(shared_traces / "cpu_gloo" / name / "rank0.json.gz"))
    signs = strategy_signs(build_timeline(trace))
    passes, calls = COUNTS[name]
    assert signs.passes == passes
    shown = {(t.op, t.phase): signs.calls(t.op, t.phase) for t in signs.traffic}
    assert shown == calls


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_are_facts(shared_traces: Path, name: str) -> None:
    facts = diagnosis_of(shared_traces / "cpu_gloo" / name).facts
    assert {fact: facts[fact].value for fact in TECHNIQUES[name]} == TECHNIQUES[name]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ddp_resnet_a100_2rank_r0", "DDP"),
        ("ddp_resnet_mi300_8rank_r0", "DDP"),
        ("ddp_resnet_v100_ws1_healthy", "single process"),
        ("dlrm_v100_2rank_r1", "DDP with sharded embeddings"),
        ("dlrm_8rank_v100", "DDP with sharded embeddings"),
        ("resnet50_2020_array_toplevel", "single process"),
    ],
)
def test_public_gpu_traces_are_recognised(shared_traces: Path, name: str, strategy: str) -> None:
    assert diagnosis_of(shared_traces / name).run.strategy.name == strategy


def moved(
    op: str,
    phase: Phase,
    calls: int,
    nbytes: int | None = 8 * MIB,
    *,
    group: str = "",
    size: int | None = None,
    site: str = "",
) -> Traffic:
    return Traffic(op, phase, group, size, "float32", site, calls, (nbytes or 0) * calls, nbytes)


def signs_of(*traffic: Traffic, seen: str = "", **changes: object) -> StrategySigns:
    signs = StrategySigns(
        whole=True,
        seen=frozenset(seen.split()),
        marks=tuple((mark, 1) for mark in sorted(seen.split())),
        traffic=traffic,
        passes=1,
        reducing=1,
        collectives=sum(t.calls for t in traffic),
    )
    return replace(signs, **changes)  # type: ignore[arg-type]


ZERO = (moved("all_reduce", B, 2), moved("all_gather", OPT, 1))

CASES: dict[str, tuple[StrategySigns, int | None, str, str]] = {
    "one process": (signs_of(), 1, "single process", "single"),
    "DataParallel is one process": (signs_of(seen="data_parallel"), 1, "DataParallel", "data-parallel"),
    "a wrapper alone in the world": (signs_of(seen="ddp"), 1, "single process", "single"),
    "DDP with tiny collectives": (signs_of(moved("all_reduce", B, 3, 512), seen="ddp"), 8, "DDP", "ddp"),
    "SyncBatchNorm is not tensor parallel": (
        signs_of(moved("all_gather", F, 20, 2048), moved("all_reduce", B, 25), seen="ddp"), 8, "DDP", "ddp",
    ),
    "a sharded optimizer under DDP": (
        signs_of(moved("all_reduce", B, 9), moved("broadcast", OPT, 26), seen="ddp zero_redundancy"), 8,
        "DDP with ZeroRedundancyOptimizer", "zero-redundancy-optimizer",
    ),
    "a gradient norm over DTensors is not tensor parallel": (
        signs_of(
            moved("all_gather", F, 5), moved("all_gather", B, 4), moved("reduce_scatter", B, 5),
            moved("all_reduce", OTHER, 1, 104, site="functional"),
            seen="fsdp2", fsdp2_units=5,
        ), 8, "FSDP2 (reshard after forward)", "fsdp2",
    ),
    "FSDP2 beside tensor parallelism": (
        signs_of(
            moved("all_gather", F, 5), moved("all_gather", B, 4), moved("reduce_scatter", B, 5),
            moved("all_reduce", F, 8, site="functional"), moved("all_reduce", B, 8, site="functional"),
            seen="fsdp2", fsdp2_units=5,
        ), 8, "FSDP2 (reshard after forward) with tensor parallel", "fsdp2",
    ),
    "one unit does not tell whether it is freed": (
        signs_of(moved("all_gather", F, 1), moved("reduce_scatter", B, 1), seen="fsdp2", fsdp2_units=1), 8,
        "FSDP2 (one unit)", "fsdp2",
    ),
    "FSDP1 without sharding": (
        signs_of(moved("all_reduce", B, 5), seen="fsdp1"), 8, "FSDP1 (NO_SHARD)", "fsdp1",
    ),
    "one unit of FSDP1 is not freed after forward either": (
        signs_of(moved("all_gather", F, 1), moved("reduce_scatter", B, 1), seen="fsdp1"), 8,
        "FSDP1 (one unit)", "fsdp1",
    ),
    "FSDP1 that keeps its units after forward": (
        signs_of(
            moved("all_gather", F, 5), moved("reduce_scatter", B, 5), seen="fsdp1", marks=(("fsdp1", 5),),
        ), 8, "FSDP1 (SHARD_GRAD_OP)", "fsdp1",
    ),
    "FSDP1 over replicas": (
        signs_of(
            moved("all_gather", F, 5, size=4), moved("all_gather", B, 4, size=4),
            moved("reduce_scatter", B, 5, size=4), moved("all_reduce", B, 5, size=2), seen="fsdp1",
        ), 8, "FSDP1 (HYBRID_SHARD)", "fsdp1",
    ),
    "ZeRO-1 reduces once for several micro-batches": (
        signs_of(*ZERO, passes=4, reducing=1), 8, "ZeRO-1", "zero-1",
    ),
    "ZeRO-2 reduces in each micro-batch": (signs_of(*ZERO, passes=4, reducing=4), 8, "ZeRO-2", "zero-2"),
    "one micro-batch cannot tell ZeRO-1 from ZeRO-2": (signs_of(*ZERO), 8, "ZeRO-1 or ZeRO-2", "zero-1-or-2"),
    "ZeRO-1 in a trace without sizes": (
        signs_of(moved("all_reduce", B, 2, None), moved("all_gather", OPT, 1, None), passes=4, reducing=1), 8,
        "ZeRO-1", "zero-1",
    ),
    "small gathers behind the optimizer hand out no parameters": (
        signs_of(moved("all_reduce", B, 9), moved("all_gather", OPT, 2, 512)), 8, "not recognised", "unknown",
    ),
    "layers that are split by hand": (
        signs_of(moved("all_reduce", F, 4, MIB), moved("all_reduce", B, 5, MIB)), 8,
        "tensor parallel", "tp",
    ),
    "layers that two ranks share, and four replicas": (
        signs_of(
            moved("all_reduce", F, 4, MIB, size=2), moved("all_reduce", B, 4, MIB, size=2),
            moved("all_reduce", B, 2, size=4),
        ), 8, "tensor parallel (TP 2, DP 4)", "tp",
    ),
    "layers that two of eight ranks share, and no sign of replicas": (
        signs_of(moved("all_reduce", F, 4, MIB, size=2), moved("all_reduce", B, 4, MIB, size=2)), 8,
        "tensor parallel (TP 2)", "tp",
    ),
    "layers that are split by hand, and their sequences": (
        signs_of(
            moved("all_gather", F, 4, MIB), moved("reduce_scatter", F, 4, MIB),
            moved("all_gather", B, 4, MIB), moved("reduce_scatter", B, 4, MIB),
        ), 8, "tensor parallel with sequence parallelism", "tp",
    ),
    "layers that are split by hand, in a trace without sizes": (
        signs_of(moved("all_reduce", F, 4, None), moved("all_reduce", B, 5, None)), 8,
        "tensor parallel", "tp",
    ),
    "metrics of a wrapped model, in a trace without sizes, are not tensor parallel": (
        signs_of(moved("all_reduce", F, 4, None), moved("all_reduce", B, 5, None), seen="ddp"), 8,
        "DDP", "ddp",
    ),
    "a loss over all ranks is not tensor parallel": (
        signs_of(moved("all_reduce", F, 1, MIB), moved("all_reduce", B, 9), seen="ddp"), 8, "DDP", "ddp",
    ),
    "what the forward pass adds up in another group than the backward pass is not tensor parallel": (
        signs_of(moved("all_reduce", F, 4, MIB, group="metrics"), moved("all_reduce", B, 9), seen="ddp"), 8,
        "DDP", "ddp",
    ),
    "ZeRO-3 with its optimizer on the host": (
        signs_of(moved("all_gather", F, 9), seen="zero3 cpu_adam"), 8, "DeepSpeed ZeRO-3 with CPU offload",
        "zero-3",
    ),
    "Megatron's groups say how the model is split": (
        signs_of(
            moved("all_reduce", F, 64, group="TENSOR_MODEL_PARALLEL_GROUP"),
            moved("all_reduce", B, 64, group="TENSOR_MODEL_PARALLEL_GROUP"),
            groups=(("DATA_PARALLEL_GROUP", 4), ("PIPELINE_MODEL_PARALLEL_GROUP", 1),
                    ("TENSOR_MODEL_PARALLEL_GROUP", 2)),
        ), 8, "Megatron (TP 2, DP 4)", "megatron",
    ),
    "all forward passes before all backward passes": (
        signs_of(moved("send", F, 4), moved("recv", B, 4), passes=4), 2,
        "pipeline parallel (GPipe, 4 micro-batches)", "pipeline",
    ),
    "gradients that a server adds up are sent behind the backward pass": (
        signs_of(moved("send", OTHER, 12), moved("recv", OTHER, 12), passes=1), 2,
        "send and receive between ranks", "unknown",
    ),
    "samples of an actor come one way": (
        signs_of(moved("recv", F, 1), passes=3), 2, "send and receive between ranks", "unknown",
    ),
    "sends in every layer may be ring attention": (
        signs_of(moved("send_recv", F, 96), moved("send_recv", B, 96)), 4,
        "send and receive between ranks", "unknown",
    ),
    "an all-to-all alone does not say what it exchanges": (
        signs_of(moved("all_to_all", F, 8), moved("all_to_all", B, 8), moved("all_reduce", B, 9), seen="ddp"),
        8, "DDP with all-to-all exchange", "ddp",
    ),
    "experts over a group of their own": (
        signs_of(
            moved("all_to_all", F, 8, group="mesh_ep"), moved("all_to_all", B, 8, group="mesh_ep"),
            moved("all_gather", F, 5), moved("reduce_scatter", B, 5), seen="fsdp2", fsdp2_units=5,
        ), 8, "FSDP2 (no reshard after forward) with expert parallel", "fsdp2",
    ),
    "gradients reduced by hand": (
        signs_of(moved("all_reduce", B, 9)), 8, "data parallel, no known wrapper", "unknown",
    ),
    "nothing but small collectives": (
        signs_of(moved("all_reduce", OTHER, 2, 4)), 8, "not recognised", "unknown",
    ),
    "several processes that never talk": (signs_of(), 8, "not recognised", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_look_alikes_keep_their_names(case: str) -> None:
    signs, world_size, name, family = CASES[case]
    claim = decide([signs], world_size)
    assert (claim.name, claim.family) == (name, family)
    assert claim.family in FAMILIES
    assert claim.evidence


def test_ranks_with_different_wrappers_lower_the_confidence() -> None:
    wrapped, bare = signs_of(moved("all_reduce", B, 9), seen="ddp"), signs_of()
    assert decide([wrapped, wrapped], 2).confidence == "high"
    assert decide([wrapped, bare], 2).confidence == "medium"


def test_unknown_is_an_answer_without_any_rank() -> None:
    assert decide([], None).name == "single process"
    assert decide([], 8).name == "not recognised"
