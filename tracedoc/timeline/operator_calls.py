"""What a call of an operator was given: tensors by their extents, types and strides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

import msgspec

from tracedoc.trace.columns import Shapes
from tracedoc.trace.metadata import element_count
from tracedoc.trace.vocabulary import dtype_bytes


class Tensor(msgspec.Struct, frozen=True):
    """The extents of a tensor, and the bytes of one element (``None`` where its type is not known).

    ``strides`` are in elements, empty where they are not recorded.
    """

    extents: tuple[int, ...]
    size: int | None
    strides: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """How many elements there are; 1 of a tensor without dimensions."""
        return prod(self.extents)

    @property
    def stored(self) -> int:
        """How many of them lie in memory: what is expanded lies there once."""
        if 0 not in self.strides:
            return self.elements
        return prod(extent for extent, stride in zip(self.extents, self.strides, strict=True) if stride)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions in the order in which they lie in memory, but those of one element or expanded."""
        lying = zip(self.extents, self.strides, strict=False)
        wide = [(-stride, place) for place, (extent, stride) in enumerate(lying) if extent > 1 and stride]
        return tuple(place for _, place in sorted(wide))

    def __str__(self) -> str:
        """Its extents, and its strides unless it is contiguous: ``[3,5]``, ``[5,7]:[1,5]``."""
        following = accumulate(reversed(self.extents[1:]), mul, initial=1)
        dense = [*following][::-1] if self.extents else []
        alike = all(
            one in (stride, 0) or extent == 1
            for extent, stride, one in zip(self.extents, self.strides, dense, strict=False)
        )
        shown = (self.extents,) if alike else (self.extents, self.strides)
        return ":".join("[" + ",".join(map(str, one)) + "]" for one in shown)


Argument = Tensor | tuple[Tensor, ...] | None
"""A tensor, a list of tensors, or what is neither."""


class Call(msgspec.Struct, frozen=True):
    """The arguments of a call by position, and their values as texts where a trace keeps them."""

    arguments: tuple[Argument, ...]
    values: tuple[str, ...] = ()

    def tensor(self, position: int) -> Tensor | None:
        """The tensor at a position, ``None`` for anything else."""
        found = self.arguments[position] if position < len(self.arguments) else None
        return found if isinstance(found, Tensor) else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are given, those of lists too."""
        found: list[Tensor] = []
        for one in self.arguments:
            found += [one] if isinstance(one, Tensor) else one or ()
        return tuple(found)

    def numbers(self, position: int) -> tuple[int, ...] | None:
        """The numbers that the value at a position spells, ``None`` where it is not kept or spells none."""
        try:
            value = msgspec.json.decode(self.values[position].lower())
        except (IndexError, msgspec.DecodeError):
            return None
        listed = value if isinstance(value, list) else [value]
        return tuple(map(int, listed)) if all(isinstance(one, int) for one in listed) else None


def extents_of(dims: Sequence[object], position: int, length: int) -> tuple[int, ...] | None:
    """The extents of the argument at a position, ``None`` unless it has ``length`` of them."""
    found = _extents(dims[position]) if position < len(dims) else None
    return found if found is not None and len(found) == length else None


def call_of(shapes: Shapes) -> Call:
    """The arguments of a call by its recorded dimensions and types."""
    found: list[Argument] = []
    for place, dims in enumerate(shapes.dims):
        size = dtype_bytes(shapes.types[place]) if place < len(shapes.types) else None
        strides = shapes.strides[place] if place < len(shapes.strides) else ()
        if isinstance(dims, list) and dims and all(isinstance(one, list) for one in dims):
            listed = [_tensor(one, size, ()) for one in dims]
            found.append(tuple(one for one in listed if one is not None))
        else:
            one = _tensor(dims, size, strides)
            found.append(one if one is not None and (one.extents or size is not None) else None)
    return Call(tuple(found), shapes.values)


def _tensor(dims: object, size: int | None, strides: object) -> Tensor | None:
    """A tensor by its recorded extents and strides, ``None`` for what is none."""
    extents, apart = _extents(dims), _extents(strides) or ()
    return None if extents is None else Tensor(extents, size, apart if len(apart) == len(extents) else ())


def _extents(dims: object) -> tuple[int, ...] | None:
    if not isinstance(dims, (list, tuple)):
        return None
    known = tuple(extent for one in dims if (extent := element_count(one)) is not None)
    return known if len(known) == len(dims) else None
