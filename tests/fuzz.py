"""A seeded, replayable fuzzer of planner and arena against the byte map.

    python tests/fuzz.py --seed 0 --operations 100000

An episode draws a layout and the weights of the operations, some zero. Operation i is a function of (seed, episode, i)
and of the state it meets, so any subset can be replayed: a failure is shrunk by dropping operations and printed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Collection

from lockstep import Lockstep
from unifiedpool import Layout, StepPlan, UnifiedPoolError
from unifiedpool.errors import CapacityError, InvalidArgumentError, InvalidHandleError, PinnedError
from unifiedpool.planner import Pin, Reservation

__all__ = ["Episode", "draw_layout", "fuzz", "shrink"]

GRANULE = 256


def draw_layout(rng: random.Random) -> Layout:
    """Draw 1 to 4 kinds whose strides nest, equal ones among them."""
    names = ["state", "swa", "draft", "full"][-rng.choice([1, 2, 2, 2, 3, 3, 4]) :]
    if len(names) == 2 and rng.random() < 0.7:
        names = ["state", "full"]
    sizes = [GRANULE]
    for _ in names[1:]:
        sizes.append(sizes[-1] * rng.choice([1, 2, 3, 4, 5, 8, 10]))
    strides = dict(zip(names, reversed(sizes), strict=True))
    return Layout.simple(
        strides,
        ends={name: rng.choice(["low", "high"]) for name in names[1:]},
        zero={name: rng.choice(["dirty", "dirty", "dirty", "always", "never"]) for name in names},
        null_cell=rng.random() < 0.5,
    )


class Episode:
    """One planner's life: `run` plays the kept operations of a seed.

    Args:
        seed, number: name the episode.
        spoil: changes each sealed plan before it is run; for canaries.
    """

    def __init__(self, seed: int, number: int, *, spoil: Callable[[StepPlan], StepPlan] | None = None) -> None:
        self.seed, self.number = seed, number
        rng = random.Random(f"{seed}/{number}")
        layout = draw_layout(rng)
        granules = layout.strides[0] // GRANULE * rng.randint(2, 8) + rng.randint(8, 64)
        self.both = Lockstep(layout, granules * GRANULE + rng.randrange(GRANULE))
        self.rng = rng
        self.pins: list[Pin] = []
        self.reservations: list[Reservation] = []
        self.spoil = spoil
        usual = {self.allocate: 30, self.free: 20, self.attach: 6, self.detach: 6, self.pin: 4, self.unpin: 4}
        usual |= {self.reserve: 2, self.commit: 3, self.cancel: 2, self.prepare: 3, self.copy: 4, self.zero: 2}
        usual |= {self.relocate: 4, self.resize: 1, self.step: 12, self.bad_call: 4}
        self.weights = {op: weight * rng.randint(1, 8) * (rng.random() < 0.8) for op, weight in usual.items()}
        self.weights[self.step] += 1
        self.operations = rng.choice([20, 60, 200])
        self.log: list[str] = []

    def run(self, keep: Collection[int] | None = None) -> None:
        """Play the operations (all, or those in `keep`); a difference is an AssertionError."""
        for index in range(self.operations):
            if keep is not None and index not in keep:
                continue
            self.rng = random.Random(f"{self.seed}/{self.number}/{index}")
            operation = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
            self.log.append(f"{index:4} {operation.__name__}")
            operation()
            if index % 8 == 0:
                self.both.check_counts()
        self.step()
        self.both.check_counts()

    # -- draws ---------------------------------------------------------------------------------------------------

    def say(self, what: object) -> None:
        self.log[-1] += f" {what}"

    def kind(self) -> str:
        return self.rng.choice(self.both.layout.names)

    def some(self, handles: Collection[int]) -> list[int]:
        """A few, or all, of the handles that are not pinned."""
        free = sorted(set(handles) - set(self.both.map.pins))
        count = min(len(free), self.rng.choice([1, 2, 3, 8, len(free) // 2, len(free)]))
        return self.rng.sample(free, count)

    def having(self, kind: str) -> list[int]:
        return self.some(self.both.map.cells[self.both.layout.kind_id(kind)])

    def demand(self) -> dict[str | tuple[str, ...], int]:
        demand: dict[str | tuple[str, ...], int] = {}
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            names = self.both.layout.names
            chosen = tuple(sorted(self.rng.sample(names, self.rng.choice([1, 1, 1, len(names)]))))
            demand[chosen if len(chosen) > 1 else chosen[0]] = self.rng.choice([0, 1, 1, 2, 3, 8, 30])
        if self.rng.random() < 0.3:  # at the edge of what fits, or one above
            name = self.kind()
            demand = {name: max(0, self.both.most(name) + self.rng.choice([0, 0, 1]))}
        return demand

    # -- operations ----------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        demand = self.demand()
        overwrite = self.rng.random() < 0.2
        self.say(demand)
        self.both.allocate(demand, moves=self.rng.random() < 0.85, overwrite=overwrite, pinned=self.rng.random() < 0.2)
        if overwrite:
            self.step()  # the promise to overwrite is kept before anything is freed

    def free(self) -> None:
        handles = self.some(self.both.live)
        self.say(handles)
        self.both.free(handles)

    def attach(self) -> None:
        kind = self.kind()
        handles = self.some(set(self.both.live) - set(self.both.map.cells[self.both.layout.kind_id(kind)]))
        self.say((handles, kind))
        self.both.attach(handles, kind)

    def detach(self) -> None:
        kind = self.kind()
        handles = self.having(kind)
        self.say((handles, kind))
        self.both.detach(handles, kind)

    def pin(self) -> None:
        handles = self.some(self.both.live)[:8]
        self.say(handles)
        pin = self.both.pin(handles)
        if pin is not None:
            self.pins.append(pin)

    def unpin(self) -> None:
        if self.pins:
            self.both.release(self.pins.pop(self.rng.randrange(len(self.pins))))

    def reserve(self) -> None:
        demand = self.demand()
        self.say(demand)
        reservation = self.both.reserve(demand)
        if reservation is not None:
            self.reservations.append(reservation)

    def commit(self) -> None:
        if self.reservations:
            reservation = self.rng.choice(self.reservations)
            left = {name: self.rng.randint(0, count) for name, count in reservation.left.items()}
            self.say(left)
            self.both.commit(reservation, left)

    def cancel(self) -> None:
        if self.reservations:
            self.both.cancel(self.reservations.pop(self.rng.randrange(len(self.reservations))))

    def prepare(self) -> None:
        kind, n, budget = self.kind(), self.rng.randint(0, 6), self.rng.choice([0, 1000, 10000, 10**9])
        self.say((kind, n, budget))
        self.both.prepare(kind, n, max_bytes=budget)

    def copy(self) -> None:
        kind = self.kind()
        handles = self.having(kind)
        half = len(handles) // 2
        self.say((handles, kind))
        self.both.copy(handles[:half], handles[half : 2 * half], kind)

    def zero(self) -> None:
        kind = self.kind()
        handles = self.having(kind)
        self.say((handles, kind))
        self.both.zero(handles, kind)

    def relocate(self) -> None:
        kind = self.kind()
        kind_id = self.both.layout.kind_id(kind)
        owner, size = self.both.map.owners(), self.both.layout.strides[kind_id] // GRANULE
        empty = [c for c in range(len(owner) // size) if not owner[c * size : (c + 1) * size].any()]
        handles = self.having(kind)
        if handles and empty:
            cell = self.rng.choice(empty)
            self.say((handles[0], kind, cell))
            self.both.relocate(handles[0], kind, cell)

    def resize(self) -> None:
        size = max(GRANULE * 8, int(self.both.map.arena_bytes * self.rng.uniform(0.7, 1.4)))
        self.say(size)
        try:
            self.both.resize(min(size, GRANULE * 600))
        except (CapacityError, PinnedError, InvalidArgumentError) as error:
            self.say(type(error).__name__)

    def step(self) -> None:
        plan = self.both.planner.seal(self.both.steps)
        self.both.steps += 1
        self.both.run(self.spoil(plan) if plan is not None and self.spoil is not None else plan)

    def bad_call(self) -> None:
        planner, live = self.both.planner, self.some(self.both.live)
        digest = planner.digest()
        bad: list[Callable[[], object]] = [
            lambda: planner.free([*live, 0]),
            lambda: planner.free([*live, -1]),
            lambda: planner.free([*live, 2**31 - 1]),
            lambda: planner.free([*live, *live[:1], 0]),
            lambda: planner.detach([*live, 0], self.kind()),
            lambda: planner.attach([0], self.kind()),
            lambda: planner.pin([*live, 0], reason="bad"),
            lambda: planner.zero([*live, 0], self.kind()),
            lambda: planner.copy([0], [0], kind=self.kind()),
            lambda: planner.allocate({self.kind(): -1}),
            lambda: planner.allocate({"nothing": 1}),
            lambda: planner.resize(-1),
        ]
        call = self.rng.choice(bad)
        try:
            call()
        except (InvalidHandleError, InvalidArgumentError):
            pass
        else:
            raise AssertionError("a bad call was accepted")
        assert planner.digest() == digest, "a bad call changed something"
        self.both.check()


def failure(seed: int, number: int, keep: Collection[int] | None, **options: object) -> tuple[str, list[str]] | None:
    """Play an episode; return its error and its log when it fails."""
    episode = Episode(seed, number, **options)  # type: ignore[arg-type]
    try:
        episode.run(keep)
    except (AssertionError, UnifiedPoolError, LookupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", episode.log
    return None


def shrink(seed: int, number: int, **options: object) -> tuple[str, list[str]]:
    """Drop operations of a failing episode while it still fails."""
    keep = list(range(Episode(seed, number).operations))
    size = len(keep)
    while size > 1:
        size = (size + 1) // 2
        for start in reversed(range(0, len(keep), size)):
            fewer = keep[:start] + keep[start + size :]
            if failure(seed, number, set(fewer), **options):
                keep = fewer
        if size == 1:
            break
    found = failure(seed, number, set(keep), **options)
    assert found is not None, "the failure does not repeat"
    return found


def fuzz(seed: int, operations: int, **options: object) -> int:
    """Play episodes until `operations` have run; return how many did.

    Raises:
        AssertionError: with the seed and the shrunk operations.
    """
    done = number = 0
    while done < operations:
        if failure(seed, number, None, **options):
            message, log = shrink(seed, number, **options)
            raise AssertionError("\n".join([f"seed {seed}, episode {number}: {message}", *log]))
        done += Episode(seed, number).operations
        number += 1
    return done


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=20_000)
    arguments = parser.parse_args()
    try:
        done = fuzz(arguments.seed, arguments.operations)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"seed {arguments.seed}: {done} operations agree with the byte map")
    return 0


if __name__ == "__main__":
    sys.exit(main())
