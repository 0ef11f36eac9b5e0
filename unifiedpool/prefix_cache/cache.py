"""The prefix cache: the tree's topology, a policy, and the planner that owns the bytes.

Who owns a handle: whoever allocated it, until `insert` gives it to the cache; the cache until it is evicted, when the
cache frees it. Handles that `insert` returns (duplicates, a rejected state) are the caller's again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .._native import ffi, lib
from ..errors import InvalidArgumentError, InvalidHandleError, PinnedError
from ..planner import Demand, DemandLike, Handles, HandlesLike, Planner
from .eviction import DEAD_BUCKET, ROLES, EvictionOrder, Placement, Policy, PrefillCost, policy_named
from .tracking import StateSlot
from .tree import Match, PrefixTree, TokensLike

__all__ = ["Evicted", "Inserted", "LiveSlot", "Lock", "PrefixCache"]

_DESCENDANTS_REFRESHED = 16
_ROLES = {role: code for code, role in enumerate(ROLES)}


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an insert did.

    Attributes:
        node: id of the node where the tokens end.
        depth: tokens kept; short of what was given when a partly filled last page came without a state.
        known: tokens that were cached before.
        duplicates: page handles that the caller has to free, those that a taken-over tail or an exchanged page gave up
            among them.
        state_rejected: the caller's state, when the node had one already or could not take it; the caller frees it.
        recovered: pages that got their window part back.
    """

    node: int
    depth: int
    known: int
    duplicates: Handles
    state_rejected: int | None
    recovered: int

    def to_free(self) -> list[int]:
        """List every handle that the caller has to free."""
        rejected = [] if self.state_rejected is None else [self.state_rejected]
        return [*self.duplicates.tolist(), *rejected]


@dataclass(slots=True)
class Evicted:
    """What was evicted.

    Attributes:
        fits: whether the demand fits now.
        units: eviction units that went.
        cells: kind -> cells freed.
        bytes: bytes freed.
    """

    fits: bool = False
    units: int = 0
    cells: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """A request's own state slot.

    Attributes:
        handle: the slot.
        stolen: it was the cache's; else it is new, and a copy of the checkpoint is recorded when there was a hit.
    """

    handle: int
    stolen: bool


class Lock:
    """A receipt: what a match found stays where it is until the lock is released, once."""

    __slots__ = ("_cache", "_receipt", "match", "node")

    def __init__(self, cache: PrefixCache, receipt: int, match: Match, node: int) -> None:
        """Made by `PrefixCache.lock`."""
        self._cache = cache
        self._receipt = receipt
        self.match = match
        self.node = node

    @property
    def released(self) -> bool:
        """Whether it was released."""
        return self._receipt == 0

    def release(self) -> None:
        """Release the path, the window and the state.

        Raises:
            InvalidHandleError: it was released before.
        """
        self._cache._release(self)

    def release_state(self) -> None:
        """Release only the state, once its copy is enqueued. Does nothing the second time.

        Raises:
            InvalidHandleError: the lock was released.
        """
        self._cache._release_state(self)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            self.release()

    def __repr__(self) -> str:
        return f"Lock(node {self.node}, {'released' if self.released else 'held'})"


