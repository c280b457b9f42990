"""Hold that the documents tell the truth: commands run, shown outputs are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

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


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY))


def commands_of(document: Path) -> list[str]:
    return [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", document.read_text(encoding="utf-8"), re.S)
        for line in block.splitlines()
        if line.startswith("$ tracedoc ")
    ]


def test_the_documents_that_show_commands_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/plan.md"} <= {
        name_of(document) for document in DOCUMENTS if commands_of(document)
    }


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if commands_of(d)], ids=name_of)
def test_every_command_of_a_document_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of one document run in order in one folder, so that later ones may use earlier results."""
    (tmp_path / "docs").mkdir()
    for folder in ("sample_traces", "rules", "docs/house-rules"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    # One file of cases shows that the command works; all of them run in tests of their own.
    (tmp_path / "tests" / "rules").mkdir(parents=True)
    cases = Path("tests", "rules", "exposed-communication.yaml")
    (tmp_path / cases).symlink_to(REPOSITORY / cases)
    monkeypatch.chdir(tmp_path)
    for command in commands_of(document):
        done = CliRunner().invoke(main, shlex.split(command, comments=True)[1:])
        assert done.exit_code == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_that_names_a_job_of_the_reader_is_one(document: Path) -> None:
    """Commands within a line, or on files of the reader's: there is such a command with such options."""
    text = document.read_text(encoding="utf-8")
    shown = re.findall(r"`(tracedoc [^`]+)`", text)
    shown += [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    for line in shown:
        words = shlex.split(re.split(r" [|>]+ |&&", line)[0], comments=True)
        if words[0] != "tracedoc" or len(words) < 2 or words[1].startswith("-"):
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
