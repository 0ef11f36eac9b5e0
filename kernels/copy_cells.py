"""Copy and zero whole cells: one launch for all cells of all kinds, balanced over the machine.

The work is cut into tiles of one block. Cells of one kind have the same number of tiles, so a program finds its cell
with one division: `tile -> group -> cell -> part of the cell`. A group is a kind's copies or a kind's zeroes; a table
of the groups' first tiles (a few rows) is read whole by each program. A 77 MB state is thousands of tiles, a thousand
pages of 24 KB are two thousand: both fill the machine.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import QUAD_BYTES, alias, cdiv, check_buffer, check_stride, next_power_of_2, on_device, upload, warps
from .backend import uses_kernels

__all__ = ["LARGE_BLOCK", "SMALL_BLOCK", "CellPairs", "copy_cells", "copy_cells_kernel", "run_operations", "zero_cells"]

IntArray = npt.NDArray[np.int32]

# int32 words of a tile. 16 KB keep eight 128-bit loads in flight in each of 128 threads; cells below the large block
# would leave most of its lanes idle.
LARGE_BLOCK = 4096
SMALL_BLOCK = 256
GROUP_FIELDS = 5
NO_TILE = np.iinfo(np.int32).max
ZERO = 2  # the operation code of a zero in a step plan


@triton.jit
def copy_cells_kernel(src_ptr, dst_ptr, rows_ptr, groups_ptr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one tile of one cell, or zero it.

    `src_ptr`, `dst_ptr`: int32 words. `rows_ptr`: int32 `[n, 4]`, the last two columns source and destination cell.
    `groups_ptr`: int32 `[GROUPS, 5]`: first tile, first row, tiles of a cell, 16-byte units of a cell, 0 to zero.
    """
    tile = tl.program_id(0)
    first_tiles = tl.load(groups_ptr + tl.arange(0, GROUPS) * 5)
    group_ptr = groups_ptr + (tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1) * 5
    tiles = tl.load(group_ptr + 2)
    quads = tl.load(group_ptr + 3)
    copies = tl.load(group_ptr + 4) != 0
    within = tile - tl.load(group_ptr)
    row_ptr = rows_ptr + (tl.load(group_ptr + 1) + within // tiles) * 4
    src = tl.load(row_ptr + 2).to(tl.int64)
    dst = tl.load(row_ptr + 3).to(tl.int64)
    words = (within % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = words < quads * 4
    value = tl.load(src_ptr + (src * quads) * 4 + words, mask=inside & copies, other=0)
    tl.store(dst_ptr + (dst * quads) * 4 + words, value, mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class CellPairs:
    """Cells of one stride to copy.

    Attributes:
        stride_bytes: of the kind; a multiple of 16.
        src, dst: `[n]` cells, host integers.
    """

    stride_bytes: int
    src: Sequence[int] | IntArray
    dst: Sequence[int] | IntArray


def copy_cells(source: Tensor, target: Tensor, pairs: Sequence[CellPairs]) -> None:
    """Copy cells, several kinds in one launch, within one arena or between two with equal strides.

    `source` and `target` may be the same tensor, arenas on two GPUs that see each other, or a GPU arena and a pinned
    host one. Enqueued on the current stream; nothing waits.

    Args:
        source: uint8 `[bytes]`, 16-byte aligned.
        target: uint8 `[bytes]`, 16-byte aligned.
        pairs: what to copy; empty lists are fine.

    Raises:
        InvalidArgumentError: a buffer that is not flat aligned uint8, a host arena that is not pinned beside a GPU one,
            a stride that is not a multiple of 16, unequal lengths, a cell outside its arena, a destination that
            overlaps another destination or a source.

    Complexity: O(n log n) on the host for the overlap check, O(bytes) on the device. Mutates `target`.
    """
    check_buffer("source", source)
    check_buffer("target", target)
    kernel = uses_kernels(_device(source, target))
    tables: list[tuple[int, IntArray, IntArray]] = []
    for pair in pairs:
        check_stride("stride_bytes", pair.stride_bytes)
        src, dst = (
            _cells("src", pair.src, pair.stride_bytes, source),
            _cells("dst", pair.dst, pair.stride_bytes, target),
        )
        if len(src) != len(dst):
            raise InvalidArgumentError(f"{len(src)} source cells and {len(dst)} destination cells; they must pair up")
        tables.append((pair.stride_bytes, src, dst))
    _check_disjoint(tables, is_same=source.data_ptr() == target.data_ptr())
    rows = [np.stack([np.zeros_like(s), np.full_like(s, k << 8), s, d], 1) for k, (_, s, d) in enumerate(tables)]
    if not any(map(len, rows)):
        return
    operations, strides = np.concatenate(rows), [stride for stride, _, _ in tables]
    if kernel:
        _launch(source, target, operations, strides)
    else:
        naive.copy_cells(source, target, operations, strides)


def zero_cells(target: Tensor, stride_bytes: int, cells: Sequence[int] | IntArray) -> None:
    """Zero whole cells of one kind.

    Args:
        target: uint8 `[bytes]`, 16-byte aligned.
        stride_bytes: of the kind; a multiple of 16.
        cells: `[n]` host integers; one may come twice.

    Raises:
        InvalidArgumentError: as `copy_cells`.
    """
    check_buffer("target", target)
    check_stride("stride_bytes", stride_bytes)
    found = _cells("cells", cells, stride_bytes, target)
    operations = np.stack([np.zeros_like(found), np.full_like(found, ZERO), found, found], 1)
    run_operations(target, operations, [stride_bytes])


def run_operations(buffer: Tensor, operations: IntArray, strides: Sequence[int]) -> None:
    """Carry out the operations of a step plan: one upload, then one launch per phase.

    Args:
        buffer: uint8 `[arena_bytes]`, 16-byte aligned.
        operations: int32 `[n, 4]` as in `StepPlan.operations`: phase, operation (0 move, 1 copy, 2 zero) | kind << 8,
            source cell, destination cell; sorted by phase; disjoint inside a phase, which the planner has seen to.
        strides: bytes of a cell per kind.

    Raises:
        InvalidArgumentError: a buffer that is not flat aligned uint8, a stride that is not a multiple of 16.

    Complexity: O(n log n) on the host, O(bytes) on the device. Mutates `buffer`.
    """
    check_buffer("buffer", buffer)
    for stride in strides:
        check_stride("a stride", stride)
    if not len(operations):
        return
    if uses_kernels(buffer.device):
        _launch(buffer, buffer, operations, strides)
    else:
        naive.run_operations(buffer, operations, strides)


def _launch(source: Tensor, target: Tensor, operations: IntArray, strides: Sequence[int]) -> None:
    phases = operations[:, 0]
    is_copy = (operations[:, 1] & 255) != ZERO
    kinds = operations[:, 1] >> 8
    order = np.lexsort((is_copy, kinds, phases))
    rows, phases, is_copy, kinds = operations[order], phases[order], is_copy[order], kinds[order]
    edges = np.flatnonzero((np.diff(phases) != 0) | (np.diff(kinds) != 0) | (np.diff(is_copy) != 0)) + 1
    starts = np.concatenate([[0], edges]).tolist()
    quads_of = [stride // QUAD_BYTES for stride in strides]
    launches: list[tuple[int, int, int]] = []  # tiles, groups, block
    tables: list[IntArray] = []
    by_phase = itertools.groupby(
        zip(starts, [*starts[1:], len(rows)], strict=True), key=lambda run: int(phases[run[0]])
    )
    for _, group in by_phase:
        runs = list(group)
        block = LARGE_BLOCK if max(quads_of[kinds[lo]] for lo, _ in runs) * 4 >= LARGE_BLOCK // 2 else SMALL_BLOCK
        size = max(8, next_power_of_2(len(runs)))
        table = np.zeros((size, GROUP_FIELDS), np.int32)
        table[:, 0] = NO_TILE
        total = 0
        for index, (lo, hi) in enumerate(runs):
            quads = quads_of[kinds[lo]]
            tiles = cdiv(quads * 4, block)
            table[index] = total, lo, tiles, quads, is_copy[lo]
            total += tiles * (hi - lo)
        launches.append((total, size, block))
        tables.append(table.reshape(-1))
    device = _device(source, target)
    words = upload(np.concatenate([rows.reshape(-1).astype(np.int32), *tables]), device)
    src, dst = alias(source, torch.int32), alias(target, torch.int32)
    at = rows.size
    with on_device(words):
        for total, size, block in launches:
            copy_cells_kernel[(total,)](
                src, dst, words, words[at:], GROUPS=size, BLOCK=block, num_warps=warps(block // 4)
            )
            at += size * GROUP_FIELDS


def _device(source: Tensor, target: Tensor) -> torch.device:
    """The device that runs the copy; the other side has to be visible to it."""
    kinds = {source.device.type, target.device.type}
    if kinds == {"cpu", "cuda"}:
        host = source if source.device.type == "cpu" else target
        if not host.is_pinned():
            raise InvalidArgumentError("the arena on the CPU is not pinned; a GPU kernel cannot reach its bytes")
    elif len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise InvalidArgumentError(f"source is on {source.device}, target on {target.device}; need CPU or CUDA buffers")
    return target.device if target.device.type == "cuda" else source.device


def _cells(what: str, cells: Sequence[int] | IntArray, stride_bytes: int, buffer: Tensor) -> IntArray:
    found = np.asarray(cells)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidArgumentError(f"{what} has shape {found.shape}, dtype {found.dtype}; it must be integers [n]")
    count = buffer.numel() // stride_bytes
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise InvalidArgumentError(
            f"{what} holds cells {int(found.min())} to {int(found.max())}; the buffer has cells 0 to {count - 1}"
        )
    return found.astype(np.int32)


def _check_disjoint(tables: Sequence[tuple[int, IntArray, IntArray]], *, is_same: bool) -> None:
    if not any(len(dst) for _, _, dst in tables):
        return
    starts = np.concatenate([dst.astype(np.int64) * stride for stride, _, dst in tables])
    ends = starts + np.concatenate([np.full(len(dst), stride, np.int64) for stride, _, dst in tables])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    twice = np.flatnonzero(ends[:-1] > starts[1:])
    if len(twice):
        raise InvalidArgumentError(
            f"two destinations overlap at byte {int(starts[twice[0] + 1])}; copy them in two calls"
        )
    if not is_same:
        return
    for stride, src, dst in tables:
        begin = src.astype(np.int64) * stride
        # The last destination that starts before the source ends is the only one that can reach into it.
        last = np.searchsorted(starts, begin + stride, side="left") - 1
        hit = (last >= 0) & (ends[np.maximum(last, 0)] > begin)
        # Copying a cell to itself changes nothing.
        hit &= src != dst
        if hit.any():
            at = int(begin[np.flatnonzero(hit)[0]])
            raise InvalidArgumentError(f"a destination overlaps the source at byte {at}; copy them in two calls")
