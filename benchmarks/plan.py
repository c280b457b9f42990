"""Hold what ``tracedoc plan`` predicts against runs that others published: ``make bench-plan``.

``published_rows.json`` holds the runs with their sources. The constants of ``planner/timing.py`` and the
shares in ``hardware.toml`` were fitted to the rows of llm-foundry, that of slow links to fms-fsdp, and those
of layouts and of Blackwell to NeMo's, Megatron-Bridge's, DGX Cloud's Llama and torchtitan's asynchronous
tensor parallelism; the others were left out, as their sources say.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tracedoc.planner.candidates import may_fit
from tracedoc.planner.families import read_model_config
from tracedoc.planner.hardware import Cluster, find_gpu, find_link, link_of, network_of
from tracedoc.planner.layouts import Layout, data_parallel, in_framework
from tracedoc.planner.memory import peak_memory
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.timing import Step, predict

ROWS = Path(__file__).with_name("published_rows.json")
_OF_TRAINING = (
    "precision", "loss", "accumulation", "compiled", "fp8", "optimizer", "optimizer_in_backward",
    "lora_rank", "base_bits", "capacity", "recomputed",
)  # fmt: skip

_WAYS = ("tensor", "pipeline", "context", "expert", "chunks")


@dataclass(frozen=True, slots=True)
class Row:
    """One published run beside what is predicted for it; times in milliseconds of one micro-batch."""

    published: dict[str, Any]
    question: Question
    how: str
    step: Step
    measured_ms: float
    may_fit: bool
    predicted_gib: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.step.expected_ms / self.question.training.accumulation / self.measured_ms - 1

    @property
    def in_range(self) -> bool:
        """Whether the predicted range holds the measured step."""
        rounds = self.question.training.accumulation
        return self.step.best_ms <= rounds * self.measured_ms <= self.step.worst_ms

    @property
    def refused(self) -> bool:
        """Whether the plan says of a run that ran that it does not fit."""
        return not self.may_fit

    @property
    def peak_error(self) -> float | None:
        """Predicted over published peak, less one; ``None`` where none is published."""
        peak = self.published.get("peak_gib")
        return self.predicted_gib / peak - 1 if peak else None


def rows() -> Iterator[Row]:
    """Yield every published run with its prediction."""
    document = json.loads(ROWS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        models = {name: _shape(Path(folder), keys) for name, keys in document["models"].items()}
    for row in document["rows"]:
        yield _predicted(document["defaults"] | row, models[row["model"]])


def _shape(folder: Path, keys: dict[str, Any]) -> Any:
    file = folder / "config.json"
    file.write_text(json.dumps(keys))
    return read_model_config(file)


def _predicted(row: dict[str, Any], model: Any) -> Row:
    gpu = find_gpu(row["gpu"])
    nodes = row.get("nodes", max(1, row["gpus"] // 8))
    training = Training(
        sequence=row["seq"],
        micro_batch=row["micro_batch"],
        checkpointing=row["checkpointing"],
        lora_targets=tuple(row.get("lora_targets", ())),
        **{name: row[name] for name in _OF_TRAINING if name in row},
    )
    memory_bytes = row["memory_gb"] * 1e9 if "memory_gb" in row else gpu.memory_bytes
    question = Question(model, training, row["gpus"], nodes, memory_bytes)
    across = None
    if nodes > 1:
        named = find_link(row["network"], across=True) if "network" in row else None
        across = named or network_of(gpu.network, row["gpus"] // nodes)
    cluster = Cluster(gpu, link_of(gpu), across)
    layout = _layout(row, question)
    asked = in_framework(question, layout)
    step = predict(asked, layout, cluster)
    memory = peak_memory(asked, layout)
    # Data-parallel groups see other sequences; the rate is that of one GPU.
    tokens = training.tokens * layout.data / row["gpus"]
    assert step is not None
    measured = tokens / row["tokens_per_second"] * 1e3
    # What PyTorch reserved has no context in it.
    allocated = (memory.total - memory.context) / 2**30
    how = layout.title if "layout" in row else row["strategy"]
    return Row(row, question, how, step, measured, may_fit(memory, memory_bytes), allocated)


def _layout(row: dict[str, Any], question: Question) -> Layout:
    if "layout" not in row:
        return data_parallel(question, row["strategy"])
    split = {name: row["layout"].get(name, 1) for name in _WAYS}
    data = row["gpus"] // (split["tensor"] * split["pipeline"] * split["context"])
    micro_batch, rounds = row["micro_batch"], row["accumulation"]
    overlaps = tuple(row["layout"]["overlaps"]) if "overlaps" in row["layout"] else None
    return Layout(
        row["layout"]["family"],
        data,
        **split,
        expert_tensor=row["layout"].get("expert_tensor", 0),
        micro_batch=micro_batch,
        rounds=rounds,
        overlaps=overlaps,
        flex=row["layout"].get("flex", False),
    )


def summary(some: Iterable[Row]) -> dict[str, float]:
    """Return how well the predictions hold, errors as shares."""
    chosen = list(some)
    errors = [abs(row.error) for row in chosen]
    peaks = [abs(row.peak_error) for row in chosen if row.peak_error is not None]
    return {
        "rows": len(chosen),
        "median": median(errors),
        "within 15 %": sum(error <= 0.15 for error in errors) / len(errors),
        "in range": sum(row.in_range for row in chosen) / len(chosen),
        "refused": sum(row.refused for row in chosen),
        "peaks": len(peaks),
        "peaks within 10 %": sum(error <= 0.10 for error in peaks) / len(peaks) if peaks else float("nan"),
    }


def main(arguments: list[str]) -> None:
    """Print the errors by source, and with ``--rows`` of every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every run")
    given = parser.parse_args(arguments)
    everything = list(rows())
    print(f"{'source':<32}  rows  median  within 15 %  in range  refused  peaks  peaks within 10 %")
    for source in dict.fromkeys(row.published["source"] for row in everything):
        found = summary(row for row in everything if row.published["source"] == source)
        peaks = f"{found['peaks within 10 %']:>17.0%}" if found["peaks"] else f"{'-':>17}"
        print(
            f"{source:<32}{found['rows']:>6}{found['median']:>8.1%}{found['within 15 %']:>13.0%}"
            f"{found['in range']:>10.0%}{found['refused']:>9}{found['peaks']:>7}  {peaks}"
        )
    if given.rows:
        print("\nerror  measured ms  predicted ms  peak  run")
        for row in everything:
            p = row.published
            predicted = row.step.expected_ms / row.question.training.accumulation
            peak = f"{row.peak_error:+.0%}" if row.peak_error is not None else ""
            kind = f"{p['checkpointing']} {'compiled ' * p.get('compiled', 0)}{'fp8' * p.get('fp8', 0)}"
            what = f"{p['model']} {p['gpus']}x {p['gpu']} {p['micro_batch']}x{p['seq']} {row.how} {kind}"
            print(f"{row.error:>+5.0%}{row.measured_ms:>13.0f}{predicted:>14.0f}  {peak:>4}  {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
