"""What the host wrappers share: argument checks, strides in 16-byte units, uploads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InvalidArgumentError

__all__: list[str] = []

QUAD_BYTES = 16  # what one thread loads or stores at once
QUAD_WORDS = 4  # int32 words of it
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WARP_THREADS = 64 if torch.version.hip else 32
INDEX_DTYPES = (torch.int32, torch.int64)


def cdiv(value: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """Return the least power of two that is at least `value` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def warps(threads: int, *, most: int = 4) -> int:
    """Return how many warps make about so many threads (a power of two), at least one."""
    return max(1, min(most, threads // WARP_THREADS))


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to `device` without waiting: through pinned memory, on the current stream."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def alias(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one element of another dtype at the tensor's address: a typed base pointer for a kernel.

    The address must be a multiple of the new element's size.
    """
    offset = tensor.storage_offset() * tensor.dtype.itemsize // dtype.itemsize
    base = torch.empty(0, dtype=dtype, device=tensor.device)
    return base.set_(tensor.untyped_storage(), offset, (1,), (1,))


def check_tensor(
    what: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another dtype, shape (None: any extent) or device, by its name."""
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in allowed:
            raise InvalidArgumentError(f"{what} is {tensor.dtype}; it must be {' or '.join(map(str, allowed))}")
    if shape is not None and (
        tensor.dim() != len(shape)
        or any(want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True))
    ):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise InvalidArgumentError(f"{what} has shape {tuple(tensor.shape)}; it must be ({wanted})")
    if device is not None and tensor.device != device:
        raise InvalidArgumentError(f"{what} is on {tensor.device}; it must be on {device}")


def check_index(what: str, tensor: Tensor, count: int, device: torch.device) -> None:
    """Refuse anything but a contiguous int32 or int64 vector of `count` elements."""
    check_tensor(what, tensor, dtype=INDEX_DTYPES, shape=(count,), device=device)
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{what} has stride {tensor.stride(0)}; it must be contiguous")


def check_buffer(what: str, tensor: Tensor) -> None:
    """Refuse anything but flat uint8 bytes at a 16-byte aligned address."""
    check_tensor(what, tensor, dtype=torch.uint8, shape=(None,))
    if tensor.numel() > 1 and tensor.stride(0) != 1:
        raise InvalidArgumentError(f"{what} has stride {tensor.stride(0)}; it must be contiguous")
    check_aligned(what, tensor)


def check_aligned(what: str, tensor: Tensor) -> None:
    """Refuse a tensor that does not start at a multiple of 16 bytes."""
    if tensor.data_ptr() % QUAD_BYTES:
        raise InvalidArgumentError(f"{what} starts at {tensor.data_ptr():#x}; it must start at a multiple of 16 bytes")


def check_stride(what: str, stride_bytes: int) -> int:
    """Refuse a stride that is not a positive multiple of 16 bytes; return it in 16-byte units."""
    if isinstance(stride_bytes, bool) or stride_bytes <= 0 or stride_bytes % QUAD_BYTES:
        raise InvalidArgumentError(f"{what} is {stride_bytes} bytes; it must be a positive multiple of 16")
    return stride_bytes // QUAD_BYTES


def merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Describe the same elements with as few axes as possible: (extent, stride), largest stride first.

    The order of the elements is lost: for copies whose two sides have the same strides.
    """
    axes = sorted(((s, e) for e, s in zip(shape, strides, strict=True) if e != 1), reverse=True)
    result: list[tuple[int, int]] = []
    for stride, extent in axes:
        if result and result[-1][1] == stride * extent:
            result[-1] = (result[-1][0] * extent, stride)
        else:
            result.append((extent, stride))
    return result or [(1, 1)]
