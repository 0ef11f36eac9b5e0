"""The plain torch references of every kernel, which are also the CPU path. Nothing here loads Triton.

They take the arguments of the kernels' host wrappers after those have checked them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "FP8_MAX",
    "build_tables",
    "commit_conv_windows",
    "copy_cells",
    "copy_rows",
    "map_slots",
    "replay_outputs",
    "replay_states",
    "run_operations",
    "track_states",
    "translate",
    "update_tables",
    "write_rows",
]

IntArray = npt.NDArray[np.int32]

# Largest finite values: a conversion to fp8 saturates there.
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

# A copy is gathered and scattered in pieces, so that its scratch memory stays small.
SCRATCH_BYTES = 64 << 20


def _longs(buffer: Tensor, shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int = 0) -> Tensor:
    """View bytes as int64: moving those is many times faster than moving single bytes."""
    base = buffer[: buffer.numel() // 8 * 8].view(torch.int64)
    strides = [stride // 8 for stride in strides_bytes]
    return torch.as_strided(base, shape, strides, base.storage_offset() + offset_bytes // 8)


def _cells(buffer: Tensor, stride_bytes: int) -> Tensor:
    return _longs(buffer, (buffer.numel() // stride_bytes, stride_bytes // 8), (stride_bytes, 8))


def _index(values: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    # A plan's arrays may be read-only or strided; torch wants neither.
    return torch.from_numpy(np.array(values)).to(device, torch.int64, non_blocking=True)


def copy_cells(source: Tensor, target: Tensor, operations: IntArray, strides: Sequence[int]) -> None:
    """Copy cells of one phase: rows of `operations` are (phase, kind << 8, source cell, destination cell)."""
    kinds = operations[:, 1] >> 8
    for kind in np.unique(kinds).tolist():
        rows = operations[kinds == kind]
        old, new = _cells(source, strides[kind]), _cells(target, strides[kind])
        src, dst = _index(rows[:, 2], source.device), _index(rows[:, 3], target.device)
        step = max(1, SCRATCH_BYTES // strides[kind])
        # Sources and destinations are disjoint, so pieces may be copied one after another.
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            new.index_copy_(0, dst[part], old.index_select(0, src[part]).to(target.device))


def run_operations(buffer: Tensor, operations: IntArray, strides: Sequence[int]) -> None:
    """Carry out a step plan's operations in order: see `copy_cells.run_operations`."""
    heads = np.stack([operations[:, 0], (operations[:, 1] & 255) == 2], 1)
    edges = np.flatnonzero(np.any(heads[1:] != heads[:-1], axis=1)) + 1
    for lo, hi in itertools.pairwise([0, *edges.tolist(), len(operations)]):
        rows = operations[lo:hi]
        if hi > lo and not heads[lo, 1]:
            copy_cells(buffer, buffer, rows, strides)
            continue
        for kind in np.unique(rows[:, 1] >> 8).tolist():
            cells = _index(rows[rows[:, 1] >> 8 == kind, 3], buffer.device)
            _cells(buffer, strides[kind]).index_fill_(0, cells, 0)


