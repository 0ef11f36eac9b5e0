"""The prefix cache in the engine: what is reused, that it is right to the bit, and that every cell is accounted for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from unifiedpool.engine import Engine, EngineConfig, Geometry, ModelRunner, PlainRunner, Request, StubRunner
from unifiedpool.errors import CapacityError
from unifiedpool.integrations.sequences import PlainBatch, PlainSequence
from unifiedpool.layout import Layout
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
    assert cache.tree.stats()["receipts"] == len(running)
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
