"""Placement policies, simulated in memory only, behind one interface (`Policy`)."""

from __future__ import annotations

from .base import Counters, Model, Policy
from .counted import LcmPages, PaddedSlab, StaticRatio, VllmBlocks
from .ours import NestedGrids
from .two_ended import TwoEnded

__all__ = [
    "Counters",
    "LcmPages",
    "Model",
    "NestedGrids",
    "PaddedSlab",
    "Policy",
    "StaticRatio",
    "TwoEnded",
    "VllmBlocks",
]
