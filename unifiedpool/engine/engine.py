"""A small continuous-batching engine: submit, step, stream."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unifiedpool.engine.caching import Caching, unsupported
from unifiedpool.engine.geometry import Geometry, empty_shortfall
from unifiedpool.engine.request import Request, SamplingParams, Status, TokenEvent
from unifiedpool.engine.runner import ModelRunner, PlainRunner, Runner
from unifiedpool.engine.sampling import sample
from unifiedpool.engine.scheduler import Scheduler
from unifiedpool.engine.static_pool import StaticPlanner, StaticPool
from unifiedpool.errors import CapacityError, InvalidArgumentError, format_bytes
from unifiedpool.model_spec import ModelSpec
from unifiedpool.pool import Pool
from unifiedpool.prefix_cache import PrefixCache
from unifiedpool.traces import TraceWriter

__all__ = ["Engine", "EngineConfig", "StepStats", "Totals"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of a step.

    Args:
        chunk_tokens: most tokens of one prefill forward.
        prefill_tokens: prefill tokens of one step, over all requests.
        max_running: most requests that hold memory at once.
        headroom: output tokens that admission reserves room for beyond the prompt; more means fewer retractions
            and fewer requests at once.
        keep_logits: keep the logits that chose each token (tests compare them).
        prefix_cache: start requests from the prefixes of earlier ones. None does wherever the pool can, which leaves
            out a `StaticPool`, models without one kind that keeps every token, and chunks below a page; True refuses
            those.
        tracking: which states a request saves on its way: "extra_buffer", "extra_buffer_lazy", "no_buffer", "auto"; see
            `Tracker`. Their slots are taken only while there is room.
        track_interval: decode checkpoints lie at its multiples, 0 for none; None is about 256.
        eviction: what goes first when room is wanted: "value", "lru", "sglang", "path_cap", "marconi".
    """

    chunk_tokens: int = 512
    prefill_tokens: int = 2048
    max_running: int = 256
    headroom: int = 16
    keep_logits: bool = False
    prefix_cache: bool | None = None
    tracking: str = "auto"
    track_interval: int | None = None
    eviction: str = "value"

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 1), ("prefill_tokens", 1), ("max_running", 1), ("headroom", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
        if self.prefix_cache is not None and not isinstance(self.prefix_cache, bool):
            raise InvalidArgumentError(f"prefix_cache is {self.prefix_cache!r}; it must be True, False or None")


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers.

    ``live_bytes`` counts the cells that requests hold, per kind, in padded strides, after the step's allocations and
    before its requests finish; ``promised_bytes`` what admission holds for them beyond that; ``used_tokens`` the tokens
    in their caches. ``cached_tokens`` is the prefill that this step's admissions were spared, ``cached_bytes`` what the
    prefix cache holds, with what running requests read of it.
    """

    step: int
    running: int
    waiting: int
    admitted: int
    retracted: int
    finished: int
    prefill_tokens: int
    decode_rows: int
    sampled_tokens: int
    used_tokens: int
    live_bytes: dict[str, int]
    promised_bytes: int
    moved_bytes: int
    cached_tokens: int = 0
    cached_bytes: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over an engine's life."""

    steps: int = 0
    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    moved_bytes: int = 0
    running_sum: int = 0
    peak_running: int = 0
    live_bytes_sum: dict[str, int] = field(default_factory=dict)

    @property
    def mean_running(self) -> float:
        """Mean number of requests that held memory, over the steps."""
        return self.running_sum / self.steps if self.steps else 0.0


class Engine:
    """Continuous batching over one pool.

    Args:
        runner: computes forwards (`ModelRunner`, or `StubRunner` for schedules alone).
        pool: a `Pool`, or a `StaticPool` to see what the unified one replaces.
        config: limits of a step.

    One step is: cells for it are taken, the pool's plan is sealed and applied, then the forwards run. Not for
    concurrent calls from several threads.

    >>> from unifiedpool.engine import StubRunner
    >>> from unifiedpool.layout import Layout
    >>> layout = Layout.simple({"state": 4096, "full": 512}, page_sizes={"full": 16})
    >>> engine = Engine(StubRunner(), Pool(layout, 1 << 16))
    >>> request = engine.submit([1, 2, 3], max_new_tokens=4)
    >>> list(engine.stream(request)) == engine.collect(request)
    True
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        config: EngineConfig | None = None,
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.config = config or EngineConfig()
        self.geometry = Geometry.from_layout(pool.layout, runner.windows)
        self._caching = self._make_caching()
        self.scheduler = Scheduler(
            pool.planner,
            self.geometry,
            chunk_tokens=self.config.chunk_tokens,
            prefill_tokens=self.config.prefill_tokens,
            max_running=self.config.max_running,
            headroom=self.config.headroom,
            caching=self._caching,
        )
        self.totals = Totals()
        self.requests: dict[int, Request] = {}  # until they are done and collected
        self.logits: dict[int, list[Any]] = {}
        self._next_id = 0
        self._strides = {name: pool.layout.kind(name).stride_bytes for name in pool.layout.names}
        self._events: list[tuple[Request, TokenEvent]] = []
        self._recorder: TraceWriter | None = None
        self._arrivals: dict[int, float] = {}  # of the requests that are recorded

    def _make_caching(self) -> Caching | None:
        config, reason = self.config, unsupported(self.geometry)
        if isinstance(self.pool, StaticPool):
            reason = "what a static pool's cache gave up of one sort would not help the other; use a Pool"
        elif isinstance(self.runner, PlainRunner):
            reason = "plain tensors have no cells to share"
        elif reason is None and config.chunk_tokens < max(self.geometry.page_sizes.values()):
            reason = f"a chunk of {config.chunk_tokens} tokens is less than a page"
        if config.prefix_cache is False or (config.prefix_cache is None and reason is not None):
            return None
        if reason is not None:
            raise InvalidArgumentError(f"prefix_cache=True, but there can be none: {reason}")
        return Caching(
            self.pool.planner,
            self.geometry,
            chunk_tokens=config.chunk_tokens,
            tracking=config.tracking,
            track_interval=config.track_interval,
            eviction=config.eviction,
        )

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache, None when it is off."""
        return None if self._caching is None else self._caching.cache

    def cached_tokens(self, request_id: int) -> int:
        """Return how many of a request's prompt tokens were found in the prefix cache; 0 until it is admitted.

        Raises:
            InvalidArgumentError: no such request, or it was collected.
        """
        request = self._find(request_id)
        if request is None:
            raise InvalidArgumentError(f"request {request_id} was collected")
        return request.cached_tokens or 0

    def flush(self) -> int:
        """Empty the prefix cache, but for what running requests read; return the bytes freed."""
        return 0 if self._caching is None else self._caching.flush()

    def record(self, path: str | Path, *, block_tokens: int = 16) -> TraceWriter:
        """Record what is submitted from now on and finishes, as a trace for ``unifiedpool replay``.

        No token is stored: equal blocks after equal blocks get equal ids. Close the writer, or leave its ``with``
        block, to end it. A second call ends the first recording.

        Raises:
            InvalidArgumentError: block_tokens below 1, or the file cannot be written.
        """
        writer = TraceWriter(path, block_tokens=block_tokens)
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = writer
        self._arrivals.clear()
        return writer

    @classmethod
    def for_model(
        cls,
        model: Any,
        arena_bytes: int,
        *,
        page_size: int | None = None,
        static_ratio: float | None = None,
        config: EngineConfig | None = None,
    ) -> Engine:
        """Build layout, pool, runner and engine for a transformers model, on the model's device.

        Args:
            model: a causal language model in eval mode.
            arena_bytes: size of the arena.
            page_size: tokens per page; None lets the layout choose.
            static_ratio: use a `StaticPool` of this ratio instead of a unified pool.
            config: limits of a step.

        Raises:
            UnsupportedModelError: an architecture or layer that the library does not know.
            InvalidArgumentError: an impossible size or ratio.
        """
        dtype = str(model.dtype).removeprefix("torch.")
        spec = ModelSpec.from_config(model.config, kv_dtype=dtype, conv_dtype=dtype, convention="transformers")
        layout = spec.layout(page_size=page_size)
        pool: Pool
        if static_ratio is None:
            pool = Pool(layout, arena_bytes, device=model.device)
        else:
            pool = StaticPool(layout, arena_bytes, ratio=static_ratio, device=model.device)
        return cls(ModelRunner(model, pool), pool, config)

    def submit(
        self,
        prompt: Iterable[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        namespace: Hashable = None,
    ) -> int:
        """Queue a request.

        Args:
            prompt: token ids in [0, vocab), at least one.
            max_new_tokens: at least 1.
            sampling: greedy unless given.
            on_token: called with each `TokenEvent` at the end of the step that made it; it may call ``submit`` and
                ``abort``.
            namespace: requests share prefixes only with those of an equal one (a tenant, an adapter, a salt).

        Returns:
            The request id: 0, 1, 2, ... in order of submission.

        Raises:
            InvalidArgumentError: a token, a count or the length is out of range.
            CapacityError: the request could not run even alone in the empty pool.
        """
        try:
            tokens = [operator.index(token) for token in prompt]
            wanted = operator.index(max_new_tokens)
        except TypeError as error:
            raise InvalidArgumentError(f"prompt and max_new_tokens must be integers: {error}") from None
        if not tokens or wanted < 1:
            raise InvalidArgumentError(
                f"prompt of {len(tokens)} tokens, max_new_tokens {wanted}: both must be at least 1"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.runner.vocab_size:
            raise InvalidArgumentError(
                f"prompt holds token {min(tokens) if min(tokens) < 0 else max(tokens)}; "
                f"the vocabulary has ids 0 to {self.runner.vocab_size - 1}"
            )
        if len(tokens) + wanted > self.runner.max_length:
            raise InvalidArgumentError(
                f"{len(tokens)} prompt tokens + {wanted} new ones; the model takes {self.runner.max_length}"
            )
        try:
            hash(namespace)
        except TypeError:
            raise InvalidArgumentError(f"namespace {namespace!r} is not hashable") from None
        request = Request(self._next_id, tokens, wanted, sampling or SamplingParams(), on_token, namespace=namespace)
        self._check_can_ever_run(request)
        self._next_id += 1
        self.requests[request.request_id] = request
        if self.config.keep_logits:
            self.logits[request.request_id] = []
        self.scheduler.add(request)
        self.totals.submitted += 1
        if self._recorder is not None and not self._recorder.closed:
            self._arrivals[request.request_id] = time.monotonic()
        return request.request_id

    def abort(self, request_id: int) -> bool:
        """End a request now, at whatever stage, and give all its memory back, or to the prefix cache.

        Returns:
            False when it was already done or collected.

        Raises:
            InvalidArgumentError: no request ever had this id.
        """
        request = self._find(request_id)
        if request is None or request.done:
            return False
        self._end(request, Status.ABORTED)
        self.totals.aborted += 1
        event = TokenEvent(request_id, None, request.num_tokens, True)
        if request.on_token is not None:
            request.on_token(event)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> StepStats:
        """Run one step: take cells, apply the plan, prefill chunks, decode, hand out tokens.

        Returns:
            The step in numbers. Without work nothing happens and all are zero.

        Raises:
            Whatever a forward or a callback raises. Requests of a failed forward go back to the queue and recompute;
            callbacks run after the engine's own bookkeeping, all of them, and the first
            exception is raised at the end.
        """
        if not self.has_work:
            return StepStats(self.totals.steps, 0, 0, 0, 0, 0, 0, 0, 0, 0, dict.fromkeys(self._strides, 0), 0, 0)
        work = self.scheduler.schedule()
        for request in work.retracted:
            self.runner.release(request.request_id)
        plan = self.pool.step(self.totals.steps)
        moved = plan.moved_bytes if plan is not None else 0
        cached = sum(request.computed for request in work.admitted if not request.retractions)
        self.scheduler.applied(work.admitted)
        running = list(self.scheduler.running)
        live = self._live_bytes(running)
        promised = sum(n * self._strides[kind] for request in running for kind, n in request.promised.items())
        used = sum(request.computed for request in running) + len(work.decode)
        used += sum(chunk.end - chunk.start for chunk in work.prefill)
        cached_bytes = 0
        if self._caching is not None:
            cached_bytes = self.pool.planner.stats().live_bytes - sum(live.values())
        finished_before = self.totals.finished
        self.totals.cached_tokens += cached
        try:
            for chunk in work.prefill:
                logits = self._forward([chunk.request], [chunk.request.token_slice(chunk.start, chunk.end)])
                self.scheduler.computed(chunk.request, chunk.end)
                self.totals.prefill_tokens += chunk.end - chunk.start
                if chunk.request.retractions:
                    self.totals.recomputed_tokens += chunk.end - chunk.start
                if chunk.samples:
                    self._take_token(chunk.request, logits[0])
            if work.decode:
                ends = [request.computed + 1 for request in work.decode]
                last = [request.token_slice(end - 1, end) for request, end in zip(work.decode, ends, strict=True)]
                logits = self._forward(work.decode, last)
                for request, end, row_logits in zip(work.decode, ends, logits, strict=True):
                    self.scheduler.computed(request, end)
                    self._take_token(request, row_logits)
        finally:
            self._count(running, live, moved, len(work.retracted))
            self._deliver()
        return StepStats(
            step=self.totals.steps - 1,
            running=len(running),
            waiting=len(self.scheduler.waiting),
            admitted=len(work.admitted),
            retracted=len(work.retracted),
            finished=self.totals.finished - finished_before,
            prefill_tokens=sum(chunk.end - chunk.start for chunk in work.prefill),
            decode_rows=len(work.decode),
            sampled_tokens=len(work.decode) + sum(chunk.samples for chunk in work.prefill),
            used_tokens=used,
            live_bytes=live,
            promised_bytes=promised,
            moved_bytes=moved,
            cached_tokens=cached,
            cached_bytes=cached_bytes,
        )

    def run(self, on_step: Callable[[StepStats], None] | None = None) -> None:
        """Step until nothing waits or runs."""
        while self.has_work:
            stats = self.step()
            if on_step is not None:
                on_step(stats)

    def stream(self, request_id: int) -> Iterator[int]:
        """Yield the tokens of one request as they come, stepping the engine when there is none yet.

        Raises:
            InvalidArgumentError: no such request, or it was collected.
        """
        request = self._find(request_id)
        if request is None:
            raise InvalidArgumentError(f"request {request_id} was collected; stream it before collect()")
        position = 0
        while True:
            while position < len(request.outputs):
                yield request.outputs[position]
                position += 1
            if request.done:
                return
            self.step()

    def outputs(self, request_id: int) -> list[int]:
        """Return the tokens made so far (a copy)."""
        request = self._find(request_id)
        if request is None:
            raise InvalidArgumentError(f"request {request_id} was collected")
        return list(request.outputs)

    def collect(self, request_id: int) -> list[int]:
        """Return the tokens of a finished or aborted request and forget it.

        A server calls this (or ``collect_done``) so that its memory does not grow with the requests served.

        Raises:
            InvalidArgumentError: it still waits or runs, or was collected before.
        """
        request = self._find(request_id)
        if request is None or not request.done:
            state = "was collected before" if request is None else f"is {request.status.value}; abort it or let it end"
            raise InvalidArgumentError(f"request {request_id} {state}")
        del self.requests[request_id]
        self.logits.pop(request_id, None)
        return request.outputs

    def collect_done(self) -> dict[int, list[int]]:
        """Collect every finished or aborted request. O(requests held)."""
        done = [request_id for request_id, request in self.requests.items() if request.done]
        return {request_id: self.collect(request_id) for request_id in done}

    def _find(self, request_id: int) -> Request | None:
        if not 0 <= request_id < self._next_id:
            raise InvalidArgumentError(f"no request {request_id}; ids so far: 0 to {self._next_id - 1}")
        return self.requests.get(request_id)

    def _check_can_ever_run(self, request: Request) -> None:
        demand = self.scheduler.peak_demand(request)
        planner = self.pool.planner
        if isinstance(planner, StaticPlanner):
            short = planner.empty_shortfall(planner.demand(dict(demand.items())))
        else:
            short = empty_shortfall(planner.layout, planner.arena_bytes, demand)
        if short:
            parts = ", ".join(
                f"{count} {kind} ({format_bytes(count * self._strides[kind])})" for kind, count in demand.items()
            )
            raise CapacityError(
                f"a request of {len(request.prompt)} prompt + {request.max_new_tokens} new tokens needs {parts}; "
                f"the empty pool of {format_bytes(planner.arena_bytes)} is {format_bytes(short)} short: "
                "shorten it or enlarge the arena"
            )

    def _forward(self, requests: list[Request], tokens: list[list[int]]) -> Any:
        try:
            return self.runner.forward(requests, tokens)
        except BaseException:
            # States may be half-way between two tokens: only a recomputation is safe.
            for request in requests:
                self.scheduler.retract(request, keep=False)
                self.runner.release(request.request_id)
            raise

    def _take_token(self, request: Request, logits: Any) -> None:
        position = request.num_tokens
        token = sample(logits, request.sampling, request.request_id, position)
        request.outputs.append(token)
        if self.config.keep_logits:
            self.logits[request.request_id].append(logits.clone())
        finished = len(request.outputs) == request.max_new_tokens or token in request.sampling.stop_tokens
        if finished:
            self._end(request, Status.FINISHED)
            self.totals.finished += 1
        self._events.append((request, TokenEvent(request.request_id, token, position, finished)))

    def _end(self, request: Request, status: Status) -> None:
        arrival = self._arrivals.pop(request.request_id, None)
        if arrival is not None and status is Status.FINISHED and self._recorder and not self._recorder.closed:
            self._recorder.add(arrival, request.prompt, request.outputs)
        self.scheduler.remove(request, status)
        self.runner.release(request.request_id)

    def _live_bytes(self, running: Sequence[Request]) -> dict[str, int]:
        live = dict.fromkeys(self._strides, 0)
        for request in running:
            shared = request.use.shared if request.use is not None else ()
            for kind, run in request.sequence.pages.items():
                own = sum(handle not in shared for handle in run.handles) if shared else len(run.handles)
                live[kind] += (own + len(request.spare.get(kind, ()))) * self._strides[kind]
            tracked = request.use.track.slots if request.use is not None and request.use.track is not None else ()
            for kind in request.sequence.slots:
                live[kind] += (1 + len(tracked)) * self._strides[kind]
        return live

    def _count(self, running: Sequence[Request], live: Mapping[str, int], moved: int, retracted: int) -> None:
        totals = self.totals
        totals.steps += 1
        totals.running_sum += len(running)
        totals.peak_running = max(totals.peak_running, len(running))
        totals.moved_bytes += moved
        totals.retractions += retracted
        for kind, count in live.items():
            totals.live_bytes_sum[kind] = totals.live_bytes_sum.get(kind, 0) + count

    def _deliver(self) -> None:
        events, self._events = self._events, []
        failure: BaseException | None = None
        for request, event in events:
            if request.on_token is None or (request.status is Status.ABORTED and event.token is not None):
                continue  # an earlier callback of this round aborted it
            try:
                request.on_token(event)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
