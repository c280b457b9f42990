"""Group the kernels of the analysed step by what they compute, under names that can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tracedoc.diagnosis import KernelRow
from tracedoc.report.texts import one_line
from tracedoc.units import format_ms, format_percent

MOST_LETTERS = 72

# What an elementwise or reducing kernel of PyTorch applies, and the wrappers around it that say nothing.
_FUNCTION = re.compile(r"\b(?:\w*[Ff]unctor\w*|\w+_kernel_cuda|\w+_cuda_kernel)\b")
_WRAPPERS = frozenset({"AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor", "UnaryFunctor"})


class NamedKernel(msgspec.Struct, frozen=True):
    """One kernel: its short name, its full one, and its calls, time and share of all listed kernels."""

    short: str
    name: str
    calls: int
    time: str
    share: str


class KernelGroup(msgspec.Struct, frozen=True):
    """All listed kernels of a category, those with most time first; ``percent`` is the share as a number."""

    category: str
    calls: int
    time: str
    share: str
    percent: float
    kernels: tuple[NamedKernel, ...]


def kernel_groups(rows: Sequence[KernelRow]) -> tuple[KernelGroup, ...]:
    """Return the categories of the kernels, those with most time first.

    Shares are of the summed time of all rows, communication with them.
    """
    total = sum(row.time_ms for row in rows)
    by_category: dict[str, list[KernelRow]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    groups = []
    for category, mine in sorted(by_category.items(), key=lambda item: -sum(row.time_ms for row in item[1])):
        time_ms = sum(row.time_ms for row in mine)
        groups.append(
            KernelGroup(
                category,
                sum(row.calls for row in mine),
                format_ms(time_ms),
                _share(time_ms, total),
                round(100.0 * time_ms / total, 2) if total > 0 else 0.0,
                tuple(
                    NamedKernel(
                        short_name(row.name),
                        row.name,
                        row.calls,
                        format_ms(row.time_ms),
                        _share(row.time_ms, total),
                    )
                    for row in sorted(mine, key=lambda row: -row.time_ms)
                ),
            )
        )
    return tuple(groups)


def short_name(name: str) -> str:
    """Return a kernel's name without namespaces, types and arguments, with the function that it applies.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)`` is
    ``vectorized_elementwise_kernel<CUDAFunctor_add>``.
    """
    text = one_line(name).removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", text, maxsplit=1)[0]
    short = head.rsplit("::", 1)[-1] or text
    applied = next((word for word in _FUNCTION.findall(text[len(head) :]) if word not in _WRAPPERS), "")
    if applied and applied != short:
        short = f"{short}<{applied}>"
    return short if len(short) <= MOST_LETTERS else f"{short[: MOST_LETTERS - 1]}…"


def _share(time_ms: float, total_ms: float) -> str:
    return format_percent(time_ms / total_ms) if total_ms > 0 else ""
