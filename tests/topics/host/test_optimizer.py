"""Which optimizer a fix names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topics.test_definitions import facts_of
from tracedoc.testing import TraceBuilder
from tracedoc.values import Unknown


@pytest.mark.parametrize(
    ("names", "known"),
    [(["SGD"], "SGD"), (["AdamW", "AdamW"], "AdamW"), (["Lion"], None), (["SGD", "AdamW"], None), ([], None)],
)
def test_a_fused_optimizer_is_that_of_the_job(tmp_path: Path, names: list[str], known: str | None) -> None:
    builder = TraceBuilder(0, 1)
    for index in range(3):
        start = 100.0 * index
        builder.step(index, start, start + 100).kernel("k", start + 10, start + 50)
        for place, name in enumerate(names):
            builder.optimizer(start + 60 + 10 * place, start + 65 + 10 * place, name)
    facts = facts_of(tmp_path, builder)
    assert facts["optimizer_host_ms"].values["0"] == 5.0 * len(names)  # 5 ms in each
    found = facts["fusable_optimizer"].values["0"]
    assert found == known if known else isinstance(found, Unknown)
