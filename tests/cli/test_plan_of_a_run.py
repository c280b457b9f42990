"""Plan from a run that recorded how it trains: the folder and its diagnosis in JSON give the same plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tracedoc.cli import main


def plan_of(path: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["plan", str(path), *options, "-f", "json"])
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def recorded(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample whose manifest says what its ranks train: 2 x 512 tokens, a part of the parameters."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    shutil.copytree(repository / "sample_traces" / "synthetic_ddp_tiny_batch", folder)
    model = {
        "parameters": 160_000_000,
        "trained_parameters": 1_000_000,
        "block": {"class": "TinyBlock", "count": 10, "parameters": 12_000_000},
        "gradient_checkpointing": True,
    }
    framework = {
        "model": model,
        "optimizers": [{"name": "SGD"}],
        "accelerate": {"mixed_precision": "bf16"},
    }
    batch = [{"shape": [2, 512], "dtype": "torch.int64"}]
    said = {"world_size": 4, "environment": {}, "framework": framework, "batch": batch}
    ranks = {str(rank): {"file": f"rank-{rank}.json.gz", **said} for rank in range(4)}
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "ranks": ranks}))
    return folder


def test_folder_and_diagnosis_give_the_same_plan(recorded: Path, tmp_path: Path) -> None:
    saved = tmp_path / "diagnosis.json"
    assert CliRunner().invoke(main, ["diagnose", str(recorded), "-o", str(saved)]).exit_code == 0
    of_folder, of_diagnosis = plan_of(recorded), plan_of(saved)
    assert of_folder == of_diagnosis
    asked = of_folder["asked"]
    assert asked["parameters"] == 160_000_000
    assert asked["training"]["micro_batch"] == 2
    assert asked["training"]["sequence"] == 512
    assert asked["training"]["optimizer"] == "sgd-momentum"
    assert asked["training"]["lora_rank"] > 0
    measured = [text for text in of_folder["assumptions"] if text.startswith("Measured ")]
    assert len(measured) == 1
    assert "predicted" in measured[0]


def test_a_run_without_tokens_idles_in_the_plan_as_it_does(repository: Path) -> None:
    """9.44 ms a step, 3.37 of them computed: what is neither that nor the link is in every strategy."""
    found = plan_of(repository / "sample_traces" / "synthetic_ddp_tiny_batch")
    assert found["recommended"] == "ddp"
    step = next(one["step"] for one in found["strategies"] if one["strategy"] == "ddp")
    assert step["expected_ms"] == pytest.approx(9.44, rel=0.01)


def test_twice_the_gpus_are_replayed_instead_of_estimated(repository: Path) -> None:
    found = plan_of(repository / "sample_traces" / "synthetic_ddp_tiny_batch", "--gpus", "8")
    assert [text for text in found["assumptions"] if text.startswith("Replayed ")]
