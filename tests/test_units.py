"""How quantities become text."""

from __future__ import annotations

import pytest

from tracedoc.units import (
    format_bytes,
    format_count,
    format_gb,
    format_ms,
    format_percent,
    format_quantity,
    format_ranges,
    format_step_change,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 %"), (0.0003, "<0.1 %"), (0.004, "0.4 %"), (0.0099, "1 %"), (0.375, "38 %"), (1.0, "100 %")],
)
def test_shares_keep_a_decimal_only_below_one_percent(value: float, text: str) -> None:
    assert format_percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.0089, "8.9 us"),
        (0.25, "0.25 ms"),
        (9.44, "9.44 ms"),
        (31.0, "31 ms"),
        (412.4, "412 ms"),
    ],
)
def test_times_are_rounded_to_what_a_trace_supports(value: float, text: str) -> None:
    assert format_ms(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(160, "160 B"), (25 * 2**20, "25 MiB"), (1.5 * 2**30, "1.5 GiB"), (2**50, "1024 TiB")]
)
def test_sizes_are_powers_of_1024(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (80e9, "80 GB"),
        (141.2e9, "141 GB"),
        (1.54e9, "1.5 GB"),
        (999.6e6, "1 GB"),
        (0.95e9, "950 MB"),
        (-2.5e9, "-2.5 GB"),
        (999.6e3, "1 MB"),
        (960e3, "960 kB"),
        (12e3, "12 kB"),
        (960, "960 B"),
    ],
)
def test_memory_is_in_powers_of_1000_as_it_is_sold(value: float, text: str) -> None:
    assert format_gb(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.2e12, "1.2T"),
        (7e9, "7B"),
        (1.558e9, "1.56B"),
        (999.6e6, "1B"),
        (350e6, "350M"),
        (4.2e6, "4.2M"),
        (12_300, "12.3k"),
        (950, "950"),
    ],
)
def test_parameters_are_counted_in_short(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (52.3, "gbps", "52.3 GB/s"),
        (6.9e-5, "gbps", "69 kB/s"),
        (0.05, "gbps", "50 MB/s"),
        (0.0, "gbps", "0 GB/s"),
        (True, "bool", "yes"),
        ("nccl", "text", "nccl"),
        (377, "count", "377"),
    ],
)
def test_quantities_speak_in_their_unit(value: float | str | bool, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text


def test_runs_of_numbers_are_shortened() -> None:
    assert format_ranges((7, 0, 1, 2, 4, 6, 6)) == "0-2, 4, 6-7"
    assert format_ranges(()) == ""


@pytest.mark.parametrize(
    ("step_ms", "after_ms", "text"),
    [
        (54.9, (29.0, 31.0, 35.0), "54.9 -> about 31 ms (29 to 35)"),
        (18.98, (18.56, 18.6, 18.7), "19 -> about 18.6 ms (18.6 to 18.7)"),
        (2250.0, (1900.0, 2000.0, 2000.0), "2.25 -> about 2.0 s (1.9 to 2.0)"),
    ],
)
def test_a_step_that_changes_little_does_not_read_like_itself(
    step_ms: float, after_ms: tuple[float, float, float], text: str
) -> None:
    assert format_step_change(step_ms, after_ms) == text
