"""Forwards of a transformers model over a storage, and a stand-in that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from unifiedpool.engine.storage import Batch, LayerInfo, Storage
from unifiedpool.errors import InvalidArgumentError, UnsupportedModelError

__all__ = ["ModelRunner", "Runner", "StubRunner"]


class Runner(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    max_length: int

    def forward(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute the rows of a batch and return the logits after each row's last token, [rows, vocab]."""
        ...

    def release(self, request_id: int) -> None:
        """Forget a request that finished, was aborted or retracted."""


class ModelRunner:
    """A transformers causal language model.

    A prefill chunk is a forward of one row: padding in front of or behind a chunk would change its states. Decodes of
    rows of different lengths share one forward: keys and values are right-padded per row and masked, positions are
    explicit, states are stacked and written back.

    Args:
        model: in eval mode, attention ``sdpa`` or ``eager``.
        storage: where caches live.

    Raises:
        UnsupportedModelError: a layer caches something unknown, or the attention takes no mask.
    """

    def __init__(self, model: Any, storage: Storage) -> None:
        from unifiedpool.engine.batch_cache import describe_layers

        self.model = model
        self.storage = storage
        self.config = model.config.get_text_config(decoder=True)
        self.layers: list[LayerInfo] = describe_layers(self.config)
        self.vocab_size = int(self.config.vocab_size)
        self.max_length = int(getattr(self.config, "max_position_embeddings", None) or 1 << 62)
        attention = self.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"attention implementation {attention!r}; rows of different lengths need an explicit mask: load the "
                "model with attn_implementation='sdpa' or 'eager'"
            )
        self._additive = attention == "eager"
        self._window = max((layer.window for layer in self.layers), default=0)
        self._only_full = all(layer.attention and not layer.window and not layer.states for layer in self.layers)
        self._device, self._dtype = model.device, model.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute the rows of a batch.

        Args:
            batch: the rows and their cells.
            tokens: per row the new tokens, all ``batch.query_length`` long.

        Returns:
            Logits after each row's last token, [rows, vocab].
        """
        from unifiedpool.engine.batch_cache import BatchCache

        cache = BatchCache(self.layers, self.storage, batch)
        starts = torch.tensor(batch.starts, device=self._device)
        output = self.model(
            input_ids=torch.tensor(tokens, device=self._device),
            position_ids=starts[:, None] + torch.arange(batch.query_length, device=self._device),
            attention_mask=self._decode_mask(batch) if len(batch.rows) > 1 else None,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.write_back()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self.storage.release(request_id)

    def _decode_mask(self, batch: Batch) -> Any:
        full = self._length_mask(batch.key_lengths(0))
        if self._only_full:
            return full  # such models may know no dictionary, and all take a ready 4-D mask
        sliding = self._length_mask(batch.key_lengths(self._window)) if self._window else full
        return {
            "full_attention": full,
            "sliding_attention": sliding,
            "hybrid": full,
            "hybrid_sliding": sliding,
            "linear_attention": None,
            "conv": None,
        }

    def _length_mask(self, lengths: list[int]) -> torch.Tensor:
        """Return a mask [rows, 1, 1, longest] that shows each row its own keys."""
        visible = torch.arange(max(lengths), device=self._device) < torch.tensor(lengths, device=self._device)[:, None]
        visible = visible[:, None, None, :]
        if not self._additive:
            return visible
        hidden = torch.finfo(self._dtype).min
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, hidden)


class StubRunner:
    """No model: the next token is a hash of the last one and its position. For schedules, replays and tests.

    Args:
        vocab_size: at least 2.
    """

    def __init__(self, vocab_size: int = 16) -> None:
        if vocab_size < 2:
            raise InvalidArgumentError(f"vocab_size {vocab_size}: a stub needs at least 2 tokens")
        self.vocab_size = vocab_size
        self.max_length = 1 << 62

    def forward(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return one-hot logits, [rows, vocab]."""
        chosen = [
            (row_tokens[-1] * 0x9E3779B1 + start + len(row_tokens)) % self.vocab_size
            for start, row_tokens in zip(batch.starts, tokens, strict=True)
        ]
        return torch.nn.functional.one_hot(torch.tensor(chosen), self.vocab_size).float()

    def release(self, request_id: int) -> None:
        """Nothing is kept."""
