"""Hold the words, formats and errors of ``tracedoc plan``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tracedoc.cli import main
from tracedoc.planner.plan import PLAN_SCHEMA

FITS = ("--params", "7e9", "--gpus", "2", "--gpu", "NVIDIA L4", "--lora-rank", "16")
DOES_NOT_FIT = ("--params", "13B", "--gpus", "4", "--gpu-memory", "40GB")


def run(repository: Path, *typed: str) -> Result:
    """Plan in this process, from the repository. What starts with an option is a line of words."""
    arguments = [word for one in typed for word in (shlex.split(one) if one.startswith("-") else [one])]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        patch.setattr(sys, "argv", ["tracedoc", "plan", *arguments])
        return CliRunner().invoke(main, sys.argv[1:], env={"COLUMNS": "100"})


def answer(repository: Path, *arguments: str) -> dict[str, Any]:
    done = run(repository, *arguments, "-f", "json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_comes_first_and_the_next_command_last(repository: Path) -> None:
    done = run(repository, *FITS)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "DDP with activation checkpointing: 16.7 GB of the 23.5 GB on each of 2 GPUs, "
    )
    assert lines[-1] == "next: tracedoc collect -- torchrun --nproc-per-node 2 train.py"
    assert "\x1b" not in done.stdout
    assert max(map(len, lines[2:])) <= 100


def test_what_does_not_fit_names_the_smallest_change_and_asks_again(repository: Path) -> None:
    done = run(repository, *DOES_NOT_FIT)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Nothing fits: each of 4 GPUs has 42.4 GB, and even ")
    assert "The smallest change that would: 8-bit AdamW (" in lines[0]
    again = lines[-1].removeprefix("next: tracedoc plan ").split()
    assert not run(repository, *again).stdout.startswith("Nothing fits")


def test_the_options_of_the_next_command_replace_the_old_ones(repository: Path) -> None:
    done = run(repository, "--params 70B --gpus 8 --gpu H100")
    assert done.stdout.splitlines()[-1] == (
        "next: tracedoc plan --params 70B --gpus 8 --gpu H100 --offload optimizer --framework deepspeed"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 110])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_number(width: int, repository: Path) -> None:
    from tracedoc.cli.plan.text import plan_text
    from tracedoc.planner.hardware import Cluster, find_gpu, link_of
    from tracedoc.planner.plan import plan
    from tracedoc.planner.setup import PlanRequest, Question, Training
    from tracedoc.planner.shape import shape_from_parameters

    gpu = find_gpu("A100 40GB")
    question = Question(shape_from_parameters(70 * 10**9), Training(), 8, 1, 40e9)
    text = plan_text(
        plan(question, PlanRequest(Cluster(gpu, link_of(gpu), None))), next_command="", width=width
    )
    table = text.split("Strategies")[1].split("* with")[0]
    assert "…" not in table or width == 40
    assert ("activ." in table) == (width >= 100)
    assert "DDP" in table


def test_json_holds_the_whole_plan(repository: Path) -> None:
    plan = answer(repository, *FITS)
    assert plan["schema_version"] == PLAN_SCHEMA
    assert plan["recommended"] == "ddp"
    assert plan["asked"]["trainable_parameters"] == 33 * 16 * 2 * (4096 + 4096)
    first = plan["strategies"][0]
    assert first["strategy"] == "ddp"
    assert first["headroom_bytes"] == pytest.approx(23.5e9 - first["total_bytes"])
    assert {c["framework"] for c in plan["configurations"]} == {
        "pytorch",
        "accelerate",
        "trainer",
        "deepspeed",
    }


def test_markdown_has_a_table_and_every_configuration(repository: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.md"
    done = run(repository, *FITS, "-o", str(page))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    assert f"wrote {page}" in done.stderr
    text = page.read_text()
    assert text.startswith("**DDP with activation checkpointing: ")
    assert "| DDP * | yes | " in text
    # One for each framework, and the adapters that Accelerate has no file for.
    assert text.count("```") == 2 * 5


def test_a_model_is_read_from_its_config(repository: Path, tmp_path: Path) -> None:
    keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"n_positions": 1024}))
    plan = answer(repository, "--model", str(tmp_path), "--gpu", "T4", "--seq", "1024")
    assert plan["asked"]["parameters"] == 124_439_808
    assert plan["asked"]["training"]["precision"] == "fp16-mixed"  # a T4 has no bf16


def test_a_captured_run_gives_gpus_parameters_and_bandwidth(repository: Path) -> None:
    plan = answer(repository, "sample_traces/synthetic_ddp_tiny_batch")
    assert plan["asked"]["gpus"] == 4
    assert plan["asked"]["gpu"] == "H100"
    assert plan["asked"]["parameters"] == 162_398_976
    assert any("264 GB/s" in text for text in plan["assumptions"])


def test_the_prediction_is_held_against_the_run_and_rescaled_by_it(
    repository: Path, shared_traces: Path
) -> None:
    """Tokens, precision, memory and present strategy are those of the capture."""
    folder = str(shared_traces / "fsdp2_h100_4rank")
    plan = answer(repository, folder)
    assert plan["asked"]["gpu"] == "H100 96GB"
    assert plan["asked"]["gpu_memory_bytes"] == 102_085_492_736
    training = plan["asked"]["training"]
    assert (training["micro_batch"], training["sequence"]) == (8, 2048)
    assert training["precision"] == "bf16-mixed"
    (told,) = (text for text in plan["assumptions"] if text.startswith("Measured "))
    assert "Measured 77.1 ms a step with FSDP FULL_SHARD, predicted " in told
    now = next(c for c in plan["strategies"] if c["strategy"] == "full-shard")
    assert now["step"]["expected_ms"] == pytest.approx(77.1, rel=0.01)
    # Another micro-batch is other work: the estimate is scaled, not the run's own computation taken.
    more = answer(repository, folder, "--micro-batch", "16")
    then = next(c for c in more["strategies"] if c["strategy"] == "full-shard")
    assert then["step"]["compute_ms"] > 1.8 * now["step"]["compute_ms"]


def test_a_small_model_of_unknown_layers_is_not_called_a_language_model(repository: Path) -> None:
    small = run(repository, "--params 395000 --gpus 2 --gpu L4").stdout
    assert "395k parameters (layers not known)" in small
    assert "far off for an MLP or a convolutional network" in " ".join(small.split())
    assert "Llama" not in small
    assert "vocabulary" not in small
    large = " ".join(run(repository, "--params 7e9 --gpus 2 --gpu H100").stdout.split())
    assert "7B parameters (Llama shape assumed)" in large
    assert "--model config.json takes the real one" in large


def test_a_diagnosis_is_as_good_as_its_traces(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    sample = repository / "sample_traces" / "synthetic_ddp_tiny_batch"
    assert CliRunner().invoke(main, ["diagnose", str(sample), "-o", str(file)]).exit_code == 0
    first = answer(repository, str(sample))
    assert answer(repository, str(file)) == first


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("", "no model is given", "tracedoc plan --params 7e9"),
        ("--params 7e9", "no GPU is given", "--gpu-memory 24GB"),
        ("--params 7e9 --model x --gpu L4", "both give the model", "leave one"),
        ("--params 7e9 --gpu-memory '24 GiBB'", "no unit is called 'GiBB'", "--gpu-memory 24GiB"),
        ("--params -7e9 --gpu L4", "not positive", "7e9"),
        ("--params 7e9 --gpu L4 --gpus 0", "--gpus is 0", "--gpus 1"),
        ("--params 7e9 --gpu L4 --gpus -2", "--gpus is -2", "--gpus 1"),
        ("--params 7e9 --gpu L44", "no GPU is known as 'L44'", "nearest: L4, "),
        ("--params 7e9 --gpu L4 --lora-rank 5000", "hidden size", "--lora-rank 64"),
        ("--params 7e9 --gpu L4 --lora-rank 0", "must be 1 or more", "--lora-rank 16"),
        ("--params 7e9 --gpu L4 --gpus 6 --nodes 4", "do not divide", "--gpus 8"),
        ("--params 7e9 --gpu L4 --optimizer adamv-8bit", "did you mean 'adamw-8bit'", "known: "),
        ("--params 7e9 --gpu L4 --precision bf16mixed", "did you mean 'bf16-mixed'", "known: "),
        ("--params 7e9 --gpu T4 --precision bf16", "has no bf16", "fp16-mixed"),
        ("--params 7e9 --gpu L4 --seq 0", "--seq is 0", "--seq 1"),
        ("--params 7e9 --gpu L4 --objective sped", "did you mean 'speed'", "use one of"),
        ("--params 7e9 --gpu L4 --framework torch", "did you mean 'pytorch'", "use one of"),
        ("--params 7e9 --gpu L4 --utilisation 40", "--utilisation is 40", "0.4"),
        ("--params 7e9 --gpu L4 --lora-rank 8 --lora-targets q_prj", "'q_proj'", "known"),
        ("--params 7e9 --gpu L4 --gpus 100000000", "no cluster has so many", "--gpus 131072"),
        ("--params 7e9 --gpus 8 --gpu L4 --batch 12 --micro-batch 2", "does not divide", "--batch 16"),
        ("--params 7e9 --gpu L4 --overlap none", "is not for", "--framework torchtitan"),
        ("--params 7e9 --gpu L4 --layout tp2", "is not for", "--framework torchtitan"),
        ("--params 7e9 --gpu L4 --price 2", "without --tokens", "--tokens 100B"),
        ("--params 7e9 --gpu L4 --micro-batch x", "is no number", "--micro-batch 4"),
        ("--params 7e9 --gpu A100 --fp8", "no 8-bit arithmetic", "--fp8"),
        ("--params 7e9 --gpus 8 --gpu L4 --micro-batch auto --batch 9", "does not divide", "--batch 8"),
        ("--params 7e9 --gpu L4 -o plan.pdf", "implies no format", ".md"),
        ("--params 7e9 --gpu L4 -o plan.txt -f json", "-f json has no effect", "add: -o -"),
        ("--model nowhere.json --gpu L4", "cannot be read", "--params"),
    ],
)
def test_nonsense_is_answered_with_the_nearest_valid_choice(
    arguments: str, error: str, hint: str, repository: Path
) -> None:
    done = run(repository, *[arguments] * bool(arguments))
    assert done.exit_code == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize(
    ("framework", "command"),
    [
        ("pytorch", "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"),
        ("accelerate", "accelerate launch --config_file accelerate.yaml train.py"),
        ("deepspeed", "deepspeed --hostfile hostfile train.py --deepspeed_config ds_config.json"),
    ],
)
def test_the_next_command_starts_with_the_frameworks_launcher(
    framework: str, command: str, repository: Path
) -> None:
    shown = run(repository, "--params 7e9 --gpus 16 --gpu H100 --framework", framework)
    assert shown.stdout.splitlines()[-1].startswith(f"next: tracedoc collect -- {command}")


def test_the_fastest_micro_batch_is_searched_and_priced(repository: Path) -> None:
    asked = ("--params", "7e9", "--gpus", "8", "--gpu", "H100", "--micro-batch", "auto", "--batch", "256")
    plan = answer(repository, *asked, "--tokens", "100B", "--price", "2.5")
    training = plan["asked"]["training"]
    assert training["micro_batch"] * training["accumulation"] * 8 == 256
    best, *others = plan["found"]
    assert best["micro_batch"] == training["micro_batch"]
    assert all(0.97 * one["tokens_per_second"] <= best["tokens_per_second"] for one in others)
    assert plan["days"] == pytest.approx(100e9 / plan["tokens_per_second"] / 86_400)
    assert plan["cost"] == pytest.approx(plan["days"] * 24 * 8 * 2.5)


def test_a_batch_alone_is_answered_with_micro_batch_and_accumulation(repository: Path) -> None:
    asked = ("--params", "7e9", "--gpus", "8", "--batch", "64")
    for gpu in (("--gpu", "H100"), ("--gpu-memory", "80GB")):
        training = answer(repository, *asked, *gpu)["asked"]["training"]
        assert training["micro_batch"] * training["accumulation"] * 8 == 64
        assert training["micro_batch"] > 1
    given = answer(repository, *asked, "--gpu", "H100", "--micro-batch", "2")["asked"]["training"]
    assert (given["micro_batch"], given["accumulation"]) == (2, 4)
    given = answer(repository, *asked, "--gpu", "H100", "--accumulation", "8")["asked"]["training"]
    assert (given["micro_batch"], given["accumulation"]) == (1, 8)
    shown = run(repository, *asked, "--gpu", "H100", "--micro-batch", "2").stdout
    assert "4 times for each update of 64 sequences" in shown


def test_layouts_take_the_micro_batches_that_are_given(repository: Path) -> None:
    asked = ("--params", "13B", "--gpus", "16", "--gpu", "H100", "--framework", "megatron")
    plan = answer(repository, *asked, "--micro-batch", "2", "--accumulation", "8")
    layouts = [one["layout"] for one in plan["strategies"]]
    assert {(one["micro_batch"], one["rounds"]) for one in layouts} == {(2, 8)}


def test_layouts_take_the_batch_of_an_update_and_name_their_launcher(repository: Path) -> None:
    asked = (
        "--params",
        "70B",
        "--gpus",
        "64",
        "--gpu",
        "H100",
        "--framework",
        "torchtitan",
        "--batch",
        "128",
    )
    shown = run(repository, *asked).stdout
    assert "Each update: 128 sequences of 2048 tokens" in shown
    assert "global_batch_size = 128" in shown
    assert shown.splitlines()[-1].endswith("-m torchtitan.train --job.config_file layout.toml")
    plan = answer(repository, *asked)
    best = plan["strategies"][0]["layout"]
    assert best["data"] * best["micro_batch"] * best["rounds"] == 128
    assert best["data"] * best["tensor"] * best["pipeline"] * best["context"] == 64


def test_a_batch_that_no_layout_divides_is_refused(repository: Path) -> None:
    asked = ("--params", "70B", "--gpus", "64", "--gpu", "H100", "--framework", "megatron", "--batch")
    for batch, hint in (("1", "--batch 64"), ("0", "--batch 1")):
        done = run(repository, *asked, batch)
        assert done.exit_code == 2
        assert done.stderr.rstrip().endswith(hint)


def test_a_model_that_allows_less_gets_shorter_sequences(repository: Path, tmp_path: Path) -> None:
    keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"n_positions": 1024}))
    plan = answer(repository, "--model", str(tmp_path), "--gpu", "L4")
    assert plan["asked"]["training"]["sequence"] == 1024


def test_pure_bf16_says_what_it_loses(repository: Path) -> None:
    plan = answer(repository, "--params 1e9 --gpu L4 --precision bf16")
    assert any("below 2^-8 of a weight are lost" in text for text in plan["assumptions"])


def test_many_gpus_are_in_nodes_of_8_where_nothing_is_said(repository: Path) -> None:
    plan = answer(repository, "--params 7e9 --gpus 32 --gpu H100")
    assert plan["asked"]["nodes"] == 4
    assert any(text.startswith("4 nodes assumed") for text in plan["assumptions"])
    assert answer(repository, "--params 7e9 --gpus 32 --nodes 2 --gpu H100")["asked"]["nodes"] == 2


def test_the_configuration_of_the_model_is_never_replaced(repository: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    done = run(repository, "--model", str(config), "--gpu", "L4", "-o", str(config))
    assert "is an input and would be replaced" in done.stderr
    assert config.read_text() == "{}"


def test_help_has_examples(repository: Path) -> None:
    text = run(repository, "--help").stdout
    assert "Examples:" in text
    assert "tracedoc plan --params 7e9" in text
