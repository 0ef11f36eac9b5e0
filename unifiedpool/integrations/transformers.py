"""A transformers cache whose layers are views of an arena.

    spec = ModelSpec.from_config(model.config, convention="transformers")
    pool = Pool(spec.layout(page_size=16), arena_bytes)
    with UnifiedCache(pool, model) as cache:
        model.generate(input_ids, cache=cache, position_ids=position_ids)

KV pages and state slots are allocated as tokens arrive and given back by `close`. Tokens and logits are bit-equal to
those of `DynamicCache`. Pass `position_ids` always, as with any cache: some models restart at position 0 without them.

A forward is over when its last layer was called, but nothing tells a cache so. The cache therefore closes a forward
when the next one begins, or when `flush` is called; with one row every state is changed in place and `flush` only
advances the lengths of `sequences`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from unifiedpool.errors import InvalidArgumentError, LayoutMismatchError, UnsupportedModelError
from unifiedpool.integrations.sequences import ArenaBatch, ArenaSequence, ForwardBatch, release

__all__ = ["UnifiedCache", "attention_masks", "layer_windows"]

_WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
_ATTENDING = ("full_attention", "hybrid", *_WINDOWED)
_KEEPING_STATE = ("conv", "linear_attention", "hybrid", "hybrid_sliding")


def _layer_types(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the cache type of each layer and its arguments, as `DynamicCache` would choose them."""
    decoder = config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(decoder)
    known = {*_ATTENDING, *_KEEPING_STATE, "dummy"}
    for index, (name, argument) in enumerate(zip(types, arguments, strict=True)):
        if name not in known:
            raise UnsupportedModelError(
                f"layer {index} of {decoder.model_type!r} is {name!r}; supported layers are {', '.join(sorted(known))}"
            )
        if argument.get("number_of_states", 1) != 1:
            raise UnsupportedModelError(
                f"layer {index} of {decoder.model_type!r} keeps {argument['number_of_states']} states; one is supported"
            )
    return types, arguments


def layer_windows(config: Any) -> dict[int, int]:
    """Return layer -> sliding window in tokens for the layers of a model that have one.

    Args:
        config: a transformers configuration.

    Raises:
        UnsupportedModelError: a layer of a type that the cache does not know.
    """
    types, arguments = _layer_types(config)
    return {index: int(arguments[index]["sliding_window"]) for index, name in enumerate(types) if name in _WINDOWED}


def attention_masks(config: Any, batch: ForwardBatch, dtype: torch.dtype, device: Any = "cpu") -> Any:
    """Make what a model takes as `attention_mask` when rows of different lengths decode one token each.

    Args:
        config: the model's configuration.
        batch: the rows.
        dtype: the model's dtype.
        device: the model's device.

    Returns:
        A dict by layer type, or one tensor for models whose layers are all of the same type.

    Raises:
        UnsupportedModelError: the model's attention implementation is neither eager nor sdpa.
    """
    implementation = config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} takes no masks for unequal rows; use 'sdpa' or 'eager'"
        )
    types, _ = _layer_types(config)
    by_window = batch.masks(dtype if implementation == "eager" else None, device)
    if all(name == "full_attention" for name in types):
        return by_window[None]
    masks: dict[str, Any] = {"linear_attention": None, "conv": None, "full_attention": by_window[None]}
    masks["hybrid"] = by_window[None]
    for window in dict.fromkeys(layer_windows(config).values()):
        if "sliding_attention" in masks:
            raise UnsupportedModelError(f"windows of several sizes in one model: {layer_windows(config)}")
        masks["sliding_attention"] = masks["chunked_attention"] = masks["hybrid_sliding"] = by_window[window]
    return masks


