"""Several policies over one trace, at several memory sizes, in several processes; one report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import InvalidArgumentError, UnifiedPoolError
from ..prefix_cache import PrefillCost, checkpoint_grid
from ..sizing import Server
from ..traces import Trace
from .costs import Costs, Hardware
from .pools import check_policy, make_pool
from .simulate import Options, Simulation
from .workload import Workload

__all__ = ["DEFAULT_POLICIES", "DEFAULT_RATIOS", "Task", "best_static", "compare", "digest", "run_replay"]

SCHEMA_VERSION = 1
DEFAULT_POLICIES = ("static", "two-ended", "blocks", "unified")
DEFAULT_RATIOS = (0.1, 0.2, 0.4, 0.8, 1.6)
# Throughputs closer than this count as equal; the better TTFT then decides which static ratio is best.
_EQUAL_THROUGHPUT = 0.005
_POLL_S = 0.2

Progress = Callable[["Task", int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One policy at one memory size."""

    policy: str
    cache_bytes: int

    def __str__(self) -> str:
        return f"{self.policy} at {self.cache_bytes / 2**30:.1f} GiB"


@dataclass(frozen=True, slots=True)
class _Setting:
    """What all tasks share; goes to the worker processes."""

    workload: Workload
    server: Server
    costs: Costs
    hardware: Hardware
    options: Options


def _expand(policies: Sequence[str], ratios: Sequence[float], server: Server) -> list[str]:
    """Put a run for every ratio in the place of "static"; a model without states has nothing to split."""
    names: list[str] = []
    for policy in policies:
        if policy == "static":
            names += [f"static:{ratio:g}" for ratio in (ratios if server.slot_bytes else ratios[:1])]
        else:
            names.append("unified:value" if policy == "unified" else policy)
    return list(dict.fromkeys(names))


