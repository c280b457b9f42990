"""Rules whose faulty step lanes cannot draw: several GPUs in one process, and gloo beside a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from tracedoc.diagnosis import Finding
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder


def step(builder: TraceBuilder, number: int, *, wrapper: str, gloo_mib: int = 0) -> None:
    """Add a step of 100 ms: 60 ms of compute, and nothing on the GPU in the last 40."""
    origin = 100.0 * number
    builder.step(number, origin, origin + 100)
    builder.host(f"{wrapper}.forward", origin + 1, origin + 20)
    builder.backward(origin + 25, origin + 55)
    for part in range(6):
        at = origin + 10 * part
        builder.kernel("nvjet_tst_128x256", at + 0.5, at + 10, launch_ms=at + 0.1)
    if gloo_mib:
        elements = gloo_mib << 18
        builder.host(
            "gloo:all_reduce", origin + 65, origin + 95,
            thread="gloo", category="user_annotation", dims=[[elements]], types=["float"],
        )  # fmt: skip


def findings(path: Path) -> dict[str, Finding]:
    found = diagnose([path], Options(jobs=1, replay=False)).findings
    return {finding.rule_id: finding for finding in found}


def written(tmp_path: Path, *, wrapper: str, gloo_mib: int = 0, second_gpu: bool = False) -> Path:
    builder = TraceBuilder(0, 2 if gloo_mib else 1)
    for number in range(5):
        step(builder, number, wrapper=wrapper, gloo_mib=gloo_mib)
    document = json.loads(builder.to_json())
    if second_gpu:
        events = document["traceEvents"]
        for event in [one for one in events if one.get("cat") == "kernel"]:
            args = event["args"] | {"device": 1, "correlation": event["args"]["correlation"] + 10_000}
            events.append(event | {"pid": 1, "args": args, "dur": event["dur"] / 2})
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(document))
    return path


def test_data_parallel_on_two_gpus_is_found_and_on_one_it_is_not(tmp_path: Path) -> None:
    one = written(tmp_path, wrapper="DataParallel")
    assert "data-parallel-module" not in findings(one)
    two = findings(written(tmp_path, wrapper="DataParallel", second_gpu=True))
    assert two["data-parallel-module"].message == ("One process drives 2 GPUs through torch.nn.DataParallel.")
    assert "data-parallel-module" not in findings(
        written(tmp_path, wrapper="DistributedDataParallel", second_gpu=True)
    )


def test_gradients_over_gloo_cost_what_the_gpu_idles_beside_them(tmp_path: Path) -> None:
    found = findings(written(tmp_path, wrapper="DistributedDataParallel", gloo_mib=64))["gloo-on-gpu"]
    assert found.gain is not None
    assert round(found.gain.high_ms, 3) == 30.0
    assert "1 time a step; for 30 ms of 100 ms" in found.message


def test_small_messages_over_gloo_are_control(tmp_path: Path) -> None:
    assert "gloo-on-gpu" not in findings(written(tmp_path, wrapper="DistributedDataParallel", gloo_mib=0))
