"""The documentation site: each document is in it, links lead to pages, the gallery shows every sample."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings() -> dict[str, Any]:
    """Return mkdocs.yml; what it asks Python for is left out."""
    text = re.sub(r"!!python\S* ", "", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def navigation() -> set[str]:
    pages = (page for section in settings()["nav"] for listed in section.values() for page in listed)
    return {page if isinstance(page, str) else next(iter(page.values())) for page in pages}


hooks = _script("site_hooks")
MADE = {
    "gallery.md",
    "decisions/README.md",
    "facts.md",
    "glossary.md",
    "rules/README.md",
    *hooks.FROM_THE_ROOT,
}


def test_every_document_is_in_the_navigation() -> None:
    written = {path.name for path in DOCS.glob("*.md")}
    assert navigation() == written | MADE


def test_decisions_are_listed_on_their_page() -> None:
    decisions = hooks.decisions_page()
    assert all(f"({path.name})" in decisions for path in (DOCS / "decisions").glob("*.md"))


@pytest.mark.parametrize(
    ("source", "written", "shown"),
    [
        ("README.md", "[a](plan.md) and [b](facts.md#step_ms)", "[a](plan.md) and [b](facts.md#step_ms)"),
        ("README.md", "[decisions](decisions/)", "[decisions](decisions/README.md)"),
        ("README.md", "[how](../CONTRIBUTING.md)", "[how](CONTRIBUTING.md)"),
        ("library.md", "the [schema](../tracedoc/schema/diagnosis-2.json)", "the schema"),
        ("rules/one.md", "[step](../facts.md#step_ms)", "[step](../facts.md#step_ms)"),
        ("CONTRIBUTING.md", "[map](docs/plan.md#a) [x](LICENSE)", "[map](plan.md#a) x"),
        ("plan.md", "[torch](https://pytorch.org) [here](#b)", "[torch](https://pytorch.org) [here](#b)"),
        ("plan.md", "```\n[a](nowhere.md)\n```", "```\n[a](nowhere.md)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source: str, written: str, shown: str) -> None:
    pages = {"README.md", "CONTRIBUTING.md", "plan.md", "facts.md", "decisions/README.md", "rules/one.md"}
    assert hooks.site_links(written, source, pages) == shown


def test_a_page_that_loads_from_elsewhere_is_refused() -> None:
    class Page:
        class file:  # noqa: N801
            src_uri = "plan.md"

    plain = '<link rel="stylesheet" href="assets/a.css"><script src="a.js"></script><a href="https://x">x</a>'
    assert hooks.on_post_page(plain, Page, None) == plain
    for foreign in ('<script src="https://cdn.example/a.js">', '<img alt="x" src="//cdn.example/a.png">'):
        with pytest.raises(ValueError, match=r"plan\.md loads something from elsewhere"):
            hooks.on_post_page(foreign, Page, None)


def test_nothing_of_the_site_is_fetched() -> None:
    theme = settings()["theme"]
    assert theme["font"] is False, "fonts would come from a server"
    assert "repo_url" not in settings(), "its stars would be asked for"


def test_gallery_has_the_answer_the_figure_and_the_page(tmp_path: Path) -> None:
    gallery = _script("gallery")
    folders = {path.name for path in gallery.SAMPLES.iterdir() if path.is_dir()}
    assert set(gallery.samples()) == folders - {"__pycache__"}
    gallery.write_gallery(tmp_path, ["cpu_ddp_slow_metrics"])
    text = (tmp_path / "gallery.md").read_text(encoding="utf-8")
    assert "## Rank 0 is late, or one rank is\n\n### " in text
    assert "> Rank-0 work (84.8 ms of the 175 ms step): rank 1 waits" in text
    assert "`write_metrics` (`train.py:13`)" in text
    for name in re.findall(r"\(gallery/([\w.]+)\)", text):
        assert (tmp_path / name).stat().st_size > 10_000
    assert str(REPOSITORY) not in text
