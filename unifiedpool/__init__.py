"""unifiedpool: one byte buffer for every cache of a hybrid LLM, with no fixed split.

Start with `Pool` (planner and arena in one process), or with `Planner` and `Arena` in two. Names are loaded on first
use, so that planning alone does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arena import Arena
    from .engine import Engine, StaticPool
    from .errors import (
        CapacityError,
        ConcurrentCallError,
        ConfigFieldError,
        InvalidArgumentError,
        InvalidHandleError,
        LayoutMismatchError,
        PinnedError,
        PlanOrderError,
        ReservationError,
        UnifiedPoolError,
        UnsupportedModelError,
    )
    from .layout import Kind, Layout, Segment
    from .model_spec import ModelSpec
    from .plan import StepPlan
    from .planner import Demand, Handles, Planner
    from .pool import Pool
    from .prefix_cache import PrefixCache

__all__ = [
    "Arena",
    "CapacityError",
    "ConcurrentCallError",
    "ConfigFieldError",
    "Demand",
    "Engine",
    "Handles",
    "InvalidArgumentError",
    "InvalidHandleError",
    "Kind",
    "Layout",
    "LayoutMismatchError",
    "ModelSpec",
    "PinnedError",
    "PlanOrderError",
    "Planner",
    "Pool",
    "PrefixCache",
    "ReservationError",
    "Segment",
    "StaticPool",
    "StepPlan",
    "UnifiedPoolError",
    "UnsupportedModelError",
]

__version__ = "0.1.0"

_HOMES = {
    "Arena": "arena",
    "Demand": "planner",
    "Engine": "engine",
    "Handles": "planner",
    "Kind": "layout",
    "Layout": "layout",
    "ModelSpec": "model_spec",
    "Planner": "planner",
    "Pool": "pool",
    "PrefixCache": "prefix_cache",
    "Segment": "layout",
    "StaticPool": "engine",
    "StepPlan": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
