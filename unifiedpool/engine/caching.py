"""What a request takes from the prefix cache, gives to it, and when: the engine's one place that talks to it.

A request starts from the deepest checkpoint on its path. It reads the cache's whole pages through their handles and
never writes them; the checkpoint's state and a partly filled last page are copied into cells of its own by the step
plan. While it runs, the state is saved where the tracker says: the copy is planned at the head of the next step, before
the next forward changes the live slot, so no forward knows of it. When the request ends, is aborted or retracted, its
live slot itself goes to the cache.

A page of a request is its own until it is given to the cache; `PrefixUse.shared` says which are the cache's. Pages that
the cache had already stay the request's own, so what it reads never changes under it.
"""

from __future__ import annotations

import math

from unifiedpool.engine.geometry import Geometry
from unifiedpool.engine.request import PrefixUse, Request, Status
from unifiedpool.errors import InvalidArgumentError
from unifiedpool.planner import Demand, Planner
from unifiedpool.prefix_cache import Lock, Match, PrefixCache, StateSlot, Tracker, TrackSlots
from unifiedpool.prefix_cache.tracking import CHUNK_GRID

__all__ = ["Caching", "unsupported"]


def unsupported(geometry: Geometry) -> str | None:
    """Say why a layout cannot have a prefix cache; None when it can.

    >>> unsupported(Geometry({"full": 16}, {}, ("state",)))
    >>> unsupported(Geometry({"swa": 16}, {"swa": 128}, ()))
    'its page kinds are swa: a prefix needs one kind that keeps every token'
    """
    full = [kind for kind in geometry.page_sizes if kind not in geometry.windows]
    if len(full) != 1:
        return f"its page kinds are {', '.join(geometry.page_sizes)}: a prefix needs one kind that keeps every token"
    if len(geometry.windows) > 1 or len(geometry.slots) > 1:
        several = geometry.windows if len(geometry.windows) > 1 else geometry.slots
        return f"it has several kinds of one sort ({', '.join(several)}): a prefix has one state and one window"
    if len(set(geometry.page_sizes.values())) > 1:
        return f"its pages differ in tokens ({dict(geometry.page_sizes)}): a page and its window part go together"
    return None


