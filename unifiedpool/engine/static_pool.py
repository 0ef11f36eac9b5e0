"""The static hybrid split that a unified pool replaces, behind the same interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unifiedpool.errors import CapacityError, InvalidArgumentError, format_bytes
from unifiedpool.layout import Layout
from unifiedpool.pool import Pool

__all__ = ["StaticPool"]


class StaticPool:
    """A pool whose state slots and pages live in separate parts of the arena, fixed at the start.

    ``ratio`` is the bytes of state slots over the bytes of pages, as engines' ``--mamba-full-memory-ratio``: state
    slots get ``arena * ratio / (1 + ratio)`` bytes, in whole slots, and pages the rest. Several page kinds share their
    part as in a unified pool, which favours this baseline.

    It is a `Pool` with a limit on each part. States take the lowest cells and pages the highest, and the two parts
    together never exceed the arena, so with one page kind no cell ever lies on the other side of the split and
    nothing ever moves.

    Args:
        layout: at least one slot kind and one page kind.
        arena_bytes: size of both parts together.
        ratio: finite and above 0.
        device: where the arena lives.

    Raises:
        InvalidArgumentError: the ratio or the arena leaves a part without a single cell, or the layout has only one
            sort of kind.
    """

    def __init__(self, layout: Layout, arena_bytes: int, *, ratio: float = 0.9, device: str = "cpu") -> None:
        if not (isinstance(ratio, (int, float)) and math.isfinite(ratio) and ratio > 0):
            raise InvalidArgumentError(f"ratio is {ratio!r}; it must be a finite number above 0")
        slots = [kind for kind in layout.kinds if not kind.page_size]
        pages = [kind for kind in layout.kinds if kind.page_size]
        if not slots or not pages:
            raise InvalidArgumentError(
                f"a static split needs slots and pages; the kinds are {', '.join(layout.names)}: use Pool"
            )
        slot_bytes = sum(kind.stride_bytes for kind in slots)
        self.ratio = float(ratio)
        self.num_slots = int(arena_bytes * ratio / (1 + ratio)) // slot_bytes
        self.state_bytes = self.num_slots * slot_bytes
        self.page_bytes = arena_bytes - self.state_bytes - layout.null_bytes
        if self.num_slots < 1 or self.page_bytes < max(kind.stride_bytes for kind in pages):
            raise InvalidArgumentError(
                f"ratio {ratio} of {format_bytes(arena_bytes)} leaves {self.num_slots} slots of "
                f"{format_bytes(slot_bytes)} and {format_bytes(max(self.page_bytes, 0))} for pages; "
                "both parts need at least one cell"
            )
        self._strides = {kind.name: kind.stride_bytes for kind in layout.kinds}
        self._slot_kinds = frozenset(kind.name for kind in slots)
        self.pool = Pool(layout, arena_bytes, device=device)

    def __getattr__(self, name: str) -> Any:
        """Forward what the split does not change: ``free``, ``detach``, ``pin``, ``step``, ``arena``, ..."""
        if name == "pool":  # not there yet: the constructor raised
            raise AttributeError(name)
        return getattr(self.pool, name)

    @property
    def layout(self) -> Layout:
        """The layout of both parts."""
        return self.pool.layout

    @property
    def arena_bytes(self) -> int:
        """Bytes of both parts together."""
        return self.pool.arena_bytes

    def can_allocate(self, demand: Mapping[Any, int]) -> bool:
        """Return whether the joint demand fits, each part by itself."""
        return self.shortfall(demand) == 0

    def shortfall(self, demand: Mapping[Any, int]) -> int:
        """Return the bytes to free first, over both parts; 0 when the demand fits."""
        held = dict.fromkeys(self._strides, 0)
        for name, kind in self._kind_stats().items():
            held[name] = kind.live + kind.reserved
        return self._over(demand, held)

    def empty_shortfall(self, demand: Mapping[Any, int]) -> int:
        """Return the bytes that the empty pool lacks for the demand; 0 when it fits."""
        return self._over(demand, dict.fromkeys(self._strides, 0))

    def allocate(self, demand: Mapping[Any, int], **options: Any) -> Sequence[int]:
        """Allocate the joint demand, all or nothing; see `Planner.allocate`."""
        self._check(demand)
        handles: Sequence[int] = self.pool.allocate(demand, **options)
        return handles

    def attach(self, handles: Sequence[int], kind: str, **options: Any) -> None:
        """Give each handle a cell of ``kind``; see `Planner.attach`."""
        self._check({kind: len(handles)})
        self.pool.attach(handles, kind, **options)

    def reserve(self, demand: Mapping[Any, int]) -> Any:
        """Hold room in both parts; see `Planner.reserve`."""
        self._check(demand)
        return self.pool.reserve(demand)

    def step(self) -> Any:
        """Seal and apply the plan of this step; see `Pool.step`."""
        return self.pool.step()

    def free(self, handles: Sequence[int]) -> None:
        """Free every cell of each handle; see `Planner.free`."""
        self.pool.free(handles)

    def _kind_stats(self) -> Mapping[str, Any]:
        kinds: Mapping[str, Any] = self.pool.stats().kinds
        return kinds

    def _over(self, demand: Mapping[Any, int], held: Mapping[str, int]) -> int:
        total = dict(held)
        for key, count in demand.items():
            for name in (key,) if isinstance(key, str) else key:
                if name not in total:
                    raise InvalidArgumentError(f"unknown kind {name!r}; the kinds are {', '.join(total)}")
                total[name] += count
        over_slots = sum(max(0, total[name] - self.num_slots) * self._strides[name] for name in self._slot_kinds)
        page_bytes = sum(count * self._strides[name] for name, count in total.items() if name not in self._slot_kinds)
        return over_slots + max(0, page_bytes - self.page_bytes)

    def _check(self, demand: Mapping[Any, int]) -> None:
        short = self.shortfall(demand)
        if short:
            raise CapacityError(
                f"need {', '.join(f'{count} {key}' for key, count in demand.items())}; the static split of "
                f"{self.num_slots} slots and {format_bytes(self.page_bytes)} of pages is {format_bytes(short)} short: "
                "free something, or use a unified Pool"
            )

    def __repr__(self) -> str:
        return (
            f"StaticPool(ratio={self.ratio:g}, slots={self.num_slots}, pages={format_bytes(self.page_bytes)}, "
            f"arena={format_bytes(self.arena_bytes)})"
        )
