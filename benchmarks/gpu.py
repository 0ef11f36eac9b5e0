"""Check every kernel against its reference on a GPU, then time it, beside a plain copy and a contiguous cache.

One table and, with --json, one file. Under four minutes on one GPU. `--dry-run` walks through the same code with tiny
sizes on CPU tensors, the kernels interpreted (TRITON_INTERPRET=1): it proves the script, and its times mean nothing.

Copies are timed over whole calls (upload of the descriptors included), enqueued behind a sleeping kernel so that the
host's own work is hidden; a plain `Tensor.copy_` of the same number of bytes runs in between. Tables are captured in a
CUDA graph: the change list's copy, the scatter and one launch for all tables. Host synchronisations are what the
profiler sees of the runtime's waiting calls during whole steps.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from harness import Report, Spread, options, summary
from unifiedpool import Layout, Planner
from unifiedpool.arena import Arena
from unifiedpool.kernels import (
    backend,
    commit_conv_windows,
    copy_cells,
    copy_rows,
    naive,
    page_tables,
    replay_states,
    track_states,
    write_kv,
)
from unifiedpool.kernels._support import upload
from unifiedpool.kernels.copy_cells import CellPairs
from unifiedpool.kernels.page_tables import BatchTables
from unifiedpool.layout import Kind, Order, Segment

# mypy: disallow-untyped-decorators=False

__all__ = ["Sizes", "check_kernels", "decode_attention", "main"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WAITING = {
    f"{prefix}{call}"
    for prefix in ("cuda", "hip", "cu")
    for call in ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "CtxSynchronize", "Memcpy", "Free")
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is: `full` on a GPU, `tiny` in a dry run.

    Attributes:
        copies: (name, bytes of a cell, cells copied at once, whether there is a target).
        batches: lanes of the table benchmark.
        pages: of a lane there.
        attention_lanes, attention_tokens: batch and context of the attention benchmark.
        layers: of its arena.
        repeats: samples of each time.
    """

    copies: tuple[tuple[str, int, int, bool], ...]
    batches: tuple[int, ...]
    pages: int
    attention_lanes: int
    attention_tokens: int
    layers: int
    repeats: int

    @classmethod
    def full(cls, *, quick: bool, free_bytes: int) -> Sizes:
        """Sizes for a GPU with so much free memory."""
        share = min(1.0, free_bytes / (64 * GIB))
        copies = (
            ("1.5 MB pages", 1_576_960, int(1_024 * share), True),
            ("77 MB states", 77_271_040, max(2, int(24 * share)), True),
            ("24 KB pages", 24 * KIB, int(32_768 * share), False),
        )
        lanes = max(8, int(64 * share))
        return cls(copies, (1, 64, 256), 2_048, lanes, 4_096, 8, 10 if quick else 40)

    @classmethod
    def tiny(cls) -> Sizes:
        """Sizes for the interpreter."""
        return cls((("1.5 KB pages", 1_536, 3, False), ("20 KB states", 20 * KIB, 2, False)), (1, 3), 5, 2, 40, 2, 1)


# -- checks ----------------------------------------------------------------------------------------------------------


def _compared(call: Callable[..., object], *outputs: Tensor) -> bool:
    """Run `call` on clones of its outputs with the references and with the kernels; say whether all bytes agree."""
    results = []
    for chosen in ("torch", "triton"):
        clones = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device).copy_(o) for o in outputs]
        with backend.use(chosen):
            call(*clones)
        results.append(clones)
    return all(
        bool(torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)))
        for left, right in zip(*results, strict=True)
    )


