"""A run of eight ranks with the collective durations of a published Llama-70B FSDP job on 8 MI300X.

The statistics (AMD-AGI/TraceLens, ``llama_70b_fsdp_mi300_nccl_summary_long.csv``, MIT) give, for each rank,
the mean duration of 160 large reduce-scatters and 318 large all-gathers. A rank's reduce-scatter lasts as
long as it waits for the last rank, plus the transfer; rank 4's has no wait in it. Each backward layer here
is drawn so that these means come out exactly: every rank gathers together, computes for a time of its own,
and reduces.
"""

from __future__ import annotations

import re
from pathlib import Path

from tracedoc.testing import TraceBuilder

REDUCE_SCATTER_MEAN_MS = {
    0: 71.832195, 1: 49.875652, 2: 31.408180, 3: 39.134205,
    4: 11.662767, 5: 26.203551, 6: 54.120736, 7: 52.210103,
}  # fmt: skip
"""Mean duration of one reduce-scatter of 855,654,400 fp32 elements on each rank."""

TRANSFER_MS = REDUCE_SCATTER_MEAN_MS[4]
ALL_GATHER_MS = 6.041878
"""Mean of the shortest all-gather of 855,654,400 bf16 elements over ranks."""

REDUCE_SCATTER_BYTES = 855_654_400 * 4
ALL_GATHER_BYTES = 855_654_400 * 2
LAYERS = 6
STEPS = 4
SLOWEST_COMPUTE_MS = 160.0
"""Backward compute of a layer on rank 4; the others are faster by what they wait."""

AHEAD_MS = 180.0
"""How far the host runs ahead of the GPU: a layer, so that every kernel is launched in time."""


def waiting_share(rank: int) -> float:
    """Return the share of a rank's reduce-scatter time that is waiting for rank 4."""
    return 1.0 - TRANSFER_MS / REDUCE_SCATTER_MEAN_MS[rank]


def step_ms() -> float:
    """Return the length of one step: every rank's, since each layer ends together."""
    return LAYERS * (ALL_GATHER_MS + SLOWEST_COMPUTE_MS + TRANSFER_MS)


def write_run(
    directory: Path,
    *,
    skew_ms: dict[int, float] | None = None,
    drift: dict[int, float] | None = None,
    hosts: bool = False,
    lost: tuple[int, int] | None = None,
    without: tuple[int, ...] = (),
    numbered: bool = True,
) -> None:
    """Write ``rank-<r>.json`` for each rank.

    ``skew_ms`` shifts the clock of a rank and ``drift`` lets it gain that share of the time; ``hosts`` gives
    every rank a host of its own. ``lost`` is a rank and the number of a reduce-scatter that its file lacks;
    ``without`` are ranks that were not captured; without ``numbered`` the files hold no
    sequence numbers, as those of older versions.
    """
    for rank in REDUCE_SCATTER_MEAN_MS:
        if rank in without:
            continue
        shift = (skew_ms or {}).get(rank, 0.0)
        rate = 1.0 + (drift or {}).get(rank, 0.0)

        def clock(time_ms: float, shift: float = shift, rate: float = rate) -> float:
            return shift + time_ms * rate

        builder = TraceBuilder(
            rank, 8, host=f"node{rank}" if hosts else "node0", device="AMD Instinct MI300X"
        )
        compute_ms = SLOWEST_COMPUTE_MS - (REDUCE_SCATTER_MEAN_MS[rank] - TRANSFER_MS)
        number = 0
        for step in range(STEPS):
            now = step * step_ms()
            builder.step(step, clock(now - AHEAD_MS - 1.0), clock(now + step_ms() - AHEAD_MS - 1.1))
            for _ in range(LAYERS):
                builder.collective(
                    "allgather", clock(now), clock(now + ALL_GATHER_MS), nbytes=ALL_GATHER_BYTES,
                    launch_ms=clock(now - AHEAD_MS), stream=20, seq=2 * number + 1,
                )  # fmt: skip
                begin = now + ALL_GATHER_MS
                for part in range(4):
                    builder.kernel(
                        "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64", clock(begin + part * compute_ms / 4),
                        clock(begin + (part + 1) * compute_ms / 4),
                        launch_ms=clock(now - AHEAD_MS + 0.1 + part * 0.05),
                    )  # fmt: skip
                number += 1
                arrive, end = begin + compute_ms, begin + SLOWEST_COMPUTE_MS + TRANSFER_MS
                if lost != (rank, number):
                    builder.collective(
                        "reducescatter", clock(arrive), clock(end), nbytes=REDUCE_SCATTER_BYTES,
                        dtype="Float", launch_ms=clock(now - AHEAD_MS + 0.5), stream=24,
                        seq=2 * number,
                    )  # fmt: skip
                now = end
        end = STEPS * step_ms()
        builder.step(STEPS, clock(end - AHEAD_MS - 1.0), clock(end + 1.5))
        builder.kernel(
            "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64",
            clock(end),
            clock(end + 1.0),
            launch_ms=clock(end - AHEAD_MS),
        )
        text = builder.to_json()
        if not numbered:
            text = re.sub(r'"Seq": ?\d+', '"Is asynchronized op": true', text)
        (directory / f"rank-{rank}.json").write_text(text)