class Caching:
    """A prefix cache and the requests that use it. Host only; mutates the planner, the cache and the requests.

    Attributes:
        cache: the `PrefixCache`.
        tracker: where states are saved; its ``chunk_tokens`` are those asked for, rounded down to its grid.
        window_kind: the kind whose cells share the handles of the pages, if there is one.
    """

    def __init__(
        self,
        planner: Planner,
        geometry: Geometry,
        *,
        chunk_tokens: int,
        tracking: str = "auto",
        track_interval: int | None = None,
        eviction: str = "value",
    ) -> None:
        """Make an empty cache.

        Args:
            planner: where the cells are.
            geometry: `unsupported` says None of it.
            chunk_tokens: most tokens of a prefill forward.
            tracking: a strategy of `Tracker`.
            track_interval: decode checkpoints lie at its multiples, 0 for none; None takes the multiple of the grid
                that is at least 256.
            eviction: a policy of `PrefixCache`.

        Raises:
            InvalidArgumentError: an unknown strategy or policy, an interval off the grid, a chunk below a page, or a
                layout that cannot have a prefix cache.
        """
        reason = unsupported(geometry)
        if reason is not None:
            raise InvalidArgumentError(f"this layout cannot have a prefix cache: {reason}")
        self.planner, self.geometry = planner, geometry
        self.window_kind = next(iter(geometry.windows), None)
        self.page_kind = next(kind for kind in geometry.page_sizes if kind != self.window_kind)
        self.state_kind = geometry.slots[0] if geometry.slots else None
        self.page_size = geometry.page_sizes[self.page_kind]
        if chunk_tokens < self.page_size:
            raise InvalidArgumentError(
                f"chunk_tokens is {chunk_tokens}, a page has {self.page_size} tokens: a prefix cache saves states at "
                "page ends, so a chunk is at least a page"
            )
        # A forward here ends wherever it is cut, so a chunk that is no multiple of the kernels' grid takes a finer one.
        grid = math.gcd(CHUNK_GRID, chunk_tokens)
        if math.lcm(grid, self.page_size) > chunk_tokens:
            grid = 1
        step = math.lcm(grid, self.page_size)
        self.tracker = Tracker(
            tracking,
            page_size=self.page_size,
            overlap=False,
            chunk_tokens=chunk_tokens - chunk_tokens % step,
            track_interval=-(-256 // step) * step if track_interval is None else track_interval,
            chunk_grid=grid,
        )
        self.cache = PrefixCache(
            planner,
            policy=eviction,
            page_kind=self.page_kind,
            state_kind=self.state_kind,
            window_kind=self.window_kind,
            # A window of W tokens is the new token and the W - 1 before it.
            window=max(1, geometry.windows[self.window_kind] - 1) if self.window_kind else 0,
            grid=step,
        )

    # -- in ------------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Match | None:
        """Match a waiting request's tokens, all but the last; None when it is to run without the cache. Read-only."""
        if not request.uses_cache:
            return None
        tokens = request.token_slice(0, request.num_tokens)
        return self.cache.match_request(tokens, namespace=request.namespace)

    def hold(self, match: Match, demand: Demand) -> Lock | None:
        """Lock what was found and make room for the rest; None when both together do not fit, and nothing is locked."""
        # Locking counts as a use, so what cannot come about is seen first.
        if self.planner.shortfall(demand) > self.cache.evictable_bytes():
            return None
        lock = self.cache.lock(match)
        if self.cache.make_room(demand).fits:
            return lock
        lock.release()
        return None

    def take_slot(self, request: Request) -> bool:
        """Give a request that was admitted without room for a slot one all the same: the checkpoint's own.

        Returns:
            False when somebody else wants it too, and nothing was changed.
        """
        if request.use is None or self.state_kind is None:
            return False
        slot = self.cache.open_slot(request.use.lock)
        if slot is None:
            return False
        request.sequence.slots[self.state_kind] = slot.handle
        request.use.has_state = True
        return True

    def begin(self, request: Request, lock: Lock) -> None:
        """Start a request that has no cells yet with the whole pages that its lock holds, and plan what it saves."""
        match, sequence = lock.match, request.sequence
        hit, handles = match.hit, match.handles.tolist()[: match.hit // self.page_size]
        for kind, run in sequence.pages.items():
            run.first = self.geometry.first_page(kind, hit)
            run.handles = handles[run.first :]
        sequence.length = hit
        checkpoints = self.tracker.prefill(hit, request.prefill_target, match.branch)
        if self.window_kind is not None:
            # Window pages at every chunk's end would be held while the request runs, and `extra` does not pay for them.
            checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.optional]
        depths = {checkpoint.depth: checkpoint.role for checkpoint in checkpoints}
        request.use = PrefixUse(lock, hit, hit, set(handles), depths)

    def extra(self, demand: dict[str, int]) -> None:
        """Add to an admission's demand the window parts that the cache will keep of the pages it computes."""
        if self.window_kind is not None:
            kept = 2 * (-(-self.cache.tree.window // self.page_size) + 1)  # before a branch and before the prompt's end
            demand[self.window_kind] = min(demand[self.window_kind] + kept, demand[self.page_kind])

    def copy(self, request: Request) -> None:
        """Plan the copies of the checkpoint into the request's own slot and last page, which it has by now."""
        if request.use is None or not request.computed:
            return
        match, sequence = request.use.lock.match, request.sequence
        if self.state_kind is not None and match.state is not None and not request.use.has_state:
            self.planner.copy([match.state], [sequence.slots[self.state_kind]], kind=self.state_kind)
        if match.tail_page is not None:
            for kind, run in sequence.pages.items():
                self.planner.copy([match.tail_page], [run.handles[-1]], kind=kind)

    def applied(self, request: Request) -> None:
        """The plan with the request's copies is applied: its checkpoint may go."""
        if request.use is not None and not request.use.lock.released:
            request.use.lock.release_state()

    # -- while it runs -------------------------------------------------------------------------------------------

    def save(self, request: Request) -> None:
        """Save the state that the last forward left, if it lies where one is wanted. Never raises for want of room."""
        use, depth = request.use, request.computed
        if use is None:
            return
        role = use.checkpoints.pop(depth, None)
        if role is not None:
            self._save(request, use, depth, role)
        elif request.status is Status.DECODE and depth > use.saved and self.tracker.decode_depths(depth - 1, depth):
            self._track(request, use, depth)

    def _save(self, request: Request, use: PrefixUse, depth: int, role: str) -> None:
        slot = None
        if self.state_kind is not None:
            slot = self.cache.optional_slot(depth=depth, above=use.saved, chunk_end=role == "chunk")
            if slot is None:
                return
            self._copy_live(request, slot)
        if not self._insert(request, use, depth, slot, role) and slot is not None:
            self.planner.free([slot.handle])  # somebody else saved it meanwhile
        use.saved = depth

    def _track(self, request: Request, use: PrefixUse, depth: int) -> None:
        """Keep the state of a decode step in a track slot; the last one goes to the cache when the request leaves."""
        if self.state_kind is None:
            return  # without states every page end will do, and those go to the cache at the end
        if use.track is None:
            wanted = self.tracker.slots_per_request() - 1
            slots = [self.cache.optional_slot(depth=depth, above=use.saved) for _ in range(wanted)]
            found = [slot for slot in slots if slot is not None]
            if not found:
                return
            use.track = TrackSlots(found)
        self._copy_live(request, use.track.to_write)
        use.track.wrote(depth)
        use.saved = depth

    def _copy_live(self, request: Request, slot: StateSlot) -> None:
        kind = self.state_kind or ""
        self.planner.copy([request.sequence.slots[kind]], [slot.handle], kind=kind)
        slot.written = True

    def _insert(self, request: Request, use: PrefixUse, depth: int, slot: StateSlot | None, role: str) -> bool:
        """Give the cache the request's first pages and a state; return whether it took the state.

        The lock moves along, so pages stay the cache's while the request runs. States do not: they may be evicted.
        """
        pages = request.sequence.pages[self.page_kind].handles[: -(-depth // self.page_size)]
        inserted = self.cache.insert(
            request.token_slice(0, depth), pages, state=slot, namespace=request.namespace, lock=use.lock, role=role
        )
        back = set(inserted.duplicates)
        use.shared |= set(pages) - back
        if given_up := back.difference(pages):
            self.planner.free(sorted(given_up))
        return slot is not None and inserted.state_rejected is None

    # -- out -----------------------------------------------------------------------------------------------------

    def leave(self, request: Request, *, keep: bool) -> list[int]:
        """End a request's use of the cache, and give the cache what it computed.

        Args:
            keep: its live slot and its pages hold its first ``computed`` tokens; False after a failed forward.

        Returns:
            The handles that are the request's own, for the caller to free.
        """
        use = request.use
        handles = request.sequence.handles() + [handle for spare in request.spare.values() for handle in spare]
        if use is None:
            return handles
        if use.track is not None:
            handles += [slot.handle for slot in use.track.slots]
        donated: set[int] = set()
        if keep and request.computed:
            saved = [] if use.track is None or use.track.latest is None else [use.track.latest]
            live = None if self.state_kind is None else StateSlot(request.sequence.slots[self.state_kind], written=True)
            for slot, depth in (*saved, (live, request.computed)):
                if self._insert(request, use, depth, slot, "final") and slot is not None:
                    donated.add(slot.handle)
        use.lock.release()
        request.use = None
        return [handle for handle in handles if handle not in use.shared and handle not in donated]

    def flush(self) -> int:
        """Evict everything that no running request reads; return the bytes freed."""
        return self.cache.flush().bytes
