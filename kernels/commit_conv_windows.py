"""Keep the conv window of the last accepted draft step: `conv[slots[i]] = windows[i, last_step[i]]`.

Speculative verification leaves one conv window per draft step. They may be tensors of their own or, as step t + 1 only
shifts in one column, one overlapping row of `steps + width - 1` columns: `overlapping_windows` views it as windows.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import BITS, QUAD_BYTES, alias, cdiv, check_index, check_tensor, next_power_of_2, on_device, warps
from .backend import uses_kernels

__all__ = ["commit_conv_elements_kernel", "commit_conv_windows", "commit_conv_words_kernel", "overlapping_windows"]

MAX_BLOCK = 2048


@triton.jit
def commit_conv_words_kernel(  # type: ignore[no-untyped-def]
    conv_ptr,
    windows_ptr,
    last_step_ptr,
    slots_ptr,
    rows_ptr,
    num_slots,
    num_rows,
    num_steps,
    conv_layer_quads,
    conv_slot_quads,
    layer_quads,
    row_quads,
    step_quads,
    run_quads,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of one window where both sides are compact runs of 16-byte units."""
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    step = tl.load(last_step_ptr + request).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    row = request
    if HAS_ROWS:
        row = tl.load(rows_ptr + request).to(tl.int64)
    valid = (step >= 0) & (step < num_steps) & (slot >= 0) & (slot < num_slots)
    if valid & (row >= 0) & (row < num_rows):
        words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = words < run_quads * 4
        old = (layer * layer_quads + row * row_quads + step * step_quads) * 4
        new = (layer * conv_layer_quads + slot * conv_slot_quads) * 4
        value = tl.load(windows_ptr + old + words, mask=inside, other=0)
        tl.store(conv_ptr + new + words, value, mask=inside)


