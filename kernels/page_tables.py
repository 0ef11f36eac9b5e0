"""Handle -> cell translation: the device mirror of the page table, and the tables that attention kernels read.

`update_tables` applies a step's change list to the mirror with one scatter. `build_tables` then fills every table of
one step (block table, kv_indptr, kv_indices, last_page_len, slot mapping, state indices) in one launch whose grid comes
from the batch. All outputs lie at fixed addresses, so a captured CUDA graph can read them.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import INDEX_DTYPES, cdiv, check_tensor, next_power_of_2, on_device
from .backend import uses_kernels

__all__ = [
    "BatchTables",
    "build_tables",
    "build_tables_kernel",
    "map_slots",
    "map_slots_kernel",
    "translate",
    "translate_kernel",
    "update_tables",
    "update_tables_kernel",
]

MAX_LANES = 4096


@triton.jit
def update_tables_kernel(tables_ptr, changes_ptr, num_changes, num_handles, KINDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one block of changes. `tables_ptr` int32 `[KINDS, num_handles]`, `changes_ptr` int32 `[n, 1 + KINDS]`."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_changes
    handle = tl.load(changes_ptr + row * (KINDS + 1), mask=inside, other=0).to(tl.int64)
    inside = inside & (handle >= 0) & (handle < num_handles)
    for kind in tl.static_range(KINDS):
        cell = tl.load(changes_ptr + row * (KINDS + 1) + 1 + kind, mask=inside, other=0)
        tl.store(tables_ptr + handle + kind * tl.cast(num_handles, tl.int64), cell, mask=inside)


@triton.jit
def _cells_of(table_ptr, handles, num_handles, inside):  # type: ignore[no-untyped-def]
    """Cells of a block of handles; -1 for null, dead and unknown ones and outside the mask."""
    known = inside & (handles > 0) & (handles < num_handles)
    return tl.load(table_ptr + handles.to(tl.int64), mask=known, other=-1)


@triton.jit
def translate_kernel(  # type: ignore[no-untyped-def]
    handles_ptr, table_ptr, out_ptr, num_handles, width, handles_stride, out_stride, null, BLOCK: tl.constexpr
):
    """Translate one block of one row of handles."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    handles = tl.load(handles_ptr + row * handles_stride + column, mask=inside, other=0)
    cells = _cells_of(table_ptr, handles, num_handles, inside)
    tl.store(out_ptr + row * out_stride + column, tl.where(cells >= 0, cells, null), mask=inside)


