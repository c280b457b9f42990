"""The condition language: what it admits, what its units allow, and its three-valued logic."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedoc.judge.expression import ExpressionError, Result, check, evaluate, parse
from tracedoc.values import Unknown, Value

UNITS = {
    "step_ms": "ms",
    "comm_ms": "ms",
    "overlap_frac": "fraction",
    "speedup": "ratio",
    "kernels": "count",
    "size_bytes": "bytes",
    "busbw_gbps": "gbps",
    "rate": "per_s",
    "strategy": "text",
    "is_ddp": "bool",
}


def value_of(text: str, **values: Value) -> Value:
    return evaluate(parse(text), values).value


# -- the language


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "(lambda: 1)()",
        "step_ms.real",
        "step_ms[0]",
        "2 ** 9 ** 9",
        "1 << 9999",
        "step_ms // 2",
        "step_ms % 2",
        "+step_ms",
        "~step_ms",
        "[1, 2]",
        "{1: 2}",
        "1 if is_ddp else 2",
        "[x for x in strategy]",
        "f'{step_ms}'",
        "b'bytes'",
        "1j",
        "...",
        "None",
        "step_ms is step_ms",
        "strategy in 'ddp'",
        "(x := 1)",
        "max(*strategy)",
        "max(1, key=2)",
        "max(1, 2, default=3)",
        "min",
        "min(1)",
        "abs(1, 2)",
        "sum(1, 2)",
        "step_ms > 1; 1",
        "step_ms > 1 # always",
        "step_ms >",
        "1if is_ddp else 2",
        "'\\d'",
        "",
        "  \n ",
        "\0",
        "1e999 > 0",
        "99999999999999999999 > 0",
        "a or " * 300 + "a",
        "-" * 500 + "1",
        "not " * 200 + "a",
        "+".join(["a"] * 400),
        "(" * 400 + "a" + ")" * 400,
        "9" * 900,
    ],
)
def test_everything_outside_the_language_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


@given(st.text(max_size=300))
def test_no_text_makes_parsing_fail_otherwise(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        evaluate(parse(text), {})


def test_checking_deep_nesting_takes_no_time() -> None:
    start = time.perf_counter()
    check(parse("(" * 25 + "kernels" + " + kernels)" * 25), UNITS)
    comparison = "(kernels < kernels)"
    for _ in range(20):
        comparison = f"({comparison} == is_ddp)"
    check(parse(comparison), UNITS)
    assert time.perf_counter() - start < 1.0  # visiting each node twice would take 2**25 visits


def test_text_is_never_repeated_by_multiplication() -> None:
    assert isinstance(value_of("'a' * 9999999999"), Unknown)


def test_names_are_listed_once_in_order() -> None:
    assert parse("b > 1 and a > b").names == ("b", "a")


def test_line_breaks_count_as_spaces() -> None:
    assert value_of("1 < 2\nand 2 < 3\n") is True


def test_an_error_tells_its_column() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse("step_ms > comm_ms.real")
    assert caught.value.column == 10


# -- units


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("comm_ms / step_ms", "ratio"),
        ("comm_ms + step_ms", "ms"),
        ("step_ms - 0", "ms"),
        ("2 * step_ms", "ms"),
        ("step_ms / 2", "ms"),
        ("-step_ms", "ms"),
        ("step_ms * overlap_frac", "ms"),
        ("1 - overlap_frac", "fraction"),
        ("overlap_frac + speedup", "ratio"),
        ("max(kernels, 1)", "count"),
        ("abs(size_bytes)", "bytes"),
        ("min(0, step_ms, comm_ms)", "ms"),
        ("step_ms > 0", "bool"),
        ("kernels > 100", "bool"),
        ("overlap_frac < 0.5 <= speedup", "bool"),
        ("comm_ms / step_ms > overlap_frac", "bool"),
        ("kernels / kernels > 0.5", "bool"),
        ("strategy == 'ddp' or is_ddp", "bool"),
        ("is_ddp == True", "bool"),
        ("not is_ddp", "bool"),
    ],
)
def test_units_that_agree(text: str, unit: str) -> None:
    assert check(parse(text), UNITS).name == unit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step_ms + size_bytes > 0", "'step_ms' is in ms and 'size_bytes' is in bytes: they cannot be added"),
        ("step_ms > size_bytes", "'step_ms' is in ms and 'size_bytes' is in bytes: they cannot be compared"),
        (
            "step_ms > 10",
            "'step_ms' is in ms and '10' is a bare number: give the number a unit by making it a param",
        ),
        ("kernels > overlap_frac", "they cannot be compared"),
        # The dimensions agree, but a factor of a thousand or a million lies between.
        ("kernels / step_ms > rate", "'kernels / step_ms' is in count/ms and 'rate' is in per_s"),
        ("size_bytes / step_ms > busbw_gbps", "'size_bytes / step_ms' is in bytes/ms"),
        ("busbw_gbps * step_ms > size_bytes", "'busbw_gbps * step_ms' is in 1e6 bytes"),
        ("min(step_ms, kernels) > 0", "they cannot be arguments of one min"),
        ("strategy > 'ddp'", "text has no order: use == or !="),
        ("is_ddp < True", "a truth value has no order: use == or !="),
        ("strategy == 3", "'strategy' is text and '3' is a bare number: they cannot be compared"),
        ("strategy + 'x' == 'ddpx'", "'strategy' is text, not a number"),
        ("is_ddp + 1 > 0", "'is_ddp' is a truth value, not a number"),
        ("kernels and is_ddp", "'kernels' is in count, not a truth value: compare it with something"),
        ("not kernels", "'kernels' is in count, not a truth value"),
        ("step_m > 0", "unknown name 'step_m' (did you mean 'step_ms'?)"),
    ],
)
def test_units_that_do_not_agree_say_why(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        check(parse(text), UNITS)
    assert message in caught.value.message


# -- values


def test_arithmetic_and_comparison() -> None:
    assert value_of("(a + b) * 2 - 6 / 3 == 8", a=2, b=3) is True
    assert value_of("min(a, b) + max(a, b) + abs(-4)", a=2, b=3) == 9
    assert value_of("1 < a <= 3", a=3) is True
    assert value_of("s != 'ddp'", s="fsdp2") is True


def test_division_by_zero_is_unknown_and_names_the_division() -> None:
    assert value_of("a / b > 1", a=1.0, b=0.0) == Unknown("division by zero: a / b")


def test_a_result_beyond_floats_is_unknown() -> None:
    assert value_of("a * a > 1", a=1e308) == Unknown("too large: a * a")
    assert value_of("a - a > 1", a=float("inf")) == Unknown("a is not finite")
    assert value_of("a > 1", a=float("nan")) == Unknown("a is not finite")
    assert value_of("a / 2 > 1", a=10**400) == Unknown("too large: a / 2")


def test_a_missing_fact_is_unknown_never_false() -> None:
    assert value_of("a > 1") == Unknown("a was not measured")
    assert value_of("not a > 1", a=Unknown("no kernels")) == Unknown("no kernels")
    assert value_of("min(a, 1) > 2", a=Unknown("no kernels")) == Unknown("no kernels")


def test_a_reason_is_told_once_however_deep_it_lies() -> None:
    lost, far = Unknown("lost"), Unknown("far away")
    assert value_of("a > 1 and (a > 2 or b > 1) and b > 2", a=lost, b=far) == Unknown("lost; far away")


def test_a_false_side_decides_and_a_true_side_decides_or() -> None:
    lost = Unknown("lost")
    assert value_of("a > 1 and b > 1", a=0, b=lost) is False
    assert value_of("b > 1 and a > 1", a=0, b=lost) is False
    assert value_of("a > 1 or b > 1", a=2, b=lost) is True
    assert value_of("a > 1 and b > 1", a=2, b=lost) == lost


def test_values_of_the_wrong_kind_are_unknown() -> None:
    assert value_of("a > 1", a="text") == Unknown("a > 1: the two sides are not of one kind")
    assert value_of("a + 1 > 1", a="text") == Unknown("a is str, not a number")
    assert value_of("a and 1 < 2", a=3.0) == Unknown("a is not a truth value")


def test_every_comparison_is_told_even_where_another_decides() -> None:
    result = evaluate(parse("a>1 or b / c > 2 and ok"), {"a": 5, "b": 1, "c": 0, "ok": False})
    assert result.value is True
    compared = [(one.text, one.left, one.right, one.holds, one.reason) for one in result.comparisons]
    assert compared == [
        ("a > 1", 5, 1, True, ""),
        ("b / c > 2", None, 2, None, "division by zero: b / c"),
        ("ok", False, True, False, ""),
    ]


def test_a_chain_is_told_link_by_link() -> None:
    result = evaluate(parse("1 < a < 3"), {"a": 5})
    assert [(one.text, one.holds) for one in result.comparisons] == [("1 < a", True), ("a < 3", False)]
    assert result.value is False


def test_a_condition_that_is_one_fact_is_reported() -> None:
    assert [c.holds for c in evaluate(parse("ok"), {"ok": True}).comparisons] == [True]
    assert [c.reason for c in evaluate(parse("ok"), {}).comparisons] == ["ok was not measured"]


# -- Kleene's logic, against an oracle on min and max over {0, 1/2, 1}

TRUTHS: dict[str, Value] = {"t": True, "f": False, "u": Unknown("?")}


def _formulas() -> st.SearchStrategy[tuple[str, float]]:
    """Formulas and their value, by the reading of Kleene's tables as minimum, maximum and complement."""
    atoms = st.sampled_from([("t", 1.0), ("f", 0.0), ("u", 0.5), ("1 < 2", 1.0), ("1 / 0 < 2", 0.5)])

    def grow(inner: st.SearchStrategy[tuple[str, float]]) -> st.SearchStrategy[tuple[str, float]]:
        several = st.lists(inner, min_size=2, max_size=3)
        return st.one_of(
            inner.map(lambda one: (f"(not {one[0]})", 1.0 - one[1])),
            several.map(lambda all: ("(" + " and ".join(t for t, _ in all) + ")", min(v for _, v in all))),
            several.map(lambda all: ("(" + " or ".join(t for t, _ in all) + ")", max(v for _, v in all))),
        )

    return st.recursive(atoms, grow, max_leaves=12).filter(lambda one: len(one[0]) < 500)


@given(_formulas())
def test_logic_is_kleenes(formula: tuple[str, float]) -> None:
    text, truth = formula
    result: Result = evaluate(parse(text), TRUTHS)
    expected = {1.0: True, 0.0: False}.get(truth)
    assert (None if isinstance(result.value, Unknown) else result.value) is expected
    assert sum(text.count(atom) for atom in ("1 < 2", "1 / 0 < 2")) <= len(result.comparisons)


_numbers = st.one_of(
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.just(Unknown("lost")),
)


@given(
    st.sampled_from(
        ["a / b > c", "a * b - c <= -a", "min(a, b, c) == abs(c)", "a < b < c", "a and not b or c == 'x'"]
    ),
    _numbers,
    _numbers,
    _numbers,
)
def test_evaluation_never_raises_and_never_answers_without_all_it_needs(
    text: str, a: Value, b: Value, c: Value
) -> None:
    result = evaluate(parse(text), {"a": a, "b": b, "c": c})
    assert isinstance(result.value, bool | Unknown)
    for one in result.comparisons:
        assert (one.holds is None) == bool(one.reason)
