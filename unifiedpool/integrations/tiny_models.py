"""Tiny, randomly initialised models of every hybrid architecture.

Each has a few layers that cover every layer type of its architecture, hidden size 32 to 64, a vocabulary of 512 and a
fixed seed: enough to check a cache, never enough to say anything. `make demo` and the tests run on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

from unifiedpool.errors import InvalidArgumentError, UnsupportedModelError

__all__ = ["NAMES", "VOCAB_SIZE", "build", "config"]

VOCAB_SIZE = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
# The default .02 leaves a tiny model's logits nearly flat; this spreads them, so that a wrong cache shows.
_SPREAD = {"initializer_range": 0.2}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_GATED_DELTA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "intermediate_size": 96,
}
_MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GQA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **_COMMON,
        **_SPREAD,
        **_GATED_DELTA,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def _qwen3_5() -> Any:
    return transformers.Qwen3_5TextConfig(**_COMMON, **_SPREAD, **_GATED_DELTA)


def _kimi_linear() -> Any:
    return transformers.KimiLinearConfig(
        **_COMMON,
        **_SPREAD,
        **_MLA,
        hidden_size=64,
        num_hidden_layers=4,
        num_local_experts=4,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    )


def _nemotron_h() -> Any:
    return transformers.NemotronHConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        head_dim=16,
        intermediate_size=96,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )


def _bamba() -> Any:
    return transformers.BambaConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        **_MAMBA2,
        **_ROPE,
        hidden_size=64,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        intermediate_size=96,
    )


def _falcon_h1() -> Any:
    return transformers.FalconH1Config(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        **_MAMBA2,
        hidden_size=64,
        num_hidden_layers=3,
        mamba_d_ssm=128,
        intermediate_size=96,
    )


def _lfm2() -> Any:
    return transformers.Lfm2Config(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        intermediate_size=96,
        block_auto_adjust_ff_dim=False,
    )


def _gemma3() -> Any:
    return transformers.Gemma3TextConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=96,
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )


def _deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(
        **_COMMON,
        **_SPREAD,
        **_MLA,
        hidden_size=64,
        num_hidden_layers=3,
        q_lora_rank=32,
        n_routed_experts=4,
        first_k_dense_replace=1,
    )


def _jamba() -> Any:
    return transformers.JambaConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=96,
        num_experts=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=8,
    )


def _granitemoehybrid() -> Any:
    return transformers.GraniteMoeHybridConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        **_MAMBA2,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        intermediate_size=32,
        shared_intermediate_size=32,
        num_local_experts=4,
        position_embedding_type="rope",
    )


def _zamba2() -> Any:
    return transformers.Zamba2Config(
        **_COMMON,
        **_SPREAD,
        num_attention_heads=4,
        hidden_size=64,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        intermediate_size=96,
        mamba_d_state=16,
        mamba_expand=2,
        n_mamba_heads=8,
        chunk_size=16,
        adapter_rank=8,
    )


def _mimo_v2_flash() -> Any:
    return transformers.MiMoV2FlashConfig(
        **_COMMON,
        **_SPREAD,
        **_GQA,
        hidden_size=64,
        num_hidden_layers=4,
        intermediate_size=96,
        head_dim=24,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=25,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    )


_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "jamba": _jamba,
    "granitemoehybrid": _granitemoehybrid,
    "zamba2": _zamba2,
    "mimo_v2_flash": _mimo_v2_flash,
}

NAMES: tuple[str, ...] = tuple(_CONFIGS)


def config(name: str) -> Any:
    """Make the tiny configuration of an architecture.

    Args:
        name: One of `NAMES`.

    Returns:
        A fresh transformers configuration (text part only).

    Raises:
        UnsupportedModelError: `name` is not in `NAMES`.
    """
    if name not in _CONFIGS:
        raise UnsupportedModelError(f"no tiny model named {name!r}; there are {', '.join(NAMES)}")
    return _CONFIGS[name]()


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a tiny model with fixed random weights, in evaluation mode. Cached: callers share one model.

    The global random state is left as it was. No end-of-sequence token is set, so that generation runs to its length.

    Args:
        name: One of `NAMES`.
        dtype: `torch.float32`, `torch.bfloat16` or `torch.float16`.

    Returns:
        A transformers causal language model on the CPU.

    Raises:
        UnsupportedModelError: `name` is not in `NAMES`.
        InvalidArgumentError: `dtype` is not one of the three.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidArgumentError(f"no tiny models in {dtype}; use torch.float32, torch.bfloat16 or torch.float16")
    tiny = config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240607)
        model = transformers.AutoModelForCausalLM.from_config(tiny, dtype=dtype)
        _randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _randomise(model: Any) -> None:
    """Give norms, biases and gates values off their initial zeros and ones: a model whose gates are all alike would
    not notice a swapped head or a lost state."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.1)
