"""Hold that every cause of idle time has words, in each place where it may be named."""

from __future__ import annotations

from tracedoc.idle_causes import CAUSES, LATE_LAUNCH, WORDS
from tracedoc.timeline.host import IDLE_WORK


def test_every_cause_has_words_of_its_own() -> None:
    assert set(WORDS) == {*CAUSES, *LATE_LAUNCH} == {*IDLE_WORK, "launch"}
    assert len({words.idle for words in WORDS.values()}) == len(WORDS)
    assert len({words.host for words in WORDS.values()}) == len(WORDS)
