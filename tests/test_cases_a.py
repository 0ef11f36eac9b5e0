"""Planner and arena: operation sequences with a right answer (frontier, comb, sawtooth, pins, joint demands, ...).

Each section covers a kind of fault (sizes, orders, kinds), not one line. S is the largest stride, P the smallest.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import Lockstep
from unifiedpool import (
    Arena,
    CapacityError,
    ConcurrentCallError,
    InvalidArgumentError,
    InvalidHandleError,
    Kind,
    Layout,
    LayoutMismatchError,
    PinnedError,
    Planner,
    PlanOrderError,
    Segment,
    StepPlan,
)

pytestmark = pytest.mark.native

P = 256
RATIOS = [1, 2, 5, 13, 64]
FOLDER = Path(__file__).resolve().parent


def lockstep(
    ratios: int | tuple[int, ...], states: int, *, extra: int = 0, null_cell: bool = False, **options: Any
) -> Lockstep:
    """A pool of `states` S-cells plus `extra` bytes; kinds state, [swa, [draft,]] full, each `ratio` of the next."""
    chain = (ratios,) if isinstance(ratios, int) else ratios
    names = ["state", "swa", "draft", "full"]
    names = [*names[: len(chain)], "full"]
    strides = [P]
    for ratio in reversed(chain):
        strides.insert(0, strides[0] * ratio)
    layout = Layout.simple(dict(zip(names, strides, strict=True)), null_cell=null_cell, **options)
    return Lockstep(layout, states * strides[0] + extra, with_bytes=strides[0] * states < 1 << 22)


def fill(both: Lockstep, kind: str) -> list[int]:
    """Allocate as many cells as fit, in one call."""
    return both.allocate({kind: both.most(kind)})


def until_refused(both: Lockstep, kind: str) -> list[int]:
    """Allocate one by one until the planner refuses; `Lockstep` checks that the formula refuses there too."""
    handles = []
    while new := both.allocate({kind: 1}):
        handles += new
        both.step()
    return handles


def cells_of(both: Lockstep, kind: str) -> dict[int, int]:
    return both.map.cells[both.layout.kind_id(kind)]


# -- A1 frontier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("extra", [0, P, 3 * P + 17])
@pytest.mark.parametrize("null_cell", [False, True])
def test_frontier_one_page_left_moves_at_most_one_page(ratio: int, extra: int, null_cell: bool) -> None:
    both = lockstep(ratio, 7, extra=extra, null_cell=null_cell)
    pages = fill(both, "full")
    both.step()
    both.free(pages[:-1])
    most = both.most("state")
    assert len(until_refused(both, "state")) == most
    assert both.moved_bytes <= P
    both.check_counts()


@pytest.mark.parametrize("kept", range(0, 26, 5))
def test_frontier_any_page_left_moves_at_most_one_page(kept: int) -> None:
    both = lockstep(5, 5, extra=2 * P)
    pages = fill(both, "full")
    both.free(pages[:kept] + pages[kept + 1 :])
    assert len(until_refused(both, "state")) == 5
    assert both.moved_bytes <= P


# -- A2 comb -------------------------------------------------------------------------------------------------------


def comb(both: Lockstep, position: int) -> list[int]:
    """Fill with pages, keep the page at `position` in every S-cell, free the rest; return the kept ones."""
    pages = fill(both, "full")
    both.step()
    size = both.layout.strides[0] // P
    kept = [handle for handle in pages if cells_of(both, "full")[handle] % size == position % size]
    both.free(sorted(set(pages) - set(kept)))
    both.step()
    return kept


@pytest.mark.parametrize("ratio", [2, 5, 13, 64])
@pytest.mark.parametrize("position", [0, 1, -1])
@pytest.mark.parametrize("extra", [0, P, 700])
def test_comb_states_until_refused_is_the_formulas_number(ratio: int, position: int, extra: int) -> None:
    both = lockstep(ratio, 9, extra=extra)
    kept = comb(both, position)
    tail_page = extra >= P and (position % ratio) != 0
    whole = 9 * ratio + extra // P
    assert both.most("state") == (whole - len(kept)) // ratio if not tail_page else both.most("state")
    most = both.most("state")
    assert len(until_refused(both, "state")) == most
    assert both.planner.stats().kinds["state"].worst_window_bytes < both.layout.strides[0]
    assert sorted(cells_of(both, "full")) == sorted(kept)
    both.check_counts()


@pytest.mark.parametrize("ratio", [2, 5, 64])
@pytest.mark.parametrize("null_cell", [False, True])
def test_comb_with_moves_forbidden_is_refused_and_nothing_changes(ratio: int, null_cell: bool) -> None:
    both = lockstep(ratio, 9, null_cell=null_cell)
    comb(both, 1)
    digest = both.planner.digest()
    assert both.fits({"state": 1})
    assert both.allocate({"state": 1}, moves=False) == []
    assert both.planner.digest() == digest
    with pytest.raises(CapacityError):
        both.planner.allocate({"state": 1}, moves=False)
    assert both.step() is None
    assert both.allocate({"state": 1})


@pytest.mark.parametrize("ratios", [(3, 4), (4, 1, 5), (2, 2, 2), (1, 6)])
def test_comb_of_three_and_four_kinds_is_the_formulas_number(ratios: tuple[int, ...]) -> None:
    both = lockstep(ratios, 8, extra=3 * P)
    comb(both, 1)
    for kind in both.layout.names:
        most = both.most(kind)
        assert len(until_refused(both, kind)) == most
    both.check_counts()


# -- A3 last state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kept", [0, 3, -1])
def test_last_state_pages_fill_both_sides_of_it(ratio: int, kept: int) -> None:
    both = lockstep(ratio, 6, extra=2 * P + 5)
    states = fill(both, "state")
    both.step()
    survivor = states[kept]
    both.free([handle for handle in states if handle != survivor])
    most = both.most("full")
    assert most == 5 * ratio + 2
    assert len(fill(both, "full")) == most
    start = cells_of(both, "state")[survivor] * ratio
    pages = set(cells_of(both, "full").values())
    assert pages == set(range(6 * ratio + 2)) - set(range(start, start + ratio))
    assert both.moved_bytes == 0
    both.step()
    assert both.allocate({"full": 1}) == []


# -- A4 sawtooth ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [5, 13])
@pytest.mark.parametrize("null_cell", [False, True])
def test_sawtooth_of_short_and_long_requests_moves_little_and_frees_to_one_extent(ratio: int, null_cell: bool) -> None:
    both = lockstep(ratio, 40, null_cell=null_cell)
    both.arena = None
    rng = random.Random(ratio)
    running: list[list[int]] = []
    for phase in range(20):
        pages = 3 if phase % 2 == 0 else 8 * ratio
        for _ in range(40 if pages == 3 else 8):
            while not (request := both.allocate({"state": 1, "full": pages})):
                both.free(running.pop(rng.randrange(len(running))))
            running.append(request)
        both.step()
    assert both.moved_bytes <= 0.05 * both.allocated_bytes
    for request in running:
        both.free(request)
    assert len(both.planner.free_extents()) == 1
    both.check_counts()


# -- A5 the mover's worst case ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [4, 13])
@pytest.mark.parametrize("n", [1, 3, 8, 20])
def test_worst_case_holes_at_the_high_end_move_less_than_a_state_a_window(ratio: int, n: int) -> None:
    both = lockstep(ratio, 12)
    both.allocate({"full": 6 * ratio})
    both.step()
    for _ in range(8):
        if not both.allocate({"full": n}):
            break
        by_cell = sorted(cells_of(both, "full").items(), key=lambda item: -item[1])
        both.free([handle for handle, _ in by_cell[:n]])
        states = until_refused(both, "state")
        both.free(states)
        both.step()
    assert both.planner.stats().kinds["state"].worst_window_bytes < both.layout.strides[0]
    both.check_counts()


# -- A6 pinned -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2, 5, 13])
@pytest.mark.parametrize("pinned", ["all", "all but one", "one"])
def test_pinned_comb_is_exact_says_what_pins_hold_and_opens_after_release(ratio: int, pinned: str) -> None:
    both = lockstep(ratio, 6)
    kept = comb(both, 0)
    held = {"all": kept, "all but one": kept[1:], "one": kept[:1]}[pinned]
    pin = both.pin(held)
    assert pin is not None
    most = both.most("state")
    # One unpinned window opens when the page in it finds room beside the pinned ones.
    assert most == (0 if pinned == "all" else min(6 - len(held), (6 * ratio - 6) // ratio))
    assert len(until_refused(both, "state")) == most
    with pytest.raises(CapacityError, match="pinned") as refusal:
        both.planner.allocate({"state": 1})
    assert "pin" in str(refusal.value)
    both.check_counts()
    both.release(pin)
    assert len(until_refused(both, "state")) == (6 * ratio - 6) // ratio - most
    both.check_counts()


def test_pinned_refusal_names_the_bytes_that_pins_hold() -> None:
    both = lockstep(4, 6)
    both.pin(comb(both, 0))
    stats = both.planner.stats().kinds["state"]
    assert (stats.placeable, stats.held_by_pins) == (0, 4)
    with pytest.raises(CapacityError, match=r"1\.5 KiB pinned|pinned"):
        both.planner.allocate({"state": 1})


def test_pinned_handle_frees_and_moves_are_refused_until_the_last_release() -> None:
    both = lockstep(4, 3)
    handle = both.allocate({("state", "full"): 1})[0]
    first, second = both.planner.pin([handle], reason="a"), both.planner.pin([handle], reason="b")
    calls: list[Callable[[], None]] = [
        lambda: both.planner.free([handle]),
        lambda: both.planner.detach([handle], "full"),
        lambda: both.planner.relocate(handle, "full", 0),
    ]
    for call in calls:
        digest = both.planner.digest()
        with pytest.raises(PinnedError, match=str(handle)):
            call()
        assert both.planner.digest() == digest
    first.release()
    with pytest.raises(PinnedError):
        both.planner.free([handle])
    second.release()
    with pytest.raises(InvalidHandleError):
        second.release()
    both.planner.free([handle])


def test_pinned_allocation_clusters_in_windows_that_are_pinned() -> None:
    both = lockstep(8, 8)
    for _ in range(12):
        pages = both.allocate({"full": 3})  # traffic between the pinned ones
        both.pin(both.allocate({"full": 1}, pinned=True))
        both.free(pages)
    windows = {cell // 8 for handle, cell in cells_of(both, "full").items() if handle in both.map.pins}
    assert len(windows) == 2  # 12 pinned pages in windows of 8
    assert both.most("state") == 6


# -- A7 joint demand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2, 5, 13])
@pytest.mark.parametrize("extra", [0, P])
def test_joint_demand_each_alone_fits_both_do_not(ratio: int, extra: int) -> None:
    both = lockstep(ratio, 4, extra=extra)
    for states in range(5):
        pages = (4 - states) * ratio + extra // P
        digest = both.planner.digest()
        assert both.fits({"state": states}) and both.fits({"full": pages + 1 if states else pages})
        assert both.allocate({"state": states + 1, "full": pages}) == []
        assert both.allocate({"state": states, "full": pages + 1}) == []
        assert both.planner.digest() == digest
        exact = both.allocate({"state": states, "full": pages})
        assert len(exact) == states + pages
        both.step()
        both.free(exact)


@pytest.mark.parametrize("order", [("state", "full"), ("full", "state")])
def test_joint_demand_pages_fit_only_in_one_order_of_placing(order: tuple[str, str]) -> None:
    """A comb where the state must open a window and the pages need every hole that is left."""
    both = lockstep(4, 6)
    comb(both, 2)
    free_pages = 6 * 4 - 6 - 4
    demand = {kind: {"state": 1, "full": free_pages}[kind] for kind in order}
    over = {kind: {"state": 1, "full": free_pages + 1}[kind] for kind in order}
    assert both.allocate(over) == []
    assert len(both.allocate(demand)) == 1 + free_pages
    both.step()
    both.check_counts()


def test_joint_demand_of_three_kinds_is_exact_at_every_edge() -> None:
    both = lockstep((3, 4), 3)
    for states in range(4):
        for windows in range((3 - states) * 3 + 1):
            pages = ((3 - states) * 3 - windows) * 4
            demand = {"full": pages, "swa": windows, "state": states}
            for kind in demand:
                assert not both.fits({**demand, kind: demand[kind] + 1})
            handles = both.allocate(demand)
            assert len(handles) == pages + windows + states
            both.free(handles)


# -- A8 exact fits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2, 5, 16])
def test_exact_fit_hole_of_a_whole_state_needs_no_move(ratio: int) -> None:
    for index in range(5):
        both = lockstep(ratio, 5)
        pages = fill(both, "full")
        hole = {handle for handle in pages if cells_of(both, "full")[handle] // ratio == index}
        both.free(sorted(hole))
        (state,) = both.allocate({"state": 1}, moves=False)
        assert cells_of(both, "state")[state] == index
        assert both.allocate({"full": 1}) == []


@pytest.mark.parametrize("ratio", [2, 5, 16])
def test_exact_fit_shifted_hole_needs_one_evacuation(ratio: int) -> None:
    for index in range(4):
        for shift in range(1, ratio):
            both = lockstep(ratio, 5)
            pages = fill(both, "full")
            start = index * ratio + shift
            both.free([handle for handle in pages if start <= cells_of(both, "full")[handle] < start + ratio])
            assert both.allocate({"state": 1}, moves=False) == []
            assert len(both.allocate({"state": 1})) == 1
            stats = both.planner.stats().kinds
            assert stats["state"].evacuations == 1
            assert stats["full"].moved_cells == min(shift, ratio - shift)
            both.step()


@pytest.mark.parametrize("states", [1, 2, 7, 64])
@pytest.mark.parametrize("ratio", [2, 13])
def test_exact_fit_arena_of_k_cells_holds_k_minus_the_null_cell(states: int, ratio: int) -> None:
    plain = lockstep(ratio, states)
    assert plain.most("state") == states
    short = lockstep(ratio, states, extra=-1)
    assert short.most("state") == states - 1
    assert short.most("full") == states * ratio - 1
    null = lockstep(ratio, states, null_cell=True)
    assert null.most("state") == states - 1
    assert null.most("full") == states * ratio - 1  # only the null page itself is lost to pages
    for both in (plain, short, null):
        assert len(until_refused(both, "state")) == both.planner.stats().kinds["state"].live
        until_refused(both, "full")
        both.check_counts()


def test_exact_fit_last_whole_cell_of_each_kind_is_usable() -> None:
    both = lockstep((3, 4), 3, extra=4 * P + 100)
    fill(both, "state")
    assert fill(both, "swa") and max(cells_of(both, "swa").values()) == 9
    both = lockstep((3, 4), 3, extra=4 * P + 100)
    fill(both, "full")
    assert max(cells_of(both, "full").values()) == 39
    assert both.planner.stats().tail_bytes == 100


# -- A9 bad frees --------------------------------------------------------------------------------------------------


def test_bad_free_reverse_order_and_empty_batch_are_fine() -> None:
    both = lockstep(4, 4)
    handles = both.allocate({"full": 9})
    both.free(handles[::-1])
    both.free([])
    both.planner.free(np.empty(0, np.int32))
    assert both.planner.stats().live_handles == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda live: [0], "0"),
        (lambda live: [-1], "-1"),
        (lambda live: [*live, 0], "0"),
        (lambda live: [*live, live[0]], "twice|duplicate|again"),
        (lambda live: [*live[:3], live[3], live[3]], "twice|duplicate|again"),
        (lambda live: [max(live) + 1], "live|dead|allocated"),
        (lambda live: [10**6], "range"),
        (lambda live: [2**31 - 1], "range"),
        (lambda live: [2**31], "int32"),
        (lambda live: [-(2**40)], "int32"),
        (lambda live: np.array([live[0], 2**40]), "int32"),
        (lambda live: np.array([1.0]), "float"),
        (lambda live: [1.5], "int"),
        (lambda live: ["1"], "int"),
        (lambda live: np.array([[1, 2]], np.int32), "shape"),
        (lambda live: 3, "int"),
        (lambda live: None, "NoneType"),
        (lambda live: torch.tensor([1]), "Tensor"),
    ],
)
def test_bad_free_is_refused_by_name_and_changes_nothing(bad: Callable[[list[int]], Any], says: str) -> None:
    both = lockstep(4, 4)
    live = both.allocate({"full": 5, "state": 1})
    digest, extents = both.planner.digest(), both.planner.free_extents()
    with pytest.raises(InvalidHandleError, match=f"(?i){says}"):
        both.planner.free(bad(live))
    assert (both.planner.digest(), both.planner.free_extents()) == (digest, extents)
    both.check_counts()
    both.free(live)


def test_bad_free_twice_and_of_another_planners_handle_are_refused() -> None:
    one, other = lockstep(4, 4), lockstep(4, 4)
    handles = one.allocate({"full": 3})
    foreign = other.allocate({"full": 9})[-1]
    one.free(handles[:1])
    for handle in (handles[0], foreign):
        with pytest.raises(InvalidHandleError, match=str(handle)):
            one.planner.free([handle])
    one.check_counts()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int16])
def test_free_integer_arrays_memoryviews_and_strided_slices_are_taken(dtype: Any) -> None:
    both = lockstep(4, 8)
    handles = both.allocate({"full": 20})
    array = np.array(handles, dtype)
    both.planner.free(array[::2])
    both.planner.free(memoryview(np.ascontiguousarray(array[1::2], np.int32).data))
    assert both.planner.stats().live_handles == 0


# -- A10 three and four kinds: tests/fuzz.py, test_state_machine.py and, in C for the long run, tests/c/fuzz_grids.c


# -- A11 odd arenas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [1, 255, 256, 257, 13 * 256 - 1])
@pytest.mark.parametrize("null_cell", [False, True])
def test_odd_arena_not_a_multiple_of_any_stride_works(extra: int, null_cell: bool) -> None:
    both = lockstep(13, 3, extra=extra, null_cell=null_cell)
    assert both.planner.stats().tail_bytes == extra % 256
    fill(both, "full")
    both.check_counts()
    both.free(both.live)
    assert sum(length for _, length in both.planner.free_extents()) == both.map.arena_bytes - both.map.reserved_bytes


def test_odd_arena_smaller_than_a_kind_never_fits_that_kind() -> None:
    both = lockstep(13, 1, extra=-2 * P)
    assert both.most("state") == 0 and both.most("full") == 11
    with pytest.raises(CapacityError):
        both.planner.allocate({"state": 1})
    assert len(fill(both, "full")) == 11
    assert both.planner.next_open_cost("state") is None


@pytest.mark.parametrize("arena_bytes", [0, -1, -(2**60), 2**63, 1.5, "1", None])
def test_odd_arena_bad_size_is_refused(arena_bytes: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Planner(Layout.simple({"state": 4096, "full": 256}), arena_bytes)


def test_odd_arena_of_more_cells_than_int32_is_refused() -> None:
    layout = Layout.simple({"state": 4096, "full": 256})
    with pytest.raises(InvalidArgumentError, match=r"full|cells|int32|2\^31"):
        Planner(layout, (2**31 + 8) * 256)


def test_odd_strides_13_12_11_are_padded_into_a_chain_and_the_padding_shown() -> None:
    with pytest.warns(UserWarning, match="pad"):
        layout = Layout.simple({"state": 13 * P, "swa": 12 * P, "full": 11 * P}, null_cell=False)
    assert layout.strides == (13 * P,) * 3 or all(
        a % b == 0 for a, b in zip(layout.strides, layout.strides[1:], strict=False)
    )
    assert "%" in layout.explain()
    both = Lockstep(layout, 142 * P)
    assert not both.fits({"state": 1, "swa": 5, "full": 5})  # 11 cells of 13 granules need 143
    assert both.fits({"state": 1, "swa": 5, "full": 4})


def test_odd_kind_given_twice_is_refused() -> None:
    kind = Kind("full", (Segment("bytes", (0,), (256,), "uint8", "page"),), page_size=1)
    with pytest.raises(InvalidArgumentError, match="full"):
        Layout.build([kind, kind])


def test_odd_demand_is_refused_with_what_to_change() -> None:
    planner = lockstep(4, 4).planner
    for demand in ({"full": -1}, {"nothing": 1}, {"full": 1.5}, {"full": 2**31}, {(): 1}, {"full": "3"}, 7, None):
        with pytest.raises(InvalidArgumentError):
            planner.allocate(demand)  # type: ignore[arg-type]
    with pytest.raises(CapacityError):
        planner.allocate({"full": 2**31 - 1, "state": 2**31 - 1})
    assert planner.can_allocate({"full": 2**31 - 1, ("full", "state"): 2**31 - 1}) is False
    assert planner.stats().live_handles == 0


# -- A12 former owner ---------------------------------------------------------------------------------------------


def test_former_owner_nan_of_a_state_is_gone_from_a_fresh_page() -> None:
    both = lockstep(8, 4)
    assert both.arena is not None
    states = both.allocate({"state": 4}, overwrite=True)
    both.step()
    for cell in cells_of(both, "state").values():
        both.arena.cell_bytes("state", cell).view(torch.float32).fill_(float("nan"))
    both.free(states)
    pages = both.planner.allocate({"full": 32}).tolist()
    both.arena.apply(both.planner.seal(both.steps))
    for handle in pages:
        page = both.arena.cell_bytes("full", both.planner.cell(handle, "full")).view(torch.bfloat16)
        assert not page.float().abs().sum()  # finite, and zero


def test_former_owner_fresh_state_over_old_pages_is_zero_and_overwritten_one_is_not_touched() -> None:
    both = lockstep(8, 4)
    pages = fill(both, "full")
    both.step()
    both.free(pages)
    both.allocate({"state": 1})  # Lockstep expects zeroes: the policy of slots
    plan = both.step()
    assert plan is not None and [phase.operation for phase in plan.phases] == ["zero"]
    both.allocate({"state": 1}, overwrite=True)
    plan = both.step()
    assert plan is not None and not plan.phases


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_former_owner_same_kind_reuse_is_not_zeroed(kind: str) -> None:
    both = lockstep((2, 4), 4)
    handles = both.allocate({kind: 6})
    both.step()
    zeroed = both.planner.stats().kinds[kind].zeroed_cells
    assert zeroed == 6  # a new arena is dirty
    for _ in range(3):
        both.free(handles)
        handles = both.allocate({kind: 6})
        both.step()
    assert both.planner.stats().kinds[kind].zeroed_cells == zeroed


def test_former_owner_page_moved_over_a_state_needs_no_zeroing_but_the_next_state_does() -> None:
    both = lockstep(4, 3, zero={"state": "dirty"})
    fill(both, "full")
    both.step()
    both.free([handle for handle, cell in cells_of(both, "full").items() if cell != 1 and cell < 11])
    before = both.planner.stats().kinds
    both.allocate({"state": 2})
    both.step()
    after = both.planner.stats().kinds
    assert after["state"].zeroed_cells - before["state"].zeroed_cells == 2
    assert after["full"].zeroed_cells == before["full"].zeroed_cells


# -- A13 big addresses --------------------------------------------------------------------------------------------


def test_big_planner_over_2_tib_places_frees_and_agrees() -> None:
    layout = Layout.simple({"state": 1 << 28, "full": 1 << 21})
    planner = Planner(layout, 2 << 40)
    handles = planner.allocate({"state": 4000, "full": 200_000})
    assert max(planner.cells("full")) * (1 << 21) > 1 << 40
    planner.free(handles[::2])
    states = planner.allocate({"state": 500})
    planner.validate()
    plan = planner.seal()
    assert plan is not None
    planner.free(states)
    planner.free(handles[1::2])
    assert planner.free_extents() == [(1 << 21, (2 << 40) - (1 << 21))]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_big_tensor_moves_past_2_31_bytes_and_elements_reach_the_right_bytes(dtype: str) -> None:
    element = {"uint8": 1, "bfloat16": 2}[dtype]
    segments = {
        "state": Segment("s", (0,), (64 << 20,), dtype, "slot"),
        "full": Segment("k", (0,), (1 << 20,), dtype, "token"),
    }
    kinds = [Kind("state", (segments["state"],)), Kind("full", (segments["full"],), page_size=1)]
    layout = Layout.build(kinds, null_cell=False)
    arena_bytes = ((2**31 // (64 << 20)) + 2) * (64 << 20) * element
    planner, arena = Planner(layout, arena_bytes), Arena(layout, arena_bytes)  # virtual memory, touched in few places
    page, other = planner.allocate({"full": 2}, overwrite=True)
    arena.apply(planner.seal())
    cell = planner.cell(page, "full")
    view = arena.view("full", 0, "k")
    assert cell * view.stride(0) > 2**31
    view[cell] = 7
    view[planner.cell(other, "full")] = 9
    target = planner.live_cells("full")[0].min() - 5
    planner.relocate(page, "full", int(target))
    planner.copy([page], [other], kind="full")
    planner.relocate(other, "full", cell)
    arena.apply(planner.seal())
    assert bool((view[int(target)] == 7).all()) and bool((view[cell] == 7).all())
    planner.zero([page], "full")
    arena.apply(planner.seal())
    assert not bool(view[int(target)].any()) and bool((view[cell] == 7).all())


# -- A14 threads ---------------------------------------------------------------------------------------------------


def test_threads_two_on_one_planner_get_clear_errors_and_no_corruption() -> None:
    planner = lockstep(64, 200).planner
    deadline, busy, done = time.monotonic() + 1.5, [0, 0, 0], [0, 0, 0]
    kept: list[list[int]] = [[], [], []]
    unexpected: list[BaseException] = []

    def work(index: int) -> None:
        while time.monotonic() < deadline:
            try:
                handles = planner.allocate({"full": 200, "state": 2}).tolist()
            except ConcurrentCallError:
                busy[index] += 1
                continue
            except CapacityError:
                continue
            except BaseException as error:
                unexpected.append(error)
                return
            kept[index] += handles
            try:
                planner.free(handles)
            except ConcurrentCallError:
                busy[index] += 1
                continue
            del kept[index][-len(handles) :]
            done[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert sum(done) > 0
    planner.validate()
    live = sorted(h for handles in kept for h in handles)
    assert planner.stats().live_handles == len(live) == len(set(live))
    planner.free(live)
    planner.validate()


def test_threads_second_call_during_a_long_one_is_refused_and_changes_nothing() -> None:
    planner = Planner(Layout.simple({"state": 1 << 24, "full": 1 << 12}), 1 << 32)
    handles = planner.allocate({"full": 100_000})
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                planner.validate()  # walks a million cells, outside Python's lock
            except ConcurrentCallError:
                continue

    thread = threading.Thread(target=look)
    thread.start()
    refused = 0
    deadline = time.monotonic() + 20
    while not refused and time.monotonic() < deadline:
        try:
            planner.free(planner.allocate({"state": 1}))
        except ConcurrentCallError as error:
            refused += "thread" in str(error)
    stop.set()
    thread.join()
    assert refused
    planner.validate()
    assert planner.stats().live_handles - len(handles) in (0, 1)  # 1: the refused call was the free


def test_threads_one_planner_each_do_not_disturb_each_other() -> None:
    digests: dict[int, int] = {}

    def work(index: int) -> None:
        both = lockstep(8, 20)
        for _ in range(10):
            both.free(both.allocate({"full": 40, "state": 3})[::2])
        digests[index] = both.planner.digest()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4 and len(set(digests.values())) == 1


# -- A15 plan ------------------------------------------------------------------------------------------------------


def test_plan_chained_moves_in_one_step_keep_every_content() -> None:
    """The cell that one move leaves is the next one's destination, around a ring of any length."""
    both = lockstep(8, 4)
    handles = both.allocate({"full": 6})
    both.step()
    empty = min(set(range(32)) - set(cells_of(both, "full").values()))
    for handle in [*handles, *handles[::-1], *handles]:
        hole = empty
        empty = cells_of(both, "full")[handle]
        both.relocate(handle, "full", hole)
    plan = both.step()
    assert plan is not None and plan.num_phases > 1


