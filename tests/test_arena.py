"""Arena: views over one buffer, applying plans, fills, resizing, tables for kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from unifiedpool.arena import BASE_ALIGNMENT, Arena
from unifiedpool.errors import (
    CapacityError,
    InvalidArgumentError,
    InvalidHandleError,
    LayoutMismatchError,
    PlanOrderError,
)
from unifiedpool.kernels import naive
from unifiedpool.layout import Kind, Layout, Segment
from unifiedpool.model_spec import ModelSpec
from unifiedpool.plan import StepPlan
from unifiedpool.planner import Planner

pytestmark = pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning")

HYBRID = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "sliding_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "sliding_window": 32,
}


def hybrid_layout(order: str = "page", page_size: int = 4, **options: Any) -> Layout:
    return ModelSpec.from_config(HYBRID).layout(page_size, order=order, **options)  # type: ignore[arg-type]


def filled(layout: Layout) -> Layout:
    """The same layout whose last state segment starts at one: the arena then applies plans with torch."""
    kinds = []
    for kind in layout.kinds:
        segments = kind.segments
        if kind.page_size == 0:
            segments = (*segments[:-1], replace(segments[-1], fill=1.0))
        kinds.append(replace(kind, segments=segments))
    return Layout(tuple(kinds), layout.null_bytes)


# -- the buffer and its views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 10_000, 65_537, 1 << 20])
def test_buffer_any_size_is_aligned_and_has_a_finite_null_cell(size: int) -> None:
    layout = Layout.simple({"state": 1024, "full": 256})
    arena = Arena(layout, size)
    assert arena.buffer.data_ptr() % BASE_ALIGNMENT == 0
    assert arena.buffer.shape == (size,) and arena.arena_bytes == size
    assert int(arena.buffer[: layout.null_bytes].abs().sum()) == 0
    assert arena.num_cells("full") == size // 256 and arena.num_cells("state") == size // 1024


@pytest.mark.parametrize("order", ["page", "token", "head"])
def test_view_every_segment_keeps_what_is_written_to_the_others(order: str, seed: int) -> None:
    layout = hybrid_layout(order)
    generator = torch.Generator().manual_seed(seed)
    for kind in layout.kinds:
        arena = Arena(layout, 40_000)
        arena.buffer.zero_()
        written = {}
        for segment in kind.segments:
            for layer in segment.layers:
                view = arena.view(kind.name, layer, segment.name)
                assert view.shape[0] == arena.num_cells(kind.name) and view.stride(-1) == 1
                assert view.data_ptr() % 16 == 0
                content = torch.randn(view.shape, generator=generator).to(view.dtype)
                view.copy_(content)
                written[layer, segment.name] = content
        for (layer, name), content in written.items():
            assert torch.equal(arena.view(kind.name, layer, name), content)
        # Padding and the tail stay untouched: exactly the bare bytes of each cell were written.
        marked = Arena(layout, 40_000)
        marked.buffer.zero_()
        for segment in kind.segments:
            for layer in segment.layers:
                marked.view(kind.name, layer, segment.name).view(torch.uint8).fill_(1)
        assert int(marked.buffer.long().sum()) == kind.bare_bytes * marked.num_cells(kind.name)


@pytest.mark.parametrize("order", ["page", "token", "head"])
def test_view_one_cell_is_the_bytes_of_that_cell(order: str) -> None:
    layout = hybrid_layout(order)
    arena = Arena(layout, 100_000)
    arena.buffer.zero_()
    for kind in layout.kinds:
        cell = arena.num_cells(kind.name) - 1
        for segment in kind.segments:
            view = arena.view(kind.name, segment.layers[0], segment.name)
            view[cell].view(torch.uint8).fill_(7)
            touched = int((arena.cell_bytes(kind.name, cell) == 7).sum())
            assert touched == view[cell].numel() * view.dtype.itemsize == int((arena.buffer == 7).sum())
            view[cell].zero_()


def test_view_hnd_and_nhd_read_the_same_content() -> None:
    content = torch.randn(5, 4, 2, 24).bfloat16()
    nhd, hnd = Arena(hybrid_layout(), 100_000), Arena(hybrid_layout(format="HND"), 100_000)
    nhd.view("full", 1, "key")[3:8] = content
    hnd.view("full", 1, "key")[3:8] = content.transpose(1, 2)
    assert hnd.view("full", 1, "key").shape[1:] == (2, 4, 24)
    assert torch.equal(hnd.view("full", 1, "key")[3:8].transpose(1, 2), nhd.view("full", 1, "key")[3:8])
    assert hnd.view("full", 1, "key")[3].is_contiguous()


def test_view_size_one_axes_keep_their_true_strides() -> None:
    segments = (Segment("key", (0, 1), (1, 8), "bfloat16", "token"),)
    layout = Layout.build([Kind("full", segments, page_size=1)])
    view = Arena(layout, 4096).view("full", 1, "key")
    assert view.shape == (16, 1, 1, 8)
    assert view.stride() == (128, 8, 8, 1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8"])
def test_view_one_byte_dtypes_store_what_torch_casts(dtype: str) -> None:
    segments = (Segment("key", (0,), (2, 16), dtype, "token"),)
    layout = Layout.build([Kind("full", segments, page_size=4)])
    view = Arena(layout, 4096).view("full", 0, "key")
    content = torch.arange(128).reshape(4, 2, 16).to(view.dtype)
    view[2] = content
    assert str(view.dtype) == f"torch.{dtype}"
    assert torch.equal(view[2].view(torch.uint8), content.view(torch.uint8))


def test_views_forms_and_layers() -> None:
    arena = Arena(hybrid_layout("token"), 100_000)
    paged, rows = arena.views("full", layer=1), arena.views("full", layer=1, form="rows")
    assert list(paged) == ["key", "value"]
    cells = arena.num_cells("full")
    assert paged["key"].shape == (cells, 4, 2, 24) and rows["key"].shape == (cells * 4, 2, 24)
    rows["key"].copy_(torch.randn(rows["key"].shape))
    assert torch.equal(rows["key"], paged["key"].reshape(-1, 2, 24))
    states = arena.views("state")
    assert list(states) == [0, 3] and list(states[3]) == ["conv", "temporal"]
    assert states[0]["temporal"].shape[1:] == (4, 16, 8)
    assert arena.views("state", layer=0, form="state")["conv"].shape[1:] == (2 * 16 + 64, 3)


def test_views_rows_of_one_token_pages_need_no_token_order() -> None:
    arena = Arena(hybrid_layout(page_size=1), 50_000)
    rows = arena.views("full", layer=1, form="rows")["value"]
    rows.copy_(torch.randn(rows.shape))
    assert torch.equal(rows, arena.view("full", 1, "value")[:, 0])


def test_views_that_cannot_be_are_refused_with_the_way_out() -> None:
    arena = Arena(hybrid_layout(), 100_000)
    with pytest.raises(InvalidArgumentError, match=r"order='token' or page_size=1"):
        arena.views("full", layer=1, form="rows")
    with pytest.raises(InvalidArgumentError, match="no 'paged' views; use 'state'"):
        arena.views("state", form="paged")
    with pytest.raises(InvalidArgumentError, match="no 'state' views; use 'paged' or 'rows'"):
        arena.views("full", form="state")
    with pytest.raises(InvalidArgumentError, match="form 'flat'"):
        arena.views("full", form="flat")  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match=r"no layer 0; it has \[1\]"):
        arena.views("full", layer=0)
    with pytest.raises(InvalidArgumentError, match="no kind 'draft'"):
        arena.view("draft", 0, "key")
    with pytest.raises(InvalidArgumentError, match="cell 10000"):
        arena.cell_bytes("full", 10_000)


def test_view_kind_larger_than_the_arena_is_empty() -> None:
    arena = Arena(Layout.simple({"state": 1 << 20, "full": 256}), 4096)
    assert arena.num_cells("state") == 0
    assert arena.view("state", 0, "bytes").shape == (0, 1 << 20)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_view_offsets_past_2_31_bytes_and_elements_reach_the_right_bytes(dtype: str) -> None:
    # The memory is lazy: only the pages touched here exist.
    segments = (Segment("temporal", (0, 1), (4, 1 << 18), dtype, "slot"),)
    page = Kind("full", (Segment("key", (0,), (2, 64), dtype, "token"),), page_size=16)
    layout = Layout.build([Kind("state", segments), page])
    size = {"uint8": 1, "bfloat16": 2}[dtype]
    try:
        arena = Arena(layout, (1 << 31) * size + (64 << 20), max_handles=8)
    except CapacityError:
        pytest.skip("this machine does not lend that much address space")
    for kind, layer, name in (("state", 1, "temporal"), ("full", 0, "key")):
        view = arena.view(kind, layer, name)
        cell = view.shape[0] - 1
        assert cell * view.stride(0) >= 1 << 31
        view[cell] = 3
        raw = arena.cell_bytes(kind, cell)
        spec = layout.view_spec(kind, layer, name)
        assert int((raw != 0).sum()) > 0
        start = cell * layout.kind(kind).stride_bytes + spec.offset_bytes
        assert arena.buffer[start : start + size].view(view.dtype).item() == 3
        assert view[cell].float().sum() == 3 * view[cell].numel()
    operation = np.array([[0, layout.kind_id("state") << 8, arena.num_cells("state") - 1, 5]], np.int32)
    naive.run_operations(arena.buffer, operation, layout.strides)
    assert torch.equal(arena.view("state", 1, "temporal")[5], arena.view("state", 1, "temporal")[-1])


# -- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "1"])
def test_construction_bad_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="arena_bytes is"):
        Arena(Layout.simple({"full": 256}), size)


def test_construction_below_the_null_cell_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot hold the null cell"):
        Arena(Layout.simple({"full": 4096}), 4095)


def test_construction_without_the_memory_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no memory for"):
        Arena(Layout.simple({"full": 1 << 40}), 1 << 55, max_handles=1)


def test_construction_given_buffer_is_used_or_refused() -> None:
    layout = Layout.simple({"full": 256})
    raw = torch.empty(1 << 16, dtype=torch.uint8)
    start = -raw.data_ptr() % BASE_ALIGNMENT
    arena = Arena(layout, 4096, buffer=raw[start:])
    arena.view("full", 0, "bytes")[2] = 9
    assert int((raw[start + 512 : start + 768] == 9).sum()) == 256
    bad = {
        "torch.uint8": raw[start:].view(torch.int8),
        "flat": raw[start : start + 8192].view(2, 4096),
        "multiple of 256": raw[start + 1 :],
        "needs 1,048,576": raw[start:],
        "on cpu": raw[start:],
    }
    for message, buffer in bad.items():
        size = 1 << 20 if "needs" in message else 4096
        with pytest.raises(InvalidArgumentError, match=message):
            Arena(layout, size, buffer=buffer, device="meta" if "cpu" in message else "cpu")
    with pytest.raises(InvalidArgumentError, match="max_handles is 0"):
        Arena(layout, 4096, max_handles=0)


# -- plans -----------------------------------------------------------------------------------------------------------


class Model:
    """What each handle's cell of each kind should hold: the naive truth."""

    def __init__(self, arena: Arena, planner: Planner) -> None:
        self.arena, self.planner = arena, planner
        self.content: dict[tuple[int, str], torch.Tensor] = {}

    def write(self, handle: int, kind: str, generator: torch.Generator) -> None:
        cell = self.arena.cell_bytes(kind, self.planner.cell(handle, kind))
        cell.copy_(torch.randint(0, 256, cell.shape, generator=generator, dtype=torch.uint8))
        self.content[handle, kind] = cell.clone()

    def check(self) -> None:
        for (handle, kind), content in self.content.items():
            cell = self.planner.cell(handle, kind)
            assert int(self.arena.tables[kind][handle]) == cell
            assert torch.equal(self.arena.cell_bytes(kind, cell), content), (handle, kind)


