"""Run the steps of action.yml as GitHub would, with a ``gh`` and a ``python`` that note what is asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tracedoc.report.forges import MARK

REPOSITORY = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((REPOSITORY / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
PULL_REQUEST = {"github.event.pull_request.number": "7"}

GH = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
for argument; do
  case $argument in body=@*) cat "${argument#body=@}" > "$LOG.body" ;; esac
done
if [ "$2" = comment ]; then cat "$7" > "$LOG.body"; fi
if [ "$2" = view ]; then printf '%s' "$FOUND"; fi
exit "${GH_CODE:-0}"
"""
PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
mkdir -p "$3/bin"
printf '#!/bin/sh\\nprintf "%%s\\\\n" "$*" >> "$LOG"\\n' > "$3/bin/python"
printf '#!/bin/sh\\nexec "$OWN_PYTHON" -m tracedoc "$@"\\n' > "$3/bin/tracedoc"
chmod +x "$3/bin/python" "$3/bin/tracedoc"
"""


class Job:
    """A job of one step that uses the action."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.log = folder / "log"
        self.summary = folder / "summary.md"
        for name, text in (("gh", GH), ("python3", PYTHON)):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text, encoding="utf-8")
            program.chmod(0o755)
        self.uploaded: dict[str, str] | None = None
        self.stdout = ""
        self.stderr = ""

    def run(self, context: dict[str, str] | None = None, **inputs: str) -> int:
        """Run every step until one fails; return the exit code of the last one."""
        values = {f"inputs.{name}": item.get("default", "") for name, item in ACTION["inputs"].items()}
        values |= {f"inputs.{name.replace('_', '-')}": item for name, item in inputs.items()}
        values |= {"github.action_path": str(REPOSITORY), "github.token": "secret"} | (context or {})
        for step in STEPS:
            if "if" in step and not holds(step["if"], values):
                continue
            if "uses" in step:
                self.uploaded = {name: filled(text, values) for name, text in step["with"].items()}
                continue
            env = {name: filled(text, values) for name, text in step["env"].items()}
            if code := self._shell(step["run"], env, step.get("id"), values):
                return code
        return 0

    def _shell(self, script: str, env: dict[str, str], step: str | None, values: dict[str, str]) -> int:
        output = self.folder / "output"
        output.write_text("", encoding="utf-8")
        around = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "OWN_PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "LOG": str(self.log),
            "TRACEDOC_CACHE": "off",
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_REPOSITORY": "owner/name",
            "GITHUB_SERVER_URL": "https://forge.example",
            "GITHUB_RUN_ID": "99",
        } | {name: os.environ[name] for name in ("FOUND", "GH_CODE") if name in os.environ}
        file = self.folder / "step.sh"
        file.write_text(script, encoding="utf-8")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)],
            cwd=self.folder, env=around | env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.stdout += done.stdout
        self.stderr += done.stderr
        for line in output.read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition("=")
            values[f"steps.{step}.outputs.{name}"] = text
        return done.returncode

    @property
    def body(self) -> str:
        """Return the comment that was written."""
        return Path(f"{self.log}.body").read_text(encoding="utf-8")


