"""The engine: scheduling on a stub, and models of every architecture against plain tensors and against one by one."""

from __future__ import annotations

import functools
import gc
import math
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unifiedpool.engine import (
    Engine,
    EngineConfig,
    Geometry,
    ModelRunner,
    PlainRunner,
    Request,
    SamplingParams,
    StaticPool,
    StepStats,
    StubRunner,
    TokenEvent,
    empty_shortfall,
)
from unifiedpool.engine.reference import compare, generate_alone
from unifiedpool.engine.sampling import draw, sample
from unifiedpool.engine.scheduler import StepWork
from unifiedpool.errors import CapacityError, InvalidArgumentError, LayoutMismatchError, UnsupportedModelError
from unifiedpool.layout import Layout, PaddingWarning
from unifiedpool.model_spec import ModelSpec
from unifiedpool.pool import Pool

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
    "deepseek_v3",
    "granitemoehybrid",
    "zamba2",
    "mimo_v2_flash",
)
CHUNK = 16
Work = Sequence[tuple[list[int], int]]


# -- helpers ---------------------------------------------------------------------------------------------------------


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model whose logits are about 1 in size, as a trained model's differences are."""
    transformers = pytest.importorskip("transformers")
    from unifiedpool.integrations import tiny_models

    config = tiny_models.config(name)
    config.initializer_range = 0.05
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def model_layout(name: str, page_size: int = 8, dtype: str = "float32") -> Layout:
    """The layout of a tiny model; its padding does not matter."""
    spec = ModelSpec.from_config(
        model(name, getattr(torch, dtype)).config, kv_dtype=dtype, conv_dtype=dtype, convention="transformers"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)
        return spec.layout(page_size=page_size)


def stub_layout(page_size: int = 16) -> Layout:
    """A state of 4 KiB beside pages of 512 B."""
    return Layout.simple({"state": 4096, "full": 512}, page_sizes={"full": page_size})


def requests(seed: int, count: int, vocab: int = 512) -> list[tuple[list[int], int]]:
    """Prompts around chunk and page boundaries, and how much to generate."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 7, 8, 9, 15, 16, 17, 33, 48, 50]) for _ in range(count)]
    return [([rng.randrange(vocab) for _ in range(length)], rng.randrange(1, 20)) for length in lengths]


def arena_for(layout: Layout, work: Work, factor: float, windows: dict[str, int] | None = None) -> int:
    """Bytes that hold `factor` times the largest request."""
    geometry = Geometry.from_layout(layout, windows)
    peaks = [geometry.peak(len(prompt) + count, CHUNK) for prompt, count in work]
    largest = max(sum(layout.kind(kind).stride_bytes * count for kind, count in peak.items()) for peak in peaks)
    return layout.null_bytes + math.ceil(factor * largest / layout.strides[0]) * layout.strides[0]


def serve(engine: Engine, work: Work, sampling: SamplingParams | None = None) -> list[list[int]]:
    """Run everything and return the outputs."""
    ids = [engine.submit(prompt, count, sampling) for prompt, count in work]
    engine.run()
    return [engine.outputs(request_id) for request_id in ids]


def assert_empty(pool: Pool) -> None:
    """Every byte is back."""
    stats = pool.planner.stats()
    assert stats.live_bytes == 0
    assert stats.live_handles == 0
    assert all(kind.reserved == 0 for kind in stats.kinds.values())
    pool.planner.validate()


def config(**options: Any) -> EngineConfig:
    """Small limits unless said otherwise."""
    limits = {"chunk_tokens": CHUNK, "prefill_tokens": 40, "headroom": 4, "prefix_cache": False}
    return EngineConfig(**{**limits, **options})


class CountingPool(Pool):
    """Counts the plans sealed."""

    __slots__ = ("steps",)

    def step(self, step: int = 0, *, stream: Any = None) -> Any:
        """Seal and apply, and count."""
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(step, stream=stream)


# -- equality (DESIGN section 7) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_float32_equals_plain_tensors_bitwise_and_one_by_one_closely(name: str, seed: int) -> None:
    """Same batches, chunks and retractions: bit-equal. Against one by one: 1e-5, near-ties counted."""
    layout = model_layout(name)
    work = requests(seed + 1, 6)
    arena_bytes = arena_for(layout, work, 2.3)
    engines = []
    for runner_class in (PlainRunner, ModelRunner):
        pool = CountingPool(layout, arena_bytes)
        pool.arena.buffer[layout.null_bytes :] = 0xFF  # what was there before must not matter
        pool.arena.buffer[: layout.null_bytes] = 0x7B  # nor what padding lanes read
        engine = Engine(runner_class(model(name), pool), pool, config(keep_logits=True))
        serve(engine, work)
        assert_empty(pool)
        assert pool.steps == engine.totals.steps
        engines.append(engine)
    plain, arena = engines
    assert isinstance(plain.runner, PlainRunner) and not plain.runner.sequences
    near_ties = 0
    worst = 0.0
    for index, (prompt, count) in enumerate(work):
        assert arena.outputs(index) == plain.outputs(index)
        assert torch.equal(torch.stack(arena.logits[index]), torch.stack(plain.logits[index]))
        reference = generate_alone(model(name), prompt, count, chunk_tokens=CHUNK)
        comparison = compare(arena.outputs(index), reference)
        assert comparison.identical or comparison.near_tie
        near_ties += comparison.near_tie
        equal = count if comparison.first_difference is None else comparison.first_difference
        for ours, theirs in zip(arena.logits[index][:equal], reference.logits, strict=False):
            worst = max(worst, float((ours - theirs).abs().max()))
    print(
        f"{name}: {near_ties} near-ties in {len(work)} requests, logits within {worst:.1e}, "
        f"{arena.totals.retractions} retractions, {arena.totals.moved_bytes} bytes moved"
    )
    assert worst < 1e-5


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gpt_oss"])
def test_engine_bfloat16_equals_plain_tensors_bitwise(name: str, seed: int) -> None:
    layout = model_layout(name, dtype="bfloat16")
    work = requests(seed + 2, 6)
    outputs = []
    for runner_class in (PlainRunner, ModelRunner):
        pool = Pool(layout, arena_for(layout, work, 2.3))
        engine = Engine(runner_class(model(name, torch.bfloat16), pool), pool, config(keep_logits=True))
        serve(engine, work)
        outputs.append([torch.stack(engine.logits[index]) for index in range(len(work))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


def test_engine_alone_equals_dynamic_cache_bitwise() -> None:
    """A batch of one is the same computation as transformers' own."""
    pool = Pool(model_layout("qwen3_next"), 1 << 21)
    engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config(max_running=1, keep_logits=True))
    work = requests(5, 4)
    serve(engine, work)
    for index, (prompt, count) in enumerate(work):
        reference = generate_alone(model("qwen3_next"), prompt, count, chunk_tokens=CHUNK)
        assert engine.outputs(index) == reference.tokens
        assert torch.equal(torch.stack(engine.logits[index]), reference.logits)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
