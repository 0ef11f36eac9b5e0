"""The prefix cache in lock-step with a dictionary of prefixes: every policy, pages, windows and namespaces."""

from __future__ import annotations

import random

import pytest

from prefix_model import Key, PrefixModel
from unifiedpool import Layout, Planner
from unifiedpool.prefix_cache import POLICIES, Lock, PrefixCache

pytestmark = pytest.mark.native

OPERATIONS = ("insert", "insert", "insert", "extend", "match", "match", "lock", "unlock", "evict", "room")


class Machine:
    """One cache, its model, and a caller. Operation weights are drawn anew for each seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page = rng.choice([1, 2, 4])
        self.window = rng.choice([0, 0, 3, 6])
        grid = self.page * rng.choice([1, 1, 3])
        strides = {"state": 1024, "full": 256} | ({"swa": 256} if self.window else {})
        layout = Layout.simple(strides, page_sizes={"full": self.page}, null_cell=False)
        self.planner = Planner(layout, rng.choice([1 << 14, 1 << 15, 1 << 16]))
        self.cache = PrefixCache(
            self.planner,
            policy=rng.choice(sorted(POLICIES)),
            window_kind="swa" if self.window else None,
            window=self.window,
            grid=grid,
            ghost_factor=rng.choice([0, 4]),
        )
        windows = self.planner.cells("swa") if self.window else None
        self.model = PrefixModel(
            self.page, grid, self.window, lambda handle: windows is not None and windows[handle] >= 0
        )
        self.locks: list[tuple[Lock, Key]] = []
        self.weights = [rng.choice([0, 1, 1, 3]) for _ in OPERATIONS]
        self.weights[0] = 2
        self.alphabet = rng.choice([2, 3, 50])
        self.longest = rng.choice([6, 12, 24])
        self.paths: list[tuple[int, ...]] = [()]

    def tokens(self) -> tuple[int, ...]:
        """Mostly something that shares a prefix with what came before."""
        rng = self.rng
        base = rng.choice(self.paths)
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else base
        made = base + tuple(rng.randrange(self.alphabet) for _ in range(rng.randint(0, self.longest // 2)))
        made = made[: self.longest] or (0,)
        if len(self.paths) > 40:
            self.paths.pop(rng.randrange(1, len(self.paths)))
        self.paths.append(made)
        return made

    def name(self) -> str | None:
        return self.rng.choice([None, None, "salt"])

    def run(self, steps: int) -> None:
        for step in range(steps):
            operation = self.rng.choices(OPERATIONS, self.weights)[0]
            getattr(self, operation)()
            self.ledgers(step % 16 == 0)
        for lock, _ in self.locks:
            self.cache.unlock(lock)
        self.model.locks.clear()
        self.locks.clear()
        self.cache.flush()
        self.model.forget(self.planner.is_live)
        self.ledgers(True)
        assert not self.model.pages and not self.model.states
        assert self.planner.stats().live_handles == 0

    def ledgers(self, everything: bool) -> None:
        stats, ledger = self.planner.stats(), self.cache.ledger()
        assert {kind: counts.live for kind, counts in stats.kinds.items()} == {
            kind: counts["held"] for kind, counts in ledger.items()
        }
        assert stats.live_bytes + stats.free_bytes == stats.arena_bytes
        assert ledger["full"]["held"] == len(self.model.pages)
        assert ledger["full"]["locked"] == sum(self.model.locked(key) for key in self.model.pages)
        assert ledger["state"]["held"] == len(self.model.states)
        assert ledger["state"]["locked"] == len({key for key in self.model.locks if key in self.model.states})
        if everything:
            self.cache.validate()
            self.model.check()

    def room_for(self, pages: int, states: int) -> bool:
        """Make room, follow what went, and say whether there is enough."""
        demand = {("full", "swa") if self.window else "full": pages, "state": states}
        before = self.planner.can_allocate(demand)
        evicted = self.cache.make_room(demand)
        self.follow()
        assert evicted.fits == self.planner.can_allocate(demand)
        assert not before or evicted.units == 0
        return evicted.fits

    def follow(self) -> None:
        locked = [key for key in self.model.pages if self.model.locked(key)]
        held = [key for key in self.model.locks if key in self.model.states]
        self.model.forget(self.planner.is_live)
        assert all(key in self.model.pages for key in locked), "a locked page went"
        assert all(key in self.model.states for key in held), "a locked state went"

    def put(self, tokens: tuple[int, ...], name: str | None, own: tuple[Lock, Key] | None, with_state: bool) -> None:
        pages = -(-len(tokens) // self.page)
        known = len(own[1][1]) // self.page if own else 0
        if not self.room_for(pages - known, int(with_state)):
            return
        fresh = pages - known
        if self.window:
            plain = self.rng.randint(0, fresh)
            taken = self.planner.allocate({"full": plain, ("full", "swa"): fresh - plain}).tolist()
        else:
            taken = self.planner.allocate({"full": fresh}).tolist()
        state = int(self.planner.allocate({"state": 1})[0]) if with_state else None
        handles = [0] * known + taken
        lock = own[0] if own else None
        expected = self.model.insert(name, tokens, handles, state, own[1] if own else None)
        made = self.cache.insert(tokens, handles, state=state, namespace=name, lock=lock)
        assert sorted(made.duplicates) == sorted(expected.duplicates)
        assert (made.state_rejected, made.depth) == (expected.state_rejected, expected.depth)
        self.follow()  # the path cap evicts here
        self.planner.free(made.to_free())
        if own:
            self.locks[self.locks.index(own)] = (own[0], (name, tokens[: made.depth]))

    def insert(self) -> None:
        self.put(self.tokens(), self.name(), None, self.rng.random() < 0.7)

    def extend(self) -> None:
        """A request goes on: its lock moves with what it inserts."""
        if self.locks:
            own = self.rng.choice(self.locks)
            name, path = own[1]
            more = tuple(self.rng.randrange(self.alphabet) for _ in range(self.rng.randint(1, 5)))
            self.put(path + more, name, own, True)  # type: ignore[arg-type]

    def match(self) -> None:
        tokens, name = self.tokens(), self.name()
        limit = self.rng.choice([len(tokens), len(tokens) - 1, self.rng.randint(0, len(tokens))])
        found = self.cache.match(tokens, limit=limit, namespace=name)
        hit, full, branch = self.model.match(name, tokens, limit)
        assert (found.hit, found.full_hit) == (hit, full)
        if found.seen == found.full_hit:
            assert found.branch == branch
        else:
            assert found.seen > found.full_hit and found.branch is not None and found.branch <= found.seen
        if hit:
            assert found.state == self.model.states[name, tokens[:hit]]
            path = [self.model.pages[name, tokens[:end]] for end in self.model.ends(hit)]
            assert found.handles.tolist() == path
            assert found.tail_page == (path[-1] if hit % self.page else None)

    def lock(self) -> None:
        if len(self.locks) < 6:
            tokens, name = self.tokens(), self.name()
            found = self.cache.match(tokens, namespace=name)
            key = (name, tokens[: found.hit])
            self.locks.append((self.cache.lock(found), key))
            self.model.locks.append(key)

    def unlock(self) -> None:
        if self.locks:
            lock, key = self.locks.pop(self.rng.randrange(len(self.locks)))
            self.cache.unlock(lock)
            self.model.locks.remove(key)

    def evict(self) -> None:
        kind = self.rng.choice(["full", "state", *(["swa"] if self.window else [])])
        want, ledger = self.rng.randint(1, 6), self.cache.ledger()
        evicted = self.cache.evict({kind: want})
        self.follow()
        freed = evicted.cells.get(kind, 0)
        assert freed >= min(want, ledger[kind]["evictable"])
        assert evicted.fits == (freed >= want)

    def room(self) -> None:
        self.room_for(self.rng.randint(0, 20), self.rng.randint(0, 6))


@pytest.mark.parametrize("number", range(40))
def test_prefix_cache_agrees_with_the_model(number: int, seed: int) -> None:
    Machine(seed * 1_000 + number).run(250)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(250))
def test_prefix_cache_agrees_with_the_model_for_long(number: int, seed: int) -> None:
    """A million operations in all."""
    Machine(1_000_000 + seed * 1_000 + number).run(4_000)


def test_model_catches_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine can fail: a cache that forgets to count one state's depth is found out."""
    original = PrefixCache.match

    def off_by_one(self: PrefixCache, tokens: tuple[int, ...], **options: object) -> object:
        return original(self, tokens[:-1], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixCache, "match", off_by_one)
    with pytest.raises(AssertionError):
        for number in range(20):
            Machine(number).run(250)
