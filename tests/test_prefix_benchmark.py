"""The hit-rate benchmark: no policy beats its bound, and with room for everything the bound is what was seen before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hit_rate

pytest.importorskip("scipy")

MODEL = hit_rate.MODELS["qn"]


def requests(trace: str, count: int = 120) -> list[hit_rate.Request]:
    return hit_rate.requests_of(hit_rate.generate(trace, count, seed=1))


def served(policy: str, trace: str, gib: int) -> float:
    name, _, ratio = policy.partition(" ")
    chosen = hit_rate.policy_named("lru" if name == "static" else name)
    server = hit_rate.Server(MODEL, gib, chosen, float(ratio) if ratio else None)
    for request in requests(trace):
        server.serve(request)
    server.cache.validate()
    return server.hit_tokens / server.prompt_tokens


@pytest.mark.parametrize("trace", ["synthetic", "conversation"])
@pytest.mark.parametrize("gib", [4, 16])
def test_no_policy_beats_the_bound(trace: str, gib: int) -> None:
    most = hit_rate.bound(requests(trace), MODEL, gib)
    for policy in hit_rate.ONLINE:
        assert 0 <= served(policy, trace, gib) <= most + 1e-6, policy


@pytest.mark.parametrize("trace", ["synthetic", "conversation"])
def test_bound_with_room_for_everything_is_what_was_seen(trace: str) -> None:
    seen: set[tuple[int, ...]] = set()
    known = total = 0
    for request in requests(trace):
        depth = 0
        while depth < request.limit and request.blocks[: depth + 1] in seen:
            depth += 1
        known += depth * hit_rate.BLOCK_TOKENS
        total += request.input_tokens
        seen.update(request.blocks[: end + 1] for end in range(len(request.blocks)))
    assert hit_rate.bound(requests(trace), MODEL, 1 << 20) == pytest.approx(known / total, rel=1e-6)


def test_output_blocks_get_the_ids_of_the_prompt_that_goes_on() -> None:
    rows = [hit_rate.Row(1024 + 5, 600, (1, 2, 3)), hit_rate.Row(2048 + 7, 10, (1, 2, 8, 9, 10))]
    first, second = hit_rate.requests_of(rows)
    assert first.blocks == (1, 2, 8) and (first.tail, first.limit) == (2, 2)
    assert second.blocks == (1, 2, 8, 9) and second.tail == 4
