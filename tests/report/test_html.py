"""The page stands alone, shows what the diagnosis says, and hides what it must."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import DIAGNOSES, sharded
from tests.golden import HAND_MADE, REFRESH
from tests.page_outline import outline
from tracedoc.diagnosis_json import diagnosis_in_page, from_json
from tracedoc.errors import InputError
from tracedoc.report.charts.bars import DRAWN_STEPS
from tracedoc.report.charts.over_time import TimeScale
from tracedoc.report.clock import place_to_look
from tracedoc.report.page import MOST_STEPS_CARRIED, render_html
from tracedoc.report.render import render
from tracedoc.report.view import build_view

VOID = {"meta", "link", "br", "input"}


class Page(HTMLParser):
    """What a browser would build: elements with attributes, and that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open:
            self.text += data


def page(name: str) -> Page:
    return Page(render_html(build_view(DIAGNOSES[name](), redact=True)))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_page_is_well_formed_and_needs_nothing_else(name: str):
    built = page(name)
    assert built.open == []
    tags = {tag for tag, _ in built.elements}
    assert not tags & {"link", "img", "iframe", "object", "form", "base"}
    for _, attributes in built.elements:
        assert not any(key.startswith("on") for key in attributes)
        assert "src" not in attributes
        href = attributes.get("href") or ""
        assert href == "" or href.startswith(("#", "https://"))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_policy_allows_inline_style_and_the_script_of_the_page(name: str):
    policies = [
        a["content"] for tag, a in page(name).elements if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies[0] is not None
    (script,) = re.findall(r"(?s)<script>(.*?)</script>", html(name))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policies[0].startswith(
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"
    )


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_pictures_have_words_and_tables_have_captions(name: str):
    built = page(name)
    pictures = [attributes for tag, attributes in built.elements if tag == "svg"]
    assert pictures
    assert all(
        attributes.get("aria-label") or attributes.get("aria-hidden") == "true" for attributes in pictures
    )
    count = [tag for tag, _ in built.elements].count
    assert count("table") == count("caption")
    assert count("h1") == 1
    assert count("main") == 1


def test_names_from_a_trace_stay_text():
    built = page("hostile")
    assert "<script>alert('\"x\"')</script>" in built.text
    assert not {"\x1b", "\x00", "\u202e"} & set(built.text)


def test_answer_stands_first():
    built = page("sharded")
    assert built.text.index("Straggler: the other ranks wait 90\u00a0ms") < built.text.index(
        "The step on every rank"
    )


def test_page_hides_hosts_and_folders():
    text = render_html(build_view(sharded(), redact=True))
    assert "gpu-node" not in text
    assert "/scratch" not in text
    assert "host-2" in text


def test_conditions_survive_redaction():
    assert "late_ms / step_ms > min_share" in page("sharded").text


def test_blank_lines_of_code_survive():
    diagnosis = sharded()
    fix = replace(diagnosis.findings[0].fixes[0], change="first\n\n    second")
    finding = replace(diagnosis.findings[0], fixes=(fix,))
    assert "<code>first\n\n    second</code>" in render_html(
        build_view(replace(diagnosis, findings=(finding,)))
    )


def test_long_captures_draw_a_bounded_number_of_steps():
    diagnosis = sharded()
    steps = tuple(replace(diagnosis.ranks[0].steps[0], index=index) for index in range(60))
    text = render_html(build_view(replace(diagnosis, ranks=(replace(diagnosis.ranks[0], steps=steps),))))
    assert len(re.findall('<div class="step">', text)) == DRAWN_STEPS
    assert "12 later steps are not drawn." in text


def test_healthy_page_says_that_nothing_was_found():
    assert "Nothing found to change." in page("healthy").text


def html(name: str) -> str:
    return render_html(build_view(DIAGNOSES[name](), redact=True))


def test_picture_has_a_row_for_each_drawn_rank():
    text = html("sharded")
    assert re.findall(r'<span class="name">(rank \d+)', text) == ["rank 0", "rank 5"]
    assert "Step 5; all ranks on one clock" in text
    assert "5 more ranks are not drawn" in text
    place = place_to_look(build_view(sharded(), redact=True))
    assert place == "rank 5, 812.0 ms"
    assert f"look at {place}." in text


def test_picture_spans_the_whole_step():
    # Waiting from 200 to 290 ms of 400 ms, on a scale of 1000.
    assert re.search('class="wait" [^>]*d="M500.00 0H725.00V10H500.00Z"', html("sharded"))


def test_ranks_without_a_common_clock_are_not_said_to_have_one():
    diagnosis = sharded()
    picture = replace(diagnosis.detail.picture, aligned=False)
    text = render_html(build_view(replace(diagnosis, detail=replace(diagnosis.detail, picture=picture))))
    assert "each rank from its own beginning: clocks differ" in text


def test_a_picture_of_years_has_no_ticks():
    assert [place for place, _ in TimeScale(10.0).ticks()] == [0, 20, 40, 60, 80, 100]
    for end in (1e13, 1e308, float("inf"), float("nan"), 0.0, -1.0):
        assert TimeScale(end).ticks() == ()


@pytest.mark.parametrize("span", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_impossible_picture_is_not_drawn(span: float):
    diagnosis = sharded()
    picture = replace(diagnosis.detail.picture, span_ms=span)
    text = render_html(build_view(replace(diagnosis, detail=replace(diagnosis.detail, picture=picture))))
    assert 'id="picture"' not in text


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_page_holds_the_diagnosis_that_it_shows(name: str):
    text = render(DIAGNOSES[name](), "html", redact=False)
    kept = from_json(diagnosis_in_page(text.encode()))
    assert kept.summary == build_view(DIAGNOSES[name]()).diagnosis.summary
    assert from_json(diagnosis_in_page(render(kept, "html", redact=False).encode())) == kept


@pytest.mark.parametrize(
    ("cut", "message"), [(0.1, "holds no diagnosis"), (0.9, "cut off within its diagnosis")]
)
def test_a_page_that_was_cut_off_is_reported(cut: float, message: str):
    data = html("sharded").encode()
    with pytest.raises(InputError, match=message):
        diagnosis_in_page(data[: int(cut * len(data))])


def test_page_of_very_many_steps_leaves_its_diagnosis_out():
    diagnosis = sharded()
    rank = diagnosis.ranks[0]
    many = replace(rank, steps=rank.steps[:1] * (MOST_STEPS_CARRIED + 1))
    page = render(replace(diagnosis, ranks=(many,)), "html")
    assert len(page) < 500_000
    with pytest.raises(InputError, match="does not carry its diagnosis, which has too many steps"):
        diagnosis_in_page(page.encode())


@pytest.mark.parametrize("name", HAND_MADE)
def test_page_has_the_outline_of_its_golden_file(name: str):
    golden = Path(__file__).parent / "golden" / f"{name}.outline"
    text = outline(render(DIAGNOSES[name](), "html"))
    assert text == golden.read_text(encoding="utf-8"), REFRESH


def test_parts_of_the_page_stand_in_the_order_of_their_links():
    built = page("sharded")
    links = [
        a["href"][1:] for tag, a in built.elements if tag == "a" and (a.get("href") or "").startswith("#")
    ]
    heads = [a.get("id") for tag, a in built.elements if tag == "h2"]
    assert heads.pop(0) == "causes"  # in the head of the page, above the links
    assert heads == [
        "timeline", "budget", "findings", "limits", "waits", "ranks", "steps", "collectives", "units",
        "memory", "kernels", "unchecked", "verdicts", "facts",
    ]  # fmt: skip
    assert [link for link in dict.fromkeys(links) if link in heads and link != "limits"] == [
        head for head in heads if head != "limits"
    ]
    assert [a.get("id") for tag, a in page("healthy").elements if tag == "h2"] == [
        "budget", "findings", "ranks", "verdicts", "facts",
    ]  # fmt: skip


def test_head_and_title_name_the_run_and_when_it_was_captured() -> None:
    run = replace(sharded().run, sources=("runs/monday/rank-0.json",), captured_at="2026-02-03T04:05:06Z")
    page = render_html(build_view(replace(sharded(), run=run), redact=True))
    assert "<title>monday: Straggler" in page
    assert "<strong>monday</strong>, captured 2026-02-03 04:05 UTC" in page


def test_what_stands_between_backticks_is_code() -> None:
    found = replace(sharded().findings[0], message="late in `f` (`a<b>.py:3`)")
    page = render_html(build_view(replace(sharded(), findings=(found,), summary="Late: in `f`. More.")))
    assert "late in <code>f</code> (<code>a&lt;b&gt;.py:3</code>)" in page
    assert "Late: in f.</title>" in page
