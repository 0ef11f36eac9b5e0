"""Time the prefix tree's calls in a tree of 100,000 nodes, and eviction from ten thousand to a million.

Every time is taken through the public Python call, with int32 tokens that are hot in the cache. The tree has
pages of 64 tokens: one chat of 128k tokens in turns of 512, and 100,000 other nodes that fork off its first turns. The
baseline is the obvious tree in Python: one dictionary entry a page.
"""

from __future__ import annotations

import gc
import random
import sys
import time

import numpy as np
import numpy.typing as npt

from harness import Report, Spread, measure, options, summary
from unifiedpool import Handles, Layout, Planner
from unifiedpool.prefix_cache import PrefixCache, PrefixTree

__all__ = ["main"]

Tokens = npt.NDArray[np.int32]

PAGE = 64
TURN = 512
LONG, MEDIUM = 131_072, 16_384
VOCABULARY = 150_000
TARGETS_NS = {"match 128k": 50_000.0, "match 16k": 6_000.0, "insert": 12_000.0, "evict": 10_000.0, "lock": 2_000.0}


class PageTrie:
    """The obvious prefix tree: a dictionary from a page's tokens to the next page's node."""

    def __init__(self) -> None:
        self.root: dict[bytes, dict[bytes, object]] = {}

    def insert(self, tokens: Tokens) -> None:
        """Add every whole page."""
        node: dict[bytes, dict[bytes, object]] = self.root
        for first in range(0, len(tokens) - PAGE + 1, PAGE):
            node = node.setdefault(tokens[first : first + PAGE].tobytes(), {})  # type: ignore[assignment]

    def match(self, tokens: Tokens) -> int:
        """Return the tokens of the whole pages that are known."""
        node: dict[bytes, dict[bytes, object]] = self.root
        depth = 0
        while depth + PAGE <= len(tokens):
            following = node.get(tokens[depth : depth + PAGE].tobytes())
            if following is None:
                break
            node, depth = following, depth + PAGE  # type: ignore[assignment]
        return depth


