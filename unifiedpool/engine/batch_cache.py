"""A transformers cache whose rows are sequences of different lengths, kept in any `Storage`."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.configuration_utils import PreTrainedConfig

from unifiedpool.engine.storage import Batch, LayerInfo, Storage
from unifiedpool.errors import UnsupportedModelError

__all__ = ["BatchCache", "describe_layers"]


def describe_layers(config: PreTrainedConfig) -> list[LayerInfo]:
    """Return what each layer of a model caches.

    Raises:
        UnsupportedModelError: a layer keeps something else than keys and values, a window of them, or states.
    """
    layers = []
    for index, (kind, kwargs) in enumerate(zip(*get_layer_types_and_kwargs(config), strict=True)):
        layer_class = DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
        if layer_class is None or issubclass(layer_class, DynamicIndexedLayer) or kind == "chunked_attention":
            raise UnsupportedModelError(
                f"layer {index} of {config.model_type} is {kind!r}; the engine knows full and sliding attention, "
                "linear attention, convolutions and layers that hold both states and attention"
            )
        if issubclass(layer_class, DummyLayer):
            layers.append(LayerInfo(attention=False, window=0, states=0))
            continue
        stateful = issubclass(layer_class, LinearAttentionCacheLayerMixin)
        layers.append(
            LayerInfo(
                attention=issubclass(layer_class, CacheLayerMixin),
                window=int(kwargs.get("sliding_window") or 0),
                states=int(kwargs.get("number_of_states", 1)) if stateful else 0,
            )
        )
    return layers


class _AttentionLayer(CacheLayerMixin):
    """Keys and values of all rows; the storage holds them, this object only passes them on."""

    def __init__(self, storage: Storage, batch: Batch, layer: int, info: LayerInfo) -> None:
        super().__init__()
        self._storage, self._batch, self._layer, self._window = storage, batch, layer, info.window
        self.is_sliding = bool(info.window)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens and return every key and value that the rows see."""
        return self._storage.extend(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first one, for the one row of a prefill chunk."""
        first = self._batch.first_key(self._batch.starts[0], self._window)
        return self._batch.starts[0] + query_length - first, first

    def get_seq_length(self) -> int:
        """Return the tokens already cached, of the longest row."""
        return max(self._batch.starts)

    def get_max_length(self) -> int:
        """Return -1: the storage grows."""
        return self._window or -1


class _StateLayer(LinearAttentionLayer):
    """States of all rows, copied in before the forward and written back after it.

    Models change the convolution window in place and replace the recurrent state, so the copies are what they see.
    """

    def __init__(self, storage: Storage, batch: Batch, layer: int, info: LayerInfo) -> None:
        super().__init__(number_of_states=info.states)
        self._storage, self._layer = storage, layer
        if batch.starts[0]:
            for index in range(info.states):
                self._bind(index, *storage.load_state(layer, index))

    def _bind(self, index: int, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        self.has_previous_state[index] = True
        if conv is not None:
            self.dtype, self.device = conv.dtype, conv.device
            self.conv_states[index], self.is_conv_states_initialized[index] = conv, True
            self.conv_kernel_size[index] = conv.shape[-1]
        if recurrent is not None:
            self.recurrent_states[index], self.is_recurrent_states_initialized[index] = recurrent, True

    def write_back(self) -> None:
        """Store the states that the forward left."""
        for index in range(self.number_of_states):
            self._storage.store_state(self._layer, index, self.conv_states[index], self.recurrent_states[index])


class _HybridLayer(_StateLayer, _AttentionLayer):
    """States and attention in one layer (falcon_h1, zamba2)."""

    def __init__(self, storage: Storage, batch: Batch, layer: int, info: LayerInfo) -> None:
        _AttentionLayer.__init__(self, storage, batch, layer, info)
        _StateLayer.__init__(self, storage, batch, layer, info)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Create fresh states (keyword arguments only); the attention part needs nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class BatchCache(Cache):
    """The ``cache=`` argument of one forward.

    Args:
        layers: what each model layer caches, from `describe_layers`.
        storage: where the caches live; its current batch is set to ``batch``.
        batch: the rows. All of them have a past, or none has.
    """

    def __init__(self, layers: list[LayerInfo], storage: Storage, batch: Batch) -> None:
        storage.begin(batch)
        bound: list[Any] = []
        for index, info in enumerate(layers):
            if info.states and info.attention:
                bound.append(_HybridLayer(storage, batch, index, info))
            elif info.states:
                bound.append(_StateLayer(storage, batch, index, info))
            elif info.attention:
                bound.append(_AttentionLayer(storage, batch, index, info))
            else:
                bound.append(DummyLayer())
        super().__init__(layers=bound)

    def write_back(self) -> None:
        """Store every state after a forward that ended well; until then the storage holds the states before it."""
        for layer in self.layers:
            if isinstance(layer, _StateLayer):
                layer.write_back()
