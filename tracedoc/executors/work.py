"""What is done for each path, what may come of it, and which failures are the user's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

from tracedoc.errors import InputError

Result = TypeVar("Result")
OnBytes = Callable[[int], None]
Work = Callable[[str, "OnBytes | None"], Result]
"""What is done with one path. It says how many bytes it has read since it last said so, where asked."""


class Lost(msgspec.Struct, frozen=True):
    """Stands for a result that never came, and says why: the worker was killed or out of memory."""

    reason: str


Outcomes = Generator[tuple[str, "Result | InputError | Lost"], None, None]


def user_error(error: BaseException, cause: BaseException | None) -> InputError:
    """The error as one that the user can mend; what is a bug is raised."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ImportError):
        raise InputError(
            f"a worker cannot import what it needs: {error}",
            "install the same version of tracedoc, with the same extras, where the workers run",
        ) from error
    raise error from cause
