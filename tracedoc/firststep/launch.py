"""Start the process that estimates a script's first step, and read its answer."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tracedoc.errors import InputError

SECONDS = 300.0
"""How long a script may take to its first update; fake tensors take seconds for a model of any size."""

INSTEAD = "give the model's size instead, as --params 7B, or its --model config.json"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a script's first update was on one GPU. Bytes and FLOPs are those of one backward pass.

    ``batch`` is the shape of the first tensor that the model was given, ``whole_numbers`` whether that holds
    ids. ``autocast`` and ``sharded`` are "bf16", "fp16" or "": what autocast and FSDP compute in; ``dtype``
    is that of the trained parameters. ``states`` is numbers of optimizer state for each parameter, ``rounds``
    the backward passes of an update. Of the ``blocks``, at ``path`` in ``model``, all forward passes together
    left ``block_bytes`` for backward, results included; ``input_bytes`` and ``output_bytes`` went in and came
    out. Before the update ``activation_bytes`` is the most that was live beside parameters and gradients,
    ``peak_bytes`` the most of all together.
    """

    model: str
    path: str
    parameters: int
    trained: int
    dtype: str
    autocast: str
    sharded: str
    compiled: bool
    optimizer: str
    states: float
    rounds: int
    blocks: int
    block: str
    block_parameters: int
    block_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    peak_bytes: int
    matmul_flops: int
    attention_flops: int
    batch: tuple[int, ...] = ()
    whole_numbers: bool = False


def first_step(command: str) -> FirstStep:
    """The first update of ``"train.py --its options"``, run under fake tensors.

    Raises :class:`InputError` where there is no such script, no torch, or no update that can be followed.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--script {command!r}: {error}", 'as in: --script "train.py --lr 1e-4"') from None
    if words[:1] and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or not words[0].endswith(".py"):
        raise InputError(f"--script {command!r} names no Python file", 'as in: --script "train.py --lr 1e-4"')
    if not os.path.isfile(words[0]):
        raise InputError(f"{words[0]} does not exist", "give the script that trains, and its options")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tracedoc.firststep.child", *words],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{words[0]} came to no update in {SECONDS:g} s under fake tensors", INSTEAD
        ) from None
    return _read(words[0], ended.stdout, ended.returncode, ended.stderr)


def _environment() -> dict[str, str]:
    """Return the environment of a single rank that sees no GPU, asks no hub, and reports to nobody."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{path}{os.pathsep}{package}" if path else package,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRACEDOC_PLAN": "1",
        **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ""),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
        **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "TORCHDYNAMO_DISABLE"), "1"),
        **{"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"},
    }


def _read(script: str, answer: bytes, code: int, errors: bytes) -> FirstStep:
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
        raise InputError(f"the first step of {script} cannot be followed: {last[0][:300]}", INSTEAD) from None
    if "error" in found:
        if found.get("no_torch"):
            raise InputError(
                f"--script needs torch: {found['error']}",
                "install tracedoc in the environment that trains, or give --params",
            )
        raise InputError(
            f"the first step of {script} cannot be followed: {found['error']}", _hint(found["error"])
        )
    known = {field.name for field in fields(FirstStep)}
    values = {name: value for name, value in found.items() if name in known}
    return FirstStep(**{**values, "batch": tuple(found.get("batch", ()))})


def _hint(error: str) -> str:
    if error.startswith("it ") and "update" not in error:
        return f'skip that where os.environ.get("TRACEDOC_PLAN") is set, or {INSTEAD}'
    return INSTEAD
