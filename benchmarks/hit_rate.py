"""Measure how many prompt tokens the prefix cache saves on real traces, under every policy, beside an offline bound.

Requests of the Mooncake traces run one after another through the real tree and the real planner. A block of 512 tokens
is a few pages of the model's bytes; a request matches, prefills in chunks of 12 blocks, decodes, and saves the states
that the engine would save:

    tail     at floor(input / 512)                          always
    branch   where its path leaves what was seen before     always; replaces its chunk's end
    final    at floor((input + output) / 512)               always; matchable where a later prompt goes on from there
    chunk    at each chunk's end                            by value per byte only if it is worth it; by Marconi-like
                                                            never; by the others always

The bound is a linear program that knows the future: it chooses which blocks and states to keep between two uses, in
fractions, within the same bytes, and can save a state at any depth for nothing. Without the traces, generated traffic
stands in, and nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness import Report, options
from unifiedpool import Handles, Layout, Planner
from unifiedpool.prefix_cache import Lock, PrefillCost, PrefixCache
from unifiedpool.prefix_cache.eviction import Policy, policy_named

__all__ = ["main"]

FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
MIB, GIB = 1 << 20, 1 << 30
BLOCK_TOKENS = 512
CHUNK_BLOCKS = 12
COST_OFFSET_BLOCKS = 119  # 6 GFLOP a token over 197 kFLOP a token and token of context, twice, in blocks
QUICK_REQUESTS = 400


class Model(NamedTuple):
    """Bytes of a model's block of 512 tokens and of its state, and the pages that a block is cut into."""

    block_mib: float
    state_mib: float
    pages: int


MODELS = {
    "qn": Model(12, 73.7, 8),
    "kl": Model(4, 41, 4),
    "K3 bf16": Model(13.5, 27.7, 16),
    "K3 fp32": Model(13.5, 53.6, 16),
}


class Cell(NamedTuple):
    """One trace, model and cache size, and the hit rate that the design quotes, which is to be met within 2 %."""

    trace: str
    model: str
    gib: int
    quoted: float | None = None
    half: bool = False  # the second half of the trace only

    @property
    def name(self) -> str:
        return f"{self.trace} {self.model} {self.gib} GiB{', second half' if self.half else ''}"


CELLS = (
    Cell("synthetic", "qn", 60, 0.288),
    Cell("synthetic", "qn", 160, 0.477),
    Cell("synthetic", "kl", 40, 0.393),
    Cell("conversation", "qn", 80, 0.171),
    Cell("conversation", "qn", 240, 0.270),
    Cell("synthetic", "K3 bf16", 20, 0.127),
    Cell("synthetic", "K3 bf16", 60, 0.284),
    Cell("synthetic", "K3 fp32", 20, 0.120),
    Cell("synthetic", "K3 fp32", 60, 0.274),
    Cell("conversation", "K3 bf16", 20, 0.086),
    Cell("conversation", "K3 bf16", 60, 0.150),
    Cell("conversation", "K3 fp32", 20, 0.085),
    Cell("conversation", "K3 fp32", 60, 0.148),
)
CHECKS = (
    *(Cell("synthetic", "qn", gib) for gib in (30, 100, 300)),
    *(Cell("conversation", "kl", gib) for gib in (40, 120)),
    Cell("synthetic", "qn", 60, half=True),
    Cell("conversation", "qn", 80, half=True),
)
OURS = "value"
ONLINE = ("static 0.9", "lru", "sglang", "path_cap", "marconi", OURS)
RATIOS = (0.5, 1.8)


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        blocks: ids of the whole blocks of the prompt and of the output.
        tail: blocks of the prompt.
        input_tokens: tokens of the prompt.
    """

    blocks: tuple[int, ...]
    tail: int
    input_tokens: int

    @property
    def limit(self) -> int:
        """Most blocks that may hit: the last token is computed."""
        return min(self.tail, (self.input_tokens - 1) // BLOCK_TOKENS)


class Row(NamedTuple):
    """One line of a trace."""

    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]


def read_mooncake(path: Path) -> list[Row]:
    """Read a Mooncake trace."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows.append(Row(row["input_length"], row["output_length"], tuple(row["hash_ids"])))
    return rows


