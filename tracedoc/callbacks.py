"""Log what a capture says to the trackers that its job uses: W&B, MLflow and TensorBoard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tracedoc.collector.inprocess import Capture, capture_options, in_lightning, in_transformers
from tracedoc.collector.options import Options
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json, to_json
from tracedoc.frames import frame
from tracedoc.report.render import render
from tracedoc.report.texts import redacted
from tracedoc.run.manifest import COMPLETE, NOTHING, PARTIAL, read_parts

LOOK_AGAIN_S = 30.0
"""How often the first rank looks whether all ranks are captured, while training goes on."""

LONGEST_WAIT_S = 60.0
"""How long the first rank waits for the files of others where training ends."""

LONGEST_DIAGNOSIS_S = 1800.0


def log(diagnosis: Diagnosis, *trackers: Any, step: int = 0) -> tuple[str, ...]:
    """Log a diagnosis where the job logs, and return the names of the trackers that took it.

    They are the open runs of W&B and MLflow, and of ``trackers`` writers of TensorBoard, runs of both, and
    loggers of Lightning; what else is given is left out. Each gets the mean step and the share of each cause
    in ms, the answer in words, and the page; TensorBoard has the report as text, and the page beside its
    events. Host names and absolute paths are hidden.
    """
    shared = redacted(diagnosis)
    targets = dict.fromkeys(_target(one) for one in (*trackers, *_open_runs()))
    for target in targets:
        if target is not None:
            _TELL[target.kind](shared, target, step)
    return tuple(dict.fromkeys(target.kind for target in targets if target is not None))


def capture(folder: str | os.PathLike[str], *trackers: Any, **options: Any) -> LoggedCapture:
    """A capture as :func:`tracedoc.collect` makes it, whose diagnosis is logged as :func:`log` does.

    The first rank starts ``tracedoc diagnose`` beside the training when all ranks are captured, at the latest
    where training ends, and logs what it says at a later step. The folder then holds ``diagnosis.json``. What
    goes wrong is told on stderr, and training goes on.
    """
    return LoggedCapture(capture_options(folder, options), trackers)


def transformers(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Hugging Face: ``Trainer(..., callbacks=[transformers("runs/x", active=5)])``.

    It captures and logs as :func:`capture` does, to what ``report_to`` names.
    """
    logged = capture(folder, **options)
    callback = in_transformers(logged)
    begin = callback.on_train_begin

    def on_train_begin(args: Any, *rest: Any, **named: Any) -> None:
        if "tensorboard" in args.report_to:
            logged.trackers.append(lambda: _beside_events(Path(args.output_dir)))
        begin(args, *rest, **named)

    callback.on_train_begin = on_train_begin
    return callback


