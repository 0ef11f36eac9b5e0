"""Sizes and request counts of `unifiedpool plan`: every number of the source document, and the ways compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unifiedpool import Planner
from unifiedpool.errors import CapacityError, ConfigFieldError, InvalidArgumentError, UnsupportedModelError
from unifiedpool.model_spec import PRESETS, ModelSpec
from unifiedpool.sizing import DEFAULT_LENGTHS, Server, load_model

GIB = 1 << 30


def k3(cache_bytes: int = 60 * GIB, *, state: str = "bfloat16", kv: str | None = None, **options: int) -> Server:
    """Kimi K3 on one of eight GPUs, 16-token pages."""
    return Server.make(
        load_model("kimi-k3", tp=8, state_dtype=state, kv_dtype=kv), cache_bytes, page_size=16, **options
    )


def document() -> Server:
    """The source document's server: 80 slots and 974,656 tokens."""
    return k3(974_656 * 27_648 + 80 * 29_039_616)


def test_kv_per_token_equals_document() -> None:
    assert k3().token_bytes == 27_648
    assert k3(kv="float8_e4m3fn").token_bytes == 13_824


def test_state_per_gpu_equals_document() -> None:
    assert k3().segment_bytes == {"conv": 1_907_712, "temporal": 27_131_904}
    assert k3(state="float32").segment_bytes == {"conv": 1_907_712, "temporal": 2 * 27_131_904}
    assert f"{27_131_904 / 2**20:.1f} {1_907_712 / 2**20:.2f}" == "25.9 1.82"
    assert f"{8 * k3().slot_bytes / 2**20:.1f}" == "221.6"


@pytest.mark.parametrize(
    ("slots", "state", "conv_gib", "temporal_gib"),
    [(119, "bfloat16", "0.21", "3.03"), (80, "bfloat16", "0.14", "2.05"), (51, "float32", "0.09", "2.63")],
)
def test_log_line_of_states_equals_document(slots: int, state: str, conv_gib: str, temporal_gib: str) -> None:
    server = k3(state=state)
    line = server.log_lines(server.static_split(slots=slots), context=131_072)[0]
    assert line == (
        f"Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv_gib}GB, "
        f"ssm_state size: {temporal_gib}GB"
    )


def test_log_line_of_draft_windows_equals_document() -> None:
    server = k3(draft_tokens=8)
    split = server.static_split(slots=23 * server.static_slots)
    assert split.running == 23
    assert "intermediate_conv_window_cache size: 0.34GB" in server.log_lines(split, context=131_072)[0]


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (119, "d: 0.379GB, k: 0.379GB, rawv: 0.379GB, rawk: 0.379GB, g: 0.758GB, beta: 0.006GB"),
        (51, "d: 0.164GB, k: 0.164GB, rawv: 0.164GB, rawk: 0.164GB, g: 0.328GB, beta: 0.003GB"),
    ],
)
def test_log_line_of_rings_equals_document(slots: int, sizes: str) -> None:
    server = k3(ring_length=16)
    lines = server.log_lines(server.static_split(slots=slots), context=131_072)
    assert lines[1] == f"ReplaySSM rings are allocated. length: 16, {sizes}"


@pytest.mark.parametrize(
    ("kv", "tokens", "gib"), [("bfloat16", 974_656, "25.10"), ("float8_e4m3fn", 1_947_648, "25.08")]
)
def test_log_line_of_kv_equals_document(kv: str, tokens: int, gib: str) -> None:
    per_token = 27_648 if kv == "bfloat16" else 13_824
    server = k3(tokens * per_token + 80 * 29_039_616, kv=kv)
    lines = server.log_lines(server.static_split(slots=80), context=131_072)
    assert f"KV Cache is allocated. dtype: torch.{kv}, #tokens: {tokens}, KV size: {gib} GB" in lines
    assert f"max_total_num_tokens={tokens}, max_running_requests=16" in lines


def test_document_server_runs_sixteen_requests() -> None:
    server = document()
    split = server.static_split(slots=80)
    assert (split.running, split.tokens) == (16, 974_656)
    # 11 % of the KV used by 16 requests is 6,701 tokens each; the same bytes without a split run six times as many.
    assert server.static_requests(split, 6_701) == 16
    assert server.unified_requests(6_701) == 107
    assert server.unified_requests(6_701, states=5) == 88


def test_ratio_gives_states_their_share() -> None:
    server = k3()
    split = server.static_split(0.9)
    assert split.slots == int(60 * GIB * 0.9 / 1.9) // 29_039_616
    assert split.ratio == pytest.approx(0.9, rel=0.01)


@pytest.mark.parametrize(("strategy", "overlap", "slots", "states"), [
    ("no_buffer", True, 3, 1),
    ("extra_buffer", True, 5, 3),
    ("extra_buffer", False, 4, 3),
    ("extra_buffer_lazy", True, 4, 2),
    ("auto", False, 4, 3),
])  # fmt: skip
def test_slots_per_request_by_strategy(strategy: str, overlap: bool, slots: int, states: int) -> None:
    spec = load_model("kimi-k3", tp=8)
    server = Server.make(spec, 60 * GIB, page_size=16, strategy=strategy, overlap=overlap)
    assert (server.static_slots, server.running_states) == (slots, states)


