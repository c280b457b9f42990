"""Which settings hold, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tracedoc.cli import main
from tracedoc.cli.diagnose import Config, find_config
from tracedoc.errors import InputError


def write(file: Path, text: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_no_file_means_no_settings(tmp_path: Path) -> None:
    assert find_config(tmp_path) == Config()


def test_nearest_file_holds_alone(tmp_path: Path) -> None:
    write(tmp_path / "tracedoc.toml", 'select = ["host"]\nfail-on = "note"\n')
    near = write(tmp_path / "a" / "pyproject.toml", '[tool.tracedoc]\nignore = ["tiny-batch"]\n')
    assert find_config(tmp_path / "a" / "b") == Config(ignore=("tiny-batch",), source=near)


def test_own_file_goes_before_the_project_beside_it(tmp_path: Path) -> None:
    own = write(tmp_path / "tracedoc.toml", 'fail-on = "critical"\n')
    write(tmp_path / "pyproject.toml", '[tool.tracedoc]\nfail-on = "note"\n')
    assert find_config(tmp_path) == Config(fail_on="critical", source=own)


@pytest.mark.parametrize("text", ["[tool.other]\nx = 1\n", "not TOML ["])
def test_projects_of_others_are_passed_over(tmp_path: Path, text: str) -> None:
    own = write(tmp_path / "tracedoc.toml", "")
    write(tmp_path / "a" / "pyproject.toml", text)
    assert find_config(tmp_path / "a").source == own


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("ignroe = []", "no setting is called 'ignroe' (did you mean 'ignore'?)", "select, ignore, fail-on"),
        ('fail-on = "bad"', "fail-on is 'bad'", "critical, warning, note"),
        ("fail-on = ['note']", "fail-on is ['note']", "critical, warning, note"),
        ('select = "host"', "select is no list of rules", 'select = ["pipeline"]'),
        ("select = [1]", "select is no list of rules", 'select = ["pipeline"]'),
        ("select = [", "is not TOML", "correct it"),
    ],
)
def test_wrong_settings_are_errors(tmp_path: Path, text: str, message: str, hint: str) -> None:
    write(tmp_path / "tracedoc.toml", text)
    with pytest.raises(InputError) as caught:
        find_config(tmp_path)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_example_of_the_guide_is_valid(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "settings.md").read_text(encoding="utf-8")
    source = write(tmp_path / "tracedoc.toml", text.split("```toml\n")[1].split("```")[0])
    chosen = ("communication", "host", "input-stall")
    assert find_config(tmp_path) == Config(
        chosen, ("tiny-kernels",), "warning", ("cause.link.share <= 0.1", "step_ms <= 420"), source
    )


def test_command_line_goes_before_the_settings(
    tmp_path: Path, sample_traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "tracedoc.toml", 'select = ["tiny-batch"]\nfail-on = "critical"\n')
    monkeypatch.chdir(tmp_path)
    run = ["diagnose", str(sample_traces / "synthetic_ddp_tiny_batch")]
    chosen = CliRunner().invoke(main, run)
    assert chosen.exit_code == 1
    assert " rules judged" in chosen.stdout
    assert chosen.stderr.startswith(f"settings: {source}\n--fail-on critical: 1 finding is critical")
    other = CliRunner().invoke(main, [*run, "--select", "capture"])
    assert other.exit_code == 0
    assert "rules judged: 3 passed" in other.stdout