def lightning(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback of Lightning: ``Trainer(callbacks=[lightning("runs/x", active=5)])``.

    It captures and logs as :func:`capture` does, to the loggers of the Trainer.
    """
    logged = capture(folder, **options)
    callback = in_lightning(logged)
    begin = callback.on_train_start

    def on_train_start(trainer: Any, pl_module: Any) -> None:
        logged.trackers += trainer.loggers
        begin(trainer, pl_module)

    callback.on_train_start = on_train_start
    return callback


class LoggedCapture(Capture):
    """A capture whose diagnosis is logged by the first rank; ``trackers`` may be functions that give one."""

    def __init__(self, options: Options, trackers: tuple[Any, ...]) -> None:
        super().__init__(options)
        self.trackers = list(trackers)
        self._leads = self._told = False
        self._job: subprocess.Popen[bytes] | None = None
        self._look_at = self._steps = 0.0

    def __enter__(self) -> LoggedCapture:
        super().__enter__()
        self.trackers += _open_runs()  # Trainers close them before they say that training ended
        return self

    def step(self, stepped: object | None = None) -> None:
        """Count a step of the training that just ended; ``stepped`` may be the optimizer."""
        super().step(stepped)
        self._leads = self._leads or self.rank == 0
        self._steps += 1
        if self._leads and not self._told:
            self._safely(self._follow)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._leads and not self._told:
            self._safely(self._finish)

    def _follow(self) -> None:
        if self._job is not None:
            if self._job.poll() is not None:
                self._tell()
        elif self.is_over and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            if self._all_captured():
                self._job = self._diagnosing()

    def _finish(self) -> None:
        until = time.monotonic() + LONGEST_WAIT_S
        while self._job is None:
            if self._all_captured() or time.monotonic() >= until:
                self._job = self._diagnosing()
            else:
                time.sleep(0.1)
        self._tell()

    def _all_captured(self) -> bool:
        parts = [part for part in read_parts(self.folder) if part.get("part") == "rank"]
        ended = {part.get("rank") for part in parts if part.get("state") in (COMPLETE, PARTIAL, NOTHING)}
        return bool(parts) and all(len(ended) >= int(str(part.get("world_size"))) for part in parts)

    def _diagnosing(self) -> subprocess.Popen[bytes]:
        """The diagnosis in a process of its own, behind the training: that keeps its memory and its pace."""
        words = [sys.executable, "-m", "tracedoc", "diagnose", str(self.folder), "-q", "--jobs", "1"]
        words += ["-o", str(self._result)]
        nice = ["nice"] if shutil.which("nice") else []
        return subprocess.Popen([*nice, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    @property
    def _result(self) -> Path:
        return self.folder / "diagnosis.json"

    def _tell(self) -> None:
        assert self._job is not None
        _, said = self._job.communicate(timeout=LONGEST_DIAGNOSIS_S)
        self._told = True
        if self._job.returncode:
            raise OSError(said.decode(errors="replace").strip())
        trackers = [one() if callable(one) else one for one in self.trackers]
        log(from_json(self._result.read_bytes()), *trackers, step=int(self._steps))

    def _safely(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # the border with the user's process
            self._told = True
            sys.stderr.write(f"tracedoc: the diagnosis of {self.folder} is not logged: {error}\n")


class _Target(NamedTuple):
    """A tracker: its kind, what to call, and the id of the run where the first knows several."""

    kind: str
    to: Any
    run: str = ""


def _open_runs() -> Iterator[_Target]:
    """The runs that are open in this process, of trackers that the job imported."""
    if (run := getattr(sys.modules.get("wandb"), "run", None)) is not None:
        yield _Target("wandb", run)
    active = getattr(sys.modules.get("mlflow"), "active_run", lambda: None)()
    if active is not None:
        yield _mlflow(active.info.run_id)


def _target(tracker: Any) -> _Target | None:
    """What a tracker is; ``None`` for what is none."""
    if isinstance(tracker, _Target):
        return tracker
    if hasattr(tracker, "experiment"):  # a logger of Lightning
        run = getattr(tracker, "run_id", None)
        return _mlflow(run) if run is not None else _target(tracker.experiment)
    if hasattr(tracker, "add_scalar") and hasattr(tracker, "add_text"):
        return _Target("tensorboard", tracker)
    if hasattr(tracker, "info") and hasattr(tracker.info, "run_id"):
        return _mlflow(tracker.info.run_id)
    return _Target("wandb", tracker) if hasattr(tracker, "log") and hasattr(tracker, "summary") else None


def _mlflow(run: str) -> _Target:
    return _Target("mlflow", sys.modules["mlflow"], run)


def _beside_events(folder: Path) -> Any:
    """A writer into the folder of the newest events under ``folder``: that of Hugging Face's Trainer."""
    own = os.environ.get("TENSORBOARD_LOGGING_DIR")
    events = sorted(Path(own or folder).rglob("events.out.*"), key=lambda path: path.stat().st_mtime_ns)
    at = events[-1].parent if events else folder
    return import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(at))


def _numbers(diagnosis: Diagnosis) -> dict[str, float]:
    """The mean step, the ideal one and the share of each cause, in ms; the analysed step without a ledger."""
    ledger, step_ms = diagnosis.ledger, diagnosis.number("step_ms")
    if ledger is None or not ledger.step_ms:
        return {} if step_ms is None else {"tracedoc/step_ms": step_ms}
    ends = {"tracedoc/step_ms": ledger.step_ms, "tracedoc/ideal_ms": ledger.ideal_ms}
    return ends | {f"tracedoc/{cause.id}_ms": cause.share_ms for cause in ledger.causes}


def _to_wandb(diagnosis: Diagnosis, target: _Target, step: int) -> None:
    wandb = sys.modules["wandb"]
    page = wandb.Html(render(diagnosis, "html"), inject=False, data_is_not_path=True)
    ledger = wandb.Table(dataframe=frame(diagnosis, "ledger").astype({"ranks": str, "told_by": str}))
    target.to.log(_numbers(diagnosis) | {"tracedoc/page": page, "tracedoc/ledger": ledger})
    target.to.summary["tracedoc/answer"] = diagnosis.summary


def _to_mlflow(diagnosis: Diagnosis, target: _Target, step: int) -> None:
    client = target.to.MlflowClient()  # writes to runs that have ended too
    for name, ms in _numbers(diagnosis).items():
        client.log_metric(target.run, name, ms, step=step)
    client.set_tag(target.run, "tracedoc.answer", diagnosis.summary)
    client.log_text(target.run, render(diagnosis, "html"), "tracedoc/page.html")
    client.log_text(target.run, to_json(diagnosis), "tracedoc/diagnosis.json")


def _to_tensorboard(diagnosis: Diagnosis, target: _Target, step: int) -> None:
    for name, ms in _numbers(diagnosis).items():
        target.to.add_scalar(name, ms, step)
    target.to.add_text("tracedoc/answer", render(diagnosis, "markdown"), step)
    target.to.flush()
    Path(target.to.log_dir, "tracedoc.html").write_text(render(diagnosis, "html"), encoding="utf-8")


_TELL: dict[str, Callable[[Diagnosis, _Target, int], None]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
