"""Replay the given traces: time and memory of the command, equal results for equal inputs, unified against static.

    python benchmarks/replay.py [--quick] [--seed N] [--json PATH] [--traces FOLDER]

Kimi K3 at TP8 with 60 GiB of caches a GPU runs the two Mooncake traces, Qwen3-Next with 16 GiB the two Azure ones. The
static pool is tried at several ratios and the best one is what unified is compared with. `--quick` runs the head of
each trace and has no target for the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from harness import Report, options
from unifiedpool.replay import DEFAULT_HARDWARE, Options, best_static, compare, default_costs, run_replay
from unifiedpool.sizing import Server, load_model
from unifiedpool.traces import Trace, read_trace

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
FOUR_POLICIES = ("static:0.4", "two-ended", "blocks", "unified")
QUICK_REQUESTS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One trace on one server."""

    name: str
    file: str
    server: Server
    ratios: tuple[float, ...]


def cases() -> list[Case]:
    """Return the traces and the servers they run on."""
    k3 = Server.make(load_model("kimi-k3", tp=8, state_dtype="bfloat16"), 60 << 30, page_size=16)
    qwen = Server.make(load_model("qwen3-next-80b"), 16 << 30, page_size=64)
    short, long = (1.0, 2.0, 4.0, 8.0, 16.0), (0.1, 0.2, 0.4, 0.8, 1.6)
    return [
        Case("Mooncake conversation, Kimi K3 60 GiB", "mooncake_conversation.jsonl", k3, long),
        Case("Mooncake synthetic, Kimi K3 60 GiB", "mooncake_synthetic.jsonl", k3, long),
        Case("Azure conversation, Qwen3-Next 16 GiB", "azure_llm_2023_conv.csv", qwen, short),
        Case("Azure code, Qwen3-Next 16 GiB", "azure_llm_2023_code.csv", qwen, short),
    ]


def processor_seconds() -> float:
    """Return the processor time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def replay(trace: Trace, case: Case, policies: tuple[str, ...], jobs: int) -> dict[str, Any]:
    """Run policies under the default costs and options."""
    return run_replay(
        trace,
        case.server,
        default_costs(case.server),
        DEFAULT_HARDWARE,
        Options(),
        policies=policies,
        ratios=case.ratios,
        jobs=jobs,
    )


def compare_case(report: Report, case: Case, trace: Trace, jobs: int) -> None:
    """Run unified and every static ratio; add the rows of one trace."""
    report.say(case.name)
    runs = replay(trace, case, ("static", "unified"), jobs)["runs"]
    best = best_static(runs)
    assert best is not None
    ours = runs[-1]
    found = compare(ours, best)
    note = f"best static ratio {best['policy'].partition(':')[2]}"
    name = case.name
    # The last request ends a run: a thousandth is not a difference.
    report.add(f"{name}: throughput", found["throughput"], "1", target=0.999, at_least=True, note=note)
    report.add(f"{name}: hit rate, difference", found["hit_rate"], "1", target=0.0, at_least=True)
    report.add(f"{name}: TTFT p95", found["ttft_p95"], "1", target=1.05)
    report.add(f"{name}: hit rate of unified", ours["tokens"]["hit_rate"], "1")
    report.add(f"{name}: running requests", found["concurrency"], "1")
    report.add(f"{name}: refusals against the formula", ours["refusals_against_formula"], "1", target=0)
    report.add(f"{name}: bytes moved over allocated", ours["movement"]["moved_share"], "1")
    report.add(f"{name}: worst opened window", ours["movement"]["worst_window"], "bytes")


def four_policies(report: Report, case: Case, trace: Trace, jobs: int) -> None:
    """Time four policies over one trace, and run them again."""
    report.say("four policies, twice")
    begin, worked = time.perf_counter(), processor_seconds()
    first = replay(trace, case, FOUR_POLICIES, jobs)
    seconds, worked = time.perf_counter() - begin, processor_seconds() - worked
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    resident = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + jobs * child)
    second = replay(trace, case, FOUR_POLICIES, jobs)
    quick = report.options.quick
    note = f"{len(trace.requests):,} requests, {jobs} processes"
    # Other programs on the machine do not count: what is judged is the processor time, shared by the cores.
    report.add("four policies: processor time per core", worked / jobs, "s", target=None if quick else 120.0, note=note)
    report.add("four policies: wall time, other programs included", seconds, "s")
    report.add("four policies: resident memory of all processes", resident, "bytes", target=2e9)
    report.add("four policies twice: differences", float(first["digest"] != second["digest"]), "1", target=0)
    moved = {run["policy"]: run["movement"] for run in first["runs"]}
    share = moved["unified:value"]["moved_share"] / max(moved["two-ended"]["moved_share"], 1e-12)
    report.add("bytes moved, unified over two-ended", share, "1", target=0.3)


def main() -> int:
    """Run everything."""

    def traces(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--traces", type=Path, default=FOLDER, metavar="FOLDER")

    report = Report("replay", options(__doc__, add=traces))
    folder: Path = report.options.extra.traces
    jobs = os.cpu_count() or 1
    found = cases()
    missing = [case.file for case in found if not (folder / case.file).exists()]
    if missing:
        print(f"no traces {', '.join(missing)} in {folder}; name the folder with --traces", file=sys.stderr)
        return 2
    for index, case in enumerate(found):
        trace = read_trace(folder / case.file, strict=True)
        if report.options.quick:
            trace = trace.head(QUICK_REQUESTS)
        if index == 0:
            four_policies(report, case, trace, jobs)
        compare_case(report, case, trace, jobs)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
