"""Damage copies of runs in many ways, and say what their answers claim that the whole runs do not."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tracedoc
from tracedoc.diagnosis import Diagnosis, Finding
from tracedoc.errors import TracedocError

Json = dict[str, Any]
Change = Callable[[list[Json]], list[Json]]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync")

MORE = 0.10
"""Gains may be larger by this share: the steps that are left are other ones than all of them."""

OF_STEP, OF_STEP_OF_NOTE = 0.02, 0.05
"""... or by this share of the step: below that nothing is a warning, or a note that the first line names."""


@dataclass(frozen=True)
class Damage:
    """One way to damage a run: what is done to the file of a rank, or of all (``None``).

    ``told`` are words that the first line must hold.
    """

    name: str
    rank: int | None
    apply: Callable[[Path], bytes]
    told: str = ""


def read_text(path: Path) -> bytes:
    """The text of a trace file, plain or gzip."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


def cut_stored(share: float) -> Callable[[Path], bytes]:
    """The first bytes of a file as it is stored."""
    return lambda path: (raw := path.read_bytes())[: int(len(raw) * share)]


def cut_text(share: float) -> Callable[[Path], bytes]:
    """The first bytes of its text, mostly up to the middle of an event."""
    return lambda path: (text := read_text(path))[: int(len(text) * share)]


def edited(change: Change) -> Callable[[Path], bytes]:
    """The file with other events."""

    def apply(path: Path) -> bytes:
        document = json.loads(read_text(path))
        if isinstance(document, list):
            return json.dumps(change(document)).encode()
        return json.dumps({**document, "traceEvents": change(document["traceEvents"])}).encode()

    return apply


def _timed(event: Json) -> bool:
    return event.get("ph") == "X" and event.get("cat") not in (None, "Trace")


def _on_host(event: Json) -> bool:
    return _timed(event) and event.get("cat") not in ON_GPU


def _span(events: Sequence[Json]) -> tuple[float, float]:
    timed = [event for event in events if _timed(event)]
    return (
        min(float(event["ts"]) for event in timed),
        max(float(event["ts"]) + float(event.get("dur", 0)) for event in timed),
    )


def gpu_ends_early(share: float) -> Change:
    """GPU events that begin after a share of the capture are gone; the host's stay."""

    def change(events: list[Json]) -> list[Json]:
        first, last = _span(events)
        until = first + share * (last - first)
        return [one for one in events if one.get("cat") not in ON_GPU or float(one["ts"]) < until]

    return change


def shorter(share: float) -> Change:
    """What begins after a share of the capture is gone; ranges that are open then end there."""

    def change(events: list[Json]) -> list[Json]:
        first, last = _span(events)
        until = first + share * (last - first)
        kept = []
        for one in events:
            if not _timed(one):
                kept.append(one)
            elif float(one["ts"]) < until:
                end = min(float(one["ts"]) + float(one.get("dur", 0)), until)
                kept.append({**one, "dur": end - float(one["ts"])})
        return kept

    return change


def lost_at_random(share: float, seed: int) -> Change:
    """A share of the kernels is gone."""

    def change(events: list[Json]) -> list[Json]:
        dice = random.Random(seed)
        return [one for one in events if one.get("cat") != "kernel" or dice.random() >= share]

    return change


def lost_in_a_block(share: float, seed: int) -> Change:
    """A share of the kernels, one after the other, is gone: a buffer that was dropped."""

    def change(events: list[Json]) -> list[Json]:
        kernels = sorted(
            (one for one in events if one.get("cat") == "kernel"), key=lambda one: float(one["ts"])
        )
        count = int(len(kernels) * share)
        begin = random.Random(seed).randint(0, max(len(kernels) - count, 0))
        gone = {id(one) for one in kernels[begin : begin + count]}
        return [one for one in events if id(one) not in gone]

    return change


def lost_thread(seed: int) -> Change:
    """All that one thread of the host did is gone."""

    def change(events: list[Json]) -> list[Json]:
        threads = {(str(one["pid"]), str(one["tid"])) for one in events if _on_host(one)}
        gone = random.Random(seed).choice(sorted(threads)) if threads else None
        return [one for one in events if not _on_host(one) or (str(one["pid"]), str(one["tid"])) != gone]

    return change


