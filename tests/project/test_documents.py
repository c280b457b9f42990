"""Hold that the documents tell the truth: commands exist, shown outputs are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

import tracedoc
from tests.golden import REFRESH
from tracedoc.cli import main
from tracedoc.errors import TracedocError

REPOSITORY = Path(__file__).resolve().parents[2]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refresh = _script("refresh")
DOCUMENTS = refresh.documents()


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_is_one(document: Path) -> None:
    """There is such a command with such options, in the changelog and decisions as well."""
    text = document.read_text(encoding="utf-8")
    shown = re.findall(r"`(tracedoc [^`]+)`", text)
    shown += [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    for line in shown:
        words = shlex.split(re.split(r" [|>]+ |&&", line)[0], comments=True)
        if words[:1] != ["tracedoc"] or len(words) < 2 or words[1].startswith("-"):
            continue
        command = main.get_command(click.Context(main), words[1])
        assert command is not None, line
        try:
            while isinstance(command, click.Group) and len(words) > 2 and not words[2].startswith("-"):
                command, words = command.get_command(click.Context(command), words[2]), words[1:]
                assert command is not None, line
            command.make_context(words[1], words[2:])
        except click.NoSuchOption as error:
            pytest.fail(f"{line}: {error}")
        except (click.ClickException, click.exceptions.Exit, TracedocError):
            pass  # a file of the reader's that is not here


def test_python_of_the_library_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are one program: later ones use what earlier ones made."""
    text = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
    (tmp_path / "sample_traces").symlink_to(REPOSITORY / "sample_traces")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "docs/library.md", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {"sample_traces", "report.html", "diagnosis.json"}


def test_the_library_guide_lists_what_is_public_and_uses_nothing_else() -> None:
    text = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `tracedoc\.([\w.]+)` \|", text, re.M)
    modules = {name for name in listed if importlib.util.find_spec(f"tracedoc.{name}")}
    assert set(listed) - modules == set(tracedoc.__all__)
    blocks = "\n".join(re.findall(r"```py(?:thon)?\n(.*?)```", text, re.S))
    imported = set(re.findall(r"from tracedoc\.([\w.]+) import", blocks))
    called = set(re.findall(r"\btracedoc\.(\w+)\(", blocks))
    assert imported <= modules
    assert called <= set(tracedoc.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_shown_outputs_are_current(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert refresh.refreshed(text) == text, REFRESH


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_and_named_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


def test_predictions_of_the_readme_are_those_of_the_documents_that_measured_them() -> None:
    rows = re.findall(r"^\| (.+?) \| (-?\d+) to (\d+) % \| (\d+) % \|$", text_of("README.md"), re.M)
    (job, low, high, measured), *others = rows
    shown = text_of("docs/first-diagnosis.md")
    step, *after = re.findall(r"(\d+) -> about \d+ ms \((\d+) to (\d+)\)", shown)[0]
    shares = sorted(round(100 - 100 * int(one) / int(step)) for one in after)
    before, now = re.findall(r"(\d+) ms -> ([\d.]+) ms a step", shown)[0]
    assert job.startswith("rank 0 writes metrics")
    assert ([int(low), int(high)], int(measured)) == (shares, round(100 - 100 * float(now) / int(before)))
    measured_rows = text_of("benchmarks/README.md").splitlines()
    for job, low, high, measured in others:
        (row,) = (line for line in measured_rows if line.startswith(f"| {job} |"))
        assert f"| {low} to {high} % |" in row
        assert f"| {measured} % |" in row


def test_the_rule_that_the_first_diagnosis_explains_is_the_one_that_fires() -> None:
    text = text_of("docs/first-diagnosis.md")
    fires = re.findall(r"^1  \w+  .*\[([\w-]+)\]$", text, re.M)
    assert f"`tracedoc explain {fires[0]}`" in text
