"""The prefix cache: a radix tree of pages and states over one arena, with one policy for all of its bytes.

`tree` is the C tree's Python face, `eviction` decides what goes, `tracking` what is saved, `cache` joins them with a
planner.
"""

from .cache import Evicted, Inserted, LiveSlot, Lock, PrefixCache
from .eviction import (
    POLICIES,
    EvictionOrder,
    LeastRecentlyUsed,
    MarconiLike,
    PathCap,
    Policy,
    PrefillCost,
    SGLangLike,
    ValuePerByte,
)
from .tracking import (
    Checkpoint,
    StateSlot,
    Tracker,
    TrackSlots,
    checkpoint_grid,
    moved_fields,
    slot_fields,
)
from .tree import Match, PrefixTree

__all__ = [
    "POLICIES",
    "Checkpoint",
    "Evicted",
    "EvictionOrder",
    "Inserted",
    "LeastRecentlyUsed",
    "LiveSlot",
    "Lock",
    "MarconiLike",
    "Match",
    "PathCap",
    "Policy",
    "PrefillCost",
    "PrefixCache",
    "PrefixTree",
    "SGLangLike",
    "StateSlot",
    "TrackSlots",
    "Tracker",
    "ValuePerByte",
    "checkpoint_grid",
    "moved_fields",
    "slot_fields",
]
