"""The signs of a strategy in one rank's trace: how often ranges occur, and what is sent in which phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.timeline.activity import is_library_operator
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import CollectiveOp
from tracedoc.timeline.idle import launches_graphs
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.steps import HostStep
from tracedoc.trace import frameworks, vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.frameworks import FSDP2, ZERO3_MARK, shard_hook
from tracedoc.trace.kernels import KernelCategory
from tracedoc.trace.vocabulary import RuntimeRole

MARKS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (key, re.compile(pattern))
    for key, pattern in (
        ("ddp", r"DistributedDataParallel\.forward$"),
        ("data_parallel", r"DataParallel\.forward$"),
        ("fsdp2", r"FSDP::"),
        ("fsdp1", r"FullyShardedDataParallel\.forward$"),
        ("fsdp1_hook", r"FullyShardedDataParallel\."),
        ("megatron_fsdp", r"CustomFSDP\.forward$"),
        ("zero3", ZERO3_MARK.pattern),
        ("zero_redundancy", r"Optimizer\.step#ZeroRedundancyOptimizer\.step$"),
        ("cpu_adam", r"Optimizer\.step#DeepSpeedCPUAdam\.step$"),
        ("schedule", r"PP:"),
        ("stage_pass", r"(?:Forward|Backward) \d+$"),
        ("fused_tp", r"fused_(?:all_gather_(?:scaled_)?matmul|(?:scaled_)?matmul_reduce_scatter)"),
        ("embeddings", r"## .*(?:EmbeddingBagCollection|PooledEmbeddings)|.*SplitLookupFunction"),
        ("compiled", r"Torch-Compiled Region|CompiledFunction$|## Call CompiledFxGraph"),
    )
)
"""Host ranges that name a strategy or a technique; the first that fits counts."""

SHARDED_MARKS = frozenset({"fsdp1", "fsdp1_hook", "fsdp2", "megatron_fsdp", "zero3"})
"""Marks of strategies that gather parameters unit by unit."""

_FUNCTIONAL = re.compile(r"_c10d_functional(?:_autograd)?::")
_ANY_STEP = HostStep(0, np.iinfo(np.int64).min, np.iinfo(np.int64).max, False)


class Traffic(msgspec.Struct, frozen=True):
    """The collectives of one kind in one phase of the analysed step, over one group.

    ``group`` is the group's description where it has one, else its name. ``site`` is "fsdp-reduce" (inside
    FSDP2's reduction of gradients), "functional" (a functional collective, as DTensor uses) or "".
    ``nbytes`` adds up the payloads that are known; ``largest`` is the largest of them.
    """

    op: str
    phase: Phase
    group: str
    group_size: int | None
    dtype: str
    site: str
    calls: int
    nbytes: int
    largest: int | None


class StrategySigns(msgspec.Struct, frozen=True):
    """What one rank shows of the strategy, counted over its analysed step.

    ``seen`` holds the marks of the whole capture, ``marks`` how often each occurs in the step. ``whole``:
    the host's step was captured whole. ``passes`` are its backward passes, ``reducing`` those in which
    gradients are reduced, ``alternations`` how often a forward pass lies between two of them.
    ``groups`` are the descriptions and sizes of process groups.
    """

    whole: bool = False
    seen: frozenset[str] = frozenset()
    marks: tuple[tuple[str, int], ...] = ()
    traffic: tuple[Traffic, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    fsdp2_units: int = 0
    passes: int = 0
    reducing: int = 0
    alternations: int = 0
    recomputes: bool = False
    graph_launches: int = 0
    matrix_dtype: str = ""
    collectives: int = 0

    def count(self, mark: str) -> int:
        """Number of times that a mark occurs in the analysed step."""
        return dict(self.marks).get(mark, 0)

    def calls(self, ops: str | Iterable[str], *phases: Phase, site: str | None = None) -> int:
        """Return the calls of ``ops`` in ``phases`` (any without), asked for at ``site`` (any if None)."""
        return sum(traffic.calls for traffic in self.select(ops, *phases, site=site))

    def select(
        self, ops: str | Iterable[str], *phases: Phase, site: str | None = None
    ) -> tuple[Traffic, ...]:
        """Return the traffic of ``ops`` in ``phases`` (any without), asked for at ``site`` (any if None)."""
        wanted = {ops} if isinstance(ops, str) else set(ops)
        return tuple(
            traffic
            for traffic in self.traffic
            if traffic.op in wanted
            and (not phases or traffic.phase in phases)
            and (site is None or traffic.site == site)
        )


def strategy_signs(timeline: RankTimeline) -> StrategySigns:
    """The signs of the strategy in one rank's timeline."""
    trace, phases = timeline.trace, timeline.phases
    position = timeline.position_of(timeline.judged) if timeline.judged is not None else None
    step = timeline.host.steps[position] if position is not None else _ANY_STEP
    inside = slice(*np.searchsorted(trace.ts_ns, (step.start_ns, step.end_ns)).tolist())
    is_host = (trace.kind[inside] == int(Kind.CPU_OP)) | (trace.kind[inside] == int(Kind.ANNOTATION))
    used = np.bincount(trace.name[inside][is_host], minlength=len(trace.names))
    mark_of = {index: mark for index, name in enumerate(trace.names) if (mark := _mark_of(name)) is not None}
    marks: Counter[str] = Counter()
    for index, mark in mark_of.items():
        if used[index]:
            marks[mark] += int(used[index])
    marked = np.zeros(len(trace.names), dtype=bool)
    marked[list(mark_of)] = True
    marked_rows = trace.rows_of_names(marked, Kind.CPU_OP, Kind.ANNOTATION)
    seen = {mark_of[index] for index in distinct(trace.name[marked_rows]).tolist()}
    passes = [] if phases is None else [p for p in phases.passes if step.start_ns <= p[0] < step.end_ns]
    asked = _asked(timeline, step)
    return StrategySigns(
        whole=step.finished,
        seen=frozenset(seen),
        marks=tuple(sorted(marks.items())),
        traffic=_traffic(timeline, asked),
        groups=tuple(sorted({(g.description, g.size) for g in trace.info.groups if g.description})),
        fsdp2_units=sum(_is_fsdp2(trace.names[i], "pre_forward") for i in np.flatnonzero(used).tolist()),
        passes=len(passes),
        reducing=_reducing(passes, asked),
        alternations=_alternations(timeline, passes),
        recomputes=phases is not None
        and phases.host_spans(Phase.RECOMPUTE).clip(step.start_ns, step.end_ns).total_ns > 0,
        graph_launches=_graph_launches(trace, step),
        matrix_dtype=_matrix_dtype(trace, step),
        collectives=len(timeline.collectives),
    )


