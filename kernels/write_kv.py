"""Write new K/V rows, or MLA latent and rope, into pages through a slot mapping; to fp8 by integer arithmetic.

A float8 cast is missing on some targets and wrong in the interpreter, so the codes are made from the bits: round to
nearest, ties to even, saturate at the largest finite value, keep NaN.
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
from ._support import (
    BITS,
    QUAD_BYTES,
    alias,
    cdiv,
    check_aligned,
    check_stride,
    check_tensor,
    next_power_of_2,
    on_device,
    warps,
)
from .backend import uses_kernels

__all__ = ["float_to_e4m3", "float_to_e5m2", "write_kv", "write_mla", "write_rows_kernel"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_BLOCK_BYTES = 8192
COPY, E4M3, E5M2 = 0, 1, 2
MODES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


@triton.jit
def float_to_e4m3(value):  # type: ignore[no-untyped-def]
    """float32 to e4m3fn codes (uint8)."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 2^-6 on: drop 20 mantissa bits, rounding to even, and move the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below, codes count steps of 2^-9, which is the last place of floats at 2^14: the addition does the rounding.
    magic = size.to(tl.float32, bitcast=True) + 16384.0
    small = magic.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_to_e5m2(value):  # type: ignore[no-untyped-def]
    """float32 to e5m2 codes (uint8)."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # As above: 21 bits, bias 15 from 2^-14 on; steps of 2^-16 below, the last place of floats at 2^7.
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
    magic = size.to(tl.float32, bitcast=True) + 128.0
    small = magic.to(tl.int32, bitcast=True) - 0x43000000
    code = tl.minimum(tl.where(size < 0x38800000, small, normal), 0x7B)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_row(  # type: ignore[no-untyped-def]
    rows_ptr,
    cache_ptr,
    scale_ptr,
    token,
    page,
    offset,
    block,
    token_quads,
    head_quads,
    page_quads,
    row_quads,
    cache_head_quads,
    run_quads,
    MODE: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    UNIT: tl.constexpr,
    CACHE_UNIT: tl.constexpr,
    BY_HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Strides are in 16 bytes: UNIT elements of the rows, CACHE_UNIT of the cache.
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < run_quads * UNIT + TAIL
    old = rows_ptr + (token * token_quads) * UNIT
    new = cache_ptr + (page * page_quads + offset * row_quads) * CACHE_UNIT
    if BY_HEAD:
        head = (at // DIM).to(tl.int64)
        old += head * head_quads * UNIT + at % DIM
        new += head * cache_head_quads * CACHE_UNIT + at % DIM
    else:
        old += at
        new += at
    value = tl.load(old, mask=inside, other=0)
    if MODE != 0:
        value = value.to(tl.float32)
        if SCALE == 1:
            value = tl.div_rn(value, tl.full([BLOCK], 0.0, tl.float32) + tl.load(scale_ptr))
        if SCALE == 2:
            value = tl.div_rn(value, tl.load(scale_ptr + at // DIM, mask=inside, other=1.0))
        if MODE == 1:
            value = float_to_e4m3(value)
        else:
            value = float_to_e5m2(value)
    tl.store(new, value, mask=inside)


@triton.jit
def write_rows_kernel(  # type: ignore[no-untyped-def]
    slot_mapping_ptr,
    first_row,
    end_row,
    page_size,
    blocks_a,
    rows_a_ptr,
    cache_a_ptr,
    scale_a_ptr,
    token_quads_a,
    head_quads_a,
    page_quads_a,
    row_quads_a,
    cache_head_quads_a,
    run_quads_a,
    rows_b_ptr,
    cache_b_ptr,
    scale_b_ptr,
    token_quads_b,
    head_quads_b,
    page_quads_b,
    row_quads_b,
    cache_head_quads_b,
    run_quads_b,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,
    CACHE_UNIT: tl.constexpr,
    DIM_A: tl.constexpr,
    TAIL_A: tl.constexpr,
    BY_HEAD_A: tl.constexpr,
    SCALE_A: tl.constexpr,
    DIM_B: tl.constexpr,
    TAIL_B: tl.constexpr,
    BY_HEAD_B: tl.constexpr,
    SCALE_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block of one token's row of a or b (keys or values, latent or rope)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if (slot >= first_row) & (slot < end_row):
        page = slot // page_size
        offset = slot % page_size
        # fmt: off
        if block < blocks_a:
            _write_row(
                rows_a_ptr, cache_a_ptr, scale_a_ptr, token, page, offset, block,
                token_quads_a, head_quads_a, page_quads_a, row_quads_a, cache_head_quads_a, run_quads_a,
                MODE, DIM_A, TAIL_A, UNIT, CACHE_UNIT, BY_HEAD_A, SCALE_A, BLOCK,
            )
        else:
            _write_row(
                rows_b_ptr, cache_b_ptr, scale_b_ptr, token, page, offset, block - blocks_a,
                token_quads_b, head_quads_b, page_quads_b, row_quads_b, cache_head_quads_b, run_quads_b,
                MODE, DIM_B, TAIL_B, UNIT, CACHE_UNIT, BY_HEAD_B, SCALE_B, BLOCK,
            )
        # fmt: on


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    null_cell: bool = True,
) -> None:
    """Append key and value rows to their pages, in one launch.

    Args:
        key, value: `[tokens, heads, dim]`; heads and dim of the two may differ.
        key_cache, value_cache: `[pages, page_size, heads, dim]` (HND pages: `view.transpose(1, 2)`), of the rows'
            dtype, which may be any; or fp8 (float8_e4m3fn, float8_e5m2) for bfloat16, float16 and float32 rows.
        slot_mapping: int64 `[tokens]`: flat rows `cell * page_size + offset`; negative: skip. Distinct.
        key_scale, value_scale: float32 `[1]` or `[heads]`: fp8 caches hold `row / scale`. None: no scale.
        null_cell: also skip rows of cell 0.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device; an address or a stride (of a token, page or head) that is
            not a multiple of 16 B. On the CPU also: a row outside the cache, or twice.

    Mutates the caches.
    """
    _write([("key", key, key_cache, key_scale), ("value", value, value_cache, value_scale)], slot_mapping, null_cell)


def write_mla(
    latent: Tensor,
    rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
    null_cell: bool = True,
) -> None:
    """Append MLA rows: the latent in front, the rotary key behind it.

    Args:
        latent: `[tokens, kv_lora_rank]`.
        rope: `[tokens, qk_rope_head_dim]`.
        cache: `[pages, page_size, kv_lora_rank + qk_rope_head_dim]`, as `write_kv`.
        slot_mapping: as `write_kv`.
        scale: float32 `[1]`, of an fp8 cache.
        null_cell: as `write_kv`.

    Raises:
        InvalidArgumentError: as `write_kv`.
    """
    check_tensor("latent", latent, shape=(None, None))
    check_tensor("rope", rope, shape=(len(latent), None))
    rank = latent.shape[1]
    check_tensor("cache", cache, shape=(None, None, rank + rope.shape[1]))
    parts = [("latent", latent, cache[..., :rank], scale), ("rope", rope, cache[..., rank:], scale)]
    _write([(name, rows[:, None], part[:, :, None], each) for name, rows, part, each in parts], slot_mapping, null_cell)


def _write(parts: list[tuple[str, Tensor, Tensor, Tensor | None]], slot_mapping: Tensor, null_cell: bool) -> None:
    first, first_cache = parts[0][1:3]
    device = first_cache.device
    check_tensor("slot_mapping", slot_mapping, dtype=torch.int64, shape=(None,), device=device)
    if not slot_mapping.is_contiguous():
        raise InvalidArgumentError(f"slot_mapping has stride {slot_mapping.stride(0)}; it must be contiguous")
    check_tensor(f"the {parts[0][0]} cache", first_cache, shape=(None,) * 4)
    pages, page_size = first_cache.shape[:2]
    for name, rows, cache, scale in parts:
        _check_part(name, rows, cache, scale, len(slot_mapping), pages, page_size, device)
    if first.dtype != parts[1][1].dtype or first_cache.dtype != parts[1][2].dtype:
        raise InvalidArgumentError(f"{parts[0][0]} and {parts[1][0]} differ in dtype; write them in two calls")
    first_row, end_row = page_size if null_cell else 0, pages * page_size
    if device.type == "cpu":
        used = slot_mapping[slot_mapping >= first_row]
        if len(used) and int(used.max()) >= end_row:
            raise InvalidArgumentError(
                f"slot_mapping holds row {int(used.max())}; the cache has rows 0 to {end_row - 1}"
            )
        if len(set(used.tolist())) < len(used):
            raise InvalidArgumentError("slot_mapping holds a row twice; destinations overlap")
    kernel = uses_kernels(device)
    if not len(slot_mapping) or not end_row:
        return
    if not kernel:
        pairs = [(rows, cache) for _, rows, cache, _ in parts]
        naive.write_rows(pairs, slot_mapping, first_row=first_row, scales=[scale for *_, scale in parts])
        return
    _launch(parts, slot_mapping, first_row, end_row, page_size)


def _launch(
    parts: list[tuple[str, Tensor, Tensor, Tensor | None]],
    slot_mapping: Tensor,
    first_row: int,
    end_row: int,
    page_size: int,
) -> None:
    mode = MODES.get(parts[0][2].dtype, COPY) if parts[0][1].dtype != parts[0][2].dtype else COPY
    size = parts[0][1].dtype.itemsize
    # Equal dtypes are copied as bits, in the largest words that a row (of a head) is a multiple of.
    word = size
    if mode == COPY:
        spans = [_span(rows, cache) * size for _, rows, cache, _ in parts]
        word = next(width for width in (4, 2, 1) if all(span % width == 0 for span in spans))
    runs = [rows.shape[1] * rows.shape[2] * size // word for _, rows, _, _ in parts]
    block = min(MAX_BLOCK_BYTES // word, max(16, next_power_of_2(max(runs))))
    unit = QUAD_BYTES // word
    arguments: list[Any] = []
    flags: dict[str, Any] = {}
    for letter, (_, rows, cache, scale), run in zip("AB", parts, runs, strict=True):
        cache_size = cache.dtype.itemsize
        arguments += [
            alias(rows, BITS[word]) if mode == COPY else rows,
            alias(cache, BITS[word] if mode == COPY else torch.uint8),
            slot_mapping if scale is None else scale,
            rows.stride(0) * size // QUAD_BYTES,
            rows.stride(1) * size // QUAD_BYTES,
            cache.stride(0) * cache_size // QUAD_BYTES,
            cache.stride(1) * cache_size // QUAD_BYTES,
            cache.stride(2) * cache_size // QUAD_BYTES,
            run // unit,
        ]
        flags[f"DIM_{letter}"] = rows.shape[2] * size // word
        flags[f"TAIL_{letter}"] = run % unit
        flags[f"BY_HEAD_{letter}"] = not _is_compact(rows, cache)
        flags[f"SCALE_{letter}"] = 0 if scale is None or mode == COPY else 1 if scale.numel() == 1 else 2
    blocks = [cdiv(run, block) for run in runs]
    with on_device(slot_mapping):
        write_rows_kernel[(len(slot_mapping), sum(blocks))](
            slot_mapping,
            first_row,
            end_row,
            page_size,
            blocks[0],
            *arguments,
            MODE=mode,
            UNIT=unit,
            CACHE_UNIT=unit if mode == COPY else QUAD_BYTES,
            BLOCK=block,
            **flags,
            # 16 bytes a thread at least, on both sides, so that accesses are 128 bits wide also for short rows.
            num_warps=warps(block // (unit if mode == COPY else QUAD_BYTES)),
        )


def _is_compact(rows: Tensor, cache: Tensor) -> bool:
    """Say whether a token's heads are one run on both sides."""
    _, heads, dim = rows.shape
    return heads == 1 or (rows.stride(1) == dim and cache.stride(2) == dim)


