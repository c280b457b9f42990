"""What a rank tells about itself, asked in real jobs of one and two processes."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.collector.conftest import run_alone
from tracedoc.run.steplog import STEP, WINDOW, read_step_log

pytest.importorskip("torch", reason="the collector meets live torch objects: needs the extra 'collect'")

JOB = Path(__file__).with_name("evidence_job.py")
BLOCK = 64 * 256 + 256 + 256 * 64 + 64
HEAD = 64 * 10 + 10
STEPS = 8


def facts_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"facts-{rank}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with one for each kind of job, in which its ranks have left what they tell."""
    folder = tmp_path_factory.mktemp("told")
    kinds = {"ddp": 2, "fsdp2": 2, "fsdp1": 2, "killed": 1}
    for kind in kinds:
        (folder / kind).mkdir()
    variables = {"NCCL_ALGO": "Ring", "HF_TOKEN": "hf_abcdefghijklmnopqrst", "CUDA_LAUNCH_BLOCKING": "1"}
    jobs = {kind: ([str(JOB), kind, str(folder / kind), str(STEPS)], ranks) for kind, ranks in kinds.items()}
    ended = run_alone(jobs, folder, **variables)
    codes = {kind: [rank.code for rank in ranks] for kind, ranks in ended.items()}
    assert codes == {"ddp": [0, 0], "fsdp2": [0, 0], "fsdp1": [0, 0], "killed": [-9]}, ended
    return folder


@pytest.fixture(scope="module")
def ddp(told: Path) -> Path:
    return told / "ddp"


def test_ddp_tells_its_buckets_and_flags(ddp: Path) -> None:
    (told,) = facts_of(ddp, 0)["framework"]["ddp"]
    assert told["bucket_bytes_cap"] == 1024 * 1024
    assert told["bucket_cap_is_default"] is False
    assert told["find_unused_parameters"] is True
    assert told["gradient_as_bucket_view"] is True
    assert told["total_parameter_size_bytes"] == 4 * (4 * BLOCK + HEAD)
    assert told["group_size"] == 2


def test_the_model_is_that_below_the_wrapper(ddp: Path) -> None:
    model = facts_of(ddp, 0)["framework"]["model"]
    assert model["name"] == "Net"
    assert model["parameters"] == 4 * BLOCK + HEAD
    assert model["parameter_tensors"] == 4 * 4 + 2
    assert model["block"] == {"class": "Block", "count": 4, "parameters": BLOCK}


def test_the_loader_the_batch_and_the_optimizer_are_reported(ddp: Path) -> None:
    facts = facts_of(ddp, 1)
    (loader,) = facts["framework"]["loaders"]
    assert (loader["batch_size"], loader["num_workers"], loader["pin_memory"]) == (8, 0, False)
    assert loader["dataset"] == "TensorDataset"
    assert facts["batch"] == [
        {"name": "0", "shape": [8, 64], "dtype": "float32", "device": "cpu"},
        {"name": "1", "shape": [8], "dtype": "int64", "device": "cpu"},
    ]
    (optimizer,) = facts["framework"]["optimizers"]
    assert (optimizer["name"], optimizer["elements"]) == ("AdamW", 4 * BLOCK + HEAD)
    (group,) = facts["framework"]["groups"]
    assert (group["backend"], group["ranks"]) == ("gloo", [0, 1])


def test_no_token_is_kept(ddp: Path) -> None:
    text = (ddp / "facts-0.json").read_text()
    variables = facts_of(ddp, 0)["environment"]["variables"]
    assert "hf_" not in text
    assert variables["NCCL_ALGO"] == "Ring"
    assert variables["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "PATH" not in variables


def test_versions_processors_and_threads_are_reported(ddp: Path) -> None:
    import torch

    environment = facts_of(ddp, 0)["environment"]
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["host"]["cpus"] == os.cpu_count()
    assert environment["threads"]["torch"] == 1


def test_every_step_is_in_the_log(ddp: Path) -> None:
    assert facts_of(ddp, 1)["step_log"] == "rank-1.steps"
    log = read_step_log(ddp / "rank-1.steps")
    assert log is not None
    assert log.rank == 1
    steps = log.of_kind(STEP)
    assert [number for number, _, _ in steps] == list(range(1, STEPS + 1))
    ends = [end for _, end, _ in steps]
    assert [length for _, _, length in steps[1:]] == [b - a for a, b in itertools.pairwise(ends)]
    assert [number for number, _, _ in log.of_kind(WINDOW)] == [0, 1]


def test_counters_grow_over_the_window(ddp: Path) -> None:
    counters = facts_of(ddp, 0)["window"]["counters"]
    # The kernel divides a short window between the two by the ticks that fell into it.
    assert counters.get("process.user_us", 0) + counters.get("process.system_us", 0) > 0
    if Path("/proc/thread-self/schedstat").exists():
        thread = facts_of(ddp, 0)["window"]["training_thread"]
        assert thread["steps"] >= 1
        assert thread["ran_us"] > 0


def test_the_evidence_of_a_rank_is_small(ddp: Path) -> None:
    size = sum(file.stat().st_size for file in ddp.glob("*-0*"))
    assert size < 64 * 1024


def test_fully_shard_tells_its_units(told: Path) -> None:
    framework = facts_of(told / "fsdp2", 0)["framework"]
    fsdp2 = framework["fsdp2"]
    assert framework["model"]["name"] == "Net"
    assert framework["model"]["parameters"] == 4 * BLOCK + HEAD
    assert framework["model"]["block"]["class"] == "Block"
    assert fsdp2["mixed_precision"] == {
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "cast_forward_inputs": True,
    }
    assert (fsdp2["shard_size"], fsdp2["unit_count"]) == (2, 5)
    by_size = sorted((u["parameters"], u["sharded"], u["reshard_after_forward"]) for u in fsdp2["units"])
    assert by_size == [(HEAD, HEAD // 2, False)] + 4 * [(BLOCK, BLOCK // 2, True)]
    assert {u.get("name", "") for u in fsdp2["units"]} == {"", *(f"layers.{i}" for i in range(4))}


def test_fsdp1_tells_its_units(told: Path) -> None:
    framework = facts_of(told / "fsdp1", 0)["framework"]
    fsdp1 = framework["fsdp1"]
    assert framework["model"]["name"] == "Net"
    assert framework["model"]["parameters"] == 4 * BLOCK + HEAD
    assert (fsdp1["sharding_strategy"], fsdp1["backward_prefetch"]) == ("SHARD_GRAD_OP", "BACKWARD_PRE")
    assert [u["name"] for u in fsdp1["units"]] == ["Net", *4 * ["Block"]]
    assert [u["parameters"] for u in fsdp1["units"]] == [HEAD, *4 * [BLOCK]]


def test_a_killed_rank_leaves_its_steps(told: Path) -> None:
    log = read_step_log(told / "killed" / "rank-0.steps")
    assert log is not None
    written = log.of_kind(STEP)
    assert [number for number, _, _ in written] == list(range(1, 1 + len(written)))
    # All that ended before the window did; the last 10 ms may be lost.
    assert 6 <= len(written) < STEPS
