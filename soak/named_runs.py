"""Collect small real jobs whose fault is known, and see that it is named, with its function where it is code.

    python soak/named_runs.py [NAME...] [--into build/named]

Each is two ranks of torchrun on this machine: a script of ``real_jobs``, with its arguments behind a space.
What the answer's first line must name is written beside it, or what all of it must; healthy ones have no
warning.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONGEST_S = 300

JOBS = {
    "toplevel_save": r"`save` at the top level of `toplevel_save\.py`",
    "toplevel_sleep": r"`sleep` at the top level of `toplevel_sleep\.py`",
    "toplevel_log": r"`dumps` at the top level of `toplevel_log\.py`",
    "listcomp": r"`augmented` \(`listcomp\.py:\d+`\)",
    "kth_eval": r"`evaluate` \(`kth_eval\.py:\d+`\)",
    "kth_checkpoint_rank0": r"`save_checkpoint` \(`kth_checkpoint_rank0\.py:\d+`\) on rank 0",
    "thread": r"`aggregate` \(`thread\.py:\d+`\)",
    "barrier": r"`synced` \(`barrier\.py:\d+`\)",
    "trainer_class": r"`update_metrics` \(`trainer_class\.py:\d+`\)",
    "callback_rank1": r"rank 1(?:, which)? spends .* in `on_step_end` \(`callback_rank1\.py:\d+`\)",
    "library_beside": r"`flush` \(`fastmetrics/core\.py:\d+`\)",
    "oversubscribed": r"Too many threads",
    "gc_automatic": r"`tokenized` \(`gc_automatic\.py:\d+`\)",
    "gc_every_step": r"`free_memory` \(`gc_every_step\.py:\d+`\)",
    "metrics_each_micro_batch": r"`reduced_metrics` \(`metrics_each_micro_batch\.py:\d+`\)",
    "fsdp_clipping": r"`clip_gradients` \(`fsdp_clipping\.py:\d+`\)",
    "sleeping_stage": r"stage 1 .* in `record_activations` \(`sleeping_stage\.py:\d+`\)",
    "starved_loader": r"`__getitem__` \(`starved_loader\.py:\d+`\)",
    "rank0_logs": r"`write_statistics` \(`rank0_logs\.py:\d+`\)",
    "kth_save": r"`save_checkpoint` \(`kth_save\.py:\d+`\) on rank 0",
    "python_tokens": r"`encode` \(`python_tokens\.py:\d+`\)",
    "no_no_sync": r"reduced in every micro-batch",
    "recompute": r"activations are computed twice",
    "mesh_rank3": r"rank 3(?:, which)? spends .* in `prepare` \(`mesh_rank3\.py:\d+`\)",
    "late_onset": r"longer from step \d+ on .* in `track_statistics` \(`late_onset\.py:\d+`\)",
    "local_sgd": r"rank 1(?:, which)? spends .* in `augment` \(`local_sgd\.py:\d+`\)",
    "extra_operators one": r"rank 1(?:, which)? spends .* in `log_histograms` \(`extra_operators\.py:\d+`\)",
    "extra_operators turns": r"`log_histograms` \(`extra_operators\.py:\d+`\)",
    "bucket_sampler": r"`__iter__` \(`bucket_sampler\.py:\d+`\)",
    "report_rank0": r"`send_metrics` \(`report_rank0\.py:\d+`\)",
    "durable_rows": r"`append_row` \(`durable_rows\.py:\d+`\)",
    "loaders decodes": r"Input-bound.* in `decode` \(`loaders\.py:\d+`\)",
    "loaders fetches": r"Input-bound.* in `__getitem__` \(`loaders\.py:\d+`\).* Load what the samples",
    "loaders one_bad_worker": r"the data loader",
    "loaders cold_disk": r"Input-bound.* in `__getitem__` \(`loaders\.py:\d+`\).* Read in larger pieces",
    "epochs anew": r"Keep the (?:loader's )?workers between epochs",
    "padding filled": r"Padding",
    "padding uneven": r"Straggler.*rank 0 .*more data",
    "pinned together": r"Pinned ranks",
    "saving_thread text": r"`save_text` \(`saving_thread\.py:\d+`\) in a thread beside",
    "item_per_layer": r"`check_output` \(`item_per_layer\.py:\d+`\)",
    "small_buckets": r"Small gradient buckets",
    "stopped_rank": r"Slow steps.* most of it in a stopped process on rank 1",
    "kinds ddp": r"Small gradient buckets",
    "kinds accumulation": r"reduced in every micro-batch",
    "kinds unused": r"Unused-parameter search|Small gradient buckets",
    "kinds accelerate": r"Small gradient buckets",
    "kinds lightning": r"Small gradient buckets",
    "kinds loader": r"Input-bound",
    "kinds collections": r"Garbage collection",
    "kinds threads": r"Too many threads",
    # After public reports, each written before it was diagnosed.
    "anomaly_mode": r"",  # Lightning-AI/pytorch-lightning 12344
    "replay_buffer": r"`sample` \(`replay_buffer\.py:\d+`\)",  # keiohta/tf2rl 126
    "uncollated": r"`uncollate` \(`uncollated\.py:\d+`\)",  # BiomedSciAI/fuse-med-ml 267
    "averaged_weights": r"`update` \(`averaged_weights\.py:\d+`\)",  # lucidrains/ema-pytorch 5
    # huggingface/transformers 1830
    "collate_tokens": r"Input-bound.* in `(?:tokenize_batch|pieces_of)` \(`collate_tokens\.py:\d+`\)",
    "locked_shards": r"`read_shard` \(`locked_shards\.py:\d+`\)",  # webdataset/webdataset 386
    "growing_metric": r"`ranked_share` \(`growing_metric\.py:\d+`\)",  # Lightning-AI/pytorch-lightning 16113
    "best_weights": r"`(?:keep_best|names)` \(`best_weights\.py:\d+`\)",  # deepspeedai/DeepSpeed 2056
    "drawn_bar": r"`draw_progress` \(`drawn_bar\.py:\d+`\)",  # ourownstory/neural_prophet 1054
    "weighted_draws": r"`__iter__` \(`weighted_draws\.py:\d+`\)",  # pytorch/pytorch 32221
    "synced_target": r"`sync_target` \(`synced_target\.py:\d+`\)",  # pytorch/pytorch 61398
    "watched_gradients": r"`log_histogram` \(`watched_gradients\.py:\d+`\)",  # wandb/wandb 2268
    "csv_logger": r"`log_metrics` \(`csv_logger\.py:\d+`\)",  # Lightning-AI/pytorch-lightning 17725
    "drawn_losses": r"`draw_losses` \(`drawn_losses\.py:\d+`\)",  # mit-han-lab/gan-compression 47
    "stacked_outside": r"Input-bound|`batched` \(`stacked_outside\.py:\d+`\)",  # pytorch/pytorch 85631
    "confusion_loop": r"`count_confusion` \(`confusion_loop\.py:\d+`\)",  # fastai/fastai 2516
    "augmented_batch": r"`(?:augment|changed)` \(`augmented_batch\.py:\d+`\)",  # pytorch/vision 157
}

ALSO = {
    "loaders one_bad_worker": r"worker 1",
    "loaders decodes": r"it computes all the time",
    "same_data": r"Unshared data",
    "padding uneven": r"the batches of rank 0 hold \d\.\d times the tokens",
    "saving_thread text": r"Move that work to a process of its own",
    "stopped_rank": r"See what stops the process",
    "anomaly_mode": r"set_detect_anomaly\(False\)",
}
"""What the whole answer must say."""

HEALTHY = (
    "healthy",
    "healthy_lightning",
    "loaders quick",
    "loaders equal_workers",
    "loaders warm_disk",
    "epochs kept",
    "padding bucketed",
    "pinned apart",
    "saving_thread binary",
)


def answer_to(name: str, into: Path) -> str:
    """The answer to a job, which is collected if its folder is not there yet."""
    folder, (script, *arguments) = into / name.replace(" ", "-"), name.split()
    if not folder.exists():
        scratch = into / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        processes = "4" if name.startswith("mesh") else "2"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        job = [sys.executable, *launch, str(HERE / "real_jobs" / f"{script}.py"), *arguments]
        collect = [sys.executable, "-m", "tracedoc", "collect", "-o", str(folder), "--", *job]
        environ = {**os.environ, "SCRATCH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(collect, env=environ, capture_output=True, text=True, timeout=LONGEST_S, check=True)
        shutil.rmtree(scratch)
    answer = [sys.executable, "-m", "tracedoc", "diagnose", str(folder)]
    return subprocess.run(answer, capture_output=True, text=True, timeout=LONGEST_S, check=True).stdout


def main() -> int:
    """Collect and judge the jobs; return how many are not named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*dict.fromkeys((*JOBS, *ALSO)), *HEALTHY])
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "named")
    asked = parser.parse_args()
    missed, of_code, named_code = 0, 0, 0
    for name in asked.names:
        answer = answer_to(name, asked.into)
        line = answer.partition("\n")[0]
        named = re.match("CPU run", line) if name in HEALTHY else re.search(JOBS.get(name, ""), line)
        named = named and re.search(ALSO.get(name, ""), re.sub(r"\s+", " ", answer))
        missed += named is None
        of_code += r"\.py" in JOBS.get(name, "")
        named_code += r"\.py" in JOBS.get(name, "") and named is not None
        print(f"{'named' if named else 'MISSED':7} {name}: {line}", flush=True)
    print(f"{len(asked.names)} jobs: {missed} not named; functions: {named_code} of {of_code} named")
    return missed


if __name__ == "__main__":
    sys.exit(main())
