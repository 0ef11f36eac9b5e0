"""Forwards of a transformers model over an arena or over plain tensors, and a stand-in that needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from unifiedpool.engine.geometry import Geometry
from unifiedpool.engine.request import Request
from unifiedpool.errors import InvalidArgumentError
from unifiedpool.integrations.sequences import ArenaBatch, ForwardBatch, PlainBatch, PlainSequence
from unifiedpool.layout import Layout

__all__ = ["ModelRunner", "PlainRunner", "Runner", "StubRunner"]


class Runner(Protocol):
    """What the engine needs of a model.

    Attributes:
        vocab_size: token ids are below it.
        max_length: most tokens of a sequence.
        windows: page kind -> sliding window in tokens, for the kinds that stop growing.
    """

    vocab_size: int
    max_length: int
    windows: Mapping[str, int]

    def forward(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute new tokens of one request, or one new token of several.

        Args:
            requests: they hold the cells for these tokens.
            tokens: the new tokens of each, all equally many.

        Returns:
            Logits after each one's last token, [requests, vocab].
        """
        ...

    def release(self, request_id: int) -> None:
        """Forget a request that finished, was aborted or retracted."""


class _StepPool:
    """A pool during the forwards of one step: cells stay where the step's plan put them."""

    def __init__(self, pool: Any) -> None:
        self.layout: Layout = pool.layout
        self.arena = pool.arena
        self.planner = pool.planner

    def step(self) -> None:
        """The engine has applied the plan already."""


class ModelRunner:
    """A transformers causal language model over the arena of a pool.

    A prefill chunk is a forward of one row: padding in front of or behind a chunk would change its states. Decodes of
    rows of different lengths share one forward: keys and values are right-padded per row and masked, positions are
    explicit, states are gathered and written back.

    Args:
        model: in eval mode, attention ``sdpa`` or ``eager``.
        pool: its layout was built for this model with ``convention="transformers"``.

    Raises:
        UnsupportedModelError: a layer caches something unknown.
        LayoutMismatchError: the layout lacks a layer of the model.
    """

    def __init__(self, model: Any, pool: Any) -> None:
        from unifiedpool.integrations.transformers import UnifiedCache, layer_windows

        UnifiedCache(pool, model)  # checks that model and layout belong together
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.pool = pool
        self.vocab_size = int(config.vocab_size)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 1 << 62)
        self.layer_windows = layer_windows(model.config)
        self.windows: Mapping[str, int] = _kind_windows(pool.layout, self.layer_windows)
        self._geometry = Geometry.from_layout(pool.layout, self.windows)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute new tokens of one request, or one new token of several; see `Runner.forward`."""
        from unifiedpool.integrations.transformers import UnifiedCache, attention_masks

        batch = self._batch(requests)
        cache = UnifiedCache.over(batch, self.model)
        device, count = self.model.device, len(tokens[0])
        starts = torch.tensor(batch.lengths, device=device)
        masks = None
        if len(requests) > 1:
            masks = attention_masks(self.model.config, batch, self.model.dtype, device)
        output = self.model(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=starts[:, None] + torch.arange(count, device=device),
            attention_mask=masks,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for request in requests:
            # Before the cache would give them away: the scheduler keeps pages that left the window for the next ones.
            self._geometry.slide(request.sequence.pages, request.spare, request.computed + count)
        cache.flush()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def release(self, request_id: int) -> None:
        """Nothing to forget: the bytes are the pool's."""

    def _batch(self, requests: Sequence[Request]) -> ForwardBatch:
        return ArenaBatch(_StepPool(self.pool), self.layer_windows, [request.sequence for request in requests])


class PlainRunner(ModelRunner):
    """The same forwards over plain tensors, one per request, layer and part: what the arena is compared with.

    The pool is only planned with; its arena stays untouched. Arguments and errors as `ModelRunner`.
    """

    def __init__(self, model: Any, pool: Any) -> None:
        super().__init__(model, pool)
        self.sequences: dict[int, PlainSequence] = {}

    def release(self, request_id: int) -> None:
        """Drop the tensors of a request."""
        self.sequences.pop(request_id, None)

    def _batch(self, requests: Sequence[Request]) -> ForwardBatch:
        rows = [self.sequences.setdefault(request.request_id, PlainSequence()) for request in requests]
        return PlainBatch(self.layer_windows, rows)


def _kind_windows(layout: Layout, layer_windows: Mapping[int, int]) -> dict[str, int]:
    """A kind stops growing when every layer in it has a window; the largest one counts."""
    found = {}
    for kind in layout.kinds:
        windows = [layer_windows.get(layer) for layer in kind.layers]
        bounded = [window for window in windows if window is not None]
        if kind.page_size and len(bounded) == len(windows):
            found[kind.name] = max(bounded)
    return found


class StubRunner:
    """No model: the next token is a hash of the last one and its position. For schedules, replays and tests.

    Args:
        vocab_size: at least 2.
        windows: page kind -> sliding window in tokens.
    """

    def __init__(self, vocab_size: int = 16, windows: Mapping[str, int] | None = None) -> None:
        if vocab_size < 2:
            raise InvalidArgumentError(f"vocab_size {vocab_size}: a stub needs at least 2 tokens")
        self.vocab_size = vocab_size
        self.max_length = 1 << 62
        self.windows: Mapping[str, int] = dict(windows or {})

    def forward(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return one-hot logits, [requests, vocab]."""
        chosen = [
            (new[-1] * 0x9E3779B1 + request.computed + len(new)) % self.vocab_size
            for request, new in zip(requests, tokens, strict=True)
        ]
        return torch.nn.functional.one_hot(torch.tensor(chosen), self.vocab_size).float()

    def release(self, request_id: int) -> None:
        """Nothing is kept."""
