"""A planner, an arena and the byte map, driven through the same calls and compared after each.

`Lockstep` is what the cases, the fuzzer, the state machine and the stress example share. A call that the model refuses
must be refused and must change nothing; a call that it allows must succeed, move only what it has to, and leave every
handle reading what was written through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models import ByteMap, Operation
from unifiedpool import Arena, CapacityError, Layout, Planner, StepPlan
from unifiedpool.plan import OPERATION_NAMES
from unifiedpool.planner import Pin, Reservation

__all__ = ["FRESH", "UNKNOWN", "Demand", "Lockstep", "operations", "without_first_move"]

Demand = Mapping[Any, int]  # kind names, or tuples of them
FRESH = -2  # zero, or bytes that a cell of the same kind held last
UNKNOWN = -3  # never zeroed, or promised to be overwritten


def operations(plan: StepPlan) -> list[Operation]:
    """Return the plan's operations, one by one."""
    return [
        Operation(phase.number, phase.operation, phase.kind_id, src, dst)
        for phase in plan.phases
        for src, dst in zip(phase.src.tolist(), phase.dst.tolist(), strict=True)
    ]


def without_first_move(plan: StepPlan) -> StepPlan:
    """Return the plan with its first move or copy lost: what a canary feeds to `Lockstep.run`."""
    copies = np.flatnonzero(plan.operations[:, 1] & 255 != OPERATION_NAMES.index("zero"))
    return replace(plan, operations=np.delete(plan.operations, copies[:1], axis=0))


