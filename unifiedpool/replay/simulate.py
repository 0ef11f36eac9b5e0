"""A discrete-event model of one replica: the real planner and prefix cache, no bytes, time from `costs`.

One step is one forward: prefill chunks of up to `chunk_tokens` in all, oldest request first, and one token of every
decoding request. Before it, in this order: arrivals join the queue; the head of the queue is admitted while its states,
its prompt's pages and `headroom_tokens` more fit, evicting from the cache; nobody overtakes. Decoding requests get a
page when theirs are full; when there is none, not even by evicting, the youngest request is retracted, returns to the
head of the queue and later computes its tokens again. States are saved at chunk ends, branches, the end of the prompt
and the end of the request, as the tracking strategy says; all of it is locked while its request runs. Window pages are
taken chunk by chunk and given up once no checkpoint before the present depth needs them.

Deterministic: equal inputs give equal results, host times excepted.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError
from ..planner import Handles
from ..prefix_cache import Checkpoint, Lock, Match
from ..sizing import Server
from .costs import Costs, Hardware
from .pools import Pool
from .workload import Job, Workload

__all__ = ["Options", "Simulation"]

# Plans are thrown away; sealing keeps their record short.
_STEPS_PER_SEAL = 64
_MOST_SAMPLES = 800
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Options:
    """How the replica is run.

    Attributes:
        chunk_tokens: most prefill tokens of a step.
        max_running: most requests that hold memory, under every policy.
        headroom_tokens: output tokens that admission wants room for.
        clients: closed loop: this many requests are in the system at any time, arrival times are ignored; 0: open loop.
        stall_s: a step whose moves take longer is counted as a stall.
    """

    chunk_tokens: int = 6144
    max_running: int = 512
    headroom_tokens: int = 256
    clients: int = 0
    stall_s: float = 0.005

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, least in (("chunk_tokens", 64), ("max_running", 1), ("headroom_tokens", 0), ("clients", 0)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(slots=True, eq=False)
class _Request:
    """A request from its arrival to its end."""

    job: Job
    arrival_s: float
    produced: int = 0
    first_token_s: float = -1.0
    admitted_s: float = -1.0
    # while it runs:
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    target: int = 0
    computed: int = 0
    decode_step: int = -1  # step after which it was in this state: computed and produced grow by one each step
    own: array[int] = field(default_factory=lambda: array("i"))
    first_own: int = 0  # pages before this one are the cache's
    window_first: int = 0  # own pages from here
    window_end: int = 0  # to here have a window cell
    states: list[int] = field(default_factory=list)
    lock: Lock | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    epoch: int = 0


class Simulation:
    """One run of a workload under one policy."""

    def __init__(
        self, workload: Workload, server: Server, pool: Pool, costs: Costs, hardware: Hardware, options: Options
    ) -> None:
        """Prepare an empty replica; full and window pages are of one size."""
        self.workload, self.server, self.pool = workload, server, pool
        self.costs, self.hardware, self.options = costs, hardware, options
        self.planner, self.cache = pool.planner, pool.cache
        page = self.page = pool.page_tokens
        self.has_states = server.slot_bytes > 0
        self.grid = self.cache.tree.grid
        chunk = max(1, options.chunk_tokens // self.grid) * self.grid
        self.tracker = replace(server.tracker, page_size=page, chunk_tokens=chunk)
        self.window = server.spec.window if pool.window_bytes else 0
        # What a request may hold in window pages: a chunk, what its next checkpoint needs, and what its last one locks.
        reach = chunk + 2 * self.window + math.lcm(self.grid, workload.block_tokens or 1)
        self.window_pages = -(-reach // page) + 2 if self.window else 0
        self._demand = self.planner.demand(dict.fromkeys(self.planner.layout.names, 0))
        self._items = {name: index for index, name in enumerate(self.planner.layout.names)}
        one_page: tuple[str, ...] = ("full", "swa") if self.window else ("full",)
        self._page_demand = self.planner.demand({one_page: 1})
        self._window_demand = self.planner.demand({"swa": 0}) if self.window else None
        self._out = Handles(1 << 16)
        cap = pool.max_running
        self.max_running = options.max_running if cap is None else min(cap, options.max_running)

        self.now, self.step = 0.0, 0
        self.queue: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.prefilling: list[_Request] = []
        self.decoding = 0
        self.context = 0  # tokens of KV that the decoding requests read in a step
        self.events: dict[int, list[tuple[_Request, int]]] = {}
        self.blocked = False
        self.copied_bytes = 0
        self.moved_bytes = 0
        self.touched = False

        self.done = self.refused = self.retractions = self.refusals = self.wrong_refusals = 0
        self.too_large: list[int] = []
        self.queue_s: list[float] = []
        self.ttft_s: list[float] = []
        self.latency_s: list[float] = []
        self.prompt_tokens = self.hit_tokens = self.output_tokens = self.recomputed_tokens = 0
        self.saved_flops = 0.0
        self.states_saved = self.states_skipped = 0
        self.stalls, self.stall_s = 0, 0.0
        self.running_seconds, self.busy_s, self.most_running = 0.0, 0.0, 0
        self.free_at_refusal: list[float] = []
        self.samples: list[dict[str, float]] = []
        self.sample_every, self.next_sample = max(0.25, workload.jobs[-1].arrival_s / 400), 0.0
        self.allocator_ns = self.cache_ns = 0

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(
        self, progress: Callable[[int], None] = lambda done: None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Run to the end, or until `stop` says so or ctrl-C; return the report.

        Args:
            progress: called now and then with the number of requests that are done.
            stop: asked now and then.
        """
        started = perf_counter_ns()
        try:
            complete = self._loop(progress, stop)
            self._sample()
            progress(self.done + self.refused)
        except KeyboardInterrupt:
            complete = False
        return self._report(complete, perf_counter_ns() - started)

    def _loop(self, progress: Callable[[int], None], stop: Callable[[], bool]) -> bool:
        """Run; say whether it came to the end."""
        jobs, arrived = self.workload.jobs, 0
        clients = self.options.clients
        while True:
            if clients:
                while arrived < len(jobs) and len(self.queue) + len(self.running) < clients:
                    arrived += self._arrive(jobs[arrived], self.now)
            else:
                while arrived < len(jobs) and jobs[arrived].arrival_s <= self.now:
                    arrived += self._arrive(jobs[arrived], jobs[arrived].arrival_s)
            if self.queue and not self.blocked:
                self._admit()
            if not self.running:
                if self.queue:
                    # `_arrive` has asked `fits_alone`, so nothing can be in the way but what nobody holds.
                    raise AssertionError(f"request {self.queue[0].job.index} does not fit an empty replica")
                if arrived == len(jobs):
                    return True
                if not clients:
                    self.now = max(self.now, jobs[arrived].arrival_s)
                continue
            self._forward()
            if not self.step % 256:
                progress(self.done + self.refused)
                if stop():
                    return False

    def _arrive(self, job: Job, when: float) -> int:
        """Queue a job, or refuse one that could never run; return 1."""
        pages = -(-(job.input_tokens + job.output_tokens - 1) // self.page)
        cells = {"state": self.pool.running_states, "full": pages, "swa": min(pages, self.window_pages)}
        if self.pool.fits_alone([cells[name] for name in self.planner.layout.names]):
            self.queue.append(_Request(job, when))
        else:
            self.refused += 1
            self.too_large.append(job.index)
        return 1

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.max_running:
            if not self._try_admit(self.queue[0]):
                self.blocked = True
                return
            self.queue.popleft()

    def _set_demand(self, states: int, pages: int, window_pages: int) -> None:
        for name, count in (("state", states), ("full", pages), ("swa", window_pages)):
            if name in self._items:
                self._demand.set(self._items[name], count)

    def _try_admit(self, request: _Request) -> bool:
        job, page, cache = request.job, self.page, self.cache
        target = job.input_tokens + request.produced
        tokens = self.workload.tokens(job)
        wanted = tokens[:target] if request.produced else self.workload.prompt(job)
        clock = perf_counter_ns()
        match = cache.match_request(wanted)
        self.cache_ns += perf_counter_ns() - clock
        lock = self._make_room(job, target, match)
        if lock is None and match.hit and not self.running:
            # The hit's own state stays locked. `fits_alone` counted without it, and without the hit there is room.
            match = cache.match(wanted, limit=0)
            lock = self._make_room(job, target, match)
        if lock is None:
            return False
        hit, states = match.hit, self.pool.running_states
        pages = -(-target // page) - hit // page
        self._set_demand(states, pages, 0)
        handles = self._allocate(states + pages)
        if self.has_states and self._items["state"] > self._items["full"]:
            handles = handles[pages:] + handles[:pages]
        request.states, request.own = handles[:states].tolist(), handles[states:]
        request.first_own = request.window_first = request.window_end = hit // page
        request.tokens, request.target, request.computed, request.lock = tokens, target, hit, lock
        request.checkpoints = self._checkpoints(job, hit, target, match.branch)
        if hit:
            self.copied_bytes += self.server.slot_bytes
        if request.admitted_s >= 0:
            self.recomputed_tokens += target - hit
        else:
            request.admitted_s = self.now
            self.queue_s.append(self.now - request.arrival_s)
            self.prompt_tokens += job.input_tokens
            self.hit_tokens += hit
            costs = self.costs
            self.saved_flops += hit * costs.flops_per_token + hit * hit / 2 * costs.flops_per_token_context
        self.running.append(request)
        self.prefilling.append(request)
        self.most_running = max(self.most_running, len(self.running))
        return True

    def _make_room(self, job: Job, target: int, match: Match) -> Lock | None:
        """Lock what was found and make room for the rest up to the headroom; None and a refusal when there is none."""
        cache, planner = self.cache, self.planner
        # The last token never gets KV.
        most = job.input_tokens + job.output_tokens - 1
        headroom = -(-max(target, min(target + self.options.headroom_tokens, most)) // self.page)
        pages = headroom - match.hit // self.page
        self._set_demand(self.pool.running_states, pages, min(pages, self.window_pages))
        clock = perf_counter_ns()
        fits = planner.can_allocate(self._demand)
        hopeless = not fits and planner.shortfall(self._demand) > cache.evictable_bytes()
        self.allocator_ns += perf_counter_ns() - clock
        if hopeless:
            self._refuse()
            return None
        clock = perf_counter_ns()
        lock = cache.lock(match)
        if not fits and not cache.make_room(self._demand).fits:
            self.cache_ns += perf_counter_ns() - clock
            self._refuse()
            cache.unlock(lock)
            return None
        self.cache_ns += perf_counter_ns() - clock
        return lock

    def _allocate(self, count: int) -> array[int]:
        clock = perf_counter_ns()
        if count > self._out.capacity:
            self._out = Handles(2 * count)
        handles = array("i", self.planner.allocate(self._demand, self._out, True, True).view)
        self.allocator_ns += perf_counter_ns() - clock
        self.touched = True
        return handles

    def _refuse(self) -> None:
        """Count a refusal, and whether the capacity formula agrees that not even an emptied cache would do."""
        self.refusals += 1
        live = self.pool.live()
        self.free_at_refusal.append(1 - self._taken_bytes(live) / self.pool.arena_bytes)
        # With windows the ledger is a walk over every page: too slow for every refusal.
        if self.pool.name.startswith("unified") and not self.window:
            ledger = self.cache.ledger()
            names = self.planner.layout.names
            held = [have - ledger[name]["evictable"] for have, name in zip(live, names, strict=True)]
            self.wrong_refusals += self.pool.fits_formula(held, self._demand.per_kind())

    def _taken_bytes(self, live: list[int]) -> int:
        pool = self.pool
        sizes = {"full": pool.page_bytes, "swa": pool.window_bytes, "state": pool.state_bytes}
        return sum(count * sizes[name] for count, name in zip(live, self.planner.layout.names, strict=True))

    def _whole(self, job: Job, tokens: int) -> int:
        """Return the deepest depth at most `tokens` where a state can be matched: on the grid, after whole blocks."""
        block = self.workload.block_tokens
        return (tokens // block * block if block else tokens) // self.grid * self.grid

    def _checkpoints(self, job: Job, hit: int, target: int, branch: int | None) -> list[Checkpoint]:
        tail = self._whole(job, target)
        if not self.has_states:
            # Pages are kept anyway; at a fork the window before it is kept too.
            fork = [Checkpoint(branch, "branch")] if self.window and branch and hit < branch < tail else []
            return [*fork, Checkpoint(tail, "tail")] if tail > hit else fork
        planned = [c for c in self.tracker.prefill(hit, target, branch) if c.role != "tail" and c.depth < tail]
        if self.tracker.resolved != "no_buffer" and tail > hit:
            planned.append(Checkpoint(tail, "tail"))
        return planned

    # -- one step ------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        budget, costs = self.options.chunk_tokens, self.costs
        flops = self.decoding * costs.flops_per_token + self.context * costs.flops_per_token_context
        touched = []
        for request in list(self.prefilling):
            if request.lock is None:
                continue  # it gave way to the window of one before it
            count = min(budget, request.target - request.computed)
            if self.window and not self._open_window(request, request.computed + count):
                continue
            middle = request.computed + count / 2
            flops += count * (costs.flops_per_token + middle * costs.flops_per_token_context)
            request.computed += count
            touched.append(request)
            budget -= count
            if not budget:
                break
        moved = 0
        if self.touched:
            total = self.pool.movement().moved
            moved, self.moved_bytes, self.touched = total - self.moved_bytes, total, False
        hardware, server = self.hardware, self.server
        traffic = (
            costs.weight_bytes
            + self.context * server.token_bytes
            + min(self.context, self.decoding * self.window) * server.window_token_bytes
            + 2 * server.slot_bytes * (self.decoding + len(touched))
            + 2 * (moved + self.copied_bytes)
        )
        self.copied_bytes = 0
        duration = max(flops / (hardware.flops * server.spec.tp), traffic / hardware.bandwidth) + hardware.overhead_s
        move_s = 2 * moved / hardware.bandwidth
        if move_s > self.options.stall_s:
            self.stalls += 1
            self.stall_s += move_s
        self.now += duration
        self.busy_s += duration
        self.running_seconds += duration * len(self.running)
        self.step += 1
        self.context += self.decoding
        for request in touched:
            if request.lock is not None:  # else it gave way to one before it in this very step
                self._prefilled(request)
        due = self.events.pop(self.step, None)
        if due:
            self._decoded(due)
        if not self.step % _STEPS_PER_SEAL:
            self.planner.seal()
        if self.now >= self.next_sample:
            self._sample()

    def _prefilled(self, request: _Request) -> None:
        """Save the states that the chunk passed; after the last chunk the first token is there."""
        while request.checkpoints and request.checkpoints[0].depth <= request.computed:
            self._save(request, request.checkpoints.pop(0))
        if self.window:
            self._slide(request)
        if request.computed < request.target:
            return
        self.prefilling.remove(request)
        request.produced += 1
        if request.first_token_s < 0:
            request.first_token_s = self.now
            self.ttft_s.append(self.now - request.arrival_s)
        if request.produced >= request.job.output_tokens:
            self._finish(request)
            return
        self.decoding += 1
        self.context += request.computed
        request.decode_step = self.step
        self._plan_event(request)

    def _plan_event(self, request: _Request) -> None:
        """Look at the request again when its pages are full or its output is complete."""
        room = (request.first_own + len(request.own)) * self.page - request.computed
        if room == 0:
            self._grow([request])
            if request.decode_step < 0:
                return  # it was the one retracted
            room = self.page
        at = self.step + min(room, request.job.output_tokens - request.produced)
        self.events.setdefault(at, []).append((request, request.epoch))

    def _catch_up(self, request: _Request) -> None:
        steps = self.step - request.decode_step
        request.computed += steps
        request.produced += steps
        request.decode_step = self.step

    def _decoded(self, due: list[tuple[_Request, int]]) -> None:
        growing = []
        for request, epoch in due:
            if request.epoch != epoch:
                continue
            self._catch_up(request)
            if request.produced >= request.job.output_tokens:
                self.decoding -= 1
                self.context -= request.computed
                self._finish(request)
            else:
                if self.window:
                    self._slide(request)
                growing.append(request)
        if growing:
            self._grow(growing)
            for request in growing:
                if request.decode_step >= 0:
                    at = self.step + min(self.page, request.job.output_tokens - request.produced)
                    self.events.setdefault(at, []).append((request, request.epoch))

    def _grow(self, requests: list[_Request]) -> None:
        """Give each request one page; the youngest running ones give way when there is none."""
        demand, planner = self._page_demand, self.planner
        while True:
            requests = [request for request in requests if request.decode_step >= 0]
            if not requests:
                return
            demand.set(0, len(requests))
            clock = perf_counter_ns()
            fits = planner.can_allocate(demand)
            self.allocator_ns += perf_counter_ns() - clock
            if not fits:
                clock = perf_counter_ns()
                fits = self.cache.make_room(demand).fits
                self.cache_ns += perf_counter_ns() - clock
            if fits:
                break
            self._retract(self.running[-1])
        clock = perf_counter_ns()
        planner.allocate(demand, self._out, True, True)
        self.allocator_ns += perf_counter_ns() - clock
        self.touched = True
        for request, handle in zip(requests, self._out.view, strict=True):
            request.own.append(handle)
            request.window_end += 1

    def _open_window(self, request: _Request, tokens: int) -> bool:
        """Give the pages of the first `tokens` tokens window cells; say no when the request itself had to give way."""
        start, stop = max(request.window_end, request.first_own), -(-tokens // self.page)
        pages = request.own[start - request.first_own : stop - request.first_own]
        demand = self._window_demand
        assert demand is not None
        demand.set(0, len(pages))
        while not self.cache.make_room(demand).fits:
            self._retract(self.running[-1])
            if request.lock is None:
                return False
        if pages:
            self.planner.attach(pages, "swa", overwrite=True)
            self.touched = True
        request.window_end = max(request.window_end, stop)
        return True

    def _slide(self, request: _Request) -> None:
        """Give up window cells that no checkpoint at or after the last one possible needs."""
        first = max(request.window_first, request.first_own)
        stop = min(max(0, self._whole(request.job, request.computed) - self.window) // self.page, request.window_end)
        if stop > first:
            self.planner.detach(request.own[first - request.first_own : stop - request.first_own], "swa")
            request.window_first = stop

    # -- states, endings -----------------------------------------------------------------------------------------

    def _save(self, request: _Request, checkpoint: Checkpoint) -> None:
        """Give the cache the pages up to a checkpoint, with a state when there is room for one."""
        clock = perf_counter_ns()
        state = 0
        if self.has_states:
            above = request.first_own * self.page
            slot = self.cache.optional_slot(depth=checkpoint.depth, above=above, chunk_end=checkpoint.optional)
            if slot is None:
                self.states_skipped += 1
                self.cache_ns += perf_counter_ns() - clock
                return
            state = slot.handle
            self.copied_bytes += self.server.slot_bytes
            self.touched = True
        self._insert(request, checkpoint.depth, state, checkpoint.role)
        self.cache_ns += perf_counter_ns() - clock

    def _insert(self, request: _Request, depth: int, state: int, role: str) -> None:
        pages = depth // self.page
        count = pages - request.first_own
        handles = array("i", bytes(4 * request.first_own)) + request.own[:count]
        made = self.cache.insert(request.tokens[:depth], handles, state=state or None, lock=request.lock, role=role)
        self.states_saved += bool(state) and made.state_rejected is None
        surplus = made.to_free()
        if surplus:
            self.planner.free(surplus)
        del request.own[:count]
        request.first_own = pages

    def _finish(self, request: _Request) -> None:
        """Donate a state at the end of the request, give the rest back."""
        job = request.job
        clock = perf_counter_ns()
        depth = self._whole(job, job.input_tokens + job.output_tokens - 1)
        if depth > request.first_own * self.page:
            self._insert(request, depth, request.states.pop() if self.has_states else 0, "final")
        self._release(request)
        self.cache_ns += perf_counter_ns() - clock
        self.running.remove(request)
        self.done += 1
        self.output_tokens += job.output_tokens
        self.latency_s.append(self.now - request.arrival_s)

    def _release(self, request: _Request) -> None:
        assert request.lock is not None
        self.cache.unlock(request.lock)
        handles = request.own + array("i", request.states)
        if handles:
            self.planner.free(handles)
        request.own, request.states, request.lock = array("i"), [], None
        request.tokens = np.empty(0, np.int32)
        request.decode_step = -1
        request.epoch += 1
        self.blocked = False

    def _retract(self, request: _Request) -> None:
        """Take everything from a request and put it back at the head of the queue."""
        self.retractions += 1
        if request.decode_step >= 0:
            self._catch_up(request)
            self.decoding -= 1
            self.context -= request.computed
        else:
            self.prefilling.remove(request)
        self.running.remove(request)
        self._release(request)
        self.queue.appendleft(request)

    # -- reporting -----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Record where each byte is now."""
        pool, page, server = self.pool, self.page, self.server
        live = dict(zip(self.planner.layout.names, self.pool.live(), strict=True))
        ledger = self.cache.ledger()
        pages, states = ledger["full"], ledger.get("state", {"evictable": 0, "held": 0, "locked": 0})
        tail_tokens = 0
        for request in self.running:
            computed = request.computed
            if request.decode_step >= 0:
                computed += self.step - request.decode_step
            tail_tokens += (request.first_own + len(request.own)) * page - max(computed, request.target)
        full, state = live["full"], live.get("state", 0)
        token_bytes = server.token_bytes
        tails = tail_tokens * token_bytes
        self.samples.append(
            {
                "t": self.now,
                "running": len(self.running),
                "waiting": len(self.queue),
                "running_kv": (full - pages["evictable"]) * page * token_bytes - tails,
                "running_states": (state - states["evictable"]) * server.slot_bytes,
                "cached_kv": pages["evictable"] * page * token_bytes,
                "cached_states": states["evictable"] * server.slot_bytes,
                "window_kv": live.get("swa", 0) * page * server.window_token_bytes,
                "page_tails": tails,
                "padding": full * (pool.page_bytes - page * token_bytes)
                + live.get("swa", 0) * (pool.window_bytes - page * server.window_token_bytes)
                + state * (pool.state_bytes - server.slot_bytes),
                "hit_rate": self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            }
        )
        if len(self.samples) > _MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.sample_every *= 2
        self.next_sample = self.now + self.sample_every

    def _report(self, complete: bool, wall_ns: int) -> dict[str, Any]:
        arena = self.pool.arena_bytes
        seconds = self.now or 1.0
        parts = ("running_kv", "running_states", "cached_kv", "cached_states", "window_kv", "page_tails", "padding")
        # A sample stands for the time up to the next one.
        times = [sample["t"] for sample in self.samples]
        weights = [b - a for a, b in zip(times, [*times[1:], *times[-1:]], strict=True)]
        total = sum(weights) or 1.0
        means = {
            part: sum(w * sample[part] for w, sample in zip(weights, self.samples, strict=True)) / total / arena
            for part in parts
        }
        null = self.planner.layout.null_bytes if self.pool.name.startswith("unified") else 0
        means |= {"null_cell": null / arena, "pinned": 0.0}
        means["free"] = 1 - sum(means.values())
        movement = self.pool.movement()
        return {
            "policy": self.pool.name,
            "complete": complete,
            "requests": {"done": self.done, "refused": self.refused, "too_large": self.too_large},
            "steps": self.step,
            "seconds": self.now,
            "throughput": {
                "requests_per_s": self.done / seconds,
                "output_tokens_per_s": self.output_tokens / seconds,
                "prompt_tokens_per_s": self.prompt_tokens / seconds,
                "busy_share": self.busy_s / seconds,
            },
            "concurrency": {"mean": self.running_seconds / seconds, "most": self.most_running},
            "queue_s": _distribution(self.queue_s),
            "ttft_s": _distribution(self.ttft_s),
            "latency_s": _distribution(self.latency_s),
            "tokens": {
                "prompt": self.prompt_tokens,
                "hit": self.hit_tokens,
                "hit_rate": self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
                "output": self.output_tokens,
                "recomputed": self.recomputed_tokens,
            },
            "saved_flops": self.saved_flops,
            "retractions": self.retractions,
            "refusals": self.refusals,
            "refusals_against_formula": self.wrong_refusals,
            "free_at_refusal": sum(self.free_at_refusal) / len(self.free_at_refusal) if self.free_at_refusal else None,
            "memory": {
                "useful": sum(means[part] for part in parts[:5]),
                **means,
            },
            "movement": {
                **asdict(movement),
                "moved_share": movement.moved / max(1, movement.allocated),
                "stalls": self.stalls,
                "stall_s": self.stall_s,
            },
            "states": {"saved": self.states_saved, "skipped": self.states_skipped},
            "series": {key: [sample[key] for sample in self.samples] for key in self.samples[0]}
            if self.samples
            else {},
            "host": {
                "wall_s": wall_ns / 1e9,
                "allocator_s": self.allocator_ns / 1e9,
                "cache_s": self.cache_ns / 1e9,
            },
        }


def _distribution(values: list[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank); zeros for none."""
    ordered = sorted(values)
    out = {"mean": sum(ordered) / len(ordered) if ordered else 0.0}
    for percent in _PERCENTILES:
        rank = max(0, math.ceil(percent / 100 * len(ordered)) - 1)
        out[f"p{percent}"] = ordered[rank] if ordered else 0.0
    return out
