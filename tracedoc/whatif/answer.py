"""Answer what a run's step would be after changes: the whole of ``tracedoc whatif``."""

from __future__ import annotations

from collections.abc import Sequence

from tracedoc.ledger import Range
from tracedoc.play.run_replay import Refusal, RunReplay
from tracedoc.predicted import NotPredicted, PathPiece, Predicted, ReplayReport, WhatIf
from tracedoc.ranks.run_view import RunView
from tracedoc.whatif.changes.change import NotApplicable
from tracedoc.whatif.changes.registry import CHANGES, Request, request
from tracedoc.whatif.ledger import make_ledger
from tracedoc.whatif.ledger_steps import today_ms
from tracedoc.whatif.predictions import Prediction, predict, run_replay

LONGEST = 8
"""Reports show so many kinds of work on the critical path."""

TIMES_AS_MANY = (2.0, 4.0)
"""A diagnosis predicts the step on so many times as many ranks."""


def replay_report(replay: RunReplay | Refusal) -> ReplayReport:
    """The replay of a run as results keep it: its step in ms and its error, or why it was refused."""
    if isinstance(replay, Refusal):
        return ReplayReport("refused", replay.reason)
    return ReplayReport(
        state="used",
        step=replay.step,
        step_ms=replay.step_ms,
        replayed_ms=replay.replayed_ms,
        model_error_frac=replay.model_error_frac,
        unexplained_frac=replay.unexplained_frac,
        confidence=replay.confidence,
        path=replay.path.shares(),
        path_ranks={str(rank): share for rank, share in replay.path.rank_shares().items()},
        longest=tuple(
            PathPiece(piece.resource, piece.rank, piece.ns / 1e6, piece.what)
            for piece in replay.path.longest(LONGEST)
        ),
        notes=replay.notes,
    )


def what_if(run: RunView, requests: Sequence[Request]) -> WhatIf:
    """Return the step after changes: each alone, and each on top of those before it.

    Without changes, return what each cause costs.
    """
    replay = run_replay(run)
    report = replay_report(replay)
    if not requests:
        return WhatIf(report, ledger=make_ledger(run))
    if isinstance(replay, Refusal):
        return WhatIf(report)
    today = today_ms(run, replay)
    alone = predict(replay, [[one] for one in requests])
    useful = [one for one, answer in zip(requests, alone, strict=True) if isinstance(answer, Prediction)]
    plans = [useful[: count + 1] for count in range(len(useful))] if len(useful) > 1 else []
    return WhatIf(
        report,
        alone=tuple(_told(one, answer, today) for one, answer in zip(requests, alone, strict=True)),
        together=tuple(
            as_predicted(plan, answer, today)
            for plan, answer in zip(plans, predict(replay, plans), strict=True)
            if isinstance(answer, Prediction)
        ),
    )


def on_more_ranks(replay: RunReplay, of_ms: float) -> tuple[Predicted | NotPredicted, ...]:
    """The step of ``of_ms`` on more ranks, as :data:`TIMES_AS_MANY` says, or why that is not predicted."""
    requests = [request("more-ranks", {"by": by}) for by in TIMES_AS_MANY]
    answers = predict(replay, [[one] for one in requests])
    return tuple(_told(one, answer, of_ms) for one, answer in zip(requests, answers, strict=True))


def _told(change: Request, answer: Prediction | NotApplicable, of_ms: float) -> Predicted | NotPredicted:
    if isinstance(answer, NotApplicable):
        return NotPredicted(str(change), str(answer))
    return as_predicted([change], answer, of_ms)


def as_predicted(requests: Sequence[Request], prediction: Prediction, of_ms: float) -> Predicted:
    """A prediction as results keep it: what it saves of today's step, which takes ``of_ms``."""
    return Predicted(
        change=" + ".join(map(str, requests)),
        step_ms=after(prediction.saves(of_ms), of_ms),
        gain_ms=prediction.saves(of_ms),
        then_limited_by=prediction.limited_by,
        confidence=prediction.confidence,
        assumptions=prediction.assumptions,
    )


def after(gain_ms: Range, of_ms: float) -> Range:
    """The step that is left of ``of_ms`` with a gain, in ms."""
    low, likely, high = (max(of_ms - ms, 0.0) for ms in reversed(gain_ms))
    return low, likely, high


def list_changes(run: RunView) -> list[tuple[str, str, str, str]]:
    """Return of each change its name, parameters, what it does, and why it cannot be made to this run.

    The last is empty for changes that can be made.
    """
    replay = run_replay(run)
    found = []
    for change in CHANGES.values():
        shown = " ".join(
            f"{one.name}={one.default if one.default is not None else one.name.upper()}"
            if not isinstance(one.default, float)
            else f"{one.name}={one.default:g}"
            for one in change.parameters
        )
        reason = replay.reason if isinstance(replay, Refusal) else _why_not(replay, change.name)
        found.append((change.name, shown, change.doc, reason))
    return found


def _why_not(replay: RunReplay, name: str) -> str:
    program = replay.program
    subject = float(program.layout.ranks[replay.subject])
    given = {one.name: subject for one in CHANGES[name].parameters if one.default is None}
    try:
        request(name, given).made_to(program)
    except NotApplicable as refused:
        return str(refused)
    return ""
