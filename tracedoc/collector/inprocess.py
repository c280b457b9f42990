"""The capture that a script makes of itself, in its loop or by a callback of its Trainer."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tracedoc.collector.options import Options
from tracedoc.collector.recorder import SOURCE_SUFFIX
from tracedoc.errors import InputError, did_you_mean
from tracedoc.run.manifest import MANIFEST_NAME, PART_SUFFIX

if TYPE_CHECKING:
    from tracedoc.collector.recorder import ForeignProfilers
    from tracedoc.collector.session import Session

_NOT_HERE = frozenset({"folder", "run", "nccl_log", "exit_after_capture"})
"""Options that only a launcher can follow."""


def collect(folder: str | os.PathLike[str], **options: Any) -> Capture:
    """Return a capture of this process into ``folder``, to be used with ``with``; every rank makes its own.

    Call ``capture.step()`` at the end of every step of the training loop. ``options`` are those of
    ``tracedoc collect``: ``wait``, ``warmup``, ``active``, ``ranks``, ``max_seconds``, ``max_mb``,
    ``record_shapes``, ``with_stack``, ``profile_memory``, ``source_step``. What an earlier capture of
    the same rank left in the folder is replaced. Then: ``tracedoc diagnose FOLDER``.

    Raises :class:`InputError` for an unknown option and for a folder that cannot be made. What goes wrong
    later is noted in the manifest, and the training goes on.
    """
    return Capture(capture_options(folder, options))


def capture_options(folder: str | os.PathLike[str], options: Mapping[str, Any]) -> Options:
    """The options of :func:`collect`, whose folder is made; it raises what that raises."""
    known = sorted({field.name for field in fields(Options)} - _NOT_HERE)
    for name in options:
        if name not in known:
            raise InputError(
                f"collect has no option {name!r}{did_you_mean(name, known)}", f"known: {', '.join(known)}"
            )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}", "choose another folder") from None
    return Options(folder=str(Path(folder).resolve()), run=uuid.uuid4().hex, **options)


def live(folder: str | os.PathLike[str] | None = None, *, port: int | None = None) -> None:
    """Have this process take requests for captures while it trains; call it before an optimizer is made.

    Under ``tracedoc collect`` a ``folder`` changes nothing. Without the launcher it is the run directory,
    nothing is captured at first, and ``tracedoc collect --again FOLDER`` asks. With ``port`` PyTorch's debug
    server is started too, which has no protection and listens on every network of this host.

    Raises :class:`InputError` where the folder cannot be made, and where it is missing without the launcher.
    """
    from tracedoc.collector import hook
    from tracedoc.run.manifest import VARIABLE

    os.environ[VARIABLE] = "1"
    if port is not None:
        sys.stderr.write(f"tracedoc: the debug server on port {port} has no protection: close it to others\n")
        import_module("torch.distributed.debug").start_debug_server(port=port)
    if hook.is_watching():
        return
    if folder is None:
        raise InputError("live needs a folder outside of `tracedoc collect`", 'tracedoc.live("runs/a")')
    capture = collect(folder, ranks="none", source_step=False)
    watching = hook.Hook(capture.options)
    hook.watch_here(watching, capture.options.folder)
    _remove_old_files(capture.options, str(hook.identify(import_module("torch"), capture.options)["stem"]))
    watching.watch_optimizers(import_module("torch.optim.optimizer"))


class Capture:
    """A capture in this process, driven by :meth:`step`; under ``tracedoc collect`` it does nothing."""

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.folder)
        self.options = options
        self._session: Session | None = None
        self._entered = False

    def __enter__(self) -> Capture:
        self._entered = True
        # A script that ends in the middle of the block, by sys.exit in a callback perhaps.
        atexit.register(self._end, "the job ended")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end("the loop ended" if kind is None else f"the loop ended by {kind.__name__}")

    def step(self, stepped: object | None = None) -> None:
        """Count a step of the training that just ended; ``stepped`` may be the optimizer."""
        if not self._entered:
            return
        try:
            if self._session is not None:
                self._session.step()
            else:
                self._session = _begin(self.options, stepped)
                self._entered = self._session is not None
        except Exception as failure:
            # The border with the user's process: an error of ours ends the capture, not the training.
            self._fail(failure)

    @property
    def rank(self) -> int | None:
        """The rank whose steps are captured here, ``None`` before the first step and without a capture."""
        return None if self._session is None else int(self._session.part["rank"])

    @property
    def is_over(self) -> bool:
        """Whether this rank has recorded all that it will."""
        return self._session is not None and self._session.is_over

    def _end(self, reason: str) -> None:
        atexit.unregister(self._end)
        session, self._entered = self._session, False
        if session is None:
            return
        try:
            session.end(reason)
        except Exception as failure:
            self._fail(failure)
        self._session = _process.session = None

    def _fail(self, failure: Exception) -> None:
        session, self._session, self._entered = self._session, None, False
        _process.session = None
        if session is not None:
            with contextlib.suppress(Exception):
                session.fail(failure)


class _Process:
    """What a process has once: the watch over the script's profilers, and the session that they may end."""

    def __init__(self) -> None:
        self.foreign: ForeignProfilers | None = None
        self.session: Session | None = None

    def give_way(self) -> None:
        """Release the profiler: the script is about to open one."""
        if self.session is not None:
            self.session.give_way()

    def forked(self) -> None:
        """Forget in a forked child what belongs to its parent."""
        if self.session is not None:
            self.session.forked()
            self.session = None


