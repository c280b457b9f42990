"""The border with the user's process: watch torch's optimizers, and never let an error of ours out."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tracedoc.collector.loading import watch_loop
from tracedoc.collector.nccl import ask_nccl
from tracedoc.collector.options import CONFIG_NAME, Options, level_of, read_options
from tracedoc.collector.recorder import ForeignProfilers
from tracedoc.collector.session import Session
from tracedoc.collector.steps import Listener, StepClock, count_outermost
from tracedoc.run.manifest import MANIFEST_SCHEMA, PART_SUFFIX, is_running, rank_stem, write_json

if TYPE_CHECKING:
    from tracedoc.collector.trial.rank import Changes, Losses, TrialSession

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


class Hook:
    """What one process does about being collected: nothing, until an optimizer of it steps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._clock = StepClock()
        self._listener = Listener(self.stepped)
        self._session: Session | TrialSession | None = None
        self._changes: Changes | None = None
        self._losses: Losses | None = None
        if options.trial:
            from tracedoc.collector.trial.rank import Changes, Losses

            self._changes, self._losses = Changes(options), Losses()
        self._foreign: ForeignProfilers | None = None
        self._off = False

    def change(self, module: ModuleType) -> None:
        """Make the changes of a trial to a module that was just imported; nothing in a capture."""
        if self._changes is not None:
            self._changes.imported(module)

    def watch_optimizers(self, module: ModuleType) -> None:
        """Count the steps of every optimizer class that will be used, where ``Optimizer`` patches it."""
        optimizer = module.Optimizer
        patch = getattr(optimizer, "profile_hook_step", None)
        if patch is None:
            # Without that point the count runs inside the step's own record, which is good enough.
            module.register_optimizer_step_post_hook(lambda stepped, args, kwargs: self.stepped(stepped))
        else:
            optimizer.profile_hook_step = staticmethod(
                lambda step: count_outermost(patch(step), self._listener)
            )
        if self._losses is not None:
            self._losses.watch(sys.modules["torch.autograd"])
        self._foreign = ForeignProfilers(sys.modules["torch"], self._give_way)
        self._foreign.watch()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def watch_engine(self, module: ModuleType) -> None:
        """Count the steps of DeepSpeed's engine; the optimizers inside it then count as part of it."""
        if hasattr(module, "DeepSpeedEngine"):
            engine = module.DeepSpeedEngine
            engine.step = count_outermost(engine.step, self._listener, _is_boundary)
        if hasattr(module, "PipelineEngine"):
            engine = module.PipelineEngine
            engine.train_batch = count_outermost(engine.train_batch, self._listener)

    def watch_children(self, module: ModuleType) -> None:
        """Note how the ranks ended that torchrun finds failed: no other process gets their exit codes."""
        failure = module.ProcessFailure
        begun = failure.__post_init__

        def __post_init__(failed: Any) -> None:  # noqa: N807
            begun(failed)
            with contextlib.suppress(Exception):
                write_exit(Path(self._options.folder), failed.pid, failed.exitcode)

        failure.__post_init__ = __post_init__

    def sample_workers(self, module: ModuleType) -> None:
        """Sample the workers of data loaders, unless this is a trial, which only times steps."""
        if self._changes is None:
            watch_loop(module)

    def hide_from_dynamo(self, module: ModuleType) -> None:
        """Keep ``torch.compile`` from tracing into the hook where an optimizer's step is compiled."""
        self._listener.on_step = module.disable(self.stepped)

    def stepped(self, stepped: Any) -> None:
        """Take note of a step that just ended; ends the process if that was asked for."""
        if self._off:
            return
        leave = False
        try:
            if self._clock.is_tick(stepped):
                if self._session is None:
                    self._become_rank(stepped)
                else:
                    leave = self._session.step(stepped)
        except Exception as error:
            self._give_up(error)
        if leave:
            self._off = True
            raise SystemExit(0)

    def _become_rank(self, stepped: Any) -> None:
        torch = sys.modules["torch"]
        identity = identify(torch, self._options)
        if self._foreign is None or not _claim(Path(self._options.folder), identity):
            self._off = True
            return
        session: Session | TrialSession
        if self._changes is not None and self._losses is not None:
            from tracedoc.collector.trial.rank import TrialSession

            session = TrialSession(self._options, identity, self._clock, self._changes, self._losses)
        else:
            session = Session(torch, self._options, identity, self._foreign, self._clock)
        self._session = session
        atexit.register(self._at_exit)
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            # Children that multiprocessing forks leave by os._exit, past atexit.
            from multiprocessing.util import Finalize

            Finalize(None, self._at_exit, exitpriority=100)
        session.first_step(stepped)

    def _at_exit(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._off = True
        try:
            error = getattr(sys, "last_type", None)
            session.end("the job ended" if error is None else f"the job ended by {error.__name__}")
        except Exception as trouble:
            with contextlib.suppress(Exception):
                session.fail(trouble)

    def _give_way(self) -> None:
        if self._session is not None and not self._off:
            try:
                self._session.give_way()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.fail(error)

    def _forked(self) -> None:
        if self._session is not None:
            self._off = True
            with contextlib.suppress(Exception):
                self._session.forked()
            self._session = None


_hooks: dict[str, Hook] = {}


def is_watching() -> bool:
    """True if this process runs under a launcher that captures it."""
    return bool(_hooks)


def watch_here(hook: Hook, folder: str) -> None:
    """Have a hook that the script itself made stand for a launcher's."""
    _hooks[folder] = hook


def imported(module: ModuleType, folder: str) -> None:
    """Take note that a watched module was imported; ``folder`` holds the options of the capture."""
    hook = _hooks.get(folder)
    if hook is None:
        options = read_options(Path(folder, CONFIG_NAME))
        hook = _hooks[folder] = Hook(options)
        if options.nccl_log is None:
            ask_nccl(os.environ)
        with contextlib.suppress(OSError):
            Path(folder, f"torch-{socket.gethostname()}-{os.getpid()}").touch()
    hook.change(module)
    if module.__name__ == "torch.optim.optimizer":
        hook.watch_optimizers(module)
    elif module.__name__ == "torch._dynamo.decorators":
        hook.hide_from_dynamo(module)
    elif module.__name__ == "torch.utils.data._utils.worker":
        hook.sample_workers(module)
    elif module.__name__ == "torch.distributed.elastic.multiprocessing.errors":
        hook.watch_children(module)
    elif module.__name__.startswith("deepspeed."):
        hook.watch_engine(module)


def _is_boundary(engine: Any) -> bool:
    try:
        return bool(engine.is_gradient_accumulation_boundary())
    except Exception:
        return True


def identify(torch: ModuleType, options: Options) -> dict[str, Any]:
    """This process's rank and the size of its job: of its process group, else of the launcher's variables."""
    rank, world_size = 0, 1
    for rank_name, size_name in _RANK_VARIABLES:
        if os.environ.get(rank_name, "").isdecimal():
            rank, world_size = int(os.environ[rank_name]), _number(size_name, 1)
            break
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    restart = _number("TORCHELASTIC_RESTART_COUNT", 0)
    level = level_of(options, rank, world_size, _number("ROLE_RANK", rank))
    return {
        "run": options.run,
        "rank": rank,
        "local_rank": _number("LOCAL_RANK", rank),
        "world_size": world_size,
        "restart": restart,
        "stem": rank_stem(rank, restart),
        "level": level,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def write_exit(folder: Path, pid: int, code: int) -> None:
    """Record that a process of this host ended with an exit code, or with minus the signal."""
    host = socket.gethostname()
    part = {
        "schema": MANIFEST_SCHEMA,
        "part": "exit",
        "host": host,
        "pid": pid,
        "exit_code": code,
        "exited_ns": time.time_ns(),
    }
    write_json(folder / f"exit-{host}-{pid}{PART_SUFFIX}", part)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _claim(folder: Path, identity: dict[str, Any]) -> bool:
    """True if this process is the one to write a rank's files.

    A job may train in several processes one after the other, each a rank 0: the first has it, unless it
    is gone and left nothing.
    """
    import json

    path = folder / f"{identity['stem']}{PART_SUFFIX}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        try:
            other = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return False
        if other.get("file") or other.get("host") != identity["host"]:
            return False
        return not is_running(int(other.get("pid", 0)))
    except OSError:
        # The folder cannot be written; the session says so once, where a person sees it.
        return True
    return True
