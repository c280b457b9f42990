"""What each cause costs is one number wherever it is shown, and the lines add up to the step."""

from __future__ import annotations

import html
import json
import re

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import healthy, sharded
from tests.golden import SAMPLES
from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import to_json
from tracedoc.ledger import CAUSE_WORDS, Ledger, LedgerCause
from tracedoc.report.forges import SHOWN_CAUSES, safe
from tracedoc.report.render import render
from tracedoc.report.step_parts import UNEXPLAINED, Segment, Waterfall, with_notes
from tracedoc.report.terminal import render_text
from tracedoc.report.view import View, build_view
from tracedoc.units import format_ms, format_step_change


def sample() -> Diagnosis:
    return diagnosis_of(SAMPLES / "cpu_ddp_straggler")


def waterfall(diagnosis: Diagnosis) -> Waterfall:
    found = build_view(diagnosis).waterfall
    assert found is not None
    return found


def text_of(view: View, **how: object) -> str:
    return render_text(view, next_command="", **how)


@pytest.mark.parametrize("made", [sharded, sample])
def test_each_time_of_the_ledger_is_the_same_in_text_page_and_comment(made) -> None:
    diagnosis = made()
    found = json.loads(to_json(diagnosis))
    ledger = found["ledger"]
    titles = {one["id"]: one["title"].partition(": ")[0].lower() for one in found["findings"]}
    large = {
        titles.get(one["finding"]) or CAUSE_WORDS[one["causes"][0]]: one["saves_ms"] for one in ledger["rows"]
    }
    assert large
    text = text_of(build_view(diagnosis), width=250)
    rows = [re.sub("<[^>]*>", " ", row) for row in re.findall("(?s)<li class=.*?</li>", page(diagnosis))]
    table = [row for row in render(diagnosis, "markdown").split("\n") if row.startswith("|")]

    def shown(lines: list[str], words: str, ms: float) -> None:
        line = next(one for one in lines if re.search(rf"(?<!with ){re.escape(words)}", one))
        assert re.search(rf"(?<![\d.]){re.escape(format_ms(ms))}\b", line), line

    ends = {"today's step": ledger["step_ms"], "ideal step": ledger["ideal_ms"]}
    lines = text[: text.index("Where the step goes")].split("\n")
    for words, ms in (large | ends).items():
        shown(lines, words, ms)
        shown(rows, words, ms)
    for words, ms in [*list(large.items())[: SHOWN_CAUSES - 1], ("ideal step", ledger["ideal_ms"])]:
        shown(table, safe(words), ms)
    shown(table, "What costs", ledger["step_ms"])
    for where in (
        (lines, rows, table) if abs(ledger["unexplained_ms"]) >= UNEXPLAINED * ledger["step_ms"] else ()
    ):
        shown(where, "is unexplained", ledger["unexplained_ms"])


@pytest.mark.parametrize("name", ["cpu_ddp_straggler", "synthetic_ddp_tiny_batch"])
def test_each_cost_and_each_predicted_step_is_the_same_in_text_page_and_comment(name: str) -> None:
    """Read from the JSON, with what they mean: what each finding costs, and the step with its first fix."""
    diagnosis = diagnosis_of(SAMPLES / name)
    found = json.loads(to_json(diagnosis))
    step = format_ms(found["ledger"]["step_ms"])
    surfaces = [
        " ".join(text_of(build_view(diagnosis), width=250).split()),
        " ".join(re.sub("<[^>]*>", " ", html.unescape(render(diagnosis, "html"))).split()),
        " ".join(html.unescape(render(diagnosis, "markdown")).split()),
    ]
    told = 0
    for one in found["findings"]:
        if one["cost_ms"] is not None:
            told += 1
            words = f"{format_ms(one['beyond_ms'])} of the {step} step"
            assert all(words in text.replace("\N{NO-BREAK SPACE}", " ") for text in surfaces), words
    for one in found["plan"]:
        told += 1
        words = format_step_change(found["ledger"]["step_ms"], tuple(one["step_ms"]))
        assert all(words in text.replace("\N{NO-BREAK SPACE}", " ") for text in surfaces), words
    assert told


def page(diagnosis: Diagnosis) -> str:
    text = render(diagnosis, "html")
    return html.unescape(text[text.index('<ol class="waterfall') : text.index("<nav")]).replace(
        "\N{NO-BREAK SPACE}", " "
    )


