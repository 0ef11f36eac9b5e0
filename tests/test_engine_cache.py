"""The prefix cache in the engine: what is reused, that it is right to the bit, and that every cell is accounted for."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from unifiedpool.engine import Engine, EngineConfig, Geometry, ModelRunner, PlainRunner, Request, StaticPool, StubRunner
from unifiedpool.errors import CapacityError, InvalidArgumentError
from unifiedpool.integrations.sequences import PlainBatch, PlainSequence
from unifiedpool.layout import Layout, PaddingWarning
from unifiedpool.pool import Pool

CHUNK = 16
ARCHITECTURES = (
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "lfm2",
    "gemma3",
    "gpt_oss",
)


# -- helpers ---------------------------------------------------------------------------------------------------------


class MirrorRunner(ModelRunner):
    """Computes every forward a second time on plain tensors without pages, slots or a cache, and compares the bits.

    A request that starts from a hit starts there from a clone of what an earlier request left at that depth.
    """

    def __init__(self, model: Any, pool: Pool) -> None:
        super().__init__(model, pool)
        self.rows: dict[int, PlainSequence] = {}
        self.known: dict[tuple[int, ...], PlainSequence] = {}
        self.forwards = self.hits = 0
        self._plain = PlainRunner(model, pool)
        self._plain._geometry = Geometry(self._geometry.page_sizes, {}, ())  # the real forward slides the windows

    def forward(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute twice."""
        rows, ends = [], []
        for request, new in zip(requests, tokens, strict=True):
            row = self.rows.get(request.request_id)
            if row is None:
                start = tuple(request.token_slice(0, request.computed))
                self.hits += bool(start)
                row = self.row_at(start) if start else PlainSequence()
                self.rows[request.request_id] = row
            assert row.length == request.computed
            rows.append(row)
            ends.append((*request.token_slice(0, request.computed), *new))
        self._plain._batch = lambda _: PlainBatch(self.layer_windows, rows)  # type: ignore[method-assign]
        expected = self._plain.forward(requests, tokens)
        logits = super().forward(requests, tokens)
        self.forwards += 1
        assert torch.equal(logits, expected), f"forward {self.forwards}: {requests}"
        for row, end in zip(rows, ends, strict=True):
            self.known.setdefault(end, clone(row))
        return logits

    def row_at(self, start: tuple[int, ...]) -> PlainSequence:
        """A clone of what was left after these tokens. Without states that may be parts of longer rows."""
        if start in self.known:
            return clone(self.known[start])
        row = PlainSequence(len(start))
        for layer in next(iter(self.known.values())).keys:
            first = max(0, len(start) - self.layer_windows.get(layer, len(start) + 1) + 1)
            picked = []
            for position in range(first, len(start)):
                end, at = next(
                    (known, known.length - position)
                    for tokens, known in self.known.items()
                    if tokens[: position + 1] == start[: position + 1]
                    and 0 < known.length - position <= known.keys[layer].shape[1]
                    and not known.states
                )
                picked.append((end.keys[layer][:, -at], end.values[layer][:, -at]))
            row.keys[layer], row.values[layer] = (torch.stack(part, dim=1) for part in zip(*picked, strict=True))
        return row

    def release(self, request_id: int) -> None:
        """Forget the plain tensors of a request."""
        self.rows.pop(request_id, None)


def clone(sequence: PlainSequence) -> PlainSequence:
    """A copy that shares no tensor."""
    return PlainSequence(
        sequence.length,
        {layer: tensor.clone() for layer, tensor in sequence.keys.items()},
        {layer: tensor.clone() for layer, tensor in sequence.values.items()},
        {key: tensor.clone() for key, tensor in sequence.states.items()},
    )


def config(**options: Any) -> EngineConfig:
    """Small limits unless said otherwise."""
    limits = {"chunk_tokens": CHUNK, "prefill_tokens": 64, "headroom": 4, "prefix_cache": True, "track_interval": 16}
    return EngineConfig(**{**limits, **options})


