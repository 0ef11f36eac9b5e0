"""Every error the library raises.

Each inherits the builtin that a caller would catch too. A message says what was asked, what there is and what to
change. A call that raises has changed nothing.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "CapacityError",
    "ConcurrentCallError",
    "ConfigFieldError",
    "InvalidArgumentError",
    "InvalidHandleError",
    "LayoutMismatchError",
    "PinnedError",
    "PlanOrderError",
    "ReservationError",
    "UnifiedPoolError",
    "UnsupportedModelError",
    "format_bytes",
    "refuse_copy",
]


class UnifiedPoolError(Exception):
    """Base class of every error of this library."""


class InvalidArgumentError(UnifiedPoolError, ValueError):
    """An argument has the wrong type, shape, dtype, device or range."""


class CapacityError(UnifiedPoolError, MemoryError):
    """The arena has no room for the demand, also after every allowed move."""


class InvalidHandleError(UnifiedPoolError, ValueError):
    """A handle is null, negative, out of range, dead, twice in a batch, or lacks the cell."""


class PinnedError(UnifiedPoolError, RuntimeError):
    """A pinned handle would have to move or be freed."""


class ConcurrentCallError(UnifiedPoolError, RuntimeError):
    """A second thread called into an object while a call was running."""


class PlanOrderError(UnifiedPoolError, RuntimeError):
    """A step plan is not the next one in the sequence."""


class LayoutMismatchError(UnifiedPoolError, ValueError):
    """A plan or a file belongs to another layout."""


class ReservationError(UnifiedPoolError, RuntimeError):
    """A reservation is used after it was committed or cancelled, or for more than it holds."""


class UnsupportedModelError(UnifiedPoolError, ValueError):
    """A model architecture that the library does not know."""


class ConfigFieldError(UnifiedPoolError, ValueError):
    """A model configuration lacks a field or holds an impossible value."""


def refuse_copy(self: object) -> NoReturn:
    """Stand in for `__reduce__`: copying and pickling would make a second owner of the same native memory.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"a {type(self).__name__} cannot be copied or pickled: the copy would own the same cells. Make one of its own "
        "in each process and send step plans (StepPlan.to_bytes) between them"
    )


def format_bytes(count: int) -> str:
    """Write a byte count for a person.

    >>> format_bytes(0), format_bytes(1536), format_bytes(60 << 30)
    ('0 B', '1.5 KiB', '60.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
