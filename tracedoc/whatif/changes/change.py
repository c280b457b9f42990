"""What a change is: a name, its parameters, and how it edits a run's program in each scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import ChangeError
from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.scenarios import Split

Value = float | str
Mask = npt.NDArray[np.bool_]


class NotApplicable(msgspec.Struct, frozen=True):
    """Why a change cannot be made to this run."""

    reason: str


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


class Arguments(msgspec.Struct, frozen=True, eq=False):
    """What a change is given: the values of its parameters, and what the run's transfers consist of."""

    values: Mapping[str, Value]
    splits: Mapping[Scenario, Split]

    def number(self, name: str) -> float:
        """Return the value of a parameter that is a number."""
        return float(self.values[name])

    def word(self, name: str) -> str:
        """Return the value of a parameter that is a word."""
        return str(self.values[name])


Edit = Callable[[RunProgram, Arguments], RunProgram | NotApplicable]


class Change(msgspec.Struct, frozen=True):
    """A change by its name.

    ``assumption`` may name parameters in braces. ``units`` is how many times the work of today a step does
    afterwards.
    """

    name: str
    doc: str
    edit: Edit
    parameters: tuple[Parameter, ...] = ()
    assumption: str = ""
    units: float = 1.0

    def __call__(self, program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
        """Edit a program."""
        return self.edit(program, arguments)


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
