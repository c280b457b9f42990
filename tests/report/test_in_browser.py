"""The page in a real browser: it asks for nothing, zooms, copies, and reads without scripts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import tracedoc
from tests.example_diagnoses import DIAGNOSES, HOSTILE
from tracedoc.ledger import Ledger, LedgerCause
from tracedoc.report.charts.bars import Box
from tracedoc.report.page import sheet_page
from tracedoc.report.render import write_report
from tracedoc.report.sheet import Sheet, SheetBar, SheetTable
from tracedoc.report.view import build_view
from tracedoc.report.words import STATES
from tracedoc.tables import PhaseRow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Screen:
    """A page that shows one file after another, and notes all that these complain of or ask for."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.shown, self.noted = "about:blank", list[str]()
        self.page.on("console", lambda message: self.noted.append(message.text))
        self.page.on("pageerror", lambda error: self.noted.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("dialog", lambda dialog: self.noted.append(dialog.message))

    def _asked(self, url: str) -> None:
        if url != self.shown:
            self.noted.append(url)

    def show(self, url: str) -> list[str]:
        self.shown, self.noted = url, []
        self.page.goto(url)
        return self.noted


Browser = dict[bool, Screen]
"""A screen with scripts and one without: each costs as much as a window of its own."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = [
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_api.sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield {
            scripts: Screen(chromium.new_context(java_script_enabled=scripts)) for scripts in (True, False)
        }
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, diagnosis in DIAGNOSES.items():
        write_report(diagnosis(), str(folder / f"{name}.html"))
    return folder


def opened(
    browser: Browser,
    file: Path,
    *,
    scripts: bool = True,
    width: int = 1280,
    height: int = 900,
    scheme: str = "light",
) -> tuple[Any, list[str]]:
    """Open a page; the list fills with everything that it complains of or asks for."""
    screen = browser[scripts]
    screen.show("about:blank")  # nothing is left of what was shown before
    screen.page.mouse.move(0, 0)
    screen.page.set_viewport_size({"width": width, "height": height})
    screen.page.emulate_media(media="screen", color_scheme=scheme)
    return screen.page, screen.show(file.as_uri())


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_page_complains_of_nothing_and_asks_for_nothing(browser: Browser, pages: Path, name: str) -> None:
    page, noted = opened(browser, pages / f"{name}.html")
    assert noted == []
    assert page.locator("h1").count() == 1


def test_zoom_shows_half_of_the_step_and_the_whole_again(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    drawing = page.locator("#picture svg.states").first
    assert drawing.get_attribute("viewBox") == "0 0 1000 10"
    page.get_by_text("Zoom in").first.click()
    assert drawing.get_attribute("viewBox") == "250 0 500 10"
    assert page.locator(".shown").first.inner_text() == "100 ms to 300 ms"
    page.locator("#picture").press("0")
    assert drawing.get_attribute("viewBox") == "0 0 1000 10"


def test_pan_stops_at_the_end_of_the_step(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.get_by_text("Zoom in").first.click()
    for _ in range(9):
        page.get_by_text("Later").first.click()
    assert page.locator(".shown").first.inner_text() == "200 ms to 400 ms"


def test_copy_gives_the_code_of_the_fix(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = page.locator("article pre").first.text_content()
    page.locator("article .copy-button").first.click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.context.clear_permissions()


def test_page_reads_without_scripts(browser: Browser, pages: Path) -> None:
    page, noted = opened(browser, pages / "sharded.html", scripts=False)
    assert noted == []
    assert not page.get_by_text("Zoom in").first.is_visible()
    assert not page.locator("#search").is_visible()
    assert page.locator("#picture svg.states").first.is_visible()
    heads = page.locator("h2").all_inner_texts()
    assert (
        heads.index("The step on every rank") < heads.index("Where the step goes") < heads.index("Findings")
    )


BROKEN = """() => {
  const found = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const holder = text.parentElement;
    if (!text.data.trim() || holder.closest("pre, script, style, code, .unseen, .cards thead")) continue;
    if (getComputedStyle(holder).overflowX !== "visible" && holder.scrollWidth > holder.clientWidth + 1)
      found.push(text.data.trim());
    for (const word of text.data.matchAll(/[^\\s/.,:=_-]+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = [...range.getClientRects()].filter((one) => one.width).map((one) => Math.round(one.top));
      if (new Set(lines).size > 1) found.push(word[0]);
    }
  }
  return found;
}"""
"""Words that are broken over two lines, and what is cut."""

CAUSES = (
    ("ranks whose host is slower than its peers", "120 ms", "13.7 ms", "-107 ms"),
    ("exposed communication", "3.85 ms", "16.1 ms", "+12.3 ms"),
)
EVIDENCE = "the backward pass; all_reduce: 2 -> 2 a step, it is late in `write_metrics` (`train.py:13`)"


def plain(text: str) -> str:
    """A text without the characters that keep numbers and their units on a line."""
    return text.replace("\u2060", "").replace("\xa0", " ")


def compared() -> Sheet:
    """A comparison whose table has a column of words behind those of numbers."""
    return Sheet(
        "Improved: 400 ms -> 370 ms a step, mostly link (-40 ms).",
        bars=(
            SheetBar("link", "-40 ms", (Box("shorter", 500, 40),)),
            SheetBar("input", "+10 ms", (Box("longer", 500, 10),)),
        ),
        tables=(
            SheetTable(
                ("Cause", "BASE", "HEAD", "change", "evidence"),
                tuple((*cause, EVIDENCE) for cause in CAUSES),
                3,
            ),
        ),
        title="lr-1e-4 -> lr-3e-4",
    )


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_no_word_is_broken_and_nothing_is_cut(browser: Browser, pages: Path, width: int) -> None:
    """The longest cause of a late rank, the smallest share, evidence of a comparison; no backtick is left."""
    diagnosis = DIAGNOSES["sharded"]()
    late = replace(
        diagnosis.findings[0],
        ranks=(0,),
        title="Host-device synchronisation: the host waits",
        message=EVIDENCE,
    )
    least = LedgerCause("input.copies", 0.1, (0.1, 0.1, 0.1), 0.1)
    ledger = Ledger(400.0, 399.5, 0.0, (LedgerCause("host.sync", 0.4, (0.4, 0.4, 0.4), 0.4), least))
    detail = replace(diagnosis.detail, phases=(PhaseRow("recompute", 120.0, 101.0, 101.0, 101.0),))
    whole = replace(diagnosis, findings=(late, *diagnosis.findings[1:]), ledger=ledger, detail=detail)
    write_report(whole, str(pages / "late.html"))
    (pages / "compared.html").write_text(sheet_page(compared()), encoding="utf-8")
    for name in ("late", "healthy", "cpu", "compared"):
        page, _ = opened(browser, pages / f"{name}.html", width=width)
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert page.evaluate(BROKEN) == [], name
        assert "`" not in page.locator("body").inner_text(), name


def test_the_head_has_the_waterfall_beside_the_answer_with_fixes(browser: Browser, tmp_path: Path) -> None:
    run = Path(__file__).resolve().parents[2] / "sample_traces" / "synthetic_zero3_gather_stall"
    diagnosis = tracedoc.diagnose(run)
    write_report(diagnosis, str(tmp_path / "run.html"))
    page, _ = opened(browser, tmp_path / "run.html")
    answer, causes = (page.locator(one).bounding_box() for one in ("h1", ".causes"))
    assert answer["x"] + answer["width"] <= causes["x"]
    assert causes["y"] < answer["y"] + answer["height"]
    assert page.locator(".waterfall .title").first.inner_text() == "today's step"
    assert page.locator(".waterfall .title").last.inner_text() == "ideal step"
    # The finding's words, its bar, and the fix beside the cause say one change of the step.
    saved, beside, changed = (
        plain(page.locator(one).first.inner_text())
        for one in ("article .found .gain", ".waterfall .first-fix .gain", "article .change .gain")
    )
    assert beside.startswith(saved)
    assert changed.startswith(saved)
    fix = build_view(diagnosis).findings[0].fixes[0].predicted
    assert fix is not None
    whole, sure, spread = (
        page.locator(one).first.bounding_box()["width"]
        for one in ("article .bar", "article .bar i:first-child", "article .bar .range")
    )
    assert sure / whole == pytest.approx(fix.gain_ms[0] / fix.before_ms, abs=0.01)
    assert spread / whole == pytest.approx((fix.gain_ms[2] - fix.gain_ms[0]) / fix.before_ms, abs=0.01)


def test_the_caption_says_what_numbers_above_a_rank_mean(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    caption = page.locator("#timeline + p").inner_text()
    assert "a number above a rank is the finding that is seen there" in caption
    mark = page.locator(".mark").first
    number = mark.inner_text()
    message = plain(page.locator(f"article:has(#finding-{number}) .message").inner_text())
    assert plain(mark.get_attribute("title")) == f"{number}: all-gather waits for rank 5. {message}"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen_and_no_table_is_cut(
    browser: Browser, pages: Path, width: int
) -> None:
    for name in DIAGNOSES:
        page, _ = opened(browser, pages / f"{name}.html", width=width)
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        cut = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth)"
            ".map((one) => one.querySelector('caption').textContent)"
        )
        assert cut == [], name


def test_a_stretch_says_what_it_is_under_the_pointer(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    box = page.locator("#picture svg.states").first.bounding_box()
    # Of 400 ms rank 0 waits from 200 to 290.
    page.mouse.move(box["x"] + box["width"] * 240 / 400, box["y"] + 5)
    assert page.locator(".tip").inner_text() == "rank 0: waiting for peers, 200 ms to 290 ms (90 ms)"
    page.mouse.move(5, 5)
    assert not page.locator(".tip").is_visible()


def test_a_stretch_names_its_kernel_and_its_collective(browser: Browser, tmp_path: Path) -> None:
    """Of 400 ms a kernel runs from 210 to 260 beside a collective of 200 to 290; a hostile name is text."""
    diagnosis = DIAGNOSES["sharded"]()
    picture = diagnosis.detail.picture
    assert picture is not None
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
    row = replace(picture.rows[0], named=((200, 290, 1), (210, 260, 0), (295, 299, 2)))
    names = (kernel, "all-gather of 416 MiB, 8 ranks", HOSTILE)
    picture = replace(picture, rows=(row, *picture.rows[1:]), names=names)
    file = tmp_path / "named.html"
    write_report(replace(diagnosis, detail=replace(diagnosis.detail, picture=picture)), str(file))
    page, noted = opened(browser, file)
    box = page.locator("#picture svg.states").first.bounding_box()
    said = []
    for ms in (240, 270, 297):
        page.mouse.move(box["x"] + box["width"] * ms / 400, box["y"] + 5)
        said.append(page.locator(".tip").inner_text())
    assert said[0].endswith(
        ": vectorized_elementwise_kernel<CUDAFunctor_add> (50 ms): all-gather of 416 MiB, 8 ranks (90 ms)"
    )
    assert said[1].endswith("(90 ms): all-gather of 416 MiB, 8 ranks (90 ms)")
    assert "<script>" in said[2]
    assert noted == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_paints_no_improvement_red(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Of two parts one is 40 ms shorter and one 10 ms longer; nothing is wider than a telephone."""
    file = tmp_path / "compared.html"
    file.write_text(sheet_page(compared()), encoding="utf-8")
    page, noted = opened(browser, file, width=390, scheme=scheme)
    red, green = (
        page.evaluate(f"getComputedStyle(document.querySelector('rect.{key}')).fill")
        .strip("rgb()")
        .split(", ")
        for key in ("longer", "shorter")
    )
    assert int(red[0]) > 1.4 * int(red[1])
    assert int(green[1]) > 1.4 * int(green[0])
    assert page.title() == "lr-1e-4 -> lr-3e-4: Improved: 400 ms -> 370 ms a step, mostly link (-40 ms)."
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert noted == []


def test_keys_step_through_what_a_rank_does(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    picture, said = page.locator("#picture"), page.locator(".shown").first
    picture.press("ArrowDown")
    assert said.inner_text().startswith("rank 0: forward 190 ms, waiting for peers 90 ms")
    picture.press("ArrowDown")
    for _ in range(3):
        picture.press("n")
    assert said.inner_text() == "rank 5: waiting for peers, 350 ms to 360 ms (10 ms)"
    picture.press("p")
    assert said.inner_text() == "rank 5: backward, 290 ms to 350 ms (60 ms)"


def test_a_finding_shows_where_it_happens(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.locator("article .show-button").first.click()
    assert set(page.locator(".mark.lit").all_inner_texts()) == {"1"}
    width = float(page.locator("#picture svg.states").first.get_attribute("viewBox").split()[2])
    assert width < 1000


def test_search_leaves_what_holds_the_words(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.locator("#search").fill("low-mfu")
    found = page.locator("main tbody tr:visible").all_inner_texts()
    assert [text.split()[0] for text in found] == ["low-mfu"]
    assert page.locator("details:has(#verdicts)").get_attribute("open") is not None
    assert page.locator("#matches").inner_text() == "2 found"
    page.locator("#search").fill("")
    assert page.locator(".away").count() == 0
    assert page.locator("details:has(#verdicts)").get_attribute("open") is None


def test_enter_goes_from_hit_to_hit_of_a_search(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html", height=500)
    search = page.locator("#search")
    search.fill("low-mfu")
    search.press("Enter")
    search.press("Enter")
    assert page.locator("#matches").inner_text() == "2 of 2"
    box = page.locator(".hit").bounding_box()
    assert 0 <= box["y"] <= 500
    search.press("Enter")
    assert page.locator("#matches").inner_text() == "1 of 2"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_causes_of_idle_time_have_colours_of_their_own(browser: Browser, pages: Path, scheme: str) -> None:
    page, _ = opened(browser, pages / "sharded.html", scheme=scheme)
    keys = [key for key, _ in STATES.values()]
    seen = page.evaluate(
        "(keys) => keys.map((key) => { const one = document.createElement('i'); one.className = key;"
        " document.body.append(one); return getComputedStyle(one).backgroundColor; })",
        keys,
    )
    assert len(set(seen)) == len(keys)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_hinders_readers(browser: Browser, pages: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    page, noted = opened(browser, pages / "sharded.html", scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert noted == []


def test_paper_has_no_buttons_and_no_links_within_the_page(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.emulate_media(media="print")
    assert page.locator("button:visible").count() == 0
    assert not page.locator("nav").is_visible()
    mark = page.locator(".mark").first
    assert mark.evaluate("one => getComputedStyle(one, '::after').content") == "none"


def test_page_is_dark_where_the_reader_wants_it(browser: Browser, pages: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        page, _ = opened(browser, pages / "sharded.html", scheme=scheme)
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours == {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 23, 26)"}


def test_critical_path_is_a_line_that_can_be_switched_off(browser: Browser, pages: Path) -> None:
    for scripts in (True, False):
        page, noted = opened(browser, pages / "sharded.html", scripts=scripts)
        lines, switch = page.locator(".critical-path"), page.get_by_label("critical path")
        assert lines.count() == 2
        assert lines.first.is_visible()
        switch.uncheck()
        assert not lines.first.is_visible()
        switch.check()
        assert lines.first.is_visible()
        assert noted == []


def test_critical_path_keeps_to_its_lanes_at_every_width(browser: Browser, pages: Path) -> None:
    """On the bar in the middle of its height, and from row to row without a gap between them."""
    for width in (390, 1280):
        page, _ = opened(browser, pages / "sharded.html", width=width)
        for row in page.locator("#picture .rank[data-rank]").all():
            bar, line = (row.locator(kind).bounding_box() for kind in (".states", ".critical-path"))
            middle = line["y"] + 0.52 * line["height"]
            assert bar["y"] + 0.3 * bar["height"] < middle < bar["y"] + 0.7 * bar["height"]
            assert (bar["x"], bar["width"]) == (line["x"], line["width"])
        first, second = (lane.bounding_box() for lane in page.locator("#picture .rank .lane").all()[:2])
        assert first["y"] + first["height"] == pytest.approx(second["y"], abs=0.1)


def test_zoom_moves_the_critical_path_with_the_bars(browser: Browser, pages: Path) -> None:
    page, _ = opened(browser, pages / "sharded.html")
    page.get_by_text("Zoom in").first.click()
    assert page.locator(".critical-path").first.get_attribute("viewBox") == "250 0 500 10"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_critical_path_stands_out_from_bars_and_paper(browser: Browser, pages: Path, scheme: str) -> None:
    page, _ = opened(browser, pages / "sharded.html", scheme=scheme)
    line = "getComputedStyle(document.querySelector('.critical-path .line')).stroke"
    ink, paper = page.evaluate(f"[{line}, getComputedStyle(document.body).backgroundColor]")
    light, dark = (sum(int(part) for part in re.findall(r"\d+", colour)[:3]) for colour in (paper, ink))
    assert abs(light - dark) > 450
    page.emulate_media(media="print")
    assert page.locator(".critical-path").first.is_visible()
    assert not page.get_by_label("critical path").is_visible()