def test_auto_without_overlap_at_page_size_one_is_no_buffer() -> None:
    server = Server.make(load_model("nemotron-h-8b"), 60 * GIB, page_size=1, overlap=False)
    assert server.strategy == "no_buffer"


@pytest.mark.parametrize("name", PRESETS)
def test_unified_count_is_what_the_planner_allows(name: str) -> None:
    server = Server.make(load_model(name), 20 * GIB)
    for tokens in (128, 8_192, 131_072):
        requests = server.unified_requests(tokens)
        cells = server.request_cells(tokens)
        for count, fits in ((requests, True), (requests + 1, False)):
            planner = Planner(server.layout, server.cache_bytes)
            demand = {kind: count * n for kind, n in zip(server.layout.names, cells, strict=True)}
            assert planner.can_allocate(demand) is fits


@pytest.mark.parametrize("name", PRESETS)
def test_best_static_ratio_reaches_its_count(name: str) -> None:
    server = Server.make(load_model(name), 60 * GIB)
    for tokens in (512, 8_192, 65_536):
        requests, ratio = server.best_static(tokens)
        if ratio is None:
            continue
        slots = requests * server.static_slots
        assert server.static_requests(server.static_split(slots=slots), tokens) == requests
        assert server.static_requests(server.static_split(ratio), tokens) in (requests - 1, requests)


def test_unified_reaches_every_length_where_one_ratio_does_not() -> None:
    rows = k3().rows()
    assert [row.tokens for row in rows] == list(DEFAULT_LENGTHS)
    for row in rows:
        assert row.unified >= row.static
        # One cell lies under the null cell and padding is half a per cent; nothing else is lost.
        assert row.unified >= 0.98 * row.best_static - 1


def test_block_rule_of_qwen3_next_and_kimi_linear() -> None:
    qwen = Server.make(load_model("qwen3-next-80b"), 60 * GIB).block_rule
    kimi = Server.make(load_model("kimi-linear-48b"), 60 * GIB).block_rule
    assert (qwen.block_tokens, qwen.state_blocks) == (1_056, 3)
    assert kimi.block_tokens == 1_920


def test_window_model_keeps_only_its_window() -> None:
    server = Server.make(load_model("gpt-oss-120b"), 20 * GIB, page_size=16)
    full, swa = (server.layout.names.index(name) for name in ("full", "swa"))
    cells = server.request_cells(65_536)
    assert (cells[full], cells[swa]) == (4_096, 128 // 16 + 1)


def test_dcp_shares_the_tokens() -> None:
    alone, shared = k3(), k3(dcp=8)
    assert shared.static_split(0.9).tokens == 8 * alone.static_split(0.9).tokens
    assert shared.request_cells(131_072)[1] == alone.request_cells(131_072 // 8)[1]


def test_recommended_ratio_beats_both_ends() -> None:
    server = k3()
    lengths = (1_024, 8_192, 65_536)
    chosen = server.recommended_ratio(lengths)
    assert chosen is not None

    def mean(ratio: float) -> float:
        split = server.static_split(ratio)
        return sum(server.static_requests(split, n) / server.best_static(n)[0] for n in lengths)

    assert mean(chosen) >= max(mean(0.1), mean(0.9), mean(5.0))


def test_model_of_states_alone_gives_them_all() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 256, "num_heads": 8, "head_dim": 64}
    config |= {"expand": 2, "n_groups": 1, "state_size": 16, "conv_kernel": 4}
    server = Server.make(ModelSpec.from_config(config), GIB)
    split = server.static_split(0.9)
    assert split.slots == GIB // server.slot_bytes
    assert server.static_requests(split, 4096) == server.best_static(4096)[0] == split.slots // 5
    assert server.unified_requests(4096) == server.unified_requests(1 << 20)
    json.dumps(server.report([128]), allow_nan=False)


def test_report_is_json_with_schema() -> None:
    report = json.loads(json.dumps(document().report(DEFAULT_LENGTHS, slots=80)))
    assert report["schema"] == 1
    assert report["static"]["running"] == 16
    assert report["lengths"][0]["tokens"] == 128


def test_model_from_folder_and_missing_field(tmp_path: Path) -> None:
    config = dict(PRESETS["qwen3-next-80b"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path)).bytes_per_token() == 24_576
    del config["linear_num_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigFieldError, match="linear_num_value_heads"):
        load_model(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="neither a file nor a preset"):
        load_model("kimi-k9")


def test_bad_servers_are_refused() -> None:
    with pytest.raises(CapacityError, match="do not hold one request"):
        k3(1 << 20)
    with pytest.raises(InvalidArgumentError, match="is unknown"):
        Server.make(load_model("kimi-k3", tp=8), GIB, strategy="three_buffers")
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        k3(dcp=0)
    with pytest.raises(InvalidArgumentError, match="has no states"):
        Server.make(load_model("deepseek-v3"), 60 * GIB, draft_tokens=4)
    with pytest.raises(InvalidArgumentError, match="there are"):
        k3().static_split(slots=10_000)
    with pytest.raises(InvalidArgumentError, match="above 0"):
        k3().static_split(0.0)