def test_engine_cells_relocated_between_steps_changes_nothing(name: str, rng: random.Random) -> None:
    layout = model_layout(name)
    work = requests(3, 6)
    logits = []
    for shuffle in (False, True):
        pool = Pool(layout, arena_for(layout, work, 6))
        engine = Engine(ModelRunner(model(name), pool), pool, config(keep_logits=True))
        for prompt, count in work:
            engine.submit(prompt, count)
        moved = 0
        while engine.has_work:
            engine.step()
            for kind in layout.names if shuffle else ():
                moved += relocate_some(pool, kind, rng)
        assert bool(moved) == shuffle
        logits.append([torch.stack(engine.logits[index]) for index in range(len(work))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*logits, strict=True))


def relocate_some(pool: Pool, kind: str, rng: random.Random) -> int:
    """Move live cells of a kind to random free places; return how many."""
    stride = pool.layout.kind(kind).stride_bytes
    free = [
        cell
        for offset, length in pool.planner.free_extents()
        for cell in range(-(-offset // stride), (offset + length) // stride)
    ]
    rng.shuffle(free)
    handles = [handle for handle in pool.planner.live_cells(kind)[1].tolist() if rng.random() < 0.5][: len(free)]
    for handle in handles:
        pool.planner.relocate(handle, kind, free.pop())
    return len(handles)


def test_engine_flipped_byte_in_a_live_cell_changes_the_logits() -> None:
    """The canary of the equality tests: they would see a wrong byte."""
    layout = model_layout("qwen3_next")
    logits = []
    for kind in (None, "full", "state"):
        pool = Pool(layout, 1 << 20)
        engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config(keep_logits=True))
        engine.submit(list(range(20)), 4)
        for _ in range(3):
            engine.step()
        if kind is not None:
            cell = int(pool.planner.live_cells(kind)[0][0])
            view = next(iter(pool.arena.views(kind, layer=3 if kind == "full" else 0).values()))
            view[cell] += 1.0
        engine.run()
        logits.append(torch.stack(engine.logits[0]))
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


# -- CASES C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [None, 0.9])
def test_submit_request_that_can_never_fit_refused_with_numbers_and_others_go_on(ratio: float | None) -> None:
    """C1."""
    layout = stub_layout()
    pool = Pool(layout, 10 * 4096) if ratio is None else StaticPool(layout, 10 * 4096, ratio=ratio)
    engine = Engine(StubRunner(), pool, config())
    most_pages = 71 if ratio is None else 47  # beside one state; the null cell takes a page
    first = engine.submit([1] * 20, 5)
    with pytest.raises(CapacityError, match=rf"1 state \(4.0 KiB\), {most_pages + 1} full .*short"):
        engine.submit([1] * (most_pages * 16), 2)
    largest = engine.submit([1] * (most_pages * 16), 1)
    engine.run()
    assert len(engine.outputs(first)) == 5
    assert len(engine.outputs(largest)) == 1
    assert_empty(pool)


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "retracted", "finished"])
def test_abort_at_any_stage_gives_every_byte_back(stage: str) -> None:
    """C2."""
    pool = Pool(stub_layout(), 5 * 4096)
    engine = Engine(StubRunner(), pool, config())
    events: list[TokenEvent] = []
    other = engine.submit([1] * 30, 60)
    if stage == "queued":
        other = engine.submit([1] * 200, 2)
    victim = engine.submit([2] * 100, 40, on_token=events.append)
    request = engine.requests[victim]
    for _ in range(400):
        reached = {
            "queued": request.status.value == "waiting",
            "prefill": request.status.value == "prefill" and request.computed >= 32,
            "decode": request.status.value == "decode" and len(request.outputs) > 3,
            "retracted": request.status.value == "waiting" and request.retractions > 0,
            "finished": request.done,
        }[stage]
        if reached:
            break
        if stage == "retracted" and request.outputs:
            engine.scheduler.retract(request)
        else:
            engine.step()
    assert reached
    before = len(request.outputs)
    assert engine.abort(victim) == (stage != "finished")
    assert engine.abort(victim) is False
    engine.run()
    assert len(engine.outputs(victim)) == before
    assert engine.outputs(other)
    assert events[-1].finished
    assert [event.finished for event in events].count(True) == 1
    assert_empty(pool)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "gemma3"])