def copy_rows(
    buffer: Tensor,
    parts: Sequence[tuple[int, int, int]],
    stride_bytes: int,
    page_size: int,
    src: Tensor,
    dst: Tensor,
    indptr: Tensor,
) -> None:
    """Copy token rows: every row is read before any is written, which is what in-order copies to the front amount to.

    `parts`: (offset in the page, bytes from token to token, bytes of a row), all multiples of 16.
    """
    index = torch.arange(len(src), device=src.device)
    pages = buffer.numel() // stride_bytes
    keep = (index >= indptr[0]) & (index < indptr[-1])
    for rows in (src, dst):
        keep &= (rows >= 0) & (rows < pages * page_size)
    old, new = src[keep].long(), dst[keep].long()
    for offset, token_stride, row_bytes in parts:
        view = _longs(buffer, (pages, page_size, row_bytes // 8), (stride_bytes, token_stride, 8), offset)
        view[new // page_size, new % page_size] = view[old // page_size, old % page_size]


def track_states(states: Tensor, mask: Tensor, active: Tensor, track: Tensor) -> None:
    """`if mask[i]: states[track[i]] = states[active[i]]`; indices outside the slots do nothing."""
    slots = states.shape[0]
    wanted = mask.bool() & (active >= 0) & (track >= 0) & (active < slots) & (track < slots)
    states[track[wanted].long()] = states[active[wanted].long()]


def commit_conv_windows(conv: Tensor, windows: Tensor, last_step: Tensor, slots: Tensor, rows: Tensor | None) -> None:
    """`conv[:, slots[i]] = windows[:, rows[i], last_step[i]]`; a negative or too large index does nothing.

    `conv`: `[layers, slots, ...]`; `windows`: `[layers, rows, steps, ...]`.
    """
    found = torch.arange(len(slots), device=slots.device) if rows is None else rows.long()
    wanted = (last_step >= 0) & (last_step < windows.shape[2]) & (slots >= 0) & (slots < conv.shape[1])
    wanted &= (found >= 0) & (found < windows.shape[1])
    conv[:, slots[wanted].long()] = windows[:, found[wanted], last_step[wanted].long()]


def replay_states(
    state: Tensor,
    rawv: Tensor,
    rawk: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    eps: float,
    normalize: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fold the accepted steps into the states, one request after another; see `replay_states.replay_states`.

    `dtype`: of the arithmetic; float64 is what the tests measure against.
    """
    heads, length = state.shape[1], rawv.shape[1]
    group = heads // rawk.shape[2]
    triples = zip(slots.tolist(), rows.tolist(), start.tolist(), count.tolist(), strict=True)
    for slot, row, begin, steps in triples:
        if slot < 0 or row < 0 or steps <= 0:
            continue
        current = state[slot].to(dtype)
        for step in range(steps):
            at = (begin + step) % length
            key = rawk[row, at].to(dtype)
            if normalize:
                key = key / (key.square().sum(-1, keepdim=True) + eps).sqrt()
            key = key.repeat_interleave(group, 0)
            current = current * _decay(g[row, at].to(dtype))
            delta = rawv[row, at].to(dtype) - torch.einsum("hvk,hk->hv", current, key)
            delta = beta[row, at].to(dtype)[:, None] * delta
            current = current + delta[:, :, None] * key[:, None, :]
        state[slot] = current.to(state.dtype)


def replay_outputs(
    state: Tensor,
    d: Tensor,
    k: Tensor,
    g: Tensor,
    query: Tensor,
    out: Tensor,
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`out[i] = scale * S q` where S is the state after `count[i]` steps, by forming S."""
    heads, length = state.shape[1], d.shape[1]
    key_group, query_group = heads // k.shape[2], heads // query.shape[1]
    quads = zip(slots.tolist(), rows.tolist(), start.tolist(), count.tolist(), strict=True)
    for lane, (slot, row, begin, steps) in enumerate(quads):
        if slot < 0 or row < 0:
            out[lane] = 0
            continue
        current = state[slot].to(dtype)
        for step in range(steps):
            at = (begin + step) % length
            key = k[row, at].to(dtype).repeat_interleave(key_group, 0)
            current = current * _decay(g[row, at].to(dtype)) + d[row, at].to(dtype)[:, :, None] * key[:, None, :]
        queries = query[lane].to(dtype).repeat_interleave(query_group, 0)
        out[lane] = (scale * torch.einsum("hvk,hk->hv", current, queries)).to(out.dtype)


def _decay(g: Tensor) -> Tensor:
    """exp(g) shaped for `[heads, v, k]`: one gate per head, or one per key channel."""
    return g.exp()[:, None, None] if g.dim() == 1 else g.exp()[:, None, :]


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """`tables[k, changes[:, 0]] = changes[:, 1 + k]`."""
    tables.index_copy_(1, changes[:, 0].long(), changes[:, 1:].T.contiguous())


def translate(handles: Tensor, table: Tensor, out: Tensor, null: int) -> Tensor:
    """Handles to cells; a null, dead, negative or too large handle becomes `null`."""
    known = (handles > 0) & (handles < len(table))
    cells = table[torch.where(known, handles, 0).long()]
    return out.copy_(torch.where(known & (cells >= 0), cells, null))


def map_slots(handles: Tensor, positions: Tensor, table: Tensor, page_size: int, out: Tensor) -> Tensor:
    """Token positions to flat rows `cell * page_size + position % page_size`, -1 where there is none.

    `handles`: the page of each token, or the pages of each row of positions.
    """
    spots = positions.long()
    if handles.dim() == 2:
        pages = spots.clamp_min(0) // page_size
        inside = pages < handles.shape[1]
        owners = torch.where(inside, handles.gather(1, torch.where(inside, pages, 0)), -1)
    else:
        owners = handles
    known = (owners > 0) & (owners < len(table)) & (spots >= 0)
    cells = table[torch.where(known, owners, 0).long()].long()
    return out.copy_(torch.where(known & (cells >= 0), cells * page_size + spots % page_size, -1))


def build_tables(
    tables: Tensor,
    kinds: Tensor,
    handles: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    state_handles: Tensor | None,
    *,
    state_kind: int,
    page_size: int,
    pad: int,
    block_table: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    slot_mapping: Tensor,
    state_indices: Tensor,
) -> None:
    """Fill one step's tables, lane by lane: see `page_tables.build_tables`."""
    lanes, width = handles.shape
    bounds = query_start.tolist()
    slot_mapping[:, bounds[-1] :] = -1
    kv_indptr[0] = 0
    for lane, length in enumerate(lengths.tolist()):
        pages = -(-length // page_size) if length > 0 else int(pad >= 0)
        first = int(kv_indptr[lane])
        kv_indptr[lane + 1] = first + pages
        last_page_len[lane] = length - (pages - 1) * page_size if length > 0 else pages
        used = handles[lane] * (torch.arange(width, device=handles.device) < -(-length // page_size))
        positions = torch.arange(length - (bounds[lane + 1] - bounds[lane]), length, device=handles.device)
        for index, kind in enumerate(kinds.tolist()):
            row = block_table[index, lane, :width]
            translate(used, tables[kind], row, pad)
            room = kv_indices[index, first : first + pages]
            room.copy_(row[: len(room)])
            slots = slot_mapping[index, bounds[lane] : bounds[lane + 1]]
            map_slots(used[None], positions[None, : len(slots)], tables[kind], page_size, slots[None])
    if state_handles is not None:
        translate(state_handles, tables[state_kind], state_indices[:lanes], -1)


def write_rows(
    pairs: Sequence[tuple[Tensor, Tensor]],
    slot_mapping: Tensor,
    *,
    first_row: int,
    scales: Sequence[Tensor | None],
) -> None:
    """`cache[slot // page_size, slot % page_size] = rows[i]` where `slot_mapping[i] >= first_row`.

    `pairs`: rows `[tokens, heads, dim]` and cache `[pages, page_size, heads, dim]` each. fp8 caches take
    `rows / scale`, to the nearest (ties to even), saturating; `scales` hold one value or one per head.
    """
    kept = slot_mapping >= first_row
    slots = slot_mapping[kept].long()
    for (rows, cache), scale in zip(pairs, scales, strict=True):
        values = rows[kept]
        if cache.dtype in FP8_MAX:
            limit = FP8_MAX[cache.dtype]
            values = values.float()
            if scale is not None:
                values = values / scale.reshape(-1, 1)
            # Indexed assignment of fp8 is not everywhere: write the codes.
            codes = values.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
            cache.view(torch.uint8)[slots // cache.shape[1], slots % cache.shape[1]] = codes
        else:
            cache[slots // cache.shape[1], slots % cache.shape[1]] = values
