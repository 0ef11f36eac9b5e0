"""Masked copies of states: `if mask[i]: states[track[i]] = states[active[i]]`, indices and mask on the device.

One launch for all lanes, sized for the machine and not for the batch: usually few lanes are marked and each moves
megabytes. Every program reads the marks, numbers the marked lanes, and takes its share of their blocks.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import (
    BITS,
    QUAD_BYTES,
    alias,
    cdiv,
    check_aligned,
    check_index,
    check_stride,
    check_tensor,
    merged,
    next_power_of_2,
    on_device,
    warps,
)
from .backend import uses_kernels

__all__ = ["MAX_LANES", "track_cells", "track_states", "track_states_kernel"]

MAX_LANES = 4096
MAX_PROGRAMS = 2048  # enough to fill a large GPU; the rest of the work is shared out
BLOCK_BYTES = 16384


@triton.jit
def track_states_kernel(  # type: ignore[no-untyped-def]
    states_ptr,
    mask_ptr,
    active_ptr,
    track_ptr,
    num_lanes,
    num_slots,
    slot_quads,
    rows,
    row_quads,
    run_quads,
    chunks,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Copy blocks of the marked lanes' slots. WORDS words make 16 bytes; a run has `run_quads * WORDS + TAIL`."""
    lanes = tl.arange(0, LANES)
    here = lanes < num_lanes
    src = tl.load(active_ptr + lanes, mask=here, other=-1)
    dst = tl.load(track_ptr + lanes, mask=here, other=-1)
    wanted = (tl.load(mask_ptr + lanes, mask=here, other=0) != 0) & (src >= 0) & (dst >= 0)
    wanted = wanted & (src < num_slots) & (dst < num_slots) & (src != dst)
    number = tl.cumsum(wanted.to(tl.int32), 0)
    per_lane = rows * chunks
    total = tl.sum(wanted.to(tl.int32), 0) * per_lane
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        chosen = wanted & (number == item // per_lane + 1)
        src_slot = tl.sum(tl.where(chosen, src, 0), 0).to(tl.int64)
        dst_slot = tl.sum(tl.where(chosen, dst, 0), 0).to(tl.int64)
        part = item % per_lane
        row = (part // chunks).to(tl.int64)
        words = (part % chunks) * BLOCK + tl.arange(0, BLOCK)
        inside = words < run_quads * WORDS + TAIL
        old = (src_slot * slot_quads + row * row_quads) * WORDS
        new = (dst_slot * slot_quads + row * row_quads) * WORDS
        value = tl.load(states_ptr + old + words, mask=inside, other=0)
        tl.store(states_ptr + new + words, value, mask=inside)


def track_states(states: Tensor, mask: Tensor, active: Tensor, track: Tensor) -> None:
    """Copy the states of marked lanes from their active to their track slot.

    Args:
        states: `[slots, ...]`, any dtype: conv or temporal states of a layer, or of several (`view.movedim(1, 0)` of
            `[layers, slots, ...]`). Inside a slot one run of elements, or equally spaced runs.
        mask: bool `[lanes]`.
        active, track: int32 or int64 `[lanes]`: slots; a negative or too large one: no copy. Track slots are distinct
            and no lane's active slot, which is not checked on a device.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device, more than `MAX_LANES` lanes, a stride or an address that
            is not a multiple of 16 B, slots that overlap or are more than equally spaced runs. On the CPU also: a track
            slot that occurs twice or that another lane reads.

    Mutates `states`.
    """
    check_tensor("mask", mask, shape=(None,))
    lanes = len(mask)
    check_tensor("mask", mask, dtype=torch.bool, device=states.device)
    if not mask.is_contiguous():
        raise InvalidArgumentError(f"mask has stride {mask.stride(0)}; it must be contiguous")
    check_index("active", active, lanes, states.device)
    check_index("track", track, lanes, states.device)
    if lanes > MAX_LANES:
        raise InvalidArgumentError(f"{lanes} lanes; at most {MAX_LANES} in one call")
    if states.dim() < 1:
        raise InvalidArgumentError("states has no axes; it must be [slots, ...]")
    size = states.dtype.itemsize
    check_aligned("states", states)
    slot_quads = check_stride("states: the slot stride", states.stride(0) * size)
    *outer, (length, step) = merged(states.shape[1:], states.stride()[1:])
    if step != 1 or len(outer) > 1:
        raise InvalidArgumentError(
            f"states {tuple(states.shape)} with strides {states.stride()}: a slot must be equally spaced runs of "
            "elements"
        )
    rows, row_stride = outer[0] if outer else (1, 0)
    row_quads = check_stride("states: the row stride", row_stride * size) if outer else 0
    spans = sorted([(states.stride(0), states.shape[0]), *((stride, extent) for extent, stride in outer)])
    bounds = [length, *(stride * extent for stride, extent in spans[:-1])]
    if any(stride < bound and extent > 1 for (stride, extent), bound in zip(spans, bounds, strict=True)):
        raise InvalidArgumentError(f"states {tuple(states.shape)} with strides {states.stride()}: slots overlap")
    kernel = uses_kernels(states.device)
    if states.device.type == "cpu":
        _check_lanes(states.shape[0], mask, active, track)
    if not lanes or not states.numel():
        return
    if not kernel:
        naive.track_states(states, mask, active, track)
        return
    run_bytes = length * size
    # Whole 16-byte units go as int32, four to a load; an odd run goes in the largest words that divide it.
    word = 4 if run_bytes % 4 == 0 else 2 if run_bytes % 2 == 0 else 1
    block = min(BLOCK_BYTES // word, max(128, next_power_of_2(run_bytes // word)))
    chunks = cdiv(run_bytes // word, block)
    # 16 bytes a thread for wide accesses; and at most eight lanes, of which each thread keeps several numbers.
    num_warps = max(warps(block * word // QUAD_BYTES), warps(next_power_of_2(lanes) // 8, most=8))
    with on_device(states):
        track_states_kernel[(min(MAX_PROGRAMS, lanes * rows * chunks),)](
            alias(states, BITS[word]),
            mask.view(torch.uint8),
            active,
            track,
            lanes,
            states.shape[0],
            slot_quads,
            rows,
            row_quads,
            run_bytes // QUAD_BYTES,
            chunks,
            LANES=next_power_of_2(lanes),
            BLOCK=block,
            WORDS=QUAD_BYTES // word,
            TAIL=run_bytes % QUAD_BYTES // word,
            num_warps=num_warps,
            num_stages=1,
        )


def track_cells(buffer: Tensor, stride_bytes: int, mask: Tensor, active: Tensor, track: Tensor) -> None:
    """`track_states` on whole envelopes: cells of `stride_bytes` of an arena.

    Raises:
        InvalidArgumentError: as `track_states`; a stride that is not a multiple of 16.
    """
    check_stride("stride_bytes", stride_bytes)
    check_tensor("buffer", buffer, dtype=torch.uint8, shape=(None,))
    cells = buffer.numel() // stride_bytes
    words = buffer[: cells * stride_bytes].view(torch.int64).view(cells, stride_bytes // 8)
    track_states(words, mask, active, track)


def _check_lanes(slots: int, mask: Tensor, active: Tensor, track: Tensor) -> None:
    lanes = [
        (old, new)
        for marked, old, new in zip(mask.tolist(), active.tolist(), track.tolist(), strict=True)
        if marked and 0 <= old < slots and 0 <= new < slots and old != new
    ]
    targets = [new for _, new in lanes]
    twice = {new for new in targets if targets.count(new) > 1} if len(set(targets)) < len(targets) else set()
    if twice:
        raise InvalidArgumentError(f"track holds slot {min(twice)} twice; destinations overlap")
    both = set(targets) & {old for old, _ in lanes}
    if both:
        raise InvalidArgumentError(f"slot {min(both)} is one lane's track and another's active slot; they overlap")
