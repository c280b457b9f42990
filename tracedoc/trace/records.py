"""What the events of a Kineto trace are decoded into: only the fields that columns and collectives need.

The fields stand in the order in which Kineto writes them, because msgspec looks for a key behind the last
one. Arguments are few, because every event pays for each: what only collectives say is a type of its own.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

NOTHING = msgspec.Raw(b"")
LEFT_OUT = object()
"""The category of what is of no use, whatever the file says: by its category an element is kept or not."""


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments of any event; values are whatever the file holds."""

    external_id: Any = msgspec.field(name="External id", default=-1)
    wait_on_stream: Any = None
    recorded_by: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    device: Any = None
    stream: Any = None
    correlation: Any = -1
    nbytes: Any = msgspec.field(name="bytes", default=None)
    grid: msgspec.Raw = NOTHING
    collective: msgspec.Raw = msgspec.field(name="Collective name", default=NOTHING)
    input_values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=NOTHING)
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    input_strides: msgspec.Raw = msgspec.field(name="Input Strides", default=NOTHING)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    old_external_id: Any = msgspec.field(name="external id", default=-1)


class InstantArgs(Args, gc=False, frozen=True):
    """The arguments of an instant, which may hold the allocator's totals, in bytes."""

    device_type: Any = msgspec.field(name="Device Type", default=None)
    device_id: Any = msgspec.field(name="Device Id", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)


class CollectiveFields(msgspec.Struct, gc=False, frozen=True):
    """The arguments that describe a collective; values are whatever the file holds."""

    name: Any = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_id: Any = msgspec.field(name="Process Group ID", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    src_rank: Any = msgspec.field(name="Src Rank", default=None)
    dst_rank: Any = msgspec.field(name="Dst Rank", default=None)


NO_ARGS = Args()
NO_INSTANT_ARGS = InstantArgs()


Category = TypeVar("Category")
Time = TypeVar("Time")


class Complete(msgspec.Struct, Generic[Category, Time], gc=False, tag_field="ph", tag="X"):
    """``"ph": "X"``; times are in microseconds, the start a float or, where that would round it, raw text."""

    cat: Category = ""  # type: ignore[assignment]
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Time = float("nan")  # type: ignore[assignment]
    dur: float = float("nan")  # without one, the event has no possible length
    args: Args = NO_ARGS


class Instant(msgspec.Struct, Generic[Category, Time], gc=False, tag_field="ph", tag="i"):
    """``"ph": "i"``; otherwise like :class:`Complete`."""

    cat: Category = ""  # type: ignore[assignment]
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Time = float("nan")  # type: ignore[assignment]
    dur: float = 0.0
    args: InstantArgs = NO_INSTANT_ARGS


AnyEvent = Complete[Any, Any] | Instant[Any, Any]


class MetadataArgs(msgspec.Struct, gc=False, frozen=True):
    """The names that metadata events give to processes and threads."""

    name: Any = ""


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """``"ph": "M"``."""

    cat: ClassVar[str] = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    args: MetadataArgs = MetadataArgs()


def _left_out(phase: str) -> Any:
    """The type of events of a phase that is of no use."""
    namespace = {"cat": LEFT_OUT}
    return msgspec.defstruct(f"LeftOut_{phase}", (), gc=False, tag_field="ph", tag=phase, namespace=namespace)


Untimed: Any = reduce(or_, map(_left_out, "sftCI"), Metadata)
"""Events without a time: metadata, flows (redundant with correlation ids), counters, and instants in a
deprecated spelling, which Kineto does not use."""
