"""From a model's config to the kinds of cell that it needs.

`ModelSpec.from_config` reads a transformers config (object, dict, `config.json` or its folder) and says, for one tensor
parallel rank, which layers keep KV pages, window pages or recurrent states, with which shapes, dtypes and shards.

Two conventions:

    engine         conv [channels, conv_kernel - 1], temporal [heads, v_dim, k_dim], one MLA row of
                   kv_lora_rank + qk_rope_head_dim, a conv tensor each for q, k, v of Kimi delta attention
    transformers   conv [channels, conv_kernel], recurrent [heads, k_dim, v_dim] in float32, MLA as one-head keys
                   (the latent) and one-head values (rope): exactly what a `DynamicCache` of transformers 5.24 holds

Segment names: "key" and "value" or "latent" in pages; "conv" (or "conv_q", "conv_k", "conv_v") and "temporal" in slots.
Pure data: nothing here imports torch or transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigFieldError, InvalidArgumentError, UnsupportedModelError
from .layout import DEFAULT_PAGE_SIZES, DTYPE_BYTES, End, Format, Kind, Layout, Order, Segment, Zero

__all__ = ["PRESETS", "SUPPORTED_MODELS", "ModelSpec"]

Convention = Literal["engine", "transformers"]
Mixer = Literal["", "conv", "gated_delta", "kimi_delta", "mamba1", "mamba2"]

# -- reading a config ----------------------------------------------------------------------------------------------

_MISSING = object()


class _Fields:
    """Field access over a dict or a config object; a missing needed field is a `ConfigFieldError`."""

    def __init__(self, config: object, model_type: str) -> None:
        self._config = config
        self.model_type = model_type

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not None."""
        for name in names:
            if isinstance(self._config, Mapping):
                value = self._config.get(name)
            else:
                value = getattr(self._config, name, None)
            if value is not None:
                return value
        return default

    def has(self, name: str) -> bool:
        """Whether the field is there, be it None."""
        return name in self._config if isinstance(self._config, Mapping) else hasattr(self._config, name)

    def need(self, *names: str) -> Any:
        """The first of `names` that is there."""
        value = self.get(*names, default=_MISSING)
        if value is _MISSING:
            others = f" (also read: {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ConfigFieldError(f"config of {self.model_type!r} has no field {names[0]!r}{others}; add it")
        return value

    def count(self, *names: str) -> int:
        """A needed positive integer."""
        value = self.need(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigFieldError(
                f"field {names[0]!r} of {self.model_type!r} is {value!r}; it must be a positive integer"
            )
        return value


_LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "swa",
    "chunked_attention": "swa",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "hybrid": "full+linear",
    "hybrid_sliding": "swa+linear",
    "mlp": "",
    "moe": "",
    "dummy": "",
}


def _typed(fields: _Fields, types: Iterable[str]) -> list[str]:
    found = []
    for layer, name in enumerate(types):
        if name not in _LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {layer} of {fields.model_type!r} has type {name!r}; known are {', '.join(_LAYER_TYPES)}"
            )
        found.append(_LAYER_TYPES[name])
    return found


def _listed(fields: _Fields, *names: str) -> list[str]:
    return _typed(fields, fields.need("layer_types", *names))


def _every(fields: _Fields, kind: str) -> list[str]:
    return [kind] * fields.count("num_hidden_layers")


def _layers_decoder(fields: _Fields) -> list[str]:
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    layers = fields.count("num_hidden_layers")
    if fields.get("use_sliding_window", default=False) and fields.get("sliding_window"):
        first = fields.count("max_window_layers")
        return ["swa" if layer >= first else "full" for layer in range(layers)]
    return ["full"] * layers


def _layers_interval(fields: _Fields) -> list[str]:
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    interval = fields.count("full_attention_interval")
    return ["linear" if (layer + 1) % interval else "full" for layer in range(fields.count("num_hidden_layers"))]


