"""Where the caches of a batch live: the protocol, and plain tensors as the obviously right version of it.

A forward reads and writes the caches of its rows through a `Storage`. `PlainStorage` keeps one tensor per request,
layer and part, as transformers' `DynamicCache` does; `unifiedpool.engine.arena_storage.ArenaStorage` keeps the same
bytes in cells of the arena. Both hand the model tensors of the same shape, strides and content, so that a forward is
bit-equal over either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from unifiedpool.errors import InvalidArgumentError

__all__ = ["Batch", "LayerInfo", "PlainStorage", "Row", "Storage"]


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What one model layer caches.

    Attributes:
        attention: keys and values per token.
        window: tokens that attention sees, the new one included; 0: all.
        states: number of state sets (convolution window, recurrent state); 0: none.
    """

    attention: bool
    window: int
    states: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a forward: ``start`` tokens are in its cache, the forward adds the batch's query length."""

    request_id: int
    start: int
    handles: Mapping[str, Sequence[int]]
    first_page: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward. Either one row of any query length, or any number of rows of query length 1."""

    rows: Sequence[Row]
    query_length: int
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.rows or self.query_length < 1 or (self.query_length > 1 and len(self.rows) > 1):
            raise InvalidArgumentError(
                f"a batch of {len(self.rows)} rows of {self.query_length} tokens; one row of a chunk, or rows of 1 token"
            )
        object.__setattr__(self, "starts", [row.start for row in self.rows])

    def first_key(self, start: int, window: int) -> int:
        """Return the position of the first key that a row starting at ``start`` sees (window 0: all)."""
        return max(0, start - (window - 1)) if window else 0

    def key_lengths(self, window: int) -> list[int]:
        """Return the number of keys of each row, the new tokens included."""
        return [start + self.query_length - self.first_key(start, window) for start in self.starts]


class Storage(Protocol):
    """Caches of all requests, addressed by batch and layer."""

    def begin(self, batch: Batch) -> None:
        """Set the rows that the following calls speak of."""

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values and return all that the rows see.

        Args:
            layer: model layer.
            keys: [rows, heads, query_length, key_dim].
            values: [rows, heads, query_length, value_dim].

        Returns:
            Keys and values [rows, heads, longest row, dim], contiguous, each row right-padded with finite numbers.
        """
        ...

    def load_state(self, layer: int, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return copies of the convolution window and the recurrent state, rows first; None where there is none."""
        ...

    def store_state(self, layer: int, index: int, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        """Write the states of all rows back."""

    def release(self, request_id: int) -> None:
        """Forget a request that finished, was aborted or retracted."""


class PlainStorage:
    """One plain tensor per request, layer and part: the reference for everything that the arena does."""

    def __init__(self, layers: Sequence[LayerInfo]) -> None:
        self._layers = layers
        self._keys_values: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._states: dict[int, dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None]]] = {}
        self._batch: Batch | None = None

    def __len__(self) -> int:
        """Number of requests that have any cache."""
        return len(self._keys_values.keys() | self._states.keys())

    def begin(self, batch: Batch) -> None:
        """Set the rows that the following calls speak of."""
        self._batch = batch

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values and return all that the rows see; see `Storage.extend`."""
        batch = self._rows()
        window = self._layers[layer].window
        lengths = batch.key_lengths(window)
        all_keys = keys.new_zeros(len(lengths), keys.shape[1], max(lengths), keys.shape[3])
        all_values = values.new_zeros(len(lengths), values.shape[1], max(lengths), values.shape[3])
        for index, (row, length) in enumerate(zip(batch.rows, lengths, strict=True)):
            own = self._keys_values.setdefault(row.request_id, {})
            row_keys, row_values = keys[index], values[index]
            if row.start:
                past_keys, past_values = own[layer]
                row_keys = torch.cat([past_keys, row_keys], dim=1)
                row_values = torch.cat([past_values, row_values], dim=1)
            all_keys[index, :, :length] = row_keys
            all_values[index, :, :length] = row_values
            keep = batch.first_key(row.start + batch.query_length, window) - batch.first_key(row.start, window)
            own[layer] = (row_keys[:, keep:].clone(), row_values[:, keep:].clone())
        return all_keys, all_values

    def load_state(self, layer: int, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return copies of the states, rows first; see `Storage.load_state`."""
        states = [self._states[row.request_id][layer, index] for row in self._rows().rows]
        convs = [conv for conv, _ in states if conv is not None]
        recurrents = [recurrent for _, recurrent in states if recurrent is not None]
        return torch.stack(convs) if convs else None, torch.stack(recurrents) if recurrents else None

    def store_state(self, layer: int, index: int, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        """Write the states of all rows back."""
        for position, row in enumerate(self._rows().rows):
            self._states.setdefault(row.request_id, {})[layer, index] = (
                None if conv is None else conv[position].clone(),
                None if recurrent is None else recurrent[position].clone(),
            )

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self._keys_values.pop(request_id, None)
        self._states.pop(request_id, None)

    def _rows(self) -> Batch:
        if self._batch is None:
            raise InvalidArgumentError("no batch: call begin() before the forward")
        return self._batch
