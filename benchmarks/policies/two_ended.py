"""The two-ended pool with compaction (csrc/two_ended.h), the baseline that unifiedpool has to beat."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from unifiedpool._native import ffi, lib

from .base import Counters, Model, Policy

__all__ = ["TwoEnded"]


class TwoEnded(Policy):
    """States grow up from the low end, pages down from the high end, windows float between.

    Args:
        pack: compact the whole side that is in the way (SGLang's flush) instead of the fewest cells.
        requests: request numbers are below this.
    """

    def __init__(self, model: Model, *, pack: bool, requests: int) -> None:
        ids = model.arena_bytes // min(model.cell_bytes) + 1
        self._kinds = len(model.cell_bytes)
        created = lib.up_two_ended_create(model.arena_bytes, list(model.cell_bytes), self._kinds, pack, ids)
        if created == ffi.NULL:
            raise MemoryError(f"no memory for a two-ended pool of {model.arena_bytes} bytes")
        self._pool = ffi.gc(created, lib.up_two_ended_destroy)
        self._counts = ffi.new("int64_t[]", self._kinds)
        self._stats = ffi.new("int64_t[5]")
        self._unused = array("i", range(ids - 1, -1, -1))
        # The ids of each request's cells, oldest first, by kind.
        self._held: list[list[array[int]]] = [[array("i") for _ in model.cell_bytes] for _ in range(requests)]
        self._worst_call = 0

    def fits(self, counts: Sequence[int]) -> bool:
        self._counts[0 : self._kinds] = counts
        return bool(lib.up_two_ended_fits(self._pool, self._counts))

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        if not self.fits(counts):
            return False
        before = self._moved()
        for kind, count in enumerate(counts):
            if count:
                ids = self._unused[-count:]
                del self._unused[-count:]
                lib.up_two_ended_take(self._pool, kind, ffi.from_buffer("int32_t[]", ids), count)
                self._held[request][kind] += ids
        self._worst_call = max(self._worst_call, self._moved() - before)
        return True

    grow = admit

    def shrink(self, request: int, kind: int, count: int) -> None:
        held = self._held[request][kind]
        ids = held[:count]
        if ids:
            lib.up_two_ended_drop(self._pool, kind, ffi.from_buffer("int32_t[]", ids), len(ids))
            self._unused += ids
            del held[:count]

    def finish(self, request: int) -> None:
        for kind, held in enumerate(self._held[request]):
            self.shrink(request, kind, len(held))

    def _moved(self) -> int:
        lib.up_two_ended_stats(self._pool, self._stats)
        return int(self._stats[0])

    def counters(self) -> Counters:
        moved = self._moved()
        return Counters(moved, int(self._stats[1]), int(self._stats[2]), self._worst_call)

    def offsets(self, request: int, kind: int) -> list[int]:
        """Return where the request's cells of `kind` lie, in bytes, oldest first."""
        return [int(lib.up_two_ended_offset(self._pool, kind, each)) for each in self._held[request][kind]]