def model_engine(
    name: str, dtype: torch.dtype = torch.float32, arena_bytes: int = 1 << 21, page_size: int = 8, **options: Any
) -> tuple[Engine, MirrorRunner]:
    """An engine whose every forward is checked."""
    pytest.importorskip("transformers")
    from unifiedpool.integrations import tiny_models
    from unifiedpool.model_spec import ModelSpec

    model = tiny_models.build(name, dtype)
    kind = str(dtype).removeprefix("torch.")
    spec = ModelSpec.from_config(model.config, kv_dtype=kind, conv_dtype=kind, convention="transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)
        pool = Pool(spec.layout(page_size=page_size), arena_bytes)
    pool.arena.buffer.fill_(0x7B)  # what was there before must not matter
    runner = MirrorRunner(model, pool)
    return Engine(runner, pool, config(**options)), runner


def stub_engine(arena_bytes: int = 60 * 4096, window: int = 0, **options: Any) -> Engine:
    """A state of 4 KiB beside pages of 512 B and 8 tokens, and window parts if asked for."""
    kinds = {"state": 4096, "full": 512, **({"swa": 512} if window else {})}
    layout = Layout.simple(kinds, page_sizes={name: 8 for name in kinds if name != "state"})
    runner = StubRunner(64, windows={"swa": window} if window else None)
    return Engine(runner, Pool(layout, arena_bytes), config(**options))


def serve(engine: Engine, prompt: Sequence[int], count: int, namespace: str | None = None) -> tuple[list[int], int]:
    """Run one request; return everything it is now, and its cached tokens."""
    request_id = engine.submit(prompt, count, namespace=namespace)
    engine.run()
    return [*prompt, *engine.outputs(request_id)], engine.cached_tokens(request_id)


def check(engine: Engine) -> None:
    """The cache, the running requests and the planner agree on every cell."""
    cache, planner = engine.prefix_cache, engine.pool.planner
    assert cache is not None
    cache.validate()
    planner.validate()
    running = engine.scheduler.running
    assert cache.tree.stats()["receipts"] == sum(request.use is not None for request in running)
    live = {name: kind.live for name, kind in planner.stats().kinds.items()}
    own = engine._live_bytes(running)
    for name, ledger in cache.ledger().items():
        assert live[name] == ledger["held"] + own[name] // planner.layout.kind(name).stride_bytes, name


def assert_empty_after_flush(engine: Engine) -> None:
    """Every byte is back."""
    check(engine)
    engine.flush()
    stats = engine.pool.planner.stats()
    assert stats.live_bytes == stats.live_handles == 0
    assert all(kind.reserved == 0 for kind in stats.kinds.values())


def prompt_of(rng: random.Random, length: int, vocab: int = 512) -> list[int]:
    """Random tokens."""
    return [rng.randrange(vocab) for _ in range(length)]


# -- bit-equality ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hits_of_every_sort_bit_equal_to_plain_tensors(name: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Turns, forks off a prompt and off a turn, and the same prompt again; batched decodes among them."""
    engine, runner = model_engine(name, dtype)
    system = prompt_of(rng, 40)
    first, cached = serve(engine, [*system, *prompt_of(rng, 5)], 7)
    assert cached == 0
    second, cached = serve(engine, [*first, *prompt_of(rng, 6)], 5)
    assert cached == len(first) - 1  # all but the last token, which was never computed: the unaligned tail
    third = [*second, *prompt_of(rng, 3)]
    for handle in relocate_states(engine, rng):
        assert engine.pool.planner.is_live(handle)
    ids = [
        engine.submit(prompt, 6)
        for prompt in (third, [*second[:-2], *prompt_of(rng, 9)], [*system, *prompt_of(rng, 9)], third)
    ]
    engine.run()
    assert engine.cached_tokens(ids[0]) == len(second) - 1
    serve(engine, third, 3)
    assert runner.hits >= 3
    check(engine)
    assert_empty_after_flush(engine)


def relocate_states(engine: Engine, rng: random.Random) -> list[int]:
    """Move every cached cell of the largest kind somewhere else, as an evacuation does."""
    planner = engine.pool.planner
    kind = planner.layout.names[0]
    stride = planner.layout.kind(kind).stride_bytes
    free = [
        cell
        for offset, length in planner.free_extents()
        for cell in range(-(-offset // stride), (offset + length) // stride)
    ]
    handles = planner.live_cells(kind)[1].tolist()
    for handle, cell in zip(handles, rng.sample(free, len(handles)), strict=True):
        planner.relocate(handle, kind, cell)
    assert handles
    return handles


@pytest.mark.parametrize("kind", ["state", "full"])
def test_flipped_bytes_in_a_cached_cell_are_seen(kind: str, rng: random.Random) -> None:
    """The canary of the comparison."""
    engine, _ = model_engine("qwen3_next")
    text, _ = serve(engine, prompt_of(rng, 20), 2)
    cells = engine.pool.planner.live_cells(kind)[0].tolist()
    for view in engine.pool.arena.views(kind, layer=3 if kind == "full" else 0).values():
        view[cells] += 1.0
    with pytest.raises(AssertionError, match="forward"):
        serve(engine, [*text, 1], 2)


# -- pressure, abort, retraction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 5, 24])
@pytest.mark.parametrize("tracking", ["no_buffer", "extra_buffer", "extra_buffer_lazy"])
def test_random_chats_in_a_tight_arena_account_for_every_cell(window: int, tracking: str, rng: random.Random) -> None:
    """Turns, forks, aborts and retractions; the same tokens as without a cache."""
    for _ in range(3):
        arena_bytes = rng.randrange(8, 26) * 4096
        options = {"headroom": rng.randrange(8), "max_running": rng.randrange(2, 7), "prefill_tokens": 40}
        engine = stub_engine(arena_bytes, window, tracking=tracking, **options)
        plain = stub_engine(1 << 20, window, prefix_cache=False)
        texts: list[list[int]] = [[1] * 20]
        waiting: dict[int, int] = {}
        for _ in range(120):
            if rng.random() < 0.4 and len(waiting) < 12:
                text = rng.choice(texts)
                prompt = [*text[: rng.choice([len(text), rng.randrange(1, len(text) + 1)])], *prompt_of(rng, 3, 64)]
                count = rng.randrange(1, 30)
                try:
                    waiting[engine.submit(prompt, count)] = plain.submit(prompt, count)
                except CapacityError:
                    continue
            if rng.random() < 0.06 and waiting:
                victim = rng.choice(list(waiting))
                engine.abort(victim)
                plain.abort(waiting.pop(victim))
            engine.step()
            check(engine)
            for request_id in [i for i in waiting if engine.requests[i].done]:
                plain.run()
                assert engine.outputs(request_id) == plain.outputs(waiting.pop(request_id))
                request = engine.requests[request_id]
                if request.num_tokens < 120:
                    texts.append([*request.prompt, *request.outputs])
        engine.run()
        assert_empty_after_flush(engine)
        print(f"{engine.totals}")


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "retracted"])
def test_abort_at_any_stage_leaves_every_cell_to_the_cache(stage: str) -> None:
    engine = stub_engine(24 * 4096)
    text, _ = serve(engine, list(range(40)), 9)
    other = engine.submit([1] * 30, 60)
    if stage == "queued":  # matched at each step, and never admitted
        engine.submit([2] * 700, 90)
    victim = engine.submit([*text, *[3] * 60], 40)
    request = engine.requests[victim]
    for _ in range(300):
        reached = {
            "queued": request.status.value == "waiting" and engine.totals.steps > 20,
            "prefill": request.status.value == "prefill" and request.computed >= len(text) + 16,
            "decode": request.status.value == "decode" and len(request.outputs) > 20,
            "retracted": request.status.value == "waiting" and request.retractions > 0,
        }[stage]
        if reached:
            break
        if stage == "retracted" and request.outputs:
            engine.scheduler.retract(request)
        else:
            engine.step()
        check(engine)
    assert reached
    before = request.computed
    engine.abort(victim)
    check(engine)
    if stage in ("prefill", "decode"):  # what it had computed is not lost
        _, cached = serve(engine, [*request.prompt, *request.outputs, 9], 1)
        assert cached == before
    engine.run()
    assert engine.outputs(other)
    assert_empty_after_flush(engine)


def test_retracted_request_resumes_from_what_it_had(rng: random.Random) -> None:
    """C3: no token is computed twice, and the bits are those of an undisturbed run."""
    engine, runner = model_engine("qwen3_next")
    prompt = prompt_of(rng, 37)
    request_id = engine.submit(prompt, 12)
    request = engine.requests[request_id]
    while engine.has_work:
        engine.step()
        if request.computed in (16, 40, 45) and request.retractions < 3:
            engine.scheduler.retract(request)
            runner.release(request_id)
            check(engine)
    assert request.retractions == 3
    assert engine.totals.prefill_tokens - engine.totals.recomputed_tokens == 16
    assert engine.totals.prefill_tokens == 37 + 2  # each retracted decode leaves its last token to be fed again
    assert request.cached_tokens == 0
    assert_empty_after_flush(engine)


def test_retraction_after_a_failed_forward_keeps_no_half_way_state() -> None:
    engine = stub_engine()
    engine.submit(list(range(40)), 8)
    for _ in range(4):
        engine.step()
    forward, engine.runner.forward = engine.runner.forward, _explode  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine.runner.forward = forward  # type: ignore[method-assign]
    check(engine)
    cache = engine.prefix_cache
    assert cache is not None
    assert cache.match(list(range(40))).hit == 32  # saved while it was whole
    engine.run()
    assert_empty_after_flush(engine)


def _explode(*_: Any) -> Any:
    raise RuntimeError("device lost")


def test_hit_whose_source_is_wanted_by_the_next_admission_is_copied_first(rng: random.Random) -> None:
    """The second request's room is made in the same step, before the first one's copy is applied."""
    engine, runner = model_engine("qwen3_next", arena_bytes=9 * 18432)
    text, _ = serve(engine, prompt_of(rng, 40), 6)
    cache = engine.prefix_cache
    assert cache is not None
    turn = engine.submit([*text, 5], 4)
    large = engine.submit(prompt_of(rng, 280), 30)
    states = cache.stats()["states"]
    stats = engine.step()
    assert stats.admitted == 2
    assert cache.stats()["states"] < states  # it took something, and not what was matched
    engine.run()
    assert engine.cached_tokens(turn) == len(text) - 1
    assert runner.hits == 1
    assert len(engine.outputs(large)) == 30
    assert_empty_after_flush(engine)


def test_request_that_needs_the_whole_arena_goes_on_without_its_hit() -> None:
    """Its lock holds a state and a page that it does not need itself: alone, it lets them go."""
    gave_up = 0
    for tokens in (64, 100, 160, 200):
        pages = -(-(tokens - 1) // 8)
        engine = stub_engine(4096 * (1 + -(-(pages + 1) * 512 // 4096)), headroom=0)
        text, _ = serve(engine, [1] * 20, 4)
        request_id = engine.submit(text, tokens - len(text))
        engine.run()
        assert len(engine.outputs(request_id)) == tokens - len(text)
        gave_up += not engine.requests[request_id].uses_cache
        assert_empty_after_flush(engine)
    assert gave_up > 0


def test_request_without_room_for_a_slot_takes_over_the_checkpoints(rng: random.Random) -> None:
    """B14: one state slot beside the pages of both turns."""
    engine, runner = model_engine("qwen3_next", arena_bytes=2 * 18432, headroom=0)
    text, _ = serve(engine, prompt_of(rng, 40), 6)
    slots = set(engine.pool.planner.live_cells("state")[1].tolist())
    request_id = engine.submit([*text, 5], 4)
    engine.step()
    assert set(engine.requests[request_id].sequence.slots.values()) == slots
    check(engine)
    engine.run()
    assert engine.cached_tokens(request_id) == len(text) - 1
    assert runner.hits == 1
    assert_empty_after_flush(engine)


# -- what is saved where ---------------------------------------------------------------------------------------------


def saved_states(engine: Engine) -> list[int]:
    """Depths of all cached states."""
    assert engine.prefix_cache is not None
    tree = engine.prefix_cache.tree
    return sorted(tree.nodes[node].depth for node in tree.walk() if tree.nodes[node].state)


def test_checkpoints_lie_where_the_design_says(rng: random.Random) -> None:
    """13,600 prompt tokens, chunk 6,144, 512 outputs, interval 256; then two requests that share 10,000 tokens."""
    layout = Layout.simple({"state": 1 << 16, "full": 256}, page_sizes={"full": 1})
    limits = {"chunk_tokens": 6144, "prefill_tokens": 6144, "track_interval": 256, "tracking": "extra_buffer"}
    engine = Engine(StubRunner(1024), Pool(layout, 1 << 24), config(**limits))
    prompt = prompt_of(rng, 13_600, 1024)
    serve(engine, prompt, 512)
    assert saved_states(engine) == [6144, 12_288, 13_568, 14_080, 14_111]  # the last one is the live slot itself
    for expected in (6144, 9984):
        _, cached = serve(engine, [*prompt[:10_000], *prompt_of(rng, 500, 1024)], 1)
        assert cached == expected
        assert 9984 in saved_states(engine)
    assert_empty_after_flush(engine)


@pytest.mark.parametrize(("tracking", "depths"), [("no_buffer", [70]), ("extra_buffer_lazy", [16, 32, 48, 64, 70])])
def test_tracking_strategy_decides_what_is_saved_on_the_way(tracking: str, depths: list[int]) -> None:
    engine = stub_engine(tracking=tracking)
    serve(engine, list(range(51)), 20)
    assert saved_states(engine) == depths
    assert_empty_after_flush(engine)


def test_no_room_for_a_checkpoint_means_none() -> None:
    """B18: an optional checkpoint takes nothing from what runs."""
    engine = stub_engine(4 * 4096, headroom=60)
    serve(engine, [1] * 20, 60)
    assert engine.totals.retractions == 0
    assert_empty_after_flush(engine)


# -- sharing ---------------------------------------------------------------------------------------------------------


def test_running_requests_share_pages_and_namespaces_do_not() -> None:
    engine = stub_engine()
    text, _ = serve(engine, list(range(64)), 2)
    ids = [engine.submit([*text[:64], 60 + number], 9) for number in range(3)]
    foreign = engine.submit([*text[:64], 60], 9, namespace="other")
    engine.step()
    tables = [engine.requests[i].sequence.pages["full"].handles[:8] for i in (*ids, foreign)]
    assert tables[0] == tables[1] == tables[2] != tables[3]
    assert [engine.cached_tokens(i) for i in (*ids, foreign)] == [64, 64, 64, 0]
    check(engine)
    before = engine.pool.planner.stats().live_bytes
    assert engine.flush() < before  # what is being read stays
    check(engine)
    engine.run()
    _, cached = serve(engine, [*text[:64], 60], 2, namespace="other")
    assert cached == 64
    assert engine.totals.cached_tokens == 4 * 64
    assert_empty_after_flush(engine)
    assert len(engine.prefix_cache.tree.namespaces) <= 2  # type: ignore[union-attr]


def test_step_statistics_count_cached_tokens_and_bytes() -> None:
    engine = stub_engine()
    text, _ = serve(engine, list(range(50)), 3)
    engine.submit([*text, 1], 2)
    stats = engine.step()
    assert stats.cached_tokens == len(text) - 1
    assert stats.cached_bytes + sum(stats.live_bytes.values()) == engine.pool.planner.stats().live_bytes


def test_pages_of_the_window_are_released_while_a_request_runs() -> None:
    engine = stub_engine(60 * 4096, window=16)
    engine.submit([1] * 160, 100)
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            assert len(request.sequence.pages["swa"].handles) <= 2 + 2 + 1
        check(engine)
    assert engine.pool.planner.stats().kinds["swa"].live < engine.pool.planner.stats().kinds["full"].live
    assert_empty_after_flush(engine)


def test_a_thousand_requests_leave_no_lock_and_no_object_behind() -> None:
    """C7."""
    engine = stub_engine(30 * 4096)
    rng = random.Random(3)

    def serve_some(count: int) -> int:
        for _ in range(count):
            engine.submit([rng.randrange(3) for _ in range(rng.randrange(1, 24))], rng.randrange(1, 4))
            if len(engine.scheduler.waiting) > 50:
                engine.step()
                engine.collect_done()
        engine.run()
        engine.collect_done()
        gc.collect()
        return len(gc.get_objects())

    before = serve_some(300)
    assert serve_some(700) - before < 2000  # places in the order of eviction come and go
    assert not engine.requests
    assert_empty_after_flush(engine)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_pools_and_layouts_that_cannot_have_a_cache_run_without_or_refuse() -> None:
    layout = Layout.simple({"state": 4096, "full": 512}, page_sizes={"full": 16})
    window_only = Layout.simple({"swa": 512}, page_sizes={"swa": 16})
    windows = {"swa": 20}
    for runner, pool, message, chunk in (
        (StubRunner(), StaticPool(layout, 1 << 17), "use a Pool", 16),
        (StubRunner(windows=windows), Pool(window_only, 1 << 17), "keeps every token", 16),
        (StubRunner(), Pool(layout, 1 << 17), "less than a page", 8),
    ):
        engine = Engine(runner, pool, config(prefix_cache=None, chunk_tokens=chunk))
        assert engine.prefix_cache is None
        assert engine.flush() == 0
        assert serve(engine, [1] * 20, 3)[1] == 0
        with pytest.raises(InvalidArgumentError, match=message):
            Engine(runner, pool, config(chunk_tokens=chunk))
    assert Engine(StubRunner(), Pool(layout, 1 << 17)).prefix_cache is not None  # by default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tracking": "sometimes"}, "sometimes"),
        ({"track_interval": 10}, "multiple of the page size"),
        ({"track_interval": -16}, "track_interval"),
        ({"eviction": "random"}, "random"),
        ({"prefix_cache": "yes"}, "prefix_cache"),
    ],
)
def test_bad_options_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        stub_engine(**options)


def test_bad_namespace_and_unknown_request_refused_and_the_engine_goes_on() -> None:
    engine = stub_engine()
    with pytest.raises(InvalidArgumentError, match="not hashable"):
        engine.submit([1], 2, namespace=[])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no request 0"):
        engine.cached_tokens(0)
    serve(engine, [1, 2, 3], 4)
    assert_empty_after_flush(engine)


def test_chunks_off_the_grid_are_rounded_down_to_it() -> None:
    engine = stub_engine(chunk_tokens=45, prefill_tokens=45, track_interval=None)
    assert engine.scheduler.chunk_tokens == 40
    serve(engine, list(range(60)), 4)
    assert saved_states(engine) == [40, 56, 63]
