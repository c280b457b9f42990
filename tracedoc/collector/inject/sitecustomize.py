"""Wait, in every Python process of a collected job, for torch's optimizers to be imported.

Python imports this file at start because its folder comes first on PYTHONPATH. It imports nothing of torch
itself, hands over to the sitecustomize that it hides, and never raises on its own account.
"""

from __future__ import annotations

# Every Python process of the job pays for what is imported here.
# ruff: noqa: SIM105
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_here = os.path.dirname(os.path.abspath(__file__))


def _shadowed() -> None:
    """Run the sitecustomize that would have been found without this one, as Python would have."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _here]
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find("sitecustomize", None) if find else None
        if spec is not None and spec.loader is not None:
            # importlib.util has this too, and takes milliseconds to import in every process.
            module = sys.modules["_frozen_importlib"].module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            return


class _Watch:
    """A finder that finds nothing itself, and calls the hook when a watched module has been executed."""

    watched: tuple[str, ...] = (
        "torch.optim.optimizer",
        "torch._dynamo.decorators",
        "torch.utils.data._utils.worker",
        "torch.distributed.elastic.multiprocessing.errors",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.pipe.engine",
    )

    def __init__(self) -> None:
        with open(os.path.join(_here, "watched"), encoding="utf-8") as file:
            self.watched += tuple(file.read().split())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.watched:
            return None
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find else None
                if spec is not None:
                    _call_after(spec)
                    return spec
        except Exception:
            pass
        return None


def _call_after(spec: Any) -> None:
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        try:
            _hook().imported(module, _here)
        except Exception as error:
            _note(error)

    spec.loader.exec_module = exec_module


def _note(error: Exception) -> None:
    """Record for the launcher why there is no hook: the job's Python may be too old for it."""
    try:
        with open(os.path.join(_here, "failed"), "w", encoding="utf-8") as file:
            file.write("Python " + sys.version.split()[0] + ": " + type(error).__name__ + ": " + str(error))
    except OSError:
        pass


def _hook() -> Any:
    """Return tracedoc's hook, from where the launcher has it; the job's own Python need not have it."""
    import importlib
    import importlib.util

    if "tracedoc" not in sys.modules:
        with open(os.path.join(_here, "package"), encoding="utf-8") as file:
            package = file.read()
        init = os.path.join(package, "__init__.py")
        if os.path.exists(init):
            spec = importlib.util.spec_from_file_location(
                "tracedoc", init, submodule_search_locations=[package]
            )
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules["tracedoc"] = module
            spec.loader.exec_module(module)  # type: ignore[union-attr]
    return importlib.import_module("tracedoc.collector.hook")


try:
    sys.meta_path.insert(0, _Watch())
except Exception:
    pass
_shadowed()
