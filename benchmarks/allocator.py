"""Time the planner's calls on fragmented arenas, beside two plain allocators and the peers that are installed.

Every time is taken through the public Python call. An empty call into the C library, timed in the same run, is the
floor that no call can beat; some targets are multiples of it. The plain allocators keep no handles and no tables, and
move nothing: they are there for scale.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sortedcontainers import SortedDict

from harness import Options, Report, compare, measure, options, summary
from unifiedpool import Handles, Layout, Planner
from unifiedpool._native import lib

__all__ = ["main"]

PAGE_BYTES = 256
WINDOW_PAGES = 48  # about a Qwen3-Next state over a 64-token page
BATCHES = (256, 32, 1)
PAGE_TARGETS_NS = {1_000: {256: 8.0, 32: 18.0}, 100_000: {256: 8.0, 32: 18.0}, 10_000_000: {256: 20.0, 32: 25.0}}
OPEN_FIXED_NS, OPEN_PAGE_NS = 3_000.0, 30.0


class OwnerMap:
    """The obvious allocator: one byte a page, searched from the end for a free one."""

    def __init__(self, pages: int, live: np.ndarray) -> None:
        self.map = bytearray(pages)
        for page in live.tolist():
            self.map[page] = 1

    def allocate(self, count: int) -> list[int]:
        """Take the highest free pages."""
        pages, end = [], len(self.map)
        for _ in range(count):
            end = self.map.rfind(0, 0, end)
            if end < 0:
                raise MemoryError(f"no room for {count} pages")
            self.map[end] = 1
            pages.append(end)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        for page in pages:
            self.map[page] = 0


class SortedExtents:
    """The classical allocator: free extents sorted by position, merged with their neighbours when pages come back."""

    def __init__(self, pages: int, live: np.ndarray) -> None:
        edges = np.concatenate(([-1], np.sort(live), [pages]))
        starts, ends = edges[:-1] + 1, edges[1:]
        some = starts < ends
        self.extents = SortedDict(zip(starts[some].tolist(), ends[some].tolist(), strict=True))

    def allocate(self, count: int) -> list[int]:
        """Take the highest free pages."""
        pages: list[int] = []
        while len(pages) < count:
            start, end = self.extents.popitem()
            first = max(start, end - (count - len(pages)))
            pages.extend(range(first, end))
            if first > start:
                self.extents[start] = first
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        extents = self.extents
        for page in pages:
            start, end = page, page + 1
            if end in extents:
                end = extents.pop(end)
            index = extents.bisect_left(start) - 1
            if index >= 0:
                before, before_end = extents.peekitem(index)
                if before_end == start:
                    start = before
            extents[start] = end


def fragmented(pages: int, window_pages: int, rng: np.random.Generator, *, live: float = 0.55) -> Planner:
    """Return a planner whose live pages lie scattered at random over the whole arena."""
    layout = Layout.simple({"state": window_pages * PAGE_BYTES, "full": PAGE_BYTES})
    planner = Planner(layout, pages * PAGE_BYTES)
    placeable = planner.stats().kinds["full"].placeable
    handles = planner.allocate({"full": placeable}).numpy()
    planner.free(rng.permutation(handles)[: int(placeable * (1 - live))])
    planner.seal()
    return planner


def page_rows(report: Report, pages: int, rng: np.random.Generator) -> None:
    """Time allocate and free at one arena size."""
    report.say(f"{pages:,} pages")
    planner = fragmented(pages, WINDOW_PAGES, rng)
    repeats = report.repeats(40, quick=12)
    for batch in BATCHES:
        demand, out = planner.demand({"full": batch}), Handles(batch)
        names = {"allocate": planner.allocate, "free": planner.free, "demand": demand, "out": out, "noop": lib.up_noop}
        name = f"allocate + free a page, {pages:,} pages, batch {batch}"
        if batch > 1:
            timing = measure("allocate(demand, out); free(out)", names, items=batch, repeats=repeats)
            report.time(name, timing, target=PAGE_TARGETS_NS[pages][batch])
        else:
            timing, ratio = compare("allocate(demand, out); free(out)", "noop(); noop()", names, repeats=repeats)
            report.time(name, timing)
            report.ratio(f"  the same, of two empty calls, {pages:,} pages", ratio, target=1.6)
    churn_row(report, planner, pages, rng)
    if pages > 100_000:
        return
    live, _ = planner.live_cells("full")
    cells = np.array(live, dtype=np.int64)
    for title, kind in (("owner map", OwnerMap), ("sorted extents", SortedExtents)):
        other = kind(pages, cells)
        for batch in BATCHES:
            names = {"allocate": other.allocate, "free": other.free, "batch": batch}
            timing = measure("free(allocate(batch))", names, items=batch, repeats=repeats)
            report.time(f"  {title} in Python, {pages:,} pages, batch {batch}", timing)


def churn_row(report: Report, planner: Planner, pages: int, rng: np.random.Generator) -> None:
    """Time what serving does: the pages that come back are not the ones that were just taken."""
    batch = min(256, pages // 8)
    _, live = planner.live_cells("full")
    handles = rng.permutation(np.array(live, dtype=np.int32))
    rounds = min(report.repeats(400, quick=100), len(handles) // batch)
    demand, out = planner.demand({"full": batch}), Handles(batch)
    samples = []
    for turn in range(rounds):
        victims = handles[turn * batch : (turn + 1) * batch]
        begin = time.perf_counter_ns()
        planner.free(victims)
        planner.allocate(demand, out)
        samples.append((time.perf_counter_ns() - begin) / batch)
        if turn % 16 == 0:
            planner.seal()
    report.time(f"  random pages freed, {pages:,} pages, batch {batch}", summary(samples))


def call_rows(report: Report) -> None:
    """Time the calls whose targets are multiples of an empty one."""
    report.say("single calls")
    repeats = report.repeats(40, quick=12)
    layout = Layout.simple({"state": 1_000 * PAGE_BYTES, "full": PAGE_BYTES})
    planner = Planner(layout, 100_000 * PAGE_BYTES)
    planner.allocate({"full": 30_000, "state": 8})
    demand, out = planner.demand({"state": 1}), Handles(1)
    joint = planner.demand({"full": 12, "state": 1})
    names = {"allocate": planner.allocate, "free": planner.free, "demand": demand, "out": out, "noop": lib.up_noop}
    names |= {"can_allocate": planner.can_allocate, "joint": joint}
    timing, ratio = compare("allocate(demand, out); free(out)", "noop(); noop()", names, repeats=repeats)
    report.time("allocate + free a state slot over 1,000 pages", timing)
    report.ratio("  the same, of two empty calls", ratio, target=2.5)
    timing, ratio = compare("can_allocate(joint)", "noop()", names, repeats=repeats)
    report.time("can_allocate, a joint demand", timing)
    report.ratio("  the same, of one empty call", ratio, target=1.5)


def open_rows(report: Report, rng: np.random.Generator) -> None:
    """Time the planning of one evacuation: a slot among 10k live pages and 10k holes, until half the holes are gone."""
    report.say("opening slots")
    ratios, plain, moved = [], [], []
    for _ in range(report.repeats(40, quick=10)):
        planner = fragmented(20_000, WINDOW_PAGES, rng, live=0.5)
        slot, out = planner.demand({"state": 1}), Handles(1)
        for _ in range(100):
            cost = planner.next_open_cost("state")
            begin = time.perf_counter_ns()
            planner.allocate(slot, out)
            elapsed = time.perf_counter_ns() - begin
            if cost:
                pages = cost // PAGE_BYTES
                moved.append(pages)
                plain.append(float(elapsed))
                ratios.append(elapsed / (OPEN_FIXED_NS + OPEN_PAGE_NS * pages))
    note = f"{statistics.median(moved):.0f} pages moved, {len(moved)} slots"
    report.time("open a slot among 10k live pages and 10k holes", summary(plain), note=note)
    spread = summary(ratios)
    report.add(
        "  the same, of 3 us + 30 ns a moved page",
        spread.median,
        "1",
        target=1.0,
        low=spread.low,
        high=spread.high,
    )


def search_rows(report: Report, rng: np.random.Generator) -> None:
    """Time the search for the cheapest window right after a change to a random one, less what the call itself takes."""
    idle = fragmented(6_000, 1_000, rng, live=0.0)
    call = measure("f(0)", {"f": idle.next_open_cost}).median
    for windows in (6_000, 60_000, 1_000_000):
        report.say(f"{windows:,} windows")
        planner = fragmented(windows * 8, 8, rng, live=0.75)
        _, live = planner.live_cells("full")
        handles = rng.permutation(np.array(live, dtype=np.int32))
        slot, page, out = planner.demand({"state": 1}), planner.demand({"full": 1}), Handles(1)
        next_open_cost = planner.next_open_cost
        samples = []
        for turn in range(report.repeats(4_000, quick=1_000)):
            planner.free(handles[turn : turn + 1])
            planner.allocate(page, out)
            begin = time.perf_counter_ns()
            cost = next_open_cost(0)
            elapsed = time.perf_counter_ns() - begin
            if cost:
                samples.append(elapsed - call)
            while planner.next_open_cost(0) == 0:  # a window has become empty: fill it, or there is nothing to search
                planner.allocate(slot, out)
        report.time(f"find the cheapest window of {windows:,}", summary(samples), target=2_000.0)


def peers(pages: int, seed: int) -> Iterator[tuple[str, Callable[[int], Any], Callable[[Any], object]]]:
    """Yield name, allocate and free of the peers' page allocators that are installed.

    vLLM's free list is shuffled first, as it is after a while of serving. SGLang keeps its list in a tensor; on the CPU
    the work that it means for the device is host work, so its times are larger than a GPU server sees.
    """
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:
        pass
    else:
        pool = BlockPool(pages + 1, False, 16)
        blocks = pool.get_new_blocks(pages - 300)
        random.Random(seed).shuffle(blocks)
        pool.free_blocks(blocks)
        yield "vLLM BlockPool", pool.get_new_blocks, lambda taken: pool.free_blocks(reversed(taken))
    try:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        pass
    else:
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
            size = 64
            paged = PagedTokenToKVPoolAllocator(pages * size, size, torch.bfloat16, "cpu", None, False)
            yield "SGLang paged", lambda count: paged.alloc(count * size), paged.free


def peer_rows(report: Report, pages: int) -> None:
    """Time the installed peers."""
    for title, allocate, free in peers(pages, report.options.seed):
        for batch in BATCHES:
            names = {"allocate": allocate, "free": free, "batch": batch}
            timing = measure("free(allocate(batch))", names, items=batch, repeats=report.repeats(20, quick=8))
            report.time(f"  {title}, {pages:,} pages, batch {batch}", timing)


def run(chosen: Options) -> int:
    """Take every measurement and print them."""
    report = Report("allocator", chosen)
    rng = np.random.default_rng(chosen.seed)
    empty = measure("noop()", {"noop": lib.up_noop}, repeats=report.repeats(40, quick=20))
    report.time("an empty call into the C library", empty)
    for pages in PAGE_TARGETS_NS:
        page_rows(report, pages, rng)
    call_rows(report)
    open_rows(report, rng)
    search_rows(report, rng)
    peer_rows(report, 100_000)
    return report.finish()


def main() -> int:
    """Run the benchmark."""
    return run(options(__doc__))


if __name__ == "__main__":
    sys.exit(main())
