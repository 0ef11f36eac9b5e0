"""The placement benchmark's baselines against sequences worked out by hand, and its traffic."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from unifiedpool.layout import Layout

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from placement import POLICIES, make_policy, models, simulate  # noqa: E402
from policies import LcmPages, Model, NestedGrids, PaddedSlab, StaticRatio, TwoEnded, VllmBlocks  # noqa: E402
from traffic import Request, load_traces, mix, phases, read_lengths  # noqa: E402


def tiny(sizes: Sequence[int], arena_bytes: int, *, scale: int = 256) -> Model:
    """A model whose cells are `sizes` granules large, with two tokens a page."""
    kinds = ("state", "full") if len(sizes) == 2 else ("state", "swa", "full")
    cells = tuple(size * scale for size in sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # awkward sizes are what the two-ended pool is tried with
        layout = Layout.simple(dict(zip(kinds, cells, strict=True)), null_cell=False)
    pages = len(sizes) - 1
    window = 4 if pages == 2 else 0
    return Model("tiny", arena_bytes * scale, kinds, cells, (0, *[2] * pages), window, 3, (1,) * pages, 16, layout)


def offsets(pool: TwoEnded, request: int, kind: int) -> list[int]:
    return [offset // 256 for offset in pool.offsets(request, kind)]


def test_two_ended_pages_cross_moves_the_state_in_the_way() -> None:
    pool = TwoEnded(tiny((10, 2), 40), pack=False, requests=8)
    assert all(pool.admit(request, [1, 0]) for request in range(3))
    assert [offsets(pool, request, 0) for request in range(3)] == [[0], [10], [20]]
    assert pool.admit(3, [0, 5])
    assert offsets(pool, 3, 1) == [38, 36, 34, 32, 30]
    pool.finish(0)
    pool.finish(1)
    assert pool.grow(3, [0, 3])  # reaches down to 24: the state at 20 goes into the nearest hole
    assert offsets(pool, 3, 1) == [38, 36, 34, 32, 30, 28, 26, 24]
    assert offsets(pool, 2, 0) == [10]
    assert pool.counters().moved == pool.counters().worst_call == 10 * 256
    assert not pool.grow(3, [0, 8])  # 10 + 32 bytes of 40
    assert pool.grow(3, [0, 7])
    assert offsets(pool, 2, 0) == [0]


@pytest.mark.parametrize(
    ("pack", "moved", "places"), [(False, 2, {9: 28, 8: 36, 7: 24}), (True, 3, {9: 28, 8: 36, 7: 38})]
)
def test_two_ended_state_crosses_moves_the_fewest_pages_or_all(pack: bool, moved: int, places: dict[int, int]) -> None:
    pool = TwoEnded(tiny((4, 2), 40), pack=pack, requests=20)
    assert all(pool.admit(request, [0, 1]) for request in range(10))
    assert [offsets(pool, request, 1) for request in range(10)] == [[38 - 2 * request] for request in range(10)]
    for request in (0, 1, 5):
        pool.finish(request)
    assert all(pool.admit(request, [1, 0]) for request in range(10, 15))
    assert pool.counters().moved == 0
    assert pool.admit(15, [1, 0])  # [20, 24): the pages at 20 and 22 are in the way
    assert offsets(pool, 15, 0) == [20]
    assert pool.counters().moved == pool.counters().worst_window == moved * 2 * 256
    assert {request: offsets(pool, request, 1)[0] for request in places} == places


@pytest.mark.parametrize("sizes", [(50, 3), (17, 4), (64, 8, 2), (31, 12, 5)])
@pytest.mark.parametrize("pack", [False, True])
def test_two_ended_random_calls_never_overlap_and_refuse_exactly(sizes: tuple[int, ...], pack: bool) -> None:
    for seed in range(20):
        source = random.Random(seed)
        arena = source.randint(200, 2000)
        pool = TwoEnded(tiny(sizes, arena), pack=pack, requests=20)
        live: dict[int, list[int]] = {}
        for _ in range(60):
            request = source.randrange(20)
            if request in live and source.random() < 0.5:
                pool.finish(request)
                del live[request]
            else:
                counts = [source.choice([0, 0, 1, 2]), *(source.randint(0, arena // size // 4) for size in sizes[1:])]
                total = [sum(held[kind] for held in live.values()) + counts[kind] for kind in range(len(sizes))]
                low = total[0] * sizes[0]
                if len(sizes) == 3:
                    low = (-(-low // sizes[1]) + total[1]) * sizes[1]
                fits = low + total[-1] * sizes[-1] <= arena
                assert pool.admit(request, counts) == fits
                if fits:
                    held = live.setdefault(request, [0] * len(sizes))
                    live[request] = [have + more for have, more in zip(held, counts, strict=True)]
            spans = sorted(
                (offset, offset + size)
                for request in live
                for kind, size in enumerate(sizes)
                for offset in offsets(pool, request, kind)
            )
            assert len(spans) == sum(map(sum, live.values()))
            assert all(begin >= 0 and end <= arena for begin, end in spans)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_static_ratio_splits_once() -> None:
    pool = StaticRatio(tiny((10, 2), 190))  # 90 granules of states, 100 of pages
    assert pool.admit(0, [9, 0])
    assert not pool.admit(1, [1, 0])
    assert pool.admit(1, [0, 50])
    assert not pool.grow(1, [0, 1])
    pool.finish(0)
    assert not pool.grow(1, [0, 1])
    assert pool.admit(2, [9, 0])


def test_vllm_blocks_published_models_have_the_known_block_sizes() -> None:
    assert VllmBlocks(models()["Qwen3-Next fp32 p64"], caching=True).block_tokens == 1056
    assert VllmBlocks(models()["Kimi-Linear fp32 p64"], caching=True).block_tokens == 1920


def test_vllm_blocks_running_request_keeps_two_states_when_caching() -> None:
    model = tiny((30, 2), 420, scale=16)  # a state layer is 10 granules, a token 1: blocks of 16 tokens
    pool = VllmBlocks(model, caching=True)
    assert (pool.block_tokens, pool.block_bytes, pool.state_blocks) == (16, 16 * 16, 3)
    assert pool.admit(0, [1, 8])  # 2 * 3 + 1 blocks of 26
    assert pool.admit(1, [1, 9])  # and 2 * 3 + 2
    assert not pool.admit(2, [1, 48])  # 6 + 6 of 11 left
    pool.retire(0)
    assert pool.admit(2, [1, 48])


def test_padded_slab_page_holds_a_whole_slab() -> None:
    pool = PaddedSlab(tiny((10, 2), 40))
    assert pool.admit(0, [0, 1])
    assert not pool.admit(1, [4, 0])
    assert pool.admit(1, [3, 0])
    assert pool.grow(0, [0, 4])
    assert not pool.grow(0, [0, 1])
    pool.shrink(0, 1, 4)
    assert pool.grow(0, [0, 4])
    pool.finish(0)
    assert pool.admit(2, [1, 0])


def test_lcm_pages_requests_stay_apart_while_there_is_room() -> None:
    model = replace(tiny((3, 2), 18), cell_bytes=(3 * 256, 2 * 256))
    pool = LcmPages(model)
    assert pool.large_bytes == 6 * 256
    assert pool.admit(0, [0, 1])
    assert pool.admit(1, [0, 1])  # a large page of its own
    assert not pool.admit(2, [3, 0])
    assert pool.admit(2, [2, 0])
    assert pool.admit(3, [0, 4])  # what is left in the pages of 0 and 1
    assert not pool.grow(3, [0, 1])


def test_ours_moves_as_many_bytes_as_its_tables_show() -> None:
    model = tiny((16, 1), 400)
    pool = NestedGrids(model)
    source = random.Random(0)
    live: set[int] = set()
    moved = refused = 0
    for request in range(800):
        before = [list(pool.planner.cells(kind)) for kind in range(2)]
        if pool.admit(request, [source.random() < 0.5, source.randint(0, 9)]):
            live.add(request)
            for kind, old in enumerate(before):
                changed = sum(was not in (-1, now) for was, now in zip(old, pool.planner.cells(kind), strict=True))
                moved += changed * model.layout.strides[kind]
        else:
            refused += 1
            for _ in range(3):
                victim = source.choice(sorted(live))
                live.discard(victim)
                pool.finish(victim)
    counters = pool.counters()
    assert refused > 30
    assert counters.moved == moved > 0
    assert counters.worst_window < model.layout.strides[0]
    assert counters.wrong_answers == 0


@pytest.mark.parametrize("sizes", [(16, 1), (16, 2, 1)])
@pytest.mark.parametrize("kept", [True, False])
def test_simulate_every_policy_serves_every_request(sizes: tuple[int, ...], kept: bool) -> None:
    model = tiny(sizes, 800)
    source = random.Random(0)
    requests = [Request(source.randint(1, 200), source.randint(1, 60)) for _ in range(90)]
    for name in POLICIES:
        results = [
            simulate(make_policy(name, model, kept=kept, requests=len(requests)), model, requests, kept=kept)
            for _ in range(2)
        ]
        assert results[0] == results[1]
        assert 0 < results[0].utilisation <= 1
        assert results[0].wrong_answers == 0
        assert results[0].too_large == 0


def test_traffic_without_traces_is_generated_by_seed(tmp_path: Path) -> None:
    one, same, other = (load_traces(tmp_path, seed=seed, generated=500) for seed in (3, 3, 4))
    assert one == same
    assert one.short != other.short
    assert "generated" in one.source
    lengths = sorted(request.input_tokens for request in one.short)
    assert 700 < lengths[250] < 1500  # Azure's median is 1,020
    assert min(request.input_tokens for request in one.long) >= 8192
    assert mix(one, 100, seed=1) == mix(one, 100, seed=1) != mix(one, 100, seed=2)
    assert phases(one, 100, seed=1) == phases(one, 100, seed=1)


def test_traffic_reads_traces_and_alternates(tmp_path: Path) -> None:
    (tmp_path / "azure_llm_2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n"
    )
    (tmp_path / "mooncake_conversation.jsonl").write_text(
        f'{{"timestamp": 0, "input_length": 9000, "output_length": 5, "hash_ids": {list(range(18))}}}\n'
        '{"timestamp": 0, "input_length": 100, "output_length": 6, "hash_ids": [99]}\n'
    )
    assert read_lengths(tmp_path / "azure_llm_2023_conv.csv")[1] == Request(396, 109)
    assert read_lengths(tmp_path / "mooncake_conversation.jsonl")[0] == Request(9000, 5)
    traces = load_traces(tmp_path)
    assert "generated" not in traces.source
    assert traces.long == (Request(9000, 5),)
    is_long = [request in traces.long for request in phases(traces, 10, seed=0, short=3, long=2)]
    assert is_long == [False, False, False, True, True] * 2