def _layers_kimi(fields: _Fields) -> list[str]:
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    linear = _Fields(fields.need("linear_attn_config"), "linear_attn_config")
    full = set(linear.need("full_attn_layers"))  # counted from 1 in checkpoints
    return ["full" if layer + 1 in full else "linear" for layer in range(fields.count("num_hidden_layers"))]


def _layers_bamba(fields: _Fields) -> list[str]:
    # None is a choice here (no attention layer); a config without the field is incomplete.
    indices = fields.get("attn_layer_indices")
    attention = set(indices or ()) if fields.has("attn_layer_indices") else set(fields.need("attn_layer_indices"))
    return ["full" if layer in attention else "linear" for layer in range(fields.count("num_hidden_layers"))]


def _layers_nemotron(fields: _Fields) -> list[str]:
    types = fields.get("layer_types", "layers_block_type")
    if types is not None:
        return _typed(fields, types)
    names = {"M": "linear", "*": "full", "-": "", "E": ""}
    pattern = fields.need("hybrid_override_pattern")
    unknown = set(pattern) - set(names)
    if unknown:
        raise UnsupportedModelError(f"hybrid_override_pattern holds {sorted(unknown)}; known are {list(names)}")
    return [names[letter] for letter in pattern]


def _layers_lfm2(fields: _Fields) -> list[str]:
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    full = set(fields.need("layer_types", "full_attn_idxs"))
    return ["full" if layer in full else "linear" for layer in range(fields.count("num_hidden_layers"))]


def _layers_alternating(fields: _Fields, pattern: int) -> list[str]:
    """Every `pattern`-th layer is full, the others slide."""
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    return ["swa" if (layer + 1) % pattern else "full" for layer in range(fields.count("num_hidden_layers"))]


def _layers_gemma3(fields: _Fields) -> list[str]:
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _layers_alternating(fields, pattern)


def _layers_mimo(fields: _Fields) -> list[str]:
    types = fields.get("layer_types")
    if types is not None:
        return _typed(fields, types)
    pattern = fields.need("hybrid_layer_pattern")
    return ["swa" if slides else "full" for slides in pattern]


def _layers_jamba(fields: _Fields) -> list[str]:
    period, offset = fields.count("attn_layer_period"), fields.need("attn_layer_offset")
    layers = range(fields.count("num_hidden_layers"))
    return ["full" if layer % period == offset else "linear" for layer in layers]


# -- shards --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    """One tensor-parallel rank."""

    tp: int
    rank: int

    def split(self, what: str, count: int) -> tuple[int, int]:
        """[start, stop) of this rank's even share; refuses a remainder."""
        if count % self.tp:
            raise InvalidArgumentError(f"tp={self.tp} does not divide {count} {what}; choose a divisor")
        share = count // self.tp
        return self.rank * share, (self.rank + 1) * share

    def split_or_replicate(self, what: str, count: int) -> tuple[int, int]:
        """As `split`; with more ranks than items each rank holds one, as engines do with KV heads and SSM groups."""
        if count % self.tp == 0:
            return self.split(what, count)
        if self.tp % count:
            raise InvalidArgumentError(f"tp={self.tp} neither divides nor is a multiple of {count} {what}")
        item = self.rank * count // self.tp
        return item, item + 1


@dataclass(frozen=True, slots=True)
class _Dtypes:
    kv: str
    conv: str
    state: str


_Builder = Callable[[_Fields, _Rank, _Dtypes, Convention, tuple[int, ...]], tuple[Segment, ...]]


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


# -- page segments -------------------------------------------------------------------------------------------------


def _heads_segments(
    rank: _Rank, layers: tuple[int, ...], heads: int, k_dim: int, v_dim: int, dtype: str
) -> tuple[Segment, ...]:
    span = rank.split_or_replicate("KV heads", heads)
    shape = _length(span)
    return (
        Segment("key", layers, (shape, k_dim), dtype, "token", shard_axis=0, shard_range=span),
        Segment("value", layers, (shape, v_dim), dtype, "token", shard_axis=0, shard_range=span),
    )