def plain_dtype(name: str) -> str:
    """Return a number format as PyTorch's users write it: ``float32`` for ``float``."""
    plain = name.replace("c10::", "").lower()
    return {"float": "float32", "half": "float16", "double": "float64"}.get(plain, plain)


def _mark_of(name: str) -> str | None:
    return next((key for key, pattern in MARKS if pattern.match(name)), None)


def _asked(timeline: RankTimeline, step: HostStep) -> list[tuple[CollectiveOp, Phase, int]]:
    """Return the collectives of the step, each with its phase and the host time of its call."""
    phases = timeline.phases
    if phases is None:
        labels, times = [0] * len(timeline.collectives), [o.start_ns for o in timeline.collectives]
    else:
        labels, times = phases.of_collectives.tolist(), phases.asked_ns.tolist()
    return [
        (operation, Phase(label), at)
        for operation, label, at in zip(timeline.collectives, labels, times, strict=True)
        if step is _ANY_STEP or operation.step == step.index
    ]


def _traffic(timeline: RankTimeline, asked: list[tuple[CollectiveOp, Phase, int]]) -> tuple[Traffic, ...]:
    trace = timeline.trace
    descriptions = {group.name: group.description for group in trace.info.groups if group.description}
    times = np.array([at for _, _, at in asked], dtype=np.int64)
    in_reduction = _held(trace, lambda name: _is_fsdp2(name, "reduce"), times)
    in_functional = _held(trace, lambda name: _FUNCTIONAL.match(name) is not None, times)
    counted: dict[tuple[str, Phase, str, int | None, str, str], list[int | None]] = {}
    for number, (operation, phase, _) in enumerate(asked):
        site = "fsdp-reduce" if in_reduction[number] else "functional" if in_functional[number] else ""
        group = descriptions.get(operation.group_name, operation.group_name)
        size = operation.group_size or len(operation.group) or None
        dtype = plain_dtype(operation.dtype)
        counted.setdefault((operation.op, phase, group, size, dtype, site), []).append(operation.nbytes)
    return tuple(
        Traffic(
            *key,
            calls=len(sizes),
            nbytes=sum(size for size in sizes if size is not None),
            largest=max((size for size in sizes if size is not None), default=None),
        )
        for key, sizes in sorted(counted.items(), key=lambda item: tuple(map(str, item[0])))
    )


