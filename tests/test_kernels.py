"""Every kernel, interpreted on the CPU, against its torch reference; and what the host wrappers refuse."""

from __future__ import annotations

import importlib.util
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Triton decides at the first import of a kernel whether it compiles or interprets.
os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime.errors import InterpreterError

from unifiedpool.arena import Arena
from unifiedpool.errors import InvalidArgumentError
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
from unifiedpool.kernels.copy_cells import CellPairs
from unifiedpool.kernels.copy_rows import RowParts
from unifiedpool.kernels.page_tables import BatchTables
from unifiedpool.layout import Kind, Layout, Segment
from unifiedpool.planner import Planner

pytestmark = [
    pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning"),
    # The interpreter converts one-element arrays to numbers, and rounds NaN on purpose.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

POISON = 0xFF  # as bytes; NaN in every float dtype


def aligned(size: int, seed: int | None = None) -> Tensor:
    """Bytes at a 256-byte aligned address: random, or poison without a seed."""
    raw = torch.full((size + 256,), POISON, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    buffer = raw[start : start + size]
    if seed is not None:
        buffer.copy_(torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    return buffer


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, seed: int | None = None) -> Tensor:
    """A view of those strides (in elements) over memory of its own: random numbers, or poison."""
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    base = aligned((extent * dtype.itemsize + 15) // 16 * 16)
    view = torch.as_strided(base.view(dtype), shape, strides, base.storage_offset() // dtype.itemsize)
    if seed is not None:
        view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return view


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment, bytes between its elements included, in poisoned memory."""
    size = tensor.dtype.itemsize
    extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    span = extent * size if tensor.numel() else 0
    base = aligned(span + 512)
    start = base.storage_offset() + tensor.data_ptr() % 256
    whole = torch.tensor([], dtype=torch.uint8).set_(base.untyped_storage())
    hidden = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * size
    whole[start : start + span].copy_(hidden[first : first + span])
    view = torch.tensor([], dtype=tensor.dtype)
    return view.set_(base.untyped_storage(), start // size, tensor.shape, tensor.stride())


def memory(tensor: Tensor) -> Tensor:
    """Every byte around a `copied` tensor, from an aligned address on."""
    whole = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[-whole.data_ptr() % 256 :][: len(whole) - 256]


def both(call: Callable[..., object], *outputs: Tensor) -> list[Tensor]:
    """Run `call` on copies of its outputs with the reference and with the kernel; return the reference's outputs.

    Raises AssertionError when one byte differs, of the outputs or of the memory around and between them.
    """
    first, second = [copied(each) for each in outputs], [copied(each) for each in outputs]
    with backend.use("torch"):
        call(*first)
    with backend.use("triton"):
        call(*second)
    for left, right in zip(first, second, strict=True):
        assert torch.equal(memory(left), memory(right))
    return first


def index(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# -- the switch ------------------------------------------------------------------------------------------------------


def test_backend_auto_runs_the_kernels_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIEDPOOL_KERNELS", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert backend.current() == "auto"
    assert not backend.uses_kernels(cpu) and backend.uses_kernels(cuda)
    with backend.use("torch"):
        assert not backend.uses_kernels(cuda)
        with backend.use("triton"):
            assert backend.uses_kernels(cpu)
        assert backend.current() == "torch"
    monkeypatch.setenv("UNIFIEDPOOL_KERNELS", "triton")
    assert backend.uses_kernels(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InvalidArgumentError, match="set TRITON_INTERPRET=1"):
        backend.uses_kernels(cpu)


def test_backend_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="backend 'cuda'; choose one of auto, triton, torch"),
        backend.use("cuda"),
    ):
        pass
    monkeypatch.setenv("UNIFIEDPOOL_KERNELS", "fast")
    with pytest.raises(InvalidArgumentError, match="backend 'fast'"):
        backend.current()


# -- copy_cells ------------------------------------------------------------------------------------------------------


def disjoint_cells(rng: random.Random, strides: list[int], size: int) -> list[CellPairs]:
    """Random copies of several kinds whose bytes are pairwise disjoint."""
    free = [True] * (size // 16)
    pairs = []
    for stride in strides:
        taken: list[list[int]] = [[], []]
        cells = list(range(size // stride))
        rng.shuffle(cells)
        wanted = rng.randrange(0, 4)
        for cell in cells:
            units = slice(cell * stride // 16, (cell + 1) * stride // 16)
            if len(taken[1]) == wanted or not all(free[units]):
                continue
            side = 0 if len(taken[0]) == len(taken[1]) else 1
            taken[side].append(cell)
            free[units] = [False] * (stride // 16)
        pairs.append(CellPairs(stride, taken[0][: len(taken[1])], taken[1]))
    return pairs


@pytest.mark.parametrize("strides", [[16], [80, 16], [768, 256], [20_480, 2_048, 256], [34_816, 17_408]])
def test_copy_cells_random_kinds_in_one_launch_equal_the_reference(strides: list[int], rng: random.Random) -> None:
    size = 8 * strides[0] + 48
    for _ in range(4):
        pairs = disjoint_cells(rng, strides, size)
        before = aligned(size, rng.randrange(1 << 30))

        def call(buffer: Tensor, pairs: list[CellPairs] = pairs) -> None:
            copy_cells.copy_cells(buffer, buffer, pairs)

        (after,) = both(call, before)
        expected = before.clone()
        for pair in pairs:
            for old, new in zip(pair.src, pair.dst, strict=True):
                stride = pair.stride_bytes
                expected[new * stride : (new + 1) * stride] = before[old * stride : (old + 1) * stride]
        assert torch.equal(after, expected)


def test_copy_cells_between_arenas_and_zero_cells_equal_the_reference(rng: random.Random) -> None:
    source, target = aligned(20 * 1280, 1), aligned(12 * 1280)
    pairs = [CellPairs(1280, rng.sample(range(20), 5), rng.sample(range(12), 5))]
    (after,) = both(lambda buffer: copy_cells.copy_cells(source, buffer, pairs), target)
    for old, new in zip(pairs[0].src, pairs[0].dst, strict=True):
        assert torch.equal(after[new * 1280 : (new + 1) * 1280], source[old * 1280 : (old + 1) * 1280])
    both(lambda buffer: copy_cells.zero_cells(buffer, 1280, [0, 3, 3, 11]), target)
    (after,) = both(lambda buffer: copy_cells.zero_cells(buffer, 256, np.array([1, 8], np.int64)), target)
    assert torch.equal(after.eq(0).nonzero().flatten(), torch.tensor([*range(256, 512), *range(2048, 2304)]))


def test_copy_cells_nothing_to_do_changes_nothing() -> None:
    target = aligned(1024, 3)
    for pairs in ([], [CellPairs(256, [], [])], [CellPairs(256, [], []), CellPairs(512, [1], [1])]):
        (after,) = both(lambda buffer, pairs=pairs: copy_cells.copy_cells(buffer, buffer, pairs), target)
        assert torch.equal(after, target)
    (after,) = both(lambda buffer: copy_cells.zero_cells(buffer, 256, []), target)
    (after,) = both(lambda buffer: copy_cells.run_operations(buffer, np.empty((0, 4), np.int32), [256]), target)
    assert torch.equal(after, target)


def test_copy_cells_bad_arguments_are_refused_by_name() -> None:
    buffer = aligned(4096)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: copy_cells.copy_cells(buffer.view(torch.int32), buffer, []), r"source is torch\.int32; it must be"),
        (lambda: copy_cells.copy_cells(buffer, buffer.view(2, -1), []), r"target has shape \(2, 2048\)"),
        (lambda: copy_cells.copy_cells(buffer, buffer[::2], []), "target has stride 2"),
        (lambda: copy_cells.copy_cells(buffer[8:], buffer, []), "source starts at .* multiple of 16 bytes"),
        (lambda: copy_cells.copy_cells(buffer, buffer.to("meta"), []), "source is on cpu, target on meta"),
        (lambda: _copy(buffer, 250, [0], [1]), "stride_bytes is 250 bytes; it must be a positive multiple of 16"),
        (lambda: _copy(buffer, 256, [0, 1], [2]), "2 source cells and 1 destination"),
        (lambda: _copy(buffer, 256, [0], [16]), "dst holds cells 16 to 16; the buffer has cells 0 to 15"),
        (lambda: _copy(buffer, 256, [-1], [3]), "src holds cells -1 to -1"),
        (lambda: _copy(buffer, 256, np.zeros((1, 1), np.int32), [3]), "src has shape"),
        (lambda: _copy(buffer, 256, [0, 1], [3, 3]), "two destinations overlap at byte 768"),
        (lambda: _copy(buffer, 256, [0, 1], [1, 2]), "a destination overlaps the source at byte 256"),
        (lambda: copy_cells.zero_cells(buffer, 24, [0]), "stride_bytes is 24 bytes"),
        (lambda: copy_cells.zero_cells(buffer, 256, [99]), "cells holds cells 99 to 99"),
        (lambda: copy_cells.run_operations(buffer, np.zeros((1, 4), np.int32), [8]), "a stride is 8 bytes"),
    ]
    nested = [CellPairs(1024, [0], [1]), CellPairs(256, [8, 6], [9, 12])]
    refused.append((lambda: copy_cells.copy_cells(buffer, buffer, nested), "overlaps the source at byte 1536"))
    for call, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            call()
    assert bool(buffer.eq(POISON).all())


def _copy(buffer: Tensor, stride: int, src: Any, dst: Any) -> None:
    copy_cells.copy_cells(buffer, buffer, [CellPairs(stride, src, dst)])


# -- step plans ------------------------------------------------------------------------------------------------------


def churn(planner: Planner, rng: random.Random, steps: int) -> Iterator[Any]:
    """Plans of random allocations, frees, copies and zeroes that make the planner move cells."""
    live: list[int] = []
    for step in range(steps):
        with suppress(MemoryError):
            live += planner.allocate({"full": rng.randrange(6), "state": rng.randrange(2)}).tolist()
        pages = [handle for handle in live if planner.cell(handle, "full") >= 0]
        if len(pages) > 2:
            src, dst = rng.sample(pages, 2)
            planner.copy([src], [dst], kind="full")
            planner.zero([rng.choice(pages)], "full")
        gone = rng.sample(live, len(live) * rng.randrange(5) // 10)
        planner.free(gone)
        live = [handle for handle in live if handle not in gone]
        plan = planner.seal(step)
        if plan is not None:
            yield plan


@pytest.mark.parametrize("strides", [{"state": 1024, "full": 256}, {"state": 20_480, "swa": 1024, "full": 512}])
def test_arena_apply_by_kernels_references_and_c_agree(strides: dict[str, int], rng: random.Random) -> None:
    layout = Layout.simple(strides)
    size = 8 * layout.strides[0]
    planner = Planner(layout, size)
    arenas = [Arena(layout, size) for _ in range(3)]
    start = aligned(size, 5)
    for arena in arenas:
        arena.buffer.copy_(start)
    operations = 0
    for plan in churn(planner, rng, 12):
        for arena, chosen in zip(arenas, ("auto", "torch", "triton"), strict=True):
            with backend.use(chosen):
                arena.apply(plan)
        operations += len(plan.operations)
        for arena in arenas[1:]:
            assert torch.equal(arena.buffer, arenas[0].buffer)
            for name, table in arena.tables.items():
                assert torch.equal(table, arenas[0].tables[name])
    assert operations > 10


def test_arena_apply_with_fills_by_kernels_and_references_agrees(rng: random.Random) -> None:
    page = Kind("full", (Segment("key", (0,), (8,), "bfloat16", "token"),), page_size=4)
    slot = Kind("state", (Segment("conv", (0,), (64,), "float32", "slot", fill=1.5),))
    layout = Layout.build([slot, page])
    size = 12 * layout.strides[0]
    planner, arenas = Planner(layout, size), [Arena(layout, size) for _ in range(2)]
    for arena in arenas:
        arena.buffer.fill_(POISON)
    for plan in churn(planner, rng, 10):
        for arena, chosen in zip(arenas, ("torch", "triton"), strict=True):
            with backend.use(chosen):
                arena.apply(plan)
        assert torch.equal(arenas[0].buffer, arenas[1].buffer)


def test_arena_the_switch_decides_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.simple({"state": 1024, "full": 256})
    ran: list[str] = []
    for module, name in ((copy_cells, "_launch"), (naive, "run_operations")):
        monkeypatch.setattr(module, name, lambda *_, name=name: ran.append(name))
    for chosen, expected in (("triton", ["_launch"]), ("torch", ["run_operations"]), ("auto", [])):
        planner, arena = Planner(layout, 1 << 14), Arena(layout, 1 << 14)
        planner.allocate({"full": 2, "state": 1})
        with backend.use(chosen):
            arena.apply(planner.seal())
        assert ran == expected, chosen
        ran.clear()


def test_arena_on_a_cpu_does_not_load_triton() -> None:
    script = """
import sys, torch
from unifiedpool import Arena, Layout, Planner
layout = Layout.simple({"state": 1024, "full": 256})
planner, arena = Planner(layout, 1 << 14), Arena(layout, 1 << 14)
planner.allocate({"full": 2, "state": 1})
arena.apply(planner.seal())
arena.block_table(torch.ones(1, 1, dtype=torch.int32), "full", torch.empty(1, 1, dtype=torch.int32))
print("triton" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "UNIFIEDPOOL_KERNELS"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_arena_tables_by_kernels_and_references_agree() -> None:
    layout = Layout.simple({"state": 1024, "full": 256})
    planner, arena = Planner(layout, 1 << 16), Arena(layout, 1 << 16)
    pages = planner.allocate({"full": 7}).tolist()
    arena.apply(planner.seal())
    handles = index([*pages[:5], 0, -1, pages[6]]).reshape(2, 4)
    results = []
    for chosen in ("torch", "triton"):
        with backend.use(chosen):
            results.append(arena.block_table(handles, "full", torch.empty(2, 4, dtype=torch.int32)))
    assert torch.equal(*results)
    assert results[0].tolist()[1][1:3] == [0, 0]


# -- copy_rows -------------------------------------------------------------------------------------------------------


def page_views(order: str) -> tuple[Arena, list[Tensor]]:
    """An arena of pages with two layers of keys and values of unequal width, and its views as `[pages, page, ...]`."""
    segments = (
        Segment("key", (0, 2), (2, 24), "bfloat16", "token"),
        Segment("value", (0, 2), (2, 8), "float32", "token"),
    )
    kind = Kind(
        "full",
        segments,
        page_size=4,
        order="page" if order == "HND" else order,
        format="HND" if order == "HND" else "NHD",
    )
    arena = Arena(Layout.build([kind]), 30_000)
    views = [arena.view("full", layer, name) for layer in (0, 2) for name in ("key", "value")]
    return arena, [view.transpose(1, 2) if order == "HND" else view for view in views]


@pytest.mark.parametrize("order", ["page", "token", "head", "HND"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copy_rows_compaction_to_the_front_equals_the_reference(
    order: str, dtype: torch.dtype, rng: random.Random
) -> None:
    arena, views = page_views(order)
    arena.buffer.copy_(aligned(arena.arena_bytes, 7))
    pages = list(range(1, arena.num_cells("full")))
    rng.shuffle(pages)
    src: list[int] = []
    dst: list[int] = []
    indptr = [0]
    for request in range(4):
        rows = [pages[3 * request + i] * 4 + j for i in range(3) for j in range(4)]
        kept = sorted(rng.sample(range(12), rng.randrange(0, 9)))
        src += [rows[i] for i in kept]
        dst += rows[: len(kept)]
        if request == 2:
            src.append(-1)
            dst.append(rows[11])
        indptr.append(len(src))
    before = [view.clone() for view in views]

    def call(buffer: Tensor) -> None:
        shifted = [
            torch.as_strided(
                buffer.view(view.dtype),
                view.shape,
                view.stride(),
                (buffer.storage_offset() + view.data_ptr() - arena.buffer.data_ptr()) // view.dtype.itemsize,
            )
            for view in views
        ]
        parts = RowParts.of(buffer, shifted)
        copy_rows.copy_rows(buffer, parts, index(src, dtype), index(dst, dtype), index(indptr, dtype))
        buffers.append(shifted)

    buffers: list[list[Tensor]] = []
    both(call, arena.buffer)
    moved = [(old, new) for old, new in zip(src, dst, strict=True) if old >= 0]
    for after in buffers:
        for view, was in zip(after, before, strict=True):
            for old, new in moved:
                assert torch.equal(
                    view[new // 4, new % 4].contiguous().view(torch.uint8),
                    was[old // 4, old % 4].contiguous().view(torch.uint8),
                )


def test_copy_rows_bad_arguments_are_refused_by_name() -> None:
    arena, views = page_views("page")
    parts = RowParts.of(arena.buffer, views)
    good = index([20, 21]), index([4, 5]), index([0, 2])

    def call(**changes: Any) -> Callable[[], object]:
        names = ("src", "dst", "indptr")
        return lambda: copy_rows.copy_rows(
            arena.buffer, parts, *[changes.get(n, g) for n, g in zip(names, good, strict=True)]
        )

    call()()
    refused: list[tuple[Callable[[], object], str]] = [
        (call(src=good[0].float()), r"src is torch\.float32; it must be torch\.int32 or torch\.int64"),
        (call(dst=index([4])), r"dst has shape \(1,\); it must be \(2\)"),
        (call(dst=index([4, 0, 5, 0])[::2]), "dst has stride 2"),
        (call(indptr=index([0, 3])), r"indptr \[0, 3\] must ascend within 0 and 2"),
        (call(src=index([20, 100_000])), "src holds row 100000; the buffer has rows 0 to"),
        (call(dst=index([21, 5])), "copy 1 reads row 21, which copy 0 has overwritten"),
        (call(dst=index([5, 5])), "copies 0 and 1 write row 5"),
        (call(src=good[0].to("meta")), "src is on meta; it must be on cpu"),
        (lambda: RowParts.of(arena.buffer, []), "views is empty"),
        (lambda: RowParts.of(arena.buffer, [views[0], views[1][:, :2]]), r"views\[1\] has pages of 2 tokens"),
        (lambda: RowParts.of(arena.buffer, [views[0][1:]]), "does not start in the first page"),
        (lambda: RowParts.of(arena.buffer, [views[0][..., 1:]]), r"views\[0\] starts at .* multiple of 16"),
        (lambda: RowParts.of(arena.buffer, [views[0][..., ::2]]), "has no axis of stride 1"),
        (
            lambda: RowParts.of(arena.buffer, [torch.zeros(3, 4, 6, dtype=torch.bfloat16)]),
            "page stride is 48|does not start",
        ),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()


# -- track_states ----------------------------------------------------------------------------------------------------


def lanes(rng: random.Random, slots: int, count: int) -> tuple[Tensor, list[int], list[int]]:
    """A mask and disjoint active and track slots, some of them negative."""
    free = rng.sample(range(slots), 2 * count)
    active = [slot if rng.random() < 0.8 else -rng.randrange(1, 4) for slot in free[:count]]
    track = [slot if rng.random() < 0.8 else -1 for slot in free[count:]]
    return torch.tensor([rng.random() < 0.7 for _ in range(count)]), active, track


@pytest.mark.parametrize(
    ("shape", "strides", "dtype"),
    [
        ((16, 24), (64, 1), torch.float32),
        ((16, 5, 3), (64, 3, 1), torch.bfloat16),  # 30 bytes: no whole 16-byte units
        ((16, 33), (48, 1), torch.uint8),
        ((16, 3, 4, 8), (256, 64, 8, 1), torch.bfloat16),  # three layers, equally spaced
        ((16, 3, 40), (48, 16 * 48, 1), torch.float16),  # [layers, slots, ...] seen by slot
        ((16, 8, 8), (64, 1, 8), torch.float32),  # transposed inside
        ((16, 5000), (5120, 1), torch.float32),
    ],
)
def test_track_states_random_lanes_equal_the_reference(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rng: random.Random
) -> None:
    for dtype_of_index in (torch.int32, torch.int64):
        mask, active, track = lanes(rng, shape[0], 6)
        before = strided(shape, strides, dtype, seed=rng.randrange(1 << 30))
        indices = index(active, dtype_of_index), index(track, dtype_of_index)
        (after,) = both(partial(track_states.track_states, mask=mask, active=indices[0], track=indices[1]), before)
        expected = before.clone()
        for marked, source, target in zip(mask.tolist(), active, track, strict=True):
            if marked and source >= 0 and target >= 0:
                expected[target] = before[source]
        assert torch.equal(after, expected)


def test_track_states_few_programs_share_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track_states, "MAX_PROGRAMS", 3)
    before = strided((8, 9000), (9216, 1), torch.float32, seed=2)
    mask = torch.tensor([True, False, True, True])
    both(lambda states: track_states.track_states(states, mask, index([0, 1, 2, -1]), index([5, 6, 7, 4])), before)


def test_track_states_whole_envelopes_empty_batches_and_repeats() -> None:
    buffer = aligned(10 * 768 + 100, 4)
    mask = torch.tensor([True, True, False, True])
    active, track = index([0, 0, 2, 3]), index([4, 5, 6, 3])
    (after,) = both(lambda each: track_states.track_cells(each, 768, mask, active, track), buffer)
    assert torch.equal(after[4 * 768 : 5 * 768], buffer[:768]) and torch.equal(after[5 * 768 : 6 * 768], buffer[:768])
    none = index([])
    both(lambda each: track_states.track_cells(each, 768, torch.empty(0, dtype=torch.bool), none, none), buffer)
    far = index([50, 0, 0, 0])
    both(
        lambda each: track_states.track_cells(each, 768, torch.tensor([True, False, False, False]), far, track), buffer
    )


def test_track_states_bad_arguments_are_refused_by_name() -> None:
    states, mask = strided((8, 16), (64, 1), torch.float32), torch.ones(2, dtype=torch.bool)
    ok = index([0, 1]), index([4, 5])
    call = track_states.track_states
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: call(states, mask.int(), *ok), r"mask is torch\.int32; it must be torch\.bool"),
        (lambda: call(states, mask, ok[0].short(), ok[1]), r"active is torch\.int16"),
        (lambda: call(states, mask, ok[0], index([4])), r"track has shape \(1,\); it must be \(2\)"),
        (lambda: call(states.to("meta"), mask, *ok), "mask is on cpu; it must be on meta"),
        (lambda: call(strided((8, 16), (65, 1), torch.float32), mask, *ok), "slot stride is 260 bytes"),
        (lambda: call(states[:, 1:], mask, *ok), "states starts at"),
        (lambda: call(strided((8, 3, 4), (64, 6, 1), torch.float32), mask, *ok), "row stride is 24 bytes"),
        (lambda: call(strided((8, 4), (64, 2), torch.float32), mask, *ok), "equally spaced runs"),
        (lambda: call(strided((8, 80), (64, 1), torch.float32), mask, *ok), "slots overlap"),
        (lambda: call(strided((8, 4, 16), (64, 32, 1), torch.float32), mask, *ok), "slots overlap"),
        (lambda: call(states, mask, ok[0], index([4, 4])), "track holds slot 4 twice"),
        (lambda: call(states, mask, ok[0], index([4, 0])), "slot 0 is one lane's track and another's active slot"),
        (lambda: track_states.track_cells(aligned(512), 100, mask, *ok), "stride_bytes is 100 bytes"),
        (lambda: call(states, torch.ones(5000, dtype=torch.bool), index([0] * 5000), index([1] * 5000)), "5000 lanes"),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()


# -- commit_conv_windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "columns", "dtype"),
    [(16, 3, torch.bfloat16), (5, 3, torch.bfloat16), (7, 4, torch.float32), (8, 2, torch.float8_e5m2)],
)
@pytest.mark.parametrize("num_layers", [0, 2])
def test_commit_conv_windows_of_their_own_equal_the_reference(
    channels: int, columns: int, dtype: torch.dtype, num_layers: int, rng: random.Random
) -> None:
    requests, steps, slots = 5, 4, 9
    outer = (num_layers,) if num_layers else ()
    windows = torch.randn(*outer, requests + 1, steps, channels, columns).to(dtype)
    pitch = (channels * columns + 31) // 16 * 16
    strides = (slots * pitch, pitch, columns, 1)
    conv = strided((*outer, slots, channels, columns), strides[0 if num_layers else 1 :], dtype)
    last = [2, -1, 0, 3, 1]
    places = [*rng.sample(range(slots), 4), -1]
    (after,) = both(
        lambda each: commit_conv_windows.commit_conv_windows(each, windows, index(last), index(places)), conv
    )
    if not num_layers:
        after, windows = after[None], windows[None]
    for request, (step, slot) in enumerate(zip(last, places, strict=True)):
        if step >= 0 and slot >= 0:
            assert torch.equal(after[:, slot].view(torch.uint8), windows[:, request, step].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_commit_conv_windows_from_one_overlapping_row_equals_the_reference(
    dtype: torch.dtype, transposed: bool
) -> None:
    requests, steps, width, channels, slots = 4, 6, 4, 16, 7
    rows = torch.randn(requests, channels, steps + width - 1).to(dtype)
    windows = commit_conv_windows.overlapping_windows(rows, width - 1)
    assert windows.shape == (requests, steps, channels, width - 1) and windows.data_ptr() > rows.data_ptr()
    shape = (slots, channels, width - 1)
    conv = strided(shape, (64, 1, channels) if transposed else (64, width - 1, 1), dtype)
    last, places = index([5, 0, -1, 3], torch.int64), index([6, 2, 1, 0], torch.int64)
    (after,) = both(lambda each: commit_conv_windows.commit_conv_windows(each, windows, last, places), conv)
    for request, step, slot in ((0, 5, 6), (1, 0, 2), (3, 3, 0)):
        assert torch.equal(after[slot], rows[request, :, step + 1 : step + width])


def test_commit_conv_windows_of_other_rows_than_the_lanes_equal_the_reference() -> None:
    """Windows that lie in the state slots: the row is the slot."""
    for channels in (8, 5):
        windows, conv = torch.randn(6, 4, channels, 2), strided((6, channels, 2), (32, 2, 1), torch.float32)
        slots, last = index([5, 2, -1, 0]), index([3, 0, 1, -1])
        (after,) = both(
            partial(commit_conv_windows.commit_conv_windows, windows=windows, last_step=last, slots=slots, rows=slots),
            conv,
        )
        assert torch.equal(after[5], windows[5, 3]) and torch.equal(after[2], windows[2, 0])
        assert bool(after[[0, 1, 3, 4]].isnan().all())


def test_commit_conv_windows_nothing_to_do_and_steps_past_the_end_change_nothing() -> None:
    conv, windows = strided((3, 8, 2), (16, 2, 1), torch.float32), torch.randn(2, 4, 8, 2)
    empty = index([])
    for last, places in ((empty, empty), (index([4, 100]), index([0, 1])), (index([0, 1]), index([3, -5]))):
        (after,) = both(
            lambda each, a=last, b=places: commit_conv_windows.commit_conv_windows(each, windows, a, b), conv
        )
        assert bool(after.isnan().all())


def test_commit_conv_windows_bad_arguments_are_refused_by_name() -> None:
    conv, windows, last, slots = torch.zeros(5, 8, 3), torch.zeros(2, 4, 8, 3), index([0, 1]), index([3, 4])
    call = commit_conv_windows.commit_conv_windows
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: call(conv, windows.half(), last, slots), r"windows is torch\.float16; it must be torch\.float32"),
        (lambda: call(conv, windows[..., :2], last, slots), r"windows has shape .*; it must be \(1, any, any, 8, 3\)"),
        (lambda: call(conv[0], windows, last, slots), "conv has shape"),
        (lambda: call(conv, windows[:1], last, slots), "windows holds 1 rows, last_step 2"),
        (lambda: call(conv, windows, last, slots, rows=index([0])), "rows has shape"),
        (lambda: call(conv, windows, last, slots, rows=index([0, 2])), "rows holds 2; windows has rows 0 to 1"),
        (lambda: call(conv, windows, last.float(), slots), "last_step is"),
        (lambda: call(conv, windows, last, slots[:1]), "slots has shape"),
        (lambda: call(conv, windows, last, index([3, 3])), "holds a slot twice"),
        (lambda: call(conv, windows.to("meta"), last, slots), "windows is on meta"),
        (lambda: commit_conv_windows.overlapping_windows(torch.zeros(8, 3), 3), "hold no step"),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()


# -- replay_states ---------------------------------------------------------------------------------------------------


def ring_inputs(dtype: torch.dtype, per_channel: bool, seed: int, **sizes: int) -> dict[str, Tensor]:
    """States and rings whose hidden and unused memory is NaN; sizes as in the docstrings."""
    size = {"slots": 6, "rows": 5, "length": 32, "heads": 2, "key_heads": 1, "v": 20, "k": 12} | sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows, length, heads = size["rows"], size["length"], size["heads"]
    pitch = heads * size["v"] * size["k"] + 64
    state = strided(
        (size["slots"], heads, size["v"], size["k"]), (pitch, size["v"] * size["k"], size["k"], 1), dtype, seed
    )
    gate = (rows, length, heads, size["k"]) if per_channel else (rows, length, heads)
    return {
        "state": state,
        "rawv": normal(rows, length, heads, size["v"]).to(dtype),
        "rawk": normal(rows, length, size["key_heads"], size["k"]).to(dtype),
        "g": -torch.rand(gate, generator=generator),
        "beta": torch.rand(rows, length, heads, generator=generator),
    }


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


SLOTS, START, ROWS = [4, 0, -1, 2, 5], [30, 0, 3, 17, 31], [0, 1, 2, 3, 4]


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("count", [[16] * 5, [0, 1, 5, 32, 7]], ids=["16", "any"])
def test_replay_states_fold_of_float32_is_within_1e_6_of_float64(
    per_channel: bool, count: list[int], seed: int
) -> None:
    inputs = ring_inputs(torch.float32, per_channel, seed)
    exact = inputs["state"].double()
    naive.replay_states(
        exact,
        *[inputs[name] for name in ("rawv", "rawk", "g", "beta")],
        *map(index, (SLOTS, ROWS, START, count)),
        eps=1e-6,
        normalize=True,
        dtype=torch.float64,
    )
    for chosen in ("torch", "triton"):
        state = copied(inputs["state"])
        with backend.use(chosen):
            replay_states.replay_states(
                state,
                *[inputs[name] for name in ("rawv", "rawk", "g", "beta")],
                slots=index(SLOTS),
                rows=index(ROWS),
                start=index(START),
                count=index(count),
            )
        assert error(state, exact) <= 1e-6
        untouched = [slot for slot in range(6) if slot not in SLOTS] + [SLOTS[i] for i, c in enumerate(count) if c == 0]
        assert torch.equal(state[untouched], inputs["state"][untouched])


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_replay_states_bfloat16_is_the_float64_fold_rounded_once(per_channel: bool, seed: int) -> None:
    inputs = ring_inputs(torch.bfloat16, per_channel, seed)
    exact = inputs["state"].double()
    arguments = [inputs[name] for name in ("rawv", "rawk", "g", "beta")]
    requests = {
        "slots": index(SLOTS, torch.int64),
        "start": index(START, torch.int64),
        "count": index([16, 3, 9, 1, 0], torch.int64),
    }
    rows = index(ROWS, torch.int64)
    naive.replay_states(
        exact,
        *arguments,
        requests["slots"],
        rows,
        requests["start"],
        requests["count"],
        eps=1e-6,
        normalize=True,
        dtype=torch.float64,
    )
    # Half a unit in the last of 8 bits (2^-8) for the rounding to nearest, a whole one for the interpreter, which cuts
    # off; and the float32 error of the fold.
    for chosen, units in (("torch", 2.0**-8), ("triton", 2.0**-7)):
        state = copied(inputs["state"])
        with backend.use(chosen):
            replay_states.replay_states(state, *arguments, **requests, rows=rows)
        bound = exact.abs() * units * 1.01 + 2e-6 * float(exact.abs().max())
        assert bool(((state.double() - exact).abs() <= bound).all())


def test_replay_states_layouts_and_options_agree(seed: int) -> None:
    inputs = ring_inputs(torch.float32, True, seed, v=16, k=16, key_heads=2)
    keys = inputs["rawk"] / (inputs["rawk"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    requests: dict[str, Tensor] = {
        "slots": index(SLOTS),
        "rows": index(ROWS),
        "start": index(START),
        "count": index([4, 2, 1, 0, 9]),
    }
    ring = (inputs["rawv"], inputs["rawk"], inputs["g"], inputs["beta"])
    with backend.use("triton"):
        plain, swapped, ready = (copied(inputs["state"]) for _ in range(3))
        replay_states.replay_states(plain, *ring, **requests)
        kept = swapped.transpose(-1, -2).contiguous()
        replay_states.replay_states(kept.transpose(-1, -2), *ring, **requests)
        replay_states.replay_states(ready, ring[0], keys, *ring[2:], **requests, normalize=False)
    assert torch.equal(kept.transpose(-1, -2), plain)
    assert error(ready, plain.double()) <= 1e-6


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_outputs_equal_the_outputs_of_the_folded_state(per_channel: bool, dtype: torch.dtype, seed: int) -> None:
    inputs = ring_inputs(dtype, per_channel, seed)
    count = [16, 0, 2, 32, 5]
    query = torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    deltas, keys = inputs["rawv"], inputs["rawk"]
    exact = torch.empty(5, 2, 20, dtype=torch.float64)
    requests = [index(values) for values in (SLOTS, ROWS, START, count)]
    state = inputs["state"]
    naive.replay_outputs(state, deltas, keys, inputs["g"], query, exact, *requests, scale=0.5, dtype=torch.float64)
    slots, rows, start, counts = requests
    for chosen in ("torch", "triton"):
        out = torch.full((5, 2, 20), float("nan"))
        with backend.use(chosen):
            replay_states.replay_outputs(
                state,
                deltas,
                keys,
                inputs["g"],
                query,
                out,
                slots=slots,
                rows=rows,
                start=start,
                count=counts,
                scale=0.5,
            )
        assert error(out, exact) <= 1e-6
        assert bool(out[2].eq(0).all())


def test_replay_outputs_of_a_fold_s_own_updates_equal_the_fold(seed: int) -> None:
    """d and k as the fold makes them: the unrolled formula gives the state's product with any query."""
    inputs = ring_inputs(torch.float32, True, seed, rows=1, slots=1, length=8, heads=2, key_heads=2, v=8, k=8)
    state = inputs["state"][0].double()
    d, k = torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8)
    steps, begin = 6, 5
    for step in range(steps):
        at = (begin + step) % 8
        key = inputs["rawk"][0, at].double()
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        state = state * inputs["g"][0, at].double().exp()[:, None, :]
        delta = inputs["beta"][0, at].double()[:, None] * (
            inputs["rawv"][0, at].double() - torch.einsum("hvk,hk->hv", state, key)
        )
        state = state + delta[:, :, None] * key[:, None, :]
        d[0, at], k[0, at] = delta.float(), key.float()
    query = torch.randn(1, 2, 8)
    out = torch.empty(1, 2, 8)
    zero = index([0])
    with backend.use("triton"):
        replay_states.replay_outputs(
            inputs["state"], d, k, inputs["g"], query, out, slots=zero, start=index([begin]), count=index([steps])
        )
    assert error(out, torch.einsum("hvk,lhk->lhv", state, query.double())) <= 1e-6


def test_replay_states_bad_arguments_are_refused_by_name() -> None:
    inputs = ring_inputs(torch.float32, False, 0)
    requests = {"slots": index([0, 1]), "rows": index([0, 1]), "start": index([0, 0]), "count": index([1, 1])}

    def call(**changes: Any) -> Callable[[], object]:
        given = inputs | requests | changes
        return lambda: replay_states.replay_states(
            given.pop("state"), given.pop("rawv"), given.pop("rawk"), given.pop("g"), given.pop("beta"), **given
        )

    refused: list[tuple[Callable[[], object], str]] = [
        (call(state=inputs["state"].double()), r"state is torch\.float64"),
        (call(rawv=inputs["rawv"][..., :3]), r"rawv has shape .*; it must be \(any, any, 2, 20\)"),
        (call(rawk=inputs["rawk"][:, :4]), "rawk has shape"),
        (call(rawk=inputs["rawk"][:, :, [0, 0, 0]]), "rawk has 3 heads; they must divide the state's 2"),
        (call(g=inputs["g"][..., None]), "g has shape"),
        (call(beta=inputs["beta"].int()), r"beta is torch\.int32"),
        (call(rawv=inputs["rawv"].transpose(-1, -2).contiguous().transpose(-1, -2)), "rawv has last stride"),
        (call(slots=index([0, 6])), "slots holds 6; the largest is 5"),
        (call(slots=index([3, 3])), "holds a slot twice"),
        (call(rows=index([0, 5])), "rows holds 5; the largest is 4"),
        (call(start=index([0, 32])), "start holds 32; the largest is 31"),
        (call(count=index([0, 33])), "count holds 33; the largest is 32"),
        (call(count=index([0])), "count has shape"),
        (call(rawk=inputs["rawk"].to("meta")), "rawk is on meta"),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()
    query, out = torch.zeros(2, 3, 12), torch.zeros(2, 2, 20)
    with pytest.raises(InvalidArgumentError, match="query has 3 heads"):
        replay_states.replay_outputs(
            inputs["state"], inputs["rawv"], inputs["rawk"], inputs["g"], query, out, **requests
        )
    with pytest.raises(InvalidArgumentError, match="out has shape"):
        replay_states.replay_outputs(
            inputs["state"], inputs["rawv"], inputs["rawk"], inputs["g"], query[:, :1], out[:1], **requests
        )


def test_indices_out_of_range_touch_nothing_where_the_host_cannot_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device indices are not checked; here the checks are taken out."""
    for module, name in ((replay_states, "_check_requests"), (copy_rows, "_check_rows")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    inputs = ring_inputs(torch.float32, True, 0)
    state = copied(inputs["state"])
    ring = [inputs[name] for name in ("rawv", "rawk", "g", "beta")]
    requests = {
        "slots": index([6, 1, 2]),
        "rows": index([0, 5, 1]),
        "start": index([0, 0, -3]),
        "count": index([4, 4, 4]),
    }
    with backend.use("triton"):
        replay_states.replay_states(state, *ring, **requests)
        assert torch.equal(memory(state), memory(copied(inputs["state"])))
        out, query = torch.full((3, 2, 20), float("nan")), torch.ones(3, 1, 12)
        replay_states.replay_outputs(state, *ring[:3], query, out, **requests)
        assert bool(out.eq(0).all())
        arena, views = page_views("page")
        arena.buffer.fill_(POISON)
        parts, end = RowParts.of(arena.buffer, views), arena.num_cells("full") * 4
        before = arena.buffer.clone()
        copy_rows.copy_rows(arena.buffer, parts, index([end, 9]), index([8, end + 3]), index([0, 2]))
        assert torch.equal(arena.buffer, before)


# -- page_tables -----------------------------------------------------------------------------------------------------


def mirror(rng: random.Random, kinds: int = 3, handles: int = 60) -> Tensor:
    """A page table with live and dead handles."""
    cells = [[-1] + [rng.randrange(1, 999) if rng.random() < 0.8 else -1 for _ in range(handles)] for _ in range(kinds)]
    return torch.tensor(cells, dtype=torch.int32)


def test_update_tables_equals_the_reference(rng: random.Random) -> None:
    tables = mirror(rng)
    for count in (0, 1, 17, 60):
        rows = rng.sample(range(1, 61), count)
        changes = index([value for row in rows for value in (row, rng.randrange(99), -1, rng.randrange(99))]).reshape(
            -1, 4
        )
        (after,) = both(lambda each, changes=changes: page_tables.update_tables(each, changes), tables)
        assert count == 0 or after[:, rows].T.equal(changes[:, 1:])


@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize(
    ("page_size", "width", "batch", "padding", "most_new"),
    [(4, 9, 5, 2, 6), (16, 3, 1, 0, 1), (1, 40, 3, 1, 30), (64, 700, 2, 1, 300)],
)
def test_build_tables_every_table_equals_the_reference(
    pad: int, page_size: int, width: int, batch: int, padding: int, most_new: int, rng: random.Random
) -> None:
    tables, kinds = mirror(rng), index([2, 0])
    lengths = [rng.randrange(1, page_size * width + 1) for _ in range(batch)] + [0] * padding
    new = [min(length, rng.randrange(most_new + 1)) for length in lengths]
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    lanes_in_use = batch + padding
    handles = index([rng.randrange(-1, 75) for _ in range(lanes_in_use * (width + 2))]).reshape(lanes_in_use, -1)[
        :, :width
    ]
    states = index([rng.randrange(-1, 75) for _ in range(lanes_in_use)])
    out = BatchTables.allocate(lanes=lanes_in_use + 3, width=width + 1, tokens=max(1, starts[-1] + 5), kinds=2)
    fields = ("block_table", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping", "state_indices")
    for name in fields:
        getattr(out, name).fill_(-99)

    def call(*buffers: Tensor) -> None:
        page_tables.build_tables(
            tables,
            kinds,
            handles,
            index(lengths),
            index(starts),
            BatchTables(*buffers),
            page_size=page_size,
            state_handles=states,
            state_kind=1,
            pad=pad,
        )

    result = BatchTables(*both(call, *[getattr(out, name) for name in fields]))
    known = {}
    for lane, length in enumerate(lengths):
        pages = -(-length // page_size) or int(pad >= 0)
        known[lane] = pages
        assert int(result.kv_indptr[lane + 1] - result.kv_indptr[lane]) == pages
        for which, kind in enumerate(kinds.tolist()):
            expected = [pad] * width
            for column in range(-(-length // page_size)):
                handle = int(handles[lane, column])
                if 0 < handle <= 60 and tables[kind, handle] >= 0:
                    expected[column] = int(tables[kind, handle])
            assert result.block_table[which, lane, :width].tolist() == expected
            first = int(result.kv_indptr[lane])
            assert result.kv_indices[which, first : first + pages].tolist() == expected[:pages]
    assert bool(result.slot_mapping[:, starts[-1] :].eq(-1).all())
    assert bool(result.block_table[:, lanes_in_use:].eq(-99).all()) and bool(
        result.block_table[:, :, width:].eq(-99).all()
    )


def test_build_tables_empty_batch_pads_everything() -> None:
    out = BatchTables.allocate(lanes=4, width=3, tokens=6)
    none = torch.zeros(0, dtype=torch.int32)

    def call(*buffers: Tensor) -> None:
        page_tables.build_tables(
            index([[0, 1], [0, 2]]),
            index([0]),
            torch.zeros(0, 3, dtype=torch.int32),
            none,
            index([0]),
            BatchTables(*buffers),
            page_size=4,
        )

    out.slot_mapping.fill_(7)
    result = BatchTables(
        *both(
            call, out.block_table, out.kv_indptr, out.kv_indices, out.last_page_len, out.slot_mapping, out.state_indices
        )
    )
    assert bool(result.slot_mapping.eq(-1).all()) and int(result.kv_indptr[0]) == 0


def test_translate_and_map_slots_equal_the_reference(rng: random.Random) -> None:
    table = mirror(rng)[0]
    handles = index([rng.randrange(-2, 70) for _ in range(6 * 50)]).reshape(6, 50)[:, :41]
    for null in (0, -1):
        both(
            lambda out, null=null: page_tables.translate(handles, table, out, null),
            torch.empty(6, 45, dtype=torch.int32)[:, :41],
        )
    for dtype in (torch.int32, torch.int64):
        positions = index([rng.randrange(-3, 41 * 4 + 9) for _ in range(6 * 33)], dtype).reshape(6, 33)
        both(
            lambda out, p=positions: page_tables.map_slots(handles, p, table, 4, out),
            torch.empty(6, 33, dtype=torch.int64),
        )
        flat = positions.flatten()[:41]
        both(
            lambda out, p=flat: page_tables.map_slots(handles[0], p, table, 3, out), torch.empty(41, dtype=torch.int64)
        )
    empty = torch.empty(0, 41, dtype=torch.int32)
    both(lambda out: page_tables.translate(empty, table, out, 0), empty)


def test_page_tables_bad_arguments_are_refused_by_name(rng: random.Random) -> None:
    tables, handles = mirror(rng), torch.ones(2, 3, dtype=torch.int32)
    out = BatchTables.allocate(lanes=2, width=3, tokens=4)

    def build(**changes: Any) -> Callable[[], object]:
        given: dict[str, Any] = {
            "tables": tables,
            "kinds": index([0]),
            "handles": handles,
            "lengths": index([4, 5]),
            "query_start": index([0, 1, 2]),
            "out": out,
            "page_size": 4,
        }
        return lambda: page_tables.build_tables(**(given | changes))

    build()()
    refused: list[tuple[Callable[[], object], str]] = [
        (build(tables=tables.long()), r"tables is torch\.int64"),
        (build(tables=tables[:, ::2]), "tables has strides"),
        (build(kinds=index([0, 1])), r"kinds has shape \(2,\)"),
        (build(handles=handles.T), "handles has last stride|lengths has shape"),
        (build(lengths=index([4])), "lengths has shape"),
        (build(query_start=index([0, 1])), "query_start has shape"),
        (
            build(
                handles=torch.ones(3, 3, dtype=torch.int32), lengths=index([1, 1, 1]), query_start=index([0, 0, 0, 0])
            ),
            "3 lanes of 3 pages; out holds 2 of 3",
        ),
        (build(state_handles=index([1])), "state_handles has shape"),
        (build(state_kind=3), "state_kind is 3; the tables have rows 0 to 2"),
        (build(page_size=0), "page_size is 0"),
        (build(pad=-2), "pad -2"),
        (build(handles=handles.to("meta")), "handles is on meta"),
        (lambda: BatchTables.allocate(lanes=0, width=1, tokens=1), "lanes is 0"),
        (lambda: BatchTables.allocate(lanes=9000, width=1, tokens=1), "9000 lanes"),
        (
            lambda: page_tables.update_tables(tables, torch.zeros(2, 3, dtype=torch.int32)),
            r"changes has shape \(2, 3\); it must be \(any, 4\)",
        ),
        (lambda: page_tables.update_tables(tables.T, torch.zeros(2, 62, dtype=torch.int32)), "tables has strides"),
        (lambda: page_tables.translate(handles.long(), tables[0], handles, 0), r"handles is torch\.int64"),
        (lambda: page_tables.translate(handles, tables[0], handles[:1], 0), "out has shape"),
        (
            lambda: page_tables.map_slots(handles, torch.zeros(2), tables[0], 4, torch.zeros(2)),
            r"positions is torch\.float32",
        ),
        (
            lambda: page_tables.map_slots(handles, torch.zeros(1, 2, dtype=torch.int32), tables[0], 4, torch.zeros(2)),
            "need both",
        ),
        (lambda: page_tables.map_slots(handles, handles, tables[0], 0, handles.long()), "page_size is 0"),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()


# -- write_kv --------------------------------------------------------------------------------------------------------

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("target", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("form", ["NHD", "HND", "odd"])
def test_write_kv_every_dtype_pair_equals_the_reference(
    form: str, source: torch.dtype, target: torch.dtype | None, rng: random.Random
) -> None:
    pages, page_size, tokens = 5, 4, 7
    shapes = ((3, 5), (3, 7)) if form == "odd" else ((2, 16), (2, 48))
    caches, rows = [], []
    for heads, dim in shapes:
        cache_dtype = target or source
        pitch = (heads * dim + 15) // 16 * 16
        strides = (page_size * pitch + 16, pitch, dim, 1)
        if form == "HND":
            strides = (page_size * pitch + 16, dim, page_size * dim, 1)
        caches.append(strided((pages, page_size, heads, dim), strides, cache_dtype))
        values = strided(
            (tokens, heads, dim), ((heads * dim + 31) // 16 * 16, dim, 1), source, seed=rng.randrange(1 << 30)
        )
        rows.append(values)
    rows[0][3, 0, :4] = torch.tensor([float("nan"), float("inf"), -1e5 if source == torch.float32 else -6e4, 0.0])
    slots = torch.tensor([*rng.sample(range(page_size, pages * page_size), tokens - 2), -1, 2])
    rng.shuffle(order := slots.tolist())
    slots = torch.tensor(order)
    for scales in (
        {},
        {"key_scale": torch.tensor([0.37]), "value_scale": torch.tensor([0.5, 3.0, 1.7][: shapes[1][0]])},
    ):
        for null_cell in (True, False):
            outputs = both(
                lambda a, b, s=scales, n=null_cell: write_kv.write_kv(rows[0], rows[1], a, b, slots, null_cell=n, **s),
                *caches,
            )
            if target is None:
                for token, slot in enumerate(order):
                    if slot >= (page_size if null_cell else 0):
                        for cache, values in zip(outputs, rows, strict=True):
                            left, right = cache[slot // page_size, slot % page_size], values[token]
                            assert torch.equal(
                                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
                            )


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (48, 16)])
def test_write_mla_puts_the_rope_behind_the_latent(target: torch.dtype, rank: int, rope: int) -> None:
    tokens, page_size = 5, 8
    latent, rotary = torch.randn(tokens, rank).bfloat16(), torch.randn(tokens, rope).bfloat16()
    cache = strided((6, page_size, rank + rope), (page_size * (rank + rope) + 64, rank + rope, 1), target)
    slots = torch.tensor([8, 47, -1, 3, 22])
    scale = torch.tensor([0.25]) if target != torch.bfloat16 else None
    (after,) = both(lambda each: write_kv.write_mla(latent, rotary, each, slots, scale=scale), cache)
    if target == torch.bfloat16:
        for token in (0, 1, 4):
            row = after[int(slots[token]) // page_size, int(slots[token]) % page_size]
            assert torch.equal(row, torch.cat([latent[token], rotary[token]]))


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_write_kv_fp8_every_bfloat16_and_every_rounding_boundary_equals_torch(target: torch.dtype) -> None:
    """All 65,536 bfloat16 values; and every fp8 code, every midpoint between codes, and their float32 neighbours."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = torch.arange(128, dtype=torch.int32).to(torch.uint8).view(target).float()
    codes = codes[codes.isfinite()]
    middles = (codes[1:] + codes[:-1]) / 2
    edges = torch.cat([codes, middles])
    bits = edges.view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1])[:, None].clamp_min(0).view(torch.float32).flatten()
    near = torch.cat([near, -near])
    for values in (every, near):
        tokens = 2 * 32
        dim = -(-len(values) // tokens // 16) * 16
        padded = torch.zeros(tokens * dim, dtype=values.dtype)
        padded[: len(values)] = values
        rows = padded.reshape(2, tokens // 2, 1, dim)
        cache = torch.zeros(tokens // 2 + 1, 1, 1, dim, dtype=torch.uint8).view(target)
        slots = torch.arange(1, tokens // 2 + 1)
        after = both(lambda a, b, rows=rows, slots=slots: write_kv.write_kv(*rows, a, b, slots), cache, cache)
        limit = naive.FP8_MAX[target]
        expected = rows.float().clamp(-limit, limit).to(target).view(torch.uint8)
        for given, found in zip(expected, after, strict=True):
            assert torch.equal(found[1:, 0].view(torch.uint8)[:, 0], given[:, 0])


def test_write_kv_no_tokens_changes_nothing() -> None:
    cache, rows = strided((3, 4, 2, 8), (64, 16, 8, 1), torch.float32), torch.zeros(0, 2, 8)
    for slots in (torch.zeros(0, dtype=torch.int64), torch.tensor([-1, 0])):
        given = torch.zeros(len(slots), 2, 8) if len(slots) else rows
        after, _ = both(lambda a, b, r=given, s=slots: write_kv.write_kv(r, r, a, b, s), cache, cache)
        assert bool(after.isnan().all())


def test_write_kv_bad_arguments_are_refused_by_name() -> None:
    cache, rows, slots = (
        strided((4, 4, 2, 16), (128, 32, 16, 1), torch.float32),
        torch.zeros(2, 2, 16),
        torch.tensor([5, 6]),
    )

    def call(**changes: Any) -> Callable[[], object]:
        given: dict[str, Any] = {
            "key": rows,
            "value": rows,
            "key_cache": cache,
            "value_cache": cache,
            "slot_mapping": slots,
        }
        return lambda: write_kv.write_kv(**(given | changes))

    fp8 = cache.view(torch.uint8)[..., :16].view(torch.float8_e4m3fn)
    refused: list[tuple[Callable[[], object], str]] = [
        (
            call(key=rows.half(), value=rows.half()),
            r"key is torch\.float16, its cache torch\.float32; need equal dtypes",
        ),
        (call(key=rows.to(torch.float8_e5m2), key_cache=fp8), "need equal dtypes, or bfloat16"),
        (call(slot_mapping=slots.int()), r"slot_mapping is torch\.int32; it must be torch\.int64"),
        (call(slot_mapping=slots[:1]), "key has shape"),
        (call(value=rows[:, :1]), "the value cache has shape"),
        (call(value_cache=cache[:3]), "the value cache has shape"),
        (call(key=strided((2, 2, 16), (33, 16, 1), torch.float32)), "key: stride 0 is 132 bytes"),
        (
            call(key_cache=strided((4, 4, 2, 16), (129, 32, 16, 1), torch.float32)),
            "the key cache: stride 0 is 516 bytes",
        ),
        (
            call(key_cache=strided((4, 4, 2, 16), (320, 66, 33, 1), torch.float32)),
            "the key cache: stride 1 is 264 bytes",
        ),
        (call(key=strided((2, 2, 16), (64, 32, 2), torch.float32)), "key has last stride 2"),
        (call(value=strided((2, 2, 17), (64, 32, 1), torch.float32)[..., 1:]), "value starts at"),
        (call(key_scale=torch.ones(3)), r"the key scale has shape \(3,\); it must be \(1,\) or \(2,\)"),
        (call(key_scale=torch.ones(1).double()), r"the key scale is torch\.float64"),
        (call(slot_mapping=torch.tensor([5, 16])), "slot_mapping holds row 16; the cache has rows 0 to 15"),
        (call(slot_mapping=torch.tensor([5, 5])), "slot_mapping holds a row twice"),
        (call(key=rows.to("meta")), "key is on meta"),
        (call(key=rows.half(), key_cache=cache.half().contiguous()), "key and value differ in dtype"),
        (lambda: write_kv.write_mla(rows[:, 0], rows[:, 0], cache[:, :, 0], slots), "cache has shape"),
    ]
    for attempt, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            attempt()


# -- addresses beyond 2^31 -------------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.fixture(scope="module")
def far() -> Iterator[Tensor]:
    """20 GiB of address space, never filled; tests use it from the middle, so that a wrapped offset still hits it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, 20 * GIB, flags=flags) as space:
        tensor = torch.frombuffer(space, dtype=torch.uint8)
        yield tensor[10 * GIB :]
        del tensor


def views_at(buffer: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    offset = buffer.storage_offset() // dtype.itemsize
    return torch.as_strided(buffer.view(dtype), shape, strides, offset)


def far_copy_cells(buffer: Tensor, module: ModuleType) -> None:
    stride, src, dst = 1 << 18, 35_000, 37_000
    cells = buffer[: 38_000 * stride].view(-1, stride)
    cells[src] = torch.arange(stride) % 251
    cells[dst] = 9
    module.copy_cells(buffer, buffer, [module.CellPairs(stride, [src], [dst])])
    assert torch.equal(cells[dst], cells[src])


def far_copy_rows(buffer: Tensor, module: ModuleType) -> None:
    view = views_at(buffer, (9216, 4, 16), (GIB // 1024 // 4, 16, 1), torch.float32)
    view[9000:9002] = torch.arange(64.0).reshape(4, 16)
    view[9001] = -1.0
    parts = module.RowParts.of(buffer, [view])
    module.copy_rows(buffer, parts, index([36_001, 36_003]), index([36_004, 36_005]), index([0, 2]))
    assert torch.equal(view[9001, :2], view[9000, [1, 3]])


def far_track_states(buffer: Tensor, module: ModuleType) -> None:
    states = views_at(buffer, (10, 3, 40), (GIB // 2, 64, 1), torch.float16)
    states[8], states[9] = 1.5, -1.0
    module.track_states(states, torch.tensor([True]), index([8]), index([9]))
    assert bool(states[9].eq(1.5).all())


def far_commit_conv_windows(buffer: Tensor, module: ModuleType) -> None:
    for columns in (4, 3):
        conv = views_at(buffer, (10, 4, columns), (GIB // 2, columns, 1), torch.bfloat16)
        conv[9] = -1.0
        windows = torch.randn(1, 2, 4, columns).bfloat16()
        module.commit_conv_windows(conv, windows, index([1]), index([9]))
        assert torch.equal(conv[9], windows[0, 1])


def far_replay_states(buffer: Tensor, module: ModuleType) -> None:
    state = views_at(buffer, (10, 1, 16, 16), (GIB // 4, 256, 16, 1), torch.float32)
    state[9] = 1.0
    ring = torch.ones(1, 2, 1, 16)
    module.replay_states(
        state,
        ring,
        ring,
        torch.zeros(1, 2, 1),
        torch.ones(1, 2, 1),
        slots=index([9]),
        rows=index([0]),
        start=index([0]),
        count=index([1]),
    )
    assert torch.allclose(state[9].sum(-1), torch.full((1, 16), 4.0))
    out = torch.empty(1, 1, 16)
    module.replay_outputs(
        state,
        ring,
        ring,
        torch.zeros(1, 2, 1),
        ring[:, 0],
        out,
        slots=index([9]),
        rows=index([0]),
        start=index([0]),
        count=index([0]),
    )
    assert torch.allclose(out, torch.full((1, 1, 16), 4.0))


def far_write_kv(buffer: Tensor, module: ModuleType) -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        cache = views_at(buffer, (10, 4, 2, 16), (GIB // dtype.itemsize, 32, 16, 1), dtype)
        cache.view(torch.uint8)[9] = 1
        rows = torch.ones(1, 2, 16)
        module.write_kv(rows, rows, cache, cache[:, :, :, :], torch.tensor([38]))
        assert bool(cache[9, 2].float().eq(1.0).all())


FAR = {
    copy_cells: far_copy_cells,
    copy_rows: far_copy_rows,
    track_states: far_track_states,
    commit_conv_windows: far_commit_conv_windows,
    replay_states: far_replay_states,
    write_kv: far_write_kv,
}


@pytest.mark.parametrize("module", FAR, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_addresses_beyond_2_to_the_31_elements_are_right(module: ModuleType, chosen: Any, far: Tensor) -> None:
    with backend.use(chosen):
        FAR[module](far, module)


@pytest.mark.parametrize("module", FAR, ids=lambda module: module.__name__.rpartition(".")[2])
def test_canary_an_int32_multiply_planted_in_a_kernel_is_caught(
    module: ModuleType, far: Tensor, tmp_path: Path
) -> None:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    planted = source.replace(".to(tl.int64)", ".to(tl.int32)")
    assert planted != source
    name = f"unifiedpool.kernels.planted_{module.__name__.rpartition('.')[2]}"
    path = tmp_path / "planted.py"
    path.write_text(planted, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    narrow = importlib.util.module_from_spec(spec)
    sys.modules[name] = narrow
    try:
        spec.loader.exec_module(narrow)
        with backend.use("triton"), pytest.raises((AssertionError, InterpreterError)):
            FAR[module](far, narrow)
    finally:
        del sys.modules[name]