@pytest.mark.parametrize("seed", range(20))
def test_plan_random_moves_copies_zeroes_and_frees_in_one_step_keep_every_content(seed: int) -> None:
    rng = random.Random(seed)
    both = lockstep((2, 4), 5, null_cell=bool(seed % 2))
    for _ in range(6):
        for _ in range(rng.randint(1, 25)):
            kind = rng.choice(both.layout.names)
            have = sorted(cells_of(both, kind))
            call = rng.choice(["allocate", "free", "copy", "zero", "move"])
            if call == "allocate":
                both.allocate({kind: rng.randint(1, 4)})
            elif call == "free" and have:
                both.free(rng.sample(have, (len(have) + 1) // 2))
            elif call == "copy" and len(have) > 1:
                a, b = rng.sample(have, 2)
                both.copy([a], [b], kind)
            elif call == "zero" and have:
                both.zero([rng.choice(have)], kind)
            elif call == "move" and have:
                size = both.layout.strides[both.layout.kind_id(kind)] // P
                owner = both.map.owners()
                empty = [c for c in range(len(owner) // size) if not owner[c * size : (c + 1) * size].any()]
                if empty:
                    both.relocate(rng.choice(have), kind, rng.choice(empty))
        both.step()


def test_plan_copy_out_of_a_cell_that_a_later_phase_moves_reads_the_old_content() -> None:
    both = lockstep(4, 5)
    pages = fill(both, "full")
    both.step()
    both.free([handle for handle in pages if cells_of(both, "full")[handle] % 4 != 1])
    source, target = list(cells_of(both, "full"))[:2]
    both.copy([source], [target], "full")
    both.allocate({"state": 3})  # evacuates windows, the source's among them
    both.copy([target], [source], "full")
    plan = both.step()
    assert plan is not None and {phase.operation for phase in plan.phases} >= {"move", "copy"}


def test_plan_gap_repeat_and_other_layout_are_refused_and_change_nothing() -> None:
    both, twin = lockstep(4, 4), lockstep(4, 4, zero={"state": "never"})
    assert both.arena is not None
    plans = []
    for _ in range(3):
        both.planner.allocate({"full": 2})
        plans.append(both.planner.seal())
    before = both.arena.buffer.clone()
    with pytest.raises(PlanOrderError):
        both.arena.apply(plans[1])
    both.arena.apply(plans[0])
    with pytest.raises(PlanOrderError):
        both.arena.apply(plans[0])
    with pytest.raises(PlanOrderError):
        both.arena.apply(plans[2])
    twin.planner.allocate({"full": 1})
    with pytest.raises(LayoutMismatchError):
        both.arena.apply(twin.planner.seal())
    after = both.arena.buffer.clone()
    both.arena.apply(plans[1])
    assert both.arena.sequence == 2
    assert before.shape == after.shape


def test_plan_damaged_bytes_are_refused() -> None:
    both = lockstep(4, 4)
    both.planner.allocate({"full": 5, "state": 1})
    plan = both.planner.seal(step=41)
    assert plan is not None
    data = plan.to_bytes()
    again = StepPlan.from_bytes(data)
    assert again == plan and again.step == 41 and (again.changes == plan.changes).all()
    for spoilt in (b"", data[:-1], data + b"\0", data[:40], bytes(len(data))):
        with pytest.raises(LayoutMismatchError):
            StepPlan.from_bytes(spoilt)
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 4
        with pytest.raises(LayoutMismatchError):
            StepPlan.from_bytes(bytes(flipped))


WORKER = """
import sys
from unifiedpool import Arena, Layout, StepPlan
layout = Layout.from_json(sys.stdin.buffer.readline().decode())
arena = Arena(layout, int(sys.stdin.buffer.readline()))
arena.buffer.random_(0, 256)
for line in sys.stdin.buffer:
    command, *rest = line.decode().split()
    if command == "plan":
        arena.apply(StepPlan.from_bytes(bytes.fromhex(rest[0])))
    elif command == "write":
        kind, handle, value = int(rest[0]), int(rest[1]), int(rest[2])
        arena.cell_bytes(kind, int(arena.tables[layout.names[kind]][handle])).fill_(value)
    else:
        kind, handle = int(rest[0]), int(rest[1])
        cell = arena.cell_bytes(kind, int(arena.tables[layout.names[kind]][handle]))
        print(int(cell.min()), int(cell.max()), flush=True)
"""


def test_plan_applied_in_another_process_gives_the_same_contents() -> None:
    both = lockstep(4, 8)
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{both.layout.to_json()}\n{both.map.arena_bytes}\n")

    def send_plan() -> None:
        plan = both.planner.seal()
        assert plan is not None and process.stdin is not None
        process.stdin.write(f"plan {plan.to_bytes().hex()}\n")

    pages = both.allocate({"full": 30})
    send_plan()
    for handle in pages:
        process.stdin.write(f"write 1 {handle} {handle % 251}\n")
    kept = pages[1::3]
    both.free(sorted(set(pages) - set(kept)))
    both.allocate({"state": 4})
    send_plan()
    assert both.moved_bytes > 0
    for handle in kept:
        process.stdin.write(f"read 1 {handle}\n")
    process.stdin.flush()
    for handle in kept:
        assert process.stdout.readline().split() == [str(handle % 251)] * 2
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


# -- A16 many at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [20, 64])
def test_many_states_at_once_out_of_a_95_percent_full_comb(ratio: int) -> None:
    both = lockstep(ratio, 100)
    pages = fill(both, "full")
    both.step()
    rng = random.Random(ratio)
    both.free(rng.sample(pages, len(pages) * 5 // 100))
    most = both.most("state")
    assert most == 5
    assert len(both.allocate({"state": 4})) == 4
    plan = both.step()
    assert plan is not None
    stats = both.planner.stats()
    assert stats.kinds["state"].worst_window_bytes < both.layout.strides[0]
    assert stats.worst_call_bytes < 4 * both.layout.strides[0]
    both.check_counts()


@pytest.mark.parametrize("ratios", [(4, 6), (2, 3, 5), (8, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_many_kinds_a_middle_victim_opens_a_window_for_itself(ratios: tuple[int, ...], seed: int) -> None:
    """Middle cells and pages strewn so that opening an S-cell displaces a middle cell with no place of its own."""
    rng = random.Random(seed)
    both = lockstep(ratios, 8, extra=P)
    middles = fill(both, "swa")
    both.free(rng.sample(middles, len(middles) // 2))
    pages = fill(both, "full")
    both.step()
    size = both.layout.strides[1] // P
    by_window: dict[int, list[int]] = {}
    for handle, cell in cells_of(both, "full").items():
        by_window.setdefault(cell // size, []).append(handle)
    both.free([handle for window in by_window.values() for handle in window[:-1]])
    assert len(pages) > len(by_window)
    most = both.most("state")
    opened = both.allocate({"state": max(1, most // 2)}) + until_refused(both, "state")
    assert len(opened) == most
    both.step()
    assert both.planner.stats().kinds["state"].worst_window_bytes < 2 * both.layout.strides[0]
    both.check_counts()


def test_many_only_free_cells_lie_inside_the_window_being_opened() -> None:
    both = lockstep(6, 4)
    pages = fill(both, "full")
    both.free([handle for handle in pages if cells_of(both, "full")[handle] in range(12, 17)])  # 5 of 6 in window 2
    assert not both.fits({"state": 1})
    assert both.planner.shortfall({"state": 1}) == P
    outside = next(handle for handle, cell in cells_of(both, "full").items() if cell == 0)
    both.free([outside])
    (state,) = both.allocate({"state": 1})
    assert cells_of(both, "state")[state] == 2 and both.moved_bytes == P
    both.step()


# -- A17 jam -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 13])
@pytest.mark.parametrize("states", [2, 7, 20])
def test_jam_states_and_pages_interleaved_is_exact(ratio: int, states: int) -> None:
    both = lockstep(ratio, states)
    slots = fill(both, "state")
    both.free(slots[::2])
    pages = fill(both, "full")
    assert len(pages) == (states + 1) // 2 * ratio
    for demand in ({"state": 1}, {"full": 1}, {"state": 1, "full": 1}):
        assert both.allocate(demand) == []
    assert both.planner.next_open_cost("state") is None
    both.free(pages[:1])
    assert both.fits({"full": 1}) and (ratio == 1) == both.fits({"state": 1})
    both.free(pages[1:ratio])
    assert both.fits({"state": 1}) and both.fits({"full": ratio}) and not both.fits({"state": 1, "full": 1})
    assert len(both.allocate({"state": 1})) == 1
    both.step()
    both.check_counts()


# -- A18 words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last"),
    [(63, 64), (0, 63), (1, 64), (62, 66), (4095, 4096), (4000, 4200), (0, 4095), (4159, 4160), (4096, 8191)],
)
@pytest.mark.parametrize("low", [True, False])
def test_words_runs_over_word_and_summary_borders_are_freed_and_taken_again(first: int, last: int, low: bool) -> None:
    both = lockstep(64, 130, extra=37 * P, ends={"full": "low" if low else "high"})
    both.arena = None
    fill(both, "full")
    owner = {cell: handle for handle, cell in cells_of(both, "full").items()}
    run = [owner[cell] for cell in range(first, last + 1)]
    both.free(run if low else run[::-1])
    assert both.planner.free_extents() == [(first * P, (last - first + 1) * P)]
    both.check_counts()
    again = both.allocate({"full": last - first + 1}, moves=False)
    assert sorted(cells_of(both, "full")[handle] for handle in again) == list(range(first, last + 1))
    assert both.allocate({"full": 1}) == []
    both.check_counts()


@pytest.mark.parametrize("granules", [1, 63, 64, 65, 127, 129, 4095, 4096, 4097, 4160, 4161])
def test_words_arena_that_ends_inside_any_word_is_used_to_the_last_cell(granules: int) -> None:
    layout = Layout.simple({"full": P}, null_cell=False)
    both = Lockstep(layout, granules * P + 3, with_bytes=False)
    assert len(fill(both, "full")) == granules
    both.free(both.live[::2])
    both.check_counts()
    assert len(fill(both, "full")) == (granules + 1) // 2
    both.check_counts()


# -- A19 handles ---------------------------------------------------------------------------------------------------


def test_handles_detach_and_attach_keep_the_other_cell_and_its_content() -> None:
    both = lockstep((2, 4), 6)
    handles = both.allocate({("full", "swa"): 5, "state": 1})
    joint = handles[:5]
    both.step()
    full = dict(cells_of(both, "full"))
    both.detach(joint, "swa")
    both.step()
    assert cells_of(both, "full") == full and not cells_of(both, "swa")
    with pytest.raises(InvalidHandleError, match="swa"):
        both.planner.detach(joint[:1], "swa")
    assert both.attach(joint[::-1], "swa")
    both.step()
    with pytest.raises(InvalidHandleError, match="swa"):
        both.planner.attach(joint[:1], "swa")
    both.detach(joint[:2], "swa")
    both.free(handles)  # some detached, kinds mixed
    assert len(both.planner.free_extents()) == 1
    with pytest.raises(InvalidHandleError):
        both.planner.free(handles[:1])
    both.check_counts()


def test_handles_losing_the_last_cell_dies_and_is_recycled_with_a_new_generation() -> None:
    both = lockstep(4, 4)
    (handle,) = both.allocate({"full": 1})
    generation = both.planner.generation(handle)
    both.detach([handle], "full")
    assert not both.planner.is_live(handle) and both.planner.cell(handle, "full") == -1
    with pytest.raises(InvalidHandleError):
        both.planner.attach([handle], "full")
    (again,) = both.allocate({"state": 1})
    assert again == handle and both.planner.generation(again) != generation
    both.check_counts()


def test_handles_order_is_that_of_the_demands_items() -> None:
    both = lockstep((2, 4), 4)
    handles = both.allocate({"full": 2, ("state", "full"): 1, "swa": 2})
    has = [[name for name in both.layout.names if handle in cells_of(both, name)] for handle in handles]
    assert has == [["full"], ["full"], ["state", "full"], ["swa"], ["swa"]]


# -- A20 ranks -----------------------------------------------------------------------------------------------------

RANK = """
import hashlib, json, random, sys, time
from unifiedpool import CapacityError, Layout, Planner
sleeps = random.Random(int(sys.argv[1]))
calls = random.Random(7)
planner = Planner(Layout.simple({"state": 4096, "swa": 1024, "full": 256}), 1 << 15)
live, plans = [], hashlib.sha256()
for step in range(120):
    if sleeps.random() < 0.2:
        time.sleep(sleeps.random() / 100)
    try:
        demand = {"full": calls.randrange(40), ("full", "swa"): calls.randrange(9), "state": calls.randrange(4)}
        live += planner.allocate(demand)
    except CapacityError:
        pass
    calls.shuffle(live)
    cut = calls.randrange(len(live) + 1) // 3
    planner.free(live[:cut])
    del live[:cut]
    plan = planner.seal(step)
    if plan is not None:
        plans.update(plan.to_bytes())
print(json.dumps([planner.digest(), plans.hexdigest(), planner.stats().moved_bytes]))
"""


def test_ranks_same_calls_in_two_processes_give_equal_digests_and_plans() -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(seed)], stdout=subprocess.PIPE, env=None) for seed in (1, 2)
    ]
    results = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert results[0] == results[1]
    assert results[0][2] > 0


def test_ranks_one_different_call_gives_another_digest() -> None:
    one, other = lockstep(4, 8), lockstep(4, 8)
    for both in (one, other):
        both.allocate({"full": 3})
    assert one.planner.digest() == other.planner.digest()
    one.allocate({"full": 1})
    other.allocate({"state": 1})
    assert one.planner.digest() != other.planner.digest()


# -- A21 null ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_null_cell_poisoned_padded_batches_change_no_live_byte(poison: float) -> None:
    page_size, dim = 4, 16
    segment = Segment("k", (0,), (dim,), "float32", "token")
    layout = Layout.build(
        [
            Kind("state", (Segment("s", (0,), (1024,), "float32", "slot"),)),
            Kind("full", (segment,), page_size=page_size),
        ]
    )
    planner, arena = Planner(layout, 16 * layout.strides[0]), Arena(layout, 16 * layout.strides[0])
    rows = [planner.allocate({"full": pages}).tolist() for pages in (3, 1, 2)]
    planner.allocate({"state": 2})
    arena.apply(planner.seal())
    view = arena.view("full", 0, "k")
    for cell in planner.live_cells("full")[0].tolist():
        view[cell] = torch.randn(page_size, dim, generator=torch.Generator().manual_seed(cell))
    padded = torch.tensor([row + [0] * (3 - len(row)) for row in rows], dtype=torch.int32)
    table = arena.block_table(padded, "full", torch.empty_like(padded))
    assert (table[padded == 0] == 0).all()
    lengths = torch.tensor([10, 3, 7])

    def attend() -> torch.Tensor:
        keys = view[table.long()].flatten(1, 2)
        mask = torch.arange(keys.shape[1]) < lengths[:, None]
        return torch.where(mask[..., None], keys, 0).sum(1)

    expected = attend()
    live = arena.buffer[layout.null_bytes :].clone()
    arena.buffer[: layout.null_bytes].view(torch.float32).fill_(poison)
    assert torch.equal(attend(), expected)
    # Padding lanes write somewhere harmless: the null cell, never a live byte.
    positions = torch.full((3, 1), -1)
    slots = arena.slot_mapping(padded, positions, "full", torch.empty(3, 1, dtype=torch.int64))
    assert (slots == -1).all()
    view[table[padded == 0].long()] = poison
    assert torch.equal(arena.buffer[layout.null_bytes :], live)
    assert torch.equal(attend(), expected)


def test_null_cell_is_never_handed_out_and_its_neighbours_are() -> None:
    both = lockstep((2, 4), 3, null_cell=True)
    assert both.layout.null_bytes == both.layout.strides[1]
    pages = fill(both, "full")
    assert min(cells_of(both, "full").values()) == 4 and len(pages) == 3 * 8 - 4
    both.free(pages)
    fill(both, "swa")
    assert min(cells_of(both, "swa").values()) == 1
    both.free(both.live)
    fill(both, "state")
    assert min(cells_of(both, "state").values()) == 1
    both.step()
    both.check_counts()