def clock_set_back(share: float, back_ms: float) -> Change:
    """After a share of the capture the clock is set back; what takes place meanwhile seems to be shorter."""

    def change(events: list[Json]) -> list[Json]:
        first, last = _span(events)
        until = first + share * (last - first)

        def seen(time: float) -> float:
            return time - 1e3 * back_ms * (time > until)

        return [
            {
                **one,
                "ts": seen(start := float(one["ts"])),
                "dur": max(seen(start + length) - seen(start), 0.0),
            }
            if _timed(one) and (length := float(one.get("dur", 0))) >= 0
            else one
            for one in events
        ]

    return change


def without_marks(events: list[Json]) -> list[Json]:
    """The first and the last step have no mark."""
    marks = [one for one in events if str(one.get("name", "")).startswith("ProfilerStep#")]
    numbers = sorted({int(str(one["name"]).partition("#")[2]) for one in marks})
    if len(numbers) < 3:
        return events
    gone = {f"ProfilerStep#{number}" for number in (numbers[0], numbers[-1])}
    return [one for one in events if one.get("name") not in gone]


def has_kernels(path: Path) -> bool:
    """True for the trace of a GPU job."""
    return b'"kernel"' in read_text(path)


def damages(paths: Sequence[Path], seed: int, count: int) -> Iterator[Damage]:
    """Yield ``count`` ways to damage a run, drawn from all of them with ``seed``."""
    dice = random.Random(seed)
    everyone: list[int | None] = [*range(len(paths))]
    if len(paths) > 1:
        everyone += [None] * max(len(paths) // 2, 1)
    on_gpu = has_kernels(paths[0])
    on_host = ["stored", "text", "shorter", "text"]
    kinds = ["stored", "gpu", "text", "block", "shorter", "random"] if on_gpu else on_host
    kinds = [*kinds, "text", "marks", "clock", "thread"]
    for number in range(count):
        kind, rank = kinds[number % len(kinds)], dice.choice(everyone)
        share = round(dice.uniform(0.05, 0.95), 3)
        lost = round(dice.uniform(0.02, 0.25), 3)
        if kind == "stored":
            yield Damage(f"file cut at {share}", rank, cut_stored(share), "cut off")
        elif kind == "text":
            yield Damage(f"text cut at {share}", rank, cut_text(share), "cut off")
        elif kind == "shorter" and rank is not None and len(paths) > 1:
            yield Damage(f"ends at {share}", rank, edited(shorter(share)))
        elif kind == "marks":
            yield Damage("without marks", rank, edited(without_marks))
        elif kind == "clock" and rank is not None:
            back_ms = dice.choice((3, 20, 200))
            yield Damage(f"clock set back {back_ms} ms", rank, edited(clock_set_back(share, back_ms)))
        elif kind == "thread" and rank is not None:
            yield Damage("without a thread", rank, edited(lost_thread(number)))
        elif kind == "gpu":
            yield Damage(f"GPU ends at {share}", rank, edited(gpu_ends_early(share)))
        elif kind == "random":
            yield Damage(f"{lost} lost at random", rank, edited(lost_at_random(lost, number)))
        elif kind == "block":
            yield Damage(f"{lost} lost in a block", rank, edited(lost_in_a_block(lost, number)))


def damaged(paths: Sequence[Path], damage: Damage, folder: Path) -> list[Path]:
    """Write the damaged copy of a run into ``folder``; return its paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank, path in enumerate(paths):
        copy = folder / path.name
        touched = damage.rank in (None, rank)
        content = damage.apply(path) if touched else path.read_bytes()
        # What was packed and is written as text keeps no name that says it is packed.
        if touched and content[:2] != b"\x1f\x8b" and copy.suffix == ".gz":
            copy = copy.with_suffix("")
        copy.write_bytes(content)
        written.append(copy)
    for path in paths[0].parent.glob("manifest*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return written


def answer(paths: Sequence[Path], steps: tuple[int, int] | None = None) -> Diagnosis | str:
    """The diagnosis of some files, or of some of their steps, or why there is none."""
    try:
        return tracedoc.diagnose([str(path) for path in paths], tracedoc.Options(jobs=1, steps=steps))
    except TracedocError as error:
        return f"{error.message} | {error.hint}"


def _gain(finding: Finding) -> float:
    return finding.gain.size_ms if finding.gain is not None else 0.0


def claims(diagnosis: Diagnosis | str) -> dict[str, Finding]:
    """What an answer says slows the job down, by rule; of one rule what gives most."""
    found = () if isinstance(diagnosis, str) else diagnosis.findings
    return {one.rule_id: one for one in sorted(found, key=_gain) if one.topic != "capture"}


def by_cause(diagnosis: Diagnosis | str) -> dict[str, Finding]:
    """What an answer says, by rule and by the causes of the ledger that these tell."""
    found = claims(diagnosis)
    causes = diagnosis.ledger.causes if isinstance(diagnosis, Diagnosis) and diagnosis.ledger else ()
    for cause in causes:
        told = [found[one] for one in cause.told_by if one in found]
        found |= {cause.id: max(told, key=_gain)} if told else {}
    return found


class Truth:
    """What a whole run says of all its steps, and of each of them alone."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.whole = answer(paths)

    @cached_property
    def of_steps(self) -> list[dict[str, Finding]]:
        """The claims about each complete step alone."""
        if isinstance(self.whole, str):
            return []
        steps = sorted({one.index for rank in self.whole.ranks for one in rank.steps if one.complete})
        return [by_cause(answer(self._paths, (step, step))) for step in steps]

    def invented(self, after: Diagnosis | str, damage: Damage, *, notes: bool = False) -> list[str]:
        """What the answer of a damaged run claims that neither the whole run does, nor one of its steps.

        Warnings alone, with ``notes`` also what notes promise. Of steps that are analysed together, what the
        whole run says of them alone is compared, too. Notes are no verdicts: it counts what any finding says
        of their causes, also of the whole files of the ranks that are analysed, as what is late beside other
        ranks is a pause where no other is known.
        """
        if isinstance(self.whole, str) or isinstance(after, str):
            return []
        step = self.whole.budget.step_ms if self.whole.budget is not None else 0.0
        analysed = [one.index for rank in after.ranks for one in rank.steps if one.complete] or [0]
        steps = min(analysed), max(analysed)
        same = cache(lambda: by_cause(answer(self._paths, steps)))
        sources = {_bare(one.source) for one in after.ranks}
        left = [path for path in self._paths if _bare(path.name) in sources]
        alone = cache(lambda: by_cause(answer(left, steps)))
        causes = after.ledger.causes if after.ledger else ()
        found = []
        for rule_id, finding in claims(after).items():
            noted = finding.severity == "note"
            names = {rule_id, *(one.id for one in causes if noted and rule_id in one.told_by)}
            if (noted and not notes) or not (
                wrong := _beyond_all(finding, names, by_cause(self.whole), step)
            ):
                continue
            others = (*self.of_steps, same(), *([alone()] if noted else []))
            if all(_beyond_all(finding, names, one, step) for one in others):
                found.append(wrong)
        if damage.told not in after.summary:
            found.append(f"untold: {after.summary[:90]}")
        return found


def _beyond_all(finding: Finding, names: set[str], said: dict[str, Finding], step_ms: float) -> str:
    """How a finding goes beyond all that was said of some rules and causes; "" where it does not."""
    was = [one for name, one in said.items() if name in names]
    return _beyond(finding, max(was, key=_gain, default=None), step_ms)


def _bare(source: str) -> str:
    return Path(source).name.removesuffix(".gz")


def _beyond(finding: Finding, was: Finding | None, step_ms: float) -> str:
    """How a finding goes beyond what was found; "" where it does not."""
    gain, least = _gain(finding), 0.0 if was is None else _gain(was)
    noted = finding.severity == "note"
    if not noted and (was is None or was.severity == "note"):
        return f"{finding.severity} {finding.rule_id} {gain:.2f} instead of a note of {least:.2f}"
    if gain > least * (1 + MORE) and gain > least + (OF_STEP_OF_NOTE if noted else OF_STEP) * step_ms:
        return f"gain of {finding.severity} {finding.rule_id} {gain:.2f} instead of {least:.2f}"
    if was is not None and finding.topic == "straggler" and not set(finding.ranks) <= set(was.ranks):
        return f"{finding.rule_id} of ranks {finding.ranks} instead of {was.ranks}"
    return ""
