"""How many cells of each kind a sequence needs. Pure arithmetic, no pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unifiedpool.errors import InvalidArgumentError
from unifiedpool.integrations.sequences import PageRun
from unifiedpool.layout import Layout

__all__ = ["Geometry", "empty_shortfall"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Cells per kind as a function of the tokens in the cache.

    Attributes:
        page_sizes: kind -> tokens per page, for kinds that grow with the tokens.
        windows: kind -> sliding window in tokens, for those of them that stop growing.
        slots: kinds with one cell per sequence.
    """

    page_sizes: Mapping[str, int]
    windows: Mapping[str, int]
    slots: tuple[str, ...]

    @classmethod
    def from_layout(cls, layout: Layout, windows: Mapping[str, int] | None = None) -> Geometry:
        """Read page sizes and slot kinds from a layout.

        Args:
            layout: kinds with ``page_size`` 0 count as slots.
            windows: kind -> sliding window in tokens (at least 1); page kinds without one keep every token.

        Raises:
            InvalidArgumentError: a window for a kind that is no page kind of this layout, or below 1.
        """
        pages = {name: layout.kind(name).page_size for name in layout.names if layout.kind(name).page_size > 0}
        windows = dict(windows or {})
        for name, window in windows.items():
            if name not in pages:
                raise InvalidArgumentError(
                    f"window given for kind {name!r}; page kinds of this layout: {sorted(pages)}"
                )
            if window < 1:
                raise InvalidArgumentError(f"window of kind {name!r} is {window} tokens; it must be at least 1")
        return cls(pages, windows, tuple(name for name in layout.names if name not in pages))

    def first_page(self, kind: str, start: int) -> int:
        """Return the first page that a forward whose first new token is at ``start`` reads.

        A window of W tokens is the new token and the W - 1 before it.
        """
        if kind not in self.windows:
            return 0
        return max(0, start - (self.windows[kind] - 1)) // self.page_sizes[kind]

    def end_page(self, kind: str, end: int) -> int:
        """Return the page after the last one when ``end`` tokens are in the cache."""
        return -(-end // self.page_sizes[kind])

    def slide(self, pages: Mapping[str, PageRun], spare: Mapping[str, list[int]], start: int) -> None:
        """Move the pages that no token from ``start`` on reads into ``spare``."""
        for kind in self.windows:
            run = pages[kind]
            count = min(len(run.handles), self.first_page(kind, start) - run.first)
            spare[kind].extend(run.handles[:count])
            del run.handles[:count]
            run.first += count

    def peak(self, total: int, chunk: int, start: int = 0) -> dict[str, int]:
        """Return the most cells of each kind that a sequence takes on its way from ``start`` to ``total`` tokens.

        Tokens arrive ``chunk`` at a time. Whole pages below ``start`` are somebody else's and do not count. O(chunks)
        for window kinds, O(1) for the others.
        """
        demand = dict.fromkeys(self.slots, 1)
        for kind, page_size in self.page_sizes.items():
            own = start // page_size
            if kind in self.windows:
                demand[kind] = max(
                    self.end_page(kind, min(first + chunk, total)) - max(self.first_page(kind, first), own)
                    for first in range(start, total, chunk)
                )
            else:
                demand[kind] = self.end_page(kind, total) - own
        return demand


def empty_shortfall(layout: Layout, arena_bytes: int, demand: Mapping[str, int]) -> int:
    """Return the bytes that an empty arena lacks for a joint demand; 0 when it fits.

    The capacity rule with nothing live, pinned or promised: with kinds from the largest stride down,
    ``m_k = n_k + m_(k-1) * s_(k-1) / s_k`` must not exceed the cells outside the null cell.

    >>> layout = Layout.simple({"state": 1024, "full": 256}, null_cell=False)
    >>> empty_shortfall(layout, 4096, {"state": 3, "full": 4}), empty_shortfall(layout, 4096, {"state": 3, "full": 6})
    (0, 512)
    """
    capacity = layout.capacity(arena_bytes)
    short = taken_bytes = 0
    for kind in layout.kinds:
        taken_bytes += demand.get(kind.name, 0) * kind.stride_bytes
        short = max(short, taken_bytes - capacity[kind.name] * kind.stride_bytes)
    return short
