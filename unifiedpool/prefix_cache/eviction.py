"""What is evicted next: policies, the order of the units, and the value of a byte.

A *unit* is what goes at once (csrc/prefix_tree.h): the state of a node with children, or a leaf with its state and the
pages up to the next state, fork or lock. A policy puts every unit into a list, ordered by a rank that does not change
with time, and scores the heads of the lists: the least score goes first, equal scores by node id. A `SortedList` keeps
the order, so taking a victim is O(log units) however many there are.

Everything is integer arithmetic and counts requests instead of seconds, so tensor-parallel ranks agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from .._native import lib
from ..errors import InvalidArgumentError

__all__ = [
    "POLICIES",
    "ROLES",
    "EvictionOrder",
    "LeastRecentlyUsed",
    "MarconiLike",
    "PathCap",
    "Placement",
    "Policy",
    "PrefillCost",
    "SGLangLike",
    "ValuePerByte",
    "log2_q8",
    "policy_named",
]

ROLES = ("tail", "branch", "final", "chunk")
"""Why a state was saved, by `UP_ROLE_*`: a prompt's end, a fork, decoding, or only a prefill chunk's end."""

_CHUNK = int(lib.UP_ROLE_CHUNK)
_LOG_TABLE = tuple(round(256 * math.log2(m / 256)) for m in range(256, 512))
DEAD_BUCKET = -(1 << 20)


@lru_cache(maxsize=1 << 14)
def log2_q8(value: int) -> int:
    """Return 256 * log2(value), rounded down to what the top nine bits say; 0 for values below 1.

    >>> log2_q8(1), log2_q8(2), log2_q8(3), log2_q8(1 << 40)
    (0, 256, 406, 10240)
    """
    if value < 2:
        return 0
    bits = value.bit_length()
    top = value >> bits - 9 if bits > 9 else value << 9 - bits
    return ((bits - 1) << 8) + _LOG_TABLE[top - 256]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The work that a state at one depth saves, from the nearest shallower one: linear plus quadratic in the tokens.

    Attributes:
        offset: twice the linear cost of a token over the cost of a token and token of context, in tokens. 6 GFLOP and
            197 kFLOP (Qwen3-Next) make 60,914.
    """

    offset: int = 60_914

    def saved(self, above: int, depth: int) -> int:
        """Return the saved work in units of half a token and token of context.

        >>> PrefillCost(100).saved(0, 10), PrefillCost(100).saved(10, 20)
        (1100, 1300)
        """
        return (depth - above) * (self.offset + above + depth)


class Placement(NamedTuple):
    """Where a unit stands: its list, its rank in it, and the part of its score that time does not change."""

    bucket: int
    rank: int
    worth: int


# A named tuple's own constructor is a function in Python, which would be a tenth of the time of an eviction.
_new_placement = tuple.__new__


class Policy(ABC):
    """Scores eviction units. `size` and `saved` of the methods are bytes freed and `PrefillCost` units."""

    name: str
    uses_ghosts = False
    max_states_per_path: int | None = None
    saves_chunk_ends: bool | None = True
    """Whether states at the ends of prefill chunks are saved; None: if they are worth more than what would go."""

    @abstractmethod
    def place(self, unit: Any, size: int, saved: int) -> Placement:
        """Say where a unit (`up_unit *`) stands among those that are not dead."""

    @abstractmethod
    def score(self, placement: Placement, now: int) -> int:
        """Return the score of a list's head; the least goes first."""

    def learn(self, ages: Sequence[int]) -> None:  # noqa: B027
        """See how long ago the tokens of a request were used: `[24]` tokens by log2 of 1 + requests since."""

    def explain(self, unit: Any, size: int, saved: int, now: int) -> str:
        """Say in a line how the score of a unit comes about."""
        placement = self.place(unit, size, saved)
        return f"{self.name}: list {placement.bucket}, last use {unit.last_use}, score {self.score(placement, now)}"


class LeastRecentlyUsed(Policy):
    """The unit that was used longest ago goes."""

    name = "lru"

    def place(self, unit: Any, size: int, saved: int) -> Placement:
        """One list for all."""
        return Placement(0, unit.last_use, 0)

    def score(self, placement: Placement, now: int) -> int:
        """Return the last use."""
        return placement.rank


