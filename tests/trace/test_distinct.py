"""Distinct values are those of NumPy, whether they lie close together or far apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tracedoc.trace.distinct import (
    difference,
    distinct,
    intersection,
    is_among,
    median,
    medians_by_value,
    places_by_value,
    quantile,
    union,
)

FAR = 2**62


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
@pytest.mark.parametrize(
    "values", [[], [5], [3, 1, 3, 2, 1], [-1, 0, -1, 7], [-128, 127], [-128, *range(127)]]
)
def test_values_close_together_come_once_and_in_order(
    values: list[int], dtype: type[np.signedinteger]
) -> None:
    found = distinct(np.array(values, dtype=dtype))
    assert found.tolist() == sorted(set(values))
    assert found.dtype == dtype


def test_values_far_apart_come_once_and_in_order() -> None:
    values = np.array([FAR, -FAR, 3, FAR, 3], dtype=np.int64)
    assert distinct(values).tolist() == [-FAR, 3, FAR]


def test_the_values_given_stay_as_they_were() -> None:
    values = np.array([FAR, 3, 1], dtype=np.int64)
    distinct(values)
    assert values.tolist() == [FAR, 3, 1]


def test_sets_of_rows_join_meet_and_differ() -> None:
    one, other = np.array([4, 1, 4, 2]), np.array([2, 9])
    assert union(one, other).tolist() == [1, 2, 4, 9]
    assert intersection(one, other).tolist() == [2]
    assert difference(one, other).tolist() == [1, 4]


@pytest.mark.parametrize("wanted", [[], [2], [9, 2], [-FAR, 4, FAR]])
def test_membership_is_told_of_each_value(wanted: list[int]) -> None:
    values = np.array([4, 1, 4, 2, FAR, -5], dtype=np.int64)
    assert is_among(values, wanted).tolist() == [value in wanted for value in values.tolist()]


def test_no_values_are_among_any() -> None:
    assert is_among(np.empty(0, dtype=np.int32), [1, 2]).tolist() == []


def test_a_diagnosis_needs_no_masked_arrays(repository: Path) -> None:
    program = (
        "import sys\n"
        "from tracedoc.pipeline import Options, diagnose\n"
        "for path in sys.argv[1:]: diagnose(path, Options(jobs=1))\n"
        "if 'numpy.ma' in sys.modules: sys.exit('np.unique or np.median was called: see trace/distinct.py')\n"
    )
    runs = sorted((repository / "sample_traces").glob("*_ddp_*"))
    assert runs
    subprocess.run([sys.executable, "-c", program, *map(str, runs)], cwd=repository, check=True)


@pytest.mark.parametrize("values", [[], [4], [7, -1, 7, FAR, -1, 7]])
def test_each_value_comes_with_its_places_in_order(values: list[int]) -> None:
    found = {value: places.tolist() for value, places in places_by_value(np.array(values, dtype=np.int64))}
    assert list(found) == sorted(set(values))
    assert found == {value: [n for n, one in enumerate(values) if one == value] for value in values}


@pytest.mark.parametrize("keys", [[], [4], [7, -1, 7, FAR, -1, 7], [2, 2, 2, 2]])
def test_medians_are_those_of_the_values_beside_each_key(keys: list[int]) -> None:
    values = np.array([10, -3, 40, 2**60, 8, 11][: len(keys)], dtype=np.int64)
    found, medians = medians_by_value(np.array(keys, dtype=np.int64), values)
    assert found.tolist() == sorted(set(keys))
    expected = [float(np.median([v for k, v in zip(keys, values, strict=True) if k == key])) for key in found]
    assert medians.tolist() == expected


@pytest.mark.parametrize("values", [[4], [4, 1], [3, 1, 2], [0.5, 0.25, 4.0, 1.5], [1.0, np.nan, 2.0]])
def test_medians_and_quantiles_are_those_of_numpy(values: list[float]) -> None:
    np.testing.assert_array_equal(median(values), np.median(values))
    for share in (0.0, 0.25, 0.9):
        np.testing.assert_array_equal(quantile(values[:2], share), np.quantile(values[:2], share))


def test_medians_along_an_axis_are_those_of_numpy() -> None:
    table = np.array([[3, 1, 9], [2, 8, 8]])
    assert median(table, axis=0).tolist() == [2.5, 4.5, 8.5]
    assert median(table, axis=1).tolist() == [3.0, 8.0]
    assert np.isnan(median([]))