def fresh(arena: Arena, kind: Kind) -> torch.Tensor:
    """The bytes of a fresh cell: zeros, and the fill values."""
    expected = torch.zeros(kind.stride_bytes, dtype=torch.uint8)
    for segment in kind.segments:
        for layer in segment.layers:
            if segment.fill:
                spec = kind.view_spec(layer, segment.name)
                typed = expected.view(arena.view(kind.name, layer, segment.name).dtype)
                size = typed.dtype.itemsize
                strides = [stride // size for stride in spec.strides_bytes]
                torch.as_strided(typed, spec.shape, strides, spec.offset_bytes // size).fill_(segment.fill)
    return expected


@pytest.mark.parametrize("with_fills", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize("order", ["page", "token"])
def test_apply_random_steps_keep_every_handles_content(order: str, with_fills: bool, rng: random.Random) -> None:
    layout = hybrid_layout(order)
    layout = filled(layout) if with_fills else layout
    planner = Planner(layout, 30 * layout.strides[0] + 100)
    arena = Arena(layout, 30 * layout.strides[0] + 100)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    model = Model(arena, planner)
    live: list[list[int]] = [[] for _ in layout.names]
    evacuated = 0
    for step in range(120):
        new: list[tuple[int, str]] = []
        for _ in range(rng.randint(1, 4)):
            index = rng.randrange(len(layout.names))
            name = layout.names[index]
            wanted = rng.randint(1, 6) if index else rng.randint(1, 2)
            if rng.random() < 0.45 and live[index]:
                rng.shuffle(live[index])
                gone, live[index] = live[index][:wanted], live[index][wanted:]
                planner.free(gone)
                for handle in gone:
                    model.content.pop((handle, name), None)
                new = [item for item in new if not (item[0] in gone and item[1] == name)]
            elif planner.can_allocate({name: wanted}):
                taken = planner.allocate({name: wanted}).tolist()
                live[index] += taken
                new += [(handle, name) for handle in taken]
        old = [item for item in model.content if item not in new]
        copies = {}
        if old and rng.random() < 0.5:
            source = rng.choice(old)
            targets = [item for item in (*new, *old) if item[1] == source[1] and item != source]
            if targets:
                target = rng.choice(targets)
                planner.copy([source[0]], [target[0]], kind=source[1])
                copies[target] = model.content[source].clone()
        plan = planner.seal(step)
        if plan is not None:
            evacuated += sum(phase.operation == "move" for phase in plan.phases)
        arena.apply(plan if plan is None or rng.random() < 0.5 else StepPlan.from_bytes(plan.to_bytes()))
        model.content.update(copies)
        model.check()
        for handle, name in new:
            kind = layout.kind(name)
            if kind.zero == "always" and (handle, name) not in copies:
                assert torch.equal(arena.cell_bytes(name, planner.cell(handle, name)), fresh(arena, kind))
            if (handle, name) not in copies:
                model.write(handle, name, generator)
        planner.validate()
    assert evacuated > 0
    for index, name in enumerate(layout.names):
        cells = torch.tensor([planner.cell(handle, name) for handle in live[index]], dtype=torch.int32)
        assert torch.equal(arena.tables[name][torch.tensor(live[index], dtype=torch.long)], cells)


def test_apply_page_over_a_former_state_reads_finite_zeros() -> None:
    layout = Layout.build(
        [
            Kind("state", (Segment("temporal", (0,), (1024,), "float32", "slot"),)),
            Kind("full", (Segment("key", (0,), (1, 16), "bfloat16", "token"),), page_size=16),
        ],
        null_cell=False,
    )
    planner, arena = Planner(layout, 8192), Arena(layout, 8192)
    states = planner.allocate({"state": 2})
    arena.apply(planner.seal())
    arena.view("state", 0, "temporal").fill_(float("nan"))
    planner.free(states)
    pages = planner.allocate({"full": 16})
    arena.apply(planner.seal())
    assert bool(arena.view("full", 0, "key").eq(0).all())
    # Pages used again as pages keep their bytes; a fresh state over pages is zero.
    arena.view("full", 0, "key").fill_(5.0)
    planner.free(pages)
    planner.allocate({"full": 8})
    arena.apply(planner.seal())
    assert bool(arena.view("full", 0, "key").eq(5).all())
    slot = planner.allocate({"state": 1})
    arena.apply(planner.seal())
    assert bool(arena.view("state", 0, "temporal")[planner.cell(slot[0], "state")].eq(0).all())


def test_apply_fills_fresh_cells_and_only_those() -> None:
    layout = filled(hybrid_layout())
    planner, arena = Planner(layout, 100_000), Arena(layout, 100_000)
    first = planner.allocate({"state": 1})
    arena.apply(planner.seal())
    states = arena.view("state", 3, "temporal")
    cell = planner.cell(first[0], "state")
    assert bool(states[cell].eq(1).all()) and bool(arena.view("state", 3, "conv")[cell].eq(0).all())
    states[cell] = 4
    planner.allocate({"state": 1})
    arena.apply(planner.seal())
    assert bool(states[cell].eq(4).all())


def test_apply_out_of_order_or_foreign_plans_are_refused_and_nothing_changes() -> None:
    layout = Layout.simple({"state": 1024, "full": 256})
    planner, arena = Planner(layout, 16_384), Arena(layout, 16_384)
    planner.allocate({"full": 2})
    first = planner.seal(1)
    planner.allocate({"state": 1})
    second = planner.seal(2)
    assert first is not None and second is not None
    before = {name: table.clone() for name, table in arena.tables.items()}
    with pytest.raises(PlanOrderError, match="plan 1 does not follow: this arena waits for plan 0"):
        arena.apply(second)
    other = Planner(Layout.simple({"state": 1024, "full": 256}, null_cell=False), 16_384)
    other.allocate({"full": 1})
    with pytest.raises(LayoutMismatchError, match="the plan is for layout"):
        arena.apply(other.seal())
    longer = Planner(layout, 32_768)
    longer.allocate({"full": 1})
    with pytest.raises(PlanOrderError, match="starts from 32,768 bytes, this arena has 16,384"):
        arena.apply(longer.seal())
    damaged = bytearray(first.to_bytes())
    damaged[-1] ^= 1
    with pytest.raises(LayoutMismatchError):
        arena.apply(replace(first, data=bytes(damaged)))
    assert all(torch.equal(arena.tables[name], table) for name, table in before.items())
    arena.apply(first)
    with pytest.raises(PlanOrderError):
        arena.apply(first)
    arena.apply(second)
    arena.apply(None)
    assert arena.sequence == 2
    with pytest.raises(InvalidArgumentError, match="the arena is on cpu; leave it out"):
        arena.apply(None, stream=object())


def test_apply_more_handles_than_the_tables_hold_is_refused() -> None:
    layout = Layout.simple({"full": 256})
    planner, arena = Planner(layout, 16_384), Arena(layout, 16_384, max_handles=4)
    planner.allocate({"full": 5})
    with pytest.raises(InvalidArgumentError, match="names handle 5, the tables end at 4"):
        arena.apply(planner.seal())


def test_apply_table_address_and_views_stay_across_steps() -> None:
    layout = hybrid_layout()
    planner, arena = Planner(layout, 100_000), Arena(layout, 100_000)
    addresses = {name: table.data_ptr() for name, table in arena.tables.items()}
    view = arena.view("full", 1, "key")
    for step in range(5):
        planner.allocate({"full": 3, "state": 1})
        arena.apply(planner.seal(step))
    assert {name: table.data_ptr() for name, table in arena.tables.items()} == addresses
    assert arena.view("full", 1, "key") is view


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("with_fills", [False, True], ids=["native", "torch"])
def test_apply_resize_keeps_content_on_both_sides(own: bool, with_fills: bool, seed: int) -> None:
    layout = hybrid_layout()
    layout = filled(layout) if with_fills else layout
    small, large = 12 * layout.strides[0], 40 * layout.strides[0]
    raw = torch.empty(large + BASE_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % BASE_ALIGNMENT
    planner = Planner(layout, small)
    arena = Arena(layout, small, buffer=None if own else raw[start : start + large])
    model, generator = Model(arena, planner), torch.Generator().manual_seed(seed)

    def take(demand: dict[str | tuple[str, ...], int]) -> list[int]:
        handles = planner.allocate(demand).tolist()
        arena.apply(planner.seal())
        names = [name for name, count in demand.items() for _ in range(count)]
        for handle, name in zip(handles, names, strict=True):
            model.write(handle, str(name), generator)
        return handles

    take({"full": 10, "state": 2})
    assert arena.view("full", 1, "key").shape[0] == small // layout.kind("full").stride_bytes
    planner.resize(large)
    take({"full": 30, "state": 8})
    model.check()
    assert arena.arena_bytes == large and arena.num_cells("state") == 40
    assert arena.view("full", 1, "key").shape[0] == arena.num_cells("full") == large // layout.kind("full").stride_bytes
    kept = {handle for handle, _ in list(model.content)[::5]}
    planner.free([handle for handle, _ in model.content if handle not in kept])
    model.content = {item: content for item, content in model.content.items() if item[0] in kept}
    planner.resize(small)
    arena.apply(planner.seal())
    model.check()
    assert arena.arena_bytes == small
    assert arena.buffer.data_ptr() % BASE_ALIGNMENT == 0
    assert arena.view("full", 1, "key").shape[0] == arena.num_cells("full")


def test_apply_growth_past_a_given_buffer_is_refused() -> None:
    layout = Layout.simple({"full": 256})
    raw = torch.empty(8192 + BASE_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % BASE_ALIGNMENT
    planner, arena = Planner(layout, 4096), Arena(layout, 4096, buffer=raw[start : start + 8192])
    planner.resize(16_384)
    with pytest.raises(InvalidArgumentError, match="buffer given holds"):
        arena.apply(planner.seal())
    assert arena.arena_bytes == 4096 and arena.sequence == 0


# -- tables for kernels ----------------------------------------------------------------------------------------------


def pool_with_tokens() -> tuple[Planner, Arena, list[int], list[int]]:
    layout = hybrid_layout()
    planner, arena = Planner(layout, 100_000), Arena(layout, 100_000)
    pages, slots = planner.allocate({"full": 5}).tolist(), planner.allocate({"state": 2}).tolist()
    arena.apply(planner.seal())
    return planner, arena, pages, slots


def test_block_table_translates_handles_and_padding() -> None:
    planner, arena, pages, slots = pool_with_tokens()
    handles = torch.tensor([[pages[0], pages[1], pages[2]], [pages[3], 0, -1]], dtype=torch.int32)
    out = torch.full((2, 3), 99, dtype=torch.int32)
    assert arena.block_table(handles, "full", out) is out
    cells = [planner.cell(page, "full") for page in pages]
    assert out.tolist() == [cells[:3], [cells[3], 0, 0]]
    states = torch.tensor([[slots[1]], [0], [slots[0]]], dtype=torch.int32)
    out = torch.empty((3, 1), dtype=torch.int32)
    arena.block_table(states, "state", out)
    assert out.tolist() == [[planner.cell(slots[1], "state")], [-1], [planner.cell(slots[0], "state")]]


def test_block_table_without_a_null_cell_pads_with_minus_one() -> None:
    arena = Arena(Layout.simple({"full": 256}, null_cell=False), 4096)
    out = torch.empty((1, 2), dtype=torch.int32)
    assert arena.block_table(torch.tensor([[0, -1]], dtype=torch.int32), "full", out).tolist() == [[-1, -1]]


def test_slot_mapping_by_page_and_by_row_agree() -> None:
    planner, arena, pages, _ = pool_with_tokens()
    cells = [planner.cell(page, "full") for page in pages]
    rows = torch.tensor([[pages[0], pages[1], 0], [pages[2], pages[3], pages[4]]], dtype=torch.int32)
    positions = torch.tensor([[0, 3, 4, -1], [11, 5, 8, 0]])
    expected = [
        [cells[0] * 4, cells[0] * 4 + 3, cells[1] * 4, -1],
        [cells[4] * 4 + 3, cells[3] * 4 + 1, cells[4] * 4, cells[2] * 4],
    ]
    out = torch.empty((2, 4), dtype=torch.int64)
    assert arena.slot_mapping(rows, positions, "full", out).tolist() == expected
    flat = torch.tensor([pages[0], pages[0], pages[1], 0, pages[4], pages[3], pages[4], pages[2]], dtype=torch.int32)
    out = torch.empty(8, dtype=torch.int64)
    arena.slot_mapping(flat, positions.flatten().int(), "full", out)
    assert out.tolist() == [row for line in expected for row in line]


def test_slot_mapping_dead_page_is_minus_one() -> None:
    planner, arena, pages, _ = pool_with_tokens()
    planner.free(pages[:1])
    arena.apply(planner.seal())
    out = torch.empty(1, dtype=torch.int64)
    arena.slot_mapping(torch.tensor([pages[0]], dtype=torch.int32), torch.tensor([2]), "full", out)
    assert out.tolist() == [-1]


def test_tables_for_kernels_bad_tensors_are_refused() -> None:
    _, arena, pages, _ = pool_with_tokens()
    handles = torch.tensor([[pages[0]]], dtype=torch.int32)
    out = torch.empty((1, 1), dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"handles is torch.int64; it must be torch.int32"):
        arena.block_table(handles.long(), "full", out)
    with pytest.raises(InvalidArgumentError, match=r"out is torch\.int64"):
        arena.block_table(handles, "full", out.long())
    with pytest.raises(InvalidArgumentError, match=r"out has shape \(1, 1\); it must be \(1, 2\)"):
        arena.block_table(torch.zeros((1, 2), dtype=torch.int32), "full", out)
    with pytest.raises(InvalidArgumentError, match="on meta; the arena is on cpu"):
        arena.block_table(handles.to("meta"), "full", out)
    with pytest.raises(InvalidHandleError, match="handle 1000000"):
        arena.block_table(torch.tensor([[1_000_000]], dtype=torch.int32), "full", out)
    rows = torch.empty((1, 1), dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match="holds slots, not tokens"):
        arena.slot_mapping(handles, torch.zeros((1, 1), dtype=torch.int64), "state", rows)
    with pytest.raises(InvalidArgumentError, match=r"positions are torch\.float32"):
        arena.slot_mapping(handles, torch.zeros((1, 1)), "full", rows)
    with pytest.raises(InvalidArgumentError, match="position 4 needs page 1; the rows have 1 pages"):
        arena.slot_mapping(handles, torch.tensor([[4]]), "full", rows)
    with pytest.raises(InvalidArgumentError, match="rows of handles"):
        arena.slot_mapping(handles, torch.zeros((2, 1), dtype=torch.int64), "full", rows.expand(2, 1).clone())
    with pytest.raises(InvalidArgumentError, match="handles for"):
        arena.slot_mapping(handles[0], torch.zeros(2, dtype=torch.int64), "full", torch.empty(2, dtype=torch.int64))
