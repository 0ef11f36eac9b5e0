"""UnifiedCache against DynamicCache, bit by bit, on tiny models of every architecture."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache

from unifiedpool.errors import CapacityError, InvalidArgumentError, LayoutMismatchError, UnsupportedModelError
from unifiedpool.integrations import tiny_models
from unifiedpool.integrations.sequences import ArenaBatch, ArenaSequence, PlainBatch, PlainSequence, release
from unifiedpool.integrations.transformers import UnifiedCache, attention_masks, layer_windows
from unifiedpool.layout import Layout, PaddingWarning
from unifiedpool.model_spec import ModelSpec
from unifiedpool.pool import Pool

ARCHITECTURES = tiny_models.NAMES[:10]
FURTHER = tiny_models.NAMES[10:]
DTYPES = (torch.bfloat16, torch.float32)
PROMPT = 37
STEPS = 24
# Pages of 16: [1, 15, 16, 5] ends on page boundaries, [7, 1, 29] off them; 29 tokens pass a whole window of 24.
CHUNKS = ((37,), (1, 15, 16, 5), (7, 1, 29))

Between = Callable[[], None]


def prompt(rows: int = 1, tokens: int = PROMPT, seed: int = 3) -> torch.Tensor:
    """Random token ids [rows, tokens]."""
    return torch.randint(0, tiny_models.VOCAB_SIZE, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def make_layout(model: Any, page_size: int = 16, **options: Any) -> Layout:
    """The layout of a tiny model; its padding does not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)
        return ModelSpec.from_config(model.config, convention="transformers").layout(page_size=page_size, **options)


def make_pool(model: Any, page_size: int = 16, arena_bytes: int = 1 << 21, **options: Any) -> Pool:
    """A pool with far more room than the tests need, full of NaN bytes."""
    pool = Pool(make_layout(model, page_size, **options), arena_bytes)
    pool.arena.buffer[pool.layout.null_bytes :] = 0xFF
    return pool


