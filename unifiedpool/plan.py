"""Step plans: what one engine step does to the bytes, as data.

A planner seals a plan; an arena applies it at the head of the step, in this process or another one. The wire format is
described in csrc/plan.h.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ._native import ffi, lib, raise_for_plan
from .errors import LayoutMismatchError

__all__ = ["OPERATION_NAMES", "Phase", "StepPlan"]

IntArray = npt.NDArray[np.int32]
OPERATION_NAMES: tuple[Literal["move", "copy", "zero"], ...] = ("move", "copy", "zero")


@dataclass(frozen=True, slots=True)
class Phase:
    """One run of equal operations on one kind, inside one numbered phase.

    Attributes:
        number: runs of one number are disjoint and may run in any order; a higher number runs later.
        operation: "move" and "copy" copy whole cells; "zero" clears them.
        kind_id: the kind's id in the layout.
        src, dst: `[n]` int32 cells; `src` equals `dst` for a zero.
    """

    number: int
    operation: Literal["move", "copy", "zero"]
    kind_id: int
    src: IntArray
    dst: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """An immutable plan. Make one with `Planner.seal` or `StepPlan.from_bytes`.

    Attributes:
        data: the wire format.
        sequence: 0 for a planner's first plan; an arena applies them without a gap.
        step: the number the engine gave.
        layout_digest: of the layout that the cells belong to.
        arena_bytes_before, arena_bytes: size of the arena around the plan; they differ when it is resized.
        max_handles: highest handle that may ever occur.
        chain: hash of all plans before this one; equal on two ranks when they planned the same.
        num_phases: phases 0..num_phases - 1.
        operations: `[n, 4]` int32: phase, operation | kind << 8, source cell, destination cell; sorted by phase.
        changes: `[m, 1 + kinds]` int32: handle, and its cell in every kind or -1.
        strides: bytes of a cell per kind.
    """

    data: bytes = field(repr=False)
    sequence: int
    step: int
    layout_digest: int
    arena_bytes_before: int
    arena_bytes: int
    max_handles: int
    chain: int
    num_phases: int
    operations: IntArray = field(repr=False, compare=False)
    changes: IntArray = field(repr=False, compare=False)
    strides: tuple[int, ...] = field(repr=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """Read a plan, checking everything that applying it relies on. O(size).

        Raises:
            LayoutMismatchError: the bytes are no plan of this version, or are damaged.
        """
        try:
            data = bytes(memoryview(data))  # a copy, unless it is bytes: what was checked must not change any more
        except TypeError:
            raise LayoutMismatchError(
                f"a step plan is bytes, not {type(data).__name__}; see StepPlan.to_bytes"
            ) from None
        code = lib.up_plan_check(ffi.from_buffer("uint8_t[]", data), len(data))
        if code != lib.UP_PLAN_OK:
            raise_for_plan(code)
        return cls._parse(data)

    @classmethod
    def _parse(cls, data: bytes) -> StepPlan:
        header: Any = ffi.from_buffer("up_plan_header *", data, require_writable=False)
        kinds, operations = header.num_kinds, header.num_operations
        at = ffi.sizeof("up_plan_header")
        strides = np.frombuffer(data, np.int64, kinds, at)
        at += strides.nbytes
        table = np.frombuffer(data, np.int32, operations * 4, at).reshape(operations, 4)
        changes = np.frombuffer(data, np.int32, -1, at + table.nbytes) if len(data) > at + table.nbytes else table[:0]
        return cls(
            data=data,
            sequence=header.sequence,
            step=header.step,
            layout_digest=header.layout_digest,
            arena_bytes_before=header.arena_bytes_before,
            arena_bytes=header.arena_bytes_after,
            max_handles=header.max_handles,
            chain=header.chain,
            num_phases=header.num_phases,
            operations=table,
            changes=changes.reshape(header.num_changes, 1 + kinds) if header.num_changes else _no_changes(kinds),
            strides=tuple(int(stride) for stride in strides),
        )

    def to_bytes(self) -> bytes:
        """Return the wire format; `from_bytes` reads it in any process."""
        return self.data

    @property
    def phases(self) -> list[Phase]:
        """The operations in order, grouped into runs of one phase, operation and kind. O(operations)."""
        table = self.operations
        if not len(table):
            return []
        starts = np.flatnonzero(np.any(table[1:, :2] != table[:-1, :2], axis=1)) + 1
        bounds = [0, *starts.tolist(), len(table)]
        return [
            Phase(
                int(table[lo, 0]),
                OPERATION_NAMES[int(table[lo, 1]) & 255],
                int(table[lo, 1]) >> 8,
                table[lo:hi, 2],
                table[lo:hi, 3],
            )
            for lo, hi in itertools.pairwise(bounds)
        ]

    @property
    def moved_bytes(self) -> int:
        """Bytes that moves copy (not copies asked for by the caller, not zeroes)."""
        return sum(len(phase.src) * self.strides[phase.kind_id] for phase in self.phases if phase.operation == "move")


def _no_changes(kinds: int) -> IntArray:
    return np.empty((0, 1 + kinds), np.int32)
