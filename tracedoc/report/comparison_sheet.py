"""What a comparison of two runs says: the answer, the parts of the step, and all that differs."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.comparison.compare import RunComparison
from tracedoc.comparison.differences import FindingChange
from tracedoc.comparison.waterfall import WaterfallPart
from tracedoc.diagnosis import BudgetLocation, Gain, RunInfo
from tracedoc.ledger import CAUSE_WORDS
from tracedoc.report.charts.bars import Box
from tracedoc.report.sheet import FULL, Row, Sheet, SheetBar, SheetTable
from tracedoc.report.view import about_words, rates_of
from tracedoc.report.words import gain_text
from tracedoc.units import format_bytes, format_ms, format_percent, format_quantity, three_digits

_LEAST_PART = 0.002
"""Parts below this share of both steps are left out of the text; the JSON has them all."""

_MOST_NAME = 80


def comparison_sheet(found: RunComparison) -> Sheet:
    """A comparison as a sheet."""
    return Sheet(
        answer=first_line(found),
        notes=tuple(filter(None, (_noise(found), *_throughput(found), _seen_at(found)))),
        bars=tuple(_bars(found)),
        bars_caption=f"From the {'ideal' if found.scaling else 'old'} step to the measured one",
        tables=(_parts(found),),
        lists=tuple(_lists(found)),
        counts=_counts(found),
        title=runs_title(found.base, found.head),
        about=tuple(_runs(found)),
    )


def runs_title(base: RunInfo, head: RunInfo) -> str:
    """The two runs by name, "" where one has none."""
    return f"{base.name} -> {head.name}" if base.name and head.name else ""


def _runs(found: RunComparison) -> Iterator[str]:
    """Yield when and how each side was captured, as far as that is known."""
    for side, run in (("BASE", found.base), ("HEAD", found.head)):
        about = ", ".join(filter(None, (run.name, about_words(run))))
        if about:
            yield f"{side}: {about}."


def _counts(found: RunComparison) -> str:
    """The numbers of findings that are fixed, new and still there, in words."""
    words = {"fixed": "fixed", "new": "new", "persisting": "still there"}
    counts = {state: sum(one.state == state for one in found.findings) for state in words}
    said = ", ".join(f"{count} {words[state]}" for state, count in counts.items() if count)
    return f"Findings: {said}." if said else ""


def first_line(found: RunComparison) -> str:
    """Return the answer in one sentence or two."""
    fall = found.waterfall
    if found.scaling is not None:
        scaling = found.scaling
        lost = _largest(found, longer=True)
        reason = f" Most is lost to {lost}." if lost else ""
        if scaling.base_gpus == scaling.head_gpus:
            return (
                f"On the same {scaling.head_gpus} GPUs: {three_digits(scaling.speed_up)} times as fast"
                f" per sample.{reason}"
            )
        return (
            f"{format_percent(scaling.efficiency)} efficiency from {scaling.base_gpus} to"
            f" {scaling.head_gpus} GPUs ({scaling.kind} scaling): {three_digits(scaling.speed_up)} times as"
            f" fast, ideally {scaling.head_gpus / scaling.base_gpus:.3g}.{reason}"
        )
    assert found.verdict is not None
    word = found.verdict.word
    times = f"{format_ms(fall.ideal_ms)} -> {format_ms(fall.measured_ms)} a step"
    if word == "inconclusive":
        needed = found.verdict.steps_needed
        more = f" About {needed} steps on each side would decide." if needed else ""
        return f"Inconclusive: {times}; {found.verdict.why}.{more}"
    if word == "unchanged":
        same = found.verdict.why
        return f"No difference: {same}." if same else f"Unchanged: {times}, within noise."
    cause = _largest(found, longer=word == "regressed")
    return f"{word.capitalize()}: {times}{f', mostly {cause}' if cause else ''}."


def _noise(found: RunComparison) -> str:
    steps = found.steps
    same = found.verdict is not None and found.verdict.word == "unchanged" and found.verdict.why
    if steps is None or found.scaling is not None or same:
        return ""
    change, low, high = map(percent_change, (steps.change_frac, steps.low_frac, steps.high_frac))
    counted = "all outside the captures" if steps.logged else f"{steps.base_steps} and {steps.head_steps}"
    text = (
        f"Steps: {counted} compared, {change} at the median (95 %: {low} to {high});"
        f" two captures of one job may differ by {format_percent(steps.noise_frac)}."
    )
    if steps.of_slow_steps:
        slow, mean = percent_change(steps.slow_frac), percent_change(steps.mean_frac)
        text += f" Their mean: {mean}, of which {slow} by steps that are far longer than the others."
    if steps.base_unprofiled_ms and steps.head_unprofiled_ms:
        text += (
            f" Without the profiler: {format_ms(steps.base_unprofiled_ms)} ->"
            f" {format_ms(steps.head_unprofiled_ms)}."
        )
    return text


def _throughput(found: RunComparison) -> Iterator[str]:
    """Yield what a second does on both sides, and the GPU time of as much work, as far as they are known."""
    before, after, scaling = rates_of(found.base), rates_of(found.head), found.scaling
    if len(before) == len(after) and before:
        pairs = zip(before, after, strict=True)
        yield f"Throughput: {', '.join(f'{one} -> {other}' for one, other in pairs)}."
    gpus, word = found.head.world_size, found.verdict.word if found.verdict is not None else ""
    if scaling is not None and scaling.gpu_time_ratio > 0:
        yield f"A sample takes {scaling.gpu_time_ratio:.3g} times the GPU time ({scaling.evidence})."
        if scaling.base_samples_per_s and scaling.head_samples_per_s and scaling.head_gpu_hours:
            yield (
                f"Samples a second: {three_digits(scaling.base_samples_per_s)} ->"
                f" {three_digits(scaling.head_samples_per_s)}."
                f" GPU-hours for a million: {three_digits(scaling.base_gpu_hours or 0.0)} ->"
                f" {three_digits(scaling.head_gpu_hours)}."
            )
    elif gpus and found.head.device != "CPU" and word in ("improved", "regressed"):
        hours = 24 * gpus * abs(found.realised_ms) / found.waterfall.ideal_ms
        less = "less" if found.realised_ms > 0 else "more"
        yield f"The work of a day takes {three_digits(hours)} GPU-hours {less}, of {24 * gpus}."


def _seen_at(found: RunComparison) -> str:
    """Which steps are compared: the mean ones, or those of two ranks; "" for those of one."""
    if found.waterfall.by_cause:
        return "Times are those of the mean captured step."
    base, head = found.waterfall.base_at, found.waterfall.head_at
    if base is None or head is None or base.rank == head.rank:
        return ""
    return f"The parts are those of {_place(base)} in BASE and {_place(head)} in HEAD."


def _place(at: BudgetLocation) -> str:
    return f"rank {at.rank}" if at.step is None else f"rank {at.rank}, step {at.step}"


def _bars(found: RunComparison) -> Iterator[SheetBar]:
    """Yield the waterfall: the first step, each part from where the last one ended, the second step."""
    fall = found.waterfall
    reached, highest = fall.ideal_ms, max(fall.ideal_ms, fall.measured_ms)
    for part in fall.parts:
        reached += part.change_ms
        highest = max(highest, reached)
    scale = FULL / highest if highest > 0 else 0.0
    first = "ideal step" if found.scaling is not None else "BASE"
    yield SheetBar(first, format_ms(fall.ideal_ms), (Box("other", 0.0, fall.ideal_ms * scale),))
    reached = fall.ideal_ms
    least = _LEAST_PART * highest
    for part in fall.parts:
        before, reached = reached, reached + part.change_ms
        if abs(part.change_ms) < least:
            continue
        key = "shorter" if part.change_ms < 0 else "longer"
        left = max(min(before, reached), 0.0) * scale
        box = Box(key, left, abs(part.change_ms) * scale, part.evidence)
        yield SheetBar(part.label, signed(part.change_ms), (box,))
    yield SheetBar("HEAD", format_ms(fall.measured_ms), (Box("other", 0.0, fall.measured_ms * scale),))


def _parts(found: RunComparison) -> SheetTable:
    fall = found.waterfall
    ideal = "ideal" if found.scaling is not None else "BASE"
    rows: list[Row] = []
    least = _LEAST_PART * max(fall.ideal_ms, fall.measured_ms)
    small = 0.0
    for part in fall.parts:
        if max(abs(part.ideal_ms), abs(part.measured_ms), abs(part.change_ms)) < least:
            small += part.change_ms
            continue
        # Evidence of a part that did not move explains nothing.
        words = part.evidence if abs(part.change_ms) >= least else ""
        times = map(format_ms, (part.ideal_ms, part.measured_ms))
        rows.append((part.label, *times, signed(part.change_ms), words))
    if small:
        rows.append(("smaller parts", "", "", signed(small), ""))
    total = fall.measured_ms - fall.ideal_ms
    rows.append(("step", format_ms(fall.ideal_ms), format_ms(fall.measured_ms), signed(total), ""))
    first = "Cause" if fall.by_cause else "Part of the step"
    return SheetTable((first, ideal, "HEAD", "change", "evidence"), tuple(rows), 3)


def _new_words(one: FindingChange) -> str:
    """A finding of HEAD alone: its title, and what its message says beyond that."""
    said = one.head_message.removeprefix(one.title).lstrip(".: ")
    return f"{one.title} [{one.rule_id}]{said and f': {said}'}"


def _lists(found: RunComparison) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield titles with what stands below them, without those that would be empty."""
    by_state = {
        state: [one for one in found.findings if one.state == state]
        for state in ("fixed", "new", "persisting")
    }
    lists = (
        (
            "Fixed",
            [fixed_words(one, found.realised_ms, _largest(found, longer=True)) for one in by_state["fixed"]],
        ),
        ("New", [_new_words(one) for one in by_state["new"]]),
        ("Still there", [f"{one.title} [{one.rule_id}]" for one in by_state["persisting"]]),
        (
            "Kernels that changed most",
            [
                f"{one.name[:_MOST_NAME]}: {one.base_calls} -> {one.head_calls} calls,"
                f" {format_ms(one.base_ms)} -> {format_ms(one.head_ms)}"
                for one in found.kernels
            ],
        ),
        (
            "Collectives that changed",
            [
                f"{one.op} ({one.dtype}): {one.base_calls:.3g} -> {one.head_calls:.3g} a step,"
                f" {_size(one.base_bytes)} -> {_size(one.head_bytes)},"
                f" {format_ms(one.base_ms)} -> {format_ms(one.head_ms)}"
                for one in found.collectives
            ],
        ),
        (
            "Counts and sizes that differ",
            [
                f"{one.name}: {format_quantity(one.base, one.unit)} -> {format_quantity(one.head, one.unit)}"
                for one in found.facts
            ],
        ),
        ("Settings that differ", [f"{one.name}: {one.base} -> {one.head}" for one in found.settings]),
        ("Lines of the script", [f"{one.name}: {one.base} -> {one.head}" for one in found.places]),
        ("Limits", [f"{one.message}; {one.effect}  [{one.code}]" for one in found.limits]),
    )
    yield from ((title, tuple(items)) for title, items in lists if items)


