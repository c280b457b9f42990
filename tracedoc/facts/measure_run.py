"""Measure the facts of the run over the digests of all ranks, and how far they can be trusted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

import msgspec

from tracedoc.facts.catalog import NEEDS, NOT_MEASURED, Fact, FactTable, Measurement, computed
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.strategy_signs import SHARDED_MARKS
from tracedoc.topics import load_facts
from tracedoc.trace.vocabulary import P2P_OPS
from tracedoc.units import format_ranges
from tracedoc.values import Failed, Unknown, Value

_LOG = logging.getLogger(__name__)
_FACTS = load_facts()

STEPS_FOR_CONFIDENCE = 3
"""Fewer complete steps than this cannot separate what recurs from what happened once."""


class Availability(msgspec.Struct, frozen=True):
    """Whether the capture holds what a fact or rule needs.

    ``state`` is "present", "by_nature" (absent because the run has none: one GPU, a CPU run) or
    "not_captured" (the run may have it, this capture does not).
    """

    state: str
    reason: str = ""


class Measurements(msgspec.Struct, frozen=True):
    """What was measured, and how far it can be trusted. The only input of the rule engine.

    ``available`` has one entry for each of :data:`tracedoc.facts.catalog.NEEDS`. ``confidence`` is
    "high", "medium" or "low". ``ranks`` and ``steps`` are those analysed.
    """

    facts: FactTable
    available: Mapping[str, Availability]
    confidence: str
    is_cpu: bool
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    run: RunView

    def value(self, fact: Fact, key: str | None = None) -> Value:
        """A fact for the run, or for one rank or group."""
        found = self.facts.get(fact.name)
        if found is None:
            return Unknown(f"{fact.name} was not measured")
        return found.value if key is None else found.values.get(key, found.value)


def measure_run(run: RunView) -> Measurements:
    """Compute the run facts, and put them beside the rank facts of all digests."""
    facts: dict[str, Measurement] = {}
    unknown: dict[tuple[Unknown | str, ...], Mapping[str, Value]] = {}
    for definition in _FACTS.values():
        if definition.kind == "rank":
            values = {str(d.rank): d.facts.get(definition.name, NOT_MEASURED) for d in run.digests}
            facts[definition.name] = _keyed(definition, values, run, unknown)
        else:
            result, _ = computed(definition, run)
            if isinstance(result, dict):
                facts[definition.name] = _keyed(definition, result, run, unknown)
            else:
                facts[definition.name] = Measurement(definition, result)
    if _LOG.isEnabledFor(logging.DEBUG):
        for name, fact in facts.items():
            _log_failures(name, fact)
    judged = run.judged()
    return Measurements(
        facts=facts,
        available=availability(run),
        confidence=confidence(run),
        is_cpu=bool(run.digests) and all(digest.is_cpu for digest in run.digests),
        ranks=tuple(digest.rank for digest, _ in judged),
        steps=tuple(sorted({step.index for digest in run.digests for step in digest.complete_steps})),
        run=run,
    )


def _log_failures(name: str, fact: Measurement) -> None:
    """Log where a fact failed, each place once: only ``--debug`` shows it, for a report of the defect."""
    failed = {one for one in (fact.value, *fact.values.values()) if isinstance(one, Failed)}
    for place in sorted(one.traceback for one in failed):
        _LOG.debug("the fact %s failed\n%s", name, place)


def confidence(run: RunView) -> str:
    """The confidence in findings.

    "high": every rank of the world, each with three or more complete steps; "medium": ranks missing or
    fewer steps; "low": no complete step, ranks left out that were captured, steps cut by the host's clock.
    """
    counts = [len(digest.complete_steps) for digest in run.digests]
    by_clock = any(one.code == "steps-by-host-clock" for digest in run.digests for one in digest.limits)
    if not counts or max(counts) == 0 or run.left_out or by_clock:
        return "low"
    everyone = run.world_size is None or len(run.digests) >= run.world_size
    return "high" if everyone and min(counts) >= STEPS_FOR_CONFIDENCE else "medium"


def availability(run: RunView) -> dict[str, Availability]:
    """The availability of each need in the capture."""
    present, absent = _present(run), _absent_by_nature(run)
    missing = dict(_MISSING)
    if run.left_out:
        whose = f"rank{'s' if len(run.left_out) > 1 else ''} {format_ranges(run.left_out)}"
        present -= _OF_SEVERAL_RANKS
        missing |= dict.fromkeys(_OF_SEVERAL_RANKS, f"nothing is known of {whose}, for which others may wait")
    if "gpu" not in present | absent.keys():
        missing |= dict.fromkeys(("kernels", "launches"), _MISSING["gpu"])  # one cause, shown once
    found = {}
    for need in sorted(NEEDS):
        if need in present:
            found[need] = Availability("present")
        elif need in absent:
            found[need] = Availability("by_nature", absent[need])
        else:
            found[need] = Availability("not_captured", missing[need])
    return found


def _present(run: RunView) -> set[str]:
    present = {need for need in NEEDS if any(need in digest.present for digest in run.digests)}
    if run.digests and all(digest.is_cpu for digest in run.digests):
        present.add("cpu")
    if len(run.digests) > 1:
        present.add("multi_rank")
    if any(digest.collectives.is_op(*SENDS).any() for digest in run.digests if len(digest.collectives)):
        present.add("sends")
    return present


def _absent_by_nature(run: RunView) -> dict[str, str]:
    """The reason why this run cannot have what it does not have, by need."""
    digests = run.digests
    alone = run.world_size == 1 or (
        run.world_size is None and len(digests) == 1 and not _distributed(digests)
    )
    absent: dict[str, str] = {}
    if digests and all(digest.is_cpu for digest in digests):
        absent |= dict.fromkeys(("gpu", "launches"), "a CPU run has no GPU activity")
    else:
        absent["cpu"] = "the ranks compute on GPUs"
    if alone:
        absent |= dict.fromkeys(("collectives", "multi_rank"), "one process has no peers")
    if not _sharded_by_name(digests):
        absent["sharding"] = "no parameters are sharded by FSDP or ZeRO-3"
    if alone or all(len(digest.collectives) for digest in digests):
        absent["sends"] = "no rank sends to a single other one, as in a pipeline"
    return absent


_OF_SEVERAL_RANKS = {"collectives", "multi_rank", "sends"}
"""Needs that ranks meet together: where one is left out, how long the others wait for it is unknown."""

SENDS = (*sorted(P2P_OPS), "unknown")
"""Operations that are, or may be, between two ranks."""

_MISSING = {
    "gpu": "no GPU activity was captured",
    "kernels": "no kernels were captured",
    "launches": "kernels cannot be linked to their launches (ProfilerActivity.CPU was off?)",
    "collectives": "no collective was captured",
    "multi_rank": "the trace of one rank only",
    "host_ops": "no operators were captured (ProfilerActivity.CPU was off?)",
    "sends": "no collective was captured",
    "shapes": "shapes were not recorded (record_shapes=True)",
    "memory": "memory was not recorded (profile_memory=True)",
    "sharding": "FSDP or ZeRO-3 is named, but no gather of theirs could be linked to its launch",
}


def _sharded_by_name(digests: Sequence[RankDigest]) -> bool:
    """Whether FSDP or ZeRO-3 is named and may gather: NO_SHARD has collectives but no gather."""
    return any(
        digest.signs.seen & SHARDED_MARKS
        and (not len(digest.collectives) or bool(digest.collectives.is_op("all_gather").any()))
        for digest in digests
    )


def _distributed(digests: Sequence[RankDigest]) -> bool:
    return any(digest.collectives or digest.backend for digest in digests)


def _keyed(
    definition: Fact,
    values: Mapping[str, Value],
    run: RunView,
    unknown: dict[tuple[Unknown | str, ...], Mapping[str, Value]],
) -> Measurement:
    """A fact with its values by key; facts that are ``unknown`` for one reason share a table."""
    representative = str(run.representative) if run.representative is not None else next(iter(values), "")
    # Of many ranks the keys take more memory than the values, unless all facts share them.
    values = {sys.intern(key): value for key, value in values.items()}
    first = next(iter(values.values()), None)
    if isinstance(first, Unknown) and all(value == first for value in values.values()):
        values = unknown.setdefault((first, *values), values)
    return Measurement(definition, values.get(representative, Unknown("no step can be judged")), values)
