"""What the commands print, write and return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.example_diagnoses import hostile, sharded
from tracedoc import __version__
from tracedoc.cli import COMMANDS, main
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json, to_json
from tracedoc.errors import InputError
from tracedoc.report.render import render
from tracedoc.trace.reader import reader_name


@dataclass(frozen=True)
class Options:
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    rule_directories: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    cycle: int | None = None
    jobs: int | None = None
    executor: str | None = None
    strict: bool = False
    max_bytes: int | None = None
    cache: bool = False
    budgets: tuple[str, ...] = ()


class Pipeline:
    """Stands for the pipeline: answers with a diagnosis made by hand, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[], Diagnosis] = sharded
        self.options: Any = None

    def diagnose(self, paths: Sequence[str], options: Any, *, progress: Any = None) -> Diagnosis:
        self.options = options
        return self.answer()


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    stand_in = Pipeline()
    module = ModuleType("tracedoc.pipeline")
    module.diagnose = stand_in.diagnose  # type: ignore[attr-defined]
    module.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tracedoc.pipeline", module)
    return stand_in


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "rank-0.json"
    file.write_text('{"traceEvents": []}')
    return str(file)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    file = tmp_path / "diagnosis.json"
    file.write_text(to_json(sharded()), encoding="utf-8")
    return str(file)


