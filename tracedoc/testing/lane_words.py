"""Read lanes drawn as text into segments: what stands where in a step, in milliseconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from tracedoc.testing.document import OPERATIONS, SHARDED_LANES, STRATEGIES

Direction = Literal["HtoD", "DtoH", "DtoD", "PtoP"]

DEFAULT_STEPS: Final = 5
LANE_LEAD_MS: Final = 1.0

BLOCKING: Final = {"sync": "cudaStreamSynchronize", "malloc": "cudaMalloc", "free": "cudaFree"}
"""Lanes in which the host is inside a runtime call, and the call."""

COMPUTE: Final = ("compute", "optimizer")
CPU_OPTIMIZER: Final = "Optimizer.step"
"""What a host interval is called in which an optimizer runs that launches nothing."""

RECOMPUTED: Final = "aten::linear"
"""The operator around what is computed again: the backward graph itself never calls it."""

LANES: Final = (*COMPUTE, "copy", "memset", *OPERATIONS, "loader", *BLOCKING, "host", "backward")
"""Every lane's name."""

_DIRECTIONS: Final[dict[str, Direction]] = {"HtoD": "HtoD", "DtoH": "DtoH", "DtoD": "DtoD", "PtoP": "PtoP"}
_NUMBER: Final = r"\d+(?:\.\d+)?"
_INTERVAL: Final = re.compile(rf"({_NUMBER})-({_NUMBER})")
_SIZE: Final = re.compile(rf"({_NUMBER})(B|KiB|MiB|GiB)")
_TIMES: Final = re.compile(r"x(0*[1-9]\d*)")
_LENGTH: Final = re.compile(rf"({_NUMBER})(us|ms)")
_SETTING: Final = re.compile(rf"(step|steps|lead)\s*:\s*({_NUMBER})")
_STRATEGY: Final = re.compile(r"strategy\s*:\s*(\w+)")
_SECTION: Final = re.compile(r"rank\s+(\d+)\s*:")
_STEPS: Final = re.compile(r"(?:rank\s+(\d+)\s+)?steps?\s+(\d+(?:,\d+)*)\s*:")
_SIZES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class LanesError(ValueError):
    """Lanes that cannot be read; ``line`` counts from 1 within the text."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


class Segment(msgspec.Struct, frozen=True):
    """One interval of a lane, in milliseconds since the step began, and the words about it."""

    lane: str
    start_ms: float
    end_ms: float
    line: int
    nbytes: int | None = None
    count: int = 1
    each_ms: float | None = None
    direction: Direction = "HtoD"
    pageable: bool = False
    lead_ms: float | None = None
    linked: bool = True
    name: str = ""
    grid: int = 132
    dtype: str = "BFloat16"
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    workers: bool = False
    unit: str = ""
    prefetch: bool = False
    op: str = ""
    dims: tuple[tuple[int, ...], ...] = ()
    recomputed: bool = False
    stream: int | None = None

    def parts(self) -> list[tuple[float, float]]:
        """Return the intervals of the ``count`` kernels, copies or collectives that it stands for."""
        stride = (self.end_ms - self.start_ms) / self.count
        length = stride if self.each_ms is None else self.each_ms
        starts = [self.start_ms + i * stride for i in range(self.count)]
        if self.each_ms is None:  # neighbours share their ends exactly, whatever the division gave
            return list(zip(starts, [*starts[1:], self.end_ms], strict=True))
        return [(start, start + length) for start in starts]


class Drawing(msgspec.Struct):
    """What a text draws: its settings, and the lanes of all ranks, of single ones, and of single steps.

    The keys of ``by_step`` are a rank, ``None`` for all of them, and a step.
    """

    step_ms: float | None = None
    steps: int = DEFAULT_STEPS
    lead_ms: float = LANE_LEAD_MS
    strategy: str = ""
    common: dict[str, list[Segment]] = msgspec.field(default_factory=dict)
    by_rank: dict[int, dict[str, list[Segment]]] = msgspec.field(default_factory=dict)
    by_step: dict[tuple[int | None, int], dict[str, list[Segment]]] = msgspec.field(default_factory=dict)


def read_lanes(text: str, drawing: Drawing) -> Drawing:
    """Return ``drawing`` with what ``text`` says; raises :class:`LanesError` with the line that is wrong."""
    lanes = drawing.common
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if section := _SECTION.fullmatch(line):
            lanes = drawing.by_rank.setdefault(int(section[1]), {})
        elif section := _STEPS.fullmatch(line):
            lanes = {}
            for step in section[2].split(","):
                drawing.by_step[int(section[1]) if section[1] else None, int(step)] = lanes
        elif strategy := _STRATEGY.fullmatch(line):
            if strategy[1] not in STRATEGIES:
                raise LanesError(number, f"unknown strategy {strategy[1]!r}; known: {', '.join(STRATEGIES)}")
            drawing.strategy = strategy[1]
        elif setting := _SETTING.fullmatch(line):
            _set(drawing, setting[1], setting[2], number)
        else:
            name, *words = line.split()
            if name not in LANES:
                raise LanesError(number, f"unknown lane {name!r}; lanes are {', '.join(LANES)}")
            lanes.setdefault(name, []).extend(_segments(name, words, number))
    return drawing


def _set(drawing: Drawing, name: str, value: str, line: int) -> None:
    if name == "steps":
        if not value.isdigit() or int(value) < 1:
            raise LanesError(line, f"steps: {value} is not a whole number from 1 on")
        drawing.steps = int(value)
    elif name == "step":
        drawing.step_ms = float(value)
    else:
        drawing.lead_ms = float(value)


def _segments(lane: str, words: list[str], line: int) -> list[Segment]:
    if words == ["-"]:
        return []
    segments: list[Segment] = []
    for word in words:
        if interval := _INTERVAL.fullmatch(word):
            start, end = float(interval[1]), float(interval[2])
            if end <= start:
                raise LanesError(line, f"{word} ends before it starts")
            segments.append(Segment(lane, start, end, line))
        elif not segments:
            raise LanesError(line, f"expected an interval such as 0-60 after {lane}, not {word!r}")
        else:
            segments[-1] = _described(segments[-1], word)
    if not segments:
        raise LanesError(line, f"expected an interval such as 0-60 after {lane}")
    for one in segments:
        if one.each_ms is not None and one.each_ms * one.count > (one.end_ms - one.start_ms) * 1.000001:
            raise LanesError(line, f"{one.count} of {one.each_ms:g} ms do not fit into the interval")
    return segments


def _described(one: Segment, word: str) -> Segment:
    """Return the segment with what ``word`` says about it."""
    for lanes, pattern, says in _WORDS:
        if one.lane in lanes and (match := pattern.fullmatch(word)):
            return replace(one, **says(match))
    raise LanesError(one.line, f"{word!r} says nothing about {one.lane}")


_DEVICE_LANES: Final = (*OPERATIONS, *COMPUTE, "copy", "memset")

_WORDS: Final[
    tuple[tuple[Container[str], re.Pattern[str], Callable[[re.Match[str]], dict[str, Any]]], ...]
] = (
    (
        (*OPERATIONS, "copy", "memset"),
        _SIZE,
        lambda match: {"nbytes": int(float(match[1]) * _SIZES[match[2]])},
    ),
    (_DEVICE_LANES, _TIMES, lambda match: {"count": int(match[1])}),
    (
        _DEVICE_LANES,
        _LENGTH,
        lambda match: {"each_ms": float(match[1]) / (1000 if match[2] == "us" else 1)},
    ),
    (_DEVICE_LANES, re.compile(rf"lead=({_NUMBER})"), lambda match: {"lead_ms": float(match[1])}),
    ((*OPERATIONS, *COMPUTE), re.compile("unlinked"), lambda _: {"linked": False}),
    ((*OPERATIONS, "compute"), re.compile("dtype=(.*)"), lambda match: {"dtype": match[1]}),
    (COMPUTE, re.compile(r"grid=([1-9]\d*)"), lambda match: {"grid": int(match[1])}),
    (
        OPERATIONS,
        re.compile(r"ranks=(\d+(?:,\d+)+)"),
        lambda match: {"ranks": tuple(sorted(int(rank) for rank in match[1].split(",")))},
    ),
    (OPERATIONS, re.compile(r"stream=([1-9]\d*)"), lambda match: {"stream": int(match[1])}),
    (("send", "recv"), re.compile(r"peer=(\d+)"), lambda match: {"peer": int(match[1])}),
    (
        ("copy",),
        re.compile("|".join(_DIRECTIONS)),
        lambda match: {"direction": _DIRECTIONS[match[0]]},
    ),
    (("copy",), re.compile("pageable"), lambda _: {"pageable": True}),
    (("host",), re.compile("optimizer"), lambda _: {"name": CPU_OPTIMIZER}),
    (("compute", "optimizer", "host"), re.compile("name=(.*)"), lambda match: {"name": match[1]}),
    (("compute",), re.compile(r"op=(\S+)"), lambda match: {"op": match[1]}),
    (
        ("compute",),
        re.compile(r"dims=(\d+(?:[x,]\d+)*)"),
        lambda match: {"dims": tuple(tuple(map(int, one.split("x"))) for one in match[1].split(","))},
    ),
    (("compute",), re.compile("recomputed"), lambda _: {"op": RECOMPUTED, "recomputed": True}),
    (SHARDED_LANES, re.compile(r"unit=(\S+)"), lambda match: {"unit": match[1]}),
    (("allgather",), re.compile("prefetch"), lambda _: {"prefetch": True}),
    (("loader",), re.compile("workers"), lambda _: {"workers": True}),
)
"""What a word says of an interval: on which lanes, how it is written, and the fields that it sets."""