def _is_fsdp2(name: str, role: str) -> bool:
    hook = shard_hook(name)
    return hook is not None and hook.framework == FSDP2 and hook.role == role


def _held(trace: Trace, matches: Callable[[str], bool], times: npt.NDArray[np.int64]) -> list[bool]:
    """Mask of the times inside host ranges of such names, on any thread."""
    spans = trace.spans(trace.rows_named(matches, Kind.ANNOTATION, Kind.CPU_OP))
    return [bool(held) for held in spans.covered_ns(times, times + 1)]


def _reducing(passes: list[tuple[int, int]], asked: list[tuple[CollectiveOp, Phase, int]]) -> int:
    times = [at for operation, _, at in asked if operation.op in ("all_reduce", "reduce_scatter", "reduce")]
    ordered = np.sort(np.array(times, dtype=np.int64))
    edges = np.searchsorted(ordered, np.array(passes, dtype=np.int64).reshape(-1, 2))
    return int((edges[:, 1] > edges[:, 0]).sum())


def _alternations(timeline: RankTimeline, passes: list[tuple[int, int]]) -> int:
    """Count the gaps between backward passes in which a forward pass surely begins."""
    trace = timeline.trace
    starts = trace.ts_ns[trace.rows_named(frameworks.is_forward_operator, Kind.CPU_OP)]
    return sum(
        int(np.searchsorted(starts, following) > np.searchsorted(starts, end))
        for (_, end), (following, _) in pairwise(passes)
    )


def _graph_launches(trace: Trace, step: HostStep) -> int:
    rows = trace.rows_named(
        lambda name: vocabulary.runtime_role(name) is RuntimeRole.GRAPH_LAUNCH, Kind.RUNTIME
    )
    return int(((trace.ts_ns[rows] >= step.start_ns) & (trace.ts_ns[rows] < step.end_ns)).sum())


_MATRIX = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "aten::convolution"})


def _matrix_dtype(trace: Trace, step: HostStep) -> str:
    """Return the type of most matrix products of the step, "" where types are not recorded."""
    rows = trace.shapes.rows[trace.named_among(trace.shapes.rows, _MATRIX.__contains__)]
    rows = rows[(trace.ts_ns[rows] >= step.start_ns) & (trace.ts_ns[rows] < step.end_ns)]
    listed = [trace.shapes[row].types for row in rows.tolist()]
    types = Counter(one[1] for one in listed if len(one) > 1)
    return plain_dtype(types.most_common(1)[0][0]) if types else ""


PAIRED = (KernelCategory.ATTENTION, KernelCategory.NORMALISATION, KernelCategory.SOFTMAX)
"""Kernels of a forward pass with others for the backward pass, which say so in their names."""

_OF_BACKWARD = re.compile(r"backward|bwd|bn_bw|grad|fmha_cutlassb", re.IGNORECASE)


def shows_forward_only(timeline: RankTimeline) -> bool | None:
    """Whether forward passes alone were captured; ``None`` where neither operators nor kernels show that."""
    trace, categories = timeline.trace, timeline.events.categories
    backward = any(_OF_BACKWARD.search(trace.names[number]) for number in categories)
    if timeline.phases is not None or backward or KernelCategory.OPTIMIZER in categories.values():
        return False
    if trace.rows_named(
        lambda name: vocabulary.optimizer_step_class(name) is not None or vocabulary.is_backward_node(name)
    ).size:
        return False
    operators = trace.rows_named(is_library_operator, Kind.CPU_OP).size and not launches_graphs(trace)
    return True if operators or any(one in PAIRED for one in categories.values()) else None