def _simulation(setting: _Setting, task: Task) -> Simulation:
    costs = setting.costs
    server = replace(setting.server, cache_bytes=task.cache_bytes)
    page = server.layout.kind("full").page_size
    cost = PrefillCost(round(2 * costs.flops_per_token / max(costs.flops_per_token_context, 1)))
    pool = make_pool(task.policy, server, cost=cost, grid=checkpoint_grid(page))
    return Simulation(setting.workload, server, pool, costs, setting.hardware, setting.options)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ignore ctrl-C for a moment; a process that is started meanwhile inherits that, from its first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, setting: _Setting, task: Task, stop: Any) -> None:
    """Run one task in a process of its own, which ctrl-C does not reach: the parent tells it to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A broken pipe: the parent is gone, and nobody wants to know.
    with contextlib.suppress(BrokenPipeError):
        try:
            simulation = _simulation(setting, task)
            result = simulation.run(lambda done: connection.send(("progress", done)), stop.is_set)
            connection.send(("result", result))
        except BrokenPipeError:
            raise
        except Exception as error:
            connection.send(("error", _why(error)))
    connection.close()


def _why(error: Exception) -> str:
    """Say in one line why a task failed."""
    if isinstance(error, UnifiedPoolError):
        return str(error)
    return " ".join(f"please report this: {type(error).__name__}: {error}".split())


def run_replay(
    trace: Trace,
    server: Server,
    costs: Costs,
    hardware: Hardware,
    options: Options,
    *,
    policies: Sequence[str] = DEFAULT_POLICIES,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    budgets: Sequence[int] = (),
    jobs: int = 1,
    progress: Progress = lambda task, done: None,
) -> dict[str, Any]:
    """Replay a trace under every policy and return the report.

    Args:
        policies: as `make_pool` takes them; "static" tries every ratio, "unified" is unified:value.
        ratios: of the sweep.
        budgets: further memory sizes, for hit rate against memory.
        jobs: processes; 1 runs in this one.
        progress: called with a task and its requests done.

    Returns:
        JSON-ready data with a schema version. `complete` is false after ctrl-C: then it holds what there was.

    Raises:
        InvalidArgumentError: no policy, no request, an unknown policy, a ratio, or a model that the replay cannot hold.
    """
    if not policies:
        raise InvalidArgumentError("no policy to replay")
    if not trace.requests:
        raise InvalidArgumentError(f"trace {trace.name!r} has no request to replay")
    sizes = list(dict.fromkeys((server.cache_bytes, *budgets)))
    tasks = [Task(name, size) for size in sizes for name in _expand(policies, ratios, server)]
    setting = _Setting(Workload(trace), server, costs, hardware, options)
    for task in tasks:
        check_policy(task.policy)
    page_sizes = {kind.name: kind.page_size for kind in server.layout.kinds if kind.page_size}
    if len(set(page_sizes.values())) > 1:
        raise InvalidArgumentError(f"page sizes {page_sizes}: the replay wants pages of one size; choose one (--page)")
    if "full" not in server.layout.names:
        raise InvalidArgumentError(f"{server.spec.name!r} keeps no KV pages: there is no prefix cache to replay")
    results: dict[Task, dict[str, Any]] = {}
    failed: dict[Task, str] = {}
    interrupted = (_run_here if jobs <= 1 else _run_apart)(setting, tasks, results, failed, progress, jobs)
    lines = [request.line for request in trace.requests]
    runs = []
    for task in tasks:
        if task in results:
            result = results[task]
            result["requests"]["too_large_lines"] = [lines[index] for index in result["requests"]["too_large"]]
            runs.append({"cache_bytes": task.cache_bytes, **result})
    return {
        "schema": SCHEMA_VERSION,
        "complete": not interrupted,
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "requests": len(trace.requests),
            "block_tokens": trace.block_tokens,
            "problems": [asdict(problem) for problem in trace.problems],
        },
        "server": {
            "model": server.spec.name,
            "tp": server.spec.tp,
            "cache_bytes": server.cache_bytes,
            "page_size": {kind.name: kind.page_size for kind in server.layout.kinds if kind.page_size},
            "strategy": server.strategy,
            "overlap": server.overlap,
        },
        "costs": asdict(costs),
        "hardware": asdict(hardware),
        "options": asdict(options),
        "runs": runs,
        "failed": [
            {"policy": task.policy, "cache_bytes": task.cache_bytes, "why": failed[task]}
            for task in tasks
            if task in failed
        ],
        "digest": digest(runs),
    }


def _run_here(
    setting: _Setting,
    tasks: Sequence[Task],
    results: dict[Task, dict[str, Any]],
    failed: dict[Task, str],
    progress: Progress,
    jobs: int,
) -> bool:
    for task in tasks:
        try:
            simulation = _simulation(setting, task)
            results[task] = simulation.run(lambda done, task=task: progress(task, done))  # type: ignore[misc]
        except Exception as error:
            failed[task] = _why(error)
            continue
        if not results[task]["complete"]:
            return True
    return False


def _run_apart(
    setting: _Setting,
    tasks: Sequence[Task],
    results: dict[Task, dict[str, Any]],
    failed: dict[Task, str],
    progress: Progress,
    jobs: int,
) -> bool:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    waiting = list(tasks)
    running: dict[Connection, tuple[Task, Any]] = {}
    interrupted = False
    while waiting or running:
        try:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, setting, task, stop), daemon=True)
                with _deaf():
                    process.start()
                theirs.close()
                running[mine] = (task, process)
            for connection in wait(list(running), timeout=_POLL_S):
                assert isinstance(connection, Connection)
                task, process = running[connection]
                try:
                    what, value = connection.recv()
                except EOFError:
                    process.join()
                    del running[connection]
                    if task not in results and task not in failed:
                        failed[task] = f"its process ended with exit code {process.exitcode}"
                    continue
                if what == "progress":
                    progress(task, value)
                elif what == "result":
                    results[task] = value
                else:
                    failed[task] = value
        except KeyboardInterrupt:
            # What runs reports what it has; what waits is left out.
            interrupted = True
            stop.set()
            waiting.clear()
    return interrupted


# -- comparing ------------------------------------------------------------------------------------------------------


def best_static(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the static run with the highest throughput; among equals the one with the least TTFT p95."""
    found = [run for run in runs if run["policy"].startswith("static")]
    if not found:
        return None
    most = max(run["throughput"]["requests_per_s"] for run in found)
    equals = [run for run in found if run["throughput"]["requests_per_s"] >= most * (1 - _EQUAL_THROUGHPUT)]
    return min(equals, key=lambda run: (run["ttft_s"]["p95"], run["policy"]))


def compare(run: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Return how a run stands beside another: ratios, and the difference of the hit rates."""

    def ratio(of: Callable[[dict[str, Any]], float]) -> float:
        return of(run) / of(base) if of(base) else 1.0

    return {
        "throughput": ratio(lambda r: r["throughput"]["requests_per_s"]),
        "concurrency": ratio(lambda r: r["concurrency"]["mean"]),
        "ttft_p95": ratio(lambda r: r["ttft_s"]["p95"]),
        "hit_rate": run["tokens"]["hit_rate"] - base["tokens"]["hit_rate"],
        "useful_memory": run["memory"]["useful"] - base["memory"]["useful"],
    }


def digest(runs: Sequence[dict[str, Any]]) -> str:
    """Return a hash of everything in the runs but host times: equal for equal inputs."""
    kept = [{key: value for key, value in run.items() if key != "host"} for run in runs]
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()
