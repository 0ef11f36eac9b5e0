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
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unifiedpool.engine.geometry import Geometry
from unifiedpool.engine.request import Request, Status
from unifiedpool.errors import CapacityError, ReservationError
from unifiedpool.integrations.sequences import ArenaSequence, PageRun
from unifiedpool.planner import Demand, Planner

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
    ) -> None:
        self.planner = planner
        self.geometry = geometry
        self.chunk_tokens = chunk_tokens
        self.prefill_tokens = prefill_tokens
        self.max_running = max_running
        self.headroom = headroom
        self.waiting: list[Request] = []  # by request id, which is the order of arrival
        self.running: list[Request] = []  # likewise
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
        for request in list(self.running):
            if request.status is Status.DECODE and request not in retracted:
                self._grow_or_retract(request, retracted)
        admitted = [] if retracted else self._admit()
        prefill: list[Chunk] = []
        budget = self.prefill_tokens
        for request in self.running:
            if request.status is not Status.PREFILL or budget <= 0:
                continue
            end = min(request.computed + self.chunk_tokens, request.prefill_target)
            self._take(request, request.computed, end)
            prefill.append(Chunk(request, request.computed, end))
            budget -= end - request.computed
        decode = [request for request in self.running if request.status is Status.DECODE]
        return StepWork(prefill, decode, admitted, retracted)

    def computed(self, request: Request, end: int) -> None:
        """Record that tokens up to ``end`` are in the cache."""
        request.sequence.length = end
        self.geometry.slide(request.sequence.pages, request.spare, end)
        if request.status is Status.PREFILL and end == request.prefill_target:
            request.status = Status.DECODE
        if request.status is Status.DECODE:
            for spare in request.spare.values():
                # A decode step slides by one token: one page in hand covers it for ever.
                self._free(spare[1:])
                del spare[1:]

    def remove(self, request: Request, status: Status) -> None:
        """Take a request out at any stage and give every cell and promise back."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif not request.done:
            self.running.remove(request)
            self._release(request)
        request.status = status

    def retract(self, request: Request) -> None:
        """Take every cell and promise from a running request and queue it again at its old place."""
        self.running.remove(request)
        self._release(request)
        request.retractions += 1
        self.add(request)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            target = request.num_tokens
            most = len(request.prompt) + request.max_new_tokens - 1
            demand = self.geometry.peak(max(target, min(target + self.headroom, most)), self.chunk_tokens)
            if not self.planner.can_allocate(self._compiled(demand)):
                break
            request.reservation = self.planner.reserve(self._compiled(demand))
            request.promised = dict(demand)
            request.sequence = ArenaSequence(pages={kind: PageRun() for kind in self.geometry.page_sizes})
            request.spare = {kind: [] for kind in self.geometry.windows}
            request.prefill_target = target
            request.status = Status.PREFILL
            del self.waiting[0]
            bisect.insort(self.running, request, key=lambda other: other.request_id)
            admitted.append(request)
        return admitted

    def _grow_or_retract(self, request: Request, retracted: list[Request]) -> None:
        while True:
            try:
                self._take(request, request.computed, request.computed + 1)
                return
            except CapacityError:
                youngest = self.running[-1]
                if youngest is request and len(self.running) == 1:
                    raise  # alone and still too big: submit should have refused it
                self.retract(youngest)
                retracted.append(youngest)
                if youngest is request:
                    return

    def _take(self, request: Request, start: int, end: int) -> None:
        """Make the request hold the cells that computing tokens ``start`` to ``end`` needs. All or nothing."""
        geometry, sequence = self.geometry, request.sequence
        geometry.slide(sequence.pages, request.spare, start)
        need = {kind: 1 for kind in geometry.slots if kind not in sequence.slots}
        reuse: dict[str, int] = {}
        for kind in geometry.page_sizes:
            run = sequence.pages[kind]
            missing = geometry.end_page(kind, end) - run.first - len(run.handles)
            reuse[kind] = min(missing, len(request.spare.get(kind, ())))
            if missing > reuse[kind]:
                need[kind] = missing - reuse[kind]
        new = self._obtain(request, need)
        for kind, run in sequence.pages.items():
            if reuse[kind]:
                run.handles += request.spare[kind][: reuse[kind]]
                del request.spare[kind][: reuse[kind]]
            run.handles += new.get(kind, ())
        for kind in geometry.slots:
            if kind in new:
                sequence.slots[kind] = new[kind][0]

    def _obtain(self, request: Request, need: Mapping[str, int]) -> dict[str, list[int]]:
        """Return new handles per kind: from the promise as far as it goes, the rest from the pool."""
        if not need:
            return {}
        promised = {kind: min(count, request.promised.get(kind, 0)) for kind, count in need.items()}
        promised = {kind: count for kind, count in promised.items() if count}
        open_market = {kind: count - promised.get(kind, 0) for kind, count in need.items()}
        open_market = {kind: count for kind, count in open_market.items() if count}
        new: dict[str, list[int]] = {kind: [] for kind in need}
        if open_market:  # the part that can fail goes first
            self._deal(new, open_market, self.planner.allocate(self._compiled(open_market)))
        if promised:
            if request.reservation is None:
                raise ReservationError(f"request {request.request_id} has promised cells and no reservation")
            self._deal(new, promised, request.reservation.commit(self._compiled(promised)))
            for kind, count in promised.items():
                request.promised[kind] -= count
        return new

    def _compiled(self, counts: Mapping[str, int]) -> Demand:
        """One demand over all kinds, refilled: compiling takes longer than the call that uses it."""
        for index, kind in enumerate(self.planner.layout.names):
            self._demand.set(index, counts.get(kind, 0))
        return self._demand

    def _deal(self, new: dict[str, list[int]], counts: Mapping[str, int], handles: Iterable[int]) -> None:
        dealt = iter(handles)
        for kind in self.planner.layout.names:
            if kind in counts:
                new[kind] += itertools.islice(dealt, counts[kind])

    def _release(self, request: Request) -> None:
        if request.reservation is not None:
            request.reservation.cancel()
            request.reservation = None
        self._free(request.sequence.handles() + [handle for spare in request.spare.values() for handle in spare])
        request.sequence, request.spare, request.promised = ArenaSequence(), {}, {}

    def _free(self, handles: Sequence[int]) -> None:
        if handles:
            self.planner.free(handles)
