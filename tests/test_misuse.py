"""Wrong types, odd numbers and copies: every one is refused with a message, and nothing changes."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from unifiedpool.arena import Arena
from unifiedpool.errors import (
    CapacityError,
    ConcurrentCallError,
    InvalidArgumentError,
    InvalidHandleError,
    LayoutMismatchError,
)
from unifiedpool.layout import Layout
from unifiedpool.plan import StepPlan
from unifiedpool.planner import Handles, Planner
from unifiedpool.pool import Pool

pytestmark = pytest.mark.native

LAYOUT = Layout.simple({"state": 4096, "full": 512})
BYTES = 1 << 16


@pytest.fixture
def planner() -> Planner:
    return Planner(LAYOUT, BYTES)


@pytest.mark.parametrize("handles", [b"\1\0\0\0", b"abc", bytearray(4), "1"])
def test_handles_text_and_bytes_are_refused(planner: Planner, handles: Any) -> None:
    kept = planner.allocate({"full": 1})
    with pytest.raises(InvalidHandleError, match=type(handles).__name__):
        planner.free(handles)
    assert planner.is_live(kept[0])


@pytest.mark.parametrize("value", [None, "1", 1.5, [1], float("nan"), 1 << 70])
def test_handle_of_no_integer_is_not_live_and_has_no_cell(planner: Planner, value: Any) -> None:
    assert not planner.is_live(value)
    with pytest.raises(InvalidHandleError):
        planner.cell(value, "full")


@pytest.mark.parametrize("key", [3, None, b"full", ()])
def test_demand_key_that_names_no_kind_is_refused(planner: Planner, key: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        planner.demand({key: 1})


@pytest.mark.parametrize("count", [np.float32(2.7), 1.0, "1", None, torch.tensor(1.0)])
def test_demand_count_that_only_rounds_to_an_integer_is_refused(planner: Planner, count: Any) -> None:
    demand = planner.demand({"full": 5})
    with pytest.raises(InvalidArgumentError, match="count of 'full'"):
        demand.set(0, count)
    assert demand.total == 5 and len(planner.allocate(demand)) == 5


def test_demand_small_numpy_integers_do_not_wrap_the_total(planner: Planner) -> None:
    demand = planner.demand({"full": np.uint8(200), "state": np.uint8(200)})
    assert demand.total == 400
    demand.set(0, np.uint8(3))
    demand.set(1, np.uint8(0))
    assert demand.total == 3 and len(planner.allocate(demand, Handles(3))) == 3


@pytest.mark.parametrize("index", [-1, 1, "full", None])
def test_demand_index_of_no_item_is_refused(planner: Planner, index: Any) -> None:
    for demand in (planner.demand({"full": 5}), planner.demand({})):
        total = demand.total
        for count in (1, -1, None):
            with pytest.raises(InvalidArgumentError, match=r"item|count"):
                demand.set(index, count)  # type: ignore[arg-type]
        assert demand.total == total
    with pytest.raises(InvalidArgumentError, match="no item 0"):
        planner.demand({}).set(0, 1)


@pytest.mark.parametrize("kind", [1.0, None, 2, -1, "x"])
def test_kind_that_is_none_is_refused(planner: Planner, kind: Any) -> None:
    for call in (planner.cells, planner.live_cells, planner.next_open_cost, LAYOUT.kind):
        with pytest.raises(InvalidArgumentError, match="no kind"):
            call(kind)


def test_out_must_be_handles(planner: Planner) -> None:
    for out in ([0, 0, 0], np.zeros(3, np.int32)):
        with pytest.raises(InvalidArgumentError, match="Handles"):
            planner.allocate({"full": 3}, out)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [None, {"full": 512}, "qwen"])
def test_layout_of_another_type_is_refused(layout: Any) -> None:
    for make in (Planner, Arena, Pool):
        with pytest.raises(InvalidArgumentError, match="Layout"):
            make(layout, BYTES)


@pytest.mark.parametrize("strides", [None, [("full", 512)], {1: 512}])
def test_layout_of_what_names_no_kinds_is_refused(strides: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="give names"):
        Layout.simple(strides)


@pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning")
def test_planner_of_too_many_kinds_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="7 kinds"):
        Planner(Layout.simple(dict.fromkeys("abcdefg", 256)), BYTES)


@pytest.mark.parametrize("size", [0, -1, 512, 1 << 40, 1 << 70, True, 1.5, None])
def test_resize_to_a_size_that_no_arena_can_have_says_why(planner: Planner, size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be an integer|holds no cell|can be numbered"):
        planner.resize(size)
    assert planner.arena_bytes == planner.stats().arena_bytes == BYTES


def test_resize_takes_numpy_sizes_and_says_when_the_step_has_one_already(planner: Planner) -> None:
    planner.resize(np.int64(2 * BYTES))
    assert type(planner.arena_bytes) is int
    with pytest.raises(InvalidArgumentError, match="seal it first"):
        planner.resize(3 * BYTES)


def test_relocate_and_pin_say_what_is_in_the_way(planner: Planner) -> None:
    handles = planner.allocate({"full": 2})
    for cell in (planner.cell(handles[1], "full"), 0, -1, 1 << 20):
        with pytest.raises(InvalidArgumentError, match="not available"):
            planner.relocate(handles[0], "full", cell)
    pins = [planner.pin(handles, reason="test") for _ in range(65535)]
    with pytest.raises(InvalidArgumentError, match="65,535"):
        planner.pin(handles, reason="one too many")
    for pin in pins:
        pin.release()


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "deep", "pickle"],
)
def test_copies_of_owners_are_refused(duplicate: Callable[[Any], Any]) -> None:
    pool = Pool(LAYOUT, BYTES)
    planner = pool.planner
    handles = planner.allocate({"full": 2})
    owners = (pool, pool.arena, planner, handles, planner.demand({"full": 1}), planner.reserve({"full": 1}))
    for owner in (*owners, planner.pin(handles, reason="test")):
        with pytest.raises(TypeError, match="cannot be copied"):
            duplicate(owner)
    plan = planner.seal()
    assert plan is not None and duplicate(plan) == plan and duplicate(LAYOUT) == LAYOUT


def test_threads_that_seal_one_planner_get_whole_plans_or_are_told(planner: Planner) -> None:
    plans: list[StepPlan] = []

    def work() -> None:
        for _ in range(2000):
            with contextlib.suppress(ConcurrentCallError, CapacityError):
                planner.allocate({"full": 1})
            with contextlib.suppress(ConcurrentCallError):
                plan = planner.seal()
                if plan is not None:
                    plans.append(StepPlan.from_bytes(plan.to_bytes()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(plan.sequence for plan in plans) == list(range(planner.stats().sequence))


def test_seal_while_another_thread_copies_its_plan_out_is_refused(planner: Planner) -> None:
    planner.allocate({"full": 1})
    with planner._sealing, pytest.raises(ConcurrentCallError, match="seal"):
        planner.seal()
    assert planner.seal() is not None


def test_views_outlive_their_planner() -> None:
    planner = Planner(LAYOUT, BYTES)
    handles = planner.allocate({"full": 5})
    before, numbers = planner.cells("full"), handles.view
    planner.resize(16 * BYTES)
    planner.seal()
    after, expected = planner.cells("full"), planner.cells("full").tolist()
    del planner, handles
    gc.collect()
    assert after.tolist() == expected and before.tolist() == expected[: len(before)]
    assert numbers.tolist() == [1, 2, 3, 4, 5]


def test_plan_read_from_a_buffer_does_not_change_with_it(planner: Planner) -> None:
    planner.zero(planner.allocate({"full": 20}), "full")
    plan = planner.seal()
    assert plan is not None
    buffer = bytearray(plan.to_bytes())
    read = StepPlan.from_bytes(buffer)  # type: ignore[arg-type]
    buffer[100:] = bytes(len(buffer) - 100)
    assert read == plan and np.array_equal(read.operations, plan.operations)


@pytest.mark.parametrize("data", [None, "plan", 5, [1, 2]])
def test_plan_from_what_is_no_buffer_is_refused(data: Any) -> None:
    with pytest.raises(LayoutMismatchError, match="is bytes, not"):
        StepPlan.from_bytes(data)


def test_arena_refuses_what_it_cannot_use() -> None:
    wrong: list[tuple[int, dict[str, Any]]] = [
        (1 << 63, {}),
        (1 << 200, {}),
        (BYTES, {"max_handles": 1.5}),
        (BYTES, {"max_handles": "x"}),
        (BYTES, {"max_handles": 1 << 50}),
        (BYTES, {"device": "foo"}),
        (BYTES, {"device": None}),
        (BYTES, {"buffer": np.zeros(BYTES, np.uint8)}),
        (BYTES, {"buffer": bytearray(BYTES)}),
    ]
    for size, options in wrong:
        with pytest.raises(InvalidArgumentError):
            Arena(LAYOUT, size, **options)
    arena = Arena(LAYOUT, BYTES)
    with pytest.raises(InvalidArgumentError, match="StepPlan"):
        arena.apply(b"plan")  # type: ignore[arg-type]
    for cell in (1.5, None, "x"):
        with pytest.raises(InvalidArgumentError, match="the arena has cells"):
            arena.cell_bytes("full", cell)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="handles is list"):
        arena.block_table([[1]], "full", torch.zeros((1, 1), dtype=torch.int32))  # type: ignore[arg-type]
    pages, positions = torch.zeros((1, 1), dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int64)
    for wrong_pages, wrong_positions in (
        (pages, [[0]]),
        (pages[0, 0], positions[0, 0]),
        (pages[None], positions[None]),
    ):
        with pytest.raises(InvalidArgumentError, match="positions are"):
            arena.slot_mapping(wrong_pages, wrong_positions, "full", positions)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(CapacityError, match="cuda"):
            Arena(LAYOUT, BYTES, device="cuda")


def test_pool_step_that_is_refused_keeps_the_plan() -> None:
    pool = Pool(LAYOUT, BYTES)
    handles = pool.planner.allocate({"full": 3})
    with pytest.raises(InvalidArgumentError, match="stream"):
        pool.step(stream=object())
    assert pool.step() is not None
    assert pool.arena.tables["full"][handles.numpy()].tolist() == [7, 6, 5]
