"""The change an engine author makes to replace a static hybrid pool, step by step, and the proof that it works.

The engine below is small but shaped like the large ones: a scheduler process decides who runs and where things lie, and
worker processes (two tensor-parallel ranks) hold the bytes and run the forward. `StaticMemory` and `StaticWorker` are
what such engines have today: a free list of state slots, a free list of pages, two tensors. `UnifiedMemory` and
`UnifiedWorker` are the same two classes over one arena. This program prints the differences, as they are in its own
source, then serves the same requests both ways at equal bytes. Every token and every state is checked in the workers.

    python examples/replace_static_pool.py
    python examples/replace_static_pool.py --no-diff --requests 500

The scheduler process never loads torch: plans cross a pipe as bytes.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import multiprocessing
import random
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from unifiedpool.errors import CapacityError, UnifiedPoolError, format_bytes
from unifiedpool.layout import Layout
from unifiedpool.model_spec import ModelSpec
from unifiedpool.plan import StepPlan
from unifiedpool.planner import Planner

MODEL = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 5,
    "full_attention_interval": 4,
    "dtype": "float32",
}
RATIO = 0.9
RANKS = 2
MAX_ROWS = 64


@dataclass
class Request:
    """One sequence: where its cache lies, and how far it is."""

    number: int
    prompt: int
    outputs: int
    length: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)


# -- the scheduler's side: what there is today, and what replaces it -------------------------------------------------


class StaticMemory:
    """Two free lists; the split was chosen at start-up."""

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        self.page_size = layout.kind("full").page_size
        slots, pages = split(layout, arena_bytes)
        self.free_slots = list(range(slots))
        self.free_pages = list(range(pages))

    def admit(self, request: Request) -> bool:
        pages = -(-request.prompt // self.page_size)
        if not self.free_slots or len(self.free_pages) < pages:
            return False
        request.slot = self.free_slots.pop()
        request.pages = [self.free_pages.pop() for _ in range(pages)]
        return True

    def grow(self, request: Request) -> bool:
        if not self.free_pages:
            return False
        request.pages.append(self.free_pages.pop())
        return True

    def release(self, request: Request) -> None:
        self.free_slots.append(request.slot)
        self.free_pages.extend(request.pages)

    def begin_step(self, step: int) -> bytes:
        return b""


class UnifiedMemory:
    """One planner; slots and pages come out of the same bytes."""

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        self.page_size = layout.kind("full").page_size
        self.planner = Planner(layout, arena_bytes)

    def admit(self, request: Request) -> bool:
        pages = -(-request.prompt // self.page_size)
        if not self.planner.can_allocate({"state": 1, "full": pages}):
            return False
        handles = self.planner.allocate({"state": 1, "full": pages})
        request.slot = handles[0]
        request.pages = handles[1:].tolist()
        return True

    def grow(self, request: Request) -> bool:
        if not self.planner.can_allocate({"full": 1}):
            return False
        request.pages += self.planner.allocate({"full": 1})
        return True

    def release(self, request: Request) -> None:
        self.planner.free([request.slot, *request.pages])

    def begin_step(self, step: int) -> bytes:
        plan = self.planner.seal(step)
        return plan.to_bytes() if plan is not None else b""


# -- the worker's side -----------------------------------------------------------------------------------------------


class StaticWorker:
    """Two tensors per layer; slots and pages are their rows."""

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        import torch

        slots, pages = split(layout, arena_bytes)
        heads, dim = layout.kind("full").segment("key").shape
        self.keys = torch.zeros(pages, layout.kind("full").page_size, heads, dim)
        self.states = torch.zeros(slots, *layout.kind("state").segment("temporal").shape)

    def begin_step(self, plan: bytes) -> None:
        pass

    def rows(self, slot: int, pages: Sequence[int]) -> tuple[int, Any]:
        return slot, list(pages)


class UnifiedWorker:
    """One arena; the tensors are views of it, and handles become rows through its tables."""

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        from unifiedpool.arena import Arena

        self.arena = Arena(layout, arena_bytes)
        self.keys = self.arena.view("full", layout.kind("full").layers[0], "key")
        self.states = self.arena.view("state", layout.kind("state").layers[0], "temporal")

    def begin_step(self, plan: bytes) -> None:
        if plan:
            self.arena.apply(StepPlan.from_bytes(plan))

    def rows(self, slot: int, pages: Sequence[int]) -> tuple[int, Any]:
        tables = self.arena.tables
        return int(tables["state"][slot]), tables["full"][list(pages)].long()


def split(layout: Layout, arena_bytes: int) -> tuple[int, int]:
    """Return the slots and pages of a static split."""
    slot_bytes, page_bytes = layout.kind("state").stride_bytes, layout.kind("full").stride_bytes
    slots = int(arena_bytes * RATIO / (1 + RATIO)) // slot_bytes
    return slots, (arena_bytes - slots * slot_bytes) // page_bytes


# -- the engine around them, the same for both -----------------------------------------------------------------------


def run_worker(pipe: Connection, kind: str, layout_json: str, arena_bytes: int) -> None:
    """Hold bytes, run the forwards that the scheduler sends, and check every request when it ends.

    The forward is a stand-in that keeps what a model would: each token's keys, and a state that sums all tokens.
    """
    layout = Layout.from_json(layout_json)
    worker: Any = {"static": StaticWorker, "unified": UnifiedWorker}[kind](layout, arena_bytes)
    page_size = layout.kind("full").page_size
    checked = 0
    while (message := receive(pipe)) is not None:
        plan, batch = message
        worker.begin_step(plan)
        for number, start, end, slot, pages, ends in batch:
            row, page_rows = worker.rows(slot, pages)
            if start == 0:
                worker.states[row] = 0
            for position in range(start, end):
                value = token(number, position)
                worker.keys[page_rows[position // page_size], position % page_size] = value
                worker.states[row] += value
            if ends:
                wanted = [token(number, position) for position in range(end)]
                kept = worker.keys[page_rows].flatten(0, 1)[:end]
                if not all(bool((kept[position] == wanted[position]).all()) for position in range(end)):
                    raise SystemExit(f"request {number}: keys are wrong")
                if not bool((worker.states[row] == float(sum(wanted))).all()):
                    raise SystemExit(f"request {number}: the state is wrong")
                checked += end + 1
        pipe.send(None)
    pipe.send(checked)


def receive(pipe: Connection) -> Any:
    """Return the next message (None: the end), or stop quietly when the scheduler is gone."""
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit from None


def token(number: int, position: int) -> int:
    """A small number that tells requests and positions apart, so that sums stay exact in float32."""
    return (number * 31 + position * 7) % 97 + 1


def serve(kind: str, layout: Layout, arena_bytes: int, mix: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Run the scheduler here and the workers in processes of their own; return what happened."""
    memory: Any = {"static": StaticMemory, "unified": UnifiedMemory}[kind](layout, arena_bytes)
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_worker, args=(theirs, kind, layout.to_json(), arena_bytes), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        workers.append(process)
    waiting = [Request(number, *lengths) for number, lengths in enumerate(mix)]
    running: list[Request] = []
    steps = held = plan_bytes = moved_bytes = retractions = 0
    started = time.perf_counter()
    try:
        while waiting or running:
            for request in list(running):
                if request in running and request.length == len(request.pages) * memory.page_size:
                    while not memory.grow(request):
                        if len(running) == 1:
                            raise CapacityError(
                                f"request {request.number} outgrows the {kind} memory at {request.length} tokens: "
                                "give it more --states"
                            )
                        youngest = running.pop()
                        memory.release(youngest)
                        waiting.insert(0, Request(youngest.number, youngest.prompt, youngest.outputs))
                        retractions += 1
                        if youngest is request:
                            break
            while waiting and len(running) < MAX_ROWS and memory.admit(waiting[0]):
                running.append(waiting.pop(0))
            if not running:
                raise CapacityError(
                    f"request {waiting[0].number} of {waiting[0].prompt} tokens never fits the {kind} memory: "
                    "give it more --states"
                )
            plan = memory.begin_step(steps)
            batch = []
            for request in running:
                end = request.length + 1 if request.length else request.prompt
                ends = end == request.prompt + request.outputs - 1
                batch.append((request.number, request.length, end, request.slot, request.pages, ends))
                request.length = end
            for pipe in pipes:
                pipe.send((plan, batch))
            for pipe in pipes:
                pipe.recv()
            steps, held, plan_bytes = steps + 1, held + len(running), plan_bytes + len(plan)
            moved_bytes += StepPlan.from_bytes(plan).moved_bytes if plan else 0
            for request in [request for request, row in zip(running, batch, strict=True) if row[-1]]:
                running.remove(request)
                memory.release(request)
        seconds = time.perf_counter() - started
        for pipe in pipes:
            pipe.send(None)
        checked = [int(pipe.recv()) for pipe in pipes]
    except (EOFError, BrokenPipeError):
        raise SystemExit("a worker found wrong bytes, or died: see above") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in workers:
            process.join(10)
    return {
        "steps": steps,
        "mean_running": held / steps,
        "retractions": retractions,
        "plan_bytes": plan_bytes,
        "moved_bytes": moved_bytes,
        "checked": checked,
        "seconds": seconds,
    }


