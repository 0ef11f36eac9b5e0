"""Traffic for the benchmarks: request lengths from the Azure and Mooncake traces, or generated ones like them.

Two traffics exercise a pool that holds pages and states at once:

    phases   stretches of short Azure conversation requests and of long Mooncake ones in turn: the memory wanted by
             states and by pages swings from one side to the other and back
    mix      both kinds at random, and one request in a hundred with an output forty times longer: holes of every age

The traces are read from `../shared/data` beside the repository (or another folder). Without them lengths are drawn from
quantile tables fitted to the same traces (`unifiedpool.traces.draw_lengths`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unifiedpool.traces import draw_lengths, read_trace

__all__ = ["DEFAULT_FOLDER", "Request", "Traces", "load_traces", "mix", "phases", "read_lengths"]

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
AZURE_FILE = "azure_llm_2023_conv.csv"
MOONCAKE_FILE = "mooncake_conversation.jsonl"

# A Mooncake request is called long from here on; 45 % of the trace is.
LONG_TOKENS = 8192


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


def read_lengths(path: Path) -> list[Request]:
    """Read the lengths of a trace in any format that `unifiedpool.traces` knows."""
    return [Request(request.input_tokens, request.output_tokens) for request in read_trace(path).requests]


def load_traces(folder: Path = DEFAULT_FOLDER, *, seed: int = 0, generated: int = 8192) -> Traces:
    """Read the traces in `folder`, or generate `generated` requests of each sort when they are not there.

    Args:
        folder: holds the Azure CSV and the Mooncake JSONL.
        seed: of the generated lengths; the traces are what they are.
    """
    azure, mooncake = folder / AZURE_FILE, folder / MOONCAKE_FILE
    if azure.exists() and mooncake.exists():
        long = tuple(request for request in read_lengths(mooncake) if request.input_tokens >= LONG_TOKENS)
        return Traces(tuple(read_lengths(azure)), long, f"traces {AZURE_FILE} and {MOONCAKE_FILE}")
    source = random.Random(seed)
    short = tuple(Request(*draw_lengths(source, "short")) for _ in range(generated))
    long = tuple(Request(*draw_lengths(source, "long")) for _ in range(generated))
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