def test_lines_add_up_to_the_step_and_each_begins_where_the_last_ended() -> None:
    today, *causes, ideal = waterfall(sharded()).lines
    assert sum(one.ms for one in causes) + ideal.ms == today.ms == 420.0
    ends = [1.0, *(one.start for one in causes)]
    assert [one.start + one.share for one in causes] == pytest.approx(ends[:-1])
    assert causes[-1].start == pytest.approx(ideal.share)
    assert [(one.words, one.ms) for one in causes] == [
        ("every rank waits for one rank", 86.0),
        ("exposed communication", 35.0),
        ("launch overhead on the host", 14.0),
        ("smaller causes", 5.0),
    ]


def test_what_the_rows_leave_of_their_own_causes_is_not_of_smaller_ones() -> None:
    """Of 5 ms that are left, 2 ms are of a cause without a row: the rest is what the others save at best."""
    diagnosis = sharded()
    ledger = diagnosis.ledger
    assert ledger is not None
    known = {id for row in ledger.rows for id in row.causes}
    causes = [one for one in ledger.causes if one.id in known]
    small = replace(causes[0], id="host.gc", share_ms=2.0)
    told = replace(diagnosis, ledger=replace(ledger, causes=(*causes, small)))
    assert waterfall(told).lines[-2].words == "possibly more of the causes above"


def test_what_sums_round_off_is_no_small_cause() -> None:
    diagnosis = sharded()
    ledger = diagnosis.ledger
    assert ledger is not None
    left_ms = ledger.step_ms - sum(row.saves_ms for row in ledger.rows)
    told = replace(diagnosis, ledger=replace(ledger, ideal_ms=left_ms * (1 - 1e-15)))
    assert "smaller causes" not in [one.words for one in waterfall(told).lines]


def test_a_cause_has_the_severity_and_the_number_of_the_finding_that_tells_it() -> None:
    _, late, hidden, *_ = waterfall(sharded()).lines
    assert (late.key, late.number, late.note) == ("critical", 1, "rank 5; cudaMalloc in backward")
    assert (hidden.key, hidden.number) == ("untold", 0)
    assert hidden.note == "only once those above are mended"


def test_the_mean_step_is_told_from_an_analysed_one_of_another_length() -> None:
    diagnosis = sharded()
    assert waterfall(diagnosis).of == "the mean of 4 complete steps"
    assert build_view(diagnosis).run.startswith("420 ms/step on average (400 ms in the analysed one), ")
    near = replace(diagnosis, ledger=replace(diagnosis.ledger, step_ms=401.0, steps=(5,)))
    assert waterfall(near).of == "the captured step"
    assert build_view(near).run.startswith("401 ms/step, ")


def test_findings_keep_the_order_of_the_ledger() -> None:
    diagnosis = sharded()
    first = build_view(diagnosis).findings[0].finding
    small = replace(first, id="another", gain=replace(first.gain, high_ms=1.0, likely_ms=None))
    reordered = replace(diagnosis, findings=(small, first))
    assert [one.finding.id for one in build_view(reordered).findings][:2] == ["another", first.id]
    without = replace(reordered, ledger=None)
    assert [one.finding.id for one in build_view(without).findings][:2] == [first.id, "another"]


def test_without_a_ledger_one_line_says_why() -> None:
    diagnosis = replace(healthy(), ledger=Ledger(reason="no event of work was captured"))
    text = text_of(build_view(diagnosis))
    assert "What costs the step is not known: no event of work was captured.\n" in text
    assert "What costs the step is not known" in render(diagnosis, "html")
    assert "What costs" not in text_of(build_view(healthy()))


def test_waterfall_has_no_colour_in_a_pipe_and_fits_80_columns() -> None:
    view = build_view(sharded())
    plain = text_of(view, width=80)
    assert "\x1b" not in plain
    assert "\x1b" in text_of(view, width=80, color=True)
    head = plain[plain.index("What costs the step") : plain.index("Where the step goes")]
    assert max(map(len, head.split("\n"))) <= 80


@pytest.mark.parametrize(
    ("cause", "note"),
    [
        ("host.launch", "what makes them late is among the causes above"),
        ("pipeline.bubble", "as the pipeline drains, and from the causes above"),
    ],
)
def test_waiting_that_no_late_rank_explains_says_where_it_comes_from(cause: str, note: str) -> None:
    diagnosis = sharded()
    ledger = Ledger(420.0, 300.0, causes=(LedgerCause(cause, 120.0, (120.0,) * 3, 120.0),))
    (wait,) = with_notes(
        (Segment("wait", "waiting for peers", 80.0, 0.2),), replace(diagnosis, ledger=ledger)
    )
    assert wait.note == note
