"""What the benchmarks share: options, timing, and the report with its table, JSON and exit status.

A benchmark is a `main` that takes the options, adds rows to a `Report` and returns `report.finish()`:

    def main() -> int:
        report = Report("queues", options(__doc__))
        timing = measure("put(1); get()", {"put": queue.put, "get": queue.get}, repeats=report.repeats(30, quick=10))
        report.time("put and get", timing, target=200.0)
        return report.finish()
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Options", "Report", "Row", "Spread", "compare", "machine", "measure", "options", "summary", "versions"]

PACKAGES = ("unifiedpool", "torch", "triton", "transformers", "numpy", "cffi", "sortedcontainers", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every benchmark takes, and `extra` for its own."""

    quick: bool
    seed: int
    json: Path | None
    extra: argparse.Namespace


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the repeats, with the quartiles around it: nanoseconds of one call, or a ratio of two of them."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value; `ok` is None when there is no target."""

    name: str
    value: float
    unit: str
    target: float | None
    ok: bool | None
    at_least: bool
    low: float | None
    high: float | None
    note: str


def options(description: str | None, *, add: Callable[[argparse.ArgumentParser], None] | None = None) -> Options:
    """Parse the command line.

    Args:
        description: shown by --help; its first line is enough.
        add: adds the benchmark's own options to the parser.
    """
    parser = argparse.ArgumentParser(description=(description or "").strip().split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every row, with fewer repeats: under 50 s on 2 cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results there")
    if add is not None:
        add(parser)
    chosen = parser.parse_args()
    return Options(chosen.quick, chosen.seed, chosen.json, chosen)


def summary(samples: Sequence[float]) -> Spread:
    """Return the median and the quartiles of samples, of which there is at least one."""
    if len(samples) < 2:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


def measure(
    statement: str | Callable[[], object],
    names: dict[str, Any] | None = None,
    *,
    items: float = 1.0,
    sample_ns: int = 200_000,
    repeats: int = 30,
    warmup: int = 2,
) -> Spread:
    """Time a statement, or a function without arguments, as often as makes a sample long enough for the clock.

    Args:
        statement: Python text is run inside the timing loop itself, so that cheap calls are not measured with a lambda
            around them.
        names: the names in that text.
        items: things that one run handles; the result is per item.
        sample_ns: least length of one sample.
        repeats: samples.
        warmup: samples thrown away first.

    Returns:
        CPU time of this thread per item, with the garbage collector off: other programs on the machine do not count.
    """
    timer = timeit.Timer(statement, timer=time.thread_time_ns, globals=names)
    number = _calls(timer, sample_ns)
    samples = [float(sample) / number / items for sample in timer.repeat(warmup + repeats, number)]
    return summary(samples[warmup:])


def compare(
    statement: str, baseline: str, names: dict[str, Any], *, sample_ns: int = 200_000, repeats: int = 30
) -> tuple[Spread, Spread]:
    """Time two statements in turns, so that both meet the same machine.

    Returns:
        The first one's time, as `measure` returns it, and the ratio of the two times, pair by pair.
    """
    timers = [timeit.Timer(text, timer=time.thread_time_ns, globals=names) for text in (statement, baseline)]
    numbers = [_calls(timer, sample_ns) for timer in timers]
    times: list[float] = []
    ratios: list[float] = []
    for _ in range(repeats):
        first, second = (timer.timeit(number) / number for timer, number in zip(timers, numbers, strict=True))
        times.append(first)
        ratios.append(first / second)
    return summary(times), summary(ratios)


def _calls(timer: timeit.Timer, sample_ns: int) -> int:
    """Return how many runs make a sample of at least `sample_ns`, having warmed the code up."""
    number = 1
    while timer.timeit(number) < sample_ns and number < 1 << 24:
        number *= 2
    return number


def machine() -> dict[str, str | int]:
    """Describe this machine in words that say nothing about who owns it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    result: dict[str, str | int] = {"cpu": name, "cores": os.cpu_count() or 1, "system": platform.system()}
    if hasattr(os, "sysconf"):
        result["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return result


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter here, where they are installed."""
    result = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


class Report:
    """Collects rows and prints them once, at the end."""

    def __init__(self, title: str, chosen: Options) -> None:
        self.title = title
        self.options = chosen
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.begin_ns = time.perf_counter_ns()

    def repeats(self, full: int, *, quick: int) -> int:
        """Return one of the two, by --quick."""
        return quick if self.options.quick else full

    def say(self, text: str) -> None:
        """Tell on stderr what is being measured."""
        print(f"[{(time.perf_counter_ns() - self.begin_ns) / 1e9:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        target: float | None = None,
        at_least: bool = False,
        low: float | None = None,
        high: float | None = None,
        note: str = "",
    ) -> Row:
        """Add a row.

        Args:
            name: what was measured.
            value: in `unit`.
            unit: "ns", "bytes", "1" for a ratio.
            target: the bound that the value has to keep, None for a row without one.
            at_least: True when the target is a lower bound; it is an upper bound otherwise.
            low: a lower quartile, where there is one.
            high: an upper quartile, where there is one.
            note: a few words shown beside the row.
        """
        ok = None if target is None else bool(value >= target if at_least else value <= target)
        row = Row(name, value, unit, target, ok, at_least, low, high, note)
        self.rows.append(row)
        return row

    def time(self, name: str, timing: Spread, *, target: float | None = None, note: str = "") -> Row:
        """Add a row in nanoseconds."""
        low, high = timing.low, timing.high
        return self.add(name, timing.median, "ns", target=target, low=low, high=high, note=note)

    def ratio(self, name: str, ratio: Spread, *, target: float | None = None) -> Row:
        """Add a row without a unit, of what `compare` returned."""
        return self.add(name, ratio.median, "1", target=target, low=ratio.low, high=ratio.high)

    def to_json(self) -> dict[str, Any]:
        """Return what --json writes."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            entry: dict[str, Any] = {"name": row.name, "value": row.value, "unit": row.unit}
            entry |= {"target": row.target, "ok": row.ok}
            if row.target is not None:
                entry["bound"] = "at least" if row.at_least else "at most"
            if row.low is not None and row.high is not None:
                entry["quartiles"] = [row.low, row.high]
            if row.note:
                entry["note"] = row.note
            rows.append(entry)
        head = {"machine": machine(), "versions": versions(), "benchmark": self.title}
        head |= {"seed": self.options.seed, "quick": self.options.quick}
        return head | self.facts | {"rows": rows}

    def finish(self) -> int:
        """Print the table, write the JSON file; return 1 when a target was missed, else 0."""
        table = Table(title=f"{self.title}, seed {self.options.seed}{', quick' if self.options.quick else ''}")
        table.add_column("what")
        for heading in ("value", "quartiles", "target"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("")
        for row in self.rows:
            spread = "" if row.low is None or row.high is None else f"{_number(row.low)} .. {_number(row.high)}"
            bound = "" if row.target is None else f"{'>=' if row.at_least else '<='} {_number(row.target)}"
            verdict = {None: "", True: "[green]ok[/green]", False: "[red]missed[/red]"}[row.ok]
            value = f"{_number(row.value)}{'' if row.unit == '1' else ' ' + row.unit}"
            table.add_row(escape(row.name), value, spread, bound, f"{verdict} {escape(row.note)}".strip())
        # A pipe has no width of its own; a table cut to 80 columns would lose its numbers.
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(table)
        missed = [row.name for row in self.rows if row.ok is False]
        judged = sum(row.ok is not None for row in self.rows)
        where = machine()
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        console.print(f"{where['cpu']}, {where['cores']} cores; {packages}", markup=False, highlight=False)
        outcome = f"{judged - len(missed)} of {judged} targets met" + "".join(f"\n  missed: {name}" for name in missed)
        console.print(outcome, markup=False, highlight=False)
        if self.options.json is not None:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return 1 if missed else 0


def _number(value: float) -> str:
    """Format a value with about four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    digits = 0 if size >= 1_000 else 1 if size >= 100 else 2 if size >= 1 else 4
    return f"{value:,.{digits}f}"
