"""A Hypothesis state machine over planner and arena, with the byte map as the invariant."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lockstep import Lockstep, without_first_move
from unifiedpool import Layout
from unifiedpool.errors import CapacityError, InvalidArgumentError, PinnedError
from unifiedpool.planner import Pin, Reservation

pytestmark = pytest.mark.native

GRANULE = 256
NAMES = ["state", "swa", "draft", "full"]
counts = st.integers(0, 12)
choices = st.integers(0, 2**31)


class PoolMachine(RuleBasedStateMachine):
    """Every call of the planner, in any order, on any chain of strides."""

    both: Lockstep
    spoil = False  # a canary: lose the first move of each plan

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[Pin] = []
        self.reservations: list[Reservation] = []

    @initialize(
        ratios=st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=0, max_size=3),
        granules=st.integers(1, 120),
        tail=st.integers(0, GRANULE - 1),
        null_cell=st.booleans(),
        low=st.booleans(),
    )
    def build(self, ratios: list[int], granules: int, tail: int, null_cell: bool, low: bool) -> None:
        strides = [GRANULE]
        for ratio in ratios:
            strides.append(strides[-1] * ratio)
        names = NAMES[-len(strides) :]
        layout = Layout.simple(
            dict(zip(names, reversed(strides), strict=True)),
            ends=dict.fromkeys(names[1:], "low" if low else "high"),
            zero={names[0]: "dirty"},
            null_cell=null_cell,
        )
        arena_bytes = max(granules * GRANULE, layout.strides[0] + layout.null_bytes) + tail
        self.both = Lockstep(layout, arena_bytes)

    def kind(self, choice: int) -> str:
        return self.both.layout.names[choice % len(self.both.layout.names)]

    def pick(self, choice: int, count: int, *, of: str | None = None) -> list[int]:
        """Up to `count` live handles that are not pinned, from a chosen place on."""
        among = self.both.live if of is None else self.both.map.cells[self.both.layout.kind_id(of)]
        free = sorted(set(among) - set(self.both.map.pins))
        start = choice % len(free) if free else 0
        return (free[start:] + free[:start])[:count]

    @rule(choice=choices, first=counts, second=counts, joint=st.booleans(), moves=st.booleans(), pinned=st.booleans())
    def allocate(self, choice: int, first: int, second: int, joint: bool, moves: bool, pinned: bool) -> None:
        names = self.both.layout.names
        demand: dict[str | tuple[str, ...], int] = {self.kind(choice): first}
        if joint and len(names) > 1:
            demand[names] = second
        self.both.allocate(demand, moves=moves, pinned=pinned)

    @rule(choice=choices, over=st.integers(-1, 1))
    def allocate_at_the_edge(self, choice: int, over: int) -> None:
        self.both.allocate({self.kind(choice): max(0, self.both.most(self.kind(choice)) + over)})

    @rule(choice=choices, count=st.integers(0, 60))
    def free(self, choice: int, count: int) -> None:
        self.both.free(self.pick(choice, count))

    @rule(choice=choices, count=counts)
    def attach(self, choice: int, count: int) -> None:
        kind = self.kind(choice)
        have = self.both.map.cells[self.both.layout.kind_id(kind)]
        self.both.attach([handle for handle in self.pick(choice, 99) if handle not in have][:count], kind)

    @rule(choice=choices, count=counts)
    def detach(self, choice: int, count: int) -> None:
        self.both.detach(self.pick(choice, count, of=self.kind(choice)), self.kind(choice))

    @rule(choice=choices, count=st.integers(1, 4))
    def pin(self, choice: int, count: int) -> None:
        pin = self.both.pin(self.pick(choice, count))
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        self.both.release(self.pins.pop(choice % len(self.pins)))

    @rule(choice=choices, count=counts)
    def reserve(self, choice: int, count: int) -> None:
        reservation = self.both.reserve({self.kind(choice): count})
        if reservation is not None:
            self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(choice=choices, part=counts)
    def commit(self, choice: int, part: int) -> None:
        reservation = self.reservations[choice % len(self.reservations)]
        self.both.commit(reservation, {name: min(part, left) for name, left in reservation.left.items()})

    @precondition(lambda self: self.reservations)
    @rule(choice=choices)
    def cancel(self, choice: int) -> None:
        self.both.cancel(self.reservations.pop(choice % len(self.reservations)))

    @rule(choice=choices, count=counts, max_bytes=st.sampled_from([0, 2_000, 10**12]))
    def prepare(self, choice: int, count: int, max_bytes: int) -> None:
        self.both.prepare(self.kind(choice), count, max_bytes=max_bytes)

    @rule(choice=choices, count=counts)
    def copy(self, choice: int, count: int) -> None:
        handles = self.pick(choice, 2 * count, of=self.kind(choice))
        half = len(handles) // 2
        self.both.copy(handles[:half], handles[half : 2 * half], self.kind(choice))

    @rule(choice=choices, count=counts)
    def zero(self, choice: int, count: int) -> None:
        self.both.zero(self.pick(choice, count, of=self.kind(choice)), self.kind(choice))

    @precondition(lambda self: not self.both.was_resized)
    @rule(granules=st.integers(1, 160), tail=st.integers(0, GRANULE - 1))
    def resize(self, granules: int, tail: int) -> None:
        try:
            self.both.resize(granules * GRANULE + tail)
        except (CapacityError, PinnedError, InvalidArgumentError):
            return

    @rule()
    def step(self) -> None:
        plan = self.both.planner.seal(self.both.steps)
        self.both.steps += 1
        self.both.run(without_first_move(plan) if self.spoil and plan is not None else plan)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "both"):
            self.both.check_counts()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.step()


class SpoiltMachine(PoolMachine):
    """The canary."""

    spoil = True


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase


def test_state_machine_with_a_lost_move_fails() -> None:
    quick = settings(max_examples=200, stateful_step_count=30, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SpoiltMachine, settings=quick)


@pytest.mark.soak
def test_state_machine_for_long_agrees() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=3000, stateful_step_count=80))