def _span(rows: Tensor, cache: Tensor) -> int:
    """Elements of the runs that a token's row consists of."""
    return rows.shape[1] * rows.shape[2] if _is_compact(rows, cache) else rows.shape[2]


def _check_part(
    name: str,
    rows: Tensor,
    cache: Tensor,
    scale: Tensor | None,
    tokens: int,
    pages: int,
    page_size: int,
    device: torch.device,
) -> None:
    cache_name = f"the {name} cache"
    check_tensor(name, rows, shape=(tokens, None, None), device=device)
    _, heads, dim = rows.shape
    check_tensor(cache_name, cache, shape=(pages, page_size, heads, dim), device=device)
    if cache.dtype != rows.dtype and (cache.dtype not in MODES or rows.dtype not in FLOATS):
        raise InvalidArgumentError(
            f"{name} is {rows.dtype}, its cache {cache.dtype}; need equal dtypes, or bfloat16, float16 or float32 into "
            "float8_e4m3fn or float8_e5m2"
        )
    if scale is not None:
        check_tensor(f"the {name} scale", scale, dtype=torch.float32, device=device)
        if scale.shape not in ((1,), (heads,)) or not scale.is_contiguous():
            raise InvalidArgumentError(
                f"the {name} scale has shape {tuple(scale.shape)}; it must be (1,) or ({heads},)"
            )
    if not rows.numel() or not cache.numel():
        return
    compact = _is_compact(rows, cache)
    for what, tensor, axes in ((name, rows, (0, 1)), (cache_name, cache, (0, 1, 2))):
        check_aligned(what, tensor)
        if dim > 1 and tensor.stride(-1) != 1:
            raise InvalidArgumentError(f"{what} has last stride {tensor.stride(-1)}; it must be 1")
        for axis in axes:
            # Where heads lie back to back, or are one, their stride is not used.
            if tensor.shape[axis] > 1 and not (compact and axis == axes[-1]):
                check_stride(f"{what}: stride {axis}", tensor.stride(axis) * tensor.dtype.itemsize)
