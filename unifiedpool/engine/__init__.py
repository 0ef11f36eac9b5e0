"""A small continuous-batching engine on transformers models, over a unified or a static pool.

Scheduling (`Scheduler`, host only), forwards (`ModelRunner`) and request state (`Request`) are separate. Importing this
package does not load transformers; `unifiedpool.engine.batch_cache` does, on the first forward.
"""

from unifiedpool.engine.engine import Engine, EngineConfig, StepStats, Totals
from unifiedpool.engine.geometry import Geometry, empty_shortfall
from unifiedpool.engine.request import Request, SamplingParams, Status, TokenEvent
from unifiedpool.engine.runner import ModelRunner, StubRunner
from unifiedpool.engine.scheduler import Scheduler
from unifiedpool.engine.static_pool import StaticPool
from unifiedpool.engine.storage import PlainStorage

__all__ = [
    "Engine",
    "EngineConfig",
    "Geometry",
    "ModelRunner",
    "PlainStorage",
    "Request",
    "SamplingParams",
    "Scheduler",
    "StaticPool",
    "StepStats",
    "Status",
    "StubRunner",
    "TokenEvent",
    "Totals",
    "empty_shortfall",
]
