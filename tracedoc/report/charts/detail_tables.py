"""Lay out the detail of a diagnosis as tables of text, without the columns that would be empty."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from tracedoc.diagnosis import Diagnosis, FactRecord, Verdict
from tracedoc.idle_causes import WORDS
from tracedoc.report.texts import one_line
from tracedoc.report.view import phase_name
from tracedoc.tables import CollectiveRow, HostDetail, KernelRow, PhaseRow, UnitRow
from tracedoc.units import (
    format_between,
    format_bytes,
    format_ms,
    format_percent,
    format_quantity,
    format_ranges,
    three_digits,
)

Row = TypeVar("Row")
Column = tuple[str, bool, Callable[[Row], str]]


class Table(msgspec.Struct, frozen=True):
    """A table as text: titles, which columns hold numbers, and rows whose first cell names them."""

    caption: str
    titles: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]

    def only(self, titles: Sequence[str]) -> Table:
        """The columns of these titles, as far as there are any."""
        kept = [position for position, title in enumerate(self.titles) if title in titles]
        return Table(
            self.caption,
            tuple(self.titles[one] for one in kept),
            tuple(self.numbers[one] for one in kept),
            tuple(tuple(row[one] for one in kept) for row in self.rows),
        )

    def first(self, most: int) -> Table:
        """So many rows at most."""
        return msgspec.structs.replace(self, rows=self.rows[:most])


SHORTEST_PHASE_MS = 0.001
"""Shorter phases are no rows of the table."""


def phase_table(phases: Sequence[PhaseRow]) -> Table | None:
    """Return the phases of the analysed step; ``None`` without any."""
    phases = [row for row in phases if row.span_ms >= SHORTEST_PHASE_MS]
    communicates = any(row.comm_ms for row in phases)
    columns: list[Column[PhaseRow]] = [
        ("Phase", False, lambda row: one_line(phase_name(row.phase))),
        ("Lasts", True, lambda row: format_ms(row.span_ms)),
        ("Compute", True, lambda row: format_ms(row.compute_ms)),
        ("Communication", True, lambda row: format_ms(row.comm_ms) if communicates else ""),
        ("Exposed", True, lambda row: format_ms(row.exposed_comm_ms) if communicates else ""),
    ]
    return _table("By phase; work counts for the phase that launched it", columns, phases)


def collective_table(rows: Sequence[CollectiveRow]) -> Table | None:
    """Return the collectives of the analysed step by kind; ``None`` without any."""
    matched = any(row.wait_ms is not None for row in rows)
    columns: list[Column[CollectiveRow]] = [
        ("Operation", False, lambda row: one_line(row.op.replace("_", "-"))),
        ("Group", False, lambda row: one_line(row.group)),
        ("Ranks", True, lambda row: "" if row.group_size is None else str(row.group_size)),
        ("Type", False, lambda row: one_line(row.dtype)),
        ("Calls", True, lambda row: format_quantity(row.calls_per_step, "count")),
        ("Median size", True, lambda row: "" if row.bytes_median is None else format_bytes(row.bytes_median)),
        ("Time", True, lambda row: format_ms(row.time_ms)),
        ("Exposed", True, lambda row: format_ms(row.exposed_ms)),
        ("Wait", True, lambda row: _ms(row.wait_ms)),
        ("Transfer", True, lambda row: _ms(row.transfer_ms)),
        ("Arrivals apart", True, lambda row: _ms(row.arrival_spread_ms)),
        ("Mostly last", False, _last),
        ("Bus bandwidth", True, _busbw),
        ("Expected", True, lambda row: _gbps(row.expected_gbps)),
    ]
    split = (
        "wait ends when the last rank comes, and transfer begins there"
        if matched
        else "wait and transfer can be separated only with the traces of all ranks of a group"
    )
    return _table(f"By kind, in the analysed step, with most time first; {split}", columns, rows)


def host_tables(host: HostDetail | None) -> tuple[Table, ...]:
    """Tables of what the host did while its device was idle, of its waits, and of long gaps."""
    if host is None:
        return ()
    whole = sum(row.idle_ms for row in host.causes)
    tables = (
        _table(
            "Idle time of the device in the analysed step, by what the host does meanwhile",
            [
                ("The host", False, lambda row: WORDS[row.cause].host if row.cause in WORDS else row.cause),
                ("Idle", True, lambda row: format_ms(row.idle_ms)),
                ("Share", True, lambda row: format_percent(row.idle_ms / whole) if whole > 0 else ""),
            ],
            host.causes,
        ),
        _table(
            "Waits of the host for the device; only idle time after a wait is lost",
            [
                ("Asked for by", False, lambda row: one_line(row.operator)),
                ("Call", False, lambda row: one_line(row.call) if row.call != row.operator else ""),
                ("Where", False, lambda row: one_line(row.where)),
                ("In", False, lambda row: one_line(row.line)),
                ("Waits", True, lambda row: str(row.count)),
                ("Leave it idle", True, lambda row: str(row.draining)),
                ("Host waits", True, lambda row: format_ms(row.blocked_ms)),
                ("Idle after", True, lambda row: format_ms(row.idle_ms)),
            ],
            host.syncs,
        ),
        _table(
            "Long gaps in which the host launches nothing",
            [
                ("The host is in", False, lambda row: one_line(row.doing)),
                ("Where", False, lambda row: one_line(row.where)),
                ("Gaps", True, lambda row: str(row.count)),
                ("Longest", True, lambda row: format_ms(row.longest_ms)),
                ("Idle", True, lambda row: format_ms(row.idle_ms)),
            ],
            host.away,
        ),
    )
    return tuple(table for table in tables if table is not None)


def unit_table(rows: Sequence[UnitRow]) -> Table | None:
    """Return the sharded units, each in its passes; ``None`` without any."""
    caption = (
        "Medians over the complete steps of the rank that stands for the run. Launched is how long ahead of "
        "the end of the compute before, or how late; compute to hide behind is what the transfer can hide "
        "behind; stall is idle time of the compute stream that the gather ended"
    )
    columns: list[Column[UnitRow]] = [
        ("Unit", False, lambda row: one_line(row.name)),
        ("Pass", False, lambda row: one_line(row.phase)),
        ("Size", True, lambda row: "" if row.nbytes is None else format_bytes(row.nbytes)),
        ("Gathers", True, lambda row: format_quantity(row.gathers_per_step, "count")),
        ("Launched", True, lambda row: _ahead(row.launch_lag_ms)),
        ("Gather", True, lambda row: _ms(row.gather_ms)),
        ("Wait", True, lambda row: _ms(row.wait_ms)),
        ("Transfer", True, lambda row: _ms(row.transfer_ms)),
        ("Compute to hide behind", True, lambda row: _ms(row.compute_beside_ms)),
        ("Stall", True, lambda row: _ms(row.stall_ms)),
        ("Units ahead", True, lambda row: "" if row.units_ahead is None else str(row.units_ahead)),
        ("Reduction", True, lambda row: _ms(row.reduction_ms)),
        ("Its stall", True, lambda row: _ms(row.reduction_stall_ms)),
    ]
    return _table(caption, columns, rows)


def step_words(diagnosis: Diagnosis) -> str:
    """Range and median of the complete steps of the rank that stands for the run; "" with fewer than two."""
    at = diagnosis.budget.at if diagnosis.budget is not None else None
    report = next((one for one in diagnosis.ranks if at is not None and one.rank == at.rank), None)
    lengths = sorted(step.step_ms for step in report.steps if step.complete) if report is not None else []
    if len(lengths) < 2:
        return ""
    middle = lengths[(len(lengths) - 1) // 2]
    words = (
        f"{len(lengths)} complete steps: {format_ms(lengths[0])} to {format_ms(lengths[-1])}, "
        f"median {format_ms(middle)}"
    )
    jitter = diagnosis.number("step_jitter_frac")
    return words if jitter is None else f"{words}, jitter {format_percent(jitter)}"


def grouped_values(record: FactRecord) -> str:
    """Return the values of a fact by key in words, keys of one value together: ``0-6: 12 ms; 7: 31 ms``."""
    keys: dict[str, list[str]] = {}
    for key, value in record.values.items():
        text = (
            f"unknown: {value.get('unknown', '')}"
            if isinstance(value, dict)
            else format_quantity(value, record.unit)
        )
        keys.setdefault(text, []).append(key)
    return "; ".join(
        f"{format_ranges(map(int, alike)) if all(map(str.isdecimal, alike)) else ', '.join(alike)}: {text}"
        for text, alike in keys.items()
    )


def unchecked(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield why rules could not be judged, with their ids, the reason of most rules first."""
    rules: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.outcome == "unknown":
            rules.setdefault(one_line(verdict.reason) or "not known", []).append(verdict.rule_id)
    for reason, ids in sorted(rules.items(), key=lambda item: -len(item[1])):
        yield reason, tuple(ids)