def run(*args: str, stdin: str | None = None, env: dict[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(main, list(args), input=stdin, env=env)


def error_of(result: Result) -> list[str]:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.splitlines()


# -- diagnose


def test_diagnose_answers_on_the_first_line(pipeline: Pipeline, trace: str):
    result = run("diagnose", trace)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == sharded().summary
    assert lines[-1] == f"next: tracedoc diagnose {trace} -o report.html"
    assert result.stderr == ""


def test_no_escape_sequence_reaches_a_pipe(pipeline: Pipeline, trace: str):
    pipeline.answer = hostile
    forced: dict[str, str | None] = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "CLICOLOR_FORCE": "1"}
    for args in (["diagnose", trace, "--verdicts"], ["facts", trace, "--ranks"], ["--help"]):
        result = run(*args, env=forced)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output


def test_options_reach_the_pipeline(pipeline: Pipeline, trace: str):
    run("diagnose", trace, "--select", "a, b", "--ignore", "c", "--steps", "3-10", "--cycle", "2", "--strict")
    assert pipeline.options == Options(
        select=("a", "b"), ignore=("c",), steps=(3, 10), cycle=2, strict=True, cache=True
    )
    run("diagnose", trace, "--steps", "4", "--rules", "packs/", "--jobs", "3")
    assert pipeline.options == Options(rule_directories=("packs/",), steps=(4, 4), jobs=3, cache=True)


def test_facts_reads_with_the_options_that_diagnose_has(pipeline: Pipeline, trace: str):
    both = ["--steps", "3-10", "--cycle", "2", "--jobs", "3", "--strict", "--max-bytes", "2GB"]
    expected = Options(steps=(3, 10), cycle=2, jobs=3, strict=True, max_bytes=2_000_000_000, cache=True)
    for command in ("diagnose", "facts"):
        pipeline.options = None
        run(command, trace, *both)
        assert pipeline.options == expected, command


@pytest.mark.parametrize(
    ("text", "count"), [("1000", 1000), ("500MB", 500_000_000), ("1.5 GB", 1_500_000_000), ("2GiB", 2**31)]
)
def test_sizes_are_numbers_with_a_unit(pipeline: Pipeline, trace: str, text: str, count: int):
    run("diagnose", trace, "--max-bytes", text)
    assert pipeline.options == Options(max_bytes=count, cache=True)


def test_no_cache_reads_again(pipeline: Pipeline, trace: str):
    run("diagnose", trace, "--no-cache")
    assert pipeline.options == Options()


def test_a_rule_is_explained_in_a_run_that_was_measured_before(pipeline: Pipeline, trace: str):
    run("explain", "few-steps", trace)
    assert pipeline.options == Options(cache=True)


def test_what_is_no_size_is_refused(pipeline: Pipeline, trace: str):
    assert "'much' is no size such as 500MB" in error_of(run("diagnose", trace, "--max-bytes", "much"))[0]


def test_steps_must_be_a_range(pipeline: Pipeline, trace: str):
    assert "'5-3' is no range of steps such as 3-10" in error_of(run("diagnose", trace, "--steps", "5-3"))[0]


def test_suffix_decides_the_format_and_each_file_is_written(pipeline: Pipeline, trace: str, tmp_path: Path):
    names = [str(tmp_path / name) for name in ("a.html", "a.json", "a.txt")]
    result = run("diagnose", trace, *(word for name in names for word in ("-o", name)))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr.splitlines() == [sharded().summary, *(f"wrote {name}" for name in names)]
    assert Path(names[0]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert from_json(Path(names[1]).read_bytes()) == sharded()
    assert Path(names[2]).read_text(encoding="utf-8").splitlines()[0] == sharded().summary


def test_dash_adds_stdout_and_the_next_command_knows_of_the_page(
    pipeline: Pipeline, trace: str, tmp_path: Path
):
    result = run("diagnose", trace, "-o", "-", "-o", str(tmp_path / "report.html"))
    assert result.stdout.splitlines()[0] == sharded().summary
    assert result.stdout.splitlines()[-1] == "next: tracedoc explain straggler-rank"


def test_json_on_stdout_is_the_diagnosis(pipeline: Pipeline, trace: str):
    assert from_json(run("diagnose", trace, "-f", "json").stdout) == sharded()


def test_redaction_is_off_for_json_and_on_for_html_unless_asked(pipeline: Pipeline, trace: str):
    assert "/scratch/anna" in run("diagnose", trace, "-f", "json").stdout
    assert "/scratch/anna" not in run("diagnose", trace, "-f", "json", "--redact").stdout
    assert "/scratch/anna" not in run("diagnose", trace, "-f", "html").stdout
    assert "/scratch/anna" in run("diagnose", trace, "-f", "html", "--no-redact").stdout


@pytest.mark.parametrize(
    ("level", "code"), [("critical", 0), ("warning", 1), ("note", 1)]
)  # a warning is the worst that is no preview
def test_fail_on_ignores_previews(pipeline: Pipeline, trace: str, level: str, code: int):
    diagnosis = sharded()
    straggler, transfer = diagnosis.findings
    pipeline.answer = lambda: replace(diagnosis, findings=(replace(straggler, status="preview"), transfer))
    result = run("diagnose", trace, "--fail-on", level)
    assert result.exit_code == code
    assert result.stdout.splitlines()[0] == diagnosis.summary
    if code:
        assert result.stderr == f"--fail-on {level}: 1 finding is {level} or worse\n"


def test_missing_file_is_named(pipeline: Pipeline):
    assert error_of(run("diagnose", "no/such.json")) == [
        "error: no/such.json does not exist",
        "hint: give a trace file or the folder of a run",
    ]


def test_diagnosis_given_as_a_trace_is_recognised(pipeline: Pipeline, saved: str):
    assert error_of(run("diagnose", saved)) == [
        f"error: {saved} is a diagnosis, not a trace",
        f"hint: to show it: tracedoc report {saved}",
    ]


def test_page_given_as_a_trace_is_recognised(tmp_path: Path):
    page = tmp_path / "report.html"
    page.write_text(render(sharded(), "html"), encoding="utf-8")
    assert error_of(run("diagnose", str(page))) == [
        f"error: {page} is a diagnosis, not a trace",
        f"hint: to show it: tracedoc report {page}",
    ]


def test_no_summary_of_a_command_is_cut():
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_input_is_never_replaced(pipeline: Pipeline, trace: str):
    assert "is an input and would be replaced" in error_of(run("diagnose", trace, "-o", trace))[0]
    assert Path(trace).read_text() == '{"traceEvents": []}'


def test_folder_of_the_output_must_exist(pipeline: Pipeline, trace: str, tmp_path: Path):
    path = tmp_path / "absent" / "a.html"
    assert "there is no folder" in error_of(run("diagnose", trace, "-o", str(path)))[0]


def test_a_folder_is_no_output(pipeline: Pipeline, trace: str, tmp_path: Path):
    assert error_of(run("diagnose", trace, "-o", str(tmp_path)))[0] == f"error: {tmp_path} is a folder"


def test_name_without_a_format_is_refused(pipeline: Pipeline, trace: str, tmp_path: Path):
    lines = error_of(run("diagnose", trace, "-o", str(tmp_path / "report.xyz")))
    assert lines[1].startswith("hint: end the name in .html, .htm, .json, .txt, .md, .sarif, .xml, ")
    assert lines[1].endswith(", or add -f")
    assert run("diagnose", trace, "-f", "text", "-o", str(tmp_path / "report.xyz")).exit_code == 0


def test_format_that_no_output_uses_is_refused(pipeline: Pipeline, trace: str, tmp_path: Path):
    lines = error_of(run("diagnose", trace, "-f", "json", "-o", str(tmp_path / "a.html")))
    assert lines[0] == "error: -f json has no effect: the names given to -o decide"


def test_errors_of_the_pipeline_are_two_lines_without_control_characters(pipeline: Pipeline, trace: str):
    def fail() -> Diagnosis:
        raise InputError("a\x1b[31m.json ends early", "capture again")

    pipeline.answer = fail
    assert error_of(run("diagnose", trace)) == ["error: a\\x1b[31m.json ends early", "hint: capture again"]


def test_interrupt_is_quiet(pipeline: Pipeline, trace: str):
    def interrupt() -> Diagnosis:
        raise KeyboardInterrupt

    pipeline.answer = interrupt
    result = run("diagnose", trace)
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


def test_a_fault_of_ours_is_told_in_two_lines(pipeline: Pipeline, trace: str):
    def bug() -> Diagnosis:
        raise ZeroDivisionError("by nothing")

    pipeline.answer = bug
    result = run("diagnose", trace)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "error: a fault of tracedoc's ended the diagnosis: ZeroDivisionError: by nothing",
        "hint: --debug shows where; please report it",
    ]


# -- report


def test_report_shows_a_saved_diagnosis(saved: str):
    result = run("report", saved)
    assert result.stdout.splitlines()[0] == sharded().summary
    assert result.stdout.splitlines()[-1] == f"next: tracedoc report {saved} -o report.html"


def test_report_reads_stdin():
    assert run("report", "-", stdin=to_json(sharded())).stdout.splitlines()[0] == sharded().summary


def test_report_of_a_run_says_how_to_diagnose_it(tmp_path: Path):
    lines = error_of(run("report", str(tmp_path)))
    assert lines == [
        f"error: {tmp_path} is a folder, not a diagnosis",
        f"hint: write one with: tracedoc diagnose {tmp_path} -o diagnosis.json",
    ]


def test_report_of_another_file_says_what_it_needs(trace: str):
    lines = error_of(run("report", trace))
    assert lines[0].startswith(f"error: {trace}: not a tracedoc diagnosis")
    assert lines[1] == "hint: write one with: tracedoc diagnose RUN -o diagnosis.json"


# -- facts


def test_facts_are_a_table_by_topic_with_reasons(pipeline: Pipeline, trace: str):
    assert run("facts", trace, "--ranks").stdout == (
        "fact                  value\n"
        "\n"
        "Step\n"
        "  step_ms            400 ms\n"
        "    0                400 ms\n"
        "    5                400 ms\n"
        "  overlap_frac         35 %\n"
        "\n"
        "Host and idle time\n"
        "  kernels_per_step     1840\n"
        "    rank 0             1840\n"
        "    rank 5          unknown  no launches\n"
        "\n"
        "Other\n"
        "  mfu               unknown  shapes were not recorded\n"
    )


def test_facts_as_json_hold_values_and_reasons(pipeline: Pipeline, trace: str):
    facts = json.loads(run("facts", trace, "--json").stdout)
    assert facts["step_ms"]["value"] == 400.0
    assert facts["mfu"]["unknown"] == "shapes were not recorded"


# -- the rest


def test_version_is_one_line():
    assert run("--version").stdout == f"tracedoc {__version__} ({reader_name()} reader)\n"


def test_every_help_has_an_example():
    for words in (
        [],
        *([name] for name in COMMANDS),
        ["rules", "list"],
        ["rules", "check"],
        ["rules", "test"],
    ):
        result = run(*words, "-h")
        assert result.exit_code == 0
        assert "Examples:\n" in result.stdout
        assert "tracedoc " + " ".join(words) in result.stdout


def test_near_miss_is_answered_with_the_command():
    assert error_of(run("diagnos")) == [
        "error: no command 'diagnos'",
        "hint: did you mean: tracedoc diagnose",
    ]


def test_path_without_a_command_is_answered_with_diagnose(trace: str):
    assert error_of(run(trace))[1] == f"hint: did you mean: tracedoc diagnose {trace}"


def test_missing_argument_points_to_help():
    assert error_of(run("diagnose")) == [
        "error: missing argument 'PATH...'",
        "hint: see: tracedoc diagnose --help",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell: str):
    assert "_TRACEDOC_COMPLETE" in run("completion", shell).stdout


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("diagnose sam", {"file,sam"}),
        ("report -o ", {"file,"}),
        ("rules check ", {"dir,"}),
        ("collect -- torchrun tr", {"file,tr"}),
        ("explain few-", {"plain,few-steps"}),
        ("explain exposed_comm_m", {"plain,exposed_comm_ms"}),
        ("explain cpu-o", {"plain,cpu-offload-transfer", "plain,cpu-operators"}),
    ],
)
def test_paths_and_names_complete(words: str, completions: set[str]):
    environment = {
        "_TRACEDOC_COMPLETE": "bash_complete",
        "COMP_WORDS": f"tracedoc {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    result = CliRunner(env=environment).invoke(main, [], prog_name="tracedoc")
    assert set(result.stdout.splitlines()) == completions


def test_closed_pipe_is_quiet(saved: str, repository: Path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tracedoc", "report", saved]
    done = subprocess.run(command, cwd=repository, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_imports_nothing_heavy(repository: Path):
    script = (
        "import sys\nfrom tracedoc.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'rich', 'jinja2', 'msgspec', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.stderr == "[]\n"


def test_text_survives_a_terminal_without_utf8(saved: str, repository: Path):
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tracedoc", "report", saved]
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, check=False)
    assert done.returncode == 0
    assert b"# compute" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["rules", "lst"], "error: no such command 'lst'", "hint: did you mean: list"),
        (["facts", "--rank", "x"], "error: no such option '--rank'", "hint: did you mean: --ranks"),
        (
            ["diagnose", "--zzzzz", "x"],
            "error: no such option '--zzzzz'",
            "hint: see: tracedoc diagnose --help",
        ),
    ],
)
def test_guess_stands_in_the_hint(arguments: list[str], error: str, hint: str):
    # Older versions of click guess less, and quote otherwise.
    lines = error_of(run(*arguments))
    assert len(lines) == 2
    assert lines[0].replace("'", "") == error.replace("'", "")
    assert lines[1] == hint or "--help" in lines[1]


def test_stdin_is_not_asked_for_twice(pipeline: Pipeline):
    assert run("diagnose", "-").stdout.splitlines()[-1] == "next: tracedoc explain straggler-rank"
