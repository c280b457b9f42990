"""Apply the first fix of real jobs to the letter, and hold what it gives against what was stated.

    python soak/predicted_runs.py [--rounds 3] [--into build/predicted] [NAME...]

Each job of ``soak/real_jobs`` is captured and diagnosed; the first fix of its finding, written down here as
an edit of the script, makes a second job, which is captured, too. Then both run in turns without the
collector. Captures and times stay in the folder: what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import tracedoc
from tracedoc.comparison.compare import compare
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options

JOBS = Path(__file__).resolve().parent / "real_jobs"
STEPS_TO_SETTLE = 10
LONGEST_S = 60
ENOUGH = 0.8
"""So many of the gains must lie where they were stated, and so many comparisons be decided and right."""


@dataclass(frozen=True)
class Fixed:
    """A job, the rule of its first finding, how the fix of it begins, and what of the script that replaces.

    What a job's script is given stands behind its name. ``environ`` are variables that the fix sets.
    """

    job: str
    rule: str
    title: str
    edits: Sequence[tuple[str, str]] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> str:
        """The name of its script."""
        return f"{self.job.partition(' ')[0]}.py"

    @property
    def key(self) -> str:
        """Its name in those of files."""
        return self.job.replace(" ", "-")


FIXED = (
    Fixed(
        "gc_every_step",
        "gc-pauses",
        "Take gc.collect() out of the step",
        (("        free_memory()\n", "        if step % 300 == 299:\n            free_memory()\n"),),
    ),
    Fixed(
        "metrics_each_micro_batch",
        "extra-barriers",
        "Reduce metrics together",
        (
            (
                "            history.append(reduced_metrics(loss, output))\n",
                "            if step % 50 == 0:\n"
                "                metrics = torch.stack([loss.detach(), output.detach().mean()])\n"
                "                distributed.all_reduce(metrics, op=distributed.ReduceOp.SUM)\n",
            ),
        ),
    ),
    Fixed(
        "fsdp_clipping",
        "extra-barriers",
        "Clip by one norm",
        (
            (
                "clip_gradients(model, 1.0)\n        opt",
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        opt",
            ),
        ),
    ),
    Fixed(
        "sleeping_stage",
        "stage-host-code",
        "Take `record_activations`",
        (("record_activations(x) if self.rank == 1 else x", "x"),),
    ),
    Fixed(
        "starved_loader",
        "input-stall",
        "Load batches in worker processes",
        (
            (
                "sampler=DistributedSampler(images))",
                "sampler=DistributedSampler(images), num_workers={suggested_loader_workers}, "
                "prefetch_factor=4, persistent_workers=True)",
            ),
        ),
    ),
    Fixed(
        "small_buckets",
        "small-gradient-buckets",
        "Remove bucket_cap_mb from DDP",
        (("bucket_cap_mb=0.02", "gradient_as_bucket_view=True"),),
    ),
    Fixed(
        "rank0_logs",
        "rank-zero-work",
        "Take `write_statistics`",
        (("        if rank == 0:\n", "        if rank == 0 and step % 50 == 49:\n"),),
    ),
    Fixed(
        "kth_save",
        "step-outliers",
        "Save checkpoints less often",
        (("step % 4 == 3", "step % 40 == 39"),),
    ),
    Fixed(
        "barrier",
        "extra-barriers",
        "Take barriers out of the loop",
        (("    distributed.barrier()\n    return name", "    return name"),),
    ),
    Fixed(
        "recompute",
        "needless-recompute",
        "Turn activation checkpointing off",
        (("x = checkpoint(block, x, use_reentrant=False)", "x = block(x)"),),
    ),
    Fixed(
        "oversubscribed",
        "too-many-threads",
        "One thread for each core",
        (("torch.set_num_threads(2)\n", ""),),
        {"OMP_NUM_THREADS": "1"},
    ),
    Fixed(
        "no_no_sync",
        "reduction-every-micro-batch",
        "Reduce with the last micro-batch only",
        (
            ("from small", "import contextlib\n\nfrom small"),
            (
                "            loss = model(batch(384, 4)).square().mean()\n            loss.backward()\n",
                "            last_micro_batch = micro_batch == MICRO_BATCHES - 1\n"
                "            with contextlib.nullcontext() if last_micro_batch else model.no_sync():\n"
                "                loss = model(batch(384, 4)).square().mean()\n"
                "                loss.backward()\n",
            ),
        ),
    ),
    Fixed(
        "python_tokens",
        "script-code",
        "Take `encode`",
        (
            ("    for step in range(40):\n", "    encoded = encode(texts)\n    for step in range(40):\n"),
            ("model(encode(texts))", "model(encoded)"),
        ),
    ),
    Fixed(
        "report_rank0",
        "rank-zero-work",
        "Take `send_metrics`",
        (("        if rank == 0:\n", "        if rank == 0 and step % 50 == 49:\n"),),
    ),
    Fixed(
        "durable_rows",
        "script-code",
        "Take `append_row`",
        (
            ("    for _ in range(80):\n", "    for step in range(80):\n"),
            (
                "        append_row(path, model.module)\n    path",
                "        if step % 50 == 49:\n            append_row(path, model.module)\n    path",
            ),
        ),
    ),
    Fixed(
        "trainer_class",
        "script-code",
        "Take `update_metrics`",
        (
            (
                "        self.update_metrics(loss.detach())\n",
                "        self.steps = getattr(self, 'steps', 0) + 1\n"
                "        if self.steps % 50 == 0:\n"
                "            self.update_metrics(loss.detach())\n",
            ),
        ),
    ),
    Fixed(
        "callback_rank1",
        "straggler-rank",
        "Take `on_step_end`",
        (("            one.on", "            if step % 50 == 49:\n                one.on"),),
    ),
    Fixed(
        "library_beside",
        "script-code",
        "Take `flush`",
        (("        fastmetrics.push", "        if step % 50 == 49:\n            fastmetrics.push"),),
    ),
    Fixed(
        "listcomp",
        "script-code",
        "Take `augmented`",
        (
            ("    for step in", "    x = augmented(samples * 16)[:32]\n    for step in"),
            ("        x = augmented(samples * 16)[:32]\n        loss", "        loss"),
        ),
    ),
    Fixed(
        "extra_operators one",
        "straggler-rank",
        "Take `log_histograms`",
        (("        if rank == (1", "        if step % 50 == 49 and rank == (1"),),
    ),
    Fixed("kth_eval", "step-outliers", "Do `evaluate`", (("step % 10 == 9", "step % 100 == 99"),)),
    Fixed(
        "kth_checkpoint_rank0",
        "step-outliers",
        "Save checkpoints less often",
        (("step % 8 == 7", "step % 80 == 79"),),
    ),
    Fixed(
        "mesh_rank3",
        "straggler-rank",
        "Take `prepare`",
        (
            ("    for step in", "    prepared = prepare(distributed.get_rank())\n    for step in"),
            ("model(prepare(distributed.get_rank()))", "model(prepared)"),
        ),
    ),
    Fixed(
        "local_sgd",
        "straggler-rank",
        "Take `augment`",
        (
            ("    for step in", "    augmented = augment(distributed.get_rank())\n    for step in"),
            ("model(augment(distributed.get_rank()))", "model(augmented)"),
        ),
    ),
    Fixed(
        "epochs anew",
        "step-outliers",
        "Keep the loader's workers",
        (("persistent_workers=kept", "persistent_workers=True"),),
    ),
    Fixed(
        "drawn_bar",
        "straggler-rank",
        "Take `draw_progress`",
        (("        if rank == 0:", "        if rank == 0 and step % 50 == 49:"),),
    ),
    Fixed(
        "bucket_sampler",
        "input-stall",
        "Choose samples at less cost",
        (
            ("        for number in range(80):\n            pool.sort", "        pool.sort"),
            (
                "lambda index: (index * 7919 + number) % 4093)\n",
                "lambda index: index * 7919 % 4093)\n        for number in range(80):\n",
            ),
        ),
    ),
    Fixed(
        "best_weights",
        "script-code",
        "Take `keep_best`",
        (("        if loss.item()", "        if step % 50 == 49 and loss.item()"),),
    ),
    Fixed(
        "kinds accumulation",
        "reduction-every-micro-batch",
        "Reduce with the last micro-batch only",
        (
            ("import os\nimport sys", "import contextlib\nimport os\nimport sys"),
            (
                "        for x in inputs:\n            model(x).square().mean().backward()\n",
                "        for number, x in enumerate(inputs):\n"
                "            last_micro_batch = number == len(inputs) - 1\n"
                "            with contextlib.nullcontext() if last_micro_batch else model.no_sync():\n"
                "                model(x).square().mean().backward()\n",
            ),
        ),
    ),
    Fixed(
        "kinds loader",
        "input-stall",
        "Load batches in worker processes",
        (
            (
                "DataLoader(Slow(0.003), BATCH)",
                "DataLoader(Slow(0.003), BATCH, num_workers={suggested_loader_workers}, prefetch_factor=4, "
                "persistent_workers=True)",
            ),
        ),
    ),
    Fixed(
        "kinds unused",
        "small-gradient-buckets",
        "Remove bucket_cap_mb from DDP",
        (("bucket_cap_mb=0.1)", "gradient_as_bucket_view=True)"),),
    ),
)
"""The fixes, as printed for each job."""


@dataclass(frozen=True)
class Measured:
    """What was stated of a fix and what it gave; gains as ``(low, high)`` of a step, all in ms.

    A profiler makes operators longer, and not what a script sleeps or reads: a gain holds in ms, or as a
    share of its step.
    """

    stated_ms: tuple[float, float]
    stated_step_ms: float
    before_ms: float
    after_ms: float
    verdict: str

    @property
    def gain(self) -> float:
        """What the fix gave, as a share of the step."""
        return 1 - self.after_ms / self.before_ms

    @property
    def stated(self) -> tuple[float, float]:
        """What was stated, as shares of the step."""
        low, high = self.stated_ms
        return low / self.stated_step_ms, high / self.stated_step_ms

    @property
    def held(self) -> bool:
        """Whether the gain lies in the range, or within the bound."""
        both = ((self.stated_ms, self.before_ms - self.after_ms), (self.stated, self.gain))
        return any(low <= gain <= high for (low, high), gain in both)


def run(command: Sequence[str], scratch: Path, environ: Mapping[str, str]) -> None:
    """Run a command quietly; raises RuntimeError with what it said if it fails."""
    scratch.mkdir(parents=True, exist_ok=True)
    known = {**os.environ, "SCRATCH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    shutil.rmtree(scratch)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def run_again(command: Sequence[str], scratch: Path, environ: Mapping[str, str]) -> None:
    """Run a command, and once more where it fails: gloo may abort as processes leave."""
    try:
        run(command, scratch, environ)
    except RuntimeError:
        run(command, scratch, environ)


class Pair:
    """A job as it is and with its fix, what was captured and measured of both, and where that is kept."""

    def __init__(self, fixed: Fixed, folder: Path) -> None:
        self.fixed, self._folder = fixed, folder

    def _launch(self, *, mended: bool) -> list[str]:
        folder = self._folder / "scripts" / self.fixed.key if mended else JOBS
        processes = "4" if self.fixed.job.startswith("mesh") else "2"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        return [sys.executable, *launcher, str(folder / self.fixed.script), *self.fixed.job.split()[1:]]

    def write_mended(self, settings: Mapping[str, str]) -> None:
        """Write the script with its fix; raises RuntimeError where the fix does not fit it."""
        script = (JOBS / self.fixed.script).read_text()
        for old, new in self.fixed.edits:
            if script.count(old) != 1:
                raise RuntimeError(f"{old!r} is not once in {self.fixed.script}")
            for name, value in settings.items():
                new = new.replace(f"{{{name}}}", value)
            script = script.replace(old, new)
        target = self._folder / "scripts" / self.fixed.key
        shutil.copytree(JOBS, target, dirs_exist_ok=True)
        (target / self.fixed.script).write_text(script)

    def diagnosis(self, *, mended: bool) -> Diagnosis:
        """The diagnosis of a capture of the job, which is made if it is not there."""
        kept = self._folder / f"{self.fixed.key}{'-mended' if mended else ''}"
        if not kept.exists():
            fresh = self._folder / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            collect = [sys.executable, "-m", "tracedoc", "collect", "-o", str(fresh), "--"]
            environ = self.fixed.environ if mended else {}
            run([*collect, *self._launch(mended=mended)], self._folder / "scratch", environ)
            fresh.rename(kept)
        return tracedoc.diagnose([kept], Options(jobs=1))

    def step_ms(self, number: int, *, mended: bool) -> float:
        """The mean step of a round without the collector, measured if it is not there."""
        kept = self._folder / f"{self.fixed.key}{'-mended' if mended else ''}-{number}.times.json"
        if not kept.exists():
            environ = {**(self.fixed.environ if mended else {}), "STEP_TIMES": str(kept)}
            run_again(self._launch(mended=mended), self._folder / "scratch", environ)
        ended = json.loads(kept.read_text())[STEPS_TO_SETTLE:]
        return (ended[-1] - ended[0]) / 1e6 / (len(ended) - 1)


def stated(fixed: Fixed, diagnosis: Diagnosis) -> tuple[tuple[float, float], float]:
    """What the finding of a job states as the gain of its first fix, and of which step, in ms.

    0 to 0 where no gain is told. Raises RuntimeError where another finding comes first, or without the fix.
    """
    first = next(iter(diagnosis.findings), None)
    if first is None or first.rule_id != fixed.rule:
        raise RuntimeError(f"the first finding is {first.rule_id if first else 'none'}: {diagnosis.summary}")
    fix = next((one for one in first.fixes if one.title.startswith(fixed.title)), None)
    if fix is None:
        raise RuntimeError(f"the fixes are {[one.title for one in first.fixes]}")
    step = diagnosis.budget.step_ms if diagnosis.budget else 0.0
    if fix.predicted is not None:
        return (fix.predicted.gain_ms[0], fix.predicted.gain_ms[2]), fix.predicted.before_ms
    if first.gain is None:
        return (0.0, 0.0), step
    return (first.gain.low_ms, first.gain.high_ms), first.gain.mean_step_ms or step


def measured(pair: Pair, rounds: int) -> Measured:
    """Capture and measure a pair; raises RuntimeError where another cause or fix comes first."""
    before = pair.diagnosis(mended=False)
    gain_ms, step = stated(pair.fixed, before)
    number = before.facts.get("suggested_loader_workers")
    settings = {"suggested_loader_workers": str(number.value)} if number is not None else {}
    pair.write_mended(settings)
    found = compare(before, pair.diagnosis(mended=True))
    times = [[pair.step_ms(number, mended=mended) for mended in (False, True)] for number in range(rounds)]
    plain, mended = (median(one[which] for one in times) for which in (0, 1))
    verdict = found.verdict.word if found.verdict else "none"
    return Measured(gain_ms, step, plain, mended, verdict)


def row(fixed: Fixed, found: Measured) -> str:
    """A line of the table."""
    low, high = found.stated_ms
    shares = [f"{share:.0%}" for share in (*found.stated, found.gain)]
    before, after = found.before_ms, found.after_ms
    return (
        f"| {fixed.job}: {fixed.rule} | {low:.1f} to {high:.1f} ms of {found.stated_step_ms:.1f} "
        f"| {shares[0]} to {shares[1]} | {before - after:.1f} ms, {before:.1f} -> {after:.1f} | {shares[2]} "
        f"| {'held' if found.held else 'broken'} | {found.verdict} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture, fix and measure; return how many of the three goals are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[one.job for one in FIXED])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, default=JOBS.parents[1] / "build" / "predicted")
    asked = parser.parse_args(arguments)
    print("| job and what is found | stated gain | stated | real gain | real | | compare |")
    print("|---|---|---|---|---|---|---|")
    found: list[Measured] = []
    tried = [one for one in FIXED if one.job in asked.names]
    for fixed in tried:
        try:
            found.append(measured(Pair(fixed, asked.into), asked.rounds))
        except RuntimeError as error:
            print(f"| {fixed.job}: {error} | | | | | | |", flush=True)
            continue
        print(row(fixed, found[-1]), flush=True)
    shorter, held = sum(one.gain > 0 for one in found), sum(one.held for one in found)
    decided = sum(one.verdict == "improved" for one in found)
    count = len(tried)
    print(f"{count} fixes: {shorter} make steps shorter, {held} as stated, {decided} decided rightly")
    return (shorter < count) + (held < ENOUGH * count) + (decided < ENOUGH * count)


if __name__ == "__main__":
    sys.exit(main())