_process = _Process()


def _begin(options: Options, stepped: object | None) -> Session | None:
    """Return the session of this rank after its first step, ``None`` where a launcher captures it already."""
    from tracedoc.collector import hook
    from tracedoc.collector.recorder import ForeignProfilers
    from tracedoc.collector.session import Session
    from tracedoc.collector.steps import StepClock

    if hook.is_watching() or _process.session is not None:
        return None
    torch = sys.modules["torch"]
    if _process.foreign is None:
        _process.foreign = ForeignProfilers(torch, _process.give_way)
        _process.foreign.watch()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_process.forked)
    identity = hook.identify(torch, options)
    _remove_old_files(options, str(identity["stem"]))
    session = Session(torch, options, identity, _process.foreign, StepClock())
    _process.session = session
    session.first_step(stepped)
    return session


def _remove_old_files(options: Options, stem: str) -> None:
    names = [stem + suffix for suffix in (PART_SUFFIX, ".json.gz", ".steps", SOURCE_SUFFIX)]
    for name in (*names, MANIFEST_NAME):
        with contextlib.suppress(OSError):
            Path(options.folder, name).unlink()


def transformers_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Hugging Face: ``Trainer(..., callbacks=[transformers_callback("runs/x")])``.

    The options are those of :func:`tracedoc.collect`.

    It counts optimizer steps, not the micro-batches that gradients are accumulated over.
    """
    return in_transformers(collect(folder, **options))


def in_transformers(capture: Capture) -> Any:
    """A callback of Hugging Face's Trainer that steps a capture."""

    class CollectCallback(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        """Steps a capture with the Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.step(kwargs.get("optimizer"))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            capture.__exit__(None, None, None)

    return CollectCallback()


def lightning_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Lightning: ``Trainer(callbacks=[lightning_callback("runs/x")])``.

    The options are those of :func:`tracedoc.collect`.

    It counts optimizer steps (``trainer.global_step``), not the batches that gradients are accumulated over.
    Both names of the package will do: the one that is imported, else ``lightning``.
    """
    return in_lightning(collect(folder, **options))


def in_lightning(capture: Capture) -> Any:
    """A callback of Lightning's Trainer that steps a capture."""
    old = "lightning" not in sys.modules and "pytorch_lightning" in sys.modules
    home = import_module("pytorch_lightning" if old else "lightning.pytorch")

    class CollectCallback(home.Callback):  # type: ignore[misc, name-defined]
        """Steps a capture with the Trainer."""

        _seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._seen = trainer.global_step
            capture.__enter__()

        def on_train_batch_end(self, trainer: Any, *rest: Any, **named: Any) -> None:
            if trainer.global_step != self._seen:
                self._seen = trainer.global_step
                capture.step(next(iter(trainer.optimizers), None))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            capture.__exit__(None, None, None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            capture.__exit__(type(exception), exception, None)

    return CollectCallback()