@triton.jit
def commit_conv_elements_kernel(  # type: ignore[no-untyped-def]
    conv_ptr,
    windows_ptr,
    last_step_ptr,
    slots_ptr,
    rows_ptr,
    num_slots,
    num_rows,
    num_steps,
    conv_layer_stride,
    conv_slot_stride,
    conv_channel_stride,
    conv_column_stride,
    layer_stride,
    row_stride,
    step_stride,
    channel_stride,
    column_stride,
    elements,
    COLUMNS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of one window element by element, between any strides (in elements)."""
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    step = tl.load(last_step_ptr + request).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    row = request
    if HAS_ROWS:
        row = tl.load(rows_ptr + request).to(tl.int64)
    valid = (step >= 0) & (step < num_steps) & (slot >= 0) & (slot < num_slots)
    if valid & (row >= 0) & (row < num_rows):
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        channel = (at // COLUMNS).to(tl.int64)
        column = (at % COLUMNS).to(tl.int64)
        old = layer * layer_stride + row * row_stride + step * step_stride
        new = layer * conv_layer_stride + slot * conv_slot_stride
        value = tl.load(windows_ptr + old + channel * channel_stride + column * column_stride, mask=inside, other=0)
        tl.store(conv_ptr + new + channel * conv_channel_stride + column * conv_column_stride, value, mask=inside)


def overlapping_windows(rows: Tensor, columns: int) -> Tensor:
    """View rows of `steps + columns` values as one window per step.

    Args:
        rows: `[..., channels, steps + columns]`: the old window of `columns` values and then each step's new one (so
            `steps + width - 1` for a kernel of that width and `columns = width - 1`), last stride 1.
        columns: of a window.

    Returns:
        `[..., steps, channels, columns]` over the same memory; window t is what the conv state holds after t + 1 steps.

    Raises:
        InvalidArgumentError: rows no longer than a window, or fewer than two axes.

    >>> overlapping_windows(torch.arange(5).reshape(1, 5), 3).tolist()
    [[[1, 2, 3]], [[2, 3, 4]]]
    """
    if rows.dim() < 2 or not 0 < columns < rows.shape[-1]:
        raise InvalidArgumentError(
            f"rows {tuple(rows.shape)} hold no step after a window of {columns}; need [..., channels, steps + columns]"
        )
    *outer, channels, length = rows.shape
    *outer_strides, channel, column = rows.stride()
    shape, strides = (*outer, length - columns, channels, columns), (*outer_strides, column, channel, column)
    return torch.as_strided(rows, shape, strides, rows.storage_offset() + column)


def commit_conv_windows(
    conv: Tensor, windows: Tensor, last_step: Tensor, slots: Tensor, *, rows: Tensor | None = None
) -> None:
    """Write each request's window of its last accepted step into its conv state.

    Args:
        conv: `[slots, channels, columns]`, or `[layers, slots, channels, columns]` for several layers in one launch.
        windows: `[rows, steps, channels, columns]`, with layers in front where conv has them; any strides, overlapping
            ones too (`overlapping_windows`). At least as many rows as requests, unless `rows` is given.
        last_step: int32 or int64 `[requests]`: index of the last accepted step; negative: none was, keep the state.
        slots: int32 or int64 `[requests]`: distinct state slots; negative: no request.
        rows: int32 or int64 `[requests]`: each request's row of windows; its number by default. Windows that lie in the
            state slots: the slots.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device. On the CPU also: a slot that occurs twice, a row past the
            windows.

    A step, slot or row past the end does nothing. Mutates `conv`.
    """
    if conv.dim() == 3 and windows.dim() == 4:
        conv, windows = conv[None], windows[None]
    check_tensor("conv", conv, shape=(None,) * 4)
    layers, num_slots, channels, columns = conv.shape
    shape = (layers, None, None, channels, columns)
    check_tensor("windows", windows, dtype=conv.dtype, shape=shape, device=conv.device)
    check_tensor("last_step", last_step, shape=(None,))
    requests = len(last_step)
    check_index("last_step", last_step, requests, conv.device)
    check_index("slots", slots, requests, conv.device)
    if rows is not None:
        check_index("rows", rows, requests, conv.device)
    elif windows.shape[1] < requests:
        raise InvalidArgumentError(f"windows holds {windows.shape[1]} rows, last_step {requests}; give rows=")
    if conv.device.type == "cpu":
        if rows is not None and requests and int(rows.max()) >= windows.shape[1]:
            last_row = windows.shape[1] - 1
            raise InvalidArgumentError(f"rows holds {int(rows.max())}; windows has rows 0 to {last_row}")
        used = [slot for slot, step in zip(slots.tolist(), last_step.tolist(), strict=True) if slot >= 0 and step >= 0]
        if len(set(used)) < len(used):
            raise InvalidArgumentError(f"slots {used} holds a slot twice; destinations overlap")
    kernel = uses_kernels(conv.device)
    if not requests or not conv.numel() or not windows.numel():
        return
    if not kernel:
        naive.commit_conv_windows(conv, windows, last_step, slots, rows)
        return
    size, num_steps, elements = conv.dtype.itemsize, windows.shape[2], channels * columns
    with on_device(conv):
        if _is_whole(conv, 2, size) and _is_whole(windows, 3, size):
            words = elements * size // 4
            block = min(MAX_BLOCK, max(128, next_power_of_2(words)))
            strides = [stride * size // QUAD_BYTES for stride in (*conv.stride()[:2], *windows.stride()[:3])]
            commit_conv_words_kernel[(requests, layers, cdiv(words, block))](
                alias(conv, torch.int32),
                alias(windows, torch.int32),
                last_step,
                slots,
                slots if rows is None else rows,
                num_slots,
                windows.shape[1],
                num_steps,
                *strides,
                elements * size // QUAD_BYTES,
                HAS_ROWS=rows is not None,
                BLOCK=block,
                num_warps=warps(block // 4),
            )
            return
        block = min(MAX_BLOCK // 2, max(64, next_power_of_2(elements)))
        commit_conv_elements_kernel[(requests, layers, cdiv(elements, block))](
            _bits(conv),
            _bits(windows),
            last_step,
            slots,
            slots if rows is None else rows,
            num_slots,
            windows.shape[1],
            num_steps,
            *conv.stride(),
            *windows.stride(),
            elements,
            COLUMNS=columns,
            HAS_ROWS=rows is not None,
            BLOCK=block,
            num_warps=4,
        )


def _bits(tensor: Tensor) -> Any:
    return alias(tensor, BITS[tensor.dtype.itemsize])


def _is_whole(tensor: Tensor, outer: int, size: int) -> bool:
    """Say whether the last two axes are one run of 16-byte units and every other stride is a multiple of them."""
    channels, columns = tensor.shape[-2:]
    return (
        (columns == 1 or tensor.stride(-1) == 1)
        and (channels == 1 or tensor.stride(-2) == columns)
        and channels * columns * size % QUAD_BYTES == 0
        and tensor.data_ptr() % QUAD_BYTES == 0
        and all(stride * size % QUAD_BYTES == 0 for stride in tensor.stride()[:outer])
    )
