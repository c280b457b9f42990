"""Traces that were once misread, each with the right answer; ``reproducers/README.md`` says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tracedoc
from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import InputError


@pytest.fixture
def diagnosed(shared_traces: Path, request: pytest.FixtureRequest) -> Diagnosis:
    return diagnosis_of(shared_traces / "reproducers" / f"{request.param}.json")


def lengths(diagnosis: Diagnosis) -> list[float]:
    return [round(step.step_ms, 3) for step in diagnosis.ranks[0].steps if step.complete]


@pytest.mark.parametrize("diagnosed", ["short_steps_one_of_two"], indirect=True)
def test_a_step_that_another_follows_is_complete(diagnosed: Diagnosis) -> None:
    assert lengths(diagnosed) == [1.078, 0.856]
    assert diagnosed.budget is not None
    assert round(diagnosed.budget.step_ms, 2) == 0.86


@pytest.mark.parametrize("diagnosed", ["short_steps_unfinished"], indirect=True)
def test_a_step_before_one_that_was_cut_is_complete(diagnosed: Diagnosis) -> None:
    assert lengths(diagnosed) == [0.506]


@pytest.mark.parametrize("diagnosed", ["cpu_loop_without_steps"], indirect=True)
def test_iterations_of_a_loop_on_a_cpu_are_steps(diagnosed: Diagnosis) -> None:
    assert len(lengths(diagnosed)) == 11  # of twelve; the end of the last one was not captured
    assert diagnosed.budget is not None
    assert 40 < diagnosed.budget.step_ms < 70


@pytest.mark.parametrize("diagnosed", ["bound_above_step"], indirect=True)
def test_no_gain_is_more_than_the_step_that_it_is_of(diagnosed: Diagnosis) -> None:
    """Two steps of 28.9 and 74.1 ms: what both causes leave is less than 9.5 of their mean of 51.5 ms."""
    assert diagnosed.ledger is not None
    assert round(diagnosed.ledger.step_ms, 1) == 51.5
    gains = [one.gain for one in diagnosed.findings if one.gain is not None]
    assert " of the 51.5 ms step)" in diagnosed.summary
    assert max(one.high_ms for one in gains) <= diagnosed.ledger.step_ms
    assert "at best" not in diagnosed.summary
    assert " (0.00 to " not in diagnosed.summary


@pytest.mark.parametrize("diagnosed", ["cpu_run_on_gpu_machine"], indirect=True)
def test_operators_of_the_cpu_make_a_cpu_run(diagnosed: Diagnosis) -> None:
    assert diagnosed.run.device == "CPU"
    assert "No answer" not in diagnosed.summary


@pytest.mark.parametrize(
    ("diagnosed", "cause", "least_ms"),
    [
        ("cold_start_called_batch_too_small", "host.first_calls", 623),
        ("torchscript_fusion_compile", "host.compile", 290),
    ],
    indirect=["diagnosed"],
)
def test_a_capture_that_is_mostly_warm_up_has_a_guard_and_no_advice(
    diagnosed: Diagnosis, cause: str, least_ms: float
) -> None:
    assert diagnosed.ledger is not None
    first, *_ = diagnosed.ledger.causes
    assert (first.id, first.told_by) == (cause, ("warm-up-captured",))
    assert first.share_ms > least_ms
    assert diagnosed.summary.startswith("No diagnosis:")
    assert "capture later steps" in diagnosed.summary
    assert {one.rule_id for one in diagnosed.findings} == {"warm-up-captured", "few-steps"}


@pytest.mark.parametrize("diagnosed", ["copies_only"], indirect=True)
def test_copies_alone_are_told(diagnosed: Diagnosis) -> None:
    assert diagnosed.findings[0].rule_id == "pageable-copies"
    assert "147 MiB" in diagnosed.findings[0].message
    assert diagnosed.ledger is not None
    # One direction takes 32.2 ms and the other 34.5: at best both travel at the same time.
    assert {one.id for one in diagnosed.ledger.causes} >= {"input.copies", "host.sync"}
    assert 34 < diagnosed.ledger.ideal_ms < 35


@pytest.mark.parametrize("diagnosed", ["cpu_randn_called_launch_bound"], indirect=True)
def test_an_operator_that_computes_on_the_cpu_is_no_slow_launching(diagnosed: Diagnosis) -> None:
    first = diagnosed.findings[0]
    assert first.rule_id == "host-away"
    assert "aten::randn" in first.message
    assert not any("torch.compile" in fix.change for fix in first.fixes)
    assert "host-bound-launches" not in {one.rule_id for one in diagnosed.findings}
    assert diagnosed.budget is not None
    assert round(diagnosed.budget.idle_causes_ms["operator"], 1) == 3.1


@pytest.mark.parametrize("diagnosed", ["fp32_unlisted_gpu"], indirect=True)
def test_compute_capability_says_that_a_gpu_has_tensor_cores(diagnosed: Diagnosis) -> None:
    first = diagnosed.findings[0]
    assert first.rule_id == "idle-tensor-cores"
    # GA102's paper: 16-bit inputs added up in fp32 at 59.5 TFLOP/s on an RTX 3080, fp32 at 29.8.
    assert "2 times as fast" in first.message
    assert diagnosed.ledger is not None
    # 110 ms in fp32, at twice the rate at the least.
    assert round(diagnosed.ledger.causes[0].share_ms) == 55


@pytest.mark.parametrize("diagnosed", ["range_is_the_forward_pass"], indirect=True)
def test_a_range_that_is_the_forward_pass_is_not_taken_out(diagnosed: Diagnosis) -> None:
    assert "script-code" not in {one.rule_id for one in diagnosed.findings}
    assert diagnosed.facts["forward_only"].value is True


TRAINING = re.compile(r"learning rate|optimizer|gradient|backward|micro-batch|epoch|loss|global batch|Train ")


@pytest.mark.parametrize(
    ("diagnosed", "forward_only"),
    [
        ("range_is_the_forward_pass", True),
        ("cpu_randn_called_launch_bound", True),
        ("short_steps_one_of_two", True),  # kernels alone: a softmax without one of a backward pass
        ("short_steps_unfinished", None),
        ("copies_only", None),
        ("fp32_unlisted_gpu", False),
    ],
    indirect=["diagnosed"],
)
def test_what_only_training_can_do_is_advice_for_traces_that_show_training(
    diagnosed: Diagnosis, forward_only: bool | None
) -> None:
    assert diagnosed.facts["forward_only"].value is forward_only
    advice = [
        text
        for one in diagnosed.findings
        for fix in one.fixes
        for text in (fix.title, fix.change, fix.advice, fix.risk)
        if TRAINING.search(text)
    ]
    assert bool(advice) is (forward_only is False), advice


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("begin_end_events", "none of its 8 events is complete"),
        ("legacy_autograd_export", "legacy torch.autograd profiler"),
    ],
)
def test_files_of_other_writers_are_named(shared_traces: Path, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tracedoc.load(shared_traces / "reproducers" / f"{name}.json")


@pytest.mark.parametrize("diagnosed", ["gloo_waits_for_the_gpu"], indirect=True)
def test_a_host_without_a_gpu_waits_for_other_ranks(diagnosed: Diagnosis) -> None:
    assert diagnosed.replay is not None
    assert set(diagnosed.replay.path) == {"compute", "communication"}
    assert round(diagnosed.replay.path["communication"], 2) == 0.02


@pytest.mark.parametrize("diagnosed", ["bound_above_step"], indirect=True)
def test_a_step_in_which_the_loader_stalls_is_the_loaders(diagnosed: Diagnosis) -> None:
    """Without waiting for batches the mean step of 51.5 ms takes about 9.5; no gain is above the step."""
    finding = next(one for one in diagnosed.findings if one.rule_id == "input-stall")
    assert finding.gain is not None
    assert 51.5 - (finding.gain.likely_ms or 0) == pytest.approx(9.5, abs=0.5)
    assert all(one.gain.high_ms <= 51.6 for one in diagnosed.findings if one.gain is not None)
