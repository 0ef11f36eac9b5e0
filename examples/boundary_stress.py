"""Both ends of one arena collide for as long as you let them.

State slots take the lowest cells, pages the highest. This program keeps the arena full: it allocates states and pages
until one is refused, frees at random, pins, promises, and starts again, so that nearly every slot has to be opened by
evacuating pages. Beside it runs the naive truth: one number per granule (the smallest cell) that says what its bytes
must be. It checks

    every answer       a demand is refused exactly when the capacity formula, recounted from the bytes, says so
    every live byte    each handle reads what was written through it, wherever its cells have been moved to
    every table        the arena's device tables name the cells that the planner names
    every move         a pinned cell stays, nothing moves while a cell is available, no window moves more than a slot

    python examples/boundary_stress.py --seconds 60 --seed 7

Ctrl-C ends it with the same summary. The exit status is 1 when something differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unifiedpool import CapacityError, Layout, Pool
from unifiedpool.errors import format_bytes
from unifiedpool.planner import Pin, Reservation

GRANULE = 4096
LAYOUT = {"state": 15 * GRANULE, "swa": 3 * GRANULE, "full": GRANULE}
STEP_OPERATIONS = 16
MOST_MIB = 4096  # the byte map beside the arena checks every byte of it
Demand = dict[str | tuple[str, ...], int]
PROMISE: Demand = {"state": 1, "full": 20}


class Difference(Exception):
    """The pool and the byte map disagree."""


def require(holds: bool, what: str) -> None:
    """Raise `Difference` unless `holds`; unlike `assert` also under `python -O`."""
    if not holds:
        raise Difference(what)


@dataclass
class Counters:
    """What the summary reports."""

    calls: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    allocated_bytes: int = 0
    compared_bytes: int = 0
    steps: int = 0
    pool_seconds: float = 0.0


class Stress:
    """A pool, the byte map, and random calls that keep the arena full."""

    def __init__(self, arena_bytes: int, seed: int) -> None:
        layout = Layout.simple(LAYOUT, zero=dict.fromkeys(LAYOUT, "dirty"))
        self.pool = Pool(layout, arena_bytes)
        self.planner, self.arena, self.layout = self.pool.planner, self.pool.arena, layout
        self.rng = random.Random(seed)
        self.per_cell = [stride // GRANULE for stride in layout.strides]
        self.granules = arena_bytes // GRANULE
        self.words = self.arena.buffer[: self.granules * GRANULE].numpy().view(np.int64).reshape(self.granules, -1)
        handles = self.planner.stats().max_handles + 1
        self.number = np.zeros((len(layout.names), handles), np.int64)  # what each handle's cell must read; 0: fresh
        self.cells = np.full((len(layout.names), handles), -1, np.int32)  # where it was after the last call
        self.last_number = 0
        self.live: set[int] = set()
        self.pins: list[Pin] = []
        self.promises: list[Reservation] = []
        self.filling = "full"
        self.counters = Counters()

    # -- the naive truth -----------------------------------------------------------------------------------------

    def owners(self, handles: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Recount who owns each granule: 0 nobody, -1 the null cell. Overlaps are a difference (I1)."""
        owner = np.zeros(self.granules, np.int64)
        count = np.zeros(self.granules, np.int64)
        null = self.layout.null_bytes // GRANULE
        owner[:null], count[:null] = -1, 1
        for kind, per_cell in enumerate(self.per_cell):
            mine = np.flatnonzero(self.cells[kind] >= 0)
            if handles is not None:
                mine = np.intersect1d(mine, handles)
            inside = self.cells[kind][mine][:, None].astype(np.int64) * per_cell + np.arange(per_cell)
            owner[inside] = mine[:, None]
            count += np.bincount(inside.ravel(), minlength=self.granules)
        require(bool((count <= 1).all()), "two live cells overlap")
        return owner

    def free_cells(self, owner: npt.NDArray[np.int64]) -> list[int]:
        """Count the cells of each kind whose granules all belong to nobody."""
        whole = [owner[: self.granules // n * n].reshape(-1, n) for n in self.per_cell]
        return [int((~cells.any(axis=1)).sum()) for cells in whole]

    def fits(self, demand: Demand) -> bool:
        """The capacity formula, from the recounted granules."""
        pinned = np.unique(np.concatenate([pin.handles.numpy() for pin in self.pins] or [np.empty(0, np.int32)]))
        pin_free, need = self.free_cells(self.owners(pinned.astype(np.int64))), 0
        for kind, name in enumerate(self.layout.names):
            need = need * self.per_cell[kind - 1] // self.per_cell[kind] if kind else 0
            live = np.flatnonzero(self.cells[kind] >= 0)
            promised = sum(promise.left[name] for promise in self.promises)
            need += demand.get(name, 0) + promised + len(np.setdiff1d(live, pinned))
            if need > pin_free[kind]:
                return False
        return True

    def fits_unmoved(self, demand: Demand) -> bool:
        """The formula on the cells as they lie."""
        need = 0
        for kind, available in enumerate(self.free_cells(self.owners())):
            need = need * self.per_cell[kind - 1] // self.per_cell[kind] if kind else 0
            need += demand.get(self.layout.names[kind], 0)
            if need > available:
                return False
        return True

    def follow(self, fresh: list[int], *, may_move: bool) -> None:
        """Read the host tables; what moved must have been allowed to."""
        pinned = {handle for pin in self.pins for handle in pin.handles}
        for kind in range(len(self.per_cell)):
            now = np.asarray(self.planner.cells(kind))
            moved = np.flatnonzero(now != self.cells[kind])
            for handle in set(moved.tolist()) - set(fresh):
                require(may_move and kind > 0, f"handle {handle} moved though it did not have to")
                require(handle not in pinned, f"pinned handle {handle} moved")
                require(min(now[handle], self.cells[kind][handle]) >= 0, f"dead handle {handle} has a cell")
            self.cells[kind] = now

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """Make one random call."""
        draw = self.rng.random()
        if draw < 0.60:
            self.allocate()
        elif draw < 0.85:
            self.free()
        elif draw < 0.90:
            self.pin_or_release()
        elif draw < 0.94:
            self.promise_or_take_back()
        else:
            self.copy()

    def count(self, name: str) -> None:
        self.counters.calls[name] = self.counters.calls.get(name, 0) + 1

    def allocate(self) -> None:
        self.count("allocate")
        kind = self.filling
        demand: Demand = {kind: self.rng.randint(1, 90 // self.per_cell[self.layout.kind_id(kind)])}
        if self.rng.random() < 0.1:
            demand = {name: self.rng.randint(0, 6) for name in self.layout.names}
        expected, unmoved = self.fits(demand), self.fits_unmoved(demand)
        require(self.planner.can_allocate(demand) == expected, f"can_allocate({demand}) is not {expected}")
        start = time.perf_counter()
        try:
            handles = self.planner.allocate(demand).tolist()
        except CapacityError:
            handles = None
        self.counters.pool_seconds += time.perf_counter() - start
        require((handles is not None) == expected, f"allocate({demand}): the formula says {expected}")
        if handles is None:
            self.counters.refused += 1
            self.filling = self.rng.choice([name for name in self.layout.names if name != kind])
            self.follow([], may_move=False)
            return
        self.live.update(handles)
        self.number[:, handles] = 0
        self.counters.allocated_bytes += sum(
            self.layout.kind(name).stride_bytes * demand.get(name, 0) for name in self.layout.names
        )
        self.follow(handles, may_move=not unmoved)

    def some(self, share: float) -> list[int]:
        """Random live handles that are not pinned."""
        pinned = {handle for pin in self.pins for handle in pin.handles}
        free = sorted(self.live - pinned)
        return self.rng.sample(free, int(len(free) * share))

    def free(self) -> None:
        self.count("free")
        handles = self.some(self.rng.choice([0.0, 0.01, 0.01, 0.02, 0.03, 0.1]))
        start = time.perf_counter()
        self.planner.free(handles)
        self.counters.pool_seconds += time.perf_counter() - start
        self.live.difference_update(handles)
        self.follow(handles, may_move=False)

    def pin_or_release(self) -> None:
        self.count("pin or release")
        if self.pins and self.rng.random() < 0.6:
            self.pins.pop(self.rng.randrange(len(self.pins))).release()
        else:
            try:
                self.pins.append(self.planner.pin(self.some(0.01), reason="stress"))
            except CapacityError:
                require(bool(self.promises), "a pin was refused though nothing is promised")
        self.follow([], may_move=False)

    def promise_or_take_back(self) -> None:
        self.count("reserve or cancel")
        if self.promises:
            self.promises.pop().cancel()
        elif self.fits(PROMISE):
            self.promises.append(self.planner.reserve(PROMISE))
        self.follow([], may_move=False)

    def copy(self) -> None:
        self.count("copy")
        kind = self.rng.randrange(len(self.per_cell))
        having = np.flatnonzero((self.cells[kind] >= 0) & (self.number[kind] > 0)).tolist()
        if len(having) > 1:
            src, dst = self.rng.sample(having, 2)
            self.planner.copy([src], [dst], kind=kind)
            self.number[kind, dst] = self.number[kind, src]

    def step(self) -> None:
        """Seal and apply, compare every live byte and every table, then write what is fresh."""
        start = time.perf_counter()
        self.pool.step()
        self.counters.pool_seconds += time.perf_counter() - start
        self.counters.steps += 1
        for kind, name in enumerate(self.layout.names):
            table = self.arena.tables[name].numpy()
            require(bool((table[1:] == self.cells[kind][1:]).all()), f"the device table of {name} is not the planner's")
            live = np.flatnonzero((self.cells[kind] >= 0) & (self.number[kind] > 0))
            inside = self.inside(kind, live)
            same = self.words[inside] == self.number[kind][live][:, None, None]
            lost = live[~same.all(axis=(1, 2))]
            require(not len(lost), f"{name}: handles {lost.tolist()[:9]} do not read what was written")
            self.counters.compared_bytes += inside.size * GRANULE
            fresh = np.flatnonzero((self.cells[kind] >= 0) & (self.number[kind] == 0))
            self.number[kind, fresh] = self.last_number + 1 + np.arange(len(fresh))
            self.last_number += len(fresh)
            self.words[self.inside(kind, fresh)] = self.number[kind][fresh][:, None, None]
        worst = max(kind.worst_window_bytes for kind in self.planner.stats().kinds.values())
        require(worst < 2 * self.layout.strides[0], f"{worst} bytes were moved to open one window")

    def inside(self, kind: int, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Granules of the handles' cells, `[handles, granules of a cell]`."""
        per_cell = self.per_cell[kind]
        first = self.cells[kind][handles].astype(np.int64) * per_cell
        return np.asarray(first[:, None] + np.arange(per_cell))

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give everything back: one free extent must be left."""
        for promise in self.promises:
            promise.cancel()
        for pin in self.pins:
            pin.release()
        self.planner.free(sorted(self.live))
        self.planner.validate()
        expected = [(self.layout.null_bytes, self.planner.arena_bytes - self.layout.null_bytes)]
        require(self.planner.free_extents() == expected, "not everything came back")


def summary(stress: Stress, seconds: float) -> str:
    """Say what was done and what was verified."""
    counters, stats = stress.counters, stress.planner.stats()
    calls = sum(counters.calls.values())
    by_call = ", ".join(f"{n:,} {name}" for name, n in sorted(counters.calls.items(), key=lambda item: -item[1]))
    windows = sum(kind.evacuations for kind in stats.kinds.values())
    worst = max(kind.worst_window_bytes for kind in stats.kinds.values())
    moved = stats.moved_bytes / max(counters.allocated_bytes, 1)
    return "\n".join(
        [
            f"{calls:,} operations in {seconds:.1f} s: {calls / seconds:,.0f} operations/s with every check, "
            f"{calls / max(counters.pool_seconds, 1e-9):,.0f} operations/s in the pool itself",
            f"  calls      {by_call}",
            f"  collided   {windows:,} windows opened, {format_bytes(stats.moved_bytes)} moved ({moved:.3f} of what "
            f"was allocated), worst window {format_bytes(worst)}",
            f"  verified   {counters.refused:,} refusals and {counters.calls.get('allocate', 0) - counters.refused:,} "
            "grants equal to the formula; "
            f"{format_bytes(counters.compared_bytes)} of live bytes read back by handle in {counters.steps:,} steps",
        ]
    )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run")
    parser.add_argument("--operations", type=int, default=None, help="stop after so many calls, whatever the time")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same calls")
    parser.add_argument("--arena-mib", type=float, default=6.1, help="size of the arena")
    arguments = parser.parse_args()
    if not arguments.seconds > 0 or (arguments.operations is not None and arguments.operations <= 0):
        parser.error("give --seconds and --operations above 0")
    if not 1 <= arguments.arena_mib <= MOST_MIB:
        parser.error(
            f"--arena-mib {arguments.arena_mib}: give 1, so that the ends have cells to collide with, to {MOST_MIB}"
        )
    stress = Stress(int(arguments.arena_mib * (1 << 20)), arguments.seed)
    print(f"seed {arguments.seed}, {stress.planner}", flush=True)
    start = shown = time.monotonic()
    status, calls = 0, 0
    try:
        while calls < (arguments.operations or sys.maxsize):
            if arguments.operations is None and time.monotonic() - start >= arguments.seconds:
                break
            stress.call()
            calls += 1
            if calls % STEP_OPERATIONS == 0:
                stress.step()
            if sys.stdout.isatty() and time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                print(f"\r{calls:,} operations, all equal", end="", flush=True)
        stress.step()
        stress.drain()
    except KeyboardInterrupt:
        print("\ninterrupted")
    except Difference as difference:
        print(f"\nDIFFERENCE after {calls:,} operations of seed {arguments.seed}: {difference}")
        status = 1
    print(("\r" if sys.stdout.isatty() else "") + summary(stress, max(time.monotonic() - start, 1e-9)))
    return status


if __name__ == "__main__":
    sys.exit(main())