def test_retract_and_resume_gives_the_tokens_of_an_undisturbed_run(name: str, seed: int) -> None:
    """C3: somebody else gets the slot meanwhile."""
    layout = model_layout(name)
    work = [(prompt, 24) for prompt, _ in requests(seed + 4, 5)]
    pool = Pool(layout, arena_for(layout, work, 1.6))
    engine = Engine(ModelRunner(model(name), pool), pool, config(headroom=0))
    for prompt, count in work:
        engine.submit(prompt, count)
    owners: dict[int, set[int]] = {}
    while engine.has_work:
        engine.step()
        kind = layout.names[0]
        for request in engine.scheduler.running:
            handles = request.sequence.handles()
            for handle in handles:
                cell = pool.planner.cells(kind)[handle]
                if cell >= 0:
                    owners.setdefault(cell, set()).add(request.request_id)
    assert engine.totals.retractions > 0
    assert engine.totals.recomputed_tokens > 0
    assert any(len(users) > 1 for users in owners.values())
    for index, (prompt, count) in enumerate(work):
        comparison = compare(engine.outputs(index), generate_alone(model(name), prompt, count, chunk_tokens=CHUNK))
        assert comparison.identical or comparison.near_tie
    assert_empty(pool)


@pytest.mark.parametrize("kind", ["unified", "static"])
def test_large_request_among_many_short_ones_is_admitted_again_and_again(kind: str) -> None:
    """C4: no livelock, and nobody overtakes for ever."""
    layout = Layout.simple({"state": 4096, "full": 512}, page_sizes={"full": 16})
    arena_bytes = 40 * 4096
    pool = Pool(layout, arena_bytes) if kind == "unified" else StaticPool(layout, arena_bytes, ratio=0.3)
    engine = Engine(StubRunner(), pool, config(chunk_tokens=512, prefill_tokens=4096))
    rng = random.Random(0)
    large_tokens = int(0.6 * arena_bytes) // 512 * 16
    large = []
    for _ in range(6):
        for _ in range(30):
            engine.submit([1] * rng.randrange(1, 60), rng.randrange(1, 30))
        large.append(engine.submit([1] * (large_tokens - 40), 40))
    admitted: dict[int, int] = {}
    schedule = engine.scheduler.schedule

    def recorded_schedule() -> StepWork:
        work = schedule()
        for request in work.admitted:
            admitted.setdefault(request.request_id, engine.totals.steps)
        return work

    engine.scheduler.schedule = recorded_schedule  # type: ignore[method-assign]
    while engine.has_work:
        assert engine.step().step < 3000
    assert engine.totals.finished == engine.totals.submitted
    firsts = [admitted[request_id] for request_id in range(engine.totals.submitted)]
    assert firsts == sorted(firsts)
    for request_id in large:
        # Once the shorter ones before it are done, which takes them 30 tokens and a few chunks, it is in.
        assert firsts[request_id] - firsts[request_id - 1] < 50
    assert_empty(pool)


