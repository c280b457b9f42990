"""What a change sets is read from the text that is printed."""

from __future__ import annotations

import pytest

from tracedoc.collector.trial.changes import MODEL, STEP, TORCH, CannotError, read_change


def keywords(text: str) -> list[tuple[str, dict[str, str]]]:
    return [(call.target, dict(call.keywords)) for call in read_change(text).calls]


def test_keywords_that_say_a_value_replace_and_those_that_name_the_scripts_own_stay() -> None:
    text = "DataLoader(dataset, batch_size, sampler=sampler, num_workers=3, timeout=9)   # the others stay"
    assert keywords(text) == [("DataLoader", {"num_workers": "3", "timeout": "9"})]
    assert keywords("torch.optim.AdamW(model.parameters(), lr=lr, fused=True)") == [
        ("torch.optim.AdamW", {"fused": "True"})
    ]


def test_what_others_pass_on_to_ddp_is_set_there() -> None:
    for text in (
        "DDP(model, bucket_cap_mb=4)",
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=4)])",
        "Trainer(strategy=DDPStrategy(bucket_cap_mb=4))",
    ):
        (call,) = read_change(text).calls
        assert (call.home.name, call.keywords) == ("DistributedDataParallel", (("bucket_cap_mb", "4"),))


def test_a_comment_takes_a_keyword_out() -> None:
    text = "DDP(model, gradient_as_bucket_view=True)   # without bucket_cap_mb"
    assert keywords(text) == [("DDP", {"gradient_as_bucket_view": "True", "bucket_cap_mb": ""})]


def test_lines_for_a_shell_set_variables_unset_them_and_add_arguments() -> None:
    assert read_change("export OMP_NUM_THREADS=2").environ == {"OMP_NUM_THREADS": "2"}
    assert read_change("NCCL_MAX_CTAS=8 NCCL_NTHREADS=64 torchrun train.py").environ == {
        "NCCL_MAX_CTAS": "8",
        "NCCL_NTHREADS": "64",
    }
    assert read_change("unset NCCL_ALGO NCCL_PROTO").unset == ("NCCL_ALGO", "NCCL_PROTO")
    assert read_change("--overlap-grad-reduce").arguments == ("--overlap-grad-reduce",)


def test_configurations_are_read_as_json_and_as_two_levels() -> None:
    assert read_change('{"zero_optimization": {"stage": 2}}').deepspeed == {"zero_optimization": {"stage": 2}}
    assert read_change("fsdp_config:\n  fsdp_forward_prefetch: true\n  fsdp_version: 2").launch == {
        "fsdp_config": {"fsdp_forward_prefetch": True, "fsdp_version": 2}
    }


def test_code_that_only_sets_runs_when_what_it_names_is_there() -> None:
    sets = "torch.set_float32_matmul_precision('high')\ntorch.backends.cudnn.allow_tf32 = True"
    assert [code.when for code in read_change(sets).code] == [TORCH, TORCH]
    assert [code.when for code in read_change("model.set_separate_reduce_scatter_group()").code] == [MODEL]
    assert [code.when for code in read_change("import gc\nif step % 100 == 0:\n    gc.collect(1)").code] == [
        STEP
    ]
    prefetch = (
        "blocks = list(model.layers)\nfor block, following in zip(blocks, blocks[1:]):\n"
        "    block.set_modules_to_forward_prefetch([following])"
    )
    (code,) = read_change(prefetch).code
    assert (code.when, code.source.startswith("blocks = list(model.layers)")) == (MODEL, True)


def test_compiling_and_reducing_once_are_known_by_how_they_are_written() -> None:
    assert read_change("model = torch.compile(model, dynamic=False)").compile == "dynamic=False"
    each = read_change("for block in model.layers:\n    block.compile()   # before its fully_shard")
    assert (each.compile, each.compiles_units, each.code) == ("", True, ())
    assert each.missing_in({"ddp": [{"world_size": 2}]}) == "torch.compile"
    once = "with model.no_sync():\n    loss(model(batch)).backward()"
    assert read_change(once).no_sync
    accelerate = (
        "accelerator = Accelerator(gradient_accumulation_steps=6)\nwith accelerator.accumulate(m):\n    1"
    )
    assert (read_change(accelerate).no_sync, read_change(accelerate).calls) == (True, ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "advice in words"),
        ("running_loss += loss.detach()", "the script's own code (loss)"),
        ("batch_size = 2 * batch_size", "the script's own code"),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "the script's own code"),
        ('torch.distributed.init_process_group("cpu:gloo,cuda:nccl")', "the script's own code"),
        ("for block in model.layers:\n    fully_shard(block)\nfully_shard(model)", "the script's own code"),
        ("model = DDP(model, gradient_as_bucket_view=True)   # instead of FSDP2", "takes the place of code"),
        ("TrainingArguments(gradient_accumulation_steps=4)", "changes the batch"),
        ('{"train_micro_batch_size_per_gpu": 16}', "changes the batch"),
        ("nvidia-smi -q -d CLOCK", "command for a shell"),
        ("torchrun --nproc-per-node 4 train.py", "command for a shell"),
        ('TORCH_LOGS="recompiles" torchrun train.py', "shows where time goes"),
        ('torch.cuda.set_sync_debug_mode("warn")', "shows where time goes"),
        ("model = model.to(memory_format=torch.channels_last)", "the script's own code"),
    ],
)
def test_what_only_the_script_can_change_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(CannotError) as refused:
        read_change(text)
    assert reason in str(refused.value)


def test_a_job_without_what_a_change_is_about_lacks_it() -> None:
    change = read_change("DDP(model, static_graph=True)")
    assert change.missing_in({"fsdp2": {"unit_count": 3}}) == "DDP"
    assert change.missing_in({"ddp": [{"world_size": 2}]}) == ""
    assert change.missing_in({}) == ""
