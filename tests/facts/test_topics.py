"""Hold that every fact has a topic, and that facts are grouped in reading order."""

from __future__ import annotations

import tracedoc.facts.topics  # noqa: F401  fills the catalogue
from tracedoc.facts.catalog import CATALOG
from tracedoc.facts.topics import OTHER, TOPICS, by_topic, topic_of


def test_every_fact_of_the_catalogue_has_a_topic() -> None:
    assert [name for name in CATALOG if topic_of(name) == OTHER] == []


def test_facts_are_grouped_in_the_order_of_the_topics() -> None:
    names = ["mfu_frac", "comm_ms", "of_a_pack", "exposed_wait_ms", "forward_compute_ms", "step_ms"]
    assert by_topic(names) == {
        "Step": ["comm_ms", "step_ms", "forward_compute_ms"],
        "Communication": ["exposed_wait_ms"],
        "Kernels and arithmetic": ["mfu_frac"],
        OTHER: ["of_a_pack"],
    }
    assert list(by_topic(list(CATALOG))) == list(TOPICS)