def test_two_requests_that_each_need_most_of_the_arena_alternate_without_livelock() -> None:
    """C4: the older one always advances."""
    pool = Pool(stub_layout(), 9 * 4096)
    engine = Engine(StubRunner(), pool, config(headroom=0))
    ids = [engine.submit([1], 700) for _ in range(4)]
    finished = []
    while engine.has_work:
        stats = engine.step()
        finished += [i for i in ids if engine.requests[i].done and i not in finished]
        assert stats.step < 4000
    assert finished == ids
    assert engine.totals.retractions > 0
    assert_empty(pool)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_and_chunks_on_page_boundaries_equal_one_by_one(page_size: int) -> None:
    """C5."""
    layout = model_layout("qwen3_next", page_size)
    pool = Pool(layout, 1 << 21)
    lengths = {1, 2, page_size - 1, page_size, page_size + 1, 3 * CHUNK, 3 * CHUNK + 1} - {0}
    work = [([(7 * length + index) % 512 for index in range(length)], 6) for length in sorted(lengths)]
    engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config(prefill_tokens=200))
    for index, tokens in enumerate(serve(engine, work)):
        comparison = compare(tokens, generate_alone(model("qwen3_next"), *work[index], chunk_tokens=CHUNK))
        assert comparison.identical or comparison.near_tie
    assert_empty(pool)


def test_short_prompt_takes_one_page_and_one_slot() -> None:
    """C6."""
    pool = Pool(stub_layout(), 20 * 4096)
    engine = Engine(StubRunner(), pool, config(headroom=4))
    engine.submit([3] * 12, 4)
    stats = engine.step()
    assert stats.live_bytes == {"state": 4096, "full": 512}
    assert stats.promised_bytes == 0
    assert pool.planner.stats().live_bytes == 4096 + 512


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """C7."""
    pool = Pool(stub_layout(), 40 * 4096)
    engine = Engine(StubRunner(), pool, config(prefill_tokens=2000))
    rng = random.Random(7)

    def serve_some(count: int) -> None:
        for _ in range(count):
            engine.submit([1] * rng.randrange(1, 12), rng.randrange(1, 5))
            if len(engine.scheduler.waiting) > 100:
                engine.step()
                engine.collect_done()
        engine.run()
        engine.collect_done()
        gc.collect()

    serve_some(1000)
    objects, memory = len(gc.get_objects()), resident_bytes()
    serve_some(9000)
    assert engine.totals.finished == 10_000
    assert not engine.requests
    assert len(gc.get_objects()) - objects < 200
    assert resident_bytes() - memory < 8 << 20
    assert_empty(pool)


def resident_bytes() -> int:
    """Memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        pytest.skip("no /proc on this system")


# -- scheduling on the stub ------------------------------------------------------------------------------------------


def test_window_pages_are_recycled_and_stay_within_the_peak(rng: random.Random) -> None:
    """A window kind holds no more than was promised, and what slides out serves again."""
    layout = Layout.simple(
        {"state": 4096, "full": 512, "swa": 512}, page_sizes={"full": 16, "swa": 4}, ends={"swa": "high"}
    )
    for window in (1, 3, 4, 5, 9, 24, 64):
        pool = Pool(layout, 60 * 4096)
        engine = Engine(StubRunner(windows={"swa": window}), pool, config(chunk_tokens=rng.randrange(1, 40)))
        for _ in range(12):
            engine.submit([1] * rng.randrange(1, 120), rng.randrange(1, 60))
        peaks = {i: engine.scheduler.peak_demand(request)["swa"] for i, request in engine.requests.items()}
        while engine.has_work:
            engine.step()
            for request in engine.scheduler.running:
                held = len(request.sequence.pages["swa"].handles) + len(request.spare["swa"])
                assert held <= peaks[request.request_id]
                run = request.sequence.pages["swa"]
                last_needed = max(0, request.computed - window + 1) // 4
                assert run.first <= last_needed
                assert (run.first + len(run.handles)) * 4 >= request.computed
            assert pool.planner.stats().kinds["swa"].live * 512 == engine._live_bytes(engine.scheduler.running)["swa"]
        assert engine.totals.retractions == 0
        assert_empty(pool)


def test_random_traffic_keeps_the_planner_valid(rng: random.Random) -> None:
    """Submit, step and abort at random in a tight pool; every count agrees with the planner's."""
    layout = Layout.simple({"state": 4096, "full": 512, "swa": 1024}, page_sizes={"full": 8, "swa": 4})
    for _ in range(4):
        pool = Pool(layout, rng.randrange(6, 14) * 4096)
        engine = Engine(
            StubRunner(windows={"swa": rng.randrange(1, 20)}),
            pool,
            config(chunk_tokens=rng.randrange(1, 30), headroom=rng.randrange(10), max_running=rng.randrange(1, 9)),
        )
        for _ in range(150):
            if rng.random() < 0.3:
                try:
                    engine.submit([1] * rng.randrange(1, 150), rng.randrange(1, 80))
                except CapacityError:
                    continue
            if rng.random() < 0.05 and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            stats = engine.step()
            pool.planner.validate()
            assert stats.running <= engine.config.max_running
            live = engine._live_bytes(engine.scheduler.running)
            kinds = pool.planner.stats().kinds
            assert {name: kinds[name].live * layout.kind(name).stride_bytes for name in layout.names} == live
            promised = sum(sum(request.promised.values()) for request in engine.scheduler.running)
            assert sum(kind.reserved for kind in kinds.values()) == promised
        engine.run()
        assert engine.totals.finished + engine.totals.aborted == engine.totals.submitted
        assert_empty(pool)


