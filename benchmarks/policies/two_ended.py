"""The two-ended pool with compaction (two_ended.c), the baseline that unifiedpool has to beat."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

from .base import Counters, Model, Policy

__all__ = ["TwoEnded"]

_DECLARATIONS = """
typedef struct pool pool;
pool *te_create(int64_t arena, const int64_t *strides, int num_kinds, int pack, int32_t requests);
void te_destroy(pool *p);
int te_fits(const pool *p, const int64_t *counts);
int te_take(pool *p, int32_t request, const int64_t *counts);
void te_drop(pool *p, int32_t request, int kind, int64_t count);
void te_stats(const pool *p, int64_t *out);
int64_t te_cells(const pool *p, int32_t request, int kind, int64_t *offsets, int64_t capacity);
"""
_EVERYTHING = 1 << 40


@functools.cache
def _library() -> tuple[Any, Any]:
    """Compile and load two_ended.c; a process does it once."""
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "two_ended.so"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        source = Path(__file__).with_suffix(".c")
        subprocess.run([*compiler, "-O2", "-std=c11", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return ffi, ffi.dlopen(str(library))


class TwoEnded(Policy):
    """States grow up from the low end, pages down from the high end, windows float between.

    Args:
        pack: compact the whole side that is in the way (SGLang's flush) instead of the fewest cells.
        requests: request numbers are below this.
    """

    def __init__(self, model: Model, *, pack: bool, requests: int) -> None:
        ffi, self._lib = _library()
        self._kinds = len(model.cell_bytes)
        created = self._lib.te_create(model.arena_bytes, list(model.cell_bytes), self._kinds, pack, requests)
        if created == ffi.NULL:
            raise MemoryError(f"no memory for a two-ended pool of {model.arena_bytes} bytes")
        self._pool = ffi.gc(created, self._lib.te_destroy)
        self._counts = ffi.new("int64_t[]", self._kinds)
        self._ffi = ffi

    def fits(self, counts: Sequence[int]) -> bool:
        self._counts[0 : self._kinds] = counts
        return bool(self._lib.te_fits(self._pool, self._counts))

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        self._counts[0 : self._kinds] = counts
        return bool(self._lib.te_take(self._pool, request, self._counts))

    grow = admit

    def shrink(self, request: int, kind: int, count: int) -> None:
        self._lib.te_drop(self._pool, request, kind, count)

    def finish(self, request: int) -> None:
        for kind in range(self._kinds):
            self._lib.te_drop(self._pool, request, kind, _EVERYTHING)

    def counters(self) -> Counters:
        out = self._ffi.new("int64_t[5]")
        self._lib.te_stats(self._pool, out)
        return Counters(moved=out[0], allocated=out[1], worst_window=out[2], worst_call=out[3])

    def offsets(self, request: int, kind: int) -> list[int]:
        """Return where the request's cells of `kind` lie, in bytes, oldest first."""
        count = self._lib.te_cells(self._pool, request, kind, self._ffi.NULL, 0)
        out = self._ffi.new("int64_t[]", max(count, 1))
        self._lib.te_cells(self._pool, request, kind, out, count)
        return list(out)[:count]
