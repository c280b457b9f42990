"""Fixes of PyTorch's own wrappers run as they are printed, in two processes with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_answers import _filled, _fixes, _language

pytest.importorskip("torch")

RUN = {
    "ddp": "",
    "fsdp2": "",
    "pytorch": "ZeroRedundancyOptimizer|clip_grad_norm_|fused=True|running_loss|ReduceOp|DDP(model",
    "any": "gc.freeze|DistributedSampler",
}
"""Of which frameworks fixes are pasted, and what they must hold; "" for all of them. FSDP1 needs a GPU."""

NEEDS_MORE = (
    "bf16_compress_hook",
    "self.mask",
    '"cuda"',
    "HYBRID_SHARD",
    "torch.compile",
    "persistent_workers",
)
"""Parts of fixes that need a GPU, another script, more processes, or seconds."""


def chosen() -> list[list[str]]:
    found: dict[tuple[str, str], str] = {}
    for rule, fix in _fixes():
        (code,) = _filled(rule, fix.change)
        wanted = RUN.get(fix.framework) if _language(fix, code) == "python" else None
        if wanted is None or (wanted and not any(one in code for one in wanted.split("|"))):
            continue
        if not any(one in code for one in NEEDS_MORE):
            found.setdefault((fix.framework, code), rule.id)
    return [[rule, framework, code] for (framework, code), rule in found.items()]


@pytest.mark.soak
def test_fixes_run_as_they_are_printed(tmp_path: Path) -> None:
    fixes = chosen()
    assert len(fixes) > 20
    (tmp_path / "fixes.json").write_text(json.dumps(fixes), encoding="utf-8")
    job = Path(__file__).with_name("pasted_fixes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, job, tmp_path / "fixes.json", str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Both ran all of them, and none failed.
    assert [json.loads(out.splitlines()[-1]) if out else err for out, err in said] == [[], []]
