"""What torch, NCCL and gloo write about a collective, and what sharding frameworks write around launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

DTYPE_BYTES: Final = {
    "Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
KERNEL_DTYPE: Final = {
    "Float": "f32", "BFloat16": "bf16", "Half": "f16", "Double": "f64",
    "Long": "i64", "Int": "i32", "Byte": "u8", "Char": "i8", "Bool": "u8",
}  # fmt: skip
INPUT_TYPE: Final = {
    "Float": "float", "BFloat16": "c10::BFloat16", "Half": "c10::Half", "Double": "double",
    "Long": "long int", "Int": "int", "Byte": "unsigned char", "Char": "signed char", "Bool": "bool",
}  # fmt: skip


class Operation(msgspec.Struct, frozen=True):
    """The names that one collective has in each layer of the stack."""

    collective: str  # c10d's internal name, in "Collective name"
    operator: str  # the dispatcher's operator on the calling thread
    annotation: str  # what follows "nccl:"
    gloo: str  # what follows "gloo:"
    kernel: str  # with {dtype}
    scatter: Literal["", "in", "out"] = ""  # which side holds only this rank's share


KERNEL_ARGUMENT: Final = "(ncclDevKernelArgsStorage<4096ul>)"
OPERATIONS: Final[dict[str, Operation]] = {
    "allreduce": Operation(
        "allreduce", "c10d::allreduce_", "all_reduce", "all_reduce",
        "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL",
    ),
    "allgather": Operation(
        "_allgather_base", "c10d::_allgather_base_", "_all_gather_base", "all_gather",
        "ncclDevKernel_AllGather_RING_LL", "in",
    ),
    "reducescatter": Operation(
        # gloo implements reduce-scatter on its all-reduce, and names it so.
        "_reduce_scatter_base", "c10d::_reduce_scatter_base_", "_reduce_scatter_base", "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_{dtype}_RING_LL", "out",
    ),
    "broadcast": Operation(
        "broadcast", "c10d::broadcast_", "broadcast", "broadcast", "ncclDevKernel_Broadcast_RING_LL"
    ),
    "reduce": Operation(
        "reduce", "c10d::reduce_", "reduce", "reduce", "ncclDevKernel_Reduce_Sum_{dtype}_RING_LL"
    ),
    "alltoall": Operation(
        "all_to_all", "c10d::alltoall_base_", "all_to_all", "all_to_all", "ncclDevKernel_SendRecv"
    ),
    "send": Operation("send", "c10d::send", "send {rank}->{peer}", "send", "ncclDevKernel_SendRecv"),
    "recv": Operation("recv", "c10d::recv_", "recv {rank}<-{peer}", "recv", "ncclDevKernel_SendRecv"),
    "barrier": Operation(
        "allreduce", "c10d::barrier", "all_reduce_barrier", "barrier",
        "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL",
    ),
}  # fmt: skip
"""Every collective that :meth:`TraceBuilder.collective` knows, by its short name."""


def collective_arguments(
    operation: Operation,
    in_elements: int,
    out_elements: int,
    *,
    dtype: str,
    group: str,
    members: Sequence[int],
    seq: int,
) -> dict[str, object]:
    """The arguments of a collective on its NCCL kernel and its ``record_param_comms`` alike."""
    listed: list[object] = list(members)
    if len(members) > 30:  # Kineto shortens long lists
        listed = [*members[:29], "...", members[-1]]
    return {
        "Collective name": operation.collective,
        "In msg nelems": in_elements,
        "Out msg nelems": out_elements,
        "Group size": len(members),
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group,
        "Process Group Description": "default_pg" if group == "0" else group,
        "Process Group Ranks": f"[{', '.join(map(str, listed))}]",
        "Seq": seq,
    }


def gloo_shapes(
    operation: Operation, in_elements: int, out_elements: int, *, dtype: str
) -> tuple[list[object], list[str]]:
    """Return ``Input Dims`` and ``Input type`` of the c10d operator of a collective on gloo."""
    kind = INPUT_TYPE[dtype]
    if operation.scatter:
        return [[out_elements], [in_elements], [], [], []], [kind, kind, "", "Scalar", "Scalar"]
    return [[[in_elements]], [], [], [], [], []], ["TensorList", "", "", "", "Scalar", "Scalar"]


def gloo_values(members: Sequence[int], peer: int | None) -> tuple[str, ...]:
    """Return the ``Concrete Inputs`` of a send or receive on gloo: the other rank within the group."""
    return ("", "", str(members.index(peer)), "0") if peer is not None and peer in members else ()


STRATEGIES: Final = ("fsdp1", "fsdp2", "zero3")
SHARDED_LANES: Final = ("allgather", "reducescatter", "compute", "host")
"""Lanes that can belong to a unit."""

ZERO3_OPERATOR: Final = "LinearFunctionForZeroStage3"


class UnitUse(msgspec.Struct, frozen=True):
    """One interval of a lane that belongs to a unit; ``unit`` "root" has no name in FSDP2."""

    lane: str
    unit: str
    backward: bool
    prefetch: bool

    @property
    def thread(self) -> str:
        """The host thread that launches it."""
        return "autograd" if self.backward else "main"


def ranges_around(strategy: str, use: UnitUse) -> tuple[str, ...]:
    """Return the names of the ranges around a launch, the outermost first; ZeRO-3 writes none."""
    if strategy == "fsdp1":
        return _fsdp1(use)
    if strategy == "fsdp2":
        return _fsdp2(use)
    return ()


def _fsdp1(use: UnitUse) -> tuple[str, ...]:
    prefix = "FullyShardedDataParallel."
    if use.lane == "reducescatter":
        return (f"{prefix}_post_backward_hook",)
    hook = f"{prefix}_pre_backward_hook" if use.backward else f"{prefix}_pre_forward"
    fetch = f"{prefix}_pre_backward_prefetch" if use.backward else f"{prefix}_pre_forward_prefetch"
    return (hook, fetch) if use.prefetch else (hook,)


def _fsdp2(use: UnitUse) -> tuple[str, ...]:
    label = "" if use.unit == "root" else f" ({use.unit})"
    way = "backward" if use.backward else "forward"
    if use.lane == "reducescatter":
        return (f"FSDP::post_backward_reduce{label}",)
    if use.lane != "allgather":
        return (f"FSDP::pre_{way}{label}",)
    hook = f"FSDP::{way}_prefetch for {use.unit}" if use.prefetch else f"FSDP::pre_{way}{label}"
    return hook, f"FSDP::all_gather{label}"


def unit_of_part(pattern: str, part: int, parts: int, *, backward: bool) -> str:
    """Return the unit of one of ``parts`` intervals: ``*`` counts up in forward and down in backward."""
    return pattern.replace("*", str(parts - 1 - part if backward else part))