def filled(text: str, values: dict[str, str]) -> str:
    """Return a text with its expressions replaced; what nobody set is empty, as on GitHub."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1], "")
        return filled(found, values) if "${{" in found else found

    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", value, text)


def holds(condition: str, values: dict[str, str]) -> bool:
    """Return whether the condition of a step holds: comparisons of names with texts, joined by ``&&``."""
    for part in condition.split(" && "):
        match = re.fullmatch(r"([\w.-]+) (==|!=) '(.*)'", part)
        assert match, f"this test cannot read {part!r}"
        if (values.get(match[1], "") == match[3]) != (match[2] == "=="):
            return False
    return True


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    if shutil.which("bash") is None:
        pytest.skip("the steps of the action are written for bash, which is not here")
    for name in ("FOUND", "GH_CODE"):
        monkeypatch.delenv(name, raising=False)
    return Job(tmp_path)


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> str:
    (tmp_path / "a run").symlink_to(repository / "sample_traces" / "cpu_ddp_straggler")
    return "a run"


def test_no_expression_stands_in_a_script() -> None:
    """What a title or a branch is called must never be read by the shell as code."""
    for step in STEPS:
        assert "${{" not in step.get("run", "")
        assert "run" not in step or step["shell"] == "bash"
        assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"]), "pinned to a commit"


def test_every_input_is_described_and_used() -> None:
    text = (REPOSITORY / "action.yml").read_text(encoding="utf-8")
    for name, item in ACTION["inputs"].items():
        assert item["description"]
        assert f"inputs.{name}" in text
        assert f"`{name}`" in (REPOSITORY / "docs" / "pull-requests.md").read_text(encoding="utf-8"), name


def test_pull_request_gets_its_first_comment_and_the_gate_fails_last(job: Job, run: str) -> None:
    code = job.run(PULL_REQUEST, run=run, fail_on="warning", budgets="step_ms <= 0.001\n")
    assert code == 1, job.stderr
    asked = job.log.read_text(encoding="utf-8").splitlines()
    assert asked[0].startswith("-m venv ")
    assert asked[1].endswith(str(REPOSITORY)), "installed from the checkout of the action"
    assert asked[2].startswith("pr view 7 --repo owner/name ")
    assert asked[3].startswith("pr comment 7 --repo owner/name ")
    assert job.body.startswith(MARK)
    assert job.body.endswith("\n[Page and files](https://forge.example/owner/name/actions/runs/99)\n")
    assert "Straggler" in job.body
    assert "Straggler" in job.summary.read_text(encoding="utf-8")
    assert re.search("^::(error|warning) title=tracedoc%3A Straggler", job.stdout, re.M)
    reports = job.temp / "tracedoc-reports"
    assert job.uploaded == {"name": "tracedoc", "path": str(reports)}
    assert {file.name for file in reports.iterdir()} == {
        "comment.md", "report.html", "diagnosis.json", "results.sarif", "tracedoc.xml",
    }  # fmt: skip
    saved = json.loads((reports / "diagnosis.json").read_text(encoding="utf-8"))
    assert [check["outcome"] for check in saved["budgets"]] == ["broken"]


def test_comment_that_is_there_is_replaced_by_the_comparison(
    job: Job, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUND", "https://forge.example/owner/name/pull/7#issuecomment-123")
    (tmp_path / "main").symlink_to(REPOSITORY / "sample_traces" / "cpu_ddp_healthy")
    # The steps of the two vary too much for a verdict; but a late rank is new, and that fails, last of all.
    assert job.run(PULL_REQUEST, run=run, base="main", fail_on_regression="5%") == 1, job.stderr
    asked = job.log.read_text(encoding="utf-8").splitlines()
    assert asked[-1].startswith("api --silent --method PATCH repos/owner/name/issues/comments/123 -F body=@")
    assert "| Cause | BASE | HEAD | change |" in job.body
    summary = job.summary.read_text(encoding="utf-8")
    assert summary.index("| Cause |") < summary.index("Straggler"), "then the diagnosis"


def test_without_an_answer_the_comment_says_so_and_the_code_is_kept(job: Job) -> None:
    assert job.run(PULL_REQUEST, run="$(touch pwned)\n`touch pwned`; touch pwned", artifact="") == 2
    assert job.body.startswith(f"{MARK}\n### No diagnosis\n")
    assert job.uploaded is None
    assert not (job.folder / "pwned").exists(), "an input is never a command"


def test_a_token_that_may_not_write_fails_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GH_CODE", "1")
    assert job.run(PULL_REQUEST, run="nowhere") == 2
    assert "::warning title=tracedoc::The comment could not be written" in job.stdout


def test_outside_of_a_pull_request_nothing_is_commented(job: Job) -> None:
    assert job.run(run="nowhere") == 2
    assert "No diagnosis" in job.summary.read_text(encoding="utf-8")
    assert not Path(f"{job.log}.body").exists()


# -- the examples of docs/pull-requests.md


def example(kind: str) -> dict[str, Any]:
    """Return the example that stands under a heading of the document."""
    text = (REPOSITORY / "docs" / "pull-requests.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {kind}\n")[1].split("\n## ")[0]
    found = re.search(r"```yaml\n(.*?)```", section, re.S)
    assert found
    example: dict[str, Any] = yaml.safe_load(found[1])
    return example


def test_the_workflow_gives_inputs_that_there_are() -> None:
    steps = example("GitHub")["jobs"]["speed"]["steps"]
    assert set(steps[-1]["with"]) <= set(ACTION["inputs"])


def test_the_script_for_gitlab_writes_what_it_promises(job: Job) -> None:
    (job.folder / "runs").mkdir()
    (job.folder / "runs" / "today").symlink_to(REPOSITORY / "sample_traces" / "cpu_ddp_slow_metrics")
    described = example("GitLab")["diagnose"]
    install, *commands = described["script"]
    assert install.startswith("pip install ")
    subprocess.run([job.folder / "bin" / "python3", "-m", "x", job.folder], env={"LOG": job.log}, check=True)
    for command in commands:
        environment = os.environ | {
            "PATH": f"{job.folder / 'bin'}:{os.environ['PATH']}",
            "OWN_PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
        }
        subprocess.run(["bash", "-e", "-c", command], cwd=job.folder, env=environment, check=True)
    kept = [*described["artifacts"]["paths"], *described["artifacts"]["reports"].values()]
    assert {Path(name).suffix for name in kept} == {".html", ".xml", ".json"}
    assert all((job.folder / name).stat().st_size for name in kept)
    findings = json.loads((job.folder / "gl-code-quality-report.json").read_text(encoding="utf-8"))
    assert findings[0]["location"] == {"path": "train.py", "lines": {"begin": 13}}
