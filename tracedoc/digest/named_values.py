"""Values by name, as small as those of many ranks are kept: the names are one tuple for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tracedoc.values import Value


class NamedValues(Mapping[str, Value]):
    """Reads like a dictionary of the facts of one rank."""

    __slots__ = ("names", "values_in_order")

    def __init__(self, names: tuple[str, ...], values_in_order: tuple[Value, ...]) -> None:
        self.names = names
        self.values_in_order = values_in_order

    def __getitem__(self, name: str) -> Value:
        try:
            return self.values_in_order[self.names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
