"""The page stands alone, shows what the diagnosis says, and hides what it must."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import DIAGNOSES, sharded
from tracedoc.report.html import MOST_STEPS, render_html
from tracedoc.report.view import build_view

VOID = {"meta", "link", "br", "rect", "path"}


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
        self.text += data


def page(name: str) -> Page:
    return Page(render_html(build_view(DIAGNOSES[name](), redact=True)))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_page_is_well_formed_and_needs_nothing_else(name: str):
    built = page(name)
    assert built.open == []
    tags = {tag for tag, _ in built.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "base"}
    for _, attributes in built.elements:
        assert not any(key.startswith("on") for key in attributes)
        assert "src" not in attributes
        href = attributes.get("href") or ""
        assert href == "" or href.startswith(("#", "https://"))


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_policy_forbids_everything_but_inline_style(name: str):
    policies = [
        a["content"] for tag, a in page(name).elements if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_pictures_have_words_and_tables_have_captions(name: str):
    built = page(name)
    pictures = [attributes for tag, attributes in built.elements if tag == "svg"]
    assert pictures
    assert all(attributes.get("aria-label") for attributes in pictures)
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
    assert built.text.index("Straggler: the other ranks wait 90 ms") < built.text.index("Where the step goes")


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
    assert len(re.findall('<div class="step">', text)) == MOST_STEPS
    assert "12 later steps are not drawn." in text


def test_healthy_page_says_that_nothing_was_found():
    assert "Nothing found to change." in page("healthy").text


def test_timeline_spans_the_whole_step():
    diagnosis = sharded()
    lanes = tuple(replace(lane, spans_ms=((0.0, 100.0),)) for lane in diagnosis.detail.lanes[:1])
    text = render_html(build_view(replace(diagnosis, detail=replace(diagnosis.detail, lanes=lanes))))
    assert 'd="M0.00 0H250.00V10H0.00Z"' in text


def test_a_timeline_of_years_has_no_ticks():
    from tracedoc.report.html import _ticks

    assert [place for place, _ in _ticks(10.0)] == [0, 20, 40, 60, 80, 100]
    for end in (1e13, 1e308, float("inf"), float("nan"), 0.0, -1.0):
        assert _ticks(end) == ()
