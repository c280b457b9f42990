"""Make the collector's recorder fail when recording begins; training must not notice."""

import sys

from model import Training


def fail(*given: object) -> None:
    raise KeyError("broken on purpose")


training = Training()
training.step()
sys.modules["tracedoc.collector.recorder"].Recorder.begin = fail  # type: ignore[attr-defined]
for _ in range(20):
    training.step()
training.finish()
