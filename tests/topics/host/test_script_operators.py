"""In a CPU run the function whose operators run beside training is named, with what it costs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.run.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from tracedoc.testing import TraceBuilder

NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def passes(
    builder: TraceBuilder, begin: float, update_ms: float, sends_ms: float = 0.0, operators: int = 1
) -> None:
    """An update of weights, 40 ms less that of a forward pass, 40 ms of a backward one, the optimizer."""
    each = (update_ms - sends_ms) / operators
    for one in range(operators):
        at = begin + sends_ms + one * each
        builder.host("aten::lerp_", at, at + each)
    builder.host("aten::addmm", begin + update_ms, begin + 40)
    builder.host(NODE, begin + 40, begin + 80)
    builder.host("Optimizer.step#SGD.step", begin + 90, begin + 100, category="user_annotation")
    builder.host("aten::add_", begin + 90, begin + 100)


def sampled(update_line: int) -> dict[str, object]:
    """The loop of a rank calls the update in a line, and the model in line 35."""
    module = "torch/nn/modules/module.py(1782): _call_impl@1789"
    frames = [
        [],
        ["train.py(4): update@6", f"train.py(30): main@{update_line}"],
        [module, "train.py(30): main@35"],
    ]
    step = {"step": 9, "whole": True, "long": False, "stacks": {"1": 10.0, "2": 10.0}}
    return {"frames": frames, "sampled": [step], "loop": ["train.py(30): main@40"]}


def diagnosed(
    folder: Path,
    update_ms: float,
    *,
    messages: int = 0,
    update_line: int = 38,
    flow_ms: float = 39.0,
    operators: int = 1,
    modes: tuple[str, ...] | None = None,
    pause_ms: float = 0.0,
    namesake: bool = False,
) -> Diagnosis:
    """Two ranks, whose steps of 100 ms begin with an update of all weights, by the stacks of one step.

    It begins with so many messages of 2 ms each, and stands in a line of the loop. What begins at ``flow_ms``
    is an operator that the backward pass goes back to. The update is of so many operators; where ``modes``
    are given it is another model's, before which and after which the function calls these of it. It begins
    with a pause. A ``namesake`` of it runs as well.
    """
    entries = {}
    for rank in (0, 1):
        builder = TraceBuilder(rank, 2, device=None)
        for number in range(4):
            builder.step(number, 100 * number, 100 * number + 100)
            passes(builder, 100 * number, update_ms, 2 * messages + pause_ms, operators)
            begin = 100 * number + 80
            builder.collective("allreduce", begin, begin + 10, nbytes=64 << 20, launch_ms=begin)
            for message in range(messages):
                sent = 100 * number + 2 * message
                builder.collective("allreduce", sent, sent + 2, nbytes=4, launch_ms=sent)
        builder.write(folder / f"rank-{rank}.json")
        stacks = TraceBuilder(rank, 2, device=None)
        stacks.host("ProfilerStep#9", 0, 100, category="user_annotation")
        stacks.host("train.py(30): main", 0, 100, category="python_function")
        stacks.host("train.py(4): update", 0, update_ms, category="python_function")
        for message in range(messages):
            called = "torch/distributed/distributed_c10d.py(2900): all_reduce"
            stacks.host(called, 2 * message, 2 * message + 2, category="python_function")
        passes(stacks, 0, update_ms, 2 * messages + pause_ms, operators)
        if modes is not None:
            stacks.host("nn.Module: Net_1", 0.2, update_ms - 0.2, category="python_function")
            for number, mode in enumerate(modes):
                called, at = f"torch/nn/modules/module.py(2871): {mode}", number * (update_ms - 0.1)
                stacks.host(called, at, at + 0.1, category="python_function")
        if namesake:
            stacks.host("train.py(50): update", 82, 84, category="python_function")
            stacks.host("aten::add_", 82, 84)
        stacks.host("nn.Module: Net_0", update_ms, 40, category="python_function")
        shown = json.loads(stacks.to_json())
        zero = next(one["ts"] for one in shown["traceEvents"] if one["name"] == "ProfilerStep#9")
        arrow = {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "ts": zero + flow_ms * 1000}
        shown["traceEvents"].append(arrow)
        (folder / f"rank-{rank}.source.gz").write_bytes(gzip.compress(json.dumps(shown).encode()))
        entries[str(rank)] = {
            "file": f"rank-{rank}.json",
            "source": f"rank-{rank}.source.gz",
            "environment": {},
            "samples": sampled(update_line),
        }
    (folder / MANIFEST_NAME).write_text(json.dumps({"schema": MANIFEST_SCHEMA, "ranks": entries}))
    return diagnose([folder], Options(jobs=1))


def test_what_runs_beside_training_costs_its_share(tmp_path: Path) -> None:
    """16 of the 40 ms outside the backward pass, by stacks that may be wrong by two fifths."""
    diagnosis = diagnosed(tmp_path, 16)
    assert diagnosis.facts["beside_code_ms"].values["0"] == pytest.approx(16, abs=0.1)
    found = next(one for one in diagnosis.findings if one.rule_id == "script-operators")
    assert "`update` (`train.py:4`)" in found.message
    assert found.gain is not None
    assert found.gain.likely_ms == pytest.approx(16, abs=0.2)
    assert found.gain.low_ms <= 0.6 * 16 + 0.2
    assert found.gain.high_ms >= 1.4 * 16 - 0.2
    assert diagnosis.summary.startswith("Operators beside training (16 ms of the 100 ms step)")


@pytest.mark.parametrize(("modes", "named"), [(("eval", "train"), True), (("eval",), False), ((), False)])
def test_an_evaluation_is_beside_training(tmp_path: Path, modes: tuple[str, ...], *, named: bool) -> None:
    """A model that is not put back into training may be a teacher, whose outputs the step needs."""
    diagnosis = diagnosed(tmp_path, 16, modes=modes)
    assert ("script-operators" in [one.rule_id for one in diagnosis.findings]) == named


@pytest.mark.parametrize(("update_ms", "named"), [(4, False), (6, True)])
def test_the_work_of_an_ordinary_loop_is_none(tmp_path: Path, update_ms: float, *, named: bool) -> None:
    diagnosis = diagnosed(tmp_path, update_ms)
    assert ("script-operators" in [one.rule_id for one in diagnosis.findings]) == named


@pytest.mark.parametrize(("messages", "named"), [(0, "none"), (1, "`update` (`train.py:4`)")])
def test_messages_of_the_script_are_its_function_s(tmp_path: Path, messages: int, named: str) -> None:
    """Half of the messages of a step are called there, and no wrapper calls any."""
    diagnosis = diagnosed(tmp_path, 16, messages=messages)
    assert diagnosis.facts["exchange_code"].value == named


def test_functions_of_one_name_are_several(tmp_path: Path) -> None:
    """As the hooks of two callbacks: another one of 2 ms does not hide that of 16."""
    diagnosis = diagnosed(tmp_path, 16, namesake=True)
    assert diagnosis.facts["beside_code"].values["0"] == "`update` (`train.py:4`)"


def test_a_function_is_one_cause(tmp_path: Path) -> None:
    """It pauses for 20 ms, and its operators take 8: that is one cost of 28 ms."""
    diagnosis = diagnosed(tmp_path, 28, pause_ms=20)
    assert diagnosis.ledger is not None
    costs = {one.id: one.share_ms for one in diagnosis.ledger.causes}
    assert costs["host.pause"] == pytest.approx(28, abs=0.5)
    assert "compute.beside" not in costs
    found = next(one for one in diagnosis.findings if one.rule_id == "script-code")
    assert found.gain is not None
    assert found.gain.likely_ms == pytest.approx(28, abs=0.5)


def test_what_the_model_needs_is_made_ahead(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, 16, update_line=33)
    found = next(one for one in diagnosis.findings if one.rule_id == "script-operators")
    assert found.fixes[0].advice.startswith("It runs before the model")


def test_a_backward_pass_needs_a_loss(tmp_path: Path) -> None:
    """It goes back to the operator of the function, not to one of the model, at 39 ms."""
    diagnosis = diagnosed(tmp_path, 16, flow_ms=0.0)
    assert diagnosis.facts["beside_needed"].values["0"] is True
    assert "script-operators" not in [one.rule_id for one in diagnosis.findings]


def test_of_a_loss_of_many_operators_one_is_needed(tmp_path: Path) -> None:
    """Calls of 10 us are half of 800 operators of 20."""
    diagnosis = diagnosed(tmp_path, 16, flow_ms=0.0, operators=800)
    assert diagnosis.facts["beside_code_ms"].values["0"] == pytest.approx(8, abs=0.1)
    found = next(one for one in diagnosis.findings if one.rule_id == "script-operators")
    assert found.fixes[0].title == "Let `update` (`train.py:4`) call one operator for all samples"


@pytest.mark.parametrize(("messages", "fix"), [(0, "Take"), (4, "Mend the messages of")])
def test_a_function_whose_messages_are_mended_is_not_taken_out_as_well(
    tmp_path: Path, messages: int, fix: str
) -> None:
    diagnosis = diagnosed(tmp_path, 16, messages=messages)
    found = next(one for one in diagnosis.findings if one.rule_id == "script-operators")
    assert found.fixes[0].title.startswith(f"{fix} `update` (`train.py:4`)")
