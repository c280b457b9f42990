"""``tracedoc mcp`` asked by a real client: what an agent gets, from whom it is kept, and how long it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import tracedoc
from tracedoc.cli.mcp import has_hung_up
from tracedoc.cli.mcp.answers import ANSWER_BYTES, ANSWER_ROWS, fitted
from tracedoc.cli.mcp.tools import Tools

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

LETTERS_OF_A_TOKEN = 3
"""JSON of short words and numbers has more letters a token."""

Script = Callable[[Any], Awaitable[None]]


def over_stdio(folder: Path, script: Script, *options: str) -> None:
    """Run a client's script against the command as an agent's program starts it."""
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "tracedoc", "mcp", str(folder), *options],
        env={**os.environ, "TRACEDOC_CACHE": "off"},
    )

    async def session() -> None:
        async with mcp.Client(mcp.stdio_client(server)) as client:
            await script(client)

    anyio.run(session)


def in_process(folder: Path, script: Script, *, allow_run: bool = False, redact: bool = True) -> None:
    """The same without a process of its own."""
    from tracedoc.cli.mcp.server import server_of

    async def session() -> None:
        server = server_of(Tools([str(folder)], redact=redact), allow_run=allow_run)
        async with mcp.Client(server) as client:
            await script(client)

    anyio.run(session)


async def ask(client: Any, tool: str, **arguments: Any) -> Any:
    """The answer of a tool, which its text and its structured content both hold."""
    said = await client.call_tool(tool, arguments)
    assert not said.is_error, said.content[0].text
    assert json.loads(said.content[0].text) == said.structured_content
    return said.structured_content


async def refused(client: Any, tool: str, **arguments: Any) -> str:
    """What a tool says that cannot answer."""
    said = await client.call_tool(tool, arguments)
    assert said.is_error
    text: str = said.content[0].text
    return text


@pytest.fixture
def run(sample_traces: Path, tmp_path: Path) -> Path:
    """A folder that may be read, with one run in it."""
    shutil.copytree(sample_traces / "synthetic_zero3_gather_stall", tmp_path / "runs" / "a")
    return tmp_path / "runs"


def test_an_agent_gets_from_the_question_to_fix_and_prediction(run: Path) -> None:
    """In three calls, and with all that it reads before and meanwhile within 8,000 tokens."""
    diagnosis = tracedoc.diagnose(run / "a")
    read = []

    async def agent(client: Any) -> None:
        tools = (await client.list_tools()).tools
        read.append(client.instructions or "")
        read.extend(tool.model_dump_json(exclude_none=True) for tool in tools)
        answer = await ask(client, "diagnose", run="a")
        worst = answer["findings"][0]
        whole = await ask(client, "finding", run="a", rule_id=worst["rule_id"])
        fix = next(one for one in whole["findings"][0]["fixes"] if one.get("replays"))
        predicted = await ask(client, "whatif", run="a", changes=[fix["replays"]])
        read.extend(map(json.dumps, (answer, whole, predicted)))

        finding = diagnosis.findings[0]
        expected = finding.fixes[0].predicted
        assert answer["answer"] == diagnosis.summary
        assert worst["rule_id"] == finding.rule_id
        assert worst["told_ms"] == pytest.approx(finding.told_ms, rel=1e-4)
        assert fix["change"] == finding.fixes[0].change
        assert predicted["alone"][0]["step_ms"] == pytest.approx(expected.step_ms, rel=1e-4)

    over_stdio(run, agent)
    assert sum(map(len, read)) / LETTERS_OF_A_TOKEN < 8000


UNITS = re.compile(r"_(ms|ns|frac|bytes|gbps|tflops|per_second|per_step)$")
COUNTS = {"number", "finding", "ranks", "rank", "step", "steps", "stream", "events_inside", "left_out"}
"""Numbers that count or name something."""


def numbers_without_unit(value: Any, key: str = "", *, known: bool = False) -> Iterator[str]:
    """The names of numbers that no name and no unit beside them explains."""
    known = known or bool(UNITS.search(key)) or key in COUNTS
    if isinstance(value, dict):
        # The text of a comparison names the facts, and so the units, of both sides.
        known = known or "unit" in value or {"text", "left"} <= value.keys()
        for name, item in value.items():
            yield from numbers_without_unit(item, name, known=known)
    elif isinstance(value, list):
        for item in value:
            yield from numbers_without_unit(item, key, known=known)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not known:
        yield key


def test_no_answer_is_without_its_units_and_limits(run: Path) -> None:
    async def agent(client: Any) -> None:
        rule = (await ask(client, "diagnose", run="a"))["findings"][0]["rule_id"]
        asked: dict[str, dict[str, Any]] = {
            "diagnose": {},
            "finding": {"rule_id": rule},
            "ledger": {},
            "facts": {"topic": "Host and idle time"},
            "timeline": {"rank": 0},
            "whatif": {"changes": ["no-sync", "faster-link by=2"]},
        }
        for tool, arguments in asked.items():
            answer = await ask(client, tool, run="a", **arguments)
            assert answer["limits"][0]["code"] == "missing-ranks", tool
            assert [*numbers_without_unit(answer)] == [], tool
        compared = (await ask(client, "compare", base="a", head="a"))["limits"]
        assert [one["side"] for one in compared if one["code"] == "missing-ranks"] == ["base", "head"]

    limited = next((run / "a").glob("*0.json*"))
    for other in sorted((run / "a").glob("*.json*")):
        if other != limited and "manifest" not in other.name:
            other.unlink()
    in_process(run, agent)


def test_what_is_unknown_says_why(run: Path) -> None:
    facts = tracedoc.diagnose(run / "a").facts
    unknown = next(name for name, record in facts.items() if record.unknown)

    async def agent(client: Any) -> None:
        (fact,) = (await ask(client, "facts", run="a", names=[unknown]))["facts"]
        assert "value" not in fact
        assert fact["unknown"] == facts[unknown].unknown
        answer = await ask(client, "whatif", run="a", changes=["even-ranks"])
        alone = answer["alone"][0]
        assert alone["state"] == "predicted" or alone["reason"]
        quiet = await ask(client, "finding", run="a", rule_id="gc-pauses")
        assert quiet["verdicts"][0]["outcome"] != "finding"

    in_process(run, agent)


def test_only_what_is_allowed_is_read(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    shutil.copytree(run / "a", outside)
    (run / "link").symlink_to(outside)
    shutil.copytree(run / "a", run / "mixed")
    (run / "mixed" / "rank-7.json").symlink_to(next(outside.glob("*.json*")))
    (run / "inside").symlink_to(run / "a")
    (run / "circle").symlink_to(run / "circle")

    async def agent(client: Any) -> None:
        for path in (str(outside), "../secret", "link", "mixed", "/", "s3://bucket/run", "-"):
            assert "allowed: " in await refused(client, "diagnose", run=path), path
        for path in ("circle", "\0", 1000 * "x"):
            assert "is no path; allowed: " in await refused(client, "diagnose", run=path), path
        assert "allowed: " in await refused(client, "compare", base="a", head="../secret")
        assert "allowed: " in await refused(client, "plan", model="../secret/config.json", gpus=2)
        assert "no option script" in await refused(client, "plan", options={"script": "train.py"})
        assert (await ask(client, "diagnose", run="inside"))["findings"]

    in_process(run, agent)


def test_a_question_without_end_is_refused(run: Path) -> None:
    async def agent(client: Any) -> None:
        assert "21 changes are too many" in await refused(
            client, "whatif", run="a", changes=21 * ["even-ranks"]
        )

    in_process(run, agent)


def test_an_argument_that_no_tool_has_is_refused_with_those_that_it_has(run: Path) -> None:
    async def agent(client: Any) -> None:
        said = await refused(client, "diagnose", run="a", by_rnak=True)
        assert said == "diagnose has no argument 'by_rnak'; it has: run"
        said = await refused(client, "facts", run="a", by_rnak=True)
        assert "(did you mean 'by_rank'?); it has: run, names, topic, by_rank" in said
        (facts,) = [tool for tool in (await client.list_tools()).tools if tool.name == "facts"]
        assert facts.input_schema["additionalProperties"] is False

    in_process(run, agent)


def test_a_fix_that_is_not_predicted_says_why(run: Path) -> None:
    async def agent(client: Any) -> None:
        findings = (await ask(client, "diagnose", run="a"))["findings"]
        whole = [await ask(client, "finding", run="a", rule_id=one["rule_id"]) for one in findings]
        fixes = [fix for answer in whole for one in answer["findings"] for fix in one["fixes"]]
        assert all(("predicted" in fix) != ("not_predicted" in fix) for fix in fixes)
        assert any("no change can be replayed" in fix.get("not_predicted", "") for fix in fixes)

    in_process(run, agent)


def test_tools_that_look_say_so_and_others_need_leave(run: Path) -> None:
    async def looks(client: Any) -> None:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} >= {"diagnose", "finding", "whatif", "compare", "plan"}
        assert all(tool.annotations.read_only_hint for tool in tools)
        assert "collect" not in {tool.name for tool in tools}

    async def runs(client: Any) -> None:
        (collect,) = [tool for tool in (await client.list_tools()).tools if tool.name == "collect"]
        assert collect.annotations.destructive_hint
        job = [sys.executable, "-c", "print('trained')"]
        answer = await ask(client, "collect", command=job, folder="new")
        assert answer["exit_code"] == 0
        assert "trained" in answer["output"]
        assert (run / "new").is_dir()
        assert "allowed: " in await refused(client, "collect", command=job, folder="../new")
        assert "no run directory of a job that runs" in (await ask(client, "collect", folder="a"))["said"]
        assert "'warp=2' is no fix of this run" in await refused(
            client, "try", run="a", fixes=["warp=2"], command=job
        )

    before = sorted(run.rglob("*"))
    in_process(run, looks)
    assert sorted(run.rglob("*")) == before
    in_process(run, runs, allow_run=True)


def test_a_job_ends_with_the_client_that_started_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "import pathlib, time; pathlib.Path('began').touch(); time.sleep(600)"
    tools = Tools([str(run)], redact=True, is_client_gone=(run / "began").exists)
    assert tools.collect("new", [sys.executable, "-c", waits])["exit_code"] != 0
    (node,) = (run / "new").glob("node*.manifest.json")
    assert json.loads(node.read_text())["ended"]

    read, write = os.pipe()
    with open(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert not has_hung_up()
        os.close(write)
        assert has_hung_up()


def test_a_window_of_a_rank_splits_into_what_its_gpu_did(run: Path) -> None:
    async def agent(client: Any) -> None:
        step = await ask(client, "timeline", run="a", rank=0)
        start = step["start_ns"]
        part = await ask(client, "timeline", run="a", rank=0, start_ns=start, end_ns=start + 5_000_000)
        budget = part["budget"]
        parts = ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")
        assert budget["window_ns"] == 5_000_000
        assert sum(budget[name] for name in parts) == 5_000_000
        assert sum(part.get("idle_causes_ns", {}).values()) == budget["idle_ns"]
        assert all(event["start_ns"] < start + 5_000_000 for event in part["longest_events"])
        assert "the window is empty" in await refused(
            client, "timeline", run="a", rank=0, start_ns=5, end_ns=5
        )
        assert "rank 9 is not in this run" in await refused(client, "timeline", run="a", rank=9)

    in_process(run, agent)


def test_a_run_that_changes_is_read_again(run: Path, sample_traces: Path) -> None:
    async def agent(client: Any) -> None:
        first = await ask(client, "diagnose", run="a")
        shutil.rmtree(run / "a")
        shutil.copytree(sample_traces / "synthetic_fsdp2_healthy", run / "a")
        assert (await ask(client, "diagnose", run="a"))["answer"] != first["answer"]
        compared = await ask(client, "compare", base="a", head="a")
        assert compared["verdict"]["word"] == "unchanged"

    in_process(run, agent)


def test_plans_and_words_need_no_run(run: Path) -> None:
    async def agent(client: Any) -> None:
        plan = await ask(client, "plan", params="7B", gpus=4, gpu="A100 40GB", options={"seq": 4096})
        assert plan["recommended"] in [one["strategy"] for one in plan["strategies"]]
        assert plan["asked"]["training"]["sequence"] == 4096
        assert plan["units"].startswith("memory in bytes")
        assert "did you mean" in await refused(client, "explain", name="tiny-bach")
        assert "no option colour" in await refused(client, "plan", params="7B", options={"colour": 1})

    in_process(run, agent)


def test_documents_are_those_of_the_package(run: Path, repository: Path) -> None:
    async def agent(client: Any) -> None:
        async def document(name: str) -> Any:
            return json.loads((await client.read_resource(f"tracedoc://{name}")).contents[0].text)

        listed = {str(one.uri) for one in (await client.list_resources()).resources}
        assert listed == {"tracedoc://schema", "tracedoc://rules", "tracedoc://limits"}
        files = {path.stem for path in (repository / "rules").glob("*/*.yaml")}
        assert {rule["id"] for rule in await document("rules")} == files
        assert "missing-ranks" in await document("limits")
        assert (await document("schema"))["$defs"]

    in_process(run, agent)


def test_hosts_and_absolute_paths_stay_here(run: Path) -> None:
    async def agent(client: Any) -> None:
        answers = [await ask(client, tool, run="a") for tool in ("diagnose", "ledger", "facts")]
        assert str(run) not in json.dumps(answers)

    in_process(run, agent)


def test_answers_are_cut_to_what_an_agent_can_read() -> None:
    rows = [{"name": "kernel " * 40, "time_ms": 1 / 3, "note": ""} for _ in range(500)]
    found, text = fitted({"rows": rows, "more": {"few": [1, 2]}, "absent": None})
    assert len(text) <= ANSWER_BYTES
    assert len(found["rows"]) + found["left_out"]["rows"] == 500
    assert len(found["rows"]) <= ANSWER_ROWS
    assert found["rows"][0]["time_ms"] == 0.33333
    assert found["more"] == {"few": [1, 2]}
    assert "absent" not in found
    _, text = fitted({"text": "x" * 1_000_000})
    assert len(text) <= ANSWER_BYTES
    assert msgspec.json.decode(text)["text"].endswith(" ...")
