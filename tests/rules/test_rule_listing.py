"""Which of two rules is the general one is stated."""

from __future__ import annotations

import pytest

from tracedoc.judge.listing import is_sharper
from tracedoc.judge.load import load_rules

RULES = {rule.id: rule for rule in load_rules()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("slow-interconnect", "exposed-communication"),  # which tells where time goes
        ("tiny-parameter-gathers", "sharded-gather-stall"),  # which yields to it
        ("rank-zero-work", "rotating-straggler"),
        ("coarse-fsdp-wrapping", "needless-sharding"),
    ],
)
def test_a_cause_is_sharper_than_time_and_what_is_yielded_to_than_what_yields(one: str, other: str) -> None:
    assert is_sharper(one, other, RULES)
    assert not is_sharper(other, one, RULES)


def test_rules_that_nothing_relates_are_no_sharper_than_each_other() -> None:
    assert not is_sharper("input-stall", "unfused-optimizer", RULES)
    assert not is_sharper("unfused-optimizer", "input-stall", RULES)
