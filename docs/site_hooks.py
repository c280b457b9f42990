"""Fit the documents into a site: pages from outside of docs/, links that would lead out of it, no request.

mkdocs calls these functions (``hooks`` in mkdocs.yml). ``make docs`` has made the gallery, and the
pages of rules and facts, before.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
GALLERY = REPOSITORY / "build" / "gallery"
PAGES = REPOSITORY / "build" / "pages"
FROM_THE_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Documents of the repository's root that are pages of the site."""

_LINK = re.compile(
    r"(?P<text>\[[^\]\n]*\])\((?P<target>(?!https?:|mailto:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_REQUEST = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bstylesheet\b[^>]*//"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that are not in docs/."""
    from mkdocs.structure.files import File

    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / name)))
    files.append(File.generated(config, "decisions/README.md", content=decisions_page()))
    for path in sorted(PAGES.rglob("*.*")):
        files.append(File.generated(config, path.relative_to(PAGES).as_posix(), abs_src_path=str(path)))
    for path in sorted(GALLERY.iterdir()):
        files.append(File.generated(config, posixpath.join("gallery", path.name), abs_src_path=str(path)))
    page = files.get_file_from_path("gallery/gallery.md")
    files.remove(page)
    files.append(File.generated(config, "gallery.md", abs_src_path=page.abs_src_path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of the site into plain names."""
    return site_links(markdown, page.file.src_uri, set(files.src_uris))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that would load anything from elsewhere."""
    if found := _REQUEST.search(output):
        raise ValueError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


def site_links(markdown: str, source: str, pages: set[str]) -> str:
    """Return a document with each link that works in the repository made one of the site.

    ``source`` is the document as the site names it, relative to docs/; those of :data:`FROM_THE_ROOT` stand
    one folder higher in the repository. A link to what is no page becomes its text.
    """
    folder = ".." if source in FROM_THE_ROOT else posixpath.dirname(source)
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.S | re.M)

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        if source in FROM_THE_ROOT:
            target = target.removeprefix("../docs/")
        target = target.removeprefix("../") if target.removeprefix("../") in FROM_THE_ROOT else target
        target = f"{target}/README.md" if f"{target}/README.md" in pages else target
        if target not in pages:
            return match["text"][1:-1]
        here = posixpath.relpath(target, posixpath.dirname(source) or ".")
        return f"{match['text']}({here}{match['anchor'] or ''})"

    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)


def decisions_page() -> str:
    """Return the list of decisions, newest first."""
    lines = ["# Decisions", "", "What was decided, why, and what it cost; newest first.", ""]
    for path in sorted((REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"), reverse=True):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, words = title.partition(". ")
        lines.append(f"- [{words or number}]({path.name}) ({path.name[:4]})")
    return "\n".join(lines) + "\n"
