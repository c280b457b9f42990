"""Read a project's own settings: ``tracedoc.toml``, or ``[tool.tracedoc]`` in ``pyproject.toml``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracedoc.errors import InputError, did_you_mean

LEVELS = ("critical", "warning", "note")
KEYS = ("select", "ignore", "fail-on", "budgets")


@dataclass(frozen=True, slots=True)
class Config:
    """What a project chose for ``tracedoc diagnose``; ``source`` is the file, empty if there is none."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str | None = None
    budgets: tuple[str, ...] = ()
    source: str = ""


def find_config(folder: Path) -> Config:
    """Return the settings that hold in a folder: those of the nearest file, from there upwards.

    ``tracedoc.toml`` goes before a ``pyproject.toml`` beside it; one without ``[tool.tracedoc]`` is passed
    over. Raises :class:`InputError` for an unknown key, a wrong value, or what is not TOML.
    """
    for place in (folder, *folder.parents):
        own = place / "tracedoc.toml"
        if os.path.isfile(own):  # unlike Path.is_file, false where it may not be looked for
            return _config(_parsed(own), own)
        project = place / "pyproject.toml"
        # Somebody else's broken file is none of our business.
        if os.path.isfile(project) and b"tool.tracedoc" in _read(project):
            table = _parsed(project).get("tool", {}).get("tracedoc")
            if isinstance(table, dict):
                return _config(table, project)
    return Config()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", "make it readable, or remove it"
        ) from error


def _parsed(file: Path) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.toml.decode(_read(file), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}", "correct it, or remove it") from error


def _config(table: dict[str, Any], file: Path) -> Config:
    for key in table:
        if key not in KEYS:
            raise InputError(
                f"{file}: no setting is called {key!r}{did_you_mean(key, KEYS)}",
                f"settings are {', '.join(KEYS)}",
            )
    level = table.get("fail-on")
    if level is not None and level not in LEVELS:
        raise InputError(f"{file}: fail-on is {level!r}", f"use one of {', '.join(LEVELS)}")
    return Config(
        select=_texts(table, "select", file),
        ignore=_texts(table, "ignore", file),
        fail_on=level,
        budgets=_texts(table, "budgets", file),
        source=str(file),
    )


def _texts(table: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    texts = table.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        what, example = ("budgets", "step_ms <= 420") if key == "budgets" else ("rules", "pipeline")
        raise InputError(f"{file}: {key} is no list of {what}", f'write it as {key} = ["{example}"]')
    return tuple(texts)
