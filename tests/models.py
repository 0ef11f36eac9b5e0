"""What the planner must agree with, written the obvious way.

The models do not choose cells: they say which choices are legal, what the capacity formula answers and what every
handle must read. A granule is one cell of the smallest kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteMap", "Counts", "Operation"]


class Operation(NamedTuple):
    """One line of a step plan."""

    phase: int
    name: str  # "move", "copy" or "zero"
    kind: int
    src: int
    dst: int


class Counts(NamedTuple):
    """Per kind, in cells."""

    live: list[int]
    pinned: list[int]
    available: list[int]
    pin_free: list[int]
    whole: list[int]  # cells that touch no reserved byte


class ByteMap:
    """Who owns which granule, recounted from `cells` whenever it is asked.

    Args:
        strides: bytes of a cell of each kind, largest first, each a multiple of the next.
        arena_bytes: size of the arena.
        reserved_bytes: bytes at the low end that nobody may own.
    """

    def __init__(self, strides: Sequence[int], arena_bytes: int, reserved_bytes: int = 0) -> None:
        self.strides, self.arena_bytes, self.reserved_bytes = list(strides), arena_bytes, reserved_bytes
        self.cells: list[dict[int, int]] = [{} for _ in strides]  # per kind: handle -> cell
        self.pins: dict[int, int] = {}  # handle -> how often
        self.promised = [0] * len(self.strides)
        self.memory = np.full(arena_bytes // self.strides[-1], -1, np.int64)  # what the plans left in every granule

    def span(self, kind: int, cell: int) -> slice:
        granules = self.strides[kind] // self.strides[-1]
        return slice(cell * granules, (cell + 1) * granules)

    def owners(self, handles: Iterable[int] | None = None) -> NDArray[np.int64]:
        """Return the handle in each granule; 0: nobody, -1: reserved. Live cells that overlap are an AssertionError."""
        size = self.arena_bytes // self.strides[-1]
        owner, owners = np.zeros(size, np.int64), np.zeros(size, np.int64)
        owner[: -(-self.reserved_bytes // self.strides[-1])] = -1
        owners += owner != 0
        wanted = None if handles is None else set(handles)
        for kind, cells in enumerate(self.cells):
            mine = [(handle, cell) for handle, cell in cells.items() if wanted is None or handle in wanted]
            if mine:
                handle, cell = np.array(mine).T
                per_cell = self.strides[kind] // self.strides[-1]
                granules = cell[:, None] * per_cell + np.arange(per_cell)
                assert granules.min() >= 0 and granules.max() < size, f"a cell of kind {kind} lies outside the arena"
                owner[granules] = handle[:, None]
                owners += np.bincount(granules.ravel(), minlength=size)
        assert (owners <= 1).all(), f"granules {np.flatnonzero(owners > 1)} have several owners"
        return owner

    def counts(self) -> Counts:
        def empty_cells(owner: NDArray[np.int64], kind: int) -> int:
            size = self.strides[kind] // self.strides[-1]
            return int((~owner[: len(owner) // size * size].reshape(-1, size).any(axis=1)).sum())

        kinds = range(len(self.strides))
        owner, held, nobody = self.owners(), self.owners(self.pins), self.owners(())
        return Counts(
            [len(cells) for cells in self.cells],
            [sum(handle in self.pins for handle in cells) for cells in self.cells],
            [empty_cells(owner, k) for k in kinds],
            [empty_cells(held, k) for k in kinds],
            [empty_cells(nobody, k) for k in kinds],
        )

    def fits(self, demand: Sequence[int], *, pins_lifted: bool = False, counts: Counts | None = None) -> bool:
        """Return what the capacity formula says of `demand` (cells per kind) on top of the promised cells."""
        c = counts or self.counts()
        need = 0
        for k, stride in enumerate(self.strides):
            need = need * self.strides[k - 1] // stride if k else 0
            need += demand[k] + self.promised[k] + c.live[k] - (0 if pins_lifted else c.pinned[k])
            if need > (c.whole if pins_lifted else c.pin_free)[k]:
                return False
        return True

    def fits_unmoved(self, demand: Sequence[int]) -> bool:
        """Return whether `demand` fits into available cells."""
        need = 0
        for k, available in enumerate(self.counts().available):
            need = (need * self.strides[k - 1] // self.strides[k] if k else 0) + demand[k]
            if need > available:
                return False
        return True

    def placeable(self, kind: int, *, pins_lifted: bool = False) -> int:
        """Return the most cells of `kind` that fit."""
        counts, low, high = self.counts(), 0, self.arena_bytes // self.strides[kind] + 1
        while high - low > 1:  # low fits (or is 0), high does not
            middle = (low + high) // 2
            demand = [middle if k == kind else 0 for k in range(len(self.strides))]
            fits = self.fits(demand, pins_lifted=pins_lifted, counts=counts)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def free_extents(self) -> list[tuple[int, int]]:
        """Return the maximal (offset, length) byte ranges that nobody owns, tail included."""
        taken = np.repeat(self.owners() != 0, self.strides[-1])
        taken = np.concatenate([[True], taken, np.zeros(self.arena_bytes - len(taken), bool), [True]])
        taken[1 : 1 + self.reserved_bytes] = True
        edges = np.flatnonzero(np.diff(taken.astype(np.int8)))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def run(self, operations: Iterable[Operation]) -> None:
        """Run a plan on `memory`; a destination that overlaps anything else in its phase is an AssertionError (I12)."""
        phase, read, written = -1, np.zeros(len(self.memory), bool), np.zeros(len(self.memory), bool)
        for op in operations:
            if op.phase != phase:
                assert op.phase > phase, "phases must come in order"
                phase, read, written = op.phase, np.zeros_like(read), np.zeros_like(written)
            src, dst = self.span(op.kind, op.src), self.span(op.kind, op.dst)
            assert not (read[dst].any() or written[dst].any()), f"{op} writes what its phase uses"
            if op.name != "zero":
                assert not written[src].any() and op.src != op.dst, f"{op} reads what its phase writes"
                read[src] = True
            written[dst] = True
            self.memory[dst] = 0 if op.name == "zero" else self.memory[src]