def test_admission_takes_slots_and_pages_jointly_and_never_overtakes() -> None:
    pool = Pool(stub_layout(), 8 * 4096)  # 63 pages' worth beside the null cell
    engine = Engine(StubRunner(), pool, config(headroom=0))
    big = engine.submit([1] * 400, 4)  # 26 pages and a slot of 8
    blocked = engine.submit([1] * 400, 4)
    small = engine.submit([1] * 4, 4)
    stats = engine.step()
    assert (stats.running, stats.waiting) == (1, 2)
    assert engine.requests[big].status.value == "prefill"
    assert engine.requests[small].status.value == "waiting"
    engine.run()
    assert [len(engine.outputs(i)) for i in (big, blocked, small)] == [4, 4, 4]


def test_step_statistics_add_up() -> None:
    pool = Pool(stub_layout(), 12 * 4096)
    engine = Engine(StubRunner(), pool, config())
    history: list[StepStats] = []
    work = requests(9, 12, vocab=16)
    for prompt, count in work:
        engine.submit(prompt, count)
    engine.run(history.append)
    totals = engine.totals
    assert sum(stats.sampled_tokens for stats in history) == sum(count for _, count in work)
    assert sum(stats.finished for stats in history) == totals.finished == len(work)
    assert sum(stats.running for stats in history) == totals.running_sum
    assert sum(stats.admitted for stats in history) == len(work) + totals.retractions
    assert max(stats.running for stats in history) == totals.peak_running
    assert sum(stats.moved_bytes for stats in history) == totals.moved_bytes
    assert [stats.step for stats in history] == list(range(totals.steps))
    for stats in history:
        assert stats.used_tokens <= stats.live_bytes["full"] // 512 * 16
    empty = engine.step()
    assert (empty.running, empty.sampled_tokens, totals.steps) == (0, 0, len(history))


