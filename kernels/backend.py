"""The one switch between the Triton kernels and the torch references.

"auto" (the default) runs the kernels on CUDA and the references elsewhere; "triton" and "torch" force one of them. The
environment variable `UNIFIEDPOOL_KERNELS` sets the default, `use` changes it for a while. On a CPU the kernels run only
under Triton's interpreter, which has to be chosen before the first kernel is imported: `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from ..errors import InvalidArgumentError

__all__ = ["Backend", "current", "is_interpreted", "use", "uses_kernels"]

Backend = Literal["auto", "triton", "torch"]

_forced: ContextVar[Backend | None] = ContextVar("unifiedpool_kernels", default=None)


def current() -> Backend:
    """Return the backend chosen by `use`, else by `UNIFIEDPOOL_KERNELS`, else "auto".

    Raises:
        InvalidArgumentError: the variable holds another word.
    """
    return _forced.get() or _check(os.environ.get("UNIFIEDPOOL_KERNELS") or "auto")


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Choose the backend inside a `with`, for this thread.

    Raises:
        InvalidArgumentError: not "auto", "triton" or "torch".

    >>> with use("torch"):
    ...     current()
    'torch'
    """
    token = _forced.set(_check(backend))
    try:
        yield
    finally:
        _forced.reset(token)


def uses_kernels(device: torch.device) -> bool:
    """Say whether an operation on tensors of `device` runs as a Triton kernel.

    Raises:
        InvalidArgumentError: "triton" was chosen for a CPU without Triton's interpreter.
    """
    backend = current()
    if backend == "auto":
        return device.type == "cuda"
    if backend == "triton" and device.type == "cpu" and not is_interpreted():
        raise InvalidArgumentError(
            "the backend is 'triton' and the tensors are on the CPU, where kernels run interpreted only; set "
            "TRITON_INTERPRET=1 before the first import, or choose 'auto' or 'torch'"
        )
    return backend == "triton"


def is_interpreted() -> bool:
    """Say whether Triton's interpreter is chosen."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def _check(backend: str) -> Backend:
    for known in get_args(Backend):
        if backend == known:
            found: Backend = known
            return found
    raise InvalidArgumentError(f"backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
