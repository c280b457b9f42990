"""A rank of a trial: its steps are timed without a profiler, and the change is made as the job runs.

Every part of a change leaves a file in the trial's folder that says what came of it, from whichever process
met it.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tracedoc.collector.environment import describe_memory
from tracedoc.collector.frameworks import find_live, largest_root
from tracedoc.collector.options import Options
from tracedoc.collector.probe import FSDP2_HOMES, loaded, plain, probe
from tracedoc.collector.steps import StepClock, StepLogWriter
from tracedoc.collector.trial.changes import (
    DDP_HOME,
    DEEPSPEED_HOME,
    LAUNCH_HOME,
    MODEL,
    STEP,
    TORCH,
    Call,
    Change,
    read_change,
)
from tracedoc.run.manifest import COMPLETE, NOTHING, PART_SUFFIX, PARTIAL, WAITING, write_json

MOST_LOSSES = 4096
"""Losses kept of a trial, those of micro-batches counted apart."""
NORM_STEPS = 3
"""Steps whose gradients are measured, during the warm-up: it takes time."""

MADE, SAME, FAILED = "made", "same", "failed"
"""What came of a part: it was made, the job has it already, or it could not be made."""


def outcome_file(folder: Path, outcome: str, part: str) -> Path:
    """Where a process notes what came of a part of the change."""
    short = "".join(letter if letter.isalnum() else "-" for letter in part)[:80]
    return folder / f"{outcome}.{short}.part"


class _Depth(threading.local):
    """How deep a thread is in calls that are changed: FSDP wraps inner modules by calling itself."""

    depth = 0


class Changes:
    """Makes the changes of a trial in this process, each as soon as what it is about has been imported."""

    def __init__(self, options: Options) -> None:
        self._folder = Path(options.folder)
        self._changes: list[Change] = [read_change(text) for text in options.changes]
        self._depth = _Depth()
        self._ran: set[str] = set()
        self._period = self._forwards = 0

    def imported(self, module: ModuleType) -> None:
        """Change what a module holds that has just been imported."""
        name = module.__name__
        for change in self._changes:
            for call in change.calls:
                if name in call.home.modules:
                    self._guarded(call.target, functools.partial(self._patch, module, call))
            if change.no_sync and name in DDP_HOME.modules:
                self._guarded("no_sync", lambda: self._reduce_once(module.DistributedDataParallel))
            if change.deepspeed and name in DEEPSPEED_HOME.modules:
                self._merge_deepspeed(module, change.deepspeed)
            if change.launch and name in LAUNCH_HOME.modules:
                self._merge_launch(module, change.launch)
            if name in DDP_HOME.modules and any(code.when == MODEL for code in change.code):
                self._guarded(DDP_HOME.name, functools.partial(self._run_once_wrapped, module))
        if name == "torch":
            self._run_code(TORCH, {})

    def first_step(self) -> None:
        """Change what is there once a step is done: the model, threads."""
        if any(change.compile is not None or change.code for change in self._changes):
            self._model_is_there(largest_root(find_live()))
        for change in self._changes:
            threads = change.environ.get("OMP_NUM_THREADS", "")
            if threads.isdecimal():
                # The script may have set a number of its own meanwhile.
                sys.modules["torch"].set_num_threads(int(threads))

    def step(self, number: int) -> None:
        """Run what is to run after every step; ``number`` counts from 1."""
        self._run_code(STEP, {"step": number})
        if self._forwards:
            if self._forwards < self._period:
                self._note(FAILED, "no_sync", "steps have different numbers of micro-batches")
            self._period, self._forwards = self._forwards, 0

    # Calls.

    def _patch(self, module: ModuleType, call: Call) -> None:
        if call.target == "to":
            self._copy_ahead(module.Tensor)
            return
        found = getattr(module, call.home.name)
        if call.target == "TrainingArguments":
            self._set_after(found, call)
        elif isinstance(found, type):
            found.__init__ = self._changed(found.__init__, call, 1)  # type: ignore[misc]
        else:
            setattr(module, call.home.name, self._changed(found, call, 0))

    def _changed(self, usual: Callable[..., Any], call: Call, place: int) -> Callable[..., Any]:
        """The function with other keywords; ``place`` is where the model stands among its arguments."""
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def changed(*args: Any, **kwargs: Any) -> Any:
            inner, self._depth.depth = self._depth.depth > 0, self._depth.depth + 1
            try:
                given = self._guarded(
                    call.target, lambda: self._bound(signature, call, place, inner, args, kwargs)
                )
                return usual(*args, **kwargs) if given is None else usual(*given.args, **given.kwargs)
            finally:
                self._depth.depth -= 1

        return changed

    def _bound(
        self,
        signature: inspect.Signature,
        call: Call,
        place: int,
        inner: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        model = args[place] if len(args) > place else kwargs.get("module")
        names = self._names(call.before, {"model": model})
        differs = False
        for name, source in call.keywords:
            if inner and "model" in source:
                continue
            parameter = signature.parameters.get(name)
            rest = next((p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD), None)
            if parameter is None and rest is None:
                raise LookupError(f"{call.target} of this version has no {name}")
            held = bound.arguments if parameter is not None else bound.arguments.setdefault(rest or "", {})
            default = parameter.default if parameter is not None else None
            value = eval(source, names) if source else default
            differs = differs or _is_other(held.get(name, default), value)
            held[name] = value
        self._note(MADE if differs else SAME, call.target)
        return bound

    def _set_after(self, arguments: type, call: Call) -> None:
        """Set fields once they are known: command lines and subclasses fill them in ways of their own."""
        usual: Callable[..., None] = arguments.__post_init__  # type: ignore[attr-defined]
        names = self._names(call.before, {})

        @functools.wraps(usual)
        def __post_init__(owner: Any, *rest: Any) -> None:  # noqa: N807
            def set_fields() -> None:
                differs = False
                for name, source in call.keywords:
                    if not hasattr(owner, name):
                        raise LookupError(f"{call.target} of this version has no {name}")
                    before, value = getattr(owner, name), eval(source, names)
                    value = _merged(before, value) if isinstance(before, dict) else value
                    differs = differs or _is_other(before, value)
                    setattr(owner, name, value)
                self._note(MADE if differs else SAME, call.target)

            self._guarded(call.target, set_fields)
            usual(owner, *rest)

        arguments.__post_init__ = __post_init__  # type: ignore[attr-defined]

    def _copy_ahead(self, tensor: Any) -> None:
        for name in ("to", "cuda"):
            usual = getattr(tensor, name)

            @functools.wraps(usual)
            def copied(one: Any, *args: Any, usual: Any = usual, **kwargs: Any) -> Any:
                if not one.is_cuda and one.is_pinned():
                    kwargs["non_blocking"] = True
                    self._note(MADE, "to")
                return usual(one, *args, **kwargs)

            setattr(tensor, name, copied)

    def _reduce_once(self, ddp: Any) -> None:
        """Let only the last of a step's micro-batches reduce; how many there are, the step before shows."""
        usual = ddp.forward

        @functools.wraps(usual)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and sys.modules["torch"].is_grad_enabled():
                self._forwards += 1
                if self._period > 1:
                    model.require_backward_grad_sync = self._forwards >= self._period
                    self._note(MADE, "no_sync")
            return usual(model, *args, **kwargs)

        ddp.forward = forward

    # Configurations.

    def _merge_deepspeed(self, module: ModuleType, change: Mapping[str, Any]) -> None:
        import json

        usual = module.DeepSpeedConfig.__init__

        @functools.wraps(usual)
        def __init__(owner: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            def changed() -> Any:
                own = (
                    json.loads(Path(config).read_text(encoding="utf-8"))
                    if isinstance(config, str)
                    else config
                )
                merged = _merged(own, change)
                self._note(MADE if merged != own else SAME, "DeepSpeed configuration")
                return merged

            merged = self._guarded("DeepSpeed configuration", changed)
            usual(owner, config if merged is None else merged, *args, **kwargs)

        module.DeepSpeedConfig.__init__ = __init__

    def _merge_launch(self, module: ModuleType, change: Mapping[str, Any]) -> None:
        usual = module.load_config_from_file

        @functools.wraps(usual)
        def load_config_from_file(*args: Any, **kwargs: Any) -> Any:
            config = usual(*args, **kwargs)

            def merge() -> None:
                for name, values in change.items():
                    setattr(config, name, _merged(getattr(config, name, None) or {}, values))
                self._note(MADE, "accelerate configuration")

            self._guarded("accelerate configuration", merge)
            return config

        module.load_config_from_file = load_config_from_file  # type: ignore[attr-defined]

    # Code.

    def _run_once_wrapped(self, module: ModuleType) -> None:
        """Have code run as soon as DDP is there: hooks are registered before the first backward pass."""
        usual = module.DistributedDataParallel.__init__

        @functools.wraps(usual)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            usual(model, *args, **kwargs)
            self._run_code(MODEL, {"model": model})

        module.DistributedDataParallel.__init__ = __init__

    def _model_is_there(self, model: Any) -> None:
        self._run_code(MODEL, {"model": model})
        for change in self._changes:
            if change.compile is not None:
                keywords = eval(f"dict({change.compile})")
                compiled = _units(model) if change.compiles_units else [model]
                if self._guarded("torch.compile", functools.partial(self._compile, compiled, keywords)):
                    self._note(MADE, "torch.compile")

    def _compile(self, modules: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        for module in modules:
            module.compile(**keywords)
        return bool(modules)

    def _run_code(self, when: str, given: Mapping[str, Any]) -> None:
        for change in self._changes:
            for code in change.code:
                if code.when != when or (when != STEP and code.source in self._ran):
                    continue
                self._ran.add(code.source)

                def run(source: str = code.source, part: str = code.part) -> None:
                    self._names(source, given)
                    self._note(MADE, part)

                self._guarded(code.part, run)

    def _names(self, source: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What changes may name, after ``source`` has run."""
        torch = sys.modules["torch"]
        names: dict[str, Any] = {"torch": torch, "gc": gc, "os": os, "local_rank": _local_rank()}
        names |= given
        free = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        home = loaded("torch.distributed.fsdp")
        if home is not None:
            names |= {name: value for name, value in vars(home).items() if not name.startswith("_")} | names
        if "rank" in free or "world_size" in free:
            names |= {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
        exec(source, names)
        return names

    # What came of it.

    def _guarded(self, part: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returns; ``None`` where it failed, which is noted: the job goes on as it is."""
        try:
            return make()
        except Exception as error:
            self._note(FAILED, part, f"{type(error).__name__}: {error}")
            return None

    def _note(self, outcome: str, part: str, why: str = "") -> None:
        path = outcome_file(self._folder, outcome, part)
        if str(path) not in self._ran:
            self._ran.add(str(path))
            probe(path.write_text, why or part)


def _units(model: Any) -> list[Any]:
    """The modules within a model that ``fully_shard`` made units of."""
    names = {name for path, name in FSDP2_HOMES if (home := loaded(path)) and hasattr(home, name)}
    inner = (module for module in model.modules() if module is not model)
    return [one for one in inner if names & {base.__name__ for base in type(one).__mro__}]


def _is_other(before: Any, value: Any) -> bool:
    return type(before) is not type(value) or bool(before != value)


def _merged(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested mappings with those of ``change`` put in."""
    merged = dict(before)
    for name, value in change.items():
        own = merged.get(name)
        merged[name] = (
            _merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


class Losses:
    """The losses that backward passes began with and norms of gradients, step by step."""

    def __init__(self) -> None:
        self._losses: list[list[Any]] = [[]]
        self._norms: list[Any] = []
        self._count = 0

    def watch(self, autograd: Any) -> None:
        """Keep the loss of every backward pass from now on."""
        usual = autograd.backward

        @functools.wraps(usual)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            one = tensors if hasattr(tensors, "numel") else tensors[0] if len(tensors) == 1 else None
            if self._count < MOST_LOSSES and one is not None and probe(one.numel) == 1:
                self._losses[-1].append(one.detach())
                self._count += 1
            return usual(tensors, *args, **kwargs)

        autograd.backward = backward

    def step(self, stepped: Any) -> None:
        """Note that an optimizer stepped; in the first steps the norm of its gradients is taken."""
        self._losses.append([])
        if len(self._norms) < NORM_STEPS:
            self._norms.append(probe(_squared_norm, stepped))

    def describe(self) -> dict[str, object]:
        """The losses of each step, and the squared norms of this rank's gradients; ``None`` is not known."""
        losses = [[plain(probe(float, one)) for one in step] for step in self._losses]
        return {"losses": losses, "squared_norms": [plain(probe(float, norm)) for norm in self._norms]}


def _squared_norm(optimizer: Any) -> Any:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    local = [probe(lambda one: one.to_local(), one) if hasattr(one, "to_local") else one for one in gradients]
    return sum(one.detach().float().square().sum() for one in local) if local else None


class TrialSession:
    """A rank that is timed for so many steps, and then leaves; it takes the place of a capture."""

    def __init__(
        self, options: Options, identity: dict[str, Any], clock: StepClock, changes: Changes, losses: Losses
    ) -> None:
        self.part: dict[str, Any] = {"schema": 1, "part": "rank", **identity, "state": WAITING, "reason": ""}
        self._folder, self._stem = Path(options.folder), str(identity["stem"])
        self._clock, self._changes, self._losses = clock, changes, losses
        self._leave_at = options.wait + options.active
        self._log: StepLogWriter | None = StepLogWriter(
            self._folder / f"{self._stem}.steps", identity["rank"]
        )
        self._count = 0

    def first_step(self, stepped: object) -> None:
        """Begin: the step that just ended shows that the process is a rank."""
        self._count = 1
        self.part["clock"] = self._clock.name
        self._losses.step(stepped)
        self._changes.first_step()
        self._changes.step(1)
        self._write()
        if self._log is not None:
            self._log.step(time.time_ns())

    def step(self, stepped: object) -> bool:
        """Count a step that just ended; return whether the job is to end here."""
        self._count += 1
        self._losses.step(stepped)
        self._changes.step(self._count)
        if self._log is not None:
            self._log.step(time.time_ns())
        if self._count < self._leave_at:
            return False
        self._finish(COMPLETE, "")
        return True

    def end(self, reason: str) -> None:
        """Finish in an orderly end of the process."""
        if self.part["state"] == WAITING:
            self._finish(PARTIAL, f"{reason} after {self._count} steps")

    def fail(self, error: BaseException) -> None:
        """Give up after an error of ours."""
        self._finish(NOTHING, f"the trial failed: {type(error).__name__}: {error}")

    def give_way(self) -> None:
        """Nothing is in the way of the job's own profiler."""

    def forked(self) -> None:
        """Drop in a forked child what belongs to the parent."""
        self._log = None

    def _finish(self, state: str, reason: str) -> None:
        if self._log is not None:
            self._log.close()
        self.part.update(self._losses.describe(), state=state, reason=reason, memory=probe(describe_memory))
        self._write()

    def _write(self) -> None:
        write_json(self._folder / f"{self._stem}{PART_SUFFIX}", dict(self.part, steps={"total": self._count}))
