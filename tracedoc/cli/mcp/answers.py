"""What tools answer: parts of results under the names of the JSON, short enough for an agent to read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tracedoc.diagnosis import Fix
from tracedoc.errors import InputError
from tracedoc.predicted import Predicted, ReplayReport, WhatIf
from tracedoc.report.charts.detail_tables import short_name
from tracedoc.report.texts import plain
from tracedoc.report.view import FindingView, View
from tracedoc.report.words import predicted_words
from tracedoc.timeline.build import RankTimeline

Answer = dict[str, Any]

ANSWER_ROWS = 40
"""Rows of one table in an answer."""

ANSWER_BYTES = 24_000
"""JSON of one answer: some 8,000 tokens."""

LONGEST_TEXT = 2_000
"""Letters of one text where an answer would be too long otherwise."""

NO_CHANGE = "no change can be replayed for this fix; what its finding saves is the step without its causes"


def fitted(answer: Answer) -> tuple[Answer, str]:
    """The answer, and the same as JSON of at most :data:`ANSWER_BYTES`.

    What is empty is left out, and numbers have five digits. Tables lose rows from their end, in the answer's
    ``left_out`` by the table's name, and where that is not enough texts their ends.
    """
    whole = msgspec.to_builtins(answer, str_keys=True)
    most, longest = ANSWER_ROWS, 10 * LONGEST_TEXT
    while True:
        left_out: dict[str, int] = {}
        found = _short(whole, "", most, longest, left_out)
        if left_out:
            found["left_out"] = left_out
        text = msgspec.json.encode(found).decode()
        if len(text) <= ANSWER_BYTES or longest <= 1:
            return found, text
        most, longest = (most * 2 // 3, longest) if most > 3 else (most, min(longest, LONGEST_TEXT) // 2)


def _short(value: Any, name: str, most: int, longest: int, left_out: dict[str, int]) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, str):
        text = plain(value)
        return text if len(text) <= longest else f"{text[:longest]} ..."
    if isinstance(value, dict):
        items = {
            key: _short(item, f"{name}.{key}" if name else str(key), most, longest, left_out)
            for key, item in value.items()
        }
        return {key: item for key, item in items.items() if item not in ("", [], {}, None)}
    if isinstance(value, list | tuple):
        if len(value) > most:
            left_out[name] = left_out.get(name, 0) + len(value) - most
        return [_short(item, name, most, longest, left_out) for item in value[:most]]
    return value


def limits_of(view: View) -> list[Answer]:
    """What the capture cannot show, as every report lists it."""
    return [
        {
            "code": one.code,
            "severity": one.severity,
            "text": one.text,
            "fix": one.fix.title if one.fix is not None else "",
        }
        for one in view.limits
    ]


def ledger_lines(view: View) -> Answer:
    """The waterfall that every report begins with, from today's step to the ideal one."""
    fall = view.waterfall
    if fall is None or not fall.lines:
        return {"reason": "there is no ledger" if fall is None else fall.reason}
    lines = [
        {"what": line.words, "where": line.note, "share_ms": line.ms, "finding": line.number or None}
        for line in fall.lines
    ]
    return {"of": fall.of, "lines": lines}


def brief(finding: FindingView) -> Answer:
    """A finding with what it costs and its first fix; :func:`whole` has the rest."""
    return _finding(finding, ("number", "rule_id", "severity", "title", "message", "place"), most_fixes=1)


def whole(finding: FindingView) -> Answer:
    """All of a finding: its longest places, and every fix that fits this run."""
    names = ("number", "rule_id", "severity", "status", "title", "message", "place", "why")
    places = [msgspec.to_builtins(place) for place in finding.evidence]
    return _finding(finding, names, most_fixes=len(finding.fixes)) | {"longest_places": places}


