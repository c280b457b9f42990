"""``tracedoc compare`` on runs, diagnoses and what is neither."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from tests.example_diagnoses import HOSTILE, sharded
from tracedoc.cli import main
from tracedoc.diagnosis_json import to_json


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.fixture
def before(tmp_path: Path) -> str:
    file = tmp_path / "before.json"
    file.write_text(to_json(sharded()), encoding="utf-8")
    return str(file)


@pytest.fixture
def slower(tmp_path: Path) -> str:
    """Half as long again: every step, and the budget with its idle time."""
    base = sharded()
    assert base.budget is not None
    ranks = tuple(
        replace(rank, steps=tuple(replace(s, step_ms=1.5 * s.step_ms) for s in rank.steps))
        for rank in base.ranks
    )
    budget = replace(base.budget, step_ms=600.0, idle_ms=base.budget.idle_ms + 200.0)
    file = tmp_path / "slower.json"
    file.write_text(to_json(replace(base, ranks=ranks, budget=budget, ledger=None)), encoding="utf-8")
    return str(file)


def test_real_pair_is_improved_by_its_loader(shared_traces: Path) -> None:
    """Four loader workers instead of none, as the profiler's own tutorial shows it."""
    pair = (
        shared_traces / "resnet50_v100_dataloader_bound_2021",
        shared_traces / "resnet50_v100_workers4_2021",
    )
    result = compare(*map(str, pair), "-f", "json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"]["word"] == "improved"
    fall = found["waterfall"]
    assert fall["ideal_ms"] == pytest.approx(176, abs=1)
    assert fall["measured_ms"] == pytest.approx(136, abs=2)
    largest = max(fall["parts"], key=lambda part: abs(part["change_ms"]))
    assert largest["key"] == "input.wait"
    assert sum(part["change_ms"] for part in fall["parts"]) == pytest.approx(-found["realised_ms"], abs=0.001)
    fixed = {one["rule_id"]: one for one in found["findings"] if one["state"] == "fixed"}
    low, high = fixed["input-stall"]["predicted_ms"]
    (slow_ms,) = (part["change_ms"] for part in fall["parts"] if part["key"] == "slow_steps")
    assert low <= found["realised_ms"] + slow_ms <= high


def test_text_begins_with_the_verdict_and_its_part(before: str, slower: str) -> None:
    lines = compare(before, slower).stdout.splitlines()
    assert lines[0] == "Regressed: 400 ms -> 600 ms a step, mostly idle time (+200 ms)."
    assert any(line.startswith("step") and line.endswith("+200 ms") for line in lines)


def test_a_regression_fails_where_it_is_asked_for(before: str, slower: str) -> None:
    assert compare(before, slower).exit_code == 0
    assert compare(before, slower, "--fail-on-regression", "5%").exit_code == 1
    assert compare(before, slower, "--fail-on-regression", "60%").exit_code == 0
    assert compare(slower, before, "--fail-on-regression", "5").exit_code == 0


def test_a_new_straggler_fails_where_it_is_asked_for(tmp_path: Path) -> None:
    """The steps are too few to say that they are longer; the rank that the others wait for is new."""
    base, head = sharded(), tmp_path / "late.json"
    (late,) = (one for one in base.findings if one.topic == "straggler")
    assert late.severity == "critical"
    few = tuple(replace(rank, steps=rank.steps[:2]) for rank in base.ranks)
    calm, fine = tmp_path / "calm.json", tuple(one for one in base.findings if one is not late)
    calm.write_text(to_json(replace(base, findings=fine)), encoding="utf-8")
    for finding, code in ((late, 1), (replace(late, severity="note"), 0)):
        found = replace(base, ranks=few, findings=(finding, *fine))
        head.write_text(to_json(found), encoding="utf-8")
        result = compare(str(calm), str(head), "--fail-on-regression", "5%")
        assert result.exit_code == code, result.stderr


