"""Who runs, who waits, who gives way. Host only: no torch, no model, no bytes.

Rules, in this order, once per step:

1. Every running request gets the cells that its next tokens need, oldest first. When the pool has none, the
   youngest running request is retracted: all its cells go back, it waits at its old place in the queue, and later
   recomputes its tokens.
2. If nobody was retracted, requests are admitted in order of arrival. Admission reserves, as one joint demand, the
   slots, every page of the prompt and ``headroom`` further tokens, so no prefill stops half-way for want of room.
   Nobody overtakes the head of the queue.

No livelock: submit refuses what cannot run alone, the oldest request is the last to be retracted, so it always
advances; and because nobody overtakes, what the others free reaches the head of the queue.

With a prefix cache, what runs comes before what is cached: whoever lacks cells gets them from the cache first. A
request holds what it found there, so alone in a small arena it may lack room because of that: then it goes on without.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unifiedpool.engine.caching import Caching
from unifiedpool.engine.geometry import Geometry
from unifiedpool.engine.request import Request, Status
from unifiedpool.errors import CapacityError, ReservationError
from unifiedpool.integrations.sequences import ArenaSequence, PageRun
from unifiedpool.planner import Demand, Planner
from unifiedpool.prefix_cache import Lock

__all__ = ["Chunk", "Scheduler", "StepWork"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of one request, computed in a forward of their own."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether this is the last chunk, after which a token is sampled."""
        return self.end == self.request.prefill_target


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, in order: each prefill chunk by itself, then all decodes in one forward."""

    prefill: list[Chunk]
    decode: list[Request]
    admitted: list[Request]
    retracted: list[Request]


class Scheduler:
    """Continuous batching over one pool.

    Args:
        planner: where cells come from.
        geometry: cells per kind as a function of the tokens.
        chunk_tokens: most tokens of one prefill forward. Chunks are cut at multiples of it, whatever else runs, so
            a request is computed in the same pieces under every pool.
        prefill_tokens: prefill tokens of one step, over all requests, one chunk each; the chunk that crosses it still
            runs.
        max_running: most requests that hold memory at once.
        headroom: output tokens that admission reserves room for beyond the prompt.
        caching: the prefix cache, if there is one. Chunks are then counted from the hit, rounded down to the
            checkpoints' grid and cut at checkpoints.
    """

    def __init__(
        self,
        planner: Planner,
        geometry: Geometry,
        *,
        chunk_tokens: int,
        prefill_tokens: int,
        max_running: int,
        headroom: int,
        caching: Caching | None = None,
    ) -> None:
        self.planner = planner
        self.geometry = geometry
        self.caching = caching
        self.chunk_tokens = chunk_tokens if caching is None else caching.tracker.chunk_tokens
        self.prefill_tokens = prefill_tokens
        self.max_running = max_running
        self.headroom = headroom
        self.waiting: list[Request] = []  # by request id, which is the order of arrival
        self.running: list[Request] = []  # likewise
        # What is allocated as one handle: a page and its window part together where the cache keeps them so.
        pages: list[tuple[str, ...]] = [(kind,) for kind in geometry.page_sizes]
        if caching is not None and caching.window_kind is not None:
            pages = [(caching.page_kind, caching.window_kind)]
        self._page_items = pages
        self._items = [*pages, *((kind,) for kind in geometry.slots)]
        self._item_demand = planner.demand(dict.fromkeys(self._items, 0))
        self._demand = planner.demand(dict.fromkeys(planner.layout.names, 0))

    def peak_demand(self, request: Request) -> dict[str, int]:
        """Return the most cells that the request will ever hold at once (its last token is never cached)."""
        return self.geometry.peak(len(request.prompt) + request.max_new_tokens - 1, self.chunk_tokens)

    def add(self, request: Request) -> None:
        """Queue a request at the place its id gives it. O(log n) comparisons."""
        request.status = Status.WAITING
        bisect.insort(self.waiting, request, key=lambda other: other.request_id)

    def schedule(self) -> StepWork:
        """Decide the next step and take its cells. Mutates the queue, the running set and the planner."""
        retracted: list[Request] = []
        if self.caching is not None:
            for request in self.running:
                self.caching.save(request)
        for request in list(self.running):
            if request.status is Status.DECODE and request not in retracted:
                self._grow_or_retract(request, retracted)
        admitted = [] if retracted else self._admit()
        prefill: list[Chunk] = []
        budget = self.prefill_tokens
        for request in self.running:
            if request.status is not Status.PREFILL or budget <= 0:
                continue
            end = self._chunk_end(request)
            self._take(request, request.computed, end)
            prefill.append(Chunk(request, request.computed, end))
            budget -= end - request.computed
        decode = [request for request in self.running if request.status is Status.DECODE]
        return StepWork(prefill, decode, admitted, retracted)

    def computed(self, request: Request, end: int) -> None:
        """Record that tokens up to ``end`` are in the cache."""
        request.sequence.length = end
        self._slide(request, end)
        if request.status is Status.PREFILL and end == request.prefill_target:
            request.status = Status.DECODE
            if self.caching is not None and self.caching.window_kind is not None:
                # From now on a window part is wanted only with a page, and the prompt's have all been used.
                surplus = request.promised[self.caching.window_kind] - request.promised[self.caching.page_kind]
                self._promise(request, self.caching.window_kind, -max(0, surplus))
        if request.status is Status.DECODE:
            for spare in request.spare.values():
                # A decode step slides by one token: one page in hand covers it for ever.
                self._free(spare[1:])
                del spare[1:]

    def applied(self, admitted: Iterable[Request]) -> None:
        """The step's plan is applied: what admission copied from may go."""
        if self.caching is not None:
            for request in admitted:
                self.caching.applied(request)

    def remove(self, request: Request, status: Status) -> None:
        """Take a request out at any stage and give every cell and promise back, or to the prefix cache."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif not request.done:
            self.running.remove(request)
            self._release(request)
        request.status = status

    def retract(self, request: Request, *, keep: bool = True) -> None:
        """Take every cell and promise from a running request and queue it again at its old place.

        Args:
            keep: its cells hold what it computed, so that the prefix cache may keep them; False after a failed forward.
        """
        self.running.remove(request)
        self._release(request, keep=keep)
        request.retractions += 1
        self.add(request)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._open(request):
                break
            del self.waiting[0]
            bisect.insort(self.running, request, key=lambda other: other.request_id)
            admitted.append(request)
        return admitted

    def _open(self, request: Request) -> bool:
        """Reserve what the head of the queue needs, with what the prefix cache has of it; False when it must wait."""
        target = request.num_tokens
        most = len(request.prompt) + request.max_new_tokens - 1
        total = max(target, min(target + self.headroom, most))
        caching, lock = self.caching, None
        match = caching.find(request) if caching is not None else None
        if caching is not None and match is not None:
            demand = self.geometry.peak(total, self.chunk_tokens, match.hit)
            caching.extra(demand)
            lock = caching.hold(match, self._compiled(demand))
            if lock is None and match.state is not None:
                # Without room for a slot of its own it may take over the cache's.
                demand[caching.state_kind or ""] = 0
                lock = caching.hold(match, self._compiled(demand))
                if lock is not None and self._begin(request, demand, lock):
                    return True
                lock = None
            if lock is None and self.running:
                return False
            request.uses_cache = lock is not None
        if lock is None:
            demand = self.geometry.peak(total, self.chunk_tokens)
            if not self._fits(self._compiled(demand)):
                return False
        return self._begin(request, demand, lock)

    def _begin(self, request: Request, demand: dict[str, int], lock: Lock | None) -> bool:
        """Start a request for which there is room; False when it needs a slot beyond the demand and there is none."""
        request.reservation = self.planner.reserve(self._compiled(demand))
        request.promised = dict(demand)
        request.sequence = ArenaSequence(pages={kind: PageRun() for kind in self.geometry.page_sizes})
        request.spare = {kind: [] for kind in self.geometry.windows}
        request.prefill_target = request.num_tokens
        if self.caching is not None and lock is not None:
            self.caching.begin(request, lock)
            if request.computed:
                if not all(demand[kind] for kind in self.geometry.slots) and not self.caching.take_slot(request):
                    self._release(request, keep=False)
                    return False
                self._take(request, request.computed, request.computed)
                self.caching.copy(request)
        request.status = Status.PREFILL
        if not request.retractions:
            request.cached_tokens = request.computed
        return True

    def _chunk_end(self, request: Request) -> int:
        if request.use is None:
            return min(request.computed + self.chunk_tokens, request.prefill_target)
        done = request.computed - request.use.hit
        end = request.computed + self.chunk_tokens - done % self.chunk_tokens
        return min(
            end, request.prefill_target, *(depth for depth in request.use.checkpoints if depth > request.computed)
        )

    def _grow_or_retract(self, request: Request, retracted: list[Request]) -> None:
        while True:
            try:
                self._take(request, request.computed, request.computed + 1)
                return
            except CapacityError:
                youngest = self.running[-1]
                if youngest is request and len(self.running) == 1:
                    if request.use is None:
                        raise  # alone and still too big: submit should have refused it
                    request.uses_cache = False
                self.retract(youngest)
                retracted.append(youngest)
                if youngest is request:
                    return

    def _take(self, request: Request, start: int, end: int) -> None:
        """Make the request hold the cells that computing tokens ``start`` to ``end`` needs. All or nothing."""
        geometry, sequence = self.geometry, request.sequence
        self._slide(request, start)
        need: dict[tuple[str, ...], int] = {(kind,): 1 for kind in geometry.slots if kind not in sequence.slots}
        reuse: dict[str, int] = {}
        for item in self._page_items:
            kind = item[0]
            run = sequence.pages[kind]
            missing = geometry.end_page(kind, end) - run.first - len(run.handles)
            reuse[kind] = min(missing, len(request.spare.get(kind, ())))
            if missing > reuse[kind]:
                need[item] = missing - reuse[kind]
        new = self._obtain(request, need)
        for item in self._page_items:
            for kind in item:
                handles = sequence.pages[kind].handles
                if reuse.get(kind):
                    handles += request.spare[kind][: reuse[kind]]
                    del request.spare[kind][: reuse[kind]]
                handles += new.get(item, ())
        for kind in geometry.slots:
            if (kind,) in new:
                sequence.slots[kind] = new[kind,][0]

    def _slide(self, request: Request, position: int) -> None:
        """Drop the window parts that no token from ``position`` on reads: spare pages, or none with a prefix cache."""
        self.geometry.slide(request.sequence.pages, request.spare, position)
        if self.caching is None:
            return
        for kind, gone in request.spare.items():
            own = [handle for handle in gone if request.use is None or handle not in request.use.shared]
            gone.clear()
            if own:
                self.planner.detach(own, kind)
                if request.status is Status.PREFILL:
                    self._promise(request, kind, len(own))  # the next chunk wants as many

    def _promise(self, request: Request, kind: str, count: int) -> None:
        """Change what is promised by ``count`` cells that were just freed, or are wanted no more."""
        if count and request.reservation is not None:
            request.promised[kind] += count
            request.reservation.cancel()
            request.reservation = self.planner.reserve(self._compiled(request.promised))

    def _obtain(self, request: Request, need: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], list[int]]:
        """Return new handles per item: from the promise as far as it goes, the rest from the pool."""
        if not need:
            return {}
        promised = {item: min(count, *(request.promised.get(kind, 0) for kind in item)) for item, count in need.items()}
        promised = {item: count for item, count in promised.items() if count}
        open_market = {item: count - promised.get(item, 0) for item, count in need.items()}
        open_market = {item: count for item, count in open_market.items() if count}
        new: dict[tuple[str, ...], list[int]] = {item: [] for item in need}
        if open_market:  # the part that can fail goes first
            demand = self._compiled_items(open_market)
            self._fits(demand)
            self._deal(new, open_market, self.planner.allocate(demand))
        if promised:
            if request.reservation is None:
                raise ReservationError(f"request {request.request_id} has promised cells and no reservation")
            self._deal(new, promised, request.reservation.commit(self._compiled_items(promised)))
            for item, count in promised.items():
                for kind in item:
                    request.promised[kind] -= count
        return new

    def _fits(self, demand: Demand) -> bool:
        """Say whether a demand fits, once the prefix cache has made what room it can and needs to."""
        if self.caching is None:
            return self.planner.can_allocate(demand)
        return self.caching.cache.make_room(demand).fits

    def _compiled(self, counts: Mapping[str, int]) -> Demand:
        """One demand over all kinds, refilled: compiling takes longer than the call that uses it."""
        for index, kind in enumerate(self.planner.layout.names):
            self._demand.set(index, counts.get(kind, 0))
        return self._demand

    def _compiled_items(self, counts: Mapping[tuple[str, ...], int]) -> Demand:
        for index, item in enumerate(self._items):
            self._item_demand.set(index, counts.get(item, 0))
        return self._item_demand

    def _deal(
        self, new: dict[tuple[str, ...], list[int]], counts: Mapping[tuple[str, ...], int], handles: Iterable[int]
    ) -> None:
        dealt = iter(handles)
        for item in self._items:
            if item in counts:
                new[item] += itertools.islice(dealt, counts[item])

    def _release(self, request: Request, *, keep: bool = True) -> None:
        if request.reservation is not None:
            request.reservation.cancel()
            request.reservation = None
        if self.caching is not None:
            own = self.caching.leave(request, keep=keep)
        else:
            own = request.sequence.handles() + [handle for spare in request.spare.values() for handle in spare]
        self._free(own)
        request.sequence, request.spare, request.promised = ArenaSequence(), {}, {}

    def _free(self, handles: Sequence[int]) -> None:
        if handles:
            self.planner.free(handles)