class _Layer:
    """What attention and state layers share: the owning cache and the layer's number."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: UnifiedCache, index: int) -> None:
        self._owner = owner
        self._index = index

    def _refuse(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"UnifiedCache cannot {what}; use greedy search or sampling with num_beams=1 and no assistant model"
        )

    def reset(self) -> None:
        """Do nothing: the cache resets as a whole."""

    def offload(self) -> None:
        """Do nothing: the arena stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: the arena stays where it is."""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refuse: beams would share and reorder pages."""
        raise self._refuse("reorder its rows for beam search")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a recurrent state cannot go back."""
        raise self._refuse("drop tokens")

    def activate_past_recording(self) -> None:
        """Refuse: a recurrent state cannot go back."""
        raise self._refuse("record the past for a rollback")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: rows are sequences with pages of their own."""
        raise self._refuse("repeat its rows")

    def batch_select_indices(self, indices: Any) -> None:
        """Refuse: rows are sequences with pages of their own."""
        raise self._refuse("select rows")


class _AttentionLayer(_Layer, CacheLayerMixin):  # type: ignore[misc]
    """A layer with KV pages."""

    def __init__(self, owner: UnifiedCache, index: int, window: int | None) -> None:
        CacheLayerMixin.__init__(self)
        _Layer.__init__(self, owner, index)
        self._window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the cells are there."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new rows `[batch, heads, tokens, dim]`; return all rows that they attend to."""
        return self._owner._attend(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the tokens in the cache."""
        return self._owner._length_of(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many rows a forward of `query_length` tokens attends to, and the position of the first."""
        length = self.get_seq_length()
        offset = 0 if self._window is None else max(0, length - self._window + 1)
        return length + query_length - offset, offset

    def get_max_length(self) -> int:
        """Return the window, or -1: no maximum."""
        return -1 if self._window is None else self._window


class _StateLayer(_Layer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with a convolution window and, unless the model has none, a recurrent state."""

    is_compileable = False
    is_croppable = False

    def __init__(self, owner: UnifiedCache, index: int) -> None:
        LinearAttentionCacheLayerMixin.__init__(self)
        _Layer.__init__(self, owner, index)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the cells are there."""

    def update_conv_state(
        self, conv_states: Any, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Take the new inputs `[batch, channels, tokens]`; return the old window followed by them."""
        return self._owner._extend_conv(self._index, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Set the recurrent state."""
        return self._owner._set_recurrent(self._index, recurrent_states)

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1


class _StateAndAttentionLayer(_StateLayer, _AttentionLayer):
    """A layer with both, as in Falcon-H1 and Zamba2."""

    def __init__(self, owner: UnifiedCache, index: int, window: int | None) -> None:
        _StateLayer.__init__(self, owner, index)
        _AttentionLayer.__init__(self, owner, index, window)

    def get_max_length(self) -> int:
        """Return the window, or -1: no maximum."""
        return _AttentionLayer.get_max_length(self)


class UnifiedCache(Cache):  # type: ignore[misc]
    """A drop-in `cache=` for `generate` and `forward`, stored in a pool.

    The rows of a batch are sequences of equal length; their number is taken from the first forward. Prompts of
    different lengths need one cache each (left padding changes recurrent states), or the engine.

    Args:
        pool: a `Pool` whose layout was built for this model with ``convention="transformers"``.
        model: the model or its configuration.

    Raises:
        UnsupportedModelError: a layer of a type that the cache does not know.
        LayoutMismatchError: the pool's layout lacks a layer of the model.

    Attributes:
        sequences: one `ArenaSequence` per row, empty before the first forward. Their `length` is current after
            `flush`.

    A forward that the pool has no room for raises `CapacityError` before anything is written. Not thread-safe; one
    forward at a time.

    >>> from unifiedpool.integrations import tiny_models
    >>> from unifiedpool.model_spec import ModelSpec
    >>> from unifiedpool.pool import Pool
    >>> model = tiny_models.build("qwen3_next")
    >>> layout = ModelSpec.from_config(model.config, convention="transformers").layout(page_size=16)
    >>> with UnifiedCache(Pool(layout, 1 << 20), model) as cache:
    ...     output = model(torch.tensor([[1, 2, 3]]), cache=cache, position_ids=torch.tensor([[0, 1, 2]]))
    ...     cache
    UnifiedCache(1 rows, 3 tokens, 4 layers)
    """

    def __init__(self, pool: Any, model: Any) -> None:
        config = getattr(model, "config", model)
        self._pool = pool
        self._make_layers(config)
        self._check_layout(config)
        self._batch: ForwardBatch | None = None
        self.sequences: list[Any] = []

    @classmethod
    def over(cls, batch: ForwardBatch, model: Any) -> UnifiedCache:
        """Make a cache for one forward over a batch that somebody else (an engine) owns.

        The caller gives `attention_masks` and `position_ids` when the rows differ in length, calls ``batch.grow``
        before the forward or leaves it to the cache, and `flush` after it.
        """
        cache = cls.__new__(cls)
        cache._pool = None
        cache._make_layers(getattr(model, "config", model))
        cache.sequences = batch.sequences
        cache._batch = batch
        return cache

    def _make_layers(self, config: Any) -> None:
        types, _ = _layer_types(config)
        self._windows = layer_windows(config)
        layers: list[Any] = []
        for index, name in enumerate(types):
            if name in _ATTENDING and name in _KEEPING_STATE:
                layers.append(_StateAndAttentionLayer(self, index, self._windows.get(index)))
            elif name in _ATTENDING:
                layers.append(_AttentionLayer(self, index, self._windows.get(index)))
            elif name in _KEEPING_STATE:
                layers.append(_StateLayer(self, index))
            else:
                layers.append(DummyLayer())
        super().__init__(layers=layers)
        self._attending = {index for index, layer in enumerate(layers) if isinstance(layer, _AttentionLayer)}
        self._stateful = {index for index, layer in enumerate(layers) if isinstance(layer, _StateLayer)}
        self._attended: set[int] = set()
        self._convolved: set[int] = set()

    def _check_layout(self, config: Any) -> None:
        for wanted, paged in ((self._attending, True), (self._stateful, False)):
            there = {
                layer for kind in self._pool.layout.kinds if (kind.page_size > 0) == paged for layer in kind.layers
            }
            if not wanted <= there:
                what = "KV pages" if paged else "states"
                raise LayoutMismatchError(
                    f"the layout has no {what} for layers {sorted(wanted - there)} of "
                    f"{config.model_type!r}; build it with ModelSpec.from_config(model.config, "
                    "convention='transformers').layout()"
                )

    # -- one forward ---------------------------------------------------------------------------------------------

    @property
    def _is_complete(self) -> bool:
        """Whether every layer was called in the open forward."""
        return self._attended == self._attending and self._convolved == self._stateful

    def _open(self, rows: int) -> ForwardBatch:
        """Return the batch of the open forward, or begin one."""
        if self._batch is None:
            if self._pool is None:
                raise InvalidArgumentError("this cache was made over one batch and its forward is over; make another")
            if not self.sequences:
                self.sequences = [ArenaSequence() for _ in range(rows)]
            self._batch = ArenaBatch(self._pool, self._windows, self.sequences)
        if rows != len(self._batch.sequences):
            raise InvalidArgumentError(
                f"a forward of {rows} rows on a cache of {len(self._batch.sequences)}; use another cache, or reset()"
            )
        return self._batch

    def _begin(self, layer: int, called: set[int], rows: int, tokens: int) -> ForwardBatch:
        """Enter a layer: close the last forward if this one begins the next, and make room for its tokens.

        The first layer of a forward makes the room for all of them, before anything is written: a forward that is
        refused has changed nothing.
        """
        if layer in called:
            if not self._is_complete:
                raise InvalidArgumentError(
                    f"layer {layer} was called twice in one forward; if a forward was interrupted, reset() the cache"
                )
            self.flush()
        batch = self._open(rows)
        batch.grow(tokens)
        called.add(layer)
        return batch

    def flush(self) -> None:
        """Close the last forward: write gathered states back, advance `sequences`, drop pages out of the window.

        Needed before anybody else reads the arena or the sequences; does nothing before the first forward or when
        called twice. A forward that is still running is left alone.
        """
        if self._batch is None or not self._is_complete or not (self._attended or self._convolved):
            return
        self._batch.finish()
        self._batch = None
        self._attended.clear()
        self._convolved.clear()

    def _attend(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        return self._begin(layer, self._attended, keys.shape[0], keys.shape[2]).attend(layer, keys, values)

    def _extend_conv(self, layer: int, inputs: Any, kernel_size: int | None) -> Any:
        # Never the first call of a forward: the layer asked for its window before, and that call closed the last one.
        batch = self._open(inputs.shape[0])
        batch.grow(inputs.shape[-1])
        self._convolved.add(layer)
        window = batch.state(layer, "conv")
        width = int(kernel_size or inputs.shape[-1])
        if window is not None:
            extended = torch.cat((window, inputs), dim=-1)
        elif inputs.shape[-1] < width:
            extended = torch.nn.functional.pad(inputs, (width - inputs.shape[-1], 0))
        else:
            extended = inputs
        batch.set_state(layer, "conv", extended[..., -width:])
        return extended

    def _set_recurrent(self, layer: int, value: Any) -> Any:
        return self._open(value.shape[0]).set_state(layer, "temporal", value)

    def _state(self, layer: int, name: str) -> Any:
        return self._open(len(self.sequences)).state(layer, name) if self.sequences else None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the convolution windows `[batch, channels, kernel]`, to be changed in place, or None."""
        self._check_stateful(layer_idx)
        if not self.sequences:
            return None
        if layer_idx not in self._convolved or self._is_complete:
            # A single token is not announced: it changes the window in place. More are added in _extend_conv.
            known = 1 if self._batch is None or self._is_complete else max(1, self._batch.new_tokens)
            self._begin(layer_idx, self._convolved, len(self.sequences), known)
        return self._state(layer_idx, "conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the recurrent states `[batch, *shape]`, to be changed in place, or None."""
        self._check_stateful(layer_idx)
        return self._state(layer_idx, "temporal")

    def _check_stateful(self, layer: int) -> None:
        if layer not in self._stateful:
            raise InvalidArgumentError(f"layer {layer} keeps no state; layers {sorted(self._stateful)} do")

    # -- the rest of the interface -------------------------------------------------------------------------------

    def _length_of(self, layer: int) -> int:
        if self._batch is None:
            return max((int(sequence.length) for sequence in self.sequences), default=0)
        return max(self._batch.lengths) + (self._batch.new_tokens if layer in self._attended else 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens in the cache (of the longest row)."""
        if layer_idx not in self._attending and self._attending:
            layer_idx = min(self._attending)
        if self._attending:
            return self._length_of(layer_idx)
        self.flush()
        return self._length_of(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many rows a forward of `query_length` tokens attends to, and the position of the first."""
        if not self._attending:
            return self.get_seq_length() + query_length, 0  # asked for also by models that then attend to nothing
        index = layer_idx if layer_idx in self._attending else min(self._attending)
        length, first = self.layers[index].get_mask_sizes(query_length)
        return int(length), int(first)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next token."""
        return self.get_seq_length(layer_idx)

    def reset(self) -> None:
        """Give every cell back and forget the sequences; the next forward starts anew."""
        self._batch = None
        self._attended.clear()
        self._convolved.clear()
        sequences, self.sequences = self.sequences, []
        if self._pool is not None:
            for sequence in sequences:
                release(self._pool, sequence)

    def close(self) -> None:
        """Give every cell back. The same as `reset`."""
        self.reset()

    def __enter__(self) -> UnifiedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"UnifiedCache({len(self.sequences)} rows, {self.get_seq_length()} tokens, {len(self.layers)} layers)"