class SGLangLike(Policy):
    """Leaves go first, by last use; a state inside the tree only when no leaf is left."""

    name = "sglang"

    def place(self, unit: Any, size: int, saved: int) -> Placement:
        """One list for leaves, one for the states of other nodes."""
        return Placement(0 if unit.is_leaf else 1, unit.last_use, 0)

    def score(self, placement: Placement, now: int) -> int:
        """Return the last use, leaves below all others."""
        return (placement.bucket << 40) + placement.rank


class PathCap(LeastRecentlyUsed):
    """As LRU, and of each path only so many states are kept: the deepest, those at forks and locked ones."""

    name = "path_cap"

    def __init__(self, max_states_per_path: int = 2) -> None:
        """Keep `max_states_per_path` states of a path, at least 1."""
        if not isinstance(max_states_per_path, int) or max_states_per_path < 1:
            raise InvalidArgumentError(f"max_states_per_path is {max_states_per_path!r}; it must be at least 1")
        self.max_states_per_path = max_states_per_path


class MarconiLike(Policy):
    """Recency plus `alpha` times the work saved per byte, after Marconi (Pan et al. 2024).

    Both terms are fixed when a unit is used, so one ordered list serves.
    """

    name = "marconi"
    saves_chunk_ends = False  # Marconi keeps branch points and ends

    def __init__(self, alpha: int = 128) -> None:
        """Weigh an octave of work per byte like `alpha` requests of recency."""
        self.alpha = alpha

    def place(self, unit: Any, size: int, saved: int) -> Placement:
        """One list, ranked by the score itself."""
        efficiency = log2_q8(saved) - log2_q8(size)
        return Placement(0, (unit.last_use << 8) + self.alpha * efficiency, 0)

    def score(self, placement: Placement, now: int) -> int:
        """Return the rank."""
        return placement.rank


class ValuePerByte(Policy):
    """The unit goes whose bytes are worth least: `w * C / (B * (A^2 + age^2)^(3/4))`.

    `w` grows with the hits that the unit, or its ghost, has earned; C is the work that it saves; B the bytes it frees;
    age the requests since its last use; A the median age at which tokens are used again, learned as requests come.
    """

    name = "value"
    uses_ghosts = True
    saves_chunk_ends = None

    def __init__(
        self,
        *,
        weight: tuple[int, int] = (16, 64),
        chunk_end_weight: tuple[int, int] = (1, 4),
        initial_age: int = 64,
        aging: int = 3,
    ) -> None:
        """Set the weights.

        Args:
            weight: `w` of a unit without hits, and what each hit adds.
            chunk_end_weight: the same for a state saved only because a prefill chunk ended there.
            initial_age: A until something was used again.
            aging: the power of A^2 + age^2, in quarters. 4 lets old units go sooner; 3 hit more on the traces measured.
        """
        self.weight, self.chunk_end_weight = weight, chunk_end_weight
        self.age_scale, self.aging = initial_age, aging
        self._square = initial_age * initial_age
        self._tokens_by_age = [0] * int(lib.UP_TREE_AGE_BUCKETS)

    def place(self, unit: Any, size: int, saved: int) -> Placement:
        """One list per half-octave of w * C / B."""
        base, step = self.chunk_end_weight if unit.role == _CHUNK else self.weight
        worth = log2_q8(base + step * unit.hits) + log2_q8(saved) - log2_q8(size)
        return _new_placement(Placement, (worth >> 7, unit.last_use, worth))

    def score(self, placement: Placement, now: int) -> int:
        """Return log2 of the value of a byte, Q8."""
        age = now - placement.rank
        return placement.worth - (self.aging * log2_q8(self._square + age * age) >> 2)

    def learn(self, ages: Sequence[int]) -> None:
        """Move A to the median of all ages so far, weighted by tokens."""
        counts = self._tokens_by_age
        for bucket, tokens in enumerate(ages):
            if tokens:
                counts[bucket] += tokens
        half, below = sum(counts) / 2, 0
        if not half:
            return
        for bucket, tokens in enumerate(counts):
            if below + tokens >= half:
                # Inside the bucket [2^b, 2^(b+1)) the ages are taken as evenly spread.
                self.age_scale = (1 << bucket) + int((1 << bucket) * (half - below) / tokens) - 1
                break
            below += tokens
        self.age_scale = max(self.age_scale, 1)
        self._square = self.age_scale * self.age_scale

    def explain(self, unit: Any, size: int, saved: int, now: int) -> str:
        """Write the formula with its numbers."""
        base, step = self.chunk_end_weight if unit.role == _CHUNK else self.weight
        placement = self.place(unit, size, saved)
        return (
            f"value per byte: w = {base} + {step} * {unit.hits} hits, C = {saved}, B = {size}, "
            f"age = {now - unit.last_use}, A = {self.age_scale}; score {self.score(placement, now)}"
        )


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (ValuePerByte, LeastRecentlyUsed, SGLangLike, PathCap, MarconiLike)
}


