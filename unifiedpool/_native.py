"""The one place that knows the C core: its functions, and what its return codes mean in Python.

Calls release the GIL. A hot call passes integers and pointers that cffi made; nothing is converted per call.
"""

from __future__ import annotations

from typing import Any, NoReturn

from . import _up_native  # type: ignore[attr-defined, unused-ignore]
from .errors import (
    ConcurrentCallError,
    InvalidArgumentError,
    InvalidHandleError,
    LayoutMismatchError,
    PinnedError,
    ReservationError,
    UnifiedPoolError,
)

__all__ = ["ffi", "lib", "raise_for_plan", "raise_for_planner"]

ffi: Any = _up_native.ffi
lib: Any = _up_native.lib

_PLAN_REASONS = {
    lib.UP_PLAN_TRUNCATED: "it is truncated, or longer than its header says",
    lib.UP_PLAN_NOT_A_PLAN: "it does not begin like a plan of this version",
    lib.UP_PLAN_DAMAGED: "its checksum differs: bytes were changed on the way",
    lib.UP_PLAN_INCONSISTENT: "a kind, cell, handle or phase in it is out of range",
    lib.UP_PLAN_BUFFER: "the buffer is smaller than the arena that it is for",
}


def raise_for_plan(code: int) -> NoReturn:
    """Raise for a code of `up_plan_check` or `up_apply`; nothing was applied."""
    raise LayoutMismatchError(f"the step plan cannot be used: {_PLAN_REASONS.get(code, f'code {code}')}")


def raise_for_planner(code: int, error: Any, names: tuple[str, ...], what: str) -> NoReturn:
    """Raise for a code of a planner call, other than a lack of capacity.

    Args:
        code: what the call returned.
        error: `up_error *` with the detail.
        names: kind names by id.
        what: the call, for the message, such as "free".
    """
    kind = names[error.kind] if 0 <= error.kind < len(names) else "?"
    at = f" at position {error.index}" if error.index >= 0 else ""
    value = int(error.value)
    if code == lib.UP_BUSY:
        raise ConcurrentCallError(f"{what}: another thread is inside this planner; give each its own, or take a lock")
    handle_errors = {
        lib.UP_BAD_HANDLE: f"handle {value}{at} is null, negative or out of range",
        lib.UP_DEAD_HANDLE: f"handle {value}{at} is not live: never allocated, or freed already",
        lib.UP_DUPLICATE: f"handle {value}{at} occurs twice",
        lib.UP_NO_CELL: f"handle {value}{at} has no {kind} cell",
        lib.UP_HAS_CELL: f"handle {value}{at} has a {kind} cell already",
        lib.UP_NOT_PINNED: f"handle {value}{at} is not pinned",
    }
    if code in handle_errors:
        raise InvalidHandleError(f"{what}: {handle_errors[code]}; nothing was changed")
    if code == lib.UP_PINNED:
        raise PinnedError(f"{what}: handle {value}{at} is pinned; release its pins first; nothing was changed")
    if code == lib.UP_NOT_RESERVED:
        raise ReservationError(f"{what}: {value} {kind} cells asked of reservations that hold fewer")
    if code == lib.UP_BAD_ARGUMENT:
        raise InvalidArgumentError(
            f"{what}: {value}{at} is out of range{'' if error.kind < 0 else f' for kind {kind}'}"
        )
    if code == lib.UP_NO_MEMORY:
        raise MemoryError(f"{what}: host memory ran out; nothing was changed")
    raise UnifiedPoolError(f"{what}: unexpected code {code} from the C core")