class Grove:
    """A tree with handles that are only numbers."""

    def __init__(self, nodes: int, rng: np.random.Generator) -> None:
        self.rng, self.next_handle = rng, 1
        self.tree = PrefixTree(page_size=PAGE)
        self.chat = self.fresh(LONG)
        for end in range(TURN, LONG + 1, TURN):
            self.add(self.chat[:end])
        while self.tree.stats()["nodes"] < nodes:
            start = self.chat[: TURN * int(rng.integers(1, 8))]
            self.add(np.concatenate([start, self.fresh(256)]))

    def fresh(self, count: int) -> Tokens:
        """Return random tokens."""
        return self.rng.integers(0, VOCABULARY, count, dtype=np.int32)

    def handles(self, count: int) -> npt.NDArray[np.int32]:
        """Return handles never used before."""
        self.next_handle += count
        return np.arange(self.next_handle - count, self.next_handle, dtype=np.int32)

    def add(self, tokens: Tokens) -> None:
        """Insert with a state at the end."""
        self.tree.insert(tokens, self.handles(-(-len(tokens) // PAGE)), int(self.handles(1)[0]))


def match_rows(report: Report, grove: Grove) -> None:
    """Match prompts of two lengths, in both widths and as a list."""
    tree, repeats = grove.tree, report.repeats(60, quick=20)
    for title, length in (("128k", LONG), ("16k", MEDIUM)):
        prompt = np.concatenate([grove.chat[:length], grove.fresh(PAGE)])
        names = {"match": tree.match, "prompt": prompt}
        assert tree.match(prompt).hit == length
        timing = measure("match(prompt)", names, repeats=repeats)
        report.time(f"match {title} tokens, int32", timing, target=TARGETS_NS[f"match {title}"])
        names["prompt"] = prompt.astype(np.int64)
        report.time(f"  {title}, int64", measure("match(prompt)", names, repeats=repeats // 2))
        names["prompt"] = prompt.tolist()
        report.time(f"  {title}, list", measure("match(prompt)", names, repeats=5))
        trie = PageTrie()
        trie.insert(grove.chat)
        names = {"match": trie.match, "prompt": prompt}
        report.time(f"  {title}, dictionary of pages in Python", measure("match(prompt)", names, repeats=5))
    unknown = grove.fresh(MEDIUM)
    report.time("match nothing", measure("match(p)", {"match": tree.match, "p": unknown}, repeats=repeats))


def lock_row(report: Report, grove: Grove) -> None:
    """Lock and unlock a path of 32 nodes."""
    match = grove.tree.match(grove.chat[:MEDIUM])
    names = {
        "lock": grove.tree.lock,
        "unlock": grove.tree.unlock,
        "node": match.node,
        "generation": int(match._native.generation),
        "depth": match.hit,
    }
    timing = measure("unlock(lock(node, generation, depth))", names, repeats=report.repeats(60, quick=20))
    report.time(f"lock + unlock a path of {MEDIUM // TURN} nodes", timing, target=TARGETS_NS["lock"])


def insert_row(report: Report, grove: Grove) -> None:
    """Insert 256 new tokens under 16k known ones; the new leaf is removed again outside the clock."""
    tree = grove.tree
    known = tree.path(tree.match(grove.chat[:MEDIUM])).numpy()
    samples = []
    for turn in range(report.repeats(3_000, quick=1_000)):
        tokens = np.concatenate([grove.chat[:MEDIUM], grove.fresh(256)])
        handles = Handles.of(np.concatenate([known, grove.handles(256 // PAGE)]))
        tree.match(tokens)
        begin = time.thread_time_ns()
        out, _ = tree.insert(tokens, handles, 1)
        end = time.thread_time_ns()
        if turn > 50:
            samples.append(float(end - begin))
        tree.evict(out.node)
    report.time("insert 256 tokens under 16k", summary(samples), target=TARGETS_NS["insert"])


def evict_timing(nodes: int, count: int, policy: str, rng: np.random.Generator) -> Spread:
    """Time `make_room` evicting leaves of 256 tokens out of a cache of `nodes` nodes.

    `count` leaves are of that size, and old and of little worth, so that they go first; the others are one page each.
    """
    page_bytes, state_bytes = 256, 1024
    arena = nodes * (page_bytes + state_bytes) + 2 * count * 4 * page_bytes
    planner = Planner(Layout.simple({"state": state_bytes, "full": page_bytes}, page_sizes={"full": PAGE}), arena)
    cache = PrefixCache(planner, policy=policy)
    big, small, state = planner.demand({"full": 4, "state": 1}), planner.demand({"full": 1, "state": 1}), 0
    out = Handles(5)
    pool = rng.integers(0, VOCABULARY, 1 << 20, dtype=np.int32)
    order = random.Random(int(rng.integers(1 << 30)))
    for number in range(nodes):
        demand, length = (big, 4 * PAGE) if number < count else (small, PAGE)
        taken = planner.allocate(demand, out)
        start = order.randrange(len(pool) - length)
        tokens = pool[start : start + length].copy()
        tokens[0] = number  # so that every one is a leaf of its own
        state = taken[len(taken) - 1]
        cache.insert(tokens, taken.view[:-1], state=state, role="chunk" if number < count else "tail")
    planner.allocate({"full": planner.stats().kinds["full"].placeable})
    samples = []
    # Each call finds one leaf too few: four pages and a state are the bytes of eight pages.
    batch = 8
    demands = [planner.demand({"full": 8 * leaves}) for leaves in range(1, batch + 1)]
    gc.collect()
    gc.disable()  # as in every other row
    for _ in range(count // batch - 1):
        begin = time.thread_time_ns()
        for demand in demands:
            cache.make_room(demand)
        samples.append((time.thread_time_ns() - begin) / batch)
        planner.allocate(demands[-1])
    gc.enable()
    assert cache.stats()["nodes"] == 1 + nodes - batch * len(samples)
    return summary(samples[len(samples) // 10 :])


def evict_rows(report: Report, rng: np.random.Generator) -> None:
    """Evict at three sizes of the tree: the time has to stay flat."""
    count = report.repeats(1_500, quick=400)
    medians = []
    for nodes in (10_000, 100_000, 1_000_000):
        if nodes == 1_000_000 and report.options.quick:
            nodes = 300_000
        report.say(f"{nodes:,} nodes")
        timing = evict_timing(nodes, count, "value", rng)
        medians.append(timing.median)
        report.time(f"evict 256 tokens, {nodes:,} nodes", timing, target=TARGETS_NS["evict"])
    report.time("  least recently used, 10,000 nodes", evict_timing(10_000, count, "lru", rng))
    report.add("  the largest tree's time over the smallest's", medians[-1] / medians[0], "1", target=2.0)


def main() -> int:
    """Run every row."""
    report = Report("prefix tree", options(__doc__))
    rng = np.random.default_rng(report.options.seed)
    report.say("100,000 nodes")
    grove = Grove(100_000, rng)
    match_rows(report, grove)
    lock_row(report, grove)
    insert_row(report, grove)
    stats = grove.tree.stats()
    bare = stats["bytes"] - 4 * (stats["tokens"] + stats["pages"])
    report.add("memory per node, without its tokens and handles", bare / stats["nodes"], "bytes")
    report.add("memory per token", 4 * (1 + 1 / PAGE), "bytes")
    grove.tree.validate()
    del grove
    evict_rows(report, rng)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
