"""A small continuous-batching engine on transformers models, over a unified or a static pool.

Scheduling (`Scheduler`, host only), forwards (`ModelRunner`) and request state (`Request`) are separate. Importing this
package does not load transformers; a `ModelRunner` does.
"""

from unifiedpool.engine.caching import Caching
from unifiedpool.engine.engine import Engine, EngineConfig, StepStats, Totals
from unifiedpool.engine.geometry import Geometry, empty_shortfall
from unifiedpool.engine.request import Request, SamplingParams, Status, TokenEvent
from unifiedpool.engine.runner import ModelRunner, PlainRunner, StubRunner
from unifiedpool.engine.scheduler import Scheduler
from unifiedpool.engine.static_pool import StaticPlanner, StaticPool

__all__ = [
    "Caching",
    "Engine",
    "EngineConfig",
    "Geometry",
    "ModelRunner",
    "PlainRunner",
    "Request",
    "SamplingParams",
    "Scheduler",
    "StaticPlanner",
    "StaticPool",
    "Status",
    "StepStats",
    "StubRunner",
    "TokenEvent",
    "Totals",
    "empty_shortfall",
]