def _table(caption: str, columns: Iterable[Column[Row]], rows: Sequence[Row]) -> Table | None:
    if not rows:
        return None
    filled = [
        (title, number, cells)
        for title, number, text in columns
        if any(cells := tuple(text(row) for row in rows))
    ]
    return Table(
        caption,
        tuple(title for title, _, _ in filled),
        tuple(number for _, number, _ in filled),
        tuple(zip(*(cells for _, _, cells in filled), strict=True)),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else format_ms(value)


def _ahead(lag_ms: float | None) -> str:
    """When something was launched in words: ``81 ms ahead``, ``2 ms late``."""
    return "" if lag_ms is None else f"{format_ms(abs(lag_ms))} {'late' if lag_ms > 0 else 'ahead'}"


def _gbps(value: float | None) -> str:
    return "" if value is None else format_quantity(value, "gbps")


def _busbw(row: CollectiveRow) -> str:
    if row.busbw_gbps is None and row.least_busbw_gbps:
        return f"at least {_gbps(row.least_busbw_gbps)}"
    return _gbps(row.busbw_gbps)


def _last(row: CollectiveRow) -> str:
    """Return the rank that came last to more than half of the operations: ``rank 7 (4 of 5)``."""
    total = sum(row.last_arrivals.values())
    for rank, times in row.last_arrivals.items():
        if total > 1 and 2 * times > total:
            return f"rank {one_line(rank)} ({times} of {total})"
    return ""


MOST_LETTERS = 72

# What an elementwise or reducing kernel of PyTorch applies, and the wrappers around it that say nothing.
_FUNCTION = re.compile(r"\b(?:\w*[Ff]unctor\w*|\w+_kernel_cuda|\w+_cuda_kernel)\b")
_WRAPPERS = frozenset({"AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor", "UnaryFunctor"})


def kernel_table(rows: Sequence[KernelRow]) -> Table | None:
    """The kernels of the analysed step by name, in the order of :func:`_by_loss`; ``None`` without any."""
    total = sum(row.time_ms for row in rows)
    columns: list[Column[KernelRow]] = [
        ("Kernel", False, lambda row: short_name(row.name)),
        ("Category", False, lambda row: one_line(row.category)),
        ("Calls", True, lambda row: str(row.calls)),
        ("Time", True, lambda row: format_ms(row.time_ms)),
        ("Share", True, lambda row: format_percent(row.time_ms / total) if total > 0 else ""),
    ]
    if any(row.lost_ms is not None for row in rows):
        columns += [
            ("TFLOP/s", True, lambda row: "" if row.tflops is None else three_digits(row.tflops)),
            ("GB/s", True, lambda row: "" if row.gbps is None else three_digits(row.gbps)),
            ("Lost", True, lost_words),
        ]
    return _table("Shares are of the time of all kernels", columns, sorted(rows, key=_by_loss))


def lost_words(row: KernelRow) -> str:
    """What kernels lose, "" where that is not known; results of older versions have one number."""
    if row.lost_ms is None:
        return ""
    most = row.lost_ms if row.lost_most_ms is None else row.lost_most_ms
    return format_between(row.lost_ms, most, format_ms)


def _by_loss(row: KernelRow) -> tuple[float, float]:
    """Sorts kernels by the time that they lose, then by the time that they take."""
    return -(row.lost_most_ms or row.lost_ms or 0.0), -row.time_ms


def by_category(rows: Sequence[KernelRow]) -> tuple[tuple[str, list[KernelRow]], ...]:
    """The kernels of each category, those that lose most first; the categories in the same order."""
    found: dict[str, list[KernelRow]] = {}
    for row in sorted(rows, key=_by_loss):
        found.setdefault(row.category, []).append(row)

    def together(item: tuple[str, list[KernelRow]]) -> tuple[float, float]:
        lost, taken = zip(*map(_by_loss, item[1]), strict=True)
        return sum(lost), sum(taken)

    return tuple(sorted(found.items(), key=together))


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