def test_head_and_tab_name_the_runs(tmp_path: Path) -> None:
    base, page, other = sharded(), tmp_path / "c.html", tmp_path / "after.json"
    run = replace(
        base.run, name="lr-3e-4", command="torchrun train.py --lr 3e-4", captured_at="2026-11-02T10:00:00Z"
    )
    first = tmp_path / "first.json"
    first.write_text(to_json(replace(base, run=replace(run, name="lr-1e-4"))), encoding="utf-8")
    other.write_text(to_json(replace(base, run=run)), encoding="utf-8")
    text = compare(str(first), str(other), "-o", str(page), "-o", "-").stdout
    assert text.splitlines()[1] == "lr-1e-4 -> lr-3e-4"
    assert "HEAD: lr-3e-4, captured 2026-11-02 10:00 UTC, torchrun train.py --lr 3e-4." in text.replace(
        "\n", " "
    )
    assert "<title>lr-1e-4 -&gt; lr-3e-4: " in page.read_text(encoding="utf-8")


def test_inconclusive_does_not_fail_and_says_what_would_decide(before: str, tmp_path: Path) -> None:
    base = sharded()
    few = tuple(replace(rank, steps=rank.steps[:1]) for rank in base.ranks)
    file = tmp_path / "few.json"
    file.write_text(to_json(replace(base, ranks=few)), encoding="utf-8")
    result = compare(before, str(file), "--fail-on-regression", "5%")
    assert result.exit_code == 0
    assert "inconclusive" in result.stderr
    assert "about 5 steps on each side would decide" in result.stderr


def test_markdown_shows_text_as_text_and_no_hosts(tmp_path: Path, before: str) -> None:
    base = sharded()
    finding = replace(
        base.findings[0], rule_id="new-one", title=HOSTILE, message="on gpu-node-a: <b>x</b> @here"
    )
    file = tmp_path / "after.json"
    file.write_text(to_json(replace(base, findings=(finding,))), encoding="utf-8")
    text = compare(before, str(file), "-f", "markdown").stdout
    assert "<script" not in text
    assert "<b>" not in text
    assert "gpu-node-a" not in text
    assert "| Cause | BASE | HEAD | change |" in text


def test_formats_go_to_files(before: str, slower: str, tmp_path: Path) -> None:
    result = compare(before, slower, "-o", str(tmp_path / "c.md"), "-o", str(tmp_path / "c.json"))
    assert result.stdout == ""
    assert result.stderr.startswith("Regressed: ")
    assert json.loads((tmp_path / "c.json").read_text())["verdict"]["word"] == "regressed"