def test_geometry_peak_covers_every_forward() -> None:
    layout = Layout.simple({"swa": 512, "full": 512}, page_sizes={"swa": 4, "full": 16})
    for window in range(1, 14):
        geometry = Geometry.from_layout(layout, {"swa": window})
        for total in range(1, 40):
            for chunk in (1, 3, 4, 16, 50):
                peak = geometry.peak(total, chunk)
                assert peak["full"] == math.ceil(total / 16)
                # Chunks up to any length, then one by one: what prefill and decode do.
                for prompt in range(1, total + 1):
                    spans = [(first, min(first + chunk, prompt)) for first in range(0, prompt, chunk)]
                    spans += [(first, first + 1) for first in range(prompt, total)]
                    for start, end in spans:
                        pages = {token // 4 for token in range(max(0, start - window + 1), end)}
                        assert len(pages) <= peak["swa"]


def test_empty_shortfall_agrees_with_an_empty_planner(rng: random.Random) -> None:
    for null_cell in (True, False):
        layout = Layout.simple({"state": 4096, "swa": 1024, "full": 512}, null_cell=null_cell)
        for _ in range(300):
            arena_bytes = rng.randrange(3000, 40_000)
            demand = {"state": rng.randrange(10), "swa": rng.randrange(30), "full": rng.randrange(60)}
            pool = Pool(layout, arena_bytes)
            assert (empty_shortfall(layout, arena_bytes, demand) == 0) == pool.planner.can_allocate({**demand})


# -- the static pool -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.2, 0.9, 3.0])
def test_static_pool_never_crosses_the_split_and_never_moves(ratio: float, rng: random.Random) -> None:
    layout = stub_layout()
    pool = StaticPool(layout, 24 * 4096 + 700, ratio=ratio)
    engine = Engine(StubRunner(), pool, config())
    for _ in range(60):
        try:
            engine.submit([1] * rng.randrange(1, 90), rng.randrange(1, 40))
        except CapacityError:
            continue
    slots = pool.planner.num_slots
    assert slots == int(pool.planner.arena_bytes * ratio / (1 + ratio)) // 4096
    peak = 0
    while engine.has_work:
        engine.step()
        states, pages = pool.planner.live_cells("state")[0], pool.planner.live_cells("full")[0]
        assert all(1 <= cell <= slots for cell in states)  # the null cell lies in state cell 0
        assert all(cell < 8 or cell >= 8 * (1 + slots) for cell in pages)
        peak = max(peak, len(states))
    assert peak <= slots
    assert engine.totals.moved_bytes == 0
    assert engine.totals.finished == engine.totals.submitted
    assert_empty(pool)


def test_static_pool_is_exact_in_each_part() -> None:
    layout = stub_layout()
    pool = StaticPool(layout, 20 * 4096, ratio=1.0)
    planner = pool.planner
    assert (planner.num_slots, planner.page_bytes) == (10, 10 * 4096 - 512)
    assert planner.can_allocate({"state": 10, "full": 79})
    assert not planner.can_allocate({"state": 11})
    assert not planner.can_allocate({"full": 80})
    assert planner.shortfall({"state": 12, "full": 81}) == 2 * 4096 + 2 * 512
    states = planner.allocate({"state": 4})
    reservation = planner.reserve({"state": 5, "full": 70})
    assert planner.can_allocate({"state": 1, "full": 9})
    with pytest.raises(CapacityError, match="static split of 10 slots"):
        planner.allocate({"state": 2})
    with pytest.raises(CapacityError, match="short"):
        planner.reserve({"full": 10})
    taken = reservation.commit({"state": 5})
    reservation.cancel()
    planner.free([*states, *taken])
    pages = planner.allocate({"full": 79})
    with pytest.raises(CapacityError):
        planner.attach(planner.allocate({"state": 1}), "full")
    planner.free(pages)
    assert "ratio=1" in repr(pool)


@pytest.mark.parametrize("ratio", [0, -1, float("nan"), float("inf"), "0.9", True, 1e-9])
def test_static_pool_impossible_ratio_refused(ratio: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="ratio"):
        StaticPool(stub_layout(), 20 * 4096, ratio=ratio)


def test_static_pool_refuses_to_resize() -> None:
    with pytest.raises(InvalidArgumentError, match="fixed"):
        StaticPool(stub_layout(), 20 * 4096).planner.resize(30 * 4096)


def test_static_pool_without_slots_or_pages_refused() -> None:
    for kinds in ({"full": 512}, {"state": 4096}):
        with pytest.raises(InvalidArgumentError, match="use Pool"):
            StaticPool(Layout.simple(kinds), 1 << 20)


def test_static_pool_gives_the_same_tokens(seed: int) -> None:
    layout = model_layout("qwen3_next")
    work = requests(seed + 6, 6)
    arena_bytes = arena_for(layout, work, 4)
    outputs = []
    for pool in (Pool(layout, arena_bytes), StaticPool(layout, arena_bytes, ratio=0.9)):
        outputs.append(serve(Engine(ModelRunner(model("qwen3_next"), pool), pool, config()), work))
    assert outputs[0] == outputs[1]


# -- the caller's side -----------------------------------------------------------------------------------------------


def test_stream_yields_tokens_as_steps_make_them() -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    first, second = engine.submit([1, 2], 6), engine.submit([3], 4)
    stream = engine.stream(first)
    assert next(stream) == engine.outputs(first)[0]
    assert not engine.requests[first].done
    assert [engine.outputs(first)[0], *stream] == engine.outputs(first)
    assert list(engine.stream(second)) == engine.collect(second)
    tokens = engine.outputs(first)
    assert engine.collect_done() == {first: tokens}
    with pytest.raises(InvalidArgumentError, match="collected"):
        next(engine.stream(second))


def test_callbacks_may_submit_and_abort() -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    later: list[int] = []
    events: list[TokenEvent] = []

    def on_token(event: TokenEvent) -> None:
        events.append(event)
        if event.position == 4:
            later.append(engine.submit([5], 2, on_token=events.append))
            engine.abort(other)

    other = engine.submit([9], 100, on_token=events.append)
    mine = engine.submit([1, 2, 3], 3, on_token=on_token)
    engine.run()
    assert engine.requests[other].status.value == "aborted"
    assert len(engine.outputs(later[0])) == 2
    own = [event for event in events if event.request_id == mine]
    assert [event.position for event in own] == [3, 4, 5]
    assert [event.finished for event in own] == [False, False, True]
    assert [event.token for event in own] == engine.outputs(mine)


def test_failing_callback_is_raised_after_everybody_got_their_tokens() -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    events: list[TokenEvent] = []

    def fail(event: TokenEvent) -> None:
        raise RuntimeError(f"position {event.position}")

    engine.submit([1], 1, on_token=fail)
    engine.submit([1], 2, on_token=events.append)
    with pytest.raises(RuntimeError, match="position 1"):
        engine.step()
    assert len(events) == 1
    engine.run()
    assert len(events) == 2


@pytest.mark.parametrize("when", [2, 4, 7])
def test_failed_forward_recomputes_its_requests(when: int) -> None:
    layout = model_layout("qwen3_next")
    pool = Pool(layout, 1 << 20)
    runner = ModelRunner(model("qwen3_next"), pool)
    engine = Engine(runner, pool, config())
    work = requests(11, 3)
    ids = [engine.submit(prompt, 8) for prompt, _ in work]
    calls = 0
    layer = model("qwen3_next").model.layers[2]

    def explode(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            raise RuntimeError("device lost")

    hook = layer.register_forward_pre_hook(explode)
    try:
        failures = 0
        while engine.has_work:
            try:
                engine.step()
            except RuntimeError as error:
                assert "device lost" in str(error)
                failures += 1
    finally:
        hook.remove()
    assert failures == 1
    for request_id, (prompt, _) in zip(ids, work, strict=True):
        comparison = compare(
            engine.outputs(request_id), generate_alone(model("qwen3_next"), prompt, 8, chunk_tokens=CHUNK)
        )
        assert comparison.identical or comparison.near_tie
    assert_empty(pool)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 3, "at least 1"),
        ([1], 0, "at least 1"),
        ([16], 3, "token 16; the vocabulary has ids 0 to 15"),
        ([3, -1], 3, "token -1"),
        ([1.5], 3, "integers"),
        (["a"], 3, "integers"),
        ([1], 2.5, "integers"),
        (None, 3, "integers"),
    ],
)
def test_submit_bad_arguments_refused(prompt: Any, count: Any, message: str) -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    with pytest.raises(InvalidArgumentError, match=message):
        engine.submit(prompt, count)
    assert not engine.has_work
    assert engine.submit([1], 1) == 0


