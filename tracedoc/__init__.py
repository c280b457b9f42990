"""tracedoc: why is my multi-GPU training slow, what to change, and how much would it give back.

The stages can be called on their own, in this order::

    trace = tracedoc.load("rank-0.json.gz")
    timeline = tracedoc.build_timeline(trace)
    diagnosis = tracedoc.diagnose(["runs/today"])
    tracedoc.write_report(diagnosis, "report.html")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracedoc.collector.inprocess import collect, live
    from tracedoc.comparison.compare import compare
    from tracedoc.frames import frame as frame
    from tracedoc.judge.findings import evaluate
    from tracedoc.pipeline import Options, diagnose, measure, predict
    from tracedoc.report.figures import figure_of as figure_of
    from tracedoc.report.page import notebook_html as notebook_html
    from tracedoc.report.render import write_report
    from tracedoc.timeline.build import build_timeline
    from tracedoc.trace.kineto import read_trace as load

__version__ = "0.1.0"

_HOMES = {
    "Options": ("tracedoc.pipeline", "Options"),
    "compare": ("tracedoc.comparison.compare", "compare"),
    "collect": ("tracedoc.collector.inprocess", "collect"),
    "live": ("tracedoc.collector.inprocess", "live"),
    "build_timeline": ("tracedoc.timeline.build", "build_timeline"),
    "diagnose": ("tracedoc.pipeline", "diagnose"),
    "evaluate": ("tracedoc.judge.findings", "evaluate"),
    "load": ("tracedoc.trace.kineto", "read_trace"),
    "measure": ("tracedoc.pipeline", "measure"),
    "predict": ("tracedoc.pipeline", "predict"),
    "write_report": ("tracedoc.report.render", "write_report"),
    # What a Diagnosis shows itself with; it knows no report.
    "figure_of": ("tracedoc.report.figures", "figure_of"),
    "frame": ("tracedoc.frames", "frame"),
    "notebook_html": ("tracedoc.report.page", "notebook_html"),
}

__all__ = [
    "Options",
    "__version__",
    "build_timeline",
    "collect",
    "compare",
    "diagnose",
    "evaluate",
    "live",
    "load",
    "measure",
    "predict",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``tracedoc --help`` needs none of them (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tracedoc' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
