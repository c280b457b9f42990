"""Show mutants of diagnoses in JSON, as `tracedoc report` does: no traceback, no hang, nothing executed.

python soak/fuzz_reports.py [--count 2000] [--from 0]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from copy import deepcopy
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fuzz_manifests import places
from fuzz_traces import ODD, odd
from trial import repeat

import tracedoc
from tracedoc.diagnosis_json import from_json
from tracedoc.errors import TracedocError
from tracedoc.pipeline import Options, diagnose
from tracedoc.report.render import render

SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"
TEXTS = (
    *(
        "<script>alert(1)</script>",
        "</style><img src=x onerror=alert(1)>",
        '" onload="x',
        "{{ 7 * 7 }}",
        "{% if",
    ),
    *(
        "\x1b[31mred\x1b]8;;http://x\x07",
        "[bold]x[/bold]",
        "[link=http://x]",
        "\u202eoverride",
        "javascript:x",
    ),
    *("x" * 100_000, "a b " * 5000, "\n\n\n", "%s%n", "", "\ud800"),
)
TAGS_THAT_EXECUTE = frozenset({"img", "iframe", "object", "embed", "form", "link", "base"})


class Page(HTMLParser):
    """Notes what in a page would execute or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.executes: list[str] = []
        self.scripts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        bad = [
            f"{name}={value}" for name, value in attrs if name.startswith("on") or name in ("src", "srcdoc")
        ]
        bad += [
            f"href={link}"
            for name, link in attrs
            if name == "href" and not str(link).startswith(("https:", "#"))
        ]
        if tag == "script":
            self.scripts.append(dict(attrs).get("type"))
        elif tag in TAGS_THAT_EXECUTE or bad:
            self.executes.append(f"{tag} {bad}")


@cache
def own_script() -> str:
    """Return the script that a page may hold."""
    return (Path(tracedoc.__file__).parent / "report" / "templates" / "page.js").read_text(encoding="utf-8")


@cache
def samples() -> list[bytes]:
    """Return the diagnoses of the sample runs, without most of their facts."""
    found = []
    for folder in sorted(path for path in SAMPLES.iterdir() if path.is_dir()):
        content = json.loads(render(diagnose([folder], Options(jobs=1)), "json"))
        content["facts"] = dict(list(content["facts"].items())[::12])
        content["verdicts"] = content["verdicts"][::4]
        content["ranks"] = content["ranks"][:2]
        for finding in content["findings"]:
            finding["evidence"] = finding["evidence"][:3]
        picture = content["detail"]["picture"]
        if picture:
            picture["rows"] = picture["rows"][:2]
        found.append(json.dumps(content).encode())
    return found


def mutant(dice: random.Random) -> bytes:
    """Return a diagnosis in JSON with some values exchanged."""
    content = json.loads(dice.choice(samples()))
    everywhere = places(content)
    for _ in range(dice.choice([1, 1, 2, 3, 8, 40])):
        container, key = dice.choice(everywhere)
        if isinstance(container, list) and key >= len(container):
            continue
        if isinstance(container, dict) and key not in container:
            continue
        old: Any = container[key]
        what = dice.random()
        if what < 0.03 and isinstance(container, dict):
            del container[key]
        elif what < 0.9:
            # Of its own type mostly: others are refused at the border.
            alike: dict[type, tuple[Any, ...]] = {
                str: TEXTS,
                float: (0.0, -1.0, 1e308, -1e308, 1e-300, 5),
                int: (0, -1, 2**31, 2**53, 10**18, -(10**18)),
                bool: (True, False),
                list: ([], old * 50 if isinstance(old, list) and len(old) < 50 else []),
                dict: ({},),
            }
            container[key] = deepcopy(dice.choice(alike.get(type(old), ODD)))
        else:
            container[key] = odd(dice)
    text = json.dumps(content).encode()
    if dice.random() < 0.05:
        text = text[: dice.randint(0, len(text))]
    return text


def show(number: int) -> str:
    """Show mutant ``number`` in every form; return the outcome in a word."""
    try:
        diagnosis = from_json(mutant(random.Random(number)))
        text = render(diagnosis, "text")
        page = render(diagnosis, "html")
        render(diagnosis, "json")
    except TracedocError:
        return "refused"
    assert "\x1b" not in text, "an escape sequence got through"
    parsed = Page()
    parsed.feed(page)
    assert not parsed.executes, f"the page would execute {parsed.executes[:3]}"
    # The diagnosis as data, and the page's own script, which its policy names by the hash.
    assert parsed.scripts == ["application/json", None], f"the page has scripts {parsed.scripts[:5]}"
    assert own_script() in page, "the page's script is another"
    assert "could not be shown" not in text + page, "a part was contained"
    assert " failed: " not in page, "a table was contained"
    return "shown"


def main() -> int:
    """Try the mutants that the command line names; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    given = parser.parse_args()
    samples()
    return repeat("reports", range(given.first, given.first + given.count), show)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