def test_submit_beyond_the_model_length_refused() -> None:
    pool = Pool(model_layout("qwen3_next"), 1 << 21)
    engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config())
    with pytest.raises(InvalidArgumentError, match="the model takes 8192"):
        engine.submit([1] * 8000, 193)


def test_engine_for_model_builds_everything() -> None:
    engine = Engine.for_model(model("gemma3"), 1 << 20, page_size=8, config=config())
    assert len(list(engine.stream(engine.submit([1, 2, 3], 5)))) == 5
    static = Engine.for_model(model("qwen3_next"), 1 << 20, page_size=8, static_ratio=0.9)
    assert isinstance(static.pool, StaticPool)
    assert len(list(static.stream(static.submit([1, 2, 3], 5)))) == 5


def test_pool_resized_while_requests_run() -> None:
    """Growing lets in what was refused; shrinking keeps what runs."""
    layout = model_layout("qwen3_next")
    pool = Pool(layout, 1 << 18)
    engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config())
    prompt = list(range(40))
    first = engine.submit(prompt, 12)
    with pytest.raises(CapacityError):
        engine.submit([1] * 3000, 2)
    for _ in range(5):
        engine.step()
    pool.planner.resize(1 << 21)
    second = engine.submit([1] * 3000, 2)
    engine.step()
    engine.abort(second)
    pool.planner.resize(1 << 18)
    engine.run()
    assert engine.outputs(first) == generate_alone(model("qwen3_next"), prompt, 12, chunk_tokens=CHUNK).tokens
    assert_empty(pool)


def test_unknown_and_unfinished_requests_refused() -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    request_id = engine.submit([1], 2)
    for call in (engine.abort, engine.outputs, engine.collect, lambda i: next(engine.stream(i))):
        with pytest.raises(InvalidArgumentError, match="no request 7"):
            call(7)
    with pytest.raises(InvalidArgumentError, match="is waiting"):
        engine.collect(request_id)
    engine.run()
    assert len(engine.collect(request_id)) == 2
    with pytest.raises(InvalidArgumentError, match="collected before"):
        engine.collect(request_id)
    assert engine.abort(request_id) is False


