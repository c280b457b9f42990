"""Diagnoses made by hand: what reports are tested on."""

from __future__ import annotations

from typing import Any

from tracedoc.diagnosis import (
    Budget,
    BudgetLocation,
    CaptureBudget,
    Comparison,
    Detail,
    Diagnosis,
    Evidence,
    FactRecord,
    Finding,
    Fix,
    Gain,
    Instance,
    RankReport,
    RunInfo,
    StepBudget,
    Strategy,
    Verdict,
)
from tracedoc.errors import Limit
from tracedoc.ledger import Ledger, LedgerCause, LedgerRow
from tracedoc.tables import (
    CollectiveRow,
    ExpectedCurve,
    KernelRow,
    MemoryCurve,
    PathStretch,
    PhaseRow,
    Picture,
    PictureRow,
    TransferRow,
    TransferSpeeds,
    UnitCall,
    UnitTimeline,
    Waits,
)

HOSTILE = "<script>alert('\"x\"')</script>[bold red]\x1b[31m\x00\u202egnp.exe🔥"


def _times(parts: dict[str, Any], factor: int) -> dict[str, Any]:
    scaled = {
        name: value * factor
        for name, value in parts.items()
        if name.endswith("_ms") and value is not None and not isinstance(value, dict)
    }
    return parts | scaled


