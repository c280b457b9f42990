"""Read a Hugging Face ``config.json``: the shape of the model, and its parameters counted exactly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tracedoc.errors import InputError, did_you_mean
from tracedoc.planner.families import decoders, encoders
from tracedoc.planner.families.config import Config
from tracedoc.planner.shape import ModelShape

LARGEST_CONFIG_BYTES = 4 << 20

FAMILIES: dict[str, Callable[[Config, str], ModelShape]] = {
    kind: read for family in (decoders, encoders) for read, kinds in family.READERS for kind in kinds
}
"""How to read each ``model_type``."""


def _cached(name: str) -> Path:
    """The newest ``config.json`` of a model of the hub that was downloaded to this machine."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    files = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    found = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if found is None:
        raise InputError(f"{name} is not in {hub}", f"download its file: hf download {name} config.json")
    return found


def read_model_config(path: str | Path) -> ModelShape:
    """Return the shape that a ``config.json`` describes; a folder is searched for one.

    A name as ``meta-llama/Llama-3.1-8B`` is searched for in Hugging Face's cache on this machine. Raises
    :class:`InputError` for what is no such file, and for a ``model_type`` that is not known here.
    """
    file = Path(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not file.exists() and file.suffix != ".json":
        file = _cached(str(path))
    if file.is_dir():
        file = file / "config.json"
    try:
        if file.stat().st_size > LARGEST_CONFIG_BYTES:
            raise InputError(f"{file} is too large for a config.json", "give the config, not the weights")
        keys = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", "give a config.json on disk, or --params"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", "give the model's config.json") from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise InputError(
            f"{file} names no model_type",
            'give the config.json of a Hugging Face model; any other by its script: --script "train.py"',
        )
    inner = keys.get("text_config")
    if isinstance(inner, dict) and keys["model_type"] not in FAMILIES:
        keys = {**keys, **inner}  # of a model that sees, what reads
    kind = keys["model_type"]
    if kind not in FAMILIES:
        raise InputError(
            f"{file}: models of type {kind!r} are not known{did_you_mean(kind, FAMILIES)}",
            f'--script "train.py" takes any model that trains; known: {", ".join(sorted(FAMILIES))}',
        )
    config = Config(str(file), keys)
    shape = FAMILIES[kind](config, kind)
    window, windowed = config.windows(kind)
    name = config.text("_name_or_path").rsplit("/", 1)[-1] or kind
    return replace(shape, name=name, window=window, windowed=windowed)
