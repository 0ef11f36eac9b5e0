"""Which states a request saves while it runs, and the slots that this takes. Pure arithmetic, no tree and no planner.

A recurrent state exists only at the last token that was computed, so a checkpoint must be planned: the forward is cut
where one lies. A request that shares a prefix later starts from the deepest checkpoint on its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import InvalidArgumentError
from ..layout import Layout, Segment

__all__ = [
    "CHUNK_GRID",
    "STRATEGIES",
    "Checkpoint",
    "StateSlot",
    "TrackSlots",
    "Tracker",
    "checkpoint_grid",
    "moved_fields",
    "slot_fields",
]

CHUNK_GRID = 64
"""Tokens that the chunked linear-attention kernels compute at a time: prefill states exist at its multiples."""

STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy", "auto")


def checkpoint_grid(page_size: int, chunk_grid: int = CHUNK_GRID) -> int:
    """Return the grid of prefill and branch checkpoints: multiples of the kernels' chunk and of the page.

    >>> checkpoint_grid(1), checkpoint_grid(64), checkpoint_grid(48)
    (64, 64, 192)
    """
    return math.lcm(chunk_grid, page_size)


@dataclass(slots=True)
class StateSlot:
    """A slot that is to hold a checkpoint. The launch that fills it sets `written`; before that it is never donated."""

    handle: int
    written: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state to save at an exact depth.

    Attributes:
        depth: tokens.
        role: "chunk" (a prefill chunk ended there), "branch" (another path forks off there) or "tail" (the end of the
            prompt).
    """

    depth: int
    role: str

    @property
    def optional(self) -> bool:
        """Whether it is saved only if it is worth more than what would go for it."""
        return self.role == "chunk"


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where a request saves states, and how many slots that takes.

    Attributes:
        strategy: "no_buffer" saves nothing on the way, only the live slot at the end; "extra_buffer" has two slots in
            turns; "extra_buffer_lazy" gets its second one when it is needed; "auto" is "extra_buffer" with
            overlap or pages of more than a token, else "no_buffer".
        page_size: tokens per page.
        overlap: the next step is scheduled before this one is done.
        chunk_tokens: most tokens of a prefill forward.
        track_interval: decode checkpoints lie at its multiples, 0 for none; a multiple of the page size.
        chunk_grid: see `CHUNK_GRID`.

    Raises:
        InvalidArgumentError: an unknown strategy, or an interval or chunk that is no multiple of page or grid.

    >>> tracker = Tracker("extra_buffer", chunk_tokens=6144, track_interval=256)
    >>> [c.depth for c in tracker.prefill(0, 13_600)], tracker.decode_depths(13_600, 14_111)
    ([6144, 12288, 13568], [13824, 14080])
    >>> tracker.kept(13_600, 14_111)
    14080
    """

    strategy: str = "auto"
    page_size: int = 1
    overlap: bool = True
    chunk_tokens: int = 6144
    track_interval: int = 256
    chunk_grid: int = CHUNK_GRID

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.strategy not in STRATEGIES:
            raise InvalidArgumentError(f"strategy {self.strategy!r} is unknown; there are {list(STRATEGIES)}")
        for name in ("page_size", "chunk_tokens", "chunk_grid"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; it must be at least 1")
        if self.chunk_tokens % self.grid:
            raise InvalidArgumentError(
                f"chunk_tokens is {self.chunk_tokens}; with pages of {self.page_size} tokens it must be a multiple of "
                f"{self.grid}"
            )
        interval = self.track_interval
        if not isinstance(interval, int) or interval < 0 or interval % self.page_size or interval % self.chunk_grid:
            raise InvalidArgumentError(
                f"track_interval is {interval!r}; it must be a multiple of the page size {self.page_size} and of "
                f"{self.chunk_grid}, or 0 for no decode checkpoints"
            )

    @property
    def grid(self) -> int:
        """Multiples of it are where prefill and branch checkpoints lie."""
        return checkpoint_grid(self.page_size, self.chunk_grid)

    @property
    def resolved(self) -> str:
        """The strategy, with "auto" decided."""
        if self.strategy != "auto":
            return self.strategy
        return "extra_buffer" if self.overlap or self.page_size > 1 else "no_buffer"

    def prefill(self, hit: int, length: int, branch: int | None = None) -> list[Checkpoint]:
        """List the states that a prefill saves: one a chunk, at its end rounded down to the grid.

        Args:
            hit: tokens that need not be computed; chunks are counted from there.
            length: tokens of the prompt.
            branch: depth where another path forks off: it replaces its chunk's end.
        """
        if not 0 <= hit < length:
            raise InvalidArgumentError(f"hit is {hit} of a prompt of {length} tokens; the last token is computed")
        found: list[Checkpoint] = []
        if self.resolved == "no_buffer":
            return found
        start = hit
        while start < length:
            end = min(start + self.chunk_tokens, length)
            depth = end - end % self.grid
            role = "tail" if end == length else "chunk"
            if branch is not None and branch % self.grid == 0 and start < branch <= end and branch != depth:
                depth, role = branch, "branch"
            if depth > max(hit, found[-1].depth if found else 0):
                found.append(Checkpoint(depth, role))
            start = end
        return found

    def decode_depths(self, start: int, end: int) -> list[int]:
        """List the depths in (start, end] where a decode step saves a state.

        >>> Tracker().decode_depths(1000, 1536)
        [1024, 1280, 1536]
        """
        step = self.track_interval
        if not step or self.resolved == "no_buffer":
            return []
        return list(range(start - start % step + step, end + 1, step))

    def kept(self, start: int, end: int) -> int | None:
        """Return the decode checkpoint that the track slots hold at `end`: the last one, None before the first."""
        depths = self.decode_depths(start, end)
        return depths[-1] if depths else None

    def split(self, start: int, end: int, depths: Sequence[int]) -> list[tuple[int, int]]:
        """Cut one forward over [start, end) at the checkpoints inside it.

        >>> Tracker().split(6144, 12288, [9984])
        [(6144, 9984), (9984, 12288)]
        """
        cuts = [start, *sorted({depth for depth in depths if start < depth < end}), end]
        return list(pairwise(cuts))

    def slots_per_request(self) -> int:
        """Slots that a running request may hold at most: its live slot and its track slots.

        What the unified pool charges at admission.
        """
        return {"no_buffer": 1, "extra_buffer": 3, "extra_buffer_lazy": 2}[self.resolved]

    def static_divisor(self) -> int:
        """Slots of a static pool per running request: the live one, the track slots, and what a prefix cache keeps.

        >>> [Tracker(name, overlap=on).static_divisor() for name, on in
        ...  (("no_buffer", False), ("extra_buffer", True), ("extra_buffer", False), ("extra_buffer_lazy", True))]
        [3, 5, 4, 4]
        """
        if self.resolved == "no_buffer":
            return 3
        return 5 if self.resolved == "extra_buffer" and self.overlap else 4

    def admission_bytes(self, layout: Layout, state_kind: str = "state") -> int:
        """Return the bytes of state slots that admitting one request takes."""
        return self.slots_per_request() * layout.kind(state_kind).stride_bytes


class TrackSlots:
    """The track slots of a running request. Two take turns: one can be written while a reader still has the other.

    >>> slots = TrackSlots([StateSlot(7), StateSlot(8)])
    >>> slots.to_write.handle, slots.latest
    (7, None)
    >>> slots.wrote(1024)
    >>> slots.to_write.handle, slots.latest
    (8, (StateSlot(handle=7, written=True), 1024))
    """

    __slots__ = ("_depths", "_turn", "slots")

    def __init__(self, slots: Sequence[StateSlot]) -> None:
        """Take one or two slots.

        Raises:
            InvalidArgumentError: another number of them.
        """
        if len(slots) not in (1, 2):
            raise InvalidArgumentError(f"{len(slots)} track slots; a request has one or two")
        self.slots = list(slots)
        self._depths = [0] * len(slots)
        self._turn = 0

    @property
    def to_write(self) -> StateSlot:
        """The slot that the next checkpoint goes to. Until it is written again its old content does not count."""
        return self.slots[self._turn]

    @property
    def latest(self) -> tuple[StateSlot, int] | None:
        """The written slot with the deepest checkpoint, and its depth; None before the first."""
        depth, index = max((depth, index) for index, depth in enumerate(self._depths))
        return (self.slots[index], depth) if depth else None

    def wrote(self, depth: int) -> None:
        """Record that a launch fills `to_write` at a depth, and swap."""
        self.slots[self._turn].written = True
        self._depths[self._turn] = depth
        self._turn = (self._turn + 1) % len(self.slots)


def slot_fields(layout: Layout, state_kind: str = "state") -> tuple[Segment, ...]:
    """List what lies in a state slot, in order: the one registry that every mover walks."""
    return layout.kind(state_kind).segments


def moved_fields(layout: Layout, state_kind: str = "state") -> tuple[Segment, ...]:
    """List what has to travel with a state: all but the transient fields, which are neither offloaded nor sent."""
    return tuple(segment for segment in slot_fields(layout, state_kind) if not segment.transient)