# -- the story -------------------------------------------------------------------------------------------------------

STEPS = (
    ("1. One planner instead of two free lists", StaticMemory.__init__, UnifiedMemory.__init__),
    ("2. Admission asks for both at once, exactly", StaticMemory.admit, UnifiedMemory.admit),
    ("3. A page more", StaticMemory.grow, UnifiedMemory.grow),
    ("4. One free for every kind", StaticMemory.release, UnifiedMemory.release),
    ("5. The scheduler seals one plan a step", StaticMemory.begin_step, UnifiedMemory.begin_step),
    ("6. The worker's tensors become views of one buffer", StaticWorker.__init__, UnifiedWorker.__init__),
    ("7. The worker applies the plan before its forward", StaticWorker.begin_step, UnifiedWorker.begin_step),
    ("8. Handles become rows through the arena's tables", StaticWorker.rows, UnifiedWorker.rows),
)


def print_steps() -> None:
    """Print the difference of each pair of functions."""
    for title, before, after in STEPS:
        old, new = (textwrap.dedent(inspect.getsource(function)).splitlines() for function in (before, after))
        print(f"\n{title}")
        for line in difflib.ndiff(old, new):
            if not line.startswith("?"):
                print(f"    {line}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="how many (default: 150)")
    parser.add_argument("--states", type=int, default=20, help="size of the arena in states (default: 20)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the request lengths (default: 0)")
    parser.add_argument("--no-diff", action="store_true", help="only run, do not print the change")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    options = parser.parse_args(arguments)
    for name in ("requests", "states", "page_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the change, then serve the same requests both ways."""
    options = parse(arguments)
    if not options.no_diff:
        print_steps()
    try:
        layout = ModelSpec.from_config(MODEL).layout(page_size=options.page_size)
        arena_bytes = options.states * layout.kind("state").stride_bytes
        generator = random.Random(options.seed)
        count = max(1, options.requests // 5) if options.quick else options.requests
        mix = [
            (
                generator.randrange(200, 300) if number % 20 == 7 else generator.randrange(4, 60),
                generator.randrange(4, 40),
            )
            for number in range(count)
        ]
        print(f"\n{layout.explain()}\narena {format_bytes(arena_bytes)}, {RANKS} ranks, {count} requests\n")
        results = {kind: serve(kind, layout, arena_bytes, mix) for kind in ("static", "unified")}
    except UnifiedPoolError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for kind, result in results.items():
        print(
            f"{kind:8}{result['mean_running']:6.2f} requests at once, {result['steps']} steps, "
            f"{result['retractions']} retractions, {format_bytes(result['moved_bytes'])} moved by "
            f"{format_bytes(result['plan_bytes'])} of plans, {min(result['checked']):,} keys and states checked on "
            f"each rank, {result['seconds']:.1f} s"
        )
    gain = results["unified"]["mean_running"] / results["static"]["mean_running"]
    print(f"\nunified holds {gain:.2f}x the requests at equal bytes; torch in the scheduler: {'torch' in sys.modules}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
