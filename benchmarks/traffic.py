"""Traffic for the benchmarks: request lengths from the Azure and Mooncake traces, or generated ones like them.

Two traffics exercise a pool that holds pages and states at once:

    phases   stretches of short Azure conversation requests and of long Mooncake ones in turn: the memory wanted by
             states and by pages swings from one side to the other and back
    mix      both kinds at random, and one request in a hundred with an output forty times longer: holes of every age

The traces are read from `../shared/data` beside the repository (or another folder). Without them lengths are drawn from
quantile tables fitted to the same traces; input and output are independent there, as they nearly are in the traces
(Spearman .07 in both).
"""

from __future__ import annotations

import csv
import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import NamedTuple

__all__ = ["DEFAULT_FOLDER", "Request", "Traces", "load_traces", "mix", "phases", "read_azure", "read_mooncake"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
AZURE_FILE = "azure_llm_2023_conv.csv"
MOONCAKE_FILE = "mooncake_conversation.jsonl"

# A Mooncake request is called long from here on; 45 % of the trace is.
LONG_TOKENS = 8192

# Lengths at the given percentiles of each trace, for generated traffic.
_PERCENTILES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
_AZURE_INPUT = (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050)
_AZURE_OUTPUT = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000)
_LONG_INPUT = (8192, 8328, 8807, 9421, 10885, 12510, 14422, 16516, 19053, 23238, 28671, 41624, 62867, 108746, 126195)
_LONG_OUTPUT = (1, 3, 9, 24, 118, 242, 312, 365, 409, 454, 506, 600, 717, 1342, 2000)


class Request(NamedTuple):
    """Lengths of one request in tokens."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Traces:
    """Short and long requests, and where they come from."""

    short: tuple[Request, ...]
    long: tuple[Request, ...]
    source: str


def read_azure(path: Path) -> list[Request]:
    """Read an Azure LLM inference trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Request(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def read_mooncake(path: Path) -> list[Request]:
    """Read a Mooncake trace: one JSON object a line with input_length and output_length."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    return [Request(int(record["input_length"]), int(record["output_length"])) for record in records]


def _draw(source: random.Random, lengths: Sequence[int]) -> int:
    """Draw a length from a quantile table, log-linear between its points."""
    percentile = 100 * source.random()
    upper = min(bisect_right(_PERCENTILES, percentile), len(_PERCENTILES) - 1)
    low, high = _PERCENTILES[upper - 1], _PERCENTILES[upper]
    share = (percentile - low) / (high - low)
    return round(exp(log(lengths[upper - 1]) * (1 - share) + log(lengths[upper]) * share))


def load_traces(folder: Path = DEFAULT_FOLDER, *, seed: int = 0, generated: int = 8192) -> Traces:
    """Read the traces in `folder`, or generate `generated` requests of each sort when they are not there.

    Args:
        folder: holds the Azure CSV and the Mooncake JSONL.
        seed: of the generated lengths; the traces are what they are.
    """
    azure, mooncake = folder / AZURE_FILE, folder / MOONCAKE_FILE
    if azure.exists() and mooncake.exists():
        long = tuple(request for request in read_mooncake(mooncake) if request.input_tokens >= LONG_TOKENS)
        return Traces(tuple(read_azure(azure)), long, f"traces {AZURE_FILE} and {MOONCAKE_FILE}")
    source = random.Random(seed)
    short = tuple(Request(_draw(source, _AZURE_INPUT), _draw(source, _AZURE_OUTPUT)) for _ in range(generated))
    long = tuple(Request(_draw(source, _LONG_INPUT), _draw(source, _LONG_OUTPUT)) for _ in range(generated))
    return Traces(short, long, f"generated lengths (no traces in {folder.name}/), seed {seed}")


def phases(traces: Traces, count: int, *, seed: int, short: int = 400, long: int = 210) -> list[Request]:
    """Return `count` requests: `short` short ones, then `long` long ones, and so on, each in trace order.

    Args:
        seed: where in the traces to begin.
    """
    source = random.Random(seed)
    at_short, at_long = source.randrange(len(traces.short)), source.randrange(len(traces.long))
    requests: list[Request] = []
    while len(requests) < count:
        requests += [traces.short[(at_short + i) % len(traces.short)] for i in range(short)]
        requests += [traces.long[(at_long + i) % len(traces.long)] for i in range(long)]
        at_short, at_long = at_short + short, at_long + long
    return requests[:count]


def mix(
    traces: Traces,
    count: int,
    *,
    seed: int,
    long_share: float = 0.14,
    very_long_share: float = 0.01,
    very_long_times: int = 40,
) -> list[Request]:
    """Return `count` requests drawn at random; `very_long_share` of them write `very_long_times` their output."""
    source = random.Random(seed)
    requests = []
    for _ in range(count):
        request = source.choice(traces.long if source.random() < long_share else traces.short)
        times = very_long_times if source.random() < very_long_share else 1
        requests.append(Request(request.input_tokens, request.output_tokens * times))
    return requests