def generate(trace: str, count: int, seed: int) -> list[Row]:
    """Make traffic of a trace's kind: questions about documents, or chats that grow."""
    source = random.Random(f"{trace} {seed}")
    rows: list[Row] = []
    fresh = iter(range(1, 1 << 30))
    documents: list[tuple[int, ...]] = []
    for _ in range(count):
        if documents and source.random() < 0.6:
            index = int(min(source.expovariate(0.02), len(documents) - 1))
            base = documents.pop(-1 - index)
        else:
            base = (0, *(next(fresh) for _ in range(int(source.lognormvariate(2.5, 0.8)))))
        ids = (*base, *(next(fresh) for _ in range(source.randint(0, 3))))
        documents.append(base if trace == "synthetic" else ids)
        tokens = len(ids) * BLOCK_TOKENS + source.randint(1, BLOCK_TOKENS - 1)
        rows.append(Row(tokens, source.randint(8, 800), (*ids, next(fresh))))
    return rows


def requests_of(rows: Sequence[Row]) -> list[Request]:
    """Cut prompts into whole blocks; an output gets the ids with which the first later prompt goes on from it."""
    whole = [row.ids[: row.input_tokens // BLOCK_TOKENS] for row in rows]
    keys: list[list[int]] = []
    longer: dict[tuple[int, int], list[int]] = {}
    for index, ids in enumerate(whole):
        key, path = 0, [0]
        for depth, block in enumerate(ids):
            longer.setdefault((depth, key), []).append(index)
            key = hash((key, block))
            path.append(key)
        keys.append(path)
    fresh = 1 + max((max(ids, default=0) for ids in whole), default=0)
    requests = []
    for index, (row, ids) in enumerate(zip(rows, whole, strict=True)):
        tail, end = len(ids), (row.input_tokens + row.output_tokens) // BLOCK_TOKENS
        output: tuple[int, ...] = ()
        if end > tail:
            heirs = longer.get((tail, keys[index][tail]), ())
            heir = next((other for other in heirs if other > index and len(whole[other]) >= end), None)
            if heir is None:
                output = tuple(range(fresh, fresh + end - tail))
                fresh += end - tail
            else:
                output = whole[heir][tail:end]
        requests.append(Request((*ids, *output), tail, row.input_tokens))
    return requests


@cache
def traffic(trace: str, quick: bool, seed: int, half: bool) -> tuple[list[Request], bool]:
    """Return a trace's requests, and whether they are the real ones."""
    path = FOLDER / f"mooncake_{trace}.jsonl"
    rows = read_mooncake(path) if path.exists() else generate(trace, 2 * QUICK_REQUESTS, seed)
    if half:
        rows = rows[len(rows) // 2 :]
    return requests_of(rows[:QUICK_REQUESTS] if quick else rows), path.exists()


# -- online policies ---------------------------------------------------------------------------------------------------


class Server:
    """A cache under one policy, and what it costs to serve requests from it."""

    def __init__(self, model: Model, gib: int, policy: Policy, ratio: float | None) -> None:
        """With `ratio`, states and pages get fixed shares of the bytes, `ratio / (1 + ratio)` and the rest."""
        page_bytes, state_bytes = int(model.block_mib * MIB / model.pages), int(model.state_mib * MIB)
        layout = Layout.simple({"state": state_bytes, "full": page_bytes}, null_cell=False)
        arena = gib * GIB
        self.most: dict[str, int] | None = None
        if ratio is not None:
            states = arena * ratio / (1 + ratio)
            self.most = {"state": int(states / state_bytes), "full": int((arena - states) / page_bytes)}
            arena *= 2  # so that only the shares limit
        self.pages = model.pages
        self.planner = Planner(layout, arena)
        self.cost = PrefillCost(COST_OFFSET_BLOCKS * model.pages)
        self.cache = PrefixCache(self.planner, policy=policy, grid=model.pages, cost=self.cost)
        self.state_demand, self.page_demand = self.planner.demand({"state": 1}), self.planner.demand({"full": 0})
        self.new_pages = Handles(1 << 17)
        self.block = np.arange(model.pages, dtype=np.int32)
        self.hit_tokens = self.prompt_tokens = self.saved = self.work = 0

    def room(self, kind: str, count: int) -> bool:
        """Make room for cells of one kind."""
        if self.most is not None:
            held = self.cache.ledger()[kind]["held"]
            surplus = held + count - self.most[kind]
            return surplus <= 0 or self.cache.evict({kind: surplus}).fits
        if kind == "state":
            return self.cache.make_room(self.state_demand).fits
        self.page_demand.set(0, count)
        return self.cache.make_room(self.page_demand).fits

    def checkpoints(self, request: Request, hit: int, branch: int) -> dict[int, str]:
        """Return depth in blocks -> why a state is saved there."""
        found: dict[int, str] = {}
        for start in range(hit, request.tail, CHUNK_BLOCKS):
            end = min(start + CHUNK_BLOCKS, request.tail)
            if start < branch <= end:
                found[branch] = "branch"
            if end == request.tail:
                found[end] = "tail"
            elif not start < branch <= end:
                found[end] = "chunk"
        found.setdefault(len(request.blocks), "final" if len(request.blocks) > request.tail else "tail")
        return found

    def serve(self, request: Request) -> None:
        """Run one request."""
        pages, cache = self.pages, self.cache
        self.prompt_tokens += request.input_tokens
        self.work += self.cost.saved(0, request.tail * pages)
        if not request.blocks:
            return
        tokens = (np.array(request.blocks, np.int32)[:, None] * pages + self.block).reshape(-1)
        match = cache.match(tokens[: request.tail * pages], limit=request.limit * pages)
        hit, branch = match.hit // pages, (match.branch or 0) // pages
        self.hit_tokens += hit * BLOCK_TOKENS
        self.saved += self.cost.saved(0, match.hit)
        done = above = hit
        with cache.lock(match) as lock:
            for depth, role in sorted(self.checkpoints(request, hit, branch).items()):
                if not self.step(tokens, done, depth, above, role, lock):
                    break
                above = depth
                done = depth

    def step(self, tokens: np.ndarray, done: int, depth: int, above: int, role: str, lock: Lock) -> bool:
        """Compute blocks `done` to `depth` and save the state there; say whether there was room for the blocks."""
        pages, planner, cache = self.pages, self.planner, self.cache
        handles = np.zeros(depth * pages, np.int32)
        if depth > done:
            if not self.room("full", (depth - done) * pages):
                return False
            self.page_demand.set(0, (depth - done) * pages)
            handles[done * pages :] = planner.allocate(self.page_demand, self.new_pages, overwrite=True).numpy()
        state = None
        wanted = role != "chunk" or cache.wants_chunk_end(depth * pages, above * pages)
        if wanted and self.room("state", 1):
            state = planner.allocate(self.state_demand, overwrite=True)[0]
        made = cache.insert(tokens[: depth * pages], handles, state=state, lock=lock, role=role)
        if back := made.to_free():
            planner.free(back)
        return True


class Outcome(NamedTuple):
    """Hit tokens / prompt tokens, saved / all prefill work, and seconds."""

    hit_rate: float
    saved_rate: float
    seconds: float


def simulate(cell: Cell, policy: str, quick: bool, seed: int) -> Outcome:
    """Run one trace through one policy. "static R" splits the bytes; "bound" solves the linear program."""
    begin = time.perf_counter()
    requests, _ = traffic(cell.trace, quick, seed, cell.half)
    if policy == "bound":
        return Outcome(bound(requests, MODELS[cell.model], cell.gib), 0.0, time.perf_counter() - begin)
    name, _, ratio = policy.partition(" ")
    chosen = policy_named("lru" if name == "static" else name)
    server = Server(MODELS[cell.model], cell.gib, chosen, float(ratio) if ratio else None)
    for request in requests:
        server.serve(request)
    server.cache.validate()
    return Outcome(
        server.hit_tokens / max(1, server.prompt_tokens),
        server.saved / max(1, server.work),
        time.perf_counter() - begin,
    )


# -- the offline bound -------------------------------------------------------------------------------------------------


def bound(requests: Sequence[Request], model: Model, gib: int) -> float:
    """Return the best hit rate of anybody who knows the future, relaxed to fractions.

    A hit of request j at a depth needs the blocks up to there, each kept since it was last used, and a state at that
    depth, kept since then too. Blocks of a path that were last used together form a segment, and only hits at segment
    ends can be best: within one the state costs the same and each further block as much as the one before. Bytes are
    accounted as a flow from one request to the next, so the program stays sparse.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    count = len(requests)
    last: dict[int, int] = {}
    gain: list[float] = []
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    owner: list[int] = []
    for index, request in enumerate(requests):
        key, path = 0, []
        for block in request.blocks:
            key = hash((key, block))
            path.append(key)
        segments: list[tuple[int, int]] = []  # (request that used it last, depth where it ends)
        for depth in range(request.limit):
            used = last.get(path[depth])
            if used is None:
                break
            if segments and segments[-1][0] == used:
                segments[-1] = (used, depth + 1)
            else:
                segments.append((used, depth + 1))
        for position, (used, depth) in enumerate(segments):
            flows: dict[int, float] = {used: model.state_mib}
            before = 0
            for since, end in segments[: position + 1]:
                flows[since] = flows.get(since, 0.0) + model.block_mib * (end - before)
                before = end
            for since, size in flows.items():
                rows.append(since)
                columns.append(len(gain))
                values.append(size)
            rows.append(index)
            columns.append(len(gain))
            values.append(-sum(flows.values()))
            gain.append(float(depth * BLOCK_TOKENS))
            owner.append(index)
        for key in path:
            last[key] = index
    total = sum(request.input_tokens for request in requests)
    if not gain:
        return 0.0
    # Bytes held after request t: those before, plus what begins at t, minus what ends at t.
    hits, steps = len(gain), np.arange(count)
    flow = coo_array(
        (
            np.concatenate([values, -np.ones(count), np.ones(count - 1)]),
            (
                np.concatenate([rows, steps, steps[1:]]).astype(np.int64),
                np.concatenate([columns, hits + steps, hits + steps[:-1]]).astype(np.int64),
            ),
        ),
        shape=(count, hits + count),
    ).tocsr()
    one = coo_array((np.ones(hits), (owner, np.arange(hits))), shape=(count, hits + count)).tocsr()
    limits = [(0.0, 1.0)] * hits + [(0.0, gib * 1024.0)] * count
    solved = linprog(
        np.concatenate([-np.array(gain), np.zeros(count)]),
        A_ub=one,
        b_ub=np.ones(count),
        A_eq=flow,
        b_eq=np.zeros(count),
        bounds=limits,
        method="highs-ipm",
    )
    if solved.status != 0:
        raise RuntimeError(f"the linear program was not solved: {solved.message}")
    return float(-solved.fun / total)


# -- the report --------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--check", action="store_true", help="five more budgets and the second half of each trace")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--only", default="", help="cells whose name contains this")


def main() -> int:
    """Run every cell under every policy."""
    chosen = options(__doc__, add=add_options)
    report = Report("prefix hit rate", chosen)
    cells = [cell for cell in (*CELLS, *(CHECKS if chosen.extra.check else ())) if chosen.extra.only in cell.name]
    real = traffic("synthetic", chosen.quick, chosen.seed, False)[1]
    judged = real and not chosen.quick
    if not real:
        print("The traces are not there: generated traffic stands in, and nothing is judged.", file=sys.stderr)
    policies = [*ONLINE, *(() if chosen.quick else (f"static {ratio}" for ratio in RATIOS)), "bound"]
    outcomes: dict[tuple[Cell, str], Outcome] = {}
    with ProcessPoolExecutor(chosen.extra.jobs) as pool:
        futures = {
            (cell, policy): pool.submit(simulate, cell, policy, chosen.quick, chosen.seed)
            for cell in cells
            for policy in policies
        }
        for key, future in futures.items():
            outcomes[key] = future.result()
            report.say(f"{key[0].name}: {key[1]} {outcomes[key].hit_rate:.4f} in {outcomes[key].seconds:.1f} s")

    ahead = below = 0
    for cell in cells:
        rates = {policy: outcomes[cell, policy].hit_rate for policy in policies}
        statics = [policy for policy in policies if policy.startswith("static")]
        best_static = max(statics, key=lambda policy: rates[policy])
        others = max(rates[policy] for policy in policies if policy not in (OURS, "bound"))
        ours = rates[OURS]
        ahead += ours > others and cell in CELLS
        below += ours < rates["lru"]
        target = 0.98 * cell.quoted if judged and cell.quoted is not None else None
        note = f"design {cell.quoted}" if cell.quoted is not None else "not tuned on"
        report.add(f"{cell.name}: ours", ours, "1", target=target, at_least=True, note=note)
        for policy in ("static 0.9", "lru", "sglang", "path_cap", "marconi"):
            report.add(f"  {policy}", rates[policy], "1")
        report.add("  best static ratio", rates[best_static], "1", note=best_static)
        report.add("  offline bound", rates["bound"], "1", note=f"ours reaches {ours / max(rates['bound'], 1e-9):.0%}")
        saved = outcomes[cell, OURS].saved_rate
        report.add("  prefill work saved: ours", saved, "1", note=f"lru {outcomes[cell, 'lru'].saved_rate:.3f}")
    ahead_of = "cells where ours is above every other online policy"
    report.add(ahead_of, ahead, "1", target=12 if judged and not chosen.extra.only else None, at_least=True)
    report.add("cells where ours is below LRU", below, "1", target=0 if judged else None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