@pytest.mark.parametrize("field", ["chunk_tokens", "prefill_tokens", "max_running", "headroom"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_config_bad_values_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        EngineConfig(**{field: value})


def test_runner_refuses_a_layout_of_another_model_and_another_attention() -> None:
    with pytest.raises(LayoutMismatchError):
        ModelRunner(model("qwen3_next"), Pool(model_layout("gemma3"), 1 << 20))
    pool = Pool(model_layout("qwen3_5"), 1 << 20)
    engine = Engine(ModelRunner(model("qwen3_5"), pool), pool, config())
    text_config = model("qwen3_5").config.get_text_config()
    before = text_config._attn_implementation
    try:
        text_config._attn_implementation = "flash_attention_2"
        engine.submit([1], 4)
        engine.submit([2, 3], 4)
        with pytest.raises((UnsupportedModelError, ImportError, ValueError)):
            engine.run()
    finally:
        text_config._attn_implementation = before


def test_stub_and_geometry_bad_arguments_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="vocab_size"):
        StubRunner(1)
    with pytest.raises(InvalidArgumentError, match="window given for kind 'state'"):
        Geometry.from_layout(stub_layout(), {"state": 4})
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        Geometry.from_layout(stub_layout(), {"full": 0})


def test_request_token_slice_spans_prompt_and_outputs() -> None:
    request = Request(0, [1, 2, 3], 4, SamplingParams(), outputs=[7, 8])
    everything = [1, 2, 3, 7, 8]
    for start in range(6):
        for end in range(start, 6):
            assert request.token_slice(start, end) == everything[start:end]
    assert "prompt=3" in repr(request)


# -- sampling --------------------------------------------------------------------------------------------------------


def test_sampling_depends_on_seed_request_and_position_only(seed: int) -> None:
    """Batched, alone, retracted or not: the same draws."""
    layout = model_layout("qwen3_next")
    work = requests(seed + 8, 4)
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=5)
    runs = []
    for factor, most in ((8, 256), (8, 1), (2.3, 256)):
        pool = Pool(layout, arena_for(layout, work, factor))
        engine = Engine(ModelRunner(model("qwen3_next"), pool), pool, config(max_running=most, headroom=0))
        runs.append(serve(engine, work, sampling))
    assert runs[0] == runs[1] == runs[2]
    for index, (prompt, count) in enumerate(work):
        alone = generate_alone(
            model("qwen3_next"), prompt, count, chunk_tokens=CHUNK, sampling=sampling, request_id=index
        )
        assert alone.tokens == runs[0][index]
    pool = Pool(layout, arena_for(layout, work, 8))
    other = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=6)
    assert serve(Engine(ModelRunner(model("qwen3_next"), pool), pool, config()), work, other) != runs[0]


def test_sample_greedy_takes_the_first_of_equals() -> None:
    assert sample(torch.tensor([0.0, 2.0, 2.0]), SamplingParams(), 0, 0) == 1


def test_sample_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    counts = [0] * 4
    for position in range(4000):
        counts[sample(logits, SamplingParams(temperature=1.0), 3, position)] += 1
    for count, share in zip(counts, (0.1, 0.2, 0.3, 0.4), strict=True):
        assert abs(count / 4000 - share) < 0.03


def test_sample_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.05, 0.15, 0.3, 0.5]).log()
    for params, allowed in (
        (SamplingParams(temperature=1.0, top_k=2), {2, 3}),
        (SamplingParams(temperature=1.0, top_p=0.5), {3}),
        (SamplingParams(temperature=1.0, top_p=0.75), {2, 3}),
        (SamplingParams(temperature=1.0, top_p=0.81), {1, 2, 3}),
        (SamplingParams(temperature=1e-6), {3}),
    ):
        assert {sample(logits, params, 0, position) for position in range(300)} == allowed


def test_draw_is_uniform_and_keyed() -> None:
    values = [draw(1, 2, position) for position in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 2000 - 0.5) < 0.03
    assert len(set(values)) == 2000
    assert draw(1, 2, 3) != draw(2, 1, 3)
    assert draw(-1, 0, 0) == draw(2**64 - 1, 0, 0)


def test_stop_tokens_end_a_request() -> None:
    engine = Engine(StubRunner(), Pool(stub_layout(), 12 * 4096), config())
    free = engine.submit([1], 10)
    engine.run()
    tokens = engine.outputs(free)
    stopped = engine.submit([1], 10, SamplingParams(stop_tokens=frozenset({tokens[2]})))
    engine.run()
    assert engine.outputs(stopped) == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_sampling_params_out_of_range_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        SamplingParams(**options)
