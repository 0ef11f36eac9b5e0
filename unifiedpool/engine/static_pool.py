"""The static hybrid split that a unified pool replaces, behind the same interface."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from unifiedpool.arena import Arena
from unifiedpool.errors import CapacityError, InvalidArgumentError, format_bytes
from unifiedpool.layout import Layout
from unifiedpool.planner import DemandLike, Handles, HandlesLike, Planner, Reservation
from unifiedpool.pool import Pool

if TYPE_CHECKING:
    import torch

__all__ = ["StaticPlanner", "StaticPool"]


class StaticPlanner(Planner):
    """A planner that gives slots and pages no more than their own part of the arena; see `StaticPool`.

    States take the lowest cells and pages the highest, and the two parts together never exceed the arena, so with one
    page kind no cell ever lies on the other side of the split and nothing ever moves.
    """

    def __init__(self, layout: Layout, arena_bytes: int, *, ratio: float = 0.9) -> None:
        """Split the arena. Arguments and errors as `StaticPool`."""
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not (math.isfinite(ratio) and ratio > 0):
            raise InvalidArgumentError(f"ratio is {ratio!r}; it must be a finite number above 0")
        slots = [kind for kind in layout.kinds if not kind.page_size]
        pages = [kind for kind in layout.kinds if kind.page_size]
        if not slots or not pages:
            raise InvalidArgumentError(
                f"a static split needs slots and pages; the kinds are {', '.join(layout.names)}: use Pool"
            )
        super().__init__(layout, arena_bytes)
        slot_bytes = sum(kind.stride_bytes for kind in slots)
        largest_page = max(kind.stride_bytes for kind in pages)
        self.ratio = float(ratio)
        self.num_slots = int(arena_bytes * ratio / (1 + ratio)) // slot_bytes
        self.page_bytes = arena_bytes - self.num_slots * slot_bytes - layout.null_bytes
        if self.num_slots < 1 or self.page_bytes < largest_page:
            raise InvalidArgumentError(
                f"ratio {ratio} of {format_bytes(arena_bytes)} leaves {self.num_slots} slots of "
                f"{format_bytes(slot_bytes)} and {format_bytes(max(self.page_bytes, 0))} for pages of "
                f"{format_bytes(largest_page)}; both parts need at least one cell"
            )

    def can_allocate(self, demand: DemandLike, moves: bool = True) -> bool:
        """Return whether the joint demand fits, each part by itself."""
        return self.shortfall(demand) == 0 and super().can_allocate(demand, moves)

    def shortfall(self, demand: DemandLike) -> int:
        """Return the bytes to free first, over both parts; 0 when the demand fits."""
        kinds = self.stats().kinds.values()
        return self._over(demand, [kind.live + kind.reserved for kind in kinds])

    def empty_shortfall(self, demand: DemandLike) -> int:
        """Return the bytes that the empty pool lacks for the demand; 0 when it fits."""
        return self._over(demand, [0] * len(self.layout.kinds))

    def allocate(
        self,
        demand: DemandLike,
        out: Handles | None = None,
        moves: bool = True,
        overwrite: bool = False,
        pinned: bool = False,
    ) -> Handles:
        """Allocate the joint demand, all or nothing; see `Planner.allocate`."""
        self._check(demand)
        return super().allocate(demand, out, moves, overwrite, pinned)

    def attach(self, handles: HandlesLike, kind: str | int, **options: Any) -> None:
        """Give each handle a cell of ``kind``; see `Planner.attach`."""
        self._check({self.layout.kind(kind).name: len(handles)})
        super().attach(handles, kind, **options)

    def reserve(self, demand: DemandLike) -> Reservation:
        """Hold room in both parts; see `Planner.reserve`."""
        self._check(demand)
        return super().reserve(demand)

    def resize(self, arena_bytes: int) -> None:
        """Refuse: the split is part of what a static pool is.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            f"resize to {format_bytes(arena_bytes)}: the split of a static pool is fixed; make another, or use a Pool"
        )

    def _over(self, demand: DemandLike, held: list[int]) -> int:
        wanted = [have + more for have, more in zip(held, self._compiled(demand).per_kind(), strict=True)]
        over = page_bytes = 0
        for kind, count in zip(self.layout.kinds, wanted, strict=True):
            if kind.page_size:
                page_bytes += count * kind.stride_bytes
            else:
                over += max(0, count - self.num_slots) * kind.stride_bytes
        return over + max(0, page_bytes - self.page_bytes)

    def _check(self, demand: DemandLike) -> None:
        short = self.shortfall(demand)
        if short:
            raise CapacityError(
                f"need {self._compiled(demand)!r}; the static split of {self.num_slots} slots and "
                f"{format_bytes(self.page_bytes)} of pages is {format_bytes(short)} short: free something, or use a "
                "unified Pool"
            )


class StaticPool(Pool):
    """A pool whose state slots and pages live in separate parts of the arena, fixed at the start.

    ``ratio`` is the bytes of state slots over the bytes of pages, as engines' ``--mamba-full-memory-ratio``: state
    slots get ``arena * ratio / (1 + ratio)`` bytes, in whole slots, and pages the rest. Several page kinds share their
    part as in a unified pool, which favours this baseline.

    Args:
        layout: at least one slot kind and one page kind.
        arena_bytes: size of both parts together.
        ratio: finite and above 0.
        device: where the arena lives.

    Raises:
        InvalidArgumentError: the ratio or the arena leaves a part without a single cell, or the layout has only one
            sort of kind.
    """

    __slots__ = ()
    planner: StaticPlanner

    def __init__(
        self, layout: Layout, arena_bytes: int, *, ratio: float = 0.9, device: str | torch.device = "cpu"
    ) -> None:
        self.planner = StaticPlanner(layout, arena_bytes, ratio=ratio)
        self.arena = Arena(layout, arena_bytes, device=device)

    @property
    def ratio(self) -> float:
        """Bytes of slots over bytes of pages."""
        return self.planner.ratio

    def __repr__(self) -> str:
        return (
            f"StaticPool(ratio={self.ratio:g}, slots={self.planner.num_slots}, "
            f"pages={format_bytes(self.planner.page_bytes)}, arena={format_bytes(self.planner.arena_bytes)})"
        )