def fixed_words(one: FindingChange, realised_ms: float, grown: str = "") -> str:
    """The prediction for a finding that is gone, and the change of the step, in words.

    ``grown`` is what became longer: it is told where less was gained than the least that was predicted.
    """
    text = f"{one.title} [{one.rule_id}]"
    if one.predicted_ms is None:
        return text
    low, high = one.predicted_ms
    predicted = gain_text(Gain(low, high, "ceiling")).removeprefix("saves ").partition(" a step")[0]
    if one.likely_ms is not None and one.likely_ms > 0 and not predicted.startswith("about"):
        predicted = f"about {format_ms(one.likely_ms)} ({predicted})"
    became = f"{format_ms(abs(realised_ms))} {'shorter' if realised_ms >= 0 else 'longer'}"
    behind = f"; meanwhile {grown}" if grown and realised_ms < max(low, 0.5 * (one.likely_ms or 0.0)) else ""
    return f"{text}: predicted {predicted}; the whole step became {became}{behind}"


def _size(nbytes: int | None) -> str:
    return format_bytes(nbytes) if nbytes is not None else "unknown bytes"


ALSO_LARGE = 0.5
"""A part that changed by this share of the largest change stands beside it: causes may hide each other."""


def _largest(found: RunComparison, *, longer: bool) -> str:
    """The parts that changed most in the direction of the step, at most three, each with its change."""
    sign = 1 if longer else -1
    parts = sorted(found.waterfall.parts, key=lambda one: -sign * one.change_ms)[:3]
    least = ALSO_LARGE * max((sign * one.change_ms for one in parts), default=0.0)
    *most, last = [_changed_words(one) for one in parts if sign * one.change_ms >= least > 0] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _changed_words(part: WaterfallPart) -> str:
    place = part.evidence.partition("; ")[0]
    where = f" in {place}" if part.key in CAUSE_WORDS and "`" in place else ""
    return f"{part.label}{where} ({signed(part.change_ms)})"


def signed(ms: float) -> str:
    """Return a change of a time, with its sign."""
    return f"{'+' if ms > 0 else '-' if ms < 0 else ''}{format_ms(abs(ms))}"


def percent_change(share: float) -> str:
    """A change as a share, in percent with its sign."""
    return f"{100 * share:+.3g} %"