def _finding(view: FindingView, names: tuple[str, ...], *, most_fixes: int) -> Answer:
    answer = {name: getattr(view if hasattr(view, name) else view.finding, name) for name in names}
    fixes = [_fix(fix) for fix in view.fixes[:most_fixes]]
    played = bool(view.fixes) and view.fixes[0].predicted is not None
    gain = {} if played else {"saves": view.gain, "gain": view.finding.gain}  # one number for one thing
    return answer | {"told_ms": view.finding.told_ms} | gain | {"fixes": fixes}


def _fix(fix: Fix) -> Answer:
    names = ("title", "framework", "change", "advice", "risk", "replays")
    answer: Answer = {name: getattr(fix, name) for name in names}
    if fix.predicted is None:
        asks = f"this run cannot be replayed with it; whatif says why of {fix.replays!r}"
        return answer | {"not_predicted": asks if fix.replays else NO_CHANGE}
    predicted = _predicted(fix.predicted)
    return answer | {
        "predicted": {name: item for name, item in predicted.items() if name not in ("state", "change")}
    }


def _predicted(predicted: Predicted) -> Answer:
    answer: Answer = msgspec.to_builtins(predicted)
    return {"words": predicted_words(predicted)} | answer


def predictions(found: WhatIf) -> Answer:
    """The step with each change, and with all of them; or why none is predicted."""
    alone = [
        _predicted(one) if isinstance(one, Predicted) else msgspec.to_builtins(one) for one in found.alone
    ]
    together = [_predicted(one) for one in found.together]
    return {"alone": alone, "together": together, "replay": _replay(found.replay)}


def critical_path(replay: ReplayReport) -> Answer:
    """The shares of the critical path by resource and by rank, and its longest kinds of work."""
    shares = {"path_frac": replay.path, "path_ranks_frac": replay.path_ranks}
    longest = [
        {"what": one.what, "resource": one.resource, "rank": one.rank, "path_ms": one.ms}
        for one in replay.longest
    ]
    return _replay(replay) | shares | {"longest": longest}


def _replay(replay: ReplayReport) -> Answer:
    names = ("state", "reason", "step", "step_ms", "replayed_ms", "model_error_frac", "confidence", "notes")
    return {name: getattr(replay, name) for name in names}


_CLASSES = ("compute", "communication", "copy")


def window_of(seen: RankTimeline, start_ns: int | None, end_ns: int | None) -> Answer:
    """A window of one rank, in ns since its first event; the analysed step where it is not given.

    Raises :class:`InputError` for an empty one.
    """
    if seen.activity is None:
        raise InputError("this rank's trace shows no activity of its device", "diagnose lists its limits")
    zero = int(seen.trace.ts_ns[0])
    usual = seen.judged or seen.activity
    start = usual.start_ns if start_ns is None else zero + start_ns
    end = usual.end_ns if end_ns is None else zero + end_ns
    if end <= start:
        raise InputError("the window is empty", "end_ns lies behind start_ns")
    events = seen.events.on(seen.device)
    inside = np.flatnonzero((events.start_ns < end) & (events.end_ns > start))
    lengths = events.end_ns[inside] - events.start_ns[inside]
    shown = np.sort(inside[np.argsort(-lengths, kind="stable")[:ANSWER_ROWS]])
    idle = seen.idle.in_window(start, end) if seen.idle is not None else {}
    return {
        "start_ns": start - zero,
        "end_ns": end - zero,
        "step": seen.judged.index if seen.judged is not None and usual is seen.judged else None,
        "budget": seen.activity.budget(start, end),
        "idle_causes_ns": {cause: ns for cause, ns in idle.items() if ns},
        "longest_events": [
            {
                "name": short_name(seen.trace.names[int(seen.trace.name[events.rows[at]])]),
                "kind": _CLASSES[events.classes[at]],
                "stream": int(events.stream[at]),
                "start_ns": int(events.start_ns[at]) - zero,
                "end_ns": int(events.end_ns[at]) - zero,
            }
            for at in shown.tolist()
        ],
        "events_inside": int(inside.size),
    }
