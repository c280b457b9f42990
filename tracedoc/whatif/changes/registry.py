"""The changes by their names, and reading them from text."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tracedoc.errors import ChangeError, did_you_mean
from tracedoc.play.run_program import RunProgram
from tracedoc.whatif.changes import buckets, gathers, host, kernels, order, ranks, stages, transfers, units
from tracedoc.whatif.changes.change import Change, Value, checked_values

CHANGES: dict[str, Change] = {
    change.name: change
    for module in (transfers, order, buckets, gathers, units, host, kernels, stages, ranks)
    for change in vars(module).values()
    if isinstance(change, Change)
}


class Request(msgspec.Struct, frozen=True):
    """A change with the values of its parameters, in their order."""

    name: str
    values: Mapping[str, Value]

    @property
    def change(self) -> Change:
        """The change itself."""
        return CHANGES[self.name]

    def made_to(self, program: RunProgram) -> RunProgram:
        """A program after the change; raises :class:`NotApplicable` where it cannot be made."""
        return self.change.edit(program, *self.values.values())

    def __str__(self) -> str:
        given = (f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                 for name, value in self.values.items())  # fmt: skip
        return " ".join((self.name, *given))


def request(name: str, given: Mapping[str, Value]) -> Request:
    """The change of a name with its parameters; raises :class:`ChangeError` where one is wrong."""
    if name not in CHANGES:
        raise ChangeError(
            f"there is no change {name!r}{did_you_mean(name, CHANGES)}",
            "tracedoc whatif RUN --list shows all of them",
        )
    return Request(name, checked_values(CHANGES[name], given))


def parse_request(text: str) -> Request:
    """Read ``NAME parameter=value ...``, as on the command line; raises :class:`ChangeError`."""
    words = text.split()
    if not words:
        raise ChangeError("a change has a name", "tracedoc whatif RUN --list shows all of them")
    given: dict[str, Value] = {}
    for word in words[1:]:
        name, separator, value = word.partition("=")
        if not separator or not name or not value:
            raise ChangeError(
                f"{word!r} is no parameter of {words[0]}", "write parameters as name=value, without spaces"
            )
        given[name] = _number_or_word(value)
    return request(words[0], given)


def _number_or_word(text: str) -> Value:
    try:
        return float(text)
    except ValueError:
        return text