@triton.jit
def map_slots_kernel(  # type: ignore[no-untyped-def]
    handles_ptr,
    positions_ptr,
    table_ptr,
    out_ptr,
    num_handles,
    tokens,
    width,
    page_size,
    handles_stride,
    positions_stride,
    out_stride,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Map one block of one row of positions to flat rows. PER_TOKEN: each position comes with its page's handle."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    position = tl.load(positions_ptr + row * positions_stride + token, mask=inside, other=-1).to(tl.int64)
    valid = inside & (position >= 0)
    if PER_TOKEN:
        at = token.to(tl.int64)
    else:
        at = position // page_size
        valid = valid & (at < width)
    handles = tl.load(handles_ptr + row * handles_stride + at, mask=valid, other=0)
    cells = _cells_of(table_ptr, handles, num_handles, valid).to(tl.int64)
    slots = tl.where(cells >= 0, cells * page_size + position % page_size, -1)
    tl.store(out_ptr + row * out_stride + token, slots, mask=inside)


@triton.jit
def build_tables_kernel(  # type: ignore[no-untyped-def]
    tables_ptr,
    kinds_ptr,
    handles_ptr,
    lengths_ptr,
    query_start_ptr,
    state_handles_ptr,
    block_table_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    last_page_len_ptr,
    slot_mapping_ptr,
    state_indices_ptr,
    lanes,
    num_handles,
    width,
    page_size,
    state_kind,
    handles_stride,
    block_table_kind_stride,
    block_table_stride,
    max_indices,
    max_tokens,
    PAD: tl.constexpr,
    HAS_STATES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill one lane's part of every table of one kind; program `lanes` of axis 0 fills what no lane owns."""
    lane = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    kind = tl.program_id(2).to(tl.int64)
    table_ptr = tables_ptr + tl.load(kinds_ptr + kind).to(tl.int64) * num_handles
    offsets = tl.arange(0, BLOCK)
    others = tl.arange(0, LANES)
    other_lengths = tl.load(lengths_ptr + others, mask=others < lanes, other=0).to(tl.int32)
    # A padded lane has length 0; with a pad page it still owns that one page.
    other_pages = (other_lengths + page_size - 1) // page_size
    if PAD >= 0:
        other_pages = tl.where(other_lengths > 0, other_pages, 1)
    first = tl.sum(tl.where((others < lane) & (others < lanes), other_pages, 0), 0)
    slots_ptr = slot_mapping_ptr + kind * max_tokens
    if lane < lanes:
        length = tl.load(lengths_ptr + lane).to(tl.int32)
        used = (length + page_size - 1) // page_size
        pages = used
        if PAD >= 0:
            pages = tl.maximum(used, 1)
        row_ptr = handles_ptr + lane.to(tl.int64) * handles_stride
        out_ptr = block_table_ptr + kind * block_table_kind_stride + lane.to(tl.int64) * block_table_stride
        indices_ptr = kv_indices_ptr + kind * max_indices + first
        for start in range(split * BLOCK, width, splits * BLOCK):
            page = start + offsets
            handles = tl.load(row_ptr + page, mask=(page < used) & (page < width), other=0)
            cells = _cells_of(table_ptr, handles, num_handles, page < width)
            entries = tl.where(cells >= 0, cells, PAD)
            tl.store(out_ptr + page, entries, mask=page < width)
            tl.store(indices_ptr + page, entries, mask=(page < pages) & (page < width) & (first + page < max_indices))
        begin = tl.load(query_start_ptr + lane).to(tl.int32)
        new = tl.load(query_start_ptr + lane + 1).to(tl.int32) - begin
        for start in range(split * BLOCK, new, splits * BLOCK):
            token = start + offsets
            position = length - new + token
            page = position // page_size
            valid = (token < new) & (position >= 0) & (page < width)
            handles = tl.load(row_ptr + page, mask=valid, other=0)
            cells = _cells_of(table_ptr, handles, num_handles, valid).to(tl.int64)
            slots = tl.where(cells >= 0, cells * page_size + position % page_size, -1)
            tl.store(slots_ptr + begin + token, slots, mask=(token < new) & (begin + token < max_tokens))
        if (split == 0) & (kind == 0):
            tl.store(kv_indptr_ptr + lane, first)
            last = tl.where(length > 0, length - (used - 1) * page_size, pages)
            tl.store(last_page_len_ptr + lane, last)
            if HAS_STATES:
                handle = tl.load(state_handles_ptr + lane)
                known = (handle > 0) & (handle < num_handles)
                state_table_ptr = tables_ptr + tl.cast(state_kind, tl.int64) * num_handles
                tl.store(state_indices_ptr + lane, tl.load(state_table_ptr + handle, mask=known, other=-1))
    else:
        begin = tl.load(query_start_ptr + lanes).to(tl.int32)
        for start in range(split * BLOCK, max_tokens - begin, splits * BLOCK):
            token = start + offsets
            slots = tl.full([BLOCK], -1, tl.int64)
            tl.store(slots_ptr + begin + token, slots, mask=token < max_tokens - begin)
        if (split == 0) & (kind == 0):
            tl.store(kv_indptr_ptr + lanes, first)


@dataclass(frozen=True, slots=True, eq=False)
class BatchTables:
    """The tables of one step, at fixed addresses, for at most so many lanes, pages and new tokens.

    Attributes:
        block_table: int32 `[kinds, lanes, width]`: cells of a lane's pages, then the pad.
        kv_indptr: int32 `[lanes + 1]`: where a lane's pages begin in kv_indices.
        kv_indices: int32 `[kinds, indices]`: the lanes' pages one after another; undefined past `kv_indptr[lanes]`.
        last_page_len: int32 `[lanes]`: tokens in a lane's last page.
        slot_mapping: int64 `[kinds, tokens]`: flat rows of the new tokens, -1 past them.
        state_indices: int32 `[lanes]`: state cells, -1 for none.
    """

    block_table: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    slot_mapping: Tensor
    state_indices: Tensor

    @classmethod
    def allocate(
        cls, *, lanes: int, width: int, tokens: int, kinds: int = 1, device: str | torch.device = "cpu"
    ) -> BatchTables:
        """Make tables for batches of up to `lanes` requests, `width` pages each, and `tokens` new tokens.

        Raises:
            InvalidArgumentError: a size below 1, or more than `MAX_LANES` lanes.
        """
        for what, value in (("lanes", lanes), ("width", width), ("tokens", tokens), ("kinds", kinds)):
            if value < 1:
                raise InvalidArgumentError(f"{what} is {value}; it must be at least 1")
        if lanes > MAX_LANES:
            raise InvalidArgumentError(f"{lanes} lanes; at most {MAX_LANES}")

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        return cls(
            new(kinds, lanes, width),
            torch.zeros(lanes + 1, dtype=torch.int32, device=device),
            new(kinds, lanes * width),
            torch.zeros(lanes, dtype=torch.int32, device=device),
            new(kinds, tokens, dtype=torch.int64),
            new(lanes),
        )


def build_tables(
    tables: Tensor,
    kinds: Tensor,
    handles: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    out: BatchTables,
    *,
    page_size: int,
    state_handles: Tensor | None = None,
    state_kind: int = 0,
    pad: int = -1,
) -> BatchTables:
    """Fill every table of one step in one launch.

    A padded lane has length 0 and no new tokens. With `pad=-1` it owns no page; with a pad page (0, the null cell) it
    owns that page alone and its last_page_len is 1. Pages of a live lane that have no cell (a window page that slid
    out) read as the pad too.

    Args:
        tables: int32 `[kinds of the arena, max_handles + 1]`: the mirror, `Arena.table`.
        kinds: int32 `[kinds of out]` on the device: rows of `tables` whose pages the handles own; one page size.
        handles: int32 `[lanes, width]`: the lanes' pages, last stride 1.
        lengths: int32 `[lanes]`: tokens of each lane after this step, the new ones included.
        query_start: int32 `[lanes + 1]`: where each lane's new tokens begin; ascending from 0.
        out: what to fill; its buffers may be larger.
        page_size: tokens.
        state_handles: int32 `[lanes]`, for state_indices.
        state_kind: their row of `tables`.
        pad: -1 or the pad page.

    Returns:
        `out`.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device, buffers that are too small, a pad below -1.

    Mutates the buffers of `out`: the first `lanes` rows, all of slot_mapping.
    """
    lanes, width = _check_batch(tables, kinds, handles, lengths, query_start, out, state_handles)
    if page_size < 1 or pad < -1:
        raise InvalidArgumentError(f"page_size is {page_size}, pad {pad}; need at least 1 and -1")
    if not 0 <= state_kind < tables.shape[0]:
        raise InvalidArgumentError(f"state_kind is {state_kind}; the tables have rows 0 to {tables.shape[0] - 1}")
    if not uses_kernels(tables.device):
        naive.build_tables(
            tables,
            kinds,
            handles,
            lengths,
            query_start,
            state_handles,
            state_kind=state_kind,
            page_size=page_size,
            pad=pad,
            block_table=out.block_table,
            kv_indptr=out.kv_indptr,
            kv_indices=out.kv_indices,
            last_page_len=out.last_page_len,
            slot_mapping=out.slot_mapping,
            state_indices=out.state_indices,
        )
        return out
    tokens = out.slot_mapping.shape[1]
    block = 256 if max(width, tokens) <= 256 else 1024
    splits = cdiv(max(width, cdiv(tokens, max(1, lanes))), block)
    with on_device(tables):
        build_tables_kernel[(lanes + 1, splits, len(kinds))](
            tables,
            kinds,
            handles,
            lengths,
            query_start,
            lengths if state_handles is None else state_handles,
            out.block_table,
            out.kv_indptr,
            out.kv_indices,
            out.last_page_len,
            out.slot_mapping,
            out.state_indices,
            lanes,
            tables.shape[1],
            width,
            page_size,
            state_kind,
            handles.stride(0),
            out.block_table.stride(0),
            out.block_table.stride(1),
            out.kv_indices.shape[1],
            tokens,
            PAD=pad,
            HAS_STATES=state_handles is not None,
            LANES=max(16, next_power_of_2(lanes)),
            BLOCK=block,
            num_warps=4,
            num_stages=1,
        )
    return out


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """Apply a step plan's change list to the mirror: one scatter.

    Args:
        tables: int32 `[kinds, max_handles + 1]`, contiguous.
        changes: int32 `[n, 1 + kinds]` on the device: a handle, then its cell in every kind or -1; handles distinct.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device.

    Mutates `tables`. A handle past the tables is left out by the kernel and refused by torch.
    """
    check_tensor("tables", tables, dtype=torch.int32, shape=(None, None))
    kinds, num_handles = tables.shape
    check_tensor("changes", changes, dtype=torch.int32, shape=(None, 1 + kinds), device=tables.device)
    for what, tensor in (("tables", tables), ("changes", changes)):
        if not tensor.is_contiguous():
            raise InvalidArgumentError(f"{what} has strides {tensor.stride()}; it must be contiguous")
    kernel = uses_kernels(tables.device)
    if not len(changes):
        return
    if not kernel:
        naive.update_tables(tables, changes)
        return
    with on_device(tables):
        update_tables_kernel[(cdiv(len(changes), 256),)](
            tables, changes, len(changes), num_handles, KINDS=kinds, BLOCK=256, num_warps=4
        )


def translate(handles: Tensor, table: Tensor, out: Tensor, null: int) -> Tensor:
    """Translate handles to cells.

    Args:
        handles: int32 `[rows, width]`, last stride 1.
        table: int32 `[max_handles + 1]`: one kind's row of the mirror.
        out: int32 `[rows, width]`, last stride 1.
        null: what null, dead, negative and unknown handles become.

    Returns:
        `out`.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device.
    """
    check_tensor("handles", handles, dtype=torch.int32, shape=(None, None))
    check_tensor("table", table, dtype=torch.int32, shape=(None,), device=handles.device)
    check_tensor("out", out, dtype=torch.int32, shape=handles.shape, device=handles.device)
    _check_rows(("handles", handles), ("out", out), ("table", table))
    if not uses_kernels(handles.device):
        return naive.translate(handles, table, out, null)
    if not handles.numel():
        return out
    rows, width = handles.shape
    block = min(1024, max(32, next_power_of_2(width)))
    with on_device(handles):
        translate_kernel[(rows, cdiv(width, block))](
            handles, table, out, len(table), width, handles.stride(0), out.stride(0), null, BLOCK=block, num_warps=4
        )
    return out


def map_slots(handles: Tensor, positions: Tensor, table: Tensor, page_size: int, out: Tensor) -> Tensor:
    """Translate token positions to flat rows `cell * page_size + position % page_size`.

    Args:
        handles: int32 `[tokens]`, each token's page, or `[rows, width]`, each row's pages; last stride 1.
        positions: int32 or int64 `[tokens]` or `[rows, tokens]`, last stride 1; negative: none.
        table: int32 `[max_handles + 1]`.
        page_size: tokens.
        out: int64, shaped as positions, last stride 1; -1 where there is no cell.

    Returns:
        `out`.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device.
    """
    check_tensor("handles", handles, dtype=torch.int32)
    check_tensor("positions", positions, dtype=INDEX_DTYPES, device=handles.device)
    if positions.dim() != handles.dim() or handles.dim() not in (1, 2) or handles.shape[0] != positions.shape[0]:
        raise InvalidArgumentError(
            f"handles {tuple(handles.shape)} and positions {tuple(positions.shape)}: need both [tokens], or "
            "[rows, width] and [rows, tokens]"
        )
    check_tensor("table", table, dtype=torch.int32, shape=(None,), device=handles.device)
    check_tensor("out", out, dtype=torch.int64, shape=positions.shape, device=handles.device)
    _check_rows(("handles", handles), ("positions", positions), ("out", out), ("table", table))
    if page_size < 1:
        raise InvalidArgumentError(f"page_size is {page_size}; it must be at least 1")
    if not uses_kernels(handles.device):
        return naive.map_slots(handles, positions, table, page_size, out)
    if not positions.numel():
        return out
    per_token = handles.dim() == 1
    if per_token:
        handles, positions, target = handles[None], positions[None], out[None]
    else:
        target = out
    rows, tokens = positions.shape
    block = min(1024, max(32, next_power_of_2(tokens)))
    with on_device(handles):
        map_slots_kernel[(rows, cdiv(tokens, block))](
            handles,
            positions,
            table,
            target,
            len(table),
            tokens,
            handles.shape[1],
            page_size,
            handles.stride(0),
            positions.stride(0),
            target.stride(0),
            PER_TOKEN=per_token,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _check_rows(*tensors: tuple[str, Tensor]) -> None:
    for what, tensor in tensors:
        if tensor.numel() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InvalidArgumentError(f"{what} has last stride {tensor.stride(-1)}; it must be 1")


def _check_batch(
    tables: Tensor,
    kinds: Tensor,
    handles: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    out: BatchTables,
    state_handles: Tensor | None,
) -> tuple[int, int]:
    device, int32 = tables.device, torch.int32
    check_tensor("tables", tables, dtype=int32, shape=(None, None))
    check_tensor("handles", handles, dtype=int32, shape=(None, None), device=device)
    lanes, width = handles.shape
    _check_rows(("handles", handles))
    count = out.block_table.shape[0]
    for what, tensor, shape in (
        ("kinds", kinds, (count,)),
        ("lengths", lengths, (lanes,)),
        ("query_start", query_start, (lanes + 1,)),
        ("state_handles", state_handles, (lanes,)),
    ):
        if tensor is not None:
            check_tensor(what, tensor, dtype=int32, shape=shape, device=device)
            if not tensor.is_contiguous():
                raise InvalidArgumentError(f"{what} has stride {tensor.stride(0)}; it must be contiguous")
    if not tables.is_contiguous():
        raise InvalidArgumentError(f"tables has strides {tables.stride()}; it must be contiguous")
    if out.block_table.device != device:
        raise InvalidArgumentError(f"out is on {out.block_table.device}; the tables are on {device}")
    if lanes > out.block_table.shape[1] or width > out.block_table.shape[2]:
        raise InvalidArgumentError(
            f"{lanes} lanes of {width} pages; out holds {out.block_table.shape[1]} of {out.block_table.shape[2]}"
        )
    return lanes, width
