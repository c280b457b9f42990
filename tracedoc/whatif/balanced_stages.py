"""Predict what equal stages of a pipeline give back."""

from __future__ import annotations

from tracedoc.diagnosis import Gain
from tracedoc.facts.measure_run import Measurements
from tracedoc.topics.pipeline.run import stage_imbalance_ms
from tracedoc.values import Unknown
from tracedoc.whatif.bounds import measured

MARGIN = 0.15
"""A replay of the passes is this close: layers are whole, and what follows the passes is estimated."""


def balance_stages(measurements: Measurements, key: str | None) -> Gain | Unknown:
    """The gain in ms a step of a replay with equal stages, less and more a margin."""
    gain = measured(measurements, stage_imbalance_ms, None)
    if isinstance(gain, Unknown):
        return gain
    return Gain((1 - MARGIN) * gain, (1 + MARGIN) * gain, "replay", ("all stages take equally long",))