def _worst(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def check_kernels(device: torch.device, seed: int) -> Iterator[tuple[str, bool]]:
    """Run every kernel on `device` and compare it with its reference.

    Yields:
        what was checked and whether it agrees: bit by bit, or for folds within 1e-6 of float64.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def distinct(low: int, high: int, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return (low + torch.randperm(high - low, generator=generator)[:count]).to(device, dtype)

    # Bytes, whole and strided.
    arena = integers(0, 256, 96 * 3_072, dtype=torch.uint8)
    pairs = [CellPairs(6_144, [0, 5], [7, 3]), CellPairs(3_072, [20, 2, 40], [33, 31, 95])]
    yield "copy_cells, two kinds", _compared(lambda out: copy_cells.copy_cells(out, out, pairs), arena)
    other = torch.zeros_like(arena)
    yield "copy_cells, two arenas", _compared(lambda out: copy_cells.copy_cells(arena, out, pairs), other)
    yield "zero_cells", _compared(lambda out: copy_cells.zero_cells(out, 3_072, [1, 50, 95]), arena)
    plan = np.array([[0, 0, 3, 9], [0, 2, 11, 11], [1, 0, 9, 12], [1, 1, 20, 21], [2, 2, 9, 9]], np.int32)
    yield "step plan", _compared(lambda out: copy_cells.run_operations(out, plan, [3_072]), arena)
    rows = distinct(16, 96 * 16, 64, torch.int64).view(4, 16).sort().values
    front = rows.clone()
    kept = rows[:, ::3].contiguous()
    indptr = torch.arange(5, device=device, dtype=torch.int64) * kept.shape[1]

    def compact(out: Tensor) -> None:
        view = torch.as_strided(out.view(torch.bfloat16), (96, 16, 96), (1_536, 96, 1))
        source, target = kept.flatten(), front[:, : kept.shape[1]].flatten().contiguous()
        copy_rows.copy_rows(out, copy_rows.RowParts.of(out, [view]), source, target, indptr)

    yield "copy_rows, compaction", _compared(compact, arena)

    # States.
    mask, slots = integers(0, 2, 12, dtype=torch.bool), distinct(0, 24, 24)
    lanes = slots.view(2, 12) * torch.where(integers(0, 6, 2, 12) == 0, -1, 1)
    for name, states in (
        ("compact", normal(24, 6_000)),
        ("layers apart", normal(3, 24, 40, dtype=torch.bfloat16).movedim(1, 0)),
        ("30-byte runs", normal(24, 32, dtype=torch.bfloat16)[:, :15]),
    ):
        run = lambda out: track_states.track_states(out, mask, lanes[0], lanes[1])  # noqa: E731
        yield f"track_states, {name}", _compared(run, states)
    for channels, dtype in ((64, torch.bfloat16), (5, torch.float32)):
        windows, overlapping = normal(7, 4, channels, 3, dtype=dtype), normal(7, channels, 7, dtype=dtype)
        steps, places = integers(-1, 4, 6), distinct(0, 9, 6)
        for name, each in (
            ("own windows", windows),
            ("overlapping", commit_conv_windows.overlapping_windows(overlapping, 3)),
        ):
            yield (
                f"commit_conv_windows, {channels} channels, {name}",
                _compared(
                    lambda out, each=each, steps=steps, places=places: commit_conv_windows.commit_conv_windows(
                        out, each, steps, places
                    ),
                    normal(9, channels, 3, dtype=dtype),
                ),
            )

    # Folds and outputs.
    for name, gate in (("GDN", normal(4, 16, 2)), ("KDA", normal(4, 16, 2, 64))):
        state, values, keys = normal(5, 2, 32, 64), normal(4, 16, 2, 32), normal(4, 16, 1, 64)
        gate, beta = -gate.abs(), torch.sigmoid(normal(4, 16, 2))
        requests: dict[str, Any] = {
            "slots": distinct(0, 5, 4),
            "rows": distinct(0, 4, 4),
            "start": integers(0, 16, 4),
            "count": torch.tensor([0, 16, 5, 1], dtype=torch.int32, device=device),
        }
        given = [requests[key] for key in ("slots", "rows", "start", "count")]
        exact = state.double()
        naive.replay_states(exact, values, keys, gate, beta, *given, eps=1e-6, normalize=True, dtype=torch.float64)
        out = state.clone()
        with backend.use("triton"):
            replay_states.replay_states(out, values, keys, gate, beta, **requests)
        yield f"replay_states, {name}", _worst(out, exact) <= 1e-6
        query, outputs = normal(4, 1, 64), torch.empty(4, 2, 32, device=device)
        wanted = torch.empty(4, 2, 32, dtype=torch.float64, device=device)
        naive.replay_outputs(state, values, keys / 8, gate, query, wanted, *given, scale=1.0, dtype=torch.float64)
        with backend.use("triton"):
            replay_states.replay_outputs(state, values, keys / 8, gate, query, outputs, **requests)
        yield f"replay_outputs, {name}", _worst(outputs, wanted) <= 1e-6

    # Tables.
    tables = integers(-1, 500, 3, 200)
    changes = torch.cat([distinct(1, 200, 60)[:, None], integers(-1, 500, 60, 3)], 1)
    yield "update_tables", _compared(lambda out: page_tables.update_tables(out, changes), tables)
    handles, lengths, new = integers(-1, 220, 9, 12), integers(0, 12 * 16, 9), integers(0, 9, 9)
    new = torch.minimum(new, lengths)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32, device=device), new.cumsum(0, dtype=torch.int32)])
    for pad in (-1, 0):
        batch = BatchTables.allocate(lanes=9, width=12, tokens=80, kinds=2, device=device)
        fields = (
            batch.block_table, batch.kv_indptr, batch.kv_indices, batch.last_page_len, batch.slot_mapping,
            batch.state_indices,
        )  # fmt: skip
        kinds = torch.tensor([2, 0], dtype=torch.int32, device=device)
        call = lambda *buffers, pad=pad, kinds=kinds: page_tables.build_tables(  # noqa: E731
            tables, kinds, handles, lengths, starts, BatchTables(*buffers), page_size=16,
            state_handles=handles[:, 0].contiguous(), state_kind=1, pad=pad,
        )  # fmt: skip
        yield f"build_tables, pad {pad}", _compared(call, *fields)
    table = tables[0]
    yield "translate", _compared(lambda out: page_tables.translate(handles, table, out, -1), torch.zeros_like(handles))
    positions, mapped = integers(-1, 200, 9, 30), torch.empty(9, 30, dtype=torch.int64, device=device)
    yield "map_slots", _compared(lambda out: page_tables.map_slots(handles, positions, table, 16, out), mapped)

    # KV.
    slots = distinct(0, 8 * 16, 20, torch.int64)
    slots[3] = -1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        key, value = normal(20, 4, 64, dtype=dtype) * 30, normal(20, 4, 32, dtype=dtype)
        for target in (dtype, torch.float8_e4m3fn, torch.float8_e5m2):
            caches = [torch.zeros(8, 16, 4, dim, dtype=torch.uint8, device=device) for dim in (64, 32)]
            if target == dtype:
                caches = [torch.zeros(8, 16, 4, dim, dtype=dtype, device=device) for dim in (64, 32)]
            scale = None if target == dtype else torch.tensor([0.37], device=device)

            def put(
                a: Tensor, b: Tensor, key: Tensor = key, value: Tensor = value, t: Any = target, s: Any = scale
            ) -> None:
                write_kv.write_kv(key, value, a.view(t), b.view(t), slots, key_scale=s, value_scale=s)

            yield f"write_kv, {dtype} to {target}".replace("torch.", ""), _compared(put, *caches)
    latent, rope = normal(20, 512, dtype=torch.bfloat16), normal(20, 64, dtype=torch.bfloat16)
    cache = torch.zeros(8, 16, 576, dtype=torch.bfloat16, device=device)
    yield "write_mla", _compared(lambda out: write_kv.write_mla(latent, rope, out, slots), cache)


def check_far(device: torch.device) -> bool:
    """Copy a cell and track a state beyond 2^31 words: 10 GiB are needed."""
    buffer = torch.empty(10 * GIB, dtype=torch.uint8, device=device)
    cells = buffer.view(-1, MIB)
    cells[9_000] = torch.arange(MIB, device=device) % 251
    copy_cells.copy_cells(buffer, buffer, [CellPairs(MIB, [9_000], [10_200])])
    lane = torch.tensor([10_201, 10_200], dtype=torch.int32, device=device)
    track_states.track_cells(buffer, MIB, torch.ones(1, dtype=torch.bool, device=device), lane[1:], lane[:1])
    return bool(torch.equal(cells[10_200], cells[9_000])) and bool(torch.equal(cells[10_201], cells[9_000]))


# -- timing ----------------------------------------------------------------------------------------------------------


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    """Time calls in turn, so that all of them see the same machine.

    Returns:
        for each call its samples: nanoseconds of the device a call (of the host, on a CPU).
    """
    enqueue_ns = 0
    for call in calls:
        call()
        start_ns = time.perf_counter_ns()
        call()
        enqueue_ns = max(enqueue_ns, time.perf_counter_ns() - start_ns)
    samples: list[list[float]] = [[] for _ in calls]
    inner = 4
    for _ in range(repeats):
        for index, call in enumerate(calls):
            if device.type != "cuda":
                start_ns = time.perf_counter_ns()
                call()
                samples[index].append(float(time.perf_counter_ns() - start_ns))
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # The host enqueues everything while this kernel sleeps, some two cycles a nanosecond.
            torch.cuda._sleep(min(200_000_000, 2_000_000 + 4 * inner * enqueue_ns))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            end.synchronize()
            samples[index].append(begin.elapsed_time(end) * 1e6 / inner)
    return samples


def ratios(upper: Sequence[float], lower: Sequence[float]) -> Spread:
    """Divide samples that were taken in turn."""
    return summary([above / below for above, below in zip(upper, lower, strict=True)])


def bandwidth(size: int, times_ns: Sequence[float]) -> Spread:
    """Bytes over nanoseconds: GB/s."""
    return summary([size / each for each in times_ns])


def add(report: Report, name: str, found: Spread, unit: str, **options: Any) -> None:
    """Add a row with its spread."""
    report.add(name, found.median, unit, low=found.low, high=found.high, **options)


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays `call` from a CUDA graph (on a CPU: the call itself)."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bench_copies(report: Report, sizes: Sizes, device: torch.device) -> None:
    """Copies of cells against a plain copy of as many bytes; and to pinned memory."""
    for name, stride, count, has_target in sizes.copies:
        report.say(f"copying {name}")
        buffer = torch.zeros(2 * count * stride, dtype=torch.uint8, device=device)
        order = np.random.default_rng(report.options.seed).permutation(2 * count).astype(np.int32)
        pairs = [CellPairs(stride, order[:count], order[count:])]
        source, target = buffer[: count * stride], buffer[count * stride :]
        mask = torch.ones(count, dtype=torch.bool, device=device)
        old, new = (torch.from_numpy(part).to(device) for part in (order[:count], order[count:]))
        calls: list[Callable[[], object]] = [
            partial(target.copy_, source),
            partial(copy_cells.copy_cells, buffer, buffer, pairs),
            partial(copy_cells.zero_cells, buffer, stride, order[count:]),
        ]
        if count <= track_states.MAX_LANES:
            calls.append(partial(track_states.track_cells, buffer, stride, mask, old, new))
        plain, copies, zeroes, *tracks = time_calls(calls, device, sizes.repeats)
        total = 2 * count * stride
        note = f"{count} cells, read and written"
        add(report, f"plain copy, {name}: bandwidth", bandwidth(total, plain), "GB/s", note=note)
        add(report, f"zero_cells, {name}: bandwidth", bandwidth(total // 2, zeroes), "GB/s", note="written only")
        bound = 0.9 if has_target else None
        for what, samples in zip(("copy_cells", "track_cells"), (copies, *tracks), strict=False):
            title = f"{what} / plain copy, {name}: bandwidth"
            add(report, title, ratios(plain, samples), "1", target=bound, at_least=True)
    if device.type == "cuda":
        stride, count = 1_576_960, 64
        on_gpu = torch.zeros(count * stride, dtype=torch.uint8, device=device)
        on_host = torch.zeros(count * stride, dtype=torch.uint8).pin_memory()
        everything = [CellPairs(stride, list(range(count)), list(range(count)))]
        for name, source, target in (("GPU to pinned host", on_gpu, on_host), ("pinned host to GPU", on_host, on_gpu)):
            report.say(name)
            calls = [
                partial(target.copy_, source, non_blocking=True),
                partial(copy_cells.copy_cells, source, target, everything),
            ]
            plain, ours = time_calls(calls, device, max(3, sizes.repeats // 4))
            add(report, f"copy_cells / plain copy, {name}: bandwidth", ratios(plain, ours), "1")


def bench_tables(report: Report, sizes: Sizes, device: torch.device) -> None:
    """The change list's copy, the scatter and all tables of a step, from one CUDA graph."""
    page_size, handles_in_all = 16, 1 << 20 if device.type == "cuda" else 1 << 10
    tables = torch.randint(1, 1 << 20, (2, handles_in_all), dtype=torch.int32, device=device)
    kinds = torch.zeros(1, dtype=torch.int32, device=device)
    for lanes in sizes.batches:
        report.say(f"tables of {lanes} lanes")
        handles = torch.randint(1, handles_in_all, (lanes, sizes.pages), dtype=torch.int32, device=device)
        lengths = torch.randint(1, sizes.pages * page_size, (lanes,), dtype=torch.int32, device=device)
        starts = torch.arange(lanes + 1, dtype=torch.int32, device=device)
        out = BatchTables.allocate(lanes=lanes, width=sizes.pages, tokens=lanes, device=device)
        host = torch.zeros(max(1, lanes // 8), 3, dtype=torch.int32)
        host[:, 0] = torch.arange(1, len(host) + 1)
        host = host.pin_memory() if device.type == "cuda" else host
        changes = torch.empty(host.shape, dtype=torch.int32, device=device)
        states = handles[:, 0].contiguous()

        def step(
            handles: Tensor = handles,
            lengths: Tensor = lengths,
            starts: Tensor = starts,
            out: BatchTables = out,
            host: Tensor = host,
            changes: Tensor = changes,
            states: Tensor = states,
        ) -> None:
            changes.copy_(host, non_blocking=True)
            page_tables.update_tables(tables, changes)
            page_tables.build_tables(
                tables,
                kinds,
                handles,
                lengths,
                starts,
                out,
                page_size=page_size,
                state_handles=states,
                state_kind=1,
                pad=0,
            )

        (samples,) = time_calls([captured(step, device)], device, sizes.repeats)
        target = 10_000.0 if lanes == 256 else None
        name, note = f"page table update + all tables, batch {lanes}", f"{sizes.pages} pages a lane"
        report.time(name, summary(samples), target=target, note=note)


# -- decode attention ------------------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, sums_ptr, tops_ptr, totals_ptr, scale, table_stride,
    k_page, k_token, k_head, v_page, v_token, v_head,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One lane, one KV head, one part of its tokens: unnormalised sums, maxima and totals of the softmax."""
    lane = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    length = tl.load(lengths_ptr + lane)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    q_at = (lane * heads + head) * GROUP + row
    query = tl.load(q_ptr + q_at[:, None] * DIM + dim[None, :], mask=row[:, None] < GROUP, other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(split * part, tl.minimum(length, (split + 1) * part), BLOCK):
        token = start + tl.arange(0, BLOCK)
        here = token < length
        page = tl.load(table_ptr + lane * table_stride + token // PAGE, mask=here, other=0).to(tl.int64)
        within = token % PAGE
        k_at = page * k_page + within * k_token + head * k_head
        key = tl.load(k_ptr + k_at[None, :] + dim[:, None], mask=here[None, :], other=0.0)
        scores = tl.where(here[None, :], tl.dot(query, key).to(tl.float32) * scale, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        v_at = page * v_page + within * v_token + head * v_head
        value = tl.load(v_ptr + v_at[:, None] + dim[None, :], mask=here[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value).to(tl.float32)
        top = higher
    at = ((lane * heads + head) * SPLITS + split) * ROWS + row
    tl.store(sums_ptr + at[:, None] * DIM + dim[None, :], sums)
    tl.store(tops_ptr + at, top)
    tl.store(totals_ptr + at, total)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, tops_ptr, totals_ptr, out_ptr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query head."""
    lane_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    at = (lane_head * SPLITS + split) * ROWS + row
    top = tl.load(tops_ptr + at)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(totals_ptr + at), 0)
    sums = tl.sum(weight[:, None] * tl.load(sums_ptr + at[:, None] * DIM + dim[None, :]), 0)
    tl.store(out_ptr + (lane_head * GROUP + row) * DIM + dim, (sums / total).to(out_ptr.dtype.element_ty))


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, scratch: Tensor
) -> None:
    """Attend from one token per lane over paged keys and values of any strides.

    Args:
        query, out: `[lanes, heads, dim]`, contiguous.
        key, value: `[pages, page_size, kv_heads, dim]`, last stride 1.
        block_table: int32 `[lanes, width]`.
        lengths: int32 `[lanes]`.
        scratch: float32, at least `lanes * kv_heads * 16 * 16 * (dim + 2)` elements.
    """
    lanes, heads, dim = query.shape
    kv_heads, splits, rows = key.shape[2], 16, 16
    count = lanes * kv_heads * splits * rows
    sums, tops, totals = scratch[: count * dim], scratch[count * dim :], scratch[count * (dim + 1) :]
    decode_kernel[(lanes, kv_heads, splits)](
        query, key, value, block_table, lengths, sums, tops, totals, dim**-0.5, block_table.stride(0),
        *key.stride()[:3], *value.stride()[:3], PAGE=key.shape[1], GROUP=heads // kv_heads, ROWS=rows, DIM=dim,
        BLOCK=64, SPLITS=splits, num_warps=4, num_stages=2,
    )  # fmt: skip
    combine_kernel[(lanes * kv_heads, heads // kv_heads)](
        sums, tops, totals, out, GROUP=heads // kv_heads, ROWS=rows, DIM=dim, SPLITS=splits, num_warps=4
    )


def attention_by_torch(query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """The same with torch's own attention, lane by lane, over gathered keys and values."""
    rows = []
    for lane, length in enumerate(lengths.tolist()):
        pages = block_table[lane, : -(-length // key.shape[1])].long()
        keys, values = (each[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for each in (key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[lane][None, :, None], keys, values, enable_gqa=True
        )
        rows.append(attended[0, :, 0])
    return torch.stack(rows)


def caches_of(order: Order | None, layers: int, pages: int, shape: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """Keys and values `[pages, *shape]` of the middle layer: views of an arena, or (None) a cache of its own."""
    if order is None:
        return [torch.zeros(pages, *shape, dtype=like.dtype, device=like.device) for _ in range(2)]
    page_size, *row = shape
    dtype = str(like.dtype).removeprefix("torch.")
    segments = tuple(Segment(name, tuple(range(layers)), tuple(row), dtype, "token") for name in ("key", "value"))
    layout = Layout.build([Kind("full", segments, page_size=page_size, order=order)], null_cell=False)
    arena = Arena(layout, pages * layout.strides[0], device=like.device, max_handles=8)
    arena.buffer.zero_()
    return [arena.view("full", layers // 2, name) for name in ("key", "value")]


def bench_attention(report: Report, sizes: Sizes, device: torch.device) -> None:
    """Decode attention over strided views of an arena against a contiguous cache of the layer alone."""
    lanes, tokens, page_size = sizes.attention_lanes, sizes.attention_tokens, 16
    kv_heads, group, dim = (8, 4, 128) if device.type == "cuda" else (1, 2, 16)
    width = -(-tokens // page_size)
    pages = lanes * width
    generator = torch.Generator(device).manual_seed(report.options.seed)
    # The interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    query = torch.randn(lanes, kv_heads * group, dim, generator=generator, device=device).to(dtype)
    block_table = torch.randperm(pages, generator=generator, device=device).view(lanes, width).int()
    lengths = torch.full((lanes,), tokens, dtype=torch.int32, device=device)
    lengths[0] = tokens - 5
    scratch = torch.empty(lanes * kv_heads * 16 * 16 * (dim + 2), device=device)
    shape = page_size, kv_heads, dim
    keys, values = (torch.randn(pages, *shape, generator=generator, device=device).to(dtype) for _ in range(2))
    expected = attention_by_torch(query, keys, values, block_table, lengths)
    orders: dict[str, Order | None] = {"contiguous": None, "page-major": "page", "token-major": "token"}
    outs = {name: torch.empty_like(query) for name in orders}
    calls: list[Callable[[], object]] = []
    flash: list[Callable[[], object]] = []
    for name, order in orders.items():
        key, value = caches_of(order, sizes.layers, pages, shape, query)
        key.copy_(keys)
        value.copy_(values)
        calls.append(partial(decode_attention, query, key, value, block_table, lengths, outs[name], scratch))
        flash += _flashinfer(query, key, value, block_table, lengths)
    report.say("decode attention")
    bound = 1.02 if device.type == "cuda" else None
    for which, found in (("Triton", calls), ("FlashInfer", flash)):
        if len(found) < len(orders):
            continue
        plain, *others = time_calls(found, device, sizes.repeats)
        report.time(f"decode attention ({which}), contiguous cache", summary(plain), note=f"{lanes} x {tokens} tokens")
        for name, samples in zip(("page-major", "token-major"), others, strict=True):
            title = f"decode attention ({which}), {name} / contiguous: time"
            add(report, title, ratios(samples, plain), "1", target=bound)
    # Weights and outputs of eight bits: two units in the last place.
    agrees = all(_worst(out, expected.double()) <= 2.0**-6 for out in outs.values())
    report.add("decode attention agrees with torch's", float(agrees), "1", target=1.0, at_least=True)


def _flashinfer(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, lengths: Tensor
) -> list[Callable[[], object]]:
    """FlashInfer's paged decode over the same cache, where it is installed."""
    if query.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return []
    flashinfer = importlib.import_module("flashinfer")
    _, heads, dim = query.shape
    page_size, kv_heads = key.shape[1:3]
    pages = (lengths + page_size - 1) // page_size
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    space = torch.empty(256 * MIB, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
    last, dtypes = lengths - (pages - 1) * page_size, {"q_data_type": query.dtype, "kv_data_type": key.dtype}
    try:
        wrapper.plan(indptr, block_table.flatten(), last, heads, kv_heads, dim, page_size, **dtypes)
        wrapper.run(query, (key, value))
    except (RuntimeError, TypeError, ValueError) as error:  # a peer must not end the run
        print(f"FlashInfer left out: {error}", file=sys.stderr)
        return []
    return [partial(wrapper.run, query, (key, value))]


# -- whole steps -----------------------------------------------------------------------------------------------------


def steps(device: torch.device, seed: int) -> Iterator[None]:
    """Run steps of a small engine: a plan with moves, copies and zeroes, every table, new KV, tracked states.

    The first step is run when the first item is asked for; everything that lasts is made before.
    """
    generator = np.random.default_rng(seed)
    segments = tuple(Segment(name, (0, 1), (2, 64), "bfloat16", "token") for name in ("key", "value"))
    state = Segment("temporal", (0, 1), (4, 32, 32), "float32", "slot")
    layout = Layout.build([Kind("state", (state,)), Kind("full", segments, page_size=16)])
    planner = Planner(layout, 64 * layout.strides[0])
    arena = Arena(layout, 64 * layout.strides[0], device=device, max_handles=len(planner.cells("full")) - 1)
    keys, values = (arena.view("full", 0, name) for name in ("key", "value"))
    temporal = arena.view("state", 1, "temporal")
    lanes, width = 4, 4
    out = BatchTables.allocate(lanes=lanes, width=width, tokens=lanes, device=device)
    kinds = torch.full((1,), layout.kind_id("full"), dtype=torch.int32, device=device)
    rows = torch.zeros(lanes, 2, 64, dtype=torch.bfloat16, device=device)
    mask = torch.ones(lanes, dtype=torch.bool, device=device)
    starts = torch.arange(lanes + 1, dtype=torch.int32, device=device)
    track = torch.empty(lanes, 1, dtype=torch.int32, device=device)
    live: list[int] = []
    yield
    while True:
        if len(live) > 24:
            planner.free([live.pop(int(generator.integers(len(live)))) for _ in range(6)])
        pages, states = planner.allocate({"full": lanes}).tolist(), planner.allocate({"state": 2 * lanes}).tolist()
        planner.copy(pages[:1], pages[1:2], kind="full")
        live += pages
        arena.apply(planner.seal())
        # Of each lane: its pages, its length, its state, the slot that tracks it.
        batch = generator.choice(live, (lanes, width + 3)).astype(np.int32)
        batch[:, 1], batch[:, width] = pages, 20
        batch[:, width + 1], batch[:, width + 2] = states[:lanes], states[lanes:]
        given = upload(np.ascontiguousarray(batch.T), device)
        page_tables.build_tables(
            arena.table, kinds, given[:width].T.contiguous(), given[width], starts, out, page_size=16,
            state_handles=given[width + 1], state_kind=layout.kind_id("state"), pad=0,
        )  # fmt: skip
        arena.block_table(given[width + 2][:, None], "state", track)
        write_kv.write_kv(rows, rows, keys, values, out.slot_mapping[0])
        track_states.track_states(temporal, mask, out.state_indices, track[:, 0])
        planner.free(states)
        yield


def count_synchronisations(device: torch.device, seed: int) -> tuple[int, str]:
    """Count the runtime calls that wait for the device during ten steps, after ten that warm up."""
    running = steps(device, seed)
    for _ in range(11):
        next(running)
    if device.type != "cuda":
        return 0, "nothing to wait for on a CPU"
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function("ten steps"):
        for _ in range(10):
            next(running)
    # Leaving the profiler waits for the device too: only what lies inside the steps counts.
    host = [event for event in seen.events() if event.device_type.name == "CPU"]
    whole = next(event.time_range for event in host if event.name == "ten steps")
    inside = [event.name for event in host if whole.start <= event.time_range.start <= whole.end]
    waits = [name for name in inside if name in WAITING]
    launches = sum(name.startswith(("cuLaunchKernel", "cudaLaunchKernel", "hipModuleLaunch")) for name in inside)
    return len(waits), ", ".join(sorted(set(waits))) or f"{launches} launches seen"


# -- the script ------------------------------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, interpreted; no measurement")


def main() -> int:
    """Check, time, report."""
    chosen = options(__doc__, add=_add_options)
    dry = bool(chosen.extra.dry_run)
    if dry and not backend.is_interpreted():
        print("a dry run needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
        return 2
    if not dry and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run walks through the script without one", file=sys.stderr)
        return 2
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    report = Report("kernels, dry run (no measurement)" if dry else "kernels", chosen)
    if dry:
        sizes = Sizes.tiny()
    else:
        report.facts["gpu"] = torch.cuda.get_device_name(device)
        sizes = Sizes.full(quick=chosen.quick, free_bytes=torch.cuda.mem_get_info(device)[0])
    with backend.use("triton"):
        report.say("checking every kernel against its reference")
        results = dict(check_kernels(device, chosen.seed))
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 12 * GIB:
            results["addresses beyond 2^31 words"] = check_far(device)
            torch.cuda.empty_cache()
        failed = [name for name, ok in results.items() if not ok]
        note = "; ".join(failed) or f"{len(results)} checks"
        report.add("kernels that differ from their references", len(failed), "checks", target=0.0, note=note)
        bench_copies(report, sizes, device)
        bench_tables(report, sizes, device)
        bench_attention(report, sizes, device)
        report.say("counting host synchronisations")
        count, note = count_synchronisations(device, chosen.seed)
        report.add("host synchronisations in ten steps", count, "calls", target=0.0, note=note)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
