"""Placeholders in a rule's words, and choosing rules by name."""

from __future__ import annotations

import pytest

from tracedoc.errors import RuleError
from tracedoc.judge.rule import Rule
from tracedoc.judge.rule_cache import choose
from tracedoc.judge.wording import fill, placeholders, stray_brace
from tracedoc.values import Unknown, Value


def test_placeholders_read_in_the_words_of_their_unit() -> None:
    values: dict[str, Value] = {
        "a_ms": 31.24,
        "share_frac": 0.384,
        "size_bytes": 25 * 2**20,
        "lost_ms": Unknown("cut off"),
    }
    units = {"a_ms": "ms", "share_frac": "fraction", "size_bytes": "bytes", "lost_ms": "ms"}
    text = "{a_ms}, {share_frac}, {size_bytes}, {lost_ms}, {nowhere}"
    assert fill(text, values, units) == "31.2 ms, 38 %, 25 MiB, unknown, unknown"


def test_other_braces_stand_for_themselves() -> None:
    change = '{"zero": {"bucket": {n}}} f"{{rank}}" {a.__class__} {a[0]} {a!r} {Block} {}'
    assert placeholders(change) == ("n",)
    assert fill(change, {"n": 7, "a": 1}, {"n": "count"}) == (
        '{"zero": {"bucket": 7}} f"{rank}" {a.__class__} {a[0]} {a!r} {Block} {}'
    )


def test_a_value_is_not_searched_for_placeholders() -> None:
    assert fill("{name}", {"name": "{step_ms}", "step_ms": 3}, {"name": "text"}) == "{step_ms}"


def test_a_noun_follows_its_number() -> None:
    text = "{n} {n:call|calls} a step"
    assert placeholders(text) == ("n",)
    assert stray_brace(text) is None
    assert fill(text, {"n": 1}, {"n": "count"}) == "1 call a step"
    assert fill(text, {"n": 2.0}, {"n": "count"}) == "2 calls a step"
    assert fill(text, {}, {}) == "unknown calls a step"


def test_what_is_nothing_is_not_said() -> None:
    text = "{a_ms} of it[[, {b_ms} in copies]][[, {n} of them fused]][[ ({place})]]."
    units = {"a_ms": "ms", "b_ms": "ms", "n": "count"}
    whole: dict[str, Value] = {"a_ms": 3.0, "b_ms": 1.0, "n": 2, "place": "forward"}
    assert fill(text, whole, units) == "3 ms of it, 1 ms in copies, 2 of them fused (forward)."
    for nothing in ({"b_ms": 0.0}, {"b_ms": Unknown("cut off")}):
        assert fill(text, whole | nothing, units) == "3 ms of it, 2 of them fused (forward)."
    assert fill(text, whole | {"n": 0, "place": "none"}, units) == "3 ms of it, 1 ms in copies."


def test_times_that_are_compared_have_one_unit() -> None:
    text, units = "{a_ms} against {b_ms}", {"a_ms": "ms", "b_ms": "ms"}
    assert fill(text, {"a_ms": 1310.0, "b_ms": 790.0}, units) == "1.31 s against 0.79 s"
    assert fill(text, {"a_ms": 1310.0, "b_ms": 292.0}, units) == "1.31 s against 292 ms"
    assert fill(text, {"a_ms": 990.0, "b_ms": 790.0}, units) == "990 ms against 790 ms"


def test_a_stray_brace_is_found() -> None:
    assert stray_brace("{a} of {{b}}") is None
    assert stray_brace("{a} of {b.c}") == 7


def _rule(rule_id: str, topic: str, *aliases: str) -> Rule:
    return Rule(rule_id, "T", topic, "stable", "0.1", "run", frozenset(), "1 < 2", "M", "W", aliases=aliases)


RULES = (
    _rule("slow-link", "communication"),
    _rule("slow-gpu", "straggler", "lagging-gpu"),
    _rule("input-stall", "input"),
)


@pytest.mark.parametrize(
    ("select", "ignore", "chosen"),
    [
        ((), (), ["slow-link", "slow-gpu", "input-stall"]),
        (("input-stall",), (), ["input-stall"]),
        (("input", "slow-link"), (), ["slow-link", "input-stall"]),
        (("slow-*",), ("communication",), ["slow-gpu"]),
        ((), ("slow-*",), ["input-stall"]),
        ((), ("memory",), ["slow-link", "slow-gpu", "input-stall"]),
        (("memory",), (), []),
        (("lagging-gpu",), (), ["slow-gpu"]),
        ((), ("lagging-gpu",), ["slow-link", "input-stall"]),
    ],
)
def test_rules_are_chosen_by_id_alias_topic_or_pattern(
    select: tuple[str, ...], ignore: tuple[str, ...], chosen: list[str]
) -> None:
    assert [rule.id for rule in choose(RULES, select, ignore)] == chosen


def test_a_name_that_fits_nothing_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(
        RuleError, match=r"no rule or topic is named 'slow-lnk' \(did you mean 'slow-link'\?\)"
    ):
        choose(RULES, ["slow-lnk"])
    with pytest.raises(RuleError, match=r"named 'fast-\*'"):
        choose(RULES, ignore=["fast-*"])