class Lockstep:
    """See the module.

    Args:
        layout, arena_bytes: as for `Planner`.
        with_bytes: also run an arena on the CPU and compare the bytes of every live cell at each `step`.
    """

    def __init__(self, layout: Layout, arena_bytes: int, *, with_bytes: bool = True) -> None:
        self.layout = layout
        self.planner = Planner(layout, arena_bytes)
        self.arena = Arena(layout, arena_bytes) if with_bytes else None
        self.map = ByteMap(layout.strides, arena_bytes, layout.null_bytes)
        self.content: dict[tuple[int, int], int] = {}  # (handle, kind) -> number; kind is number % kinds
        self.worker = [dict[int, int]() for _ in layout.names]  # the tables, from the plans' changes alone
        self.numbers = 0
        self.was_resized = False
        self.moved_bytes = self.allocated_bytes = self.steps = 0
        if self.arena is not None:
            self.arena.buffer[layout.null_bytes :].random_(0, 256, generator=torch.Generator().manual_seed(0))

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> range:
        return range(len(self.layout.names))

    @property
    def live(self) -> list[int]:
        return sorted(set().union(*self.map.cells))

    def ids(self, key: str | tuple[str, ...]) -> list[int]:
        return [self.layout.kind_id(name) for name in ((key,) if isinstance(key, str) else key)]

    def per_kind(self, demand: Demand) -> list[int]:
        counts = [0 for _ in self.kinds]
        for key, count in demand.items():
            for kind in self.ids(key):
                counts[kind] += count
        return counts

    def fits(self, demand: Demand, *, moves: bool = True) -> bool:
        """Return the formula's answer, after checking that the planner gives the same."""
        counts = self.per_kind(demand)
        answer = self.map.fits(counts) and (moves or self.map.fits_unmoved(counts))
        assert self.planner.can_allocate(demand, moves=moves) == answer
        assert (self.planner.shortfall(demand) == 0) == self.map.fits(counts)
        return answer

    def most(self, kind: str) -> int:
        """Return how many cells of `kind` fit, after checking that the planner says so too."""
        kind_id = self.layout.kind_id(kind)
        most = self.map.placeable(kind_id)
        stats = self.planner.stats().kinds[kind]
        assert stats.placeable == most
        assert stats.held_by_pins == self.map.placeable(kind_id, pins_lifted=True) - most
        return most

    # -- calls ---------------------------------------------------------------------------------------------------

    def allocate(
        self, demand: Demand, *, moves: bool = True, overwrite: bool = False, pinned: bool = False
    ) -> list[int]:
        """Allocate, or return [] where the formula refuses."""
        allowed = self.fits(demand, moves=moves)
        is_unmoved, digest = self.map.fits_unmoved(self.per_kind(demand)), self.planner.digest()
        try:
            handles = self.planner.allocate(demand, moves=moves, overwrite=overwrite, pinned=pinned).tolist()
        except CapacityError as error:
            assert not allowed, f"refused what the formula allows: {error}"
            assert self.planner.digest() == digest, "a refusal changed something"
            self.check()
            return []
        assert allowed, "the formula refuses what was allocated"
        self._take(demand, handles, overwrite=overwrite, is_unmoved=is_unmoved)
        return handles

    def commit(self, reservation: Reservation, demand: Demand, *, overwrite: bool = False) -> list[int]:
        """Allocate out of a reservation, which cannot fail."""
        is_unmoved = self.map.fits_unmoved(self.per_kind(demand))
        handles = reservation.commit(demand, overwrite=overwrite).tolist()
        self.map.promised = [a - b for a, b in zip(self.map.promised, self.per_kind(demand), strict=True)]
        self._take(demand, handles, overwrite=overwrite, is_unmoved=is_unmoved)
        return handles

    def reserve(self, demand: Demand) -> Reservation | None:
        """Reserve, or return None where the formula refuses."""
        if not self.fits(demand):
            try:
                self.planner.reserve(demand)
            except CapacityError:
                return None
            raise AssertionError("the formula refuses what was reserved")
        self.map.promised = [a + b for a, b in zip(self.map.promised, self.per_kind(demand), strict=True)]
        return self.planner.reserve(demand)

    def cancel(self, reservation: Reservation) -> None:
        """Give back what a reservation holds."""
        left = [reservation.left[name] for name in self.layout.names]
        self.map.promised = [a - b for a, b in zip(self.map.promised, left, strict=True)]
        reservation.cancel()
        self.check()

    def free(self, handles: Sequence[int]) -> None:
        """Free handles that are live and not pinned."""
        self.planner.free(handles)
        for handle in handles:
            for kind in self.kinds:
                if self.map.cells[kind].pop(handle, None) is not None:
                    del self.content[handle, kind]
        self.check()

    def attach(self, handles: Sequence[int], kind: str, *, overwrite: bool = False) -> bool:
        """Attach, or return False where the formula refuses."""
        demand: Demand = {kind: len(handles)}
        allowed, is_unmoved = self.fits(demand), self.map.fits_unmoved(self.per_kind(demand))
        try:
            self.planner.attach(handles, kind, overwrite=overwrite)
        except CapacityError:
            assert not allowed, "refused what the formula allows"
            self.check()
            return False
        assert allowed, "the formula refuses what was attached"
        self._take(demand, handles, overwrite=overwrite, is_unmoved=is_unmoved)
        return True

    def detach(self, handles: Sequence[int], kind: str) -> None:
        """Drop the handles' cells of one kind."""
        self.planner.detach(handles, kind)
        for handle in handles:
            del self.map.cells[self.layout.kind_id(kind)][handle]
            del self.content[handle, self.layout.kind_id(kind)]
        self.check()

    def pin(self, handles: Sequence[int], *, reason: str = "test") -> Pin | None:
        """Pin, or return None where a promise could then not be kept."""
        before = dict(self.map.pins)
        for handle in handles:
            self.map.pins[handle] = self.map.pins.get(handle, 0) + 1
        allowed = self.map.fits([0 for _ in self.kinds])
        try:
            pin = self.planner.pin(handles, reason=reason)
        except CapacityError:
            assert not allowed, "refused a pin that breaks no promise"
            self.map.pins = before
            return None
        assert allowed, "a pin broke a promise"
        self.check()
        return pin

    def release(self, pin: Pin) -> None:
        """Release a pin."""
        pin.release()
        for handle in pin.handles:
            self.map.pins[handle] -= 1
            if not self.map.pins[handle]:
                del self.map.pins[handle]
        self.check()

    def prepare(self, kind: str, n: int, *, max_bytes: int) -> int:
        """Open windows ahead of need."""
        before = self.planner.stats().moved_bytes
        is_enough = self.map.counts().available[self.layout.kind_id(kind)] >= n
        available = self.planner.prepare(kind, n, max_bytes=max_bytes)
        self.check(may_move=not is_enough)
        assert available == self.map.counts().available[self.layout.kind_id(kind)]
        assert self.planner.stats().moved_bytes - before <= max_bytes
        return available

    def copy(self, src: Sequence[int], dst: Sequence[int], kind: str) -> None:
        """Record copies."""
        kind_id = self.layout.kind_id(kind)
        self.planner.copy(src, dst, kind=kind)
        for a, b in zip(src, dst, strict=True):
            self.content[b, kind_id] = self.content[a, kind_id]
        self.check()

    def zero(self, handles: Sequence[int], kind: str) -> None:
        """Record zeroes."""
        self.planner.zero(handles, kind)
        for handle in handles:
            self.content[handle, self.layout.kind_id(kind)] = 0
        self.check()

    def relocate(self, handle: int, kind: str, cell: int) -> None:
        """Move one cell by hand."""
        kind_id = self.layout.kind_id(kind)
        self.planner.relocate(handle, kind, cell)
        self.map.cells[kind_id][handle] = cell
        self.check()

    def resize(self, arena_bytes: int) -> None:
        """Grow or shrink; an error of the planner passes through, after checking that nothing changed."""
        digest = self.planner.digest()
        try:
            self.planner.resize(arena_bytes)
        except Exception:
            assert self.planner.digest() == digest, "a refused resize changed something"
            raise
        self.map.arena_bytes, self.was_resized = arena_bytes, True
        self.check(may_move=True, may_move_largest=True)

    def _take(self, demand: Demand, handles: Sequence[int], *, overwrite: bool, is_unmoved: bool) -> None:
        tables, at = [self.planner.cells(kind) for kind in self.kinds], iter(handles)
        is_taken = self.map.owners() != 0
        for key, count in demand.items():
            for handle in (next(at) for _ in range(count)):
                for kind in self.ids(key):
                    assert handle not in self.map.cells[kind], f"handle {handle} was live already"
                    self.map.cells[kind][handle] = cell = tables[kind][handle]
                    assert not is_unmoved or not is_taken[self.map.span(kind, cell)].any(), "the cell was not available"
                    policy = self.layout.kinds[kind].zero
                    self.content[handle, kind] = UNKNOWN if overwrite or policy == "never" else FRESH
                    if policy == "always" and not overwrite:
                        self.content[handle, kind] = 0
                    self.allocated_bytes += self.layout.strides[kind]
        assert next(at, None) is None, "more handles than were asked for"
        self.check(may_move=not is_unmoved)

    # -- comparing -----------------------------------------------------------------------------------------------

    def check(self, *, may_move: bool = False, may_move_largest: bool = False) -> None:
        """Compare the tables with the map; take over moves where they are allowed."""
        for kind, cells in enumerate(self.map.cells):
            table = np.asarray(self.planner.cells(kind))
            expected = np.full(len(table), -1, np.int32)
            expected[list(cells)] = list(cells.values())
            for handle in np.flatnonzero(table != expected).tolist():
                assert handle in cells and table[handle] >= 0, f"handle {handle}, kind {kind}: {table[handle]} (I4)"
                assert handle not in self.map.pins, f"pinned handle {handle} moved (I7)"
                assert may_move and (kind or may_move_largest), f"handle {handle} moved for nothing (I9)"
                cells[handle] = int(table[handle])
                self.moved_bytes += self.layout.strides[kind]
        self.map.owners()  # raises where cells overlap

    def check_counts(self) -> None:
        """Compare every count that the map can recount."""
        self.planner.validate()
        stats, counts = self.planner.stats(), self.map.counts()
        for kind, name in enumerate(self.layout.names):
            own = stats.kinds[name]
            assert [own.live, own.pinned, own.available, own.pin_free, own.cells] == [each[kind] for each in counts]
            assert own.reserved == self.map.promised[kind]
            self.most(name)
        assert self.planner.free_extents() == self.map.free_extents()
        free = sum(length for _, length in self.planner.free_extents())
        assert stats.live_bytes + stats.reserved_bytes + free == stats.arena_bytes == self.map.arena_bytes

    def step(self) -> StepPlan | None:
        """Seal, run the plan on the map's memory and on the arena, read everything back, then write fresh cells."""
        plan = self.planner.seal(self.steps)
        self.steps += 1
        self.run(plan)
        return plan

    def run(self, plan: StepPlan | None) -> None:
        """Run a plan as `step` does (separate so that a canary can spoil it)."""
        size = self.map.arena_bytes // self.layout.strides[-1]
        if plan is not None:
            before = max(plan.arena_bytes_before, plan.arena_bytes) // self.layout.strides[-1]
            memory = np.full(before, -1, np.int64)
            memory[: len(self.map.memory)] = self.map.memory[:before]
            self.map.memory = memory
            self.map.run(operations(plan))
            self.map.memory = self.map.memory[:size].copy()
            for handle, *cells in plan.changes.tolist():
                for table, cell in zip(self.worker, cells, strict=True):
                    table.pop(handle, None)
                    if cell >= 0:
                        table[handle] = cell
            if self.arena is not None:
                self.arena.apply(plan)
        assert self.worker == self.map.cells, "the table changes do not give the tables"
        self.check_contents()
        self.write(key for key, number in self.content.items() if number < 0)
        self.was_resized = False

    def check_contents(self) -> None:
        """Every live cell reads what was written through its handle, in the map's memory and in the arena (I6)."""
        for (handle, kind), number in self.content.items():
            cell = self.map.cells[kind][handle]
            words = self.map.memory[self.map.span(kind, cell)]
            if number == FRESH:
                own = (words > 0) & (words % len(self.kinds) == kind)
                assert (own | (words == 0)).all(), f"fresh handle {handle} of kind {kind} reads {words}"
            elif number >= 0:
                assert (words == number).all(), f"handle {handle} of kind {kind} reads {words}, not {number}"
            if self.arena is not None and number >= 0:
                found = self.arena.cell_bytes(kind, cell).numpy().view(np.int64)
                assert (found == self.pattern(kind, number)).all(), f"handle {handle} of kind {kind} lost its bytes"
        if self.arena is not None:
            assert not self.arena.buffer[: self.layout.null_bytes].any(), "the null cell was written"
            for kind, name in enumerate(self.layout.names):
                table = self.arena.tables[name][1:].numpy()
                assert {int(h) + 1: int(table[h]) for h in np.flatnonzero(table >= 0)} == self.map.cells[kind]

    def write(self, keys: Iterable[tuple[int, int]]) -> None:
        """Write a new content through the tables, as a forward would."""
        for handle, kind in list(keys):
            self.numbers += 1
            number = self.numbers * len(self.kinds) + kind
            cell = self.map.cells[kind][handle]
            self.content[handle, kind] = number
            self.map.memory[self.map.span(kind, cell)] = number
            if self.arena is not None:
                self.arena.cell_bytes(kind, cell).numpy().view(np.int64)[:] = self.pattern(kind, number)

    def pattern(self, kind: int, number: int) -> NDArray[np.int64]:
        """The bytes of content `number`, different in every word; content 0 is zeroes."""
        words = np.arange(self.layout.strides[kind] // 8, dtype=np.int64)
        return words * 0 if number == 0 else words * 1_000_003 + (number << 20)
