"""Copy token rows inside pages, by row numbers on the device: what keeps the accepted tokens of a draft tree.

One program takes one piece of one row (a layer's keys, say) and walks the copies of one request in their order, so a
row that is overwritten was read before: copies towards the front need no second buffer.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import (
    QUAD_BYTES,
    alias,
    check_aligned,
    check_buffer,
    check_index,
    check_stride,
    check_tensor,
    merged,
    on_device,
    upload,
    warps,
)
from .backend import uses_kernels

__all__ = ["BLOCK", "RowParts", "copy_rows", "copy_rows_kernel"]

BLOCK = 512  # int32 words of a piece


@triton.jit
def copy_rows_kernel(  # type: ignore[no-untyped-def]
    buffer_ptr, parts_ptr, src_ptr, dst_ptr, indptr_ptr, num_rows, stride_quads, page_size, BLOCK: tl.constexpr
):
    """Copy one piece of each row of one request, in order.

    `parts_ptr`: int64 `[parts, 3]`: offset in the page, from token to token, length; all in 16-byte units.
    """
    request = tl.program_id(0)
    part_ptr = parts_ptr + tl.program_id(1) * 3
    token_quads = tl.load(part_ptr + 1)
    words = tl.arange(0, BLOCK)
    inside = words < tl.load(part_ptr + 2) * 4
    base = buffer_ptr + tl.load(part_ptr) * 4
    for row in range(tl.load(indptr_ptr + request), tl.load(indptr_ptr + request + 1)):
        src = tl.load(src_ptr + row).to(tl.int64)
        dst = tl.load(dst_ptr + row).to(tl.int64)
        wanted = inside & (src >= 0) & (dst >= 0) & (src < num_rows) & (dst < num_rows)
        old = (src // page_size) * stride_quads * 4 + (src % page_size) * token_quads * 4
        new = (dst // page_size) * stride_quads * 4 + (dst % page_size) * token_quads * 4
        value = tl.load(base + old + words, mask=wanted, other=0)
        tl.store(base + new + words, value, mask=wanted)


@dataclass(frozen=True, slots=True, eq=False)
class RowParts:
    """Where the pieces of a token's row lie in a page. Made once per kind, with `of`.

    Attributes:
        stride_bytes: of a page.
        page_size: tokens of a page.
        parts: (offset in the page, bytes from token to token, bytes) of each piece.
        table: int64 `[pieces, 3]` on the device: the same in 16-byte units, cut to at most one block.
    """

    stride_bytes: int
    page_size: int
    parts: tuple[tuple[int, int, int], ...]
    table: Tensor

    @classmethod
    def of(cls, buffer: Tensor, views: Sequence[Tensor]) -> RowParts:
        """Describe the rows of views of one kind: all of them, to copy whole tokens.

        Args:
            buffer: the arena's bytes.
            views: `[pages, page_size, ...]` each, over `buffer` (for HND pages: with heads and tokens swapped back).

        Raises:
            InvalidArgumentError: no views, views outside the buffer or of different pages, a stride or an address that
                is not a multiple of 16 B.
        """
        check_buffer("buffer", buffer)
        if not views:
            raise InvalidArgumentError("views is empty; give every view of the kind")
        size = views[0].dtype.itemsize
        stride_bytes, page_size = views[0].stride(0) * size, views[0].shape[1]
        check_stride("the page stride", stride_bytes)
        parts: list[tuple[int, int, int]] = []
        for index, view in enumerate(views):
            what, size = f"views[{index}]", view.dtype.itemsize
            offset = view.data_ptr() - buffer.data_ptr()
            if view.shape[1] != page_size or view.stride(0) * size != stride_bytes:
                raise InvalidArgumentError(
                    f"{what} has pages of {view.shape[1]} tokens and {view.stride(0) * size} bytes; views[0] has "
                    f"{page_size} and {stride_bytes}"
                )
            if view.device != buffer.device or not 0 <= offset < stride_bytes:
                raise InvalidArgumentError(f"{what} does not start in the first page of the buffer")
            check_aligned(what, view)
            token_bytes = view.stride(1) * size
            check_stride(f"{what}: the token stride", token_bytes)
            *outer, (length, step) = merged(view.shape[2:], view.stride()[2:])
            if step != 1:
                raise InvalidArgumentError(f"{what} has no axis of stride 1; its rows are not runs of bytes")
            # A row's end is padded to 16 bytes: the padding is the row's own and is copied along.
            row_bytes = -(-length * size // QUAD_BYTES) * QUAD_BYTES
            offsets = [0]
            for extent, stride in outer:
                check_stride(f"{what}: an inner stride", stride * size)
                offsets = [each + i * stride * size for each in offsets for i in range(extent)]
            parts.extend((offset + each, token_bytes, row_bytes) for each in offsets)
        step = BLOCK * 4
        pieces = [
            (offset + at, token, min(step, length - at))
            for offset, token, length in parts
            for at in range(0, length, step)
        ]
        table = upload(np.array(pieces, np.int64) // QUAD_BYTES, buffer.device)
        return cls(stride_bytes, page_size, tuple(parts), table)


def copy_rows(buffer: Tensor, parts: RowParts, src: Tensor, dst: Tensor, indptr: Tensor) -> None:
    """Copy token rows; request r does copies `indptr[r] .. indptr[r + 1] - 1`.

    The result is as if every row was read before any was written. That holds when no copy of a request writes a row
    that a later one reads, as in a compaction to the front, and when no two requests share a row.

    Args:
        buffer: uint8 `[arena_bytes]`.
        parts: of the kind.
        src, dst: int32 or int64 `[n]` on the device: flat rows `cell * page_size + offset`; a negative one: no copy.
        indptr: int32 or int64 `[requests + 1]` on the device, ascending, within 0 and n.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device. On the CPU also (reading back would stall a device): a row
            outside the buffer, a copy that writes what a later one reads.

    Mutates `buffer`.
    """
    check_buffer("buffer", buffer)
    check_tensor("src", src, shape=(None,))
    check_index("src", src, len(src), buffer.device)
    check_index("dst", dst, len(src), buffer.device)
    check_tensor("indptr", indptr, shape=(None,))
    check_index("indptr", indptr, len(indptr), buffer.device)
    if parts.table.device != buffer.device:
        raise InvalidArgumentError(f"parts are on {parts.table.device}; the buffer is on {buffer.device}")
    num_rows = buffer.numel() // parts.stride_bytes * parts.page_size
    kernel = uses_kernels(buffer.device)
    if buffer.device.type == "cpu":
        _check_rows(num_rows, src, dst, indptr)
    if len(indptr) < 2 or not len(src):
        return
    if not kernel:
        naive.copy_rows(buffer, parts.parts, parts.stride_bytes, parts.page_size, src, dst, indptr)
        return
    with on_device(buffer):
        # One stage: a load that ran ahead of the stores before it would break the order.
        copy_rows_kernel[(len(indptr) - 1, len(parts.table))](
            alias(buffer, torch.int32),
            parts.table,
            src,
            dst,
            indptr,
            num_rows,
            parts.stride_bytes // QUAD_BYTES,
            parts.page_size,
            BLOCK=BLOCK,
            num_warps=warps(BLOCK // 4),
            num_stages=1,
        )


def _check_rows(num_rows: int, src: Tensor, dst: Tensor, indptr: Tensor) -> None:
    bounds = indptr.tolist()
    if bounds and (bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > len(src)):
        raise InvalidArgumentError(f"indptr {bounds} must ascend within 0 and {len(src)}")
    for name, found in (("src", src), ("dst", dst)):
        if len(found) and int(found.max()) >= num_rows:
            raise InvalidArgumentError(f"{name} holds row {int(found.max())}; the buffer has rows 0 to {num_rows - 1}")
    written: dict[int, int] = {}
    for request in range(len(bounds) - 1):
        for index in range(bounds[request], bounds[request + 1]):
            old, new = int(src[index]), int(dst[index])
            if old < 0 or new < 0:
                continue
            if old in written:
                raise InvalidArgumentError(
                    f"copy {index} reads row {old}, which copy {written[old]} has overwritten; order the copies"
                )
            if new in written:
                raise InvalidArgumentError(f"copies {written[new]} and {index} write row {new}; destinations overlap")
            if old != new:
                written[new] = index