class PrefixCache:
    """Prefixes with their pages and states in one planner's arena, evicted by one policy across kinds.

    >>> from unifiedpool.layout import Layout
    >>> planner = Planner(Layout.simple({"state": 4096, "full": 256}), 1 << 16)
    >>> cache = PrefixCache(planner)
    >>> pages, state = planner.allocate({"full": 4}), planner.allocate({"state": 1})
    >>> _ = cache.insert([1, 2, 3, 4], pages, state=state[0])
    >>> match = cache.match_request([1, 2, 3, 4, 5])
    >>> match.hit, match.handles == pages, match.state == state[0]
    (4, True, True)
    """

    def __init__(
        self,
        planner: Planner,
        *,
        policy: str | Policy = "value",
        page_kind: str = "full",
        state_kind: str | None = "state",
        window_kind: str | None = None,
        window: int = 0,
        grid: int | None = None,
        cost: PrefillCost | None = None,
        ghost_factor: int = 4,
        max_ghosts: int = 1 << 20,
    ) -> None:
        """Make an empty cache.

        Args:
            planner: where the cells are.
            policy: "value", "lru", "sglang", "path_cap", "marconi", or a policy.
            page_kind: the kind whose pages hold the tokens.
            state_kind: the kind of the states; None for models without: then a hit may end on any page boundary.
            window_kind: the kind of the window cells that page handles own too, None for models without.
            window: the sliding window in tokens.
            grid: branch checkpoints lie at multiples of it; a multiple of the page size.
            cost: prefill work as a function of depth.
            ghost_factor, max_ghosts: ghosts per resident page, and at most; used by policies that want ghosts.

        Raises:
            InvalidArgumentError: an unknown policy or kind, or a window without its kind.
        """
        self.planner, self.layout = planner, planner.layout
        self.policy = policy_named(policy)
        self.page_kind, self.state_kind, self.window_kind = page_kind, state_kind, window_kind
        page_size = self.layout.kind(page_kind).page_size
        if page_size < 1:
            raise InvalidArgumentError(f"kind {page_kind!r} has no pages")
        if (window_kind is None) != (window == 0) or window < 0:
            raise InvalidArgumentError(f"window is {window} and window_kind {window_kind!r}; give both or neither")
        self._page_bytes = self.layout.kind(page_kind).stride_bytes
        self._state_bytes = 0 if state_kind is None else self.layout.kind(state_kind).stride_bytes
        self._window_bytes = 0 if window_kind is None else self.layout.kind(window_kind).stride_bytes
        self._window_pages = -(-window // page_size)
        self.cost = cost or PrefillCost()
        self.tree = PrefixTree(
            page_size=page_size,
            grid=grid,
            window=window,
            needs_state=state_kind is not None,
            ghost_factor=ghost_factor if self.policy.uses_ghosts else 0,
            max_ghosts=max_ghosts,
        )
        self._counters: Any = lib.up_tree_get_stats(self.tree._native)  # the same struct for ever
        self._needs_state, self._cost_offset = state_kind is not None, self.cost.offset
        self._state_demand = None if state_kind is None else planner.demand({state_kind: 1})
        self._missing: Any = ffi.new("int64_t *")
        self.clock = 0
        self._order = EvictionOrder(self.policy)
        self._handles = Handles(256)
        self._maybe_dead: dict[int, None] = {}  # nodes whose window pages may be in no state's window any more
        self._arena_bytes = -1
        self._bind()

    # -- match and lock ------------------------------------------------------------------------------------------

    def match(self, tokens: TokensLike, *, limit: int | None = None, namespace: Hashable = None) -> Match:
        """Find the longest usable prefix of the tokens. Read-only. O(tokens of the hit).

        Args:
            tokens: `[n]` int32 or int64 buffer in host memory; lists work and are slower.
            limit: deepest depth at which a hit may end, applied before the checkpoint is chosen.
            namespace: cache salt; prefixes of different namespaces never match.

        Raises:
            InvalidArgumentError: tokens that are no integers, or negative ones, as far as they are reached.
        """
        if self._arena_bytes != self.planner.arena_bytes:
            self._bind()
        if limit is not None and limit < 0:
            raise InvalidArgumentError(f"limit is {limit}; it must be at least 0")
        return self.tree.match(tokens, limit, namespace, self.clock)

    def match_request(self, tokens: TokensLike, *, namespace: Hashable = None) -> Match:
        """Match a prompt: at least its last token is left to compute, because its logits are needed.

        Raises:
            InvalidArgumentError: as `match`, or the prompt is empty.
        """
        if len(tokens) == 0:
            raise InvalidArgumentError("the prompt is empty; give at least one token")
        return self.match(tokens, limit=len(tokens) - 1, namespace=namespace)

    def lock(self, match: Match) -> Lock:
        """Hold what a match found, and count it as used: one request. O(nodes of the path).

        Raises:
            InvalidHandleError: another cache's match, or what it found was evicted since.
        """
        if match._tree is not self.tree:
            raise InvalidHandleError("the match is another cache's; match again with this one")
        node, generation = match.node, match._native.generation
        if node == 0:
            node = self.tree.root(match.namespace)
            generation = self.tree.nodes[node].generation
        receipt = self.tree.lock(node, generation, match.hit)
        self.clock += 1
        if self.policy.uses_ghosts:
            self.policy.learn(match.ages())
            self._order.forget_scores()
        if match.hit:
            lib.up_tree_consume(self.tree._native, node, self.clock)
            self._refresh(node)
        return Lock(self, receipt, match, node)

    def _receipt(self, lock: Lock, what: str) -> int:
        if lock._cache is not self:
            raise InvalidHandleError(f"{what}: the lock is another cache's")
        if lock._receipt == 0:
            raise InvalidHandleError(f"{what}: the lock was released already")
        return lock._receipt

    def _release(self, lock: Lock) -> None:
        self.tree.unlock(self._receipt(lock, "release"))
        lock._receipt = 0
        self._refresh(lock.node)
        if self.window_kind is not None:
            self._flag_window(lock.node)
        if lock.node in self.tree.namespaces:
            self.tree.tidy(lock.node)

    def _release_state(self, lock: Lock) -> None:
        code = lib.up_tree_unlock_state(self.tree._native, self._receipt(lock, "release_state"))
        if code:
            self.tree.raise_for(code, "release_state")
        self._refresh(lock.node)

    def unlock(self, lock: Lock) -> None:
        """Release a lock of this cache.

        Raises:
            InvalidHandleError: it was released before, or is another cache's.
        """
        self._release(lock)

    # -- insert --------------------------------------------------------------------------------------------------

    def insert(
        self,
        tokens: TokensLike,
        handles: HandlesLike,
        *,
        state: int | StateSlot | None = None,
        namespace: Hashable = None,
        lock: Lock | None = None,
        role: str = "tail",
    ) -> Inserted:
        """Give the cache the pages of some tokens, and the state at their end.

        Args:
            tokens: `[n]`, at least one; committed tokens only, whose KV is written.
            handles: `[ceil(n / page_size)]`, one per page; 0 for a page that the cache has and the caller does not.
            state: slot that holds the state after exactly these tokens. A `StateSlot` that was never written comes back
                as rejected.
            namespace: as in `match`; that of the lock's match by default.
            lock: the request's lock; it moves to the end of these tokens.
            role: why the state was saved: "tail", "branch", "final" (decoding) or "chunk".

        Returns:
            What became of them. The caller frees `to_free()`; everything else is the cache's.

        Raises:
            InvalidArgumentError: no tokens, a bad token, or a wrong number of handles.
            InvalidHandleError: a new page without a handle, a handle or state that is not live or not of its kind, or a
                lock that was released or is another cache's.
        """
        if self._arena_bytes != self.planner.arena_bytes:
            self._bind()
        unwritten = None
        if isinstance(state, StateSlot):
            state, unwritten = (state.handle, None) if state.written else (None, state.handle)
        if state is not None and self.state_kind is None:
            raise InvalidArgumentError("this cache keeps no states; insert without one")
        if state is not None and (not isinstance(state, int) or isinstance(state, bool) or state < 1):
            raise InvalidHandleError(f"insert: state {state!r} is no handle")
        receipt = 0
        if lock is not None:
            receipt = self._receipt(lock, "insert")
            namespace = lock.match.namespace if namespace is None else namespace
        self.clock += lock is None
        tree = self.tree
        out, duplicates = tree.insert(tokens, handles, state or 0, namespace, receipt, self.clock, _ROLES[role])
        # The removed tail's id may be a new node's already, so it goes first.
        if out.removed:
            self._order.remove(out.removed)
        node, parent, adopted = int(out.node), int(out.parent_of_new), bool(out.state_adopted)
        split, lower = int(out.split), int(out.lower)
        made = Inserted(
            node,
            int(out.depth),
            int(out.known),
            duplicates,
            unwritten if unwritten is not None else (int(out.state_back) or None),
            int(out.recovered),
        )
        if out.state_replaced:
            self.planner.free([int(out.state_replaced)])
        if lock is not None:
            left, lock.node = lock.node, node
            if left != node:
                self._refresh(left)
        for changed in {node, parent, split, lower}:
            if changed:
                self._refresh(changed)
        if adopted:
            if tree.nodes[node].num_children:
                self._refresh_below(node)
            if self.policy.max_states_per_path is not None:
                self._cap_path(node, self.policy.max_states_per_path)
        if self.window_kind is not None:
            self._flag_window(node)
            if lower:
                self._maybe_dead[lower] = None
        return made

    def _cap_path(self, node: int, most: int) -> None:
        """Evict the shallowest states of a path until `most` are left, sparing the deepest, forks and locked ones."""
        nodes = self.tree.nodes
        path = []
        while nodes[node].length:
            if nodes[node].state:
                path.append(node)
            node = nodes[node].parent
        surplus = len(path) - most
        for candidate in reversed(path[1:]):
            if surplus <= 0:
                return
            if nodes[candidate].num_children < 2 and not nodes[candidate].state_locks:
                self._evict(self._unit_with_handles(candidate), Evicted())
                surplus -= 1

    # -- units ---------------------------------------------------------------------------------------------------

    def _size(self, unit: Any) -> int:
        size = self._state_bytes if unit.state else 0
        if pages := unit.num_pages:
            size += pages * self._page_bytes
            if self._window_bytes:
                size += min(pages, self._window_pages) * self._window_bytes
        return size

    def _placement(self, unit: Any) -> Placement:
        if not unit.state and self._needs_state:
            return Placement(DEAD_BUCKET, unit.last_use, 0)
        above, depth = unit.above, unit.depth
        return self.policy.place(unit, self._size(unit), (depth - above) * (self._cost_offset + above + depth))

    def _refresh(self, node: int) -> None:
        """Bring a node's place in the order up to date. O(log units + nodes of the unit)."""
        unit = self.tree.unit(node)
        if unit is None:
            self._order.remove(node)
        else:
            self._order.put(node, self._placement(unit), bool(unit.is_leaf))

    def _refresh_below(self, node: int) -> None:
        """The nearest states and leaves below a node save another amount now. The rest is found when it comes up."""
        nodes, stack, left = self.tree.nodes, [node], _DESCENDANTS_REFRESHED
        while stack and left:
            child = nodes[stack.pop()].first_child
            while child and left:
                left -= 1
                if nodes[child].state or not nodes[child].num_children:
                    self._refresh(child)
                else:
                    stack.append(child)
                child = nodes[child].next_sibling

    def _victim(self, leaves: bool | None = None) -> Any:
        """Return the unit that goes next (`up_unit *`, its handles in `_handles`), None when there is none.

        What a unit frees and saves changes with its neighbours; whoever comes up is looked at again.
        """
        order, tree, now = self._order, self.tree, self.clock
        while True:
            node = order.first(now, leaves)
            if node is None:
                return None
            try:
                unit = tree.unit(node, self._handles)
            except InvalidArgumentError:  # more handles than the buffer holds
                unit = self._unit_with_handles(node)
            if unit is None:
                order.remove(node)
            elif not order.put(node, self._placement(unit), unit.is_leaf == 1):
                return unit

    def _unit_with_handles(self, node: int) -> Any:
        """Return a unit that can be evicted, its handles in `_handles`."""
        need = self.tree.unit(node).num_pages + 1
        if need > self._handles.capacity:
            self._handles = Handles(2 * need)
        return self.tree.unit(node, self._handles)

    def _evict(self, unit: Any, total: Evicted) -> None:
        """Evict what `_unit_with_handles` just returned: free its handles, then take it out of the tree."""
        handles, node, pages = self._handles, unit.node, unit.num_pages
        window = self._count_window(handles) if self.window_kind is not None and pages else 0
        self.planner.free(handles)
        unit = self.tree.evict(node)
        state, parent, parent_is_root, changed = unit.state, unit.parent, unit.parent_is_root, unit.changed
        self._order.remove(node)
        total.units += 1
        cells = total.cells
        if pages:
            cells[self.page_kind] = cells.get(self.page_kind, 0) + pages
            total.bytes += pages * self._page_bytes
            if not parent_is_root:
                self._refresh(parent)
        elif self.window_kind is not None:
            self._flag_window(node)
        if state:
            kind = self.state_kind or ""
            cells[kind] = cells.get(kind, 0) + 1
            total.bytes += self._state_bytes
        if window:
            self._count(total, self.window_kind or "", window, self._window_bytes)
        if changed and changed != parent:
            self._refresh(changed)

    @staticmethod
    def _count(total: Evicted, kind: str, cells: int, stride: int) -> None:
        if cells:
            total.cells[kind] = total.cells.get(kind, 0) + cells
            total.bytes += cells * stride

    # -- room ----------------------------------------------------------------------------------------------------

    def make_room(self, demand: DemandLike) -> Evicted:
        """Evict, across kinds, until the joint demand fits, and not one unit more.

        Window pages in no state's window go first, then pages below the deepest state of their path, then the units
        that the policy values least. Locked and pinned ones stay. Nothing goes when all of it would not be enough.

        Returns:
            What was evicted and whether the demand fits. O(log units) a unit.
        """
        planner, total = self.planner, Evicted()
        if not isinstance(demand, Demand):
            demand = planner.demand(demand)
        if planner.can_allocate(demand):
            total.fits = True
            return total
        # can_allocate has checked whose demand it is, so the planner need not do it again.
        lib.up_shortfall(planner._grids, demand._items, len(demand.keys), self._missing)
        if self._missing[0] > self.evictable_bytes():
            return total
        pinned: list[int] = []
        while not total.fits:
            if self._maybe_dead and self._evict_dead_window(self._window_cells_missing(demand), total):
                total.fits = planner.can_allocate(demand)
                continue
            unit = self._victim()
            if unit is None:
                break
            node = unit.node
            try:
                self._evict(unit, total)
            except PinnedError:
                pinned.append(node)
                self._order.remove(node)
                continue
            total.fits = planner.can_allocate(demand)
        for node in pinned:
            self._refresh(node)
        return total

    def evict(self, cells: dict[str, int]) -> Evicted:
        """Evict at least so many cells of each kind, as far as locks allow.

        Pages are freed by evicting leaves, states by evicting any unit; window cells go page by page, those in no
        state's window first, then those of the nodes used longest ago (O(nodes)).

        Args:
            cells: kind -> cells to free.

        Returns:
            What went; `fits` says whether everything asked for was freed.

        Raises:
            InvalidArgumentError: a kind that the cache does not hold.
        """
        total = Evicted()
        for kind, count in cells.items():
            if kind not in (self.page_kind, self.state_kind, self.window_kind):
                held = [name for name in (self.page_kind, self.state_kind, self.window_kind) if name is not None]
                raise InvalidArgumentError(f"evict of kind {kind!r}; the cache holds {held}")
            while total.cells.get(kind, 0) < count:
                left = count - total.cells.get(kind, 0)
                if kind == self.window_kind:
                    if not (self._evict_dead_window(left, total) or self._evict_live_window(left, total)):
                        break
                    continue
                unit = self._victim(True if kind == self.page_kind else None)
                if unit is None:
                    break
                self._evict(unit, total)
        total.fits = all(total.cells.get(kind, 0) >= count for kind, count in cells.items())
        return total

    def flush(self) -> Evicted:
        """Evict everything that no lock holds."""
        total = Evicted(fits=True)
        while (unit := self._victim()) is not None:
            self._evict(unit, total)
        return total

    def evictable_bytes(self) -> int:
        """Return the most bytes that evicting everything unlocked can free. O(1)."""
        stats = self._counters
        size: int = (stats.states - stats.locked_states) * self._state_bytes
        size += (stats.pages - stats.locked_pages) * self._page_bytes
        if self._window_bytes:
            size += (stats.pages - stats.window_locked_pages) * self._window_bytes
        return size

    # -- window pages --------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Let the tree see the planner's tables; a resize makes new ones."""
        planner = self.planner
        self._arena_bytes = planner.arena_bytes
        tables = [
            ffi.NULL if kind is None else lib.up_cells(planner._grids, self.layout.kind_id(kind))
            for kind in (self.page_kind, self.state_kind, self.window_kind)
        ]
        lib.up_tree_set_cells(self.tree._native, *tables, len(planner.cells(self.page_kind)))

    def _flag_window(self, node: int) -> None:
        """Some pages at or above a node may have left every state's window."""
        nodes = self.tree.nodes
        low = nodes[node].depth - 2 * self.tree.window
        while nodes[node].length and nodes[node].depth > low:
            self._maybe_dead[node] = None
            node = nodes[node].parent

    def _count_window(self, handles: Handles) -> int:
        if self.window_kind is None:
            return 0
        cells = self.planner.cells(self.window_kind)
        return sum(cells[handle] >= 0 for handle in handles.view)

    def _window_handles(self, node: int, every: bool) -> list[int]:
        """Handles of a node whose window cell may go."""
        x = self.tree.nodes[node]
        if not x.flags & lib.UP_NODE_LIVE or not x.length:
            return []
        pages = -(-x.length // self.tree.page_size)
        out, count = ffi.new("int32_t[]", pages), ffi.new("int64_t *")
        code = lib.up_tree_window_pages(self.tree._native, node, every, out, pages, count)
        if code:
            self.tree.raise_for(code, "window pages")
        return list(out[0 : count[0]])

    def _window_cells_missing(self, demand: Demand) -> int:
        """Window cells of which no fewer will do."""
        return max(1, -(-self.planner.shortfall(demand) // self._window_bytes))

    def _evict_dead_window(self, most: int, total: Evicted) -> int:
        """Free up to `most` window cells that lie in no state's window; return how many."""
        freed = 0
        while freed < most and self._maybe_dead:
            node = next(iter(self._maybe_dead))
            handles = self._window_handles(node, False)
            if len(handles) <= most - freed:
                del self._maybe_dead[node]
            freed += self._detach(handles[: most - freed], total)
        return freed

    def _evict_live_window(self, most: int, total: Evicted) -> int:
        """Free up to `most` window cells of the node used longest ago; return how many."""
        nodes = self.tree.nodes
        found = [(max(nodes[i].state_use, 0 if nodes[i].state else nodes[i].kv_use), i) for i in self.tree.walk()]
        for _, node in sorted(found):
            handles = self._window_handles(node, True)
            if handles:
                return self._detach(handles[:most], total)
        return 0

    def _detach(self, handles: list[int], total: Evicted) -> int:
        if handles:
            self.planner.detach(handles, self.window_kind or "")
            self._count(total, self.window_kind or "", len(handles), self._window_bytes)
        return len(handles)

    # -- slots ---------------------------------------------------------------------------------------------------

    def open_slot(self, lock: Lock) -> LiveSlot | None:
        """Give a request its own state slot, with the checkpoint of its hit in it.

        A new slot when there is room or room can be made: the copy of the checkpoint is recorded in the planner. Else
        the cache's slot itself, if it is a leaf's that nobody else holds. Else None, and nothing was changed. With a
        copy, keep the lock (or at least its state) until the step plan is on its way.

        Raises:
            InvalidHandleError: the lock was released or is another cache's.
        """
        receipt = self._receipt(lock, "open_slot")
        kind = self.state_kind
        if kind is None:
            raise InvalidArgumentError("this cache keeps no states; there is no slot to open")
        moved = lock.node != lock.match.node
        source = 0 if moved or not lock.match.hit else self.tree.nodes[lock.node].state
        if self.make_room({kind: 1}).fits:
            handle = self.planner.allocate({kind: 1}, overwrite=bool(source))[0]
            if source:
                self.planner.copy([source], [handle], kind=kind)
            return LiveSlot(handle, False)
        if not source:
            return None
        out = ffi.new("int32_t *")
        if lib.up_tree_steal(self.tree._native, receipt, out):
            return None
        self._refresh(lock.node)
        return LiveSlot(int(out[0]), True)

    def optional_slot(self, *, depth: int, above: int, chunk_end: bool = False) -> StateSlot | None:
        """Return a slot for a checkpoint that is worth having, or None: an optional checkpoint never raises.

        Args:
            depth: where the checkpoint will lie.
            above: the nearest shallower checkpoint on its path.
            chunk_end: it is only a prefill chunk's end; then it has to be wanted too (`wants_chunk_end`).
        """
        kind = self.state_kind
        if kind is None or (chunk_end and not self.wants_chunk_end(depth, above)):
            return None
        demand = self.planner.demand({kind: 1})
        if not self.make_room(demand).fits:
            return None
        return StateSlot(self.planner.allocate(demand, overwrite=True)[0])

    def wants_chunk_end(self, depth: int, above: int) -> bool:
        """Say whether a state at a chunk's end is to be saved.

        With value per byte: if there is room, or it would score above what would be evicted for it.
        """
        if self.policy.saves_chunk_ends is not None:
            return self.policy.saves_chunk_ends
        if self._state_demand is None or self.planner.can_allocate(self._state_demand):
            return self._state_demand is not None
        victim = self._victim()
        if victim is None:
            return False
        now, saved = self.clock, self.cost.saved(above, depth)
        placement = self._placement(victim)
        if placement.bucket == DEAD_BUCKET:
            return True
        threshold = self.policy.score(placement, now)
        unit = ffi.new("up_unit *", {"last_use": now, "depth": depth, "above": above, "role": _ROLES["chunk"]})
        mine = self.policy.place(unit, self._state_bytes, saved)
        return self.policy.score(mine, now) > threshold

    # -- looking -------------------------------------------------------------------------------------------------

    def ledger(self) -> dict[str, dict[str, int]]:
        """Return kind -> {"held", "locked", "evictable"} in cells. O(1), O(pages) with windows."""
        stats = self.tree.stats()
        out = {self.page_kind: (stats["pages"], stats["locked_pages"])}
        if self.state_kind is not None:
            out[self.state_kind] = (stats["states"], stats["locked_states"])
        if self.window_kind is not None:
            cells, nodes = self.planner.cells(self.window_kind), self.tree.nodes
            held = locked = 0
            for node in self.tree.walk():
                there = sum(cells[handle] >= 0 for handle in self.tree.handles(node))
                held += there
                locked += there if nodes[node].window_locks else 0
            out[self.window_kind] = (held, locked)
        return {
            kind: {"held": held, "locked": locked, "evictable": held - locked} for kind, (held, locked) in out.items()
        }

    def explain(self, match: Match | None = None) -> str:
        """Say why a match fell short, or, without one, which unit goes next and why."""
        if match is not None:
            branch = "" if match.branch is None else f"; a state saved at {match.branch} would help the next request"
            found = f"hit {match.hit} of at most {match.limit} tokens, pages for {match.full_hit}"
            return f"{found}: {match.reason}{branch}"
        unit = self._victim()
        if unit is None:
            return "nothing can be evicted: the cache is empty, or all of it is locked"
        what = f"node {unit.node}, depth {unit.depth}: "
        what += f"leaf with {unit.num_pages} pages" if unit.is_leaf else "the state of a node with children"
        what += " and its state" if unit.is_leaf and unit.state else ""
        if self._placement(unit).bucket == DEAD_BUCKET:
            return f"{what}; no state lies at or below it, so no hit can end there"
        saved = self.cost.saved(unit.above, unit.depth)
        return f"{what}; {self.policy.explain(unit, self._size(unit), saved, self.clock)}"

    def stats(self) -> dict[str, int]:
        """Return the tree's counters and the clock."""
        return {**self.tree.stats(), "clock": self.clock, "units": len(self._order)}

    def validate(self) -> None:
        """Check the tree, the ledgers and the order against a recount. O(everything).

        Raises:
            AssertionError: something does not add up.
        """
        self.tree.validate()
        nodes, units = self.tree.nodes, 0
        cells = self.planner.cells(self.page_kind)
        for node in self.tree.walk():
            assert all(cells[handle] >= 0 for handle in self.tree.handles(node)), f"node {node} holds a dead page"
            if nodes[node].state:
                assert self.planner.cells(self.state_kind or "")[nodes[node].state] >= 0, f"node {node}: dead state"
            unit = self.tree.unit(node)
            assert (unit is not None) == (node in self._order), f"node {node} is wrongly in or out of the order"
            units += unit is not None
        assert units == len(self._order), "the order holds nodes that are gone"

    def __repr__(self) -> str:
        stats = self.tree.stats()
        return (
            f"PrefixCache({self.policy.name}: {stats['pages']} pages, {stats['states']} states, "
            f"{stats['receipts']} locks)"
        )