def test_page_compares_like_the_diagnosis_in_it(before: str, slower: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    CliRunner().invoke(main, ["report", slower, "-o", str(page)])
    of_page = json.loads(compare(before, str(page), "-f", "json").stdout)
    of_json = json.loads(compare(before, slower, "-f", "json").stdout)
    assert of_page["waterfall"] == of_json["waterfall"]
    assert of_page["verdict"] == of_json["verdict"]


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_page_that_was_cut_off_is_an_error(before: str, tmp_path: Path, share: float) -> None:
    page = tmp_path / "report.html"
    CliRunner().invoke(main, ["report", before, "-o", str(page)])
    whole = page.read_bytes()
    page.write_bytes(whole[: int(share * len(whole))])
    result = compare(before, str(page))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {page}: the page ")


def test_diagnosis_of_another_schema_is_an_error(before: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(to_json(replace(sharded(), schema_version="0")), encoding="utf-8")
    result = compare(before, str(file))
    assert result.exit_code == 2
    assert "schema 0" in result.stderr


def test_cut_off_diagnosis_is_an_error(before: str, tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text(Path(before).read_text(encoding="utf-8")[:2000], encoding="utf-8")
    result = compare(before, str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", [("--samples-per-step", "64"), ("--fail-on-regression", "much")])
def test_wrong_values_are_errors_with_an_example(before: str, option: tuple[str, str]) -> None:
    result = compare(before, before, *option)
    assert result.exit_code == 2
    assert " such as " in result.stderr


def test_page_runs_no_script_and_requests_nothing(before: str, slower: str, tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    assert compare(before, slower, "-o", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    for word in ("<script", "http://", "https://", " src=", "@import", "url("):
        assert word not in text, word
    assert "Regressed: 400 ms -&gt; 600 ms" in text
    # BASE, the part that grew by 200 of 600 ms from where BASE ends, and HEAD.
    assert '<rect class="other" x="0.00" y="0" width="666.67" height="10">' in text
    assert '<rect class="longer" x="666.67" y="0" width="333.33" height="10">' in text


def test_page_shows_hostile_names_as_text(before: str, tmp_path: Path) -> None:
    base = sharded()
    finding = replace(base.findings[0], rule_id="new-one", title=HOSTILE, message="on gpu-node-a")
    file, page = tmp_path / "after.json", tmp_path / "c.html"
    file.write_text(to_json(replace(base, findings=(finding,))), encoding="utf-8")
    compare(before, str(file), "-o", str(page))
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "gpu-node-a" not in text


def test_figure_is_the_waterfall(before: str, slower: str, tmp_path: Path) -> None:
    png, svg = tmp_path / "c.png", tmp_path / "c.svg"
    result = compare(before, slower, "-o", str(png), "-o", str(svg))
    assert result.stderr.splitlines()[-2:] == [f"wrote {png}", f"wrote {svg}"]
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    words = [word.strip() for word in ElementTree.fromstring(svg.read_bytes()).itertext() if word.strip()]
    places = [words.index(word) for word in ("BASE", "idle time", "HEAD")]
    assert places == sorted(places)
    assert {"400 ms", "+200 ms", "600 ms"} <= set(words)
    again = tmp_path / "again.svg"
    compare(before, slower, "-o", str(again))
    assert again.read_bytes() == svg.read_bytes()


def scaled(tmp_path: Path, gpus: int) -> str:
    base = sharded()
    run = replace(base.run, world_size=gpus, ranks_seen=tuple(range(gpus)))
    file = tmp_path / f"{gpus}.json"
    file.write_text(to_json(replace(base, run=run)), encoding="utf-8")
    return str(file)


def test_three_runs_are_a_series(tmp_path: Path) -> None:
    files = [scaled(tmp_path, gpus) for gpus in (1, 2, 4)]
    result = compare(*files, "--scaling", "weak", "-f", "json")
    assert result.exit_code == 0, result.stderr
    assert [point["efficiency"] for point in json.loads(result.stdout)["points"]] == [1, 1, 1]
    page = tmp_path / "series.html"
    assert compare(*files, "--scaling", "weak", "-o", str(page)).exit_code == 0
    assert "Efficiency: the ideal step over the measured one" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        ((1,), (), "a comparison needs two runs"),
        ((4, 1), ("--scaling", "weak"), "the sides are swapped"),
        ((1, 4), (), "whether the GPUs share one batch"),
        ((1, 2, 4), (), "whether the GPUs share one batch"),
        ((1, 2, 4), ("--samples-per-step", "64,128"), "2 numbers of samples were given for 3 runs"),
        ((1, 4), ("--samples-per-step", "64,128,256"), "3 numbers of samples were given for 2 runs"),
        ((1, 4), ("--samples-per-step", "64,0"), "a step has samples"),
        ((1, 2, 4), ("--fail-on-regression", "5%"), "--fail-on-regression needs two runs"),
    ],
)
def test_what_cannot_be_compared_is_said_in_words(
    tmp_path: Path, gpus: tuple[int, ...], options: tuple[str, ...], words: str
) -> None:
    result = compare(*(scaled(tmp_path, count) for count in gpus), *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split()).replace("A comparison", "a comparison")
    assert "Traceback" not in result.stderr


def test_side_without_steps_is_named(before: str, tmp_path: Path) -> None:
    file = tmp_path / "nothing.json"
    file.write_text(to_json(replace(sharded(), budget=None)), encoding="utf-8")
    result = compare(before, str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: HEAD has no step to compare")


def test_two_diagnoses_are_compared_without_reading_a_trace(
    before: str, slower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a trace is read")

    monkeypatch.setattr("tracedoc.pipeline.read_source_step", refuse)
    monkeypatch.setattr("tracedoc.pipeline.measure", refuse)
    assert compare(before, slower).exit_code == 0