def _head_dim(fields: _Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return hidden // heads


def _kv_heads(fields: _Fields) -> int:
    return fields.count("num_key_value_heads", "num_attention_heads")


def _gqa(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    dim = _head_dim(fields)
    return _heads_segments(rank, layers, _kv_heads(fields), dim, dim, dtypes.kv)


def _mla(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if convention == "transformers":
        return (
            Segment("key", layers, (1, latent), dtypes.kv, "token"),
            Segment("value", layers, (1, rope), dtypes.kv, "token"),
        )
    return (Segment("latent", layers, (latent + rope,), dtypes.kv, "token"),)


def _mimo_full(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    dims = fields.count("head_dim"), fields.count("v_head_dim")
    return _heads_segments(rank, layers, _kv_heads(fields), *dims, dtypes.kv)


def _mimo_window(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    # transformers doubles the heads of window layers; checkpoints spell the number out.
    heads = fields.get("swa_num_key_value_heads", default=2 * _kv_heads(fields))
    dims = fields.count("swa_head_dim", "head_dim"), fields.count("swa_v_head_dim", "v_head_dim")
    return _heads_segments(rank, layers, heads, *dims, dtypes.kv)


def _zamba_attention(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    # The shared block attends over the hidden state beside the embedding: twice the hidden size.
    dim = 2 * fields.count("hidden_size") // fields.count("num_attention_heads")
    return _heads_segments(rank, layers, _kv_heads(fields), dim, dim, dtypes.kv)


# -- slot segments -------------------------------------------------------------------------------------------------


def _conv(
    layers: tuple[int, ...],
    parts: Sequence[tuple[int, int]],
    kernel: int,
    dtype: str,
    convention: Convention,
    name: str = "conv",
) -> Segment:
    """A conv window over this rank's channel ranges, in the order they lie."""
    columns = kernel if convention == "transformers" else kernel - 1
    channels = sum(_length(part) for part in parts)
    return Segment(
        name,
        layers,
        (channels, columns),
        dtype,
        "slot",
        shard_axis=0,
        shard_range=parts[0] if len(parts) == 1 else None,
        shard_parts=tuple(parts) if len(parts) > 1 else (),
    )


def _fused(*spans: tuple[tuple[int, int], int, int]) -> tuple[tuple[int, int], ...]:
    """Channel ranges of fused parts, one after another; each is (range of items here, all items, channels per item)."""
    parts, base = [], 0
    for (start, stop), items, width in spans:
        parts.append((base + start * width, base + stop * width))
        base += items * width
    return tuple(parts)


def _gated_delta(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    k_heads, v_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    k_dim, v_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    keys, values = rank.split("linear key heads", k_heads), rank.split("linear value heads", v_heads)
    parts = _fused((keys, k_heads, k_dim), (keys, k_heads, k_dim), (values, v_heads, v_dim))
    state = (k_dim, v_dim) if convention == "transformers" else (v_dim, k_dim)
    return (
        _conv(layers, parts, fields.count("linear_conv_kernel_dim"), dtypes.conv, convention),
        Segment("temporal", layers, (_length(values), *state), dtypes.state, "slot", shard_axis=0, shard_range=values),
    )


def _kimi_delta(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    nested = _Fields(fields.get("linear_attn_config", default={}), "linear_attn_config")
    heads = nested.get("num_heads") or fields.count("linear_num_heads")
    dim = nested.get("head_dim") or fields.count("linear_head_dim")
    kernel = nested.get("short_conv_kernel_size") or fields.count("linear_conv_kernel_dim")
    span = rank.split("KDA heads", heads)
    channels = (span[0] * dim, span[1] * dim)
    if convention == "transformers":
        fused = _fused((span, heads, dim), (span, heads, dim), (span, heads, dim))
        convs: tuple[Segment, ...] = (_conv(layers, fused, kernel, dtypes.conv, convention),)
    else:
        names = ("conv_q", "conv_k", "conv_v")
        convs = tuple(_conv(layers, (channels,), kernel, dtypes.conv, convention, name) for name in names)
    shape = (_length(span), dim, dim)
    return (*convs, Segment("temporal", layers, shape, dtypes.state, "slot", shard_axis=0, shard_range=span))


def _mamba2_segments(
    rank: _Rank,
    dtypes: _Dtypes,
    convention: Convention,
    layers: tuple[int, ...],
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
) -> tuple[Segment, ...]:
    mine = rank.split("SSM heads", heads)
    # B and C are shared by the heads of a group: with fewer groups than ranks each rank keeps a copy of its group.
    group = rank.split_or_replicate("SSM groups", groups)
    parts = _fused((mine, heads, head_dim), (group, groups, state), (group, groups, state))
    shape = (_length(mine), head_dim, state)
    return (
        _conv(layers, parts, kernel, dtypes.conv, convention),
        Segment("temporal", layers, shape, dtypes.state, "slot", shard_axis=0, shard_range=mine),
    )


def _mamba2(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    dim = fields.get("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if dim is None and fields.model_type == "mamba2":
        dim = fields.count("head_dim")
    if dim is None or dim == "auto":
        inner = fields.get("mamba_d_ssm") or fields.count("mamba_expand", "expand") * fields.count("hidden_size")
        dim = inner // heads
    return _mamba2_segments(
        rank,
        dtypes,
        convention,
        layers,
        heads=heads,
        head_dim=dim,
        groups=fields.count("mamba_n_groups", "mamba_ngroups", "n_groups"),
        state=fields.count("mamba_d_state", "ssm_state_size", "state_size"),
        kernel=fields.count("mamba_d_conv", "conv_kernel"),
    )


def _mamba1(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    span = rank.split("SSM channels", fields.count("mamba_expand") * fields.count("hidden_size"))
    shape = (_length(span), fields.count("mamba_d_state"))
    return (
        _conv(layers, (span,), fields.count("mamba_d_conv"), dtypes.conv, convention),
        Segment("temporal", layers, shape, dtypes.state, "slot", shard_axis=0, shard_range=span),
    )


def _short_conv(
    fields: _Fields, rank: _Rank, dtypes: _Dtypes, convention: Convention, layers: tuple[int, ...]
) -> tuple[Segment, ...]:
    span = rank.split("conv channels", fields.count("hidden_size"))
    return (_conv(layers, (span,), fields.count("conv_L_cache"), dtypes.conv, convention),)


# -- architectures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Architecture:
    layers: Callable[[_Fields], list[str]]
    full: _Builder = _gqa
    window: _Builder = _gqa
    linear: _Builder = _mamba2
    mixer: Mixer = "mamba2"


_DECODER = _Architecture(_layers_decoder)
_QWEN_HYBRID = _Architecture(_layers_interval, linear=_gated_delta, mixer="gated_delta")
_LFM2 = _Architecture(_layers_lfm2, linear=_short_conv, mixer="conv")
_GEMMA3 = _Architecture(_layers_gemma3)
_MLA_DECODER = _Architecture(lambda fields: _every(fields, "full"), full=_mla)

_ARCHITECTURES: dict[str, _Architecture] = {
    "bamba": _Architecture(_layers_bamba),
    "deepseek_v2": _MLA_DECODER,
    "deepseek_v3": _MLA_DECODER,
    "falcon_h1": _Architecture(lambda fields: _every(fields, "full+linear")),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _Architecture(lambda fields: _layers_alternating(fields, 2)),
    "granitemoehybrid": _Architecture(lambda fields: _listed(fields, "layers_block_type")),
    "jamba": _Architecture(_layers_jamba, linear=_mamba1, mixer="mamba1"),
    "kimi_k2": _MLA_DECODER,
    "kimi_linear": _Architecture(_layers_kimi, full=_mla, linear=_kimi_delta, mixer="kimi_delta"),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": _DECODER,
    "mamba2": _Architecture(lambda fields: _every(fields, "linear")),
    "mimo_v2_flash": _Architecture(_layers_mimo, full=_mimo_full, window=_mimo_window),
    "nemotron_h": _Architecture(_layers_nemotron),
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_moe": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_moe": _DECODER,
    "qwen3_next": _QWEN_HYBRID,
    "zamba2": _Architecture(lambda fields: _listed(fields, "layers_block_type"), full=_zamba_attention),
}

SUPPORTED_MODELS: tuple[str, ...] = tuple(_ARCHITECTURES)


def _interval(layers: int, interval: int) -> list[int]:
    """Layers counted from 1: every `interval`-th, and the last."""
    return sorted({*range(interval, layers + 1, interval), layers})


def _qwen_hybrid(
    model_type: str, layers: int, hidden: int, *, heads: int, kv_heads: int, value_heads: int
) -> dict[str, Any]:
    """The fields by which the sizes of Qwen3.5 and 3.6 differ, and those they share."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "kimi-k3": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 93,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": _interval(93, 4),
        },
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": _interval(27, 4),
        },
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
    "qwen3.5-35b-a3b": _qwen_hybrid("qwen3_5_moe", 40, 2048, heads=16, kv_heads=2, value_heads=32),
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "gemma3-27b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 48,
        "hybrid_layer_pattern": [int(layer != 0 and (layer + 1) % 6 != 0) for layer in range(48)],
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "qwen3.5-9b": _qwen_hybrid("qwen3_5", 32, 4096, heads=16, kv_heads=4, value_heads=32),
    "qwen3.5-27b": _qwen_hybrid("qwen3_5", 64, 5120, heads=24, kv_heads=4, value_heads=48),
    "qwen3.5-122b-a10b": _qwen_hybrid("qwen3_5_moe", 48, 3072, heads=32, kv_heads=2, value_heads=64),
    "qwen3.5-397b-a17b": _qwen_hybrid("qwen3_5_moe", 60, 4096, heads=32, kv_heads=2, value_heads=64),
    "qwen3.6-27b": _qwen_hybrid("qwen3_5", 64, 5120, heads=24, kv_heads=4, value_heads=48),
    "qwen3.6-35b-a3b": _qwen_hybrid("qwen3_5_moe", 40, 2048, heads=16, kv_heads=2, value_heads=32),
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "nemotron-3-nano-30b": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 44,
        "hidden_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
}

# -- the spec ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What one rank of a model keeps: its kinds, before page sizes and strides are chosen.

    Args:
        name: model type, or preset.
        num_layers: layers of the whole model.
        kinds: "full", "swa", "state", those that the model has; page kinds with page_size 1.
        window: sliding window in tokens, the token itself included; 0 without window layers.
        tp, rank: tensor-parallel degree and rank.
        convention: "engine" or "transformers".
        mixer: what the state layers run; "" without state layers.

    >>> spec = ModelSpec.preset("kimi-k3", tp=8, state_dtype="bfloat16")
    >>> spec.bytes_per_token("full"), spec.bytes_per_slot()
    (27648, 29039616)
    """

    name: str
    num_layers: int
    kinds: tuple[Kind, ...]
    window: int = 0
    tp: int = 1
    rank: int = 0
    convention: Convention = "engine"
    mixer: Mixer = ""

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        tp: int = 1,
        rank: int = 0,
        kv_dtype: str | None = None,
        conv_dtype: str | None = None,
        state_dtype: str | None = None,
        convention: Convention = "engine",
        name: str | None = None,
    ) -> ModelSpec:
        """Read a model's config.

        Args:
            config: a dict, a `config.json` or the folder that holds it, or a transformers config object. A nested
                `text_config` is used.
            tp, rank: tensor-parallel degree and rank. KV heads and SSM groups fewer than ranks are replicated, MLA
                rows always; state heads must divide.
            kv_dtype: default: the config's dtype, else bfloat16.
            conv_dtype: default: as the config's dtype, else bfloat16.
            state_dtype: default: what the config asks for (`mamba_ssm_cache_dtype`, `mamba_ssm_dtype`), else float32;
                always float32 under the transformers convention, which keeps no other.
            convention: "engine" or "transformers".
            name: how to call it; the model type by default.

        Raises:
            ConfigFieldError: a needed field is missing or malformed; names it.
            UnsupportedModelError: unknown architecture or layer type.
            InvalidArgumentError: unreadable path, unknown dtype or convention, rank outside tp, heads that tp does
                not divide.
        """
        fields = _open(config)
        architecture = _ARCHITECTURES.get(fields.model_type)
        if architecture is None:
            raise UnsupportedModelError(
                f"architecture {fields.model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODELS)}"
            )
        if convention not in ("engine", "transformers"):
            raise InvalidArgumentError(f"convention {convention!r}; choose 'engine' or 'transformers'")
        if tp < 1 or not 0 <= rank < tp:
            raise InvalidArgumentError(f"rank {rank} of tp {tp}; need tp >= 1 and 0 <= rank < tp")
        dtypes = _dtypes(fields, kv_dtype, conv_dtype, state_dtype, convention)
        types = architecture.layers(fields)
        share = _Rank(tp, rank)
        kinds = []
        window = 0
        for kind_name, part, build in (
            ("full", "full", architecture.full),
            ("swa", "swa", architecture.window),
            ("state", "linear", architecture.linear),
        ):
            layers = tuple(layer for layer, kind in enumerate(types) if part in kind.split("+"))
            if not layers:
                continue
            segments = build(fields, share, dtypes, convention, layers)
            kinds.append(Kind(kind_name, segments, page_size=0 if kind_name == "state" else 1))
            if kind_name == "swa":
                window = _window(fields)
        if not kinds:
            raise UnsupportedModelError(f"{fields.model_type!r} has no layer that keeps a cache")
        mixer: Mixer = architecture.mixer if kinds[-1].name == "state" else ""
        return cls(name or fields.model_type, len(types), tuple(kinds), window, tp, rank, convention, mixer)

    @classmethod
    def preset(cls, name: str, **options: Any) -> ModelSpec:
        """Make the spec of a well-known model; `options` as for `from_config`.

        Raises:
            UnsupportedModelError: no such preset.
        """
        if name not in PRESETS:
            raise UnsupportedModelError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls.from_config(PRESETS[name], name=name, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kinds."""
        return tuple(kind.name for kind in self.kinds)

    def kind(self, name: str) -> Kind:
        """Return a kind by name.

        Raises:
            InvalidArgumentError: the model has no such kind.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        raise InvalidArgumentError(f"{self.name!r} has no kind {name!r}; it has {', '.join(self.names)}")

    def layers(self, name: str) -> tuple[int, ...]:
        """Return the model layers of a kind; empty when the model has no such kind."""
        return self.kind(name).layers if name in self.names else ()

    def bytes_per_token(self, name: str = "full") -> int:
        """Return the bare bytes of one token in a page kind on this rank; 0 when the model has no such kind."""
        return self.kind(name).bytes_per_token if name in self.names else 0

    def bytes_per_slot(self, name: str = "state", *, segments: Iterable[str] | None = None) -> int:
        """Return the bare bytes of one state slot on this rank (of the named segments); 0 without states."""
        if name not in self.names:
            return 0
        wanted = None if segments is None else set(segments)
        found = [s for s in self.kind(name).segments if wanted is None or s.name in wanted]
        return sum(segment.total_bytes for segment in found)

    @property
    def conv_names(self) -> tuple[str, ...]:
        """Names of the conv segments of a slot, in the order of a layer's states."""
        if "state" not in self.names:
            return ()
        return tuple(s.name for s in self.kind("state").segments if s.name.startswith("conv") and not s.transient)

    def with_segments(self, name: str, segments: Iterable[Segment]) -> ModelSpec:
        """Return a spec whose kind `name` has more segments at its end (scales, side states, scratch)."""
        grown = replace(self.kind(name), segments=(*self.kind(name).segments, *segments))
        return replace(self, kinds=tuple(grown if kind.name == name else kind for kind in self.kinds))

    def intermediate_windows(self, draft_tokens: int) -> tuple[Segment, ...]:
        """Return transient segments with one conv window per draft step, for speculative verification.

        Raises:
            InvalidArgumentError: draft_tokens below 1, or a model without states.
        """
        if draft_tokens < 1:
            raise InvalidArgumentError(f"draft_tokens is {draft_tokens}; it must be at least 1")
        state = self.kind("state")
        convs = [state.segment(name) for name in self.conv_names]
        return tuple(
            replace(
                conv,
                name=f"intermediate_{conv.name}",
                shape=(draft_tokens, *conv.shape),
                shard_axis=None if conv.shard_axis is None else conv.shard_axis + 1,
                transient=True,
            )
            for conv in convs
        )

    def replay_rings(self, length: int, *, draft_tokens: int = 1) -> tuple[Segment, ...]:
        """Return the transient ReplaySSM rings of a delta-rule model: d, k, rawv, rawk, g, beta, each `[length, ...]`.

        d, k, rawv and rawk are bfloat16; g (one gate per head, Kimi: one per key channel) and beta float32.

        Args:
            length: steps kept: a power of two, at least twice `draft_tokens`.
            draft_tokens: tokens verified at once.

        Raises:
            InvalidArgumentError: a bad length, or a model whose states are no delta-rule matrices.
        """
        if length < 1 or length & (length - 1) or length < 2 * draft_tokens:
            raise InvalidArgumentError(
                f"ring length {length} must be a power of two and at least twice the {draft_tokens} draft tokens"
            )
        if self.mixer not in ("gated_delta", "kimi_delta"):
            raise InvalidArgumentError(f"{self.name!r} has no delta-rule states; replay rings are for GDN and KDA")
        temporal = self.kind("state").segment("temporal")
        heads, rows, columns = temporal.shape
        v_dim, k_dim = (columns, rows) if self.convention == "transformers" else (rows, columns)
        key_heads = heads
        gate: tuple[int, ...] = (heads, k_dim)
        if self.mixer == "gated_delta":
            channels = self.kind("state").segment("conv").shape[0]
            key_heads, gate = (channels - heads * v_dim) // (2 * k_dim), (heads,)
        shapes: tuple[tuple[str, tuple[int, ...], str], ...] = (
            ("d", (heads, v_dim), "bfloat16"),
            ("k", (key_heads, k_dim), "bfloat16"),
            ("rawv", (heads, v_dim), "bfloat16"),
            ("rawk", (key_heads, k_dim), "bfloat16"),
            ("g", gate, "float32"),
            ("beta", (heads,), "float32"),
        )
        return tuple(
            Segment(f"replay_{name}", temporal.layers, (length, *shape), dtype, "slot", shard_axis=1, transient=True)
            for name, shape, dtype in shapes
        )

    def layout(
        self,
        page_size: int | Sequence[int] | Mapping[str, int | Sequence[int] | None] | None = None,
        *,
        order: Order = "page",
        format: Format = "NHD",
        state_order: Order = "grouped",
        ends: Mapping[str, End] | None = None,
        zero: Mapping[str, Zero] | None = None,
        null_cell: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> Layout:
        """Choose page sizes and strides.

        Args:
            page_size: tokens per page; a list of candidates, or None for 16 to 256 (window pages: at most an eighth of
                the window), takes the sizes with the least weighted padding; a mapping says it per page kind.
            order, format: of the page kinds (see `layout`).
            state_order: "grouped" or "layered".
            ends, zero: per kind, instead of the defaults of `Kind`.
            null_cell, weights: as in `Layout.build`.

        Raises:
            InvalidArgumentError: an unknown kind, size, order, format or end.
        """
        pages = [kind.name for kind in self.kinds if kind.page_size]
        asked = page_size if isinstance(page_size, Mapping) else dict.fromkeys(pages, page_size)
        for name in (*asked, *(ends or {}), *(zero or {})):
            self.kind(name)
        fixed: dict[str, int] = {}
        choices: dict[str, Sequence[int]] = {}
        for name in pages:
            size = asked.get(name)
            if isinstance(size, int):
                if size < 1:
                    raise InvalidArgumentError(f"page_size of {name!r} is {size}; it must be at least 1")
                fixed[name] = size
            elif size is None:
                choices[name] = self._default_page_sizes(name)
            elif isinstance(size, Sequence):
                choices[name] = tuple(size)
            else:
                raise InvalidArgumentError(
                    f"page_size of {name!r} is {size!r}; give an integer, a list of them, or None"
                )
        kinds = [
            replace(
                kind,
                page_size=fixed.get(kind.name, kind.page_size),
                order=order if kind.page_size else state_order,
                format=format if kind.page_size else "NHD",
                end=(ends or {}).get(kind.name, kind.end),
                zero=(zero or {}).get(kind.name, kind.zero),
            )
            for kind in self.kinds
        ]
        return Layout.build(kinds, null_cell=null_cell, page_sizes=choices, weights=weights)

    def _default_page_sizes(self, name: str) -> tuple[int, ...]:
        """Sizes to choose from. A window page above an eighth of the window would waste more than padding saves."""
        if name != "swa":
            return DEFAULT_PAGE_SIZES
        return tuple(size for size in DEFAULT_PAGE_SIZES if 8 * size <= self.window) or DEFAULT_PAGE_SIZES[:1]

    def __repr__(self) -> str:
        parts = [
            f"{kind.name}: {len(kind.layers)} layers, {kind.bare_bytes:,} B/{'token' if kind.page_size else 'slot'}"
            for kind in self.kinds
        ]
        return f"ModelSpec({self.name}, tp={self.tp}, {self.convention}; {'; '.join(parts)})"


def _open(config: object) -> _Fields:
    """Accept a path, a dict or a config object; step into `text_config`."""
    if isinstance(config, str | os.PathLike):
        config = _read_json(Path(config))
    outer = _Fields(config, "config")
    model_type = outer.need("model_type")
    nested = outer.get("text_config")
    if nested is not None:
        inner = _Fields(nested, str(model_type))
        return _Fields(nested, str(inner.get("model_type", default=model_type)))
    return _Fields(config, str(model_type))


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read config {str(path)!r}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"config {str(path)!r} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidArgumentError(f"config {str(path)!r} holds a {type(data).__name__}; it must be a JSON object")
    return data


def _dtype_name(what: str, value: object) -> str:
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"{what} is {name!r}; choose one of {', '.join(DTYPE_BYTES)}")
    return name


def _dtypes(fields: _Fields, kv: str | None, conv: str | None, state: str | None, convention: Convention) -> _Dtypes:
    model = _dtype_name("the config's dtype", fields.get("dtype", "torch_dtype", default="bfloat16"))
    asked = fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32")
    if convention == "transformers":
        asked = "float32"
        if state is not None and _dtype_name("state_dtype", state) != "float32":
            raise InvalidArgumentError(f"state_dtype {state!r}: transformers keeps recurrent states in float32 only")
    return _Dtypes(
        _dtype_name("kv_dtype", kv or model),
        _dtype_name("conv_dtype", conv or model),
        _dtype_name("state_dtype", state or asked),
    )


def _window(fields: _Fields) -> int:
    """Window in tokens, the token itself included."""
    if fields.model_type == "mimo_v2_flash" and fields.get("sliding_window_size") is not None:
        return fields.count("sliding_window_size") + 1
    return fields.count("sliding_window", "attention_chunk_size")
