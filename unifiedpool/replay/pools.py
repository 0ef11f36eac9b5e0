"""The memory policies that a replay compares, each behind the planner's interface: the real prefix cache runs on all.

    static:R        split once with ratio R; each side evicts its own least recently used
    two-ended       states from one end, pages from the other; the fewest cells move when the ends meet
    two-ended:pack  the same; the whole side that is in the way is packed
    blocks          vLLM: equal blocks, an attention block grown to a layer's state; one LRU
    lcm             Jenga: large pages of the least common multiple of the sizes, each owned by one kind; one LRU
    unified:NAME    nested grids and eviction policy NAME of the prefix cache ("unified" is unified:value)

The baselines keep their own books and take only handles from a planner that never lacks room. They count bare bytes,
without padding or null cell. None of them moves a cell but the two-ended ones.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import ffi, lib
from ..errors import CapacityError, InvalidArgumentError, format_bytes
from ..layout import Layout, PaddingWarning
from ..planner import DemandLike, Handles, HandlesLike, Planner
from ..prefix_cache import POLICIES, Evicted, PrefillCost, PrefixCache
from ..sizing import Server

__all__ = ["Movement", "Pool", "check_policy", "make_pool", "policy_names"]

_Ids = npt.NDArray[np.int32]

BASELINE_POLICY = "lru"
# vLLM keeps two states per running request when it caches prefixes.
_BLOCK_STATES = 2


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes since the pool was made."""

    moved: int = 0
    allocated: int = 0
    worst_window: int = 0
    worst_call: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """One policy, ready to run.

    Attributes:
        page_bytes, window_bytes, state_bytes: what a page, a window page and a state take under this policy.
        running_states: states that a running request holds.
        max_running: cap on running requests that comes from a static split; None without.
        arena_bytes: what all of it may take together.
    """

    name: str
    planner: Planner
    cache: PrefixCache
    page_tokens: int
    page_bytes: int
    window_bytes: int
    state_bytes: int
    running_states: int
    max_running: int | None
    arena_bytes: int

    def movement(self) -> Movement:
        """Return what was moved so far."""
        if isinstance(self.planner, _Baseline):
            return self.planner.movement()
        stats = self.planner.stats()
        worst = max(kind.worst_window_bytes for kind in stats.kinds.values())
        return Movement(stats.moved_bytes, stats.allocated_bytes, worst, stats.worst_call_bytes)

    def fits_alone(self, counts: Sequence[int]) -> bool:
        """Say whether a request with so many cells of each kind can run when nothing else is there."""
        if self.max_running == 0:
            return False  # a static split with a few slots, but fewer than it sets aside for one request
        if isinstance(self.planner, _Baseline):
            return self.planner.fits_alone(counts)
        return self.fits_formula([0] * len(counts), counts)

    def live(self) -> list[int]:
        """Return the live cells of each kind."""
        if isinstance(self.planner, _Baseline):
            return list(self.planner.live)
        kinds = self.planner.stats().kinds
        return [kinds[name].live for name in self.planner.layout.names]

    def fits_formula(self, live: Sequence[int], counts: Sequence[int]) -> bool:
        """Say whether the unified capacity formula allows `counts` more cells of each kind beside `live` ones."""
        layout, need, larger = self.planner.layout, 0, 0
        for kind, have, more in zip(layout.kinds, live, counts, strict=True):
            need = need * (larger // kind.stride_bytes if larger else 1) + have + more
            larger = kind.stride_bytes
            if need > self.planner.arena_bytes // larger - -(-layout.null_bytes // larger):
                return False
        return True


class _Baseline(Planner):
    """A planner with other books: `fits` decides, the grids below only hand out handles."""

    __slots__ = ("_kinds_of", "allocated", "live")

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        """Make the books of an empty pool; the grids get twice the room, so that nothing ever moves in them."""
        super().__init__(layout, 2 * arena_bytes + 2 * layout.strides[0])
        self.live = [0] * len(layout.kinds)
        self.allocated = 0
        self._kinds_of = np.zeros(self.stats().max_handles + 1, np.uint8)  # bit k: a cell of kind k

    def fits_alone(self, counts: Sequence[int]) -> bool:
        """Say whether so many cells of each kind fit when nothing else is there."""
        raise NotImplementedError

    def lacking(self, counts: Sequence[int]) -> int:
        """Return the bytes that are missing for so many more cells of each kind."""
        raise NotImplementedError

    def took(self, kind: int, handles: _Ids) -> None:
        """Cells were handed out."""

    def gave_back(self, kind: int, handles: _Ids) -> None:
        """Cells came back."""

    def movement(self) -> Movement:
        """Return what was moved and allocated."""
        return Movement(allocated=self.allocated)

    def can_allocate(self, demand: DemandLike, moves: bool = True) -> bool:
        """Return whether the demand fits."""
        return self.lacking(self._compiled(demand).per_kind()) == 0

    def shortfall(self, demand: DemandLike) -> int:
        """Return the bytes to free first."""
        return self.lacking(self._compiled(demand).per_kind())

    def allocate(
        self,
        demand: DemandLike,
        out: Handles | None = None,
        moves: bool = True,
        overwrite: bool = False,
        pinned: bool = False,
    ) -> Handles:
        """Allocate the demand, all or nothing; see `Planner.allocate`."""
        compiled = self._compiled(demand)
        counts = compiled.per_kind()
        lacking = self.lacking(counts)
        if lacking:
            raise CapacityError(f"need {compiled!r}: {format_bytes(lacking)} are missing; free something")
        made = super().allocate(compiled, out, overwrite=True)
        start, ids = 0, made.numpy()
        for key, count in zip(compiled.keys, compiled._counts, strict=True):
            if count:
                for name in (key,) if isinstance(key, str) else key:
                    self._took(self.layout.kind_id(name), ids[start : start + count])
                start += count
        return made

    def _took(self, kind: int, ids: _Ids) -> None:
        self._kinds_of[ids] |= 1 << kind
        self.live[kind] += len(ids)
        self.allocated += len(ids) * self.layout.kinds[kind].bare_bytes
        self.took(kind, ids)

    def _gave_back(self, kind: int, ids: _Ids) -> None:
        self._kinds_of[ids] &= 0xFF ^ 1 << kind
        self.live[kind] -= len(ids)
        self.gave_back(kind, ids)

    def attach(self, handles: HandlesLike, kind: str | int, *, moves: bool = True, overwrite: bool = False) -> None:
        """Give each handle a cell of a kind; see `Planner.attach`."""
        kind_id, ids = self.layout.kind_id(str(kind)), _ids(handles)
        lacking = self.lacking([len(ids) if k == kind_id else 0 for k in range(len(self.live))])
        if lacking:
            raise CapacityError(f"attach {len(ids)} {kind}: {format_bytes(lacking)} are missing; free something")
        super().attach(ids, kind_id, overwrite=True)
        self._took(kind_id, ids)

    def detach(self, handles: HandlesLike, kind: str | int) -> None:
        """Drop each handle's cell of a kind; see `Planner.detach`."""
        kind_id, ids = self.layout.kind_id(str(kind)), _ids(handles)
        super().detach(ids, kind_id)
        self._gave_back(kind_id, ids)

    def free(self, handles: HandlesLike) -> None:
        """Free the handles."""
        super().free(handles)
        ids = _ids(handles)
        kinds = self._kinds_of[ids]
        for kind in range(len(self.live)):
            part = ids[kinds >> kind & 1 == 1]
            if len(part):
                self._gave_back(kind, part)


def _ids(handles: HandlesLike) -> _Ids:
    return handles.numpy() if isinstance(handles, Handles) else np.asarray(handles, np.int32)


class _Split(_Baseline):
    """So many cells of each kind and no more."""

    __slots__ = ("most",)

    def __init__(self, layout: Layout, arena_bytes: int, most: Sequence[int]) -> None:
        """Set the most cells of each kind."""
        super().__init__(layout, arena_bytes)
        self.most = list(most)

    def fits_alone(self, counts: Sequence[int]) -> bool:
        """Compare with each side."""
        return all(count <= most for count, most in zip(counts, self.most, strict=True))

    def lacking(self, counts: Sequence[int]) -> int:
        """Sum what each side lacks."""
        over = 0
        for kind, live, count, most in zip(self.layout.kinds, self.live, counts, self.most, strict=True):
            if count and live + count > most:
                over += (live + count - most) * kind.stride_bytes
        return over


class _Weighed(_Baseline):
    """One sum: every cell takes a fixed number of bytes, and positions do not matter."""

    __slots__ = ("room", "weights")

    def __init__(self, layout: Layout, arena_bytes: int, weights: Sequence[int]) -> None:
        """Set the bytes that a cell of each kind takes."""
        super().__init__(layout, arena_bytes)
        self.weights, self.room = list(weights), arena_bytes

    def fits_alone(self, counts: Sequence[int]) -> bool:
        """Compare the sum with the arena."""
        return sum(count * weight for count, weight in zip(counts, self.weights, strict=True)) <= self.room

    def lacking(self, counts: Sequence[int]) -> int:
        """Compare the sum with the arena."""
        used = sum((a + b) * w for a, b, w in zip(self.live, counts, self.weights, strict=True))
        return max(0, used - self.room)


class _TwoEnded(_Weighed):
    """Two ends with compaction (csrc/two_ended.h): the sum decides, positions cost moves."""

    __slots__ = ("_ends", "worst_call")

    def __init__(self, layout: Layout, arena_bytes: int, weights: Sequence[int], *, pack: bool) -> None:
        """Make both ends; the largest kind grows up from byte 0."""
        super().__init__(layout, arena_bytes, weights)
        handles = self.stats().max_handles + 1
        created = lib.up_two_ended_create(arena_bytes, list(weights), len(weights), pack, handles)
        if created == ffi.NULL:
            raise MemoryError(f"no memory for a two-ended pool of {format_bytes(arena_bytes)}")
        self._ends = ffi.gc(created, lib.up_two_ended_destroy)
        self.worst_call = 0

    def _stats(self) -> list[int]:
        out = ffi.new("int64_t[5]")
        lib.up_two_ended_stats(self._ends, out)
        return list(out)

    def took(self, kind: int, handles: _Ids) -> None:
        """Place the cells, one opening of room for all of them."""
        before = self._stats()[0]
        lib.up_two_ended_take(self._ends, kind, ffi.from_buffer("int32_t[]", handles), len(handles))
        self.worst_call = max(self.worst_call, self._stats()[0] - before)

    def gave_back(self, kind: int, handles: _Ids) -> None:
        """Take the cells away."""
        lib.up_two_ended_drop(self._ends, kind, ffi.from_buffer("int32_t[]", handles), len(handles))

    def movement(self) -> Movement:
        """Return what the compactions moved."""
        moved, allocated, worst_window = self._stats()[:3]
        return Movement(moved, allocated, worst_window, self.worst_call)


class _LargePages(_Baseline):
    """Large pages, each of one kind while any of its cells is live; nothing moves."""

    __slots__ = ("_empty", "_owner", "_partial", "_per_page", "_room", "_used", "large_bytes")

    def __init__(self, layout: Layout, arena_bytes: int, large_bytes: int, sizes: Sequence[int]) -> None:
        """Cut the arena into large pages."""
        super().__init__(layout, arena_bytes)
        self.large_bytes = large_bytes
        self._per_page = [large_bytes // size for size in sizes]
        pages = arena_bytes // large_bytes
        self._empty = list(range(pages - 1, -1, -1))
        self._used = [0] * pages
        self._room = [0] * len(sizes)  # free cells in large pages that a kind owns
        self._partial: list[dict[int, int]] = [{} for _ in sizes]  # large page -> its free cells, where there are any
        self._owner = np.zeros((len(sizes), len(self._kinds_of)), np.int32)  # kind, handle -> large page

    def fits_alone(self, counts: Sequence[int]) -> bool:
        """Count whole large pages."""
        pages = sum(-(-count // per_page) for count, per_page in zip(counts, self._per_page, strict=True))
        return pages <= len(self._used)

    def lacking(self, counts: Sequence[int]) -> int:
        """Count whole large pages."""
        pages = 0
        for count, room, per_page in zip(counts, self._room, self._per_page, strict=True):
            if count > room:
                pages += -(-(count - room) // per_page)
        return max(0, pages - len(self._empty)) * self.large_bytes

    def shortfall(self, demand: DemandLike) -> int:
        """Return what the emptiest large pages hold, as many of them as are missing: at least that has to go."""
        missing = super().shortfall(demand) // self.large_bytes
        if not missing:
            return 0
        strides = self.layout.strides
        held = [0] * len(self._used)
        for kind, partial in enumerate(self._partial):
            for page, free in partial.items():
                held[page] = (self._per_page[kind] - free) * strides[kind]
        smallest = min(count * stride for count, stride in zip(self._per_page, strides, strict=True))
        filled = sorted(size or smallest for size, used in zip(held, self._used, strict=True) if used)
        return max(1, sum(filled[:missing]))

    def took(self, kind: int, handles: _Ids) -> None:
        """Fill large pages that the kind owns, then empty ones; a call's cells stay together."""
        partial, at = self._partial[kind], 0
        while at < len(handles):
            if not partial:
                partial[self._empty.pop()] = self._per_page[kind]
                self._room[kind] += self._per_page[kind]
            page = next(iter(partial))
            count = min(len(handles) - at, partial[page])
            self._owner[kind, handles[at : at + count]] = page
            self._used[page] += count
            self._room[kind] -= count
            at += count
            partial[page] -= count
            if not partial[page]:
                del partial[page]

    def gave_back(self, kind: int, handles: _Ids) -> None:
        """Give a large page back once it is empty."""
        partial = self._partial[kind]
        pages, counts = np.unique(self._owner[kind, handles], return_counts=True)
        for page, count in zip(pages.tolist(), counts.tolist(), strict=True):
            self._used[page] -= count
            self._room[kind] += count
            partial[page] = partial.get(page, 0) + count
            if not self._used[page]:
                self._room[kind] -= partial.pop(page)
                self._empty.append(page)


class _SplitCache(PrefixCache):
    """A prefix cache over two pools that cannot help each other: each side evicts its own."""

    def make_room(self, demand: DemandLike) -> Evicted:
        """Evict what each side lacks; nothing when one of them cannot make up for it."""
        planner, total = self.planner, Evicted()
        assert isinstance(planner, _Split)
        counts = planner._compiled(demand).per_kind()
        missing = {
            name: live + count - most
            for name, live, count, most in zip(self.layout.names, planner.live, counts, planner.most, strict=True)
            if count and live + count > most
        }
        ledger = self.ledger() if missing else {}
        if any(lack > ledger[name]["evictable"] for name, lack in missing.items()):
            return total
        for name, lack in missing.items():
            gone = self.evict({name: lack})
            total.units, total.bytes = total.units + gone.units, total.bytes + gone.bytes
            for kind, cells in gone.cells.items():
                total.cells[kind] = total.cells.get(kind, 0) + cells
        total.fits = planner.can_allocate(demand)
        return total


def policy_names() -> tuple[str, ...]:
    """List what `make_pool` takes, "static" standing for static:R."""
    return ("static", "two-ended", "two-ended:pack", "blocks", "lcm", *(f"unified:{name}" for name in POLICIES))


def check_policy(name: str) -> tuple[str, str]:
    """Take a policy's name apart: ("unified", "lru"), ("static", "0.9"), ("two-ended", "pack"), ("blocks", "").

    Raises:
        InvalidArgumentError: no such policy, or a ratio that is not a finite number above 0.
    """
    head, _, detail = name.partition(":")
    if head == "unified" and (detail or "value") in POLICIES:
        return head, detail or "value"
    if head == "static" and detail:
        try:
            ratio = float(detail)
        except ValueError:
            ratio = math.nan
        if not (math.isfinite(ratio) and ratio > 0):
            raise InvalidArgumentError(f"policy {name!r}: {detail!r} is no ratio above 0")
        return head, detail
    if name in ("two-ended", "two-ended:pack", "blocks", "lcm"):
        return head, detail
    raise InvalidArgumentError(f"policy {name!r}; choose from {', '.join(policy_names())} (static takes static:0.9)")


def make_pool(name: str, server: Server, *, cost: PrefillCost, grid: int) -> Pool:
    """Make an empty pool of a policy.

    Args:
        name: one of `policy_names()`, "unified", or "static:R".
        cost: what a checkpoint saves.
        grid: checkpoints of prefills and branches lie at its multiples, or at the policy's own coarser ones.

    Raises:
        InvalidArgumentError: no such policy, or it cannot hold this model.
    """
    head, detail = check_policy(name)
    layout, arena = server.layout, server.cache_bytes
    bare = [kind.bare_bytes for kind in layout.kinds]
    states = server.running_states
    max_running: int | None = None
    planner: Planner
    cache_class: type[PrefixCache] = PrefixCache
    policy: Any = BASELINE_POLICY
    if head == "unified":
        planner, policy = Planner(layout, arena), detail
        sizes = list(layout.strides)
    elif head == "static":
        split = server.static_split(float(detail))
        tokens = {"full": split.tokens, "swa": split.window_tokens}
        most = [tokens[kind.name] // kind.page_size if kind.page_size else split.slots for kind in layout.kinds]
        planner, cache_class, max_running, sizes = _Split(layout, arena, most), _SplitCache, split.running, bare
        name = f"static:{float(detail):.3g}"
    elif head == "two-ended":
        planner, sizes = _TwoEnded(layout, arena, bare, pack=bool(detail)), bare
    elif name == "blocks":
        rule = server.block_rule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddingWarning)
            layout = server.spec.layout(rule.block_tokens)
        groups = {"full": rule.full_blocks, "swa": rule.window_blocks, "state": rule.state_blocks}
        sizes = [groups[kind.name] * rule.block_bytes for kind in layout.kinds]
        planner = _Weighed(layout, arena, sizes)
        states = min(states, _BLOCK_STATES)
    else:
        large = math.lcm(*bare)
        if large > arena // 2:
            raise InvalidArgumentError(
                f"policy 'lcm': the least common multiple of {bare} bytes is {format_bytes(large)}; the cache has "
                f"{format_bytes(arena)}"
            )
        planner, sizes = _LargePages(layout, arena, large, bare), bare
    page = layout.kind("full")
    has_window = "swa" in layout.names
    cache = cache_class(
        planner,
        policy=policy,
        state_kind="state" if server.slot_bytes else None,
        window_kind="swa" if has_window else None,
        window=server.spec.window if has_window else 0,
        grid=math.lcm(grid, page.page_size),
        cost=cost,
    )
    by_kind = dict(zip(layout.names, sizes, strict=True))
    return Pool(
        name,
        planner,
        cache,
        page.page_size,
        by_kind["full"],
        by_kind.get("swa", 0),
        by_kind.get("state", 0),
        states,
        max_running,
        arena,
    )
