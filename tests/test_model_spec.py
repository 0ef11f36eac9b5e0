"""ModelSpec: the bytes of known models, every architecture against transformers, shards, bad configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unifiedpool.errors import ConfigFieldError, InvalidArgumentError, UnsupportedModelError
from unifiedpool.layout import Layout, Segment
from unifiedpool.model_spec import PRESETS, SUPPORTED_MODELS, ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning")

GIB = 1 << 30
MIB = 1 << 20


def kimi_k3(**options: Any) -> ModelSpec:
    return ModelSpec.preset("kimi-k3", **{"tp": 8, "state_dtype": "bfloat16", **options})


# -- the numbers of the design ---------------------------------------------------------------------------------------


def test_kimi_k3_layers_are_69_delta_and_24_attention() -> None:
    spec = kimi_k3()
    assert spec.num_layers == 93
    assert (len(spec.layers("state")), len(spec.layers("full"))) == (69, 24)
    assert not set(spec.layers("state")) & set(spec.layers("full"))


def test_kimi_k3_kv_bytes_per_token() -> None:
    assert kimi_k3().bytes_per_token() == 27_648
    assert kimi_k3(kv_dtype="float8_e4m3fn").bytes_per_token() == 13_824
    assert kimi_k3(kv_dtype="float8_e5m2").bytes_per_token() == 13_824
    assert kimi_k3(tp=1).bytes_per_token() == 27_648  # MLA rows are replicated


def test_kimi_k3_state_bytes_per_gpu_at_tp8() -> None:
    bf16, fp32 = kimi_k3(), kimi_k3(state_dtype="float32")
    assert bf16.kind("state").segment("temporal").shape == (12, 128, 128)
    assert bf16.bytes_per_slot(segments=["temporal"]) == 27_131_904
    assert fp32.bytes_per_slot(segments=["temporal"]) == 2 * 27_131_904
    assert bf16.bytes_per_slot(segments=bf16.conv_names) == 1_907_712
    assert fp32.bytes_per_slot(segments=fp32.conv_names) == 1_907_712
    assert round(27_131_904 / MIB, 1) == 25.9 and round(1_907_712 / MIB, 2) == 1.82
    assert round(sum(kimi_k3(rank=rank).bytes_per_slot() for rank in range(8)) / MIB, 1) == 221.6
    assert 8 * bf16.bytes_per_slot() == kimi_k3(tp=1).bytes_per_slot()


@pytest.mark.parametrize(
    ("dtype", "slots", "conv", "temporal"),
    [("bfloat16", 119, 0.21, 3.03), ("bfloat16", 80, 0.14, 2.05), ("float32", 51, 0.09, 2.63)],
)
def test_kimi_k3_static_slot_pools(dtype: str, slots: int, conv: float, temporal: float) -> None:
    spec = kimi_k3(state_dtype=dtype)
    rows = slots + 1  # one padding slot
    assert round(rows * spec.bytes_per_slot(segments=spec.conv_names) / GIB, 2) == conv
    assert round(rows * spec.bytes_per_slot(segments=["temporal"]) / GIB, 2) == temporal


def test_kimi_k3_intermediate_windows_of_8_draft_tokens_and_23_requests() -> None:
    windows = kimi_k3().intermediate_windows(8)
    assert all(window.transient for window in windows)
    assert windows[0].shape == (8, 12 * 128, 3) and windows[0].shard_axis == 1
    assert round((23 + 1) * sum(window.total_bytes for window in windows) / GIB, 2) == 0.34


@pytest.mark.parametrize(("slots", "wide", "gate", "beta"), [(120, 0.379, 0.758, 0.006), (52, 0.164, 0.328, 0.003)])
def test_kimi_k3_replay_rings(slots: int, wide: float, gate: float, beta: float) -> None:
    rings = {ring.name.removeprefix("replay_"): ring for ring in kimi_k3().replay_rings(16, draft_tokens=8)}
    size = {name: round(slots * ring.total_bytes / GIB, 3) for name, ring in rings.items()}
    assert size == {"d": wide, "k": wide, "rawv": wide, "rawk": wide, "g": gate, "beta": beta}
    assert all(ring.transient for ring in rings.values())
    assert (rings["g"].dtype, rings["beta"].dtype, rings["d"].dtype) == ("float32", "float32", "bfloat16")


def test_replay_rings_of_gated_delta_have_one_gate_per_head() -> None:
    spec = ModelSpec.preset("qwen3-next-80b", tp=2)
    rings = {ring.name: ring.shape for ring in spec.replay_rings(8, draft_tokens=4)}
    assert rings["replay_g"] == (8, 16)
    assert rings["replay_d"] == rings["replay_rawv"] == (8, 16, 128)
    assert rings["replay_k"] == rings["replay_rawk"] == (8, 8, 128)
    other = ModelSpec.preset("qwen3-next-80b", tp=2, convention="transformers")
    assert {ring.name: ring.shape for ring in other.replay_rings(8, draft_tokens=4)} == rings


@pytest.mark.parametrize(("length", "drafts"), [(12, 4), (8, 5), (0, 1), (-8, 1)])
def test_replay_rings_bad_length_is_refused(length: int, drafts: int) -> None:
    with pytest.raises(InvalidArgumentError, match="power of two"):
        kimi_k3().replay_rings(length, draft_tokens=drafts)


def test_replay_rings_without_delta_states_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no delta-rule states"):
        ModelSpec.from_config(CONFIGS["bamba"]).replay_rings(8)
    with pytest.raises(InvalidArgumentError, match="no kind 'state'"):
        ModelSpec.preset("deepseek-v3").intermediate_windows(4)


def test_kimi_k3_token_capacities_of_the_source_document() -> None:
    assert round(974_656 * kimi_k3().bytes_per_token() / GIB, 2) == 25.10
    assert round(1_947_648 * kimi_k3(kv_dtype="float8_e4m3fn").bytes_per_token() / GIB, 2) == 25.08
    assert 80 // 5 == 16  # slots of a static pool over slots per request


def test_qwen3_next_state_is_73_7_mib_or_74_25_in_transformers() -> None:
    assert round(ModelSpec.preset("qwen3-next-80b").bytes_per_slot() / MIB, 1) == 73.7
    assert ModelSpec.preset("qwen3-next-80b", convention="transformers").bytes_per_slot() / MIB == 74.25
    assert 512 * ModelSpec.preset("qwen3-next-80b").bytes_per_token() == 12 * MIB


def test_kimi_linear_state_is_41_mib() -> None:
    spec = ModelSpec.preset("kimi-linear-48b")
    assert round(spec.bytes_per_slot() / MIB) == 41
    assert round(512 * spec.bytes_per_token() / MIB) == 4
    assert (len(spec.layers("state")), len(spec.layers("full"))) == (20, 7)


@pytest.mark.parametrize(
    ("preset", "options", "page_size", "limit"),
    [
        ("qwen3-next-80b", {}, 16, 0.003),
        ("kimi-linear-48b", {}, 16, 0.003),
        ("kimi-k3", {"tp": 8, "state_dtype": "bfloat16"}, 16, 0.0055),
        ("kimi-k3", {"tp": 8, "state_dtype": "bfloat16"}, 64, 0.026),
        ("kimi-k3", {"tp": 8, "state_dtype": "float32"}, 64, 0.0081),
        ("gemma3-27b", {}, None, 0.015),
        ("mimo-v2-flash", {}, None, 0.04),
    ],
)
def test_layout_padding_of_known_models(
    preset: str, options: dict[str, Any], page_size: int | None, limit: float
) -> None:
    layout = ModelSpec.preset(preset, **options).layout(page_size)
    assert max(layout.padding.values()) <= limit


def test_layout_kimi_k3_64_token_pages_pad_the_page_or_the_state() -> None:
    spec = kimi_k3()
    assert spec.layout(64).padding == {"state": pytest.approx(0.0, abs=1e-4), "full": pytest.approx(0.0258, abs=1e-4)}
    page_dear = spec.layout(64, weights={"full": 100.0, "state": 1.0})
    assert page_dear.padding == {"state": pytest.approx(0.0359, abs=1e-4), "full": 0.0}


# -- every architecture ----------------------------------------------------------------------------------------------

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GATED: dict[str, Any] = {
    **_BASE,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "full_attention_interval": 3,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
}
_SHORT_CONV: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}
_LATENT: dict[str, Any] = {"num_hidden_layers": 3, "kv_lora_rank": 32, "qk_rope_head_dim": 8}

# Checkpoint-style configs: every field here is needed, and nothing else.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "kimi_linear": {
        **_LATENT,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "bamba": {**_BASE, **_MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*EM",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "falcon_h1": {**_BASE, **_MAMBA},
    "lfm2": _SHORT_CONV,
    "lfm2_moe": _SHORT_CONV,
    "gemma3_text": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "gpt_oss": {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "deepseek_v3": _LATENT,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1],
        "num_key_value_heads": 2,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 9,
    },
    "jamba": {
        **_BASE,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_expand": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "zamba2": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 8,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
    },
    "mamba2": {
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 8,
        "conv_kernel": 4,
    },
    "qwen3": {**_BASE, "head_dim": 16},
    "llama": _BASE,
}
CONFIGS = {name: {"model_type": name, **config} for name, config in CONFIGS.items()}

WINDOW_MODELS = {"gemma3_text", "gpt_oss", "mimo_v2_flash"}
NO_STATES = {*WINDOW_MODELS, "deepseek_v3", "qwen3", "llama"}


@pytest.mark.parametrize("name", CONFIGS)
def test_from_config_every_architecture_has_its_kinds(name: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[name])
    assert ("swa" in spec.names) == (name in WINDOW_MODELS) == (spec.window > 0)
    assert ("state" in spec.names) == (name not in NO_STATES) == (spec.mixer != "")
    assert ("full" in spec.names) == (name != "mamba2")
    layout = spec.layout(16)
    for kind in layout.kinds:
        for segment in kind.segments:
            for layer in segment.layers:
                assert 0 <= layer < spec.num_layers
                layout.view_spec(kind.name, layer, segment.name)


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, config in CONFIGS.items() for field in config if field != "model_type"]
)
def test_from_config_missing_field_is_named(name: str, field: str) -> None:
    # Heads that equal the query heads and a head size that follows from the hidden size may be left out.
    derived = {"num_key_value_heads", "head_dim", "mamba_d_head", "num_attention_heads", "hidden_size"}
    config = {key: value for key, value in CONFIGS[name].items() if key != field}
    if field in derived and {"num_attention_heads", "hidden_size"} & CONFIGS[name].keys():
        return
    with pytest.raises(ConfigFieldError, match=repr(name)) as caught:
        ModelSpec.from_config(config)
    # Where a field could be derived from another, that one is named.
    others = {"head_dim": "hidden_size", "mamba_head_dim": "mamba_expand"}
    assert field in str(caught.value) or others[field] in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 2.5, "four", True])
def test_from_config_malformed_field_is_named(value: object) -> None:
    with pytest.raises(ConfigFieldError, match="num_key_value_heads"):
        ModelSpec.from_config({**CONFIGS["llama"], "num_key_value_heads": value})


def segments_of_cache(cache: Any) -> dict[tuple[int, str], tuple[str, tuple[int, ...], str]]:
    """(layer, segment) -> kind, shape without batch and tokens, dtype; from what transformers holds."""
    found: dict[tuple[int, str], tuple[str, tuple[int, ...], str]] = {}
    for layer, held in enumerate(cache.layers):
        pages = "swa" if "Sliding" in type(held).__name__ else "full"
        for name, tensor in (("key", getattr(held, "keys", None)), ("value", getattr(held, "values", None))):
            if tensor is not None:
                found[layer, name] = (pages, (tensor.shape[1], tensor.shape[3]), str(tensor.dtype)[6:])
        for name, states in (
            ("conv", getattr(held, "conv_states", {})),
            ("temporal", getattr(held, "recurrent_states", {})),
        ):
            for tensor in states.values():
                if tensor is not None:
                    found[layer, name] = ("state", tuple(tensor.shape[1:]), str(tensor.dtype)[6:])
    return found


def segments_of_spec(spec: ModelSpec) -> dict[tuple[int, str], tuple[str, tuple[int, ...], str]]:
    return {
        (layer, segment.name): (kind.name, segment.shape, segment.dtype)
        for kind in spec.kinds
        for segment in kind.segments
        for layer in segment.layers
    }


EXTRA_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **{key: value for key, value in _GATED.items() if key not in ("num_hidden_layers", "full_attention_interval")},
    },
    "lfm2_moe": {
        **_BASE,
        "layer_types": ["conv", "full_attention", "conv"],
        "intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "qwen3": {**_BASE, "head_dim": 16, "intermediate_size": 64},
    "llama": {**_BASE, "intermediate_size": 64},
}


def tiny_model(name: str, dtype: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if name not in EXTRA_MODELS:
        from unifiedpool.integrations import tiny_models

        return tiny_models.build(name, dtype)
    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(name, **ids, **EXTRA_MODELS[name])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


TRANSFORMERS_MODELS = (
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "lfm2",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "jamba",
    "granitemoehybrid",
    "zamba2",
    "mimo_v2_flash",
    *EXTRA_MODELS,
)


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
def test_transformers_convention_is_what_dynamic_cache_holds(name: str, dtype_name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = tiny_model(name, getattr(torch, dtype_name))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(3, 15)[None], cache=cache, position_ids=torch.arange(12)[None])
    held = segments_of_cache(cache)
    spec = ModelSpec.from_config(model.config, convention="transformers")
    assert segments_of_spec(spec) == held
    model.config.save_pretrained(tmp_path)
    assert ModelSpec.from_config(tmp_path, convention="transformers") == spec
    assert ModelSpec.from_config(tmp_path / "config.json", convention="transformers") == spec
    assert ModelSpec.from_config(model.config.to_dict(), convention="transformers") == spec
    # The engine's convention keeps the same layers; only shapes differ.
    engine = ModelSpec.from_config(model.config)
    assert {kind.name: kind.layers for kind in engine.kinds} == {kind.name: kind.layers for kind in spec.kinds}


# -- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["engine", "transformers"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_all_ranks_cover_the_whole_model(name: str, tp: int, convention: str) -> None:
    config = CONFIGS[name]
    if tp > 4 and name in {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"}:
        config = {**config, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
        config["linear_attn_config"] = {**config.get("linear_attn_config", {}), "num_heads": 8}
    elif tp > 2 and "linear_num_key_heads" in config:
        config = {**config, "linear_num_key_heads": 4}
    whole = ModelSpec.from_config(config, convention=convention)  # type: ignore[arg-type]
    ranks = [ModelSpec.from_config(config, convention=convention, tp=tp, rank=rank) for rank in range(tp)]  # type: ignore[arg-type]
    for kind in whole.kinds:
        for position, full in enumerate(kind.segments):
            mine = [spec.kind(kind.name).segments[position] for spec in ranks]
            if full.shard_axis is None:
                assert all(segment == full for segment in mine)
                continue
            covered: set[int] = set()
            for segment in mine:
                parts = segment.shard_parts or (segment.shard_range,)
                assert all(part is not None for part in parts)
                held = [item for start, stop in parts for item in range(start, stop)]  # type: ignore[misc]
                assert len(held) == segment.shape[full.shard_axis]
                covered.update(held)
            assert covered == set(range(full.shape[full.shard_axis]))


def test_shards_kv_heads_replicate_when_ranks_outnumber_them() -> None:
    spans = [
        ModelSpec.preset("qwen3-next-80b", tp=8, rank=rank).kind("full").segment("key").shard_range for rank in range(8)
    ]
    assert spans == [(0, 1)] * 4 + [(1, 2)] * 4
    assert ModelSpec.preset("qwen3-next-80b", tp=8).bytes_per_token() == 12_288


def test_shards_mamba_groups_replicate_when_ranks_outnumber_them() -> None:
    config = {**CONFIGS["bamba"], "mamba_n_groups": 1}
    conv = ModelSpec.from_config(config, tp=4, rank=3).kind("state").segment("conv")
    assert conv.shape == (2 * 16 + 8 + 8, 3)
    assert conv.shard_parts == ((96, 128), (128, 136), (136, 144))


def test_shards_fused_conv_channels_name_their_parts() -> None:
    conv = ModelSpec.preset("qwen3-next-80b", tp=4, rank=1).kind("state").segment("conv")
    assert conv.shard_range is None
    assert conv.shard_parts == ((512, 1024), (2560, 3072), (5120, 6144))
    assert conv.shape[0] == 512 + 512 + 1024


@pytest.mark.parametrize(
    ("preset", "tp", "message"),
    [
        ("kimi-k3", 5, "tp=5 does not divide 96 KDA heads"),
        ("qwen3-next-80b", 3, "tp=3 neither divides nor is a multiple of 2 KV heads"),
        ("qwen3-next-80b", 32, "tp=32 does not divide 16 linear key heads"),
    ],
)
def test_shards_that_do_not_divide_are_refused(preset: str, tp: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ModelSpec.preset(preset, tp=tp)


# -- configs as they come --------------------------------------------------------------------------------------------


def test_from_config_nested_text_config_is_used() -> None:
    nested = {"model_type": "gemma3", "text_config": CONFIGS["gemma3_text"], "vision_config": {}}
    plain = ModelSpec.from_config(CONFIGS["gemma3_text"])
    assert ModelSpec.from_config(nested) == plain
    untyped = {key: value for key, value in CONFIGS["gemma3_text"].items() if key != "model_type"}
    assert ModelSpec.from_config({"model_type": "gemma3", "text_config": untyped}).kinds == plain.kinds


def test_from_config_three_kinds_at_once() -> None:
    config = {
        **CONFIGS["qwen3_next"],
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 128,
    }
    spec = ModelSpec.from_config(config)
    assert spec.names == ("full", "swa", "state") and spec.window == 128
    layout = spec.layout({"full": 16, "swa": 16})
    assert set(layout.names) == {"full", "swa", "state"}


def test_from_config_dtypes_come_from_the_config_unless_given() -> None:
    config = {**CONFIGS["bamba"], "torch_dtype": "float16", "mamba_ssm_dtype": "bfloat16"}
    spec = ModelSpec.from_config(config)
    dtypes = {segment.name: segment.dtype for kind in spec.kinds for segment in kind.segments}
    assert dtypes == {"key": "float16", "value": "float16", "conv": "float16", "temporal": "bfloat16"}
    given = ModelSpec.from_config(config, kv_dtype="float8_e4m3fn", conv_dtype="bfloat16", state_dtype="float32")
    dtypes = {segment.name: segment.dtype for kind in given.kinds for segment in kind.segments}
    assert dtypes == {
        "key": "float8_e4m3fn",
        "value": "float8_e4m3fn",
        "conv": "bfloat16",
        "temporal": "float32",
    }


def test_from_config_conventions_differ_as_documented() -> None:
    engine = ModelSpec.preset("kimi-linear-48b")
    assert engine.conv_names == ("conv_q", "conv_k", "conv_v")
    assert engine.kind("state").segment("conv_q").shape == (4096, 3)
    assert engine.kind("full").segment("latent").shape == (576,)
    other = ModelSpec.preset("kimi-linear-48b", convention="transformers")
    assert other.conv_names == ("conv",)
    assert other.kind("state").segment("conv").shape == (3 * 4096, 4)
    assert [segment.shape for segment in other.kind("full").segments] == [(1, 512), (1, 64)]
    gated = [
        ModelSpec.from_config({**CONFIGS["qwen3_next"]}, convention=convention).kind("state").segment("temporal").shape
        for convention in ("engine", "transformers")
    ]
    assert gated == [(4, 16, 8), (4, 8, 16)]


def test_from_config_sliding_layers_of_a_decoder() -> None:
    config = {**CONFIGS["qwen3"], "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    spec = ModelSpec.from_config(config)
    assert (spec.layers("full"), spec.layers("swa"), spec.window) == ((0,), (1, 2), 64)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, ConfigFieldError, "model_type"),
        ({"model_type": "gpt2"}, UnsupportedModelError, "'gpt2' is not supported; supported are bamba"),
        ({**CONFIGS["lfm2"], "layer_types": ["conv", "rwkv"]}, UnsupportedModelError, "layer 1 .* 'rwkv'"),
        ({**CONFIGS["nemotron_h"], "hybrid_override_pattern": "MX"}, UnsupportedModelError, "'X'"),
        ({**CONFIGS["nemotron_h"], "hybrid_override_pattern": "--"}, UnsupportedModelError, "no layer that keeps"),
        ({**CONFIGS["llama"], "dtype": "int4"}, InvalidArgumentError, "dtype is 'int4'"),
    ],
)
def test_from_config_bad_config_is_refused(config: Mapping[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp 0"),
        ({"tp": 2, "rank": 2}, "rank 2 of tp 2"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'"),
        ({"convention": "vllm"}, "convention 'vllm'"),
        ({"convention": "transformers", "state_dtype": "bfloat16"}, "float32 only"),
    ],
)
def test_from_config_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ModelSpec.from_config(CONFIGS["bamba"], **options)


def test_from_config_path_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot read config"):
        ModelSpec.from_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="not JSON"):
        ModelSpec.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="holds a list"):
        ModelSpec.from_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]), encoding="utf-8")
    assert ModelSpec.from_config(str(tmp_path)) == ModelSpec.from_config(CONFIGS["llama"])


def test_preset_all_of_them_have_a_layout_and_an_unknown_one_is_refused() -> None:
    for name, config in PRESETS.items():
        assert config["model_type"] in SUPPORTED_MODELS
        layout = ModelSpec.preset(name).layout(None)
        assert layout.weighted_padding < 0.02, name
    with pytest.raises(UnsupportedModelError, match="no preset 'kimi'"):
        ModelSpec.preset("kimi")


# -- layouts of a spec -----------------------------------------------------------------------------------------------


def test_layout_page_size_per_kind_or_from_candidates() -> None:
    spec = ModelSpec.preset("gpt-oss-120b")
    layout = spec.layout({"full": 64, "swa": (16, 32)})
    assert layout.kind("full").page_size == 64
    assert layout.kind("swa").page_size in (16, 32)
    # A window page is proposed at no more than an eighth of the window.
    assert spec.layout().kind("swa").page_size <= 128 // 8
    with pytest.raises(InvalidArgumentError, match="page_size of 'full' is 0"):
        spec.layout(0)
    with pytest.raises(InvalidArgumentError, match="give an integer"):
        spec.layout(1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no kind 'state'"):
        spec.layout({"state": 1})
    with pytest.raises(InvalidArgumentError, match="empty"):
        spec.layout([])


def test_layout_orders_formats_and_ends_reach_the_kinds() -> None:
    spec = ModelSpec.from_config(CONFIGS["qwen3_next"])
    layout = spec.layout(16, order="token", state_order="layered", ends={"full": "low"}, zero={"state": "never"})
    full, state = layout.kind("full"), layout.kind("state")
    assert (full.order, full.end, state.order, state.zero) == ("token", "low", "layered", "never")
    assert spec.layout(16, format="HND").kind("full").format == "HND"
    assert spec.layout(16, order="head").kind("full").envelope_bytes_per_head > 0
    assert spec.layout(16, null_cell=False).null_bytes == 0


def test_with_segments_grows_the_kind() -> None:
    spec = kimi_k3()
    grown = spec.with_segments("state", spec.intermediate_windows(8))
    assert grown.bytes_per_slot() == spec.bytes_per_slot() + 8 * 1_907_712
    assert grown.conv_names == spec.conv_names
    scales = Segment("scale", spec.layers("full"), (1,), "float32", "page")
    quantised = replace(kimi_k3(kv_dtype="float8_e4m3fn")).with_segments("full", [scales])
    layout = quantised.layout(64)
    assert isinstance(layout, Layout)
    assert layout.view_spec("full", spec.layers("full")[0], "scale").shape == (1,)
