"""The prefix cache's cases: operation sequences with the right answer, every ledger checked after each operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from unifiedpool import InvalidArgumentError, InvalidHandleError, Layout, PinnedError, Planner
from unifiedpool.prefix_cache import (
    Evicted,
    Inserted,
    Lock,
    Policy,
    PrefillCost,
    PrefixCache,
    StateSlot,
    Tracker,
    TrackSlots,
    ValuePerByte,
)
from unifiedpool.prefix_cache.eviction import log2_q8

pytestmark = pytest.mark.native

PAGE_BYTES, STATE_BYTES = 256, 1024


def span(first: int, last: int) -> list[int]:
    """Tokens first..last, both included."""
    return list(range(first, last + 1))


class Desk:
    """A cache over a small arena, and a caller who keeps count of what it owns."""

    def __init__(
        self,
        *,
        page: int = 1,
        grid: int | None = None,
        window: int = 0,
        policy: str | Policy = "lru",
        arena_bytes: int = 1 << 18,
        states: bool = True,
        cost: PrefillCost | None = None,
    ) -> None:
        strides = {"state": STATE_BYTES} if states else {}
        strides |= {"full": PAGE_BYTES} | ({"swa": PAGE_BYTES} if window else {})
        layout = Layout.simple(strides, page_sizes={k: page for k in strides if k != "state"}, null_cell=False)
        self.planner = Planner(layout, arena_bytes)
        self.page = page
        self.cache = PrefixCache(
            self.planner,
            policy=policy,
            state_kind="state" if states else None,
            window_kind="swa" if window else None,
            window=window,
            grid=grid,
            cost=cost,
        )
        self.kinds: tuple[str, ...] = ("full", "swa") if window else ("full",)
        self.owned: list[int] = []
        self.locks: list[Lock] = []

    def check(self) -> None:
        """Live = evictable + locked + owned, in cells and in bytes, and the cache is sound."""
        self.cache.validate()
        self.planner.validate()
        stats, ledger = self.planner.stats(), self.cache.ledger()
        for kind, counts in stats.kinds.items():
            cells = self.planner.cells(kind)
            owned = sum(cells[handle] >= 0 for handle in self.owned)
            assert counts.live == ledger[kind]["evictable"] + ledger[kind]["locked"] + owned, kind
        assert stats.live_bytes + stats.free_bytes + stats.reserved_bytes == stats.arena_bytes
        assert self.cache.stats()["receipts"] == len(self.locks)
        if not self.locks:
            assert all(counts["locked"] == 0 for counts in ledger.values())

    def take(self, pages: int, *, window_from: int = 1) -> list[int]:
        """Allocate page handles; those before page number `window_from` (from 1) get no window cell."""
        if len(self.kinds) == 1:
            handles = self.planner.allocate({"full": pages}).tolist()
        else:
            plain = min(pages, window_from - 1)
            handles = self.planner.allocate({"full": plain, self.kinds: pages - plain}).tolist()
        self.owned += handles
        return handles

    def slot(self) -> int:
        handle = int(self.planner.allocate({"state": 1})[0])
        self.owned.append(handle)
        return handle

    def give(
        self, tokens: Sequence[int], handles: Sequence[int], state: int | StateSlot | None, lock: Lock | None = None
    ) -> Inserted:
        """Insert what is owned, and free what comes back."""
        made = self.cache.insert(tokens, handles, state=state, lock=lock)
        back = made.to_free()
        slots = [] if state is None else [state.handle if isinstance(state, StateSlot) else state]
        given = {handle for handle in [*handles, *slots] if handle}
        self.owned = [handle for handle in self.owned if handle not in given]
        self.planner.free(back)
        self.check()
        return made

    def insert(self, tokens: Sequence[int], *, state: bool = True, window_from: int = 1) -> Inserted:
        pages = self.take(-(-len(tokens) // self.page), window_from=window_from)
        return self.give(tokens, pages, self.slot() if state else None)

    def match(self, tokens: Sequence[int]) -> tuple[int, int, int | None]:
        before = self.cache.tree.stats()
        found = self.cache.match(tokens)
        assert self.cache.tree.stats() == before
        return found.hit, found.full_hit, found.branch

    def evict(self, **cells: int) -> dict[str, int]:
        names = {"kv": "full", "st": "state", "swa": "swa"}
        freed = self.cache.evict({names[name]: count for name, count in cells.items()}).cells
        self.check()
        return {name: freed.get(kind, 0) for name, kind in names.items() if kind in self.planner.layout.names}

    def lock(self, tokens: Sequence[int]) -> Lock:
        lock = self.cache.lock(self.cache.match(tokens))
        self.locks.append(lock)
        self.check()
        return lock

    def unlock(self, lock: Lock) -> None:
        self.cache.unlock(lock)
        self.locks.remove(lock)
        self.check()

    def finish(self) -> None:
        """Unlock and evict everything: the arena is empty again."""
        for lock in list(self.locks):
            self.unlock(lock)
        self.planner.free(self.owned)
        self.owned = []
        self.cache.flush()
        self.check()
        stats = self.planner.stats()
        assert stats.live_bytes == 0 and stats.live_handles == 0
        assert self.cache.stats()["nodes"] == self.cache.stats()["roots"] == 1


def test_b1_whole_prefix_hits() -> None:
    desk = Desk()
    desk.insert(span(1, 8))
    assert desk.match(span(1, 8)) == (8, 8, None)
    assert desk.match([*span(1, 8), 9]) == (8, 8, None)
    desk.finish()


def test_b2_inside_an_edge_no_state_but_a_branch() -> None:
    desk = Desk(grid=1)
    desk.insert(span(1, 8))
    before = desk.cache.tree.stats()
    assert desk.match(span(1, 5)) == (0, 5, 5)
    assert desk.cache.tree.stats() == before
    assert desk.match(span(1, 8)) == (8, 8, None)
    desk.finish()


def test_b3_branch_lies_on_the_grid_and_fills_with_a_state() -> None:
    desk = Desk(grid=4)
    desk.insert(span(1, 8))
    assert desk.match(span(1, 7)) == (0, 7, 4)
    desk.insert(span(1, 4))
    assert desk.match(span(1, 7)) == (4, 7, None)
    desk.finish()


def test_b4_fork_node_adopts_a_state() -> None:
    desk = Desk()
    desk.insert(span(1, 6))
    made = desk.insert([1, 2, 3, 7, 8, 9])
    assert len(made.duplicates) == 3
    assert desk.match([1, 2, 3, 99]) == (0, 3, 3)
    made = desk.insert([1, 2, 3])
    assert len(made.duplicates) == 3 and made.state_rejected is None
    assert desk.match([1, 2, 3, 99]) == (3, 3, None)
    desk.finish()


def test_b5_second_insert_gives_everything_back() -> None:
    desk = Desk()
    desk.insert(span(1, 8))
    ledger = desk.cache.ledger()
    pages, slot = desk.take(8), desk.slot()
    made = desk.give(span(1, 8), pages, slot)
    assert made.duplicates.tolist() == pages and made.state_rejected == slot and made.known == 8
    assert desk.cache.ledger() == ledger
    desk.finish()


def test_b6_oldest_interior_state_goes_and_its_pages_stay() -> None:
    desk = Desk()
    for end in (2, 4, 6):
        desk.insert(span(1, end))
    assert desk.evict(st=1) == {"kv": 0, "st": 1}
    assert desk.match([1, 2, 9])[0] == 0
    assert desk.match([*span(1, 4), 9])[0] == 4
    assert desk.cache.match([1, 2, 9]).reason == "a deeper state was saved and has been evicted"
    desk.finish()


def test_b6_value_per_byte_victim_is_the_one_computed_by_hand() -> None:
    policy = ValuePerByte(initial_age=4)
    desk = Desk(policy=policy, cost=PrefillCost(10))
    for end in (2, 4, 6):
        desk.insert(span(1, end))

    def score(above: int, depth: int, size: int, age: int) -> int:
        saved = (depth - above) * (10 + above + depth)
        return log2_q8(16) + log2_q8(saved) - log2_q8(size) - (3 * log2_q8(4 * 4 + age * age) >> 2)

    leaf_bytes = STATE_BYTES + 2 * PAGE_BYTES
    scores = {2: score(0, 2, STATE_BYTES, 2), 4: score(2, 4, STATE_BYTES, 1), 6: score(4, 6, leaf_bytes, 0)}
    victim = min(scores, key=lambda depth: scores[depth])
    assert f"depth {victim}:" in desk.cache.explain()
    assert f"score {scores[victim]}" in desk.cache.explain()
    state_handles = {desk.cache.match(span(1, depth)).state: depth for depth in (2, 4, 6)}
    desk.evict(st=1)
    gone = [depth for handle, depth in state_handles.items() if handle and not desk.planner.is_live(handle)]
    assert gone == [victim]
    desk.finish()


def test_b7_leaf_goes_with_its_state() -> None:
    desk = Desk()
    desk.insert(span(1, 4))
    assert desk.evict(st=1) == {"kv": 4, "st": 1}
    assert desk.cache.stats()["nodes"] == 1
    desk.finish()


def test_b8_leaves_go_in_units() -> None:
    desk = Desk()
    for end in (2, 4, 6):
        desk.insert(span(1, end))
    assert desk.evict(kv=1) == {"kv": 2, "st": 1}
    assert desk.match(span(1, 6))[0] == 4
    assert desk.evict(kv=3) == {"kv": 4, "st": 2}
    desk.finish()


def test_b9_lock_keeps_path_and_its_state_only() -> None:
    desk = Desk()
    for end in (2, 4, 6):
        desk.insert(span(1, end))
    lock = desk.lock(span(1, 4))
    assert desk.evict(st=10) == {"kv": 2, "st": 2}
    assert desk.match(span(1, 4))[0] == 4
    assert desk.evict(kv=100) == {"kv": 0, "st": 0}
    assert desk.match(span(1, 4))[0] == 4
    desk.unlock(lock)
    assert desk.match(span(1, 4))[0] == 4
    desk.finish()


def test_b10_pages_of_four() -> None:
    desk = Desk(page=4)
    desk.insert(span(1, 8))
    assert desk.match(span(1, 7)) == (0, 4, 4)
    assert desk.match(span(1, 3)) == (0, 0, None)
    assert desk.match(span(1, 8)) == (8, 8, None)
    assert desk.cache.stats()["nodes"] == 2
    desk.finish()


def test_b11_window_pages_decide() -> None:
    desk = Desk(window=4)
    desk.insert(span(1, 10), window_from=4)
    assert desk.match(span(1, 10)) == (10, 10, None)
    desk.finish()
    desk = Desk(window=4)
    desk.insert(span(1, 10), window_from=9)
    found = desk.cache.match(span(1, 10))
    assert (found.hit, found.full_hit) == (0, 10)
    assert found.reason == "window pages before a deeper hit have been evicted"
    desk.finish()


def test_b12_dead_window_pages_pay_first_and_come_back() -> None:
    desk = Desk(window=4)
    desk.insert(span(1, 6))
    desk.insert(span(1, 12))
    free = desk.planner.stats().free_bytes
    assert desk.evict(swa=3)["swa"] == 3
    assert desk.match(span(1, 6))[0] == 6
    assert desk.evict(swa=2)["swa"] == 2
    assert desk.match(span(1, 6))[0] == 0
    assert desk.match(span(1, 12))[0] == 12
    made = desk.insert(span(1, 12))
    assert made.recovered == 5 and len(made.duplicates) == 12
    assert desk.match(span(1, 6))[0] == 6
    assert desk.planner.stats().free_bytes == free
    desk.finish()


def test_b13_split_keeps_both_halves_locked() -> None:
    desk = Desk()
    desk.insert(span(1, 8))
    lock = desk.lock(span(1, 8))
    desk.insert([1, 2, 3, 50, 51])
    ledger = desk.cache.ledger()
    assert ledger["full"]["locked"] == 8 and ledger["state"]["locked"] == 1
    assert desk.evict(kv=100, st=100) == {"kv": 2, "st": 1}
    assert desk.match(span(1, 8))[0] == 8
    desk.unlock(lock)
    desk.finish()


def one_slot_desk() -> Desk:
    """Room for one state and a few pages."""
    return Desk(arena_bytes=STATE_BYTES + 4 * PAGE_BYTES)


def test_b14_the_only_slot_is_taken_over() -> None:
    desk = one_slot_desk()
    desk.insert(span(1, 4))
    lock = desk.lock([*span(1, 4), 5])
    source = lock.match.state
    slot = desk.cache.open_slot(lock)
    assert slot is not None and slot.stolen and slot.handle == source
    desk.owned.append(slot.handle)
    desk.check()
    assert desk.cache.match(span(1, 4)).hit == 0
    desk.finish()


def test_b14_the_only_slot_held_by_two_is_refused() -> None:
    desk = one_slot_desk()
    desk.insert(span(1, 4))
    first, second = desk.lock(span(1, 4)), desk.lock(span(1, 4))
    assert desk.cache.open_slot(second) is None
    desk.check()
    desk.unlock(first)
    slot = desk.cache.open_slot(second)
    assert slot is not None and slot.stolen
    desk.owned.append(slot.handle)
    desk.finish()


def test_b15_abort_after_copy_on_write_leaves_no_trace() -> None:
    desk = Desk()
    desk.insert(span(1, 4))
    ledger, live = desk.cache.ledger(), desk.planner.stats().live_bytes
    lock = desk.lock([*span(1, 4), 5])
    slot = desk.cache.open_slot(lock)
    assert slot is not None and not slot.stolen
    plan = desk.planner.seal()
    assert plan is not None and [phase.operation for phase in plan.phases if phase.operation == "copy"] == ["copy"]
    desk.planner.free([slot.handle])
    desk.unlock(lock)
    assert desk.cache.ledger() == ledger and desk.planner.stats().live_bytes == live
    desk.finish()


def test_b16_unwritten_slot_is_never_donated() -> None:
    desk = Desk()
    slot = StateSlot(desk.slot())
    made = desk.give(span(1, 6), desk.take(6), slot)
    assert made.state_rejected == slot.handle
    assert desk.match([*span(1, 6), 7])[:2] == (0, 6)
    slot = StateSlot(desk.slot(), written=True)
    desk.give(span(1, 6), desk.take(6), slot)
    assert desk.match([*span(1, 6), 7])[0] == 6
    desk.finish()


def test_b17_pages_pay_for_a_state_and_a_state_for_pages() -> None:
    desk = Desk(arena_bytes=4 * STATE_BYTES)
    desk.insert(span(1, 2))
    lock = desk.lock(span(1, 2))
    desk.insert(span(11, 18), state=False)
    assert not desk.planner.can_allocate({"state": 1})
    assert desk.cache.make_room({"state": 1}).fits
    desk.check()
    desk.slot()
    desk.unlock(lock)
    desk.finish()

    desk = Desk(arena_bytes=4 * STATE_BYTES)
    desk.insert(span(1, 2))
    desk.insert(span(1, 4))
    lock = desk.lock(span(1, 4))
    desk.take(4)
    assert not desk.planner.can_allocate({"full": 1})
    evicted = desk.cache.make_room({"full": 1})
    assert evicted.fits and evicted.cells == {"state": 1} and evicted.units == 1
    desk.check()
    assert desk.match(span(1, 4))[0] == 4
    desk.finish()


def test_b18_optional_checkpoint_is_skipped_without_room() -> None:
    desk = Desk(arena_bytes=2 * STATE_BYTES)
    desk.insert(span(1, 4))
    lock = desk.lock(span(1, 4))
    assert desk.cache.optional_slot(depth=6, above=4) is None
    desk.check()
    desk.unlock(lock)
    slot = desk.cache.optional_slot(depth=6, above=4)
    assert slot is not None and not slot.written
    desk.owned.append(slot.handle)
    desk.finish()


def test_b19_bad_releases_are_refused_and_the_cache_goes_on() -> None:
    desk, other = Desk(), Desk()
    desk.insert(span(1, 4))
    other.insert(span(1, 4))
    lock = desk.lock(span(1, 4))
    with pytest.raises(InvalidHandleError, match="another cache"):
        other.cache.unlock(lock)
    with pytest.raises(InvalidHandleError, match="another cache"):
        other.cache.lock(desk.cache.match(span(1, 4)))
    desk.unlock(lock)
    with pytest.raises(InvalidHandleError, match="released already"):
        lock.release()
    with pytest.raises(InvalidHandleError, match="released"):
        desk.cache.insert(span(1, 4), desk.take(4), lock=lock)
    desk.check()
    assert desk.match(span(1, 4))[0] == 4
    desk.finish()
    other.finish()


def test_b20_request_leaves_a_token_to_compute() -> None:
    desk = Desk()
    desk.insert(span(1, 8))
    found = desk.cache.match_request(span(1, 8))
    assert (found.hit, found.full_hit, found.branch) == (0, 7, 7)
    assert "past the limit" in found.reason and "past the limit" in desk.cache.explain(found)
    desk.insert(span(1, 5))
    found = desk.cache.match_request(span(1, 8))
    assert found.hit == 5 and "past the limit" in found.reason
    desk.finish()


def test_b21_unaligned_tail() -> None:
    desk = Desk(page=4)
    made = desk.insert(span(1, 6))
    assert made.depth == 6
    found = desk.cache.match([*span(1, 6), 9])
    assert found.hit == 6 and found.tail_page == found.handles[1]
    assert desk.match([*span(1, 5), 9]) == (0, 4, 4)
    tail, state = found.tail_page, found.state
    made = desk.insert(span(1, 8))
    assert made.duplicates.tolist()[1:] == [tail] and not desk.planner.is_live(state or 0)
    assert desk.match(span(1, 6)) == (0, 4, 4)
    assert desk.match(span(1, 8))[0] == 8
    desk.insert([1, 2, 3, 4, 9, 9, 9, 9])
    assert desk.match([1, 2, 3, 4, 7]) == (0, 4, 4)
    assert desk.cache.stats()["nodes"] == 4
    desk.finish()


def test_b21_chat_turn_moves_its_own_tail() -> None:
    desk = Desk(page=4)
    desk.insert(span(1, 6))
    lock = desk.lock([*span(1, 6), 7, 8, 9])
    stranger = desk.lock(span(1, 6))
    pages = desk.take(2)
    desk.give(span(1, 9), [0, *pages], desk.slot(), lock)
    assert desk.match(span(1, 6))[0] == 6, "a tail that another request holds stays"
    desk.unlock(stranger)
    pages = desk.take(1)
    desk.give(span(1, 11), [0, 0, *pages], desk.slot(), lock)
    assert desk.match(span(1, 11))[0] == 11
    assert desk.match(span(1, 10)) == (6, 8, 8), "the stranger's tail lies beside the path that goes on"
    desk.unlock(lock)
    desk.finish()


def test_b22_duplicates_with_two_cells_are_freed_once() -> None:
    desk = Desk(window=4)
    desk.insert(span(1, 6))
    pages, slot = desk.take(6), desk.slot()
    live = desk.planner.stats().kinds
    made = desk.give(span(1, 6), pages, slot)
    assert made.duplicates.tolist() == pages
    assert desk.planner.stats().kinds["swa"].live == live["swa"].live - 6
    assert not any(desk.planner.is_live(handle) for handle in [*pages, slot])
    desk.finish()


def test_namespaces_share_nothing_and_vanish_when_empty() -> None:
    desk = Desk()
    for salt in ("a", "b"):
        pages = desk.planner.allocate({"full": 4})
        desk.cache.insert(span(1, 4), pages, state=desk.planner.allocate({"state": 1})[0], namespace=salt)
    assert desk.match(span(1, 4)) == (0, 0, None)
    assert desk.cache.match(span(1, 4), namespace="a").state != desk.cache.match(span(1, 4), namespace="b").state
    assert desk.cache.match(span(1, 4), namespace="c").hit == 0
    with desk.cache.lock(desk.cache.match(span(1, 4), namespace="c")):
        assert desk.cache.stats()["roots"] == 4
    assert desk.cache.stats()["roots"] == 3
    desk.finish()


def test_stateless_model_hits_on_any_page_boundary() -> None:
    desk = Desk(page=4, states=False)
    desk.insert(span(1, 16), state=False)
    assert desk.match(span(1, 11)) == (8, 8, None)
    lock = desk.lock(span(1, 11))
    assert lock.match.handles.tolist() == desk.cache.match(span(1, 16)).handles.tolist()[:2]
    assert desk.evict(kv=4) == {"kv": 0}
    desk.unlock(lock)
    desk.finish()


def test_window_without_states_falls_back_to_before_the_gap() -> None:
    desk = Desk(window=4, states=False)
    desk.insert(span(1, 12), state=False)
    handles = desk.cache.match(span(1, 12)).handles
    desk.planner.detach([handles[9]], "swa")
    assert desk.match(span(1, 12)) == (9, 12, 12)
    desk.finish()


@pytest.mark.parametrize("policy", ["value", "lru", "sglang", "path_cap", "marconi"])
@pytest.mark.parametrize("demand", [{"full": 7, "state": 1}, {"state": 3}, {"full": 40}])
def test_make_room_evicts_not_one_unit_too_many(policy: str, demand: dict[str, int]) -> None:
    """Two caches do the same; in the second every unit is evicted by hand, and the demand asked after each."""
    desks = [Desk(policy=policy, arena_bytes=1 << 15) for _ in range(2)]
    for desk in desks:
        for first in range(0, 400, 10):
            if desk.planner.can_allocate({"full": 16, "state": 2}):
                desk.insert(span(first, first + 5))
                desk.insert(span(first, first + 9))
        while desk.planner.can_allocate({"full": 1}):
            desk.take(1)
    made = desks[0].cache.make_room(demand)
    by_hand = 0
    while not desks[1].planner.can_allocate(demand):
        victim = desks[1].cache._victim()
        desks[1].cache._evict(victim, Evicted())
        by_hand += 1
    assert made.fits and made.units == by_hand > 0
    assert desks[0].cache.ledger() == desks[1].cache.ledger()
    assert desks[0].planner.digest() == desks[1].planner.digest()
    for desk in desks:
        desk.check()
        desk.finish()


def test_make_room_stops_at_the_formula() -> None:
    desk = Desk(arena_bytes=8 * STATE_BYTES)
    for first in (0, 10, 20):
        desk.insert(span(first, first + 5))
    before = desk.cache.ledger()
    assert desk.cache.make_room({"full": 2}).units == 0
    demand = {"state": 3}
    fits = []
    evicted = desk.cache.make_room(demand)
    fits.append(desk.planner.can_allocate(demand))
    assert fits == [True] and evicted.units >= 1
    assert desk.planner.shortfall(demand) == 0
    assert before["state"]["held"] - desk.cache.ledger()["state"]["held"] == evicted.cells["state"]
    desk.finish()


def test_make_room_for_the_impossible_evicts_nothing() -> None:
    desk = Desk(arena_bytes=8 * STATE_BYTES)
    desk.insert(span(1, 6))
    evicted = desk.cache.make_room({"state": 9})
    assert not evicted.fits and evicted.units == 0
    assert desk.match(span(1, 6))[0] == 6
    desk.finish()


def test_make_room_passes_over_pinned_pages() -> None:
    desk = Desk(arena_bytes=8 * STATE_BYTES)
    desk.insert(span(1, 8))
    desk.insert(span(11, 18))
    with desk.planner.pin(desk.cache.match(span(1, 8)).handles, reason="transfer"):
        with pytest.raises(PinnedError):
            desk.planner.free(desk.cache.match(span(1, 8)).handles)
        assert desk.cache.make_room({"state": 4}).fits
        assert desk.match(span(1, 8))[0] == 8 and desk.match(span(11, 18))[0] == 0
        desk.check()
    desk.finish()


def test_path_cap_keeps_the_deepest_forks_and_locked() -> None:
    desk = Desk(policy="path_cap")
    for end in (2, 4):
        desk.insert(span(1, end))
    desk.insert([1, 2, 30])
    for end in (6, 8):
        desk.insert(span(1, end))
    depths = [depth for depth in range(1, 9) if desk.match(span(1, depth))[0] == depth]
    assert depths == [2, 8], "the fork at 2 stays, 4 and 6 are over the cap"
    desk.finish()


@pytest.mark.parametrize("tokens", [[], np.empty(0, np.int32)])
def test_empty_prompt_is_refused(tokens: Sequence[int]) -> None:
    desk = Desk()
    with pytest.raises(InvalidArgumentError, match="empty"):
        desk.cache.match_request(tokens)
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        desk.cache.insert(tokens, [])
    desk.finish()


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, -3],
        [1, 2, 1 << 40],
        [1, 2, 1 << 70],
        ["a"],
        "abc",
        5,
        np.ones((2, 2), np.int32),
        np.ones(3, np.float32),
        [1.5, 2.5],
    ],
)
def test_bad_tokens_are_refused_and_the_cache_goes_on(tokens: Sequence[int]) -> None:
    desk = Desk()
    desk.insert(span(1, 4))
    with pytest.raises((InvalidArgumentError, TypeError)):
        desk.cache.match(tokens)
    pages = desk.take(3)
    with pytest.raises((InvalidArgumentError, TypeError)):
        desk.cache.insert(tokens, pages)
    desk.check()
    assert desk.match(span(1, 4))[0] == 4
    desk.finish()


def test_bad_handles_and_slots_are_refused() -> None:
    desk = Desk()
    pages, state = desk.take(3), desk.slot()
    dead = desk.take(1)
    desk.planner.free(dead)
    desk.owned.remove(dead[0])
    for handles, slot in (
        ([*pages[:2], dead[0]], state),
        ([*pages[:2], 0], state),
        ([*pages[:2], -1], state),
        ([*pages[:2], 10**9], state),
        (pages, dead[0]),
        (pages, pages[0]),
        (pages, 10**9),
        (pages, -4),
        (pages, True),
    ):
        with pytest.raises(InvalidHandleError):
            desk.cache.insert([1, 2, 3], handles, state=slot)
        desk.check()
    with pytest.raises(InvalidArgumentError, match="need 3"):
        desk.cache.insert([1, 2, 3], pages[:2])
    assert desk.cache.stats()["nodes"] == 1
    desk.finish()


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "fifo"},
        {"page_kind": "kv"},
        {"state_kind": "full2"},
        {"window": 4},
        {"window_kind": "full"},
        {"grid": 0},
        {"grid": -4},
        {"ghost_factor": -1},
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object]) -> None:
    planner = Planner(Layout.simple({"state": 1024, "full": 256}), 1 << 16)
    with pytest.raises(InvalidArgumentError):
        PrefixCache(planner, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_buffers_of_both_widths_match_what_lists_inserted(dtype: type) -> None:
    desk = Desk()
    desk.insert(span(1, 8))
    tokens = np.arange(1, 12, dtype=dtype)
    assert desk.match(tokens)[0] == 8  # type: ignore[arg-type]
    assert desk.match(tokens[::2])[1] == 1  # type: ignore[arg-type]
    assert desk.match(memoryview(tokens))[0] == 8  # type: ignore[arg-type]
    desk.finish()


def test_ghosts_show_a_branch_at_the_second_sighting_and_carry_hits() -> None:
    desk = Desk(policy="value", grid=2)
    desk.insert([*span(1, 8), 50, 51])
    desk.cache.flush()
    found = desk.cache.match([*span(1, 8), 60, 61])
    assert (found.hit, found.full_hit, found.branch) == (0, 0, 8)
    desk.insert(span(1, 8))
    desk.unlock(desk.lock([*span(1, 8), 60]))
    assert desk.cache.tree.nodes[desk.cache.match(span(1, 8)).node].hits == 1
    desk.cache.flush()
    desk.insert(span(1, 8))
    assert desk.cache.tree.nodes[desk.cache.match(span(1, 8)).node].hits == 2, "one earned and one missed"
    desk.finish()


def test_lock_counts_a_state_that_arrives_later() -> None:
    desk = Desk()
    desk.insert(span(1, 4))
    lock = desk.lock(span(1, 4))
    pages = desk.take(4)
    desk.give(span(1, 8), [0, 0, 0, 0, *pages], None, lock)
    assert desk.cache.ledger()["state"]["locked"] == 0, "the lock moved along"
    desk.give(span(1, 8), [0] * 8, desk.slot())
    assert desk.cache.ledger()["state"]["locked"] == 1
    lock.release_state()
    assert desk.cache.ledger()["state"]["locked"] == 0
    lock.release_state()
    desk.unlock(lock)
    desk.finish()


def test_the_worked_example_of_checkpoint_depths() -> None:
    """13,600 tokens in chunks of 6,144, 512 outputs, decode checkpoints every 256; then two more requests."""
    tracker = Tracker("extra_buffer", page_size=1, chunk_tokens=6144, track_interval=256)
    desk = Desk(grid=tracker.grid, arena_bytes=1 << 24)
    prompt = np.arange(13_600, dtype=np.int32)

    def run(tokens: np.ndarray, outputs: int) -> tuple[int, list[int]]:
        found = desk.cache.match_request(tokens)
        lock = desk.cache.lock(found)
        desk.locks.append(lock)
        saved, done = [], found.hit
        checkpoints = [point.depth for point in tracker.prefill(found.hit, len(tokens), found.branch)]
        committed = np.concatenate([tokens, np.arange(20_000, 20_000 + outputs - 1, dtype=np.int32)])
        last = tracker.kept(len(tokens), len(committed))
        for depth in [*checkpoints, *([last] if last else [])]:
            pages = desk.take(depth - done)
            desk.give(committed[:depth], [0] * done + pages, desk.slot(), lock)
            saved.append(depth)
            done = depth
        desk.unlock(lock)
        return found.hit, saved

    assert run(prompt, 512) == (0, [6144, 12288, 13568, 14080])
    second = np.concatenate([prompt[:10_000], np.arange(50_000, 54_000, dtype=np.int32)])
    hit, saved = run(second, 1)
    assert hit == 6144 and 9984 in saved and 12288 not in saved
    third = np.concatenate([prompt[:10_000], np.arange(60_000, 64_000, dtype=np.int32)])
    assert desk.cache.match_request(third).hit == 9984
    desk.finish()


def test_track_slots_swap_and_the_last_write_counts() -> None:
    desk = Desk()
    slots = TrackSlots([StateSlot(desk.slot()), StateSlot(desk.slot())])
    assert slots.latest is None
    for depth in (1024, 1280, 1536):
        slots.wrote(depth)
    latest = slots.latest
    assert latest is not None and latest[1] == 1536 and latest[0].written
    assert slots.to_write is not latest[0]
    desk.finish()


@pytest.mark.parametrize(
    ("strategy", "overlap", "page", "resolved", "slots", "divisor"),
    [
        ("no_buffer", True, 1, "no_buffer", 1, 3),
        ("extra_buffer", True, 1, "extra_buffer", 3, 5),
        ("extra_buffer", False, 1, "extra_buffer", 3, 4),
        ("extra_buffer_lazy", True, 64, "extra_buffer_lazy", 2, 4),
        ("auto", True, 1, "extra_buffer", 3, 5),
        ("auto", False, 64, "extra_buffer", 3, 4),
        ("auto", False, 1, "no_buffer", 1, 3),
    ],
)
def test_slot_accounting(strategy: str, overlap: bool, page: int, resolved: str, slots: int, divisor: int) -> None:
    tracker = Tracker(strategy, page_size=page, overlap=overlap)
    assert (tracker.resolved, tracker.slots_per_request(), tracker.static_divisor()) == (resolved, slots, divisor)
    layout = Layout.simple({"state": 1024, "full": 256})
    assert tracker.admission_bytes(layout) == slots * 1024


@pytest.mark.parametrize(
    "arguments",
    [
        {"strategy": "ping_pong"},
        {"track_interval": 100},
        {"track_interval": -64},
        {"track_interval": 64, "page_size": 128},
        {"chunk_tokens": 100},
        {"page_size": 0},
    ],
)
def test_bad_tracking_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Tracker(**arguments)  # type: ignore[arg-type]


def test_decode_depths_of_the_short_prompt() -> None:
    tracker = Tracker("extra_buffer")
    assert tracker.decode_depths(1000, 1536) == [1024, 1280, 1536]
    assert tracker.kept(1000, 1023) is None
