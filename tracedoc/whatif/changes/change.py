"""What a change is: a name, its parameters, and how it edits a run's program in each scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import ChangeError
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.timeline.phases import Phase

Value = float | str
Mask = npt.NDArray[np.bool_]

BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
PASSES = (Phase.FORWARD, *BACKWARD)
"""The parts of a step that are its backward pass, and both passes."""


class NotApplicable(Exception):  # noqa: N818 - an answer, not an error
    """Why a change cannot be made to this run."""


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a change: a number within bounds, or one of some words.

    ``default`` is ``None`` where it must be given.
    """

    name: str
    doc: str
    default: Value | None = None
    least: float = 0.0
    most: float = 1e6
    choices: tuple[str, ...] = ()


Edit = Callable[..., RunProgram]
"""Edits a program; behind it come the values of parameters in their order."""


class Change(msgspec.Struct, frozen=True):
    """A change by its name. Where it cannot be made, its edit raises :class:`NotApplicable`.

    ``assumption`` may name parameters in braces. ``units`` is how many times the work of today a step does
    afterwards.
    """

    name: str
    doc: str
    edit: Edit
    parameters: tuple[Parameter, ...] = ()
    assumption: str = ""
    units: float = 1.0

    def __call__(self, program: RunProgram, *values: Value) -> RunProgram:
        """Edit a program."""
        return self.edit(program, *values)


def where_possible(edit: Edit, program: RunProgram, *values: Any) -> RunProgram:
    """The program after an edit, as it is where that cannot be made."""
    try:
        return edit(program, *values)
    except NotApplicable:
        return program


def as_change(*parameters: Parameter, assuming: str = "", units: float = 1.0) -> Callable[[Edit], Change]:
    """Make an edit a change of its name, with hyphens; the first sentence of its docstring is told."""

    def made(edit: Edit) -> Change:
        said = (edit.__doc__ or "").partition("\n")[0].removesuffix(".")
        name = edit.__name__.replace("_", "-")
        return Change(name, said[:1].lower() + said[1:], edit, parameters, assuming, units)

    return made


def checked_values(change: Change, given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of all parameters; raises :class:`ChangeError` for a wrong one."""
    known = {parameter.name: parameter for parameter in change.parameters}
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "it has none"
            raise ChangeError(f"{change.name} has no parameter {name!r}", f"its parameters: {listed}")
    return {name: _checked(change, parameter, given.get(name)) for name, parameter in known.items()}


def _checked(change: Change, parameter: Parameter, value: Value | None) -> Value:
    if value is None:
        if parameter.default is None:
            raise ChangeError(
                f"{change.name} needs {parameter.name}=...: {parameter.doc}",
                f"for example: {change.name} {parameter.name}={_example(parameter)}",
            )
        return parameter.default
    if parameter.choices:
        if value not in parameter.choices:
            raise ChangeError(
                f"{change.name}: {parameter.name} cannot be {value!r}",
                f"it is one of: {', '.join(parameter.choices)}",
            )
        return value
    if isinstance(value, str) or not parameter.least <= value <= parameter.most:
        raise ChangeError(
            f"{change.name}: {parameter.name} cannot be {value!r}",
            f"it is a number from {parameter.least:g} to {parameter.most:g}",
        )
    return float(value)


def _example(parameter: Parameter) -> str:
    return parameter.choices[0] if parameter.choices else f"{max(parameter.least, 1):g}"


def of_scenario(scenario: Scenario, fast: float, likely: float, slow: float) -> float:
    """Return the value of one scenario."""
    return (fast, likely, slow)[scenario]


def scaled(values: npt.NDArray[np.int64], chosen: Mask, factor: float) -> npt.NDArray[np.int64]:
    """Return nanoseconds of which the chosen ones are multiplied by ``factor``."""
    return np.where(chosen, np.rint(values * factor).astype(np.int64), values)