def sharded(hosts: tuple[str, str] = ("gpu-node-a", "gpu-node-b")) -> Diagnosis:
    """Return 7 of 8 H100 ranks under FSDP2, with two findings, limits and unknown verdicts."""
    ranks = (0, 1, 2, 4, 5, 6, 7)
    parts: dict[str, Any] = {
        "step_ms": 400.0,
        "compute_ms": 250.0,
        "exposed_comm_ms": 130.0,
        "exposed_copy_ms": 2.0,
        "idle_ms": 18.0,
        "comm_ms": 200.0,
        "overlap_frac": 0.35,
        "exposed_transfer_ms": 40.0,
        "exposed_wait_ms": 90.0,
        "pipeline_wait_ms": 0.0,
        "exposed_comm_unsplit_ms": 0.0,
        "blocking_comm_ms": 120.0,
        "idle_causes_ms": {"launch": 10.0, "allocator": 5.0, "unknown": 3.0},
    }
    late = parts | {"exposed_comm_ms": 50.0, "exposed_wait_ms": 10.0, "idle_ms": 98.0}
    late["idle_causes_ms"] = {"allocator": 88.0, "launch": 10.0}
    late["overlap_frac"] = 0.75
    reports = tuple(
        RankReport(
            rank,
            f"/scratch/anna/runs/fsdp2/rank-{rank}.json.gz",
            hosts[rank // 4],
            "NVIDIA H100 80GB HBM3",
            CaptureBudget(**_times(late if rank == 5 else parts, 5), span_ms=2000.0),
            Budget(**(late if rank == 5 else parts), at=BudgetLocation(rank, 5)),
            tuple(
                StepBudget(
                    **(late if rank == 5 else parts),
                    index=index,
                    complete=index < 7,
                    start_ms=400.0 * (index - 3),
                )
                for index in range(3, 8)
            ),
        )
        for rank in ranks
    )
    straggler = Finding(
        id="straggler-rank/rank-5",
        rule_id="straggler-rank",
        severity="critical",
        confidence="high",
        title="Every rank waits for one rank",
        message="Rank 5 enters its collectives 90 ms late in 4 of 4 steps; the other 6 GPUs wait.",
        why="A synchronous step ends when its last rank ends. The others hold their GPUs idle until then.",
        topic="straggler",
        ranks=(5,),
        steps=(3, 4, 5, 6),
        evidence=(
            Evidence(5, 5, 812_000_000, 900_000_000, "cudaMalloc in backward", 88.0, "ms"),
            Evidence(0, 5, 820_000_000, 910_000_000, "all-gather waits for rank 5", 90.0, "ms"),
        ),
        gain=Gain(10.0, 90.0, "ceiling", ("rank 5 becomes as fast as the median rank",)),
        fixes=(
            Fix(
                "deepspeed", "Empty the cache between steps", "get_accelerator().empty_cache()", "costs time"
            ),
            Fix(
                "any",
                "Let allocator segments grow in place",
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "none for numerics",
                "https://docs.pytorch.org/docs/stable/notes/cuda.html",
            ),
        ),
    )
    transfer = Finding(
        id="exposed-communication/run",
        rule_id="exposed-communication",
        severity="warning",
        confidence="medium",
        title="Communication that nothing hides",
        message="40 ms of the 400 ms step is communication with no compute beside it.",
        why="GPUs that only communicate do no arithmetic. Overlap exists to hide this time.",
        topic="communication",
        ranks=ranks,
        steps=(3, 4, 5, 6),
        evidence=(Evidence(0, 5, 910_000_000, 950_000_000, "all-gather of layers.*", 52.0, "gbps"),),
        gain=Gain(0.0, 40.0, "ceiling", ("the transfer hides completely", "compute is not slowed by it")),
        fixes=(
            Fix("ddp", "Reduce while the backward pass runs", "DDP(model, bucket_cap_mb=100)", "none"),
            Fix(
                "fsdp2",
                "Gather the next layer earlier",
                "for layer, after in zip(layers, layers[1:]):\n"
                "    layer.set_modules_to_forward_prefetch([after])",
                "memory for one more layer",
                "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
            ),
        ),
    )
    verdicts = (
        Verdict(
            "straggler-rank",
            "finding",
            (Comparison("late_ms / step_ms > min_share", 0.225, 0.05, True),),
            instances=(Instance("rank 5", "finding"), Instance("rank 0", "pass")),
        ),
        Verdict(
            "exposed-communication",
            "finding",
            (Comparison("exposed_comm_excluding_wait_ms / step_ms > min_share", 0.1, 0.05, True),),
        ),
        Verdict(
            "input-stall", "pass", (Comparison("input_stall_ms / step_ms > min_share", 0.0, 0.03, False),)
        ),
        Verdict("small-collectives", "yielded", reason="explained by exposed-communication (31 of 40 ms)"),
        Verdict("pipeline-bubble", "not_applicable", reason="no pipeline group in this run"),
        Verdict(
            "low-mfu",
            "unknown",
            (Comparison("mfu < min_mfu", None, 0.3, None, "shapes were not recorded"),),
            "shapes were not recorded",
        ),
        Verdict("memory-headroom", "unknown", reason="memory was not recorded"),
    )
    facts = {
        "step_ms": FactRecord(
            "ms", "run", 400.0, None, {"0": 400.0, "5": 400.0}, "Length of the median step."
        ),
        "overlap_frac": FactRecord("fraction", "rank", 0.35, None, {}, "Hidden / all communication."),
        "mfu": FactRecord(
            "fraction",
            "run",
            None,
            "shapes were not recorded",
            {},
            "Model FLOP/s over the peak of the device.",
        ),
        "kernels_per_step": FactRecord(
            "count", "rank", 1840, None, {"0": 1840, "5": {"unknown": "no launches"}}, "Kernels in the step."
        ),
    }
    picture = Picture(
        5,
        400.0,
        True,
        tuple(
            PictureRow(
                rank,
                0.0,
                400.0,
                {
                    "forward": ((0.0, 120.0), (130.0, 200.0)),
                    "backward": ((290.0, 350.0),),
                    "wait": ((200.0, 290.0),) if rank == 0 else ((350.0, 360.0),),
                    "communication": ((100.0, 140.0), (200.0, 290.0), (350.0, 390.0)),
                    "idle allocator": ((390.0, 400.0),),
                },
            )
            for rank in (0, 5)
        ),
        left_out=5,
        path=(
            PathStretch(0, "compute", 0.0, 200.0, "the forward pass"),
            PathStretch(5, "allocator", 200.0, 280.0),
            PathStretch(5, "host", 280.0, 290.0),
            PathStretch(5, "compute", 290.0, 350.0, "the backward pass"),
            PathStretch(5, "communication", 350.0, 390.0, "reduce_scatter"),
        ),
    )
    return Diagnosis(
        summary=(
            "Straggler: the other ranks wait 90 ms of the 400 ms step for rank 5 (cudaMalloc in backward). "
            "Exposed communication: gathers of layers.* run at 52 GB/s. Fixing both: 400 -> 270 ms at best."
        ),
        run=RunInfo(
            8,
            ranks,
            "8x NVIDIA H100 80GB HBM3",
            "nccl",
            Strategy("fsdp2", "high", ("FSDP::all_gather ranges",)),
            tuple(report.source for report in reports),
            steps_judged=4,
            cycle=2,
            cycles=(1, 2),
        ),
        budget=Budget(**parts, at=BudgetLocation(0, 5)),
        ranks=reports,
        findings=(straggler, transfer),
        verdicts=verdicts,
        facts=facts,
        limits=(
            Limit("missing-ranks", "rank 3 is missing", "straggler findings cover ranks 0-2 and 4-7"),
            Limit("no-shapes", "shapes were not recorded", "MFU and tokens per second are unknown"),
        ),
        detail=Detail(
            collectives=(
                CollectiveRow(
                    "all_gather",
                    "default",
                    8,
                    "bf16",
                    64.0,
                    26_214_400,
                    1_677_721_600,
                    120.0,
                    80.0,
                    55.0,
                    25.0,
                    52.0,
                ),
                CollectiveRow(
                    "reduce_scatter", "default", 8, "", 32.0, None, None, 80.0, 50.0, None, None, None
                ),
            ),
            kernels=(
                KernelRow("sm90_xmma_gemm_bf16bf16_bf16f32", "gemm", 640, 180.0),
                KernelRow("void at::native::vectorized_elementwise_kernel<4>", "elementwise", 900, 30.0),
            ),
            picture=picture,
            phases=(
                PhaseRow("forward", 120.0, 90.0, 60.0, 20.0),
                PhaseRow("backward", 260.0, 150.0, 140.0, 110.0),
                PhaseRow("optimizer", 20.0, 10.0, 0.0, 0.0),
            ),
            waits=Waits(
                (0, 5), (5, 6), ((90.0, 45.0), (10.0, None)), ((5, 5), (None, None)), left_out_ranks=5
            ),
            transfers=TransferSpeeds(
                (
                    TransferRow("all_gather", 8, 1 << 20, 64, 20.0, 40.0, 50.0, 80.0),
                    TransferRow("all_gather", 8, 1 << 24, 64, 90.0, 100.0, 110.0, 90.0),
                    TransferRow("reduce_scatter", 8, 1 << 22, 1, 10.0, 10.0, 10.0),
                ),
                (ExpectedCurve(8, 160.0, float(1 << 20)),),
            ),
            unit_timeline=UnitTimeline(
                0,
                5,
                400.0,
                (
                    UnitCall("layers.0", "gather", "forward", 100.0, 140.0, 120.0, 140.0),
                    UnitCall("layers.1", "gather", "forward", 140.0, 160.0),
                    UnitCall("layers.0", "reduction", "backward", 350.0, 390.0, 380.0, 390.0),
                ),
            ),
            memory=MemoryCurve(5, (0.0, 100.0, 400.0), (1 << 30, 3 << 30, 1 << 30), (4 << 30,) * 3, 8 << 30),
        ),
        ledger=Ledger(
            step_ms=420.0,
            ideal_ms=280.0,
            unexplained_ms=12.0,
            causes=(
                LedgerCause(
                    "ranks.host",
                    88.0,
                    (80.0, 86.0, 90.0),
                    90.0,
                    (5,),
                    "cudaMalloc in backward",
                    told_by=("straggler-rank",),
                ),
                LedgerCause("link.transfer", 31.0, (2.0, 4.0, 9.0), 58.0, partner="ranks.host"),
                LedgerCause("host.launch", 15.0, (8.0, 10.0, 12.0), 20.0, place="the forward pass"),
                LedgerCause("link.latency", 3.5, (3.0, 3.5, 4.0), 3.5),
                LedgerCause("input.wait", 2.5, (2.5, 2.5, 2.5), 2.5),
            ),
            rows=(
                LedgerRow(("ranks.host",), 86.0, "straggler-rank/rank-5"),
                LedgerRow(("link.transfer",), 35.0),
                LedgerRow(("host.launch",), 14.0),
            ),
            steps=(3, 4, 5, 6),
            confidence="high",
        ),
        tool_version="0.1.0",
    )


def healthy() -> Diagnosis:
    """Return one GPU that computes nearly all the time: no finding, no limit."""
    budget = Budget(
        100.0, 97.0, 0.0, 0.0, 3.0, 0.0, None, 0.0, 0.0, 0.0, 0.0, None, {"launch": 3.0}, BudgetLocation(0, 2)
    )
    return Diagnosis(
        summary="Compute-bound: 97 % of the 100 ms step is compute.",
        run=RunInfo(
            1, (0,), "1x NVIDIA A100-SXM4-80GB", "", Strategy("unknown", "low"), ("runs/a/rank-0.json",), 3
        ),
        budget=budget,
        ranks=(RankReport(0, "runs/a/rank-0.json", "", "NVIDIA A100-SXM4-80GB", None, budget, ()),),
        findings=(),
        verdicts=(Verdict("input-stall", "pass"), Verdict("few-steps", "pass")),
        facts={"step_ms": FactRecord("ms", "run", 100.0)},
        limits=(),
        tool_version="0.1.0",
    )


def cpu() -> Diagnosis:
    """Return two CPU ranks over gloo, as small jobs look: mostly exposed, one note."""
    budget = Budget(
        50.0, 20.0, 30.0, 0.0, 0.0, 30.0, 0.0, 0.0, 0.0, 0.0, 30.0, None, {}, BudgetLocation(0, 1)
    )  # fmt: skip
    note = Finding(
        "exposed-communication/run", "exposed-communication", "note", "high",
        "Communication that nothing hides", "30 ms of the 50 ms step is communication.", "", "communication",
        (0, 1), (), (), None, (),
    )  # fmt: skip
    return Diagnosis(
        summary="CPU run, only minor findings: exposed communication, up to 30 ms of the 50 ms step.",
        run=RunInfo(2, (0, 1), "cpu", "gloo", Strategy("ddp", "medium"), ("rank-0.json", "rank-1.json"), 2),
        budget=budget,
        ranks=(),
        findings=(note,),
        verdicts=(),
        facts={},
        limits=(Limit("cpu-trace", "this is a CPU trace", "shares of time are notes at most"),),
        tool_version="0.1.0",
    )


def hostile() -> Diagnosis:
    """Return a run in which every name tries to break the report."""
    budget = Budget(
        10.0,
        10.0,
        0.0,
        0.0,
        0.0,
        0.0,
        None,
        0.0,
        0.0,
        0.0,
        0.0,
        None,
        {HOSTILE: 0.5},
        BudgetLocation(0, None),
    )
    finding = Finding(
        "tiny-kernels/run", "tiny-kernels", "note", "low", HOSTILE, f"kernel {HOSTILE}\nsecond line", HOSTILE,
        "compute", (0,), (), (Evidence(0, None, 0, 1, HOSTILE),), Gain(0, 1.0, "ceiling", (HOSTILE,)),
        (Fix(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "javascript:alert(1)"),), "preview",
    )  # fmt: skip
    return Diagnosis(
        summary=f"10 ms/step. {HOSTILE}",
        run=RunInfo(None, (0,), HOSTILE, HOSTILE, Strategy(HOSTILE, "low", (HOSTILE,)), (HOSTILE,), 0),
        budget=budget,
        ranks=(RankReport(0, HOSTILE, HOSTILE, HOSTILE, None, budget, ()),),
        findings=(finding,),
        verdicts=(Verdict("tiny-kernels", "error", (Comparison(HOSTILE, HOSTILE, None, None),), HOSTILE),),
        facts={"name": FactRecord("text", "run", HOSTILE, None, {HOSTILE: HOSTILE}, HOSTILE)},
        limits=(Limit("odd", HOSTILE, HOSTILE),),
        detail=Detail(
            (CollectiveRow(HOSTILE, HOSTILE, None, HOSTILE, 1.0, None, None, 1.0, 1.0, None, None, None),),
            (KernelRow(HOSTILE, HOSTILE, 1, 1.0),),
            phases=(PhaseRow(HOSTILE, 10.0, 5.0, 1.0, 1.0),),
            picture=Picture(
                0,
                10.0,
                True,
                (PictureRow(0, 0.0, 10.0, {HOSTILE: ((0.0, 10.0),)}),),
                path=(
                    PathStretch(0, HOSTILE, 0.0, 5.0, HOSTILE),
                    PathStretch(-7, "compute", 5.0, 1e300),
                    PathStretch(0, "compute", 6.0, -1e300),
                ),
            ),
            waits=Waits((0, 1), (0,), ((1e300,), ()), ((0,), (7,))),
            transfers=TransferSpeeds(
                (
                    TransferRow(HOSTILE, -1, 1, 1, 1.0, 1.0, 1.0),
                    TransferRow(HOSTILE, 2, -5, 1, 0.0, 0.0, 0.0),
                ),
                (ExpectedCurve(2, -1.0, -1.0),),
            ),
            unit_timeline=UnitTimeline(
                0, 0, 10.0, (UnitCall(HOSTILE, HOSTILE, HOSTILE, 1.0, 2.0, None, 3.0),)
            ),
            memory=MemoryCurve(9, (0.0, 1.0), (-1, 5), (0, 10**30)),
        ),
        ledger=Ledger(
            10.0,
            -5.0,
            -1e300,
            (LedgerCause(HOSTILE, 1e300, (0.0, 1e300, 0.0), 0.0, (-7,), HOSTILE, HOSTILE, (HOSTILE,)),),
            rows=(
                LedgerRow((HOSTILE,), 1e300, HOSTILE),
                LedgerRow(("none such",), -1e300),
                LedgerRow((), 0.0),
            ),
        ),
        tool_version="0.1.0",
    )


DIAGNOSES = {"sharded": sharded, "healthy": healthy, "cpu": cpu, "hostile": hostile}
