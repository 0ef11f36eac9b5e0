"""The replay: what a trace means to a cache, each memory policy, the model of one replica, and the command."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from test_cli import run
from unifiedpool._native import ffi, lib
from unifiedpool.errors import CapacityError, InvalidArgumentError
from unifiedpool.model_spec import ModelSpec
from unifiedpool.prefix_cache import PrefillCost
from unifiedpool.replay import (
    DEFAULT_HARDWARE,
    Costs,
    Hardware,
    Options,
    Simulation,
    Workload,
    best_static,
    compare,
    default_costs,
    policy_names,
    run_replay,
)
from unifiedpool.replay.plots import plot_report
from unifiedpool.replay.pools import Pool, make_pool
from unifiedpool.sizing import Server, load_model
from unifiedpool.traces import Trace, TraceRequest, generate_trace, read_trace, write_trace

GIB = 1 << 30
POLICIES = ["static:0.9", *policy_names()[1:]]


def server(gib: float = 6, model: str = "kimi-linear-48b", **options: Any) -> Server:
    """A small GPU: a state is 41 MiB, a page 126 KiB."""
    return Server.make(load_model(model), int(gib * GIB), page_size=options.pop("page_size", 16), **options)


def pool(name: str, gib: float = 6, **options: Any) -> Pool:
    """One policy on it."""
    return make_pool(name, server(gib, **options), cost=PrefillCost(), grid=64)


def simulation(
    trace: Trace, name: str, gib: float = 6, options: Options | None = None, **server_options: Any
) -> Simulation:
    """One run, not begun."""
    made = server(gib, **server_options)
    return Simulation(
        Workload(trace),
        made,
        make_pool(name, made, cost=PrefillCost(), grid=64),
        default_costs(made),
        DEFAULT_HARDWARE,
        options or Options(),
    )


def trace_of(*requests: tuple[float, int, int, tuple[int, ...]], cover: bool = False) -> Trace:
    """A trace of (arrival, input, output, keys) with blocks of 512 tokens."""
    made = tuple(TraceRequest(*request, line=index + 1) for index, request in enumerate(requests))
    return Trace("test", "jsonl" if cover else "mooncake", made, 512, cover)


# -- workload -------------------------------------------------------------------------------------------------------


def test_prompts_share_exactly_their_equal_blocks() -> None:
    work = Workload(trace_of((0, 1100, 5, (7, 8, 9)), (1, 1100, 5, (7, 8, 10)), (2, 700, 5, (7, 11))))
    prompts = [work.prompt(job) for job in work.jobs]
    assert (prompts[0][:1024] == prompts[1][:1024]).all()
    assert not (prompts[0][1024:] == prompts[1][1024:]).any()
    assert (prompts[0][:512] == prompts[2][:512]).all()
    assert not (prompts[0][512:700] == prompts[2][512:]).any()


def test_output_is_matchable_only_where_a_later_request_continues_it() -> None:
    first, other, later = (0, 1100, 500, (1, 2, 3)), (1, 1100, 500, (1, 4, 5)), (2, 2000, 5, (1, 2, 6, 7))
    work = Workload(trace_of(first, other, later))
    assert [job.output_keys for job in work.jobs] == [(work.jobs[2].prompt_keys[2],), (), ()]
    assert (work.tokens(work.jobs[0])[:1536] == work.prompt(work.jobs[2])[:1536]).all()
    # The prompt itself never matches there: nobody knew the answer yet.
    assert not (work.prompt(work.jobs[0])[1024:] == work.prompt(work.jobs[2])[1024:1100]).any()
    # One token past input + output is not enough: whole blocks of the later one must reach that far.
    short = Workload(trace_of(first, other, (2, 1530, 5, (1, 2, 6))))
    assert short.jobs[0].output_keys == ()


def test_own_format_knows_its_outputs() -> None:
    work = Workload(trace_of((0, 600, 500, (1, 2)), (1, 600, 500, (1, 3)), cover=True))
    assert [job.output_keys for job in work.jobs] == [(1,), (2,)]


# -- pools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_pool_takes_gives_back_and_refuses(name: str) -> None:
    made = pool(name)
    planner = made.planner
    held = []
    while planner.can_allocate({"state": 1, "full": 40}):
        held.append(planner.allocate({"state": 1, "full": 40}))
    assert len(held) > 5
    with pytest.raises(CapacityError):
        planner.allocate({"state": 1, "full": 40})
    assert planner.shortfall({"state": 1, "full": 40}) > 0
    for handles in held[::2]:
        planner.free(handles)
    for handles in held[1::2]:
        planner.free(handles.tolist())
    assert planner.stats().live_handles == 0
    assert made.movement().allocated > 0


def test_static_sides_do_not_help_each_other() -> None:
    made = pool("static:0.1")
    planner = made.planner
    slots = server().static_split(0.1).slots
    planner.allocate({"state": slots})
    assert not planner.can_allocate({"state": 1})
    assert planner.can_allocate({"full": 10_000})


def test_static_cache_evicts_only_the_side_that_lacks() -> None:
    made = pool("static:0.1")
    planner, cache = made.planner, made.cache
    slots = server().static_split(0.1).slots
    for index in range(slots):
        pages = planner.allocate({"full": 4})
        cache.insert([index] * 64, pages, state=planner.allocate({"state": 1})[0])
    assert cache.make_room({"state": 1}).cells == {"state": 1, "full": 4}
    assert cache.make_room({"state": 1}).units == 0
    assert not cache.make_room({"state": slots + 1}).fits


def test_blocks_use_vllms_sizes() -> None:
    made = pool("blocks", model="qwen3-next-80b")
    rule = server(model="qwen3-next-80b").block_rule
    assert (made.page_tokens, made.page_bytes, made.state_bytes) == (1056, rule.block_bytes, 3 * rule.block_bytes)
    assert made.running_states == 2


def test_blocks_larger_than_a_state_still_run() -> None:
    made = Server.make(load_model("falcon-h1-7b"), 8 * GIB, page_size=16)
    blocks = make_pool("blocks", made, cost=PrefillCost(), grid=64)
    assert blocks.planner.layout.names == ("full", "state")
    trace = generate_trace(30, seed=1, rate=20)
    report = Simulation(Workload(trace), made, blocks, default_costs(made), DEFAULT_HARDWARE, Options()).run()
    assert report["requests"]["done"] == 30


def test_large_pages_belong_to_one_kind() -> None:
    made = pool("lcm", gib=40)
    planner: Any = made.planner
    pages = (40 * GIB) // planner.large_bytes
    cells = planner.large_bytes // server().slot_bytes
    handles = planner.allocate({"state": (pages - 1) * cells + 1})
    assert not planner.can_allocate({"full": 1})
    planner.free([handles[len(handles) - 1]])
    assert planner.can_allocate({"full": 1})


def test_lcm_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="least common multiple"):
        pool("lcm", gib=0.5)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("strides", [(13, 3), (16, 8, 3)])
def test_two_ended_cells_are_disjoint_and_every_fit_is_served(strides: tuple[int, ...], pack: bool) -> None:
    source, arena, most = random.Random(5), 1000, 1000
    native = ffi.gc(lib.up_two_ended_create(arena, strides, len(strides), pack, most), lib.up_two_ended_destroy)
    live: list[tuple[int, int]] = []
    unused = list(range(most))
    out = ffi.new("int64_t[5]")
    for _ in range(3000):
        kind, count = source.randrange(len(strides)), source.randrange(1, 6)
        wanted = [count if k == kind else 0 for k in range(len(strides))]
        if source.random() < 0.55 and lib.up_two_ended_fits(native, wanted):
            ids = [unused.pop() for _ in range(count)]
            lib.up_two_ended_take(native, kind, ids, count)
            live += [(kind, each) for each in ids]
        elif live:
            kind, each = live.pop(source.randrange(len(live)))
            lib.up_two_ended_drop(native, kind, [each], 1)
            unused.append(each)
        spans = sorted((lib.up_two_ended_offset(native, k, each), strides[k]) for k, each in live)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= 0 and sum(spans[-1]) <= arena)
    lib.up_two_ended_stats(native, out)
    assert out[0] > 0 and out[2] <= out[0]


def test_packing_moves_more_than_the_minimum() -> None:
    trace = generate_trace(300, seed=2, rate=50)
    moved = {name: simulation(trace, name).run()["movement"] for name in ("unified", "two-ended", "two-ended:pack")}
    assert moved["unified"]["moved"] < moved["two-ended"]["moved"] < moved["two-ended:pack"]["moved"]
    assert moved["unified"]["worst_window"] < server().layout.strides[0]


@pytest.mark.parametrize("name", ["", "static:zero", "static:-1", "static:inf", "unified:best", "buddy"])
def test_unknown_policy_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"choose from|no ratio"):
        replay_report(policies=(name,))


# -- one replica ----------------------------------------------------------------------------------------------------


def test_time_of_one_request_is_the_formula() -> None:
    made = server()
    costs, hardware = Costs(2e9, 1e5, 1e9, "test"), Hardware(1e12, 1e12, 0.001)
    work = Workload(Trace("t", "azure", (TraceRequest(0.0, 100, 3),)))
    run_ = Simulation(work, made, make_pool("unified", made, cost=PrefillCost(), grid=64), costs, hardware, Options())
    report = run_.run()

    # 100 tokens at a mean context of 50; the state checkpoint at 64 is one copy of a state.
    state = made.slot_bytes
    prefill = max((100 * 2e9 + 100 * 50 * 1e5) / 1e12, (1e9 + 2 * state) / 1e12) + 0.001
    decode = 0.0
    for context, copied in ((100, state), (101, 0)):
        compute = (2e9 + context * 1e5) / 1e12
        decode += max(compute, (1e9 + context * made.token_bytes + 2 * state + 2 * copied) / 1e12) + 0.001
    assert report["ttft_s"]["p50"] == pytest.approx(prefill)
    assert report["seconds"] == pytest.approx(prefill + decode)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rate", [2.0, 60.0])
def test_every_request_ends_and_every_cell_comes_back(name: str, rate: float) -> None:
    gib = 12 if name == "lcm" else 6
    sim = simulation(generate_trace(120, seed=1, rate=rate), name, gib)
    report = sim.run()
    assert (report["requests"]["done"], report["requests"]["refused"]) == (120, 0)
    sim.cache.validate()
    sim.cache.flush()
    stats = sim.planner.stats()
    assert (stats.live_handles, sim.cache.stats()["receipts"]) == (0, 0)
    assert report["refusals_against_formula"] == 0
    assert sum(report["memory"][part] for part in report["memory"] if part != "useful") == pytest.approx(1)
    assert report["memory"]["free"] >= 0


def test_hits_are_those_that_the_trace_allows() -> None:
    # A big cache, one request after another: everything shared is hit but what a checkpoint's grid takes off.
    trace = generate_trace(150, seed=4)
    report = simulation(trace, "unified", 60, Options(clients=1)).run()
    assert 0.9 * trace.summary().reusable_share < report["tokens"]["hit_rate"] <= trace.summary().reusable_share
    assert simulation(generate_trace(2), "unified", 60).run()["tokens"]["hit"] % 512 == 0


def test_next_turn_of_a_chat_recomputes_only_its_partial_block() -> None:
    trace = trace_of((0, 1000, 600, (1, 2)), (100, 2100, 10, (1, 3, 4, 5, 6)))
    report = simulation(trace, "unified", 60).run()
    assert report["tokens"]["hit"] == 1536


def test_closed_loop_keeps_its_clients() -> None:
    report = simulation(generate_trace(80, seed=3), "unified", 60, Options(clients=5)).run()
    assert report["concurrency"]["most"] == 5
    assert report["queue_s"]["p99"] == 0


def test_static_split_caps_the_running_requests() -> None:
    report = simulation(generate_trace(100, seed=3, rate=500), "static:0.2").run()
    assert report["concurrency"]["most"] <= server().static_split(0.2).running  # type: ignore[operator]


def test_pressure_retracts_and_still_ends() -> None:
    requests = tuple(TraceRequest(0.0, 2000, 4000) for _ in range(60))
    report = simulation(Trace("t", "azure", requests), "unified", 4, Options(headroom_tokens=0)).run()
    assert report["retractions"] > 0
    assert report["requests"]["done"] == 60
    assert report["tokens"]["recomputed"] > 0
    assert report["refusals_against_formula"] == 0


@pytest.mark.parametrize("name", POLICIES)
def test_request_that_just_fits_runs_and_one_more_page_is_refused(name: str) -> None:
    gib = 12 if name == "lcm" else 2
    made = pool(name, gib)
    states = made.running_states
    order = made.planner.layout.names

    def fits(pages: int) -> bool:
        return made.fits_alone([states if kind == "state" else pages for kind in order])

    most = max(range(1, 1 << 18), key=lambda pages: pages if fits(pages) else 0)
    tokens = most * made.page_tokens
    fill = tuple(TraceRequest(0.1 * index, 5000, 100, line=index) for index in range(5))
    just = TraceRequest(1.0, tokens - 99, 100, line=6)
    over = TraceRequest(2.0, tokens - 98, 100, line=7)
    sim = simulation(Trace("t", "azure", (*fill, just, over)), name, gib)
    report = sim.run()
    assert (report["requests"]["done"], report["requests"]["too_large"]) == (6, [6])
    assert report["refusals_against_formula"] == 0


@pytest.mark.parametrize("name", ["two-ended", "blocks", "unified:value"])
def test_request_that_just_fits_runs_even_where_its_hit_would_hold_one_state_more(name: str) -> None:
    made = pool(name, 2)
    order = made.planner.layout.names
    pages = 1
    while made.fits_alone([made.running_states if kind == "state" else pages + 1 for kind in order]):
        pages += 1
    prompt = pages * made.page_tokens - 99
    keys = tuple(range(-(-prompt // 512)))
    report = simulation(trace_of((0, 2048, 5, keys[:4]), (5, prompt, 100, keys)), name, 2).run()
    assert report["requests"] == {"done": 2, "refused": 0, "too_large": []}
    assert report["refusals_against_formula"] == 0


def test_static_split_with_slots_for_less_than_one_request_refuses_all() -> None:
    split = server(2, "qwen3-next-80b").static_split(0.2)
    assert split.slots > server(2, "qwen3-next-80b").running_states
    assert split.running == 0
    report = simulation(
        trace_of((0, 600, 20, (1, 2)), (1, 600, 20, (3, 4))), "static:0.2", 2, model="qwen3-next-80b"
    ).run()
    assert report["requests"] == {"done": 0, "refused": 2, "too_large": [0, 1]}


def test_model_without_states_shares_pages() -> None:
    trace = generate_trace(60, seed=1)
    made = Server.make(load_model("deepseek-v3", tp=8), 60 * GIB, page_size=64)
    pools = make_pool("unified:lru", made, cost=PrefillCost(), grid=64)
    report = Simulation(Workload(trace), made, pools, default_costs(made), DEFAULT_HARDWARE, Options(clients=1)).run()
    assert report["tokens"]["hit_rate"] > 0.9 * trace.summary().reusable_share


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("model", "gib"), [("gpt-oss-120b", 8), ("gemma3-27b", 40)])
def test_window_models_end_share_and_give_everything_back(name: str, model: str, gib: int) -> None:
    trace = generate_trace(60, seed=1, rate=20)
    made = Server.make(load_model(model), gib * GIB, page_size=16)
    window_pool = make_pool(name, made, cost=PrefillCost(), grid=64)
    sim = Simulation(Workload(trace), made, window_pool, default_costs(made), DEFAULT_HARDWARE, Options())
    report = sim.run()
    assert report["requests"]["done"] + report["requests"]["refused"] == 60
    assert name.startswith("static") or report["requests"]["refused"] == 0
    sim.cache.flush()
    assert (sim.planner.stats().live_handles, sim.cache.stats()["receipts"]) == (0, 0)
    assert sum(window_pool.live()) == 0
    assert report["memory"]["free"] >= 0


def test_window_of_a_running_request_stops_growing() -> None:
    made = Server.make(load_model("gpt-oss-120b"), 8 * GIB, page_size=16)
    window_pool = make_pool("unified", made, cost=PrefillCost(), grid=64)
    trace = Trace("t", "azure", (TraceRequest(0.0, 40_000, 300),))
    sim = Simulation(Workload(trace), made, window_pool, default_costs(made), DEFAULT_HARDWARE, Options())
    report = sim.run()
    most = max(report["series"]["window_kv"]) / made.window_token_bytes
    assert 128 < most <= 6144 + 3 * 128 + 64
    assert report["memory"]["window_kv"] < report["memory"]["running_kv"] + report["memory"]["cached_kv"]


def test_third_request_hits_a_fork_through_the_window() -> None:
    made = Server.make(load_model("gpt-oss-120b"), 8 * GIB, page_size=16)
    window_pool = make_pool("unified", made, cost=PrefillCost(), grid=64)
    keys = [(1, *range(100 * i, 100 * i + 14)) for i in (1, 2, 3)]
    trace = trace_of(*((100.0 * i, 7500, 10, keys[i]) for i in range(3)))
    sim = Simulation(Workload(trace), made, window_pool, default_costs(made), DEFAULT_HARDWARE, Options())
    # The first chunk's windows have slid away before the first insert; the second request leaves the fork's behind.
    assert sim.run()["tokens"]["hit"] == 512


def test_next_turn_hits_through_the_window() -> None:
    made = Server.make(load_model("gpt-oss-120b"), 8 * GIB, page_size=16)
    window_pool = make_pool("unified", made, cost=PrefillCost(), grid=64)
    trace = trace_of((0, 1000, 600, (1, 2)), (100, 2100, 10, (1, 3, 4, 5, 6)))
    sim = Simulation(Workload(trace), made, window_pool, default_costs(made), DEFAULT_HARDWARE, Options())
    assert sim.run()["tokens"]["hit"] == 1536


def test_unified_is_not_behind_the_best_static_ratio() -> None:
    made = server(8)
    report = run_replay(
        generate_trace(300, seed=6, rate=6.0),
        made,
        default_costs(made),
        DEFAULT_HARDWARE,
        Options(),
        policies=("static", "unified"),
        ratios=(0.3, 1.0, 3.0),
    )
    best = best_static(report["runs"])
    assert best is not None
    found = compare(report["runs"][-1], best)
    assert found["throughput"] > 0.995
    assert found["ttft_p95"] < 1.05


# -- several runs ---------------------------------------------------------------------------------------------------


def replay_report(**options: Any) -> dict[str, Any]:
    """A short run of two policies."""
    made = server()
    policies = options.pop("policies", ("static:0.5", "unified"))
    trace = generate_trace(60, seed=9, rate=10)
    return run_replay(trace, made, default_costs(made), DEFAULT_HARDWARE, Options(), policies=policies, **options)


def test_equal_inputs_give_equal_reports_however_many_processes() -> None:
    first, second, apart = replay_report(), replay_report(), replay_report(jobs=2)
    assert first["digest"] == second["digest"] == apart["digest"]
    assert json.loads(json.dumps(first))["schema"] == 1
    assert [task["policy"] for task in apart["runs"]] == ["static:0.5", "unified:value"]


def test_failed_policy_is_reported_and_others_run() -> None:
    for jobs in (1, 2):
        report = replay_report(policies=("static:0.000001", "unified"), jobs=jobs)
        assert [run_["policy"] for run_ in report["runs"]] == ["static:1e-06", "unified:value"]
        assert report["runs"][0]["requests"]["refused"] == 60  # not one slot
        small = server(0.5)
        costs, names = default_costs(small), ("lcm", "unified")
        lcm = run_replay(generate_trace(3), small, costs, DEFAULT_HARDWARE, Options(), policies=names, jobs=jobs)
        assert lcm["failed"][0]["policy"] == "lcm"
        assert len(lcm["runs"]) == 1


def test_error_inside_a_run_is_one_line_with_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(generate_trace(5), path)
    costs = Costs(1e9, 1e3, 1e9, "broken")
    object.__setattr__(costs, "weight_bytes", [])
    monkeypatch.setattr("unifiedpool.cli.default_costs", lambda server: costs)
    command = ("replay", str(path), "--model", "kimi-linear-48b", "--page", "16", "--cache", "6GiB")
    for jobs in ("1", "2"):
        text = run(*command, "--policies", "static:0.5,unified", "--jobs", jobs, code=1)
        lines = [line for line in text.splitlines() if "warning" in line]
        assert [line.split(": please report this: TypeError: ")[0] for line in lines] == [
            "warning: static:0.5",
            "warning: unified:value",
        ]
        assert "Traceback" not in text + capfd.readouterr().err


def test_interrupt_gives_what_there_is() -> None:
    def interrupt(task: object, done: int) -> None:
        if done > 5:
            raise KeyboardInterrupt

    made = server()
    trace = generate_trace(2000, seed=9, rate=10)
    report = run_replay(trace, made, default_costs(made), DEFAULT_HARDWARE, Options(), progress=interrupt)
    assert not report["complete"]
    assert len(report["runs"]) == 1
    assert 0 < report["runs"][0]["requests"]["done"] < 2000
    apart = run_replay(trace, made, default_costs(made), DEFAULT_HARDWARE, Options(), progress=interrupt, jobs=2)
    assert not apart["complete"]
    assert len(apart["runs"]) == 2


def test_unfit_models_and_bad_options_are_refused() -> None:
    gemma = Server.make(load_model("gemma3-27b"), 40 * GIB, page_size=None)
    with pytest.raises(InvalidArgumentError, match="pages of one size"):
        run_replay(generate_trace(2), gemma, default_costs(gemma), DEFAULT_HARDWARE, Options())
    config = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 256, "num_heads": 8, "head_dim": 64}
    config |= {"expand": 2, "n_groups": 1, "state_size": 16, "conv_kernel": 4}
    mamba = Server.make(ModelSpec.from_config(config), GIB)
    with pytest.raises(InvalidArgumentError, match="no KV pages"):
        run_replay(generate_trace(2), mamba, default_costs(mamba), DEFAULT_HARDWARE, Options())
    with pytest.raises(InvalidArgumentError, match="no policy"):
        replay_report(policies=())
    with pytest.raises(InvalidArgumentError, match="max_running is 0"):
        Options(max_running=0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_hardware_and_costs_out_of_range_are_refused(value: float) -> None:
    for name in ("flops", "bandwidth"):
        with pytest.raises(InvalidArgumentError, match=f"{name} is {value}; it must be"):
            Hardware(**{name: value})
    if value != 0:
        with pytest.raises(InvalidArgumentError, match="overhead_s is"):
            Hardware(overhead_s=value)
        with pytest.raises(InvalidArgumentError, match="weight_bytes is"):
            Costs(1e9, 1e3, value, "given")


def test_trace_without_requests_is_refused() -> None:
    made = server()
    with pytest.raises(InvalidArgumentError, match="has no request"):
        run_replay(Trace("none", "azure", ()), made, default_costs(made), DEFAULT_HARDWARE, Options())


def test_run_without_a_finished_request_is_reported_and_drawn(tmp_path: Path) -> None:
    made = server()
    huge = Trace("huge", "azure", (TraceRequest(0.0, 10_000_000, 5, line=1),))
    report = run_replay(huge, made, default_costs(made), DEFAULT_HARDWARE, Options(), policies=("static:0.5",))
    run_ = report["runs"][0]
    assert (run_["seconds"], run_["requests"]["done"], run_["throughput"]["requests_per_s"]) == (0, 0, 0)
    assert run_["memory"]["free"] == 1
    assert len(plot_report(report, tmp_path)) == 3


def test_run_that_is_interrupted_at_once_is_reported_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "_arrive", interrupt)
    report = replay_report(policies=("unified",))
    assert report["runs"][0]["throughput"]["busy_share"] == 0
    assert [file.name for file in plot_report(report, tmp_path)] == ["hit_rate.svg"]


def test_memory_size_without_a_run_is_not_drawn(tmp_path: Path) -> None:
    small = server(0.5)
    costs, names = default_costs(small), ("lcm",)
    trace = generate_trace(3)
    report = run_replay(trace, small, costs, DEFAULT_HARDWARE, Options(), policies=names, budgets=(12 * GIB,))
    assert (len(report["failed"]), len(report["runs"])) == (1, 1)
    assert [file.name for file in plot_report(report, tmp_path)] == ["hit_rate.svg"]


# -- the command ----------------------------------------------------------------------------------------------------

LINEAR = ("--model", "kimi-linear-48b", "--page", "16", "--jobs", "1")


def test_command_prints_plots_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write_trace(generate_trace(80, seed=2), path)
    text = run(
        "replay", str(path), *LINEAR, "--cache", "8GiB", "--policies", "static,two-ended,unified", "--ratios", "0.5,1",
        "--budgets", "6GiB", "--json", str(tmp_path / "r.json"), "--plots", str(tmp_path / "plots"),
    )  # fmt: skip
    for part in ("What requests see", "What memory does", "unified:value against static", "Hit rate by memory"):
        assert part in text
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert len(report["runs"]) == 8
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "concurrency.svg",
        "hit_rate.svg",
        "memory.svg",
    ]


def test_command_refuses_leaves_out_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(trace_of((0, 1000, 10, (1, 2)), (1, 900_000, 10, tuple(range(1758)))), path, format="mooncake")
    path.write_text(path.read_text(encoding="utf-8") + "{\n", encoding="utf-8")
    command = ("replay", str(path), *LINEAR, "--cache", "6GiB", "--policies", "unified")
    text = " ".join(run(*command, code=3).split())
    assert "line 3: is not JSON" in text
    assert "1 requests are larger than its memory and were refused: lines 2" in text
    assert "line 3" in run(*command, "--strict", code=1)
    path.write_text(path.read_text(encoding="utf-8").replace("{\n", ""), encoding="utf-8")
    assert read_trace(path).problems == ()


def test_command_compares_with_no_static_run_that_finished_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(trace_of((0, 600, 20, (1, 2)), (1, 600, 20, (3, 4))), path, format="mooncake")
    command = ("replay", str(path), "--model", "qwen3-next-80b", "--page", "16", "--cache", "2GiB", "--jobs", "1")
    text = " ".join(run(*command, "--policies", "static,unified", "--ratios", "0.1,0.2", code=3).split())
    assert "finished no request: nothing to compare with" in text
    assert "x1.000" not in text


def test_command_lowers_costs_and_takes_heads(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(generate_trace(40, seed=2), path)
    options = ("--policies", "unified", "--requests", "10", "--speed", "2", "--flops-per-token", "1e9")
    command = ("replay", str(path), *LINEAR, "--cache", "8GiB", *options, "--weight-bytes", "2GB", "--json", "-")
    report = json.loads(run(*command))
    assert report["trace"]["requests"] == 10
    assert (report["costs"]["flops_per_token"], report["costs"]["weight_bytes"]) == (1e9, 2e9)


def test_demo_shows_the_gain() -> None:
    assert "unified:value against static" in " ".join(run("demo", "--requests", "60").split())