@torch.inference_mode()
def run(
    model: Any, cache: Any, ids: torch.Tensor, chunks: Sequence[int], steps: int, between: Between | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill in chunks, decode greedily. Returns tokens [rows, steps] and the logits of every position."""
    logits, tokens, position = [], [], 0
    assert sum(chunks) == ids.shape[1]
    while len(tokens) < steps:
        if position < ids.shape[1]:
            fed = ids[:, position : position + chunks[len(logits)]]
        else:
            fed = logits[-1][:, -1].argmax(-1, keepdim=True)
            tokens.append(fed)
        position_ids = torch.arange(position, position + fed.shape[1]).expand(len(ids), -1)
        logits.append(model(fed, cache=cache, position_ids=position_ids).logits)
        position += fed.shape[1]
        if between is not None:
            between()
    return torch.cat(tokens, 1), torch.cat(logits, 1)


@functools.cache
def reference(name: str, dtype: torch.dtype, chunks: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What DynamicCache gives."""
    model = tiny_models.build(name, dtype)
    tokens, logits = run(model, DynamicCache(config=model.config), prompt(rows), chunks, STEPS)
    assert torch.isfinite(logits).all()
    return tokens, logits


def check(
    name: str, dtype: torch.dtype, chunks: tuple[int, ...], rows: int, between: Any = None, **options: Any
) -> None:
    """Assert that tokens and logits are those of DynamicCache, and that every byte comes back."""
    model = tiny_models.build(name, dtype)
    pool = make_pool(model, **options)
    expected_tokens, expected_logits = reference(name, dtype, chunks, rows)
    with UnifiedCache(pool, model) as cache:
        tokens, logits = run(
            model, cache, prompt(rows), chunks, STEPS, functools.partial(between, pool) if between else None
        )
        assert torch.equal(tokens, expected_tokens)
        assert torch.equal(logits, expected_logits)
        assert cache.get_seq_length() == PROMPT + STEPS
        pool.planner.validate()
    assert pool.planner.stats().live_handles == 0


def cells_in_free_extents(pool: Pool, kind: str) -> list[int]:
    """The available cells of a kind."""
    stride = pool.layout.kind(kind).stride_bytes
    return [
        cell
        for offset, length in pool.planner.free_extents()
        for cell in range(-(-offset // stride), (offset + length) // stride)
    ]


def poison_free_bytes(pool: Pool) -> None:
    """Fill every byte that no live cell owns with NaN."""
    for offset, length in pool.planner.free_extents():
        pool.arena.buffer[offset : offset + length] = 0xFF


def relocate_everything(rng: random.Random, pool: Pool) -> None:
    """Move every live page and slot to an available cell, in random order, and poison what they left."""
    live = [(kind, int(h)) for kind in pool.layout.names for h in pool.planner.live_cells(kind)[1]]
    rng.shuffle(live)
    for kind, handle in live:
        before = pool.planner.cell(handle, kind)
        pool.planner.relocate(handle, kind, rng.choice(cells_in_free_extents(pool, kind)))
        assert pool.planner.cell(handle, kind) != before
    assert pool.step() is not None
    poison_free_bytes(pool)


# -- equality with DynamicCache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: "+".join(map(str, chunks)))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_prefill_and_decode_equal_dynamic_cache(name: str, dtype: torch.dtype, chunks: tuple[int, ...]) -> None:
    check(name, dtype, chunks, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_relocated_between_steps_equals_dynamic_cache(name: str, dtype: torch.dtype, seed: int) -> None:
    check(name, dtype, CHUNKS[1], 1, functools.partial(relocate_everything, random.Random(seed)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_batch_relocated_between_steps_equals_dynamic_cache(name: str, seed: int) -> None:
    check(name, torch.float32, CHUNKS[2], 2, functools.partial(relocate_everything, random.Random(seed)), page_size=8)


@pytest.mark.parametrize("name", FURTHER)
def test_cache_further_architectures_equal_dynamic_cache(name: str, seed: int) -> None:
    check(name, torch.float32, CHUNKS[1], 1, functools.partial(relocate_everything, random.Random(seed)))


@pytest.mark.parametrize("options", [{"format": "HND"}, {"order": "token"}, {"order": "head"}], ids=str)
def test_cache_page_orders_equal_dynamic_cache(options: dict[str, str]) -> None:
    check("qwen3_next", torch.bfloat16, CHUNKS[1], 1, page_size=8, **options)


@pytest.mark.soak
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("chunks", [*CHUNKS, (1,) * PROMPT, (36, 1), (16, 16, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_cache_every_combination_equals_dynamic_cache(
    name: str, dtype: torch.dtype, rows: int, chunks: tuple[int, ...], page_size: int, seed: int
) -> None:
    between = functools.partial(relocate_everything, random.Random(seed))
    check(name, dtype, chunks, rows, between, page_size=page_size, arena_bytes=1 << 22)


# -- generate --------------------------------------------------------------------------------------------------------


def generate(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> Any:
    """`generate` with everything that matters spelled out."""
    return model.generate(
        ids,
        cache=cache,
        position_ids=torch.arange(ids.shape[1]).expand(len(ids), -1),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **options},
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generate_with_unified_cache_equals_dynamic_cache(name: str) -> None:
    model = tiny_models.build(name, torch.bfloat16)
    rows = 1 + ARCHITECTURES.index(name) % 3
    expected = generate(model, DynamicCache(config=model.config), prompt(rows))
    pool = make_pool(model)
    with UnifiedCache(pool, model) as cache:
        found = generate(model, cache, prompt(rows))
        assert cache.get_seq_length() == PROMPT + STEPS - 1
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
    assert pool.planner.stats().live_handles == 0


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 16}, {"do_sample": True}], ids=str)
def test_generate_chunked_or_sampled_equals_dynamic_cache(options: dict[str, Any]) -> None:
    model = tiny_models.build("qwen3_next", torch.float32)
    sequences = []
    for cache in (DynamicCache(config=model.config), UnifiedCache(make_pool(model), model)):
        torch.manual_seed(0)
        sequences.append(generate(model, cache, prompt(2), **options).sequences)
    assert torch.equal(*sequences)


def test_generate_continued_on_the_same_cache_equals_dynamic_cache() -> None:
    model = tiny_models.build("kimi_linear", torch.float32)
    outputs = []
    for cache in (DynamicCache(config=model.config), UnifiedCache(make_pool(model), model)):
        first = generate(model, cache, prompt()).sequences
        turn = torch.cat((first, prompt(1, 9, seed=4)), 1)
        outputs.append(generate(model, cache, turn).sequences)
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_beams": 2}, "beam search"), ({"assistant_model": True}, "rollback")],
    ids=["beams", "assistant"],
)
def test_generate_unsupported_search_raises(options: dict[str, Any], message: str) -> None:
    model = tiny_models.build("lfm2", torch.float32)
    if "assistant_model" in options:
        options = {"assistant_model": model}
    pool = make_pool(model)
    with UnifiedCache(pool, model) as cache, pytest.raises(InvalidArgumentError, match=message):
        generate(model, cache, prompt(), **options)
    assert pool.planner.stats().live_handles == 0


# -- bytes -----------------------------------------------------------------------------------------------------------


def live_bytes_of_last_token(pool: Pool, sequence: ArenaSequence, layer: int, kind: str, segment: str) -> torch.Tensor:
    """The bytes [..., element size] of one segment that the next token surely reads."""
    found = pool.layout.kind(kind)
    if not found.page_size:
        state = pool.arena.view(kind, layer, segment)[pool.planner.cell(sequence.slots[kind], kind)]
        # The oldest convolution column is shifted out unread.
        row = state[..., -1] if segment == "conv" else state
    else:
        page, offset = divmod(sequence.length - 1, found.page_size)
        run = sequence.pages[kind]
        row = pool.arena.view(kind, layer, segment)[pool.planner.cell(run.handles[page - run.first], kind), offset]
    return row.unsqueeze(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_flipped_byte_in_live_cell_change(name: str, rng: random.Random) -> None:
    model = tiny_models.build(name, torch.float32)
    pool = make_pool(model)
    fed, position_ids = prompt(1, 1, seed=5), torch.tensor([[PROMPT]])
    places = [(layer, k.name, s.name) for k in pool.layout.kinds for s in k.segments for layer in s.layers]
    by_segment = {(kind, segment): layer for layer, kind, segment in rng.sample(places, len(places))}
    seen: list[torch.Tensor] = []
    for flip in (None, *by_segment.items()):
        with UnifiedCache(pool, model) as cache, torch.inference_mode():
            model(prompt(), cache=cache, position_ids=torch.arange(PROMPT)[None])
            cache.flush()
            if flip is None:
                poison_free_bytes(pool)
            else:
                (kind, segment), layer = flip
                live = live_bytes_of_last_token(pool, cache.sequences[0], layer, kind, segment)
                index = tuple(rng.randrange(size) for size in live.shape[:-1])
                live[(*index, -1)] ^= 0x40
            seen.append(model(fed, cache=cache, position_ids=position_ids).logits)
        if flip is None:
            dynamic = DynamicCache(config=model.config)
            with torch.inference_mode():
                model(prompt(), cache=dynamic, position_ids=torch.arange(PROMPT)[None])
                expected = model(fed, cache=dynamic, position_ids=position_ids).logits
            assert torch.equal(seen[0], expected), "bytes that no live cell owns must not matter"
        else:
            assert not torch.equal(seen[-1], seen[0]), f"layer {layer}: {segment} of {kind} was not read"


def test_cache_pages_follow_the_window() -> None:
    model = tiny_models.build("gemma3", torch.float32)
    pool = make_pool(model, page_size=8)
    window = next(iter(layer_windows(model.config).values()))
    most = []
    with UnifiedCache(pool, model) as cache:

        def count() -> None:
            cache.flush()
            most.append(pool.planner.stats().kinds["swa"].live)

        run(model, cache, prompt(1, 200), (200,), 40, count)
        assert pool.planner.stats().kinds["full"].live == 240 // 8
    # window - 1 tokens lie on at most that many pages, never on the 25 that the prompt has
    assert max(most) <= -(-(window - 1) // 8) + 1


# -- rows of different lengths: what the engine stands on ------------------------------------------------------------


def ragged(name: str, dtype: torch.dtype, make: Callable[[list[Any]], Any], sequences: list[Any]) -> list[torch.Tensor]:
    """Prefill rows one by one, then decode them in one forward. Returns the logits of each forward."""
    model = tiny_models.build(name, dtype)
    logits = []
    with torch.inference_mode():
        for row, (sequence, tokens) in enumerate(zip(sequences, (5, 23, 40), strict=True)):
            cache = UnifiedCache.over(make([sequence]), model)
            ids = prompt(1, tokens, seed=row)
            logits.append(model(ids, cache=cache, position_ids=torch.arange(tokens)[None]).logits[:, -1])
            cache.flush()
        fed = torch.cat(logits).argmax(-1, keepdim=True)
        for _ in range(6):
            batch = make(sequences)
            batch.grow(1)
            cache = UnifiedCache.over(batch, model)
            masks = attention_masks(model.config, batch, dtype)
            position_ids = torch.tensor(batch.lengths)[:, None]
            logits.append(model(fed, cache=cache, position_ids=position_ids, attention_mask=masks).logits[:, -1])
            cache.flush()
            fed = logits[-1].argmax(-1, keepdim=True)
    return logits


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batch_of_unequal_rows_equals_plain_tensors(name: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(name, dtype)
    # The arena is full of NaN and nothing is zeroed: padding must not be read either.
    never = dict.fromkeys(make_layout(model).names, "never")
    pool, windows = make_pool(model, page_size=8, zero=never), layer_windows(model.config)
    paged = [ArenaSequence() for _ in range(3)]
    found = ragged(name, dtype, functools.partial(ArenaBatch, pool, windows), paged)
    plain = ragged(name, dtype, functools.partial(PlainBatch, windows), [PlainSequence() for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert [sequence.length for sequence in paged] == [11, 29, 46]
    for sequence in paged:
        release(pool, sequence)
    assert pool.planner.stats().live_handles == 0
    if dtype == torch.float32:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(prompt(1, 23, seed=1), cache=cache, position_ids=torch.arange(23)[None])
            fed = found[1].argmax(-1, keepdim=True)
            alone = model(fed, cache=cache, position_ids=torch.tensor([[23]])).logits[:, -1]
        torch.testing.assert_close(found[3][1:2], alone, atol=1e-5, rtol=0)


# -- models without some kinds ---------------------------------------------------------------------------------------


def small(name: str, **changes: Any) -> Any:
    """A tiny model with some fields of its configuration changed."""
    config = tiny_models.config(name)
    for field, value in changes.items():
        setattr(config, field, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_cache_model_with_window_layers_only_equals_dynamic_cache() -> None:
    model = small("gemma3", layer_types=["sliding_attention"] * 4)
    pool = make_pool(model)
    assert pool.layout.names == ("swa",)
    found = run(model, UnifiedCache(pool, model), prompt(2), CHUNKS[2], 8)
    expected = run(model, DynamicCache(config=model.config), prompt(2), CHUNKS[2], 8)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_cache_model_without_attention_equals_whole_forward() -> None:
    # DynamicCache refuses such a model; a forward over everything takes another algorithm than single tokens.
    model = small("bamba", attn_layer_indices=[])
    pool = make_pool(model)
    assert pool.layout.names == ("state",)
    cache = UnifiedCache(pool, model)
    tokens, logits = run(model, cache, prompt(2), CHUNKS[2], 8)
    with torch.inference_mode():
        expected = model(torch.cat((prompt(2), tokens), 1), use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == PROMPT + 8


# -- bad input -------------------------------------------------------------------------------------------------------


def test_cache_reset_starts_anew() -> None:
    model = tiny_models.build("falcon_h1", torch.float32)
    pool = make_pool(model)
    cache = UnifiedCache(pool, model)
    first = run(model, cache, prompt(), CHUNKS[0], 4)
    cache.reset()
    assert pool.planner.stats().live_handles == 0
    assert cache.get_seq_length() == 0
    again = run(model, cache, prompt(), CHUNKS[0], 4)
    assert torch.equal(first[1], again[1])


def test_cache_layout_of_another_model_raises() -> None:
    pool = make_pool(tiny_models.build("gemma3", torch.float32))
    with pytest.raises(LayoutMismatchError, match="no states for layers"):
        UnifiedCache(pool, tiny_models.build("qwen3_next", torch.float32))


def test_cache_layout_of_another_dtype_raises() -> None:
    pool = make_pool(tiny_models.build("qwen3_next", torch.bfloat16))
    model = tiny_models.build("qwen3_next", torch.float32)
    with UnifiedCache(pool, model) as cache, pytest.raises(LayoutMismatchError, match=r"float32.*bfloat16"):
        run(model, cache, prompt(), CHUNKS[0], 1)
    assert pool.planner.stats().live_handles == 0


def test_cache_layout_of_engine_convention_raises() -> None:
    model = tiny_models.build("qwen3_next", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)
        layout = ModelSpec.from_config(model.config, convention="engine").layout(page_size=16)
    with UnifiedCache(Pool(layout, 1 << 20), model) as cache, pytest.raises(LayoutMismatchError, match="convention"):
        run(model, cache, prompt(), CHUNKS[0], 1)


def test_cache_arena_too_small_raises_and_gives_back() -> None:
    model = tiny_models.build("qwen3_next", torch.float32)
    layout = make_layout(model)
    pool = Pool(layout, layout.null_bytes + layout.strides[0] * 2)
    with UnifiedCache(pool, model) as cache, pytest.raises(CapacityError):
        run(model, cache, prompt(1, 4000), (4000,), 1)
    assert pool.planner.stats().live_handles == 0


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gemma3"])
def test_cache_refused_forward_changes_nothing(name: str) -> None:
    model = tiny_models.build(name, torch.float32)
    expected_tokens, expected_logits = reference(name, torch.float32, CHUNKS[1], 1)
    pool = make_pool(model)
    refusals = 0

    @torch.inference_mode()
    def forward(cache: Any, fed: torch.Tensor, position: int) -> torch.Tensor:
        nonlocal refusals
        position_ids = torch.arange(position, position + fed.shape[1])[None]
        hoard = [
            pool.planner.allocate({kind: 1}) for kind in pool.layout.names for _ in cells_in_free_extents(pool, kind)
        ]
        try:
            return model(fed, cache=cache, position_ids=position_ids).logits
        except CapacityError:
            refusals += 1
        finally:
            for handles in hoard:
                pool.planner.free(handles)
        return model(fed, cache=cache, position_ids=position_ids).logits

    logits, position = [], 0
    with UnifiedCache(pool, model) as cache:
        for fed in (*prompt().split(CHUNKS[1], 1), *expected_tokens.split(1, 1)):
            logits.append(forward(cache, fed, position))
            position += fed.shape[1]
    assert torch.equal(torch.cat(logits, 1), expected_logits)
    assert refusals >= 3  # the first chunk and two new pages at least


def test_cache_other_number_of_rows_raises() -> None:
    model = tiny_models.build("gemma3", torch.float32)
    with UnifiedCache(make_pool(model), model) as cache:
        run(model, cache, prompt(2), CHUNKS[0], 1)
        with pytest.raises(InvalidArgumentError, match="3 rows on a cache of 2"):
            run(model, cache, prompt(3), CHUNKS[0], 1)


def test_batch_bad_growth_raises() -> None:
    model = tiny_models.build("gemma3", torch.float32)
    pool, windows = make_pool(model), layer_windows(model.config)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        ArenaBatch(pool, windows, [])
    with pytest.raises(InvalidArgumentError, match="cannot share"):
        ArenaBatch(pool, windows, [ArenaSequence(), ArenaSequence(length=3)])
    batch = ArenaBatch(pool, windows, [ArenaSequence(length=2), ArenaSequence(length=3)])
    with pytest.raises(InvalidArgumentError, match="one by one"):
        batch.grow(2)
    with pytest.raises(InvalidArgumentError):
        batch.grow(0)


def test_tiny_models_unknown_raises() -> None:
    with pytest.raises(UnsupportedModelError, match="qwen3_next"):
        tiny_models.config("gpt2")
    with pytest.raises(InvalidArgumentError, match="float64"):
        tiny_models.build("lfm2", torch.float64)


def test_pool_views_alias_states_in_place() -> None:
    model = tiny_models.build("lfm2", torch.float32)
    pool = make_pool(model)
    with UnifiedCache(pool, model) as cache:
        run(model, cache, prompt(), CHUNKS[0], 1)
        cache.flush()
        state = cache.get_conv_state(0)
        cell = pool.planner.cell(cache.sequences[0].slots["state"], "state")
        assert state.data_ptr() == pool.arena.view("state", 0, "conv")[cell].data_ptr()
        assert np.shares_memory(state.numpy(), pool.arena.buffer.numpy())
