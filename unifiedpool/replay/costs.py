"""How long a step takes: a roofline with stated numbers, not a measurement.

    compute = (tokens * flops_per_token + sum of tokens * context * flops_per_token_context) / (GPUs * flops)
    memory  = (weights + KV read by decodes + states read and written + twice the bytes moved or copied) / bandwidth
    step    = max(compute, memory) + overhead

Decodes run together with prefill chunks in one step. All weights are read in every step, which is right for dense
models and for mixtures of experts at large batches. Communication, load imbalance and speculation are not modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InvalidArgumentError
from ..sizing import Server

__all__ = ["DEFAULT_HARDWARE", "Costs", "Hardware", "default_costs"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU: FLOP/s and bytes/s that a model really reaches, and what a step costs beside them.

    The default is an H200 (1,979 TFLOP/s in fp8, 4.8 TB/s) at 40 % and 70 % of its data sheet.
    """

    flops: float = 0.4 * 1979e12
    bandwidth: float = 0.7 * 4.8e12
    overhead_s: float = 0.002

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("flops", "bandwidth"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be a finite number above 0")
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise InvalidArgumentError(f"overhead_s is {self.overhead_s}; it must be a finite number, 0 or above")


@dataclass(frozen=True, slots=True)
class Costs:
    """One model: FLOPs of a token and of a token per token of context (all GPUs), and bytes of weights on one GPU."""

    flops_per_token: float
    flops_per_token_context: float
    weight_bytes: float
    source: str

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("flops_per_token", "flops_per_token_context", "weight_bytes"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be a finite number, 0 or above")


DEFAULT_HARDWARE = Hardware()

# Billions of parameters active per token, GB of weights on all GPUs, and FLOPs per token and token of context: for each
# full layer, 4 x heads x head dim, with MLA 2 x heads x (192 + 128); window layers are left out. Weights take a byte a
# parameter, in gpt-oss a little more than half of one. Kimi K3's size is not in the configs used here: that of Kimi K2
# with its 4-bit weights stands in.
_MODELS: dict[str, tuple[float, float, float]] = {
    "kimi-k3": (32.0, 500.0, 24 * 2 * 96 * 320),
    "kimi-linear-48b": (3.0, 48.0, 7 * 2 * 32 * 320),
    "qwen3-next-80b": (3.0, 80.0, 12 * 4 * 16 * 256),
    "qwen3.5-9b": (9.0, 9.0, 8 * 4 * 16 * 256),
    "qwen3.5-27b": (27.0, 27.0, 16 * 4 * 24 * 256),
    "qwen3.6-27b": (27.0, 27.0, 16 * 4 * 24 * 256),
    "qwen3.5-35b-a3b": (3.0, 35.0, 10 * 4 * 16 * 256),
    "qwen3.6-35b-a3b": (3.0, 35.0, 10 * 4 * 16 * 256),
    "qwen3.5-122b-a10b": (10.0, 122.0, 12 * 4 * 32 * 256),
    "qwen3.5-397b-a17b": (17.0, 397.0, 15 * 4 * 32 * 256),
    "nemotron-h-8b": (8.0, 8.0, 4 * 4 * 32 * 128),
    "nemotron-3-nano-30b": (3.5, 31.6, 6 * 4 * 32 * 128),
    "falcon-h1-7b": (7.6, 7.6, 44 * 4 * 12 * 128),
    "granite-4.0-h-small": (9.0, 32.0, 4 * 4 * 32 * 128),
    "gpt-oss-20b": (3.6, 14.0, 12 * 4 * 64 * 64),
    "gpt-oss-120b": (5.1, 65.0, 18 * 4 * 64 * 64),
    "gemma3-27b": (27.0, 27.0, 10 * 4 * 32 * 128),
    "mimo-v2-flash": (15.0, 309.0, 9 * 2 * 64 * 320),
    "deepseek-v3": (37.0, 671.0, 61 * 2 * 128 * 320),
}
# For a model that is not in the table: the costs of Qwen3-Next.
_FALLBACK = "qwen3-next-80b"


def default_costs(server: Server) -> Costs:
    """Return the costs of a preset: two FLOPs a parameter and token.

    >>> from ..sizing import Server, load_model
    >>> costs = default_costs(Server.make(load_model("qwen3-next-80b"), 60 << 30))
    >>> costs.flops_per_token, costs.flops_per_token_context
    (6000000000.0, 196608)
    """
    known = server.spec.name in _MODELS
    active, total, context = _MODELS[server.spec.name if known else _FALLBACK]
    source = "preset" if known else f"those of {_FALLBACK}: give your own"
    return Costs(2e9 * active, context, 1e9 * total / server.spec.tp, source)