def policy_named(policy: str | Policy) -> Policy:
    """Return a policy by name, or the one given.

    Raises:
        InvalidArgumentError: no policy has that name.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise InvalidArgumentError(f"policy {policy!r} is unknown; there are {sorted(POLICIES)}")
    return POLICIES[policy]()


class EvictionOrder:
    """The units in their lists, and the scores of the lists' heads.

    >>> order = EvictionOrder(LeastRecentlyUsed())
    >>> for node, use in ((7, 3), (8, 1), (9, 2)):
    ...     _ = order.put(node, Placement(0, use, 0), is_leaf=True)
    >>> order.first(now=4)
    8
    """

    __slots__ = ("_heads", "_lists", "_now", "_stale", "_where", "policy")

    def __init__(self, policy: Policy) -> None:
        """Make an empty order."""
        self.policy = policy
        self._lists: dict[tuple[int, bool], Any] = {}  # (bucket, is_leaf) -> SortedList of (rank, node)
        self._where: dict[int, tuple[Placement, tuple[int, bool]]] = {}
        self._heads: dict[tuple[int, bool], tuple[int, int]] = {}  # scores as of `_now`, without the stale lists
        self._stale: set[tuple[int, bool]] = set()
        self._now = -1

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, node: int) -> bool:
        return node in self._where

    def put(self, node: int, placement: Placement, is_leaf: bool) -> bool:
        """Put a unit where it belongs; return whether it stood elsewhere or nowhere. O(log units)."""
        old = self._where.get(node)
        key = (placement.bucket, is_leaf)
        if old is not None:
            if old[0] == placement and old[1] == key:
                return False
            self.remove(node)
        units = self._lists.get(key)
        if units is None:
            units = self._lists[key] = SortedList()
        units.add((placement.rank, node))
        self._where[node] = (placement, key)
        self._stale.add(key)
        return True

    def remove(self, node: int) -> None:
        """Take a unit out, if it is in. O(log units)."""
        old = self._where.pop(node, None)
        if old is not None:
            placement, key = old
            units = self._lists[key]
            head = self._heads.get(key)
            if head is not None and head[1] == node and key not in self._stale:
                units.pop(0)  # the usual case, and cheaper than a search
            else:
                units.remove((placement.rank, node))
            if not units:
                del self._lists[key]
            self._stale.add(key)

    def first(self, now: int, leaves: bool | None = None) -> int | None:
        """Return the node of the unit that goes next, None when there is none. O(lists).

        Args:
            now: count of requests.
            leaves: True only looks at leaves, False only at states of other nodes.
        """
        heads, lists = self._heads, self._lists
        if now != self._now:
            heads.clear()
            self._stale.update(lists)
            self._now = now
        if self._stale:
            for key in self._stale:
                units = lists.get(key)
                if units is None:
                    heads.pop(key, None)
                    continue
                node = units[0][1]
                placement = self._where[node][0]
                score = DEAD_BUCKET if placement.bucket == DEAD_BUCKET else self.policy.score(placement, now)
                heads[key] = (score, node)
            self._stale.clear()
        if leaves is None:
            return min(heads.values())[1] if heads else None
        some = [head for key, head in heads.items() if key[1] == leaves]
        return min(some)[1] if some else None

    def forget_scores(self) -> None:
        """The policy has learned: score every head anew."""
        self._now = -1
