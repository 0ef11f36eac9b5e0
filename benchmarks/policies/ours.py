"""unifiedpool's own planner behind the policies' interface, checked against the capacity formula at every answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from unifiedpool import Planner
from unifiedpool.layout import Layout

from .base import Counters, Model, Policy

__all__ = ["NestedGrids"]

# Plans are thrown away here; sealing keeps the record of the step short.
_CALLS_PER_STEP = 256


class NestedGrids(Policy):
    """The real planner over the model's padded layout (or another one, with other ends)."""

    def __init__(self, model: Model, *, layout: Layout | None = None) -> None:
        self._layout = layout or model.layout
        self.planner = Planner(self._layout, model.arena_bytes)
        self._demand = self.planner.demand(dict.fromkeys(self._layout.names, 0))
        # The layout orders kinds by stride, the model too; equal strides may be swapped.
        self._order = [model.kinds.index(name) for name in self._layout.names]
        self._handles: dict[int, list[array[int]]] = {}
        strides, null = self._layout.strides, self._layout.null_bytes
        self._cells = [model.arena_bytes // stride - -(-null // stride) for stride in strides]
        self._live = [0] * len(strides)
        self._ratios = [1, *(large // small for large, small in pairwise(strides))]
        self._wrong = 0
        self._calls = 0

    def _formula(self, counts: Sequence[int]) -> bool:
        """The capacity formula without pins, from counts kept here."""
        need = 0
        for kind, cells in enumerate(self._cells):
            need = need * self._ratios[kind] + self._live[kind] + counts[self._order[kind]]
            if need > cells:
                return False
        return True

    def fits(self, counts: Sequence[int]) -> bool:
        for index, kind in enumerate(self._order):
            self._demand.set(index, counts[kind])
        answer = self.planner.can_allocate(self._demand)
        self._wrong += answer != self._formula(counts)
        return answer

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        return self.grow(request, counts)

    def grow(self, request: int, counts: Sequence[int]) -> bool:
        if not self.fits(counts):
            return False
        handles = array("i", self.planner.allocate(self._demand, overwrite=True).view)
        held = self._handles.setdefault(request, [array("i") for _ in self._order])
        begin = 0
        for index, kind in enumerate(self._order):
            held[kind] += handles[begin : begin + counts[kind]]
            begin += counts[kind]
            self._live[index] += counts[kind]
        self._calls += 1
        if self._calls % _CALLS_PER_STEP == 0:
            self.planner.seal()
        return True

    def shrink(self, request: int, kind: int, count: int) -> None:
        held = self._handles[request]
        self.planner.free(held[kind][:count])
        del held[kind][:count]
        self._live[self._order.index(kind)] -= count

    def finish(self, request: int) -> None:
        for kind, handles in enumerate(self._handles.pop(request)):
            self.planner.free(handles)
            self._live[self._order.index(kind)] -= len(handles)

    def counters(self) -> Counters:
        stats = self.planner.stats()
        worst = max(kind.worst_window_bytes for kind in stats.kinds.values())
        return Counters(stats.moved_bytes, stats.allocated_bytes, worst, stats.worst_call_bytes, self._wrong)
