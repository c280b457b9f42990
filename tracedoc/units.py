"""Units of facts, and the only place where a quantity becomes text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec


class Unit(msgspec.Struct, frozen=True):
    """A unit as powers of time, data and items; ``kind`` distinguishes numbers, text and truth values.

    ``exponent`` is the power of ten to seconds, bytes and items: bytes a millisecond are not GB/s.
    """

    name: str
    time: int = 0
    data: int = 0
    items: int = 0
    kind: str = "number"  # "number" | "text" | "bool"
    exponent: int = 0


UNITS: dict[str, Unit] = {
    unit.name: unit
    for unit in (
        Unit("ms", time=1, exponent=-3),
        Unit("fraction"),
        Unit("ratio"),
        Unit("count", items=1),
        Unit("bytes", data=1),
        Unit("gbps", data=1, time=-1, exponent=9),
        Unit("per_s", items=1, time=-1),
        Unit("tflops", items=1, time=-1, exponent=12),
        Unit("text", kind="text"),
        Unit("bool", kind="bool"),
    )
}
"""Every unit by name. ``gbps`` is 1e9 bytes a second; ``fraction`` is 0..1 and printed as percent."""


def format_quantity(value: float | int | str | bool, unit: str, longest_ms: float = 0.0) -> str:
    """Return a value in the words of a report: ``31.2 ms``, ``38 %``, ``25 MiB``, ``52 GB/s``.

    ``longest_ms`` is the longest time that stands beside it, as in :func:`format_ms`.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit == "ms":
        return format_ms(float(value), longest_ms)
    if unit == "fraction":
        return format_percent(float(value))
    if unit == "bytes":
        return format_bytes(float(value))
    if unit == "gbps":
        return _rate(float(value))
    if unit == "per_s":
        return f"{_significant(float(value))}/s"
    if unit == "tflops":
        return f"{_significant(float(value))} TFLOP/s"
    return _significant(float(value))


def _rate(gbps: float) -> str:
    """A bandwidth in GB/s, a slow one in MB/s or kB/s, of powers of 1000."""
    for size, name in ((1.0, "GB/s"), (1e3, "MB/s")):
        if gbps == 0 or abs(gbps) * size >= 0.0995:
            return f"{_significant(gbps * size)} {name}"
    return f"{_significant(gbps * 1e6)} kB/s"


def format_ms(value: float, longest_ms: float = 0.0) -> str:
    """Return a time, rounded to what a trace supports: ``412 ms``, ``9.5 ms``, ``8.9 us``, ``2.13 s``.

    Beside a time of a second or more, ``longest_ms``, seconds begin at half of one: ``0.79 s``.
    """
    if abs(value) >= (499.5 if longest_ms >= 999.5 else 999.5):
        return f"{_significant(value / 1000)} s"
    if 0 < abs(value) < 0.0995:
        return f"{_significant(1000 * value)} us"
    return f"{_significant(value)} ms"


def format_step_change(step_ms: float, after_ms: tuple[float, float, float]) -> str:
    """The change of a step, with its range: ``54.9 -> about 31 ms (29 to 35)``.

    ``after_ms`` is low, likely and high. All numbers have one unit: seconds from one second on. Where the
    likely one would read like the step itself, they have three digits.
    """
    scale, unit = (1e-3, "s") if step_ms >= 999.5 else (1.0, "ms")
    alike = _two_digits(after_ms[1] * scale) == _two_digits(step_ms * scale)
    low, likely, high = ((three_digits if alike else _two_digits)(value * scale) for value in after_ms)
    span = "" if low == likely == high else f" ({low} to {high})"
    return f"{_significant(step_ms * scale)} -> about {likely} {unit}{span}"


def three_digits(value: float) -> str:
    """Return a number in three digits, with no exponent."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _two_digits(value: float) -> str:
    size = abs(value)
    if size >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 0.995 else f"{value:.2f}"


def format_percent(value: float) -> str:
    """Return a fraction as percent: ``38 %``; below one percent one decimal is kept, then ``<0.1 %``."""
    percent = 100.0 * value
    if 0 < percent < 0.05:
        return "<0.1 %"
    if 0 < abs(percent) < 0.95:
        return f"{percent:.1f} %"
    return f"{percent:.0f} %"


def format_between(low: float, high: float, write: Callable[[float], str]) -> str:
    """Return a range, its unit once if both ends have one: ``29 to 35 %``; one number if both read alike."""
    first, last = write(low), write(high)
    number, _, unit = first.rpartition(" ")
    if first == last:
        return last
    return f"{number if number and last.endswith(f' {unit}') else first} to {last}"


def format_bytes(value: float) -> str:
    """Return a size in B, KiB, MiB, GiB or TiB (powers of 1024)."""
    size = float(value)
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.5:
            return f"{_significant(size)} {name}"
        size /= 1024.0
    return f"{_significant(size)} TiB"


def format_gb(value: float) -> str:
    """Return a size in GB of 1e9 bytes, as GPUs are sold; small ones in MB or kB."""
    size = abs(value)
    if size >= 999.5e6:
        return f"{value / 1e9:.0f} GB" if size >= 99.95e9 else f"{value / 1e9:.1f} GB".replace(".0 GB", " GB")
    if size >= 999.5e3:
        return f"{value / 1e6:.0f} MB"
    return f"{value / 1e3:.0f} kB" if size >= 999.5 else f"{value:.0f} B"


def format_count(value: float) -> str:
    """Return a number of parameters: ``7B``, ``1.56B``, ``350M``, ``4.2M``."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{_significant(value / size)}{name}"
    return f"{value:.0f}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in order, with runs shortened: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _significant(value: float) -> str:
    magnitude = abs(value)
    if magnitude == 0 or magnitude >= 99.95:
        return f"{value:.0f}"
    if magnitude >= 9.95:
        text = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    elif magnitude >= 0.095:
        text = f"{value:.2f}"
    else:
        text = f"{value:.2g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def lowered(text: str) -> str:
    """A text within a sentence: without its capital, unless its first word is a name such as DDP."""
    first = text.partition(" ")[0]
    return text[0].lower() + text[1:] if first[1:].islower() or len(first) == 1 else text
