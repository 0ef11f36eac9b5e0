"""Request traces: read, check, describe, generate, write.

Three formats, plain or gzip:

    mooncake   JSON lines with timestamp (ms), input_length, output_length, hash_ids: one id per 512 prompt tokens, the
               last block perhaps partial; equal ids mean equal blocks after equal prefixes
    azure      CSV with TIMESTAMP, ContextTokens, GeneratedTokens; no keys, so nothing can be shared
    jsonl      our own: a header line {"unifiedpool_trace": 1, "block_tokens": n}, then one object a request with
               arrival_s, input_tokens, output_tokens and keys: one id per whole block of prompt *and* output, so that a
               next turn is known to continue this one. `TraceWriter` records it without storing a token

A damaged line is reported with its number and left out, or refused with `strict`. Pure Python, nothing heavy is loaded.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

from .errors import InvalidArgumentError

__all__ = [
    "FORMATS",
    "MOONCAKE_BLOCK_TOKENS",
    "Format",
    "Problem",
    "Trace",
    "TraceRequest",
    "TraceSummary",
    "TraceWriter",
    "draw_lengths",
    "generate_trace",
    "read_trace",
    "write_trace",
]

Format = Literal["mooncake", "azure", "jsonl"]
FORMATS: tuple[Format, ...] = get_args(Format)
MOONCAKE_BLOCK_TOKENS = 512
SCHEMA_VERSION = 1
_HEADER = "unifiedpool_trace"
_MAX_TOKENS = 1 << 30
_SHOWN_PROBLEMS = 5

# Lengths at these percentiles of the Azure conversation trace and of the Mooncake requests of 8,192 tokens and more.
# Input and output are nearly independent in both (Spearman .07).
_PERCENTILES = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
_LENGTHS = {
    "short": (
        (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    ),
    "long": (
        (8192, 8328, 8807, 9421, 10885, 12510, 14422, 16516, 19053, 23238, 28671, 41624, 62867, 108746, 126195),
        (1, 3, 9, 24, 118, 242, 312, 365, 409, 454, 506, 600, 717, 1342, 2000),
    ),
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: seconds since the first request.
        input_tokens, output_tokens: lengths; both at least 1.
        keys: block ids, prompt first; empty when the trace has none.
        line: where it was read; 0 for a generated one.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one line of a trace file."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What `Trace.summary` counts; lengths at percentiles 0, 50, 90, 99, 100."""

    requests: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    input_percentiles: tuple[int, ...]
    output_percentiles: tuple[int, ...]
    block_tokens: int
    blocks: int
    distinct_blocks: int
    reusable_share: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        block_tokens: tokens of one key's block; 0 when the trace has no keys.
        keys_cover_output: whether keys go on past the prompt.
        problems: of the lines that were left out or mended.
    """

    name: str
    format: Format
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 0
    keys_cover_output: bool = False
    problems: tuple[Problem, ...] = ()

    def head(self, count: int) -> Trace:
        """Return the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def faster(self, times: float) -> Trace:
        """Return the same requests arriving `times` as fast.

        Raises:
            InvalidArgumentError: not a finite number above 0.
        """
        if not (math.isfinite(times) and times > 0):
            raise InvalidArgumentError(f"speed is {times}; it must be above 0")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / times) for r in self.requests))

    def summary(self) -> TraceSummary:
        """Count lengths, blocks and what an endless cache could reuse."""
        inputs = sorted(request.input_tokens for request in self.requests)
        outputs = sorted(request.output_tokens for request in self.requests)
        seen: set[int] = set()
        blocks = reusable = 0
        for request in self.requests:
            prompt = request.keys[: -(-request.input_tokens // self.block_tokens)] if self.block_tokens else ()
            known = 0
            for key in prompt:
                if key not in seen:
                    break
                known += 1
            reusable += min(known * self.block_tokens, request.input_tokens - 1)
            blocks += len(request.keys)
            seen.update(request.keys)
        total = sum(inputs)
        return TraceSummary(
            len(self.requests),
            self.requests[-1].arrival_s if self.requests else 0.0,
            total,
            sum(outputs),
            _percentiles(inputs),
            _percentiles(outputs),
            self.block_tokens,
            blocks,
            len(seen),
            reusable / total if total else 0.0,
        )


def _percentiles(values: Sequence[int]) -> tuple[int, ...]:
    if not values:
        return ()
    return tuple(values[min(len(values) - 1, round(share * (len(values) - 1)))] for share in (0, 0.5, 0.9, 0.99, 1))


# -- reading --------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """This line cannot be used; the text says why."""


def read_trace(path: str | Path, *, format: Format | None = None, strict: bool = False) -> Trace:
    """Read a trace file.

    Args:
        path: plain or gzip, whatever its name.
        format: instead of what the first line looks like.
        strict: refuse a file with a damaged line or times out of order, instead of leaving the line out and sorting.

    Raises:
        InvalidArgumentError: the file cannot be read, is empty, is of no known format, holds no usable request, or is
            damaged and `strict`; names the line.
    """
    path = Path(path)
    lines = _read_lines(path)
    first = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), None)
    if first is None:
        raise InvalidArgumentError(f"trace {str(path)!r} is empty")
    if format is not None and format not in FORMATS:
        raise InvalidArgumentError(f"trace format {format!r}; choose one of {', '.join(FORMATS)}")
    found = format or _detect(first[1])
    if found is None:
        raise InvalidArgumentError(
            f"trace {str(path)!r}, line {first[0]}: no known format ({', '.join(FORMATS)}); it begins {first[1][:60]!r}"
        )
    reader = {"mooncake": _read_mooncake, "azure": _read_azure, "jsonl": _read_own}[found]
    problems: list[Problem] = []
    block_tokens, requests = reader(lines, problems)
    ordered = _in_order(requests, problems)
    problems.sort(key=lambda problem: problem.line)
    if problems and strict:
        more = f" and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        shown = "; ".join(map(str, problems[:_SHOWN_PROBLEMS]))
        raise InvalidArgumentError(f"trace {str(path)!r} is damaged: {shown}{more}")
    if not ordered:
        what = f"; {problems[0]}" if problems else ""
        raise InvalidArgumentError(f"trace {str(path)!r} holds no usable request{what}")
    return Trace(path.name, found, ordered, block_tokens, found == "jsonl", tuple(problems))


def _read_lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(f"cannot read trace {str(path)!r}: {reason}") from None
    # A byte that is no UTF-8 damages its own line only.
    return data.decode("utf-8-sig", errors="replace").splitlines()


def _detect(line: str) -> Format | None:
    if "contexttokens" in line.lower():
        return "azure"
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    if _HEADER in record:
        return "jsonl"
    return "mooncake" if "input_length" in record else None


def _in_order(requests: list[TraceRequest], problems: list[Problem]) -> tuple[TraceRequest, ...]:
    """Sort by arrival, report what was out of order, and count time from the first request."""
    latest = -math.inf
    for request in requests:
        if request.arrival_s < latest:
            problems.append(Problem(request.line, f"arrives {latest - request.arrival_s:g} s before the line above it"))
        latest = max(latest, request.arrival_s)
    ordered = sorted(requests, key=lambda request: (request.arrival_s, request.line))
    start = ordered[0].arrival_s if ordered else 0.0
    return tuple(replace(request, arrival_s=request.arrival_s - start) for request in ordered)


def _json_records(lines: Sequence[str], problems: list[Problem], *, skip: int = 0) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if number <= skip or not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(Problem(number, f"is not JSON: {error.msg} at column {error.colno}"))


def _integer(record: Any, field: str, least: int) -> int:
    if not isinstance(record, dict):
        raise _Damaged(f"holds a {type(record).__name__}; it must be a JSON object")
    if field not in record:
        raise _Damaged(f"has no field {field!r}")
    value = record[field]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_TOKENS:
        raise _Damaged(f"field {field!r} is {value!r}; it must be an integer from {least} to 2^30")
    return value


def _number(record: Any, field: str) -> float:
    if field not in record:
        raise _Damaged(f"has no field {field!r}")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise _Damaged(f"field {field!r} is {value!r}; it must be a number of at least 0")
    return float(value)


def _keys(record: Any, field: str, need: int) -> tuple[int, ...]:
    keys = record.get(field)
    if not isinstance(keys, list) or any(isinstance(key, bool) or not isinstance(key, int) for key in keys):
        raise _Damaged(f"field {field!r} must be a list of integers")
    if len(keys) != need:
        raise _Damaged(f"field {field!r} holds {len(keys)} ids; the lengths make it {need}")
    return tuple(keys)


def _read_mooncake(lines: Sequence[str], problems: list[Problem]) -> tuple[int, list[TraceRequest]]:
    requests = []
    for number, record in _json_records(lines, problems):
        try:
            tokens, output = _integer(record, "input_length", 1), _integer(record, "output_length", 1)
            keys = _keys(record, "hash_ids", -(-tokens // MOONCAKE_BLOCK_TOKENS))
            requests.append(TraceRequest(_number(record, "timestamp") / 1000, tokens, output, keys, number))
        except _Damaged as error:
            problems.append(Problem(number, str(error)))
    return MOONCAKE_BLOCK_TOKENS, requests


def _read_own(lines: Sequence[str], problems: list[Problem]) -> tuple[int, list[TraceRequest]]:
    at, line = next((number, line) for number, line in enumerate(lines, 1) if line.strip())
    try:
        header = json.loads(line)
        version, block = _integer(header, _HEADER, 1), _integer(header, "block_tokens", 0)
    except (json.JSONDecodeError, _Damaged) as error:
        raise InvalidArgumentError(f"line {at}: no header of a unifiedpool trace: {error}") from None
    if version != SCHEMA_VERSION:
        raise InvalidArgumentError(f"line {at}: trace schema {version}; this version reads {SCHEMA_VERSION}")
    requests = []
    for number, record in _json_records(lines, problems, skip=at):
        try:
            tokens, output = _integer(record, "input_tokens", 1), _integer(record, "output_tokens", 1)
            keys = _keys(record, "keys", (tokens + output) // block) if block else ()
            requests.append(TraceRequest(_number(record, "arrival_s"), tokens, output, keys, number))
        except _Damaged as error:
            problems.append(Problem(number, str(error)))
    return block, requests


def _timestamp(text: str) -> float:
    """Seconds of an ISO time with up to nine digits of fraction, as these files have."""
    head, dot, rest = text.strip().replace("Z", "+00:00").partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(head + rest[len(digits) :] if dot else head)
    days = moment.toordinal() - datetime(2020, 1, 1).toordinal()
    return days * 86400 + moment.hour * 3600 + moment.minute * 60 + moment.second + float(f"0.{digits or 0}")


def _read_azure(lines: Sequence[str], problems: list[Problem]) -> tuple[int, list[TraceRequest]]:
    rows = csv.reader(lines)
    columns = [name.strip() for name in next(rows, [])]
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise InvalidArgumentError(f"line 1: no column {', '.join(missing)}; there are {', '.join(columns)}")
    when, context, generated = (columns.index(name) for name in wanted)
    requests = []
    for row in rows:
        number = rows.line_num
        if not row:
            continue
        try:
            if len(row) != len(columns):
                raise _Damaged(f"has {len(row)} fields; the header has {len(columns)}")
            lengths = {}
            for name, index in (("ContextTokens", context), ("GeneratedTokens", generated)):
                digits = row[index].strip()
                lengths[name] = int(digits) if digits.isdecimal() else digits
            tokens, output = _integer(lengths, "ContextTokens", 1), _integer(lengths, "GeneratedTokens", 1)
            requests.append(TraceRequest(_timestamp(row[when]), tokens, output, (), number))
        except _Damaged as error:
            problems.append(Problem(number, str(error)))
        except ValueError:
            problems.append(Problem(number, f"field 'TIMESTAMP' is {row[when]!r}; it must be a date and time"))
    return 0, requests


# -- writing --------------------------------------------------------------------------------------------------------


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        # A fixed time keeps equal traces equal byte for byte.
        return io.TextIOWrapper(gzip.GzipFile(path, "wb", mtime=0), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def write_trace(trace: Trace, path: str | Path, *, format: Format = "jsonl") -> None:
    """Write a trace; a name that ends in .gz is compressed.

    Keys go along where the format has a place for them: Azure has none, and Mooncake's cover the prompt alone in
    blocks of 512 tokens, so other block sizes are refused there. A Mooncake request without keys gets ids of its own.

    Raises:
        InvalidArgumentError: unknown format, block sizes that do not fit, or the file cannot be written.
    """
    if format not in FORMATS:
        raise InvalidArgumentError(f"trace format {format!r}; choose one of {', '.join(FORMATS)}")
    if format == "mooncake" and trace.block_tokens not in (0, MOONCAKE_BLOCK_TOKENS):
        raise InvalidArgumentError(f"Mooncake keys are blocks of 512 tokens; this trace has {trace.block_tokens}")
    try:
        with _open_text(Path(path)) as file:
            for line in _written(trace, format):
                file.write(line + "\n")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write trace {str(path)!r}: {error.strerror}") from None


def _written(trace: Trace, format: Format) -> Iterator[str]:
    if format == "azure":
        start = datetime(2000, 1, 1)
        yield "TIMESTAMP,ContextTokens,GeneratedTokens"
        for request in trace.requests:
            moment = start + timedelta(seconds=request.arrival_s)
            yield f"{moment.isoformat(' ', 'microseconds')},{request.input_tokens},{request.output_tokens}"
        return
    unused = max((key for request in trace.requests for key in request.keys), default=-1) + 1
    if format == "jsonl":
        yield json.dumps({_HEADER: SCHEMA_VERSION, "block_tokens": trace.block_tokens})
    for request in trace.requests:
        block = MOONCAKE_BLOCK_TOKENS if format == "mooncake" else trace.block_tokens
        length = request.input_tokens + (request.output_tokens if format == "jsonl" else 0)
        need = (-(-length // block) if format == "mooncake" else length // block) if block else 0
        keys = list(request.keys[:need])
        if format == "jsonl" and not trace.keys_cover_output and block:
            keys = keys[: request.input_tokens // block]  # a partial block's id says nothing about a whole one
        keys += range(unused, unused + need - len(keys))
        unused += need
        if format == "mooncake":
            record: dict[str, Any] = {
                "timestamp": round(1000 * request.arrival_s),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": keys,
            }
        else:
            record = {
                "arrival_s": round(request.arrival_s, 6),
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
            }
            if block:
                record["keys"] = keys
        yield json.dumps(record)


class TraceWriter:
    """Records requests as they finish, in our own format, without storing a token.

    A block's id is new unless the same tokens came before after the same blocks. O(tokens) a request; memory grows
    with the distinct blocks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TraceWriter(Path(folder) / "t.jsonl", block_tokens=2) as writer:
    ...         writer.add(0.0, [1, 2, 3], [4])
    ...         writer.add(0.5, [1, 2, 3, 4, 5], [6])
    ...     [request.keys for request in read_trace(Path(folder) / "t.jsonl").requests]
    [(0, 1), (0, 1, 2)]
    """

    def __init__(self, path: str | Path, *, block_tokens: int = 16) -> None:
        """Open the file.

        Raises:
            InvalidArgumentError: block_tokens below 1, or the file cannot be written.
        """
        if block_tokens < 1:
            raise InvalidArgumentError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        try:
            self._file = _open_text(Path(path))
        except OSError as error:
            raise InvalidArgumentError(f"cannot write trace {str(path)!r}: {error.strerror}") from None
        self._file.write(json.dumps({_HEADER: SCHEMA_VERSION, "block_tokens": block_tokens}) + "\n")

    def add(self, arrival_s: float, prompt: Iterable[int], output: Iterable[int]) -> None:
        """Record one finished request.

        Args:
            arrival_s: seconds since any fixed moment; records may come in any order.
            prompt, output: token ids.
        """
        prompt, output = list(prompt), list(output)
        tokens = prompt + output
        keys: list[int] = []
        parent = -1
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = (parent, tuple(tokens[start : start + self.block_tokens]))
            parent = self._ids.setdefault(block, len(self._ids))
            keys.append(parent)
        record = {
            "arrival_s": round(arrival_s, 6),
            "input_tokens": len(prompt),
            "output_tokens": len(output),
            "keys": keys,
        }
        self._file.write(json.dumps(record) + "\n")

    @property
    def closed(self) -> bool:
        """Whether the file is finished."""
        return self._file.closed

    def close(self) -> None:
        """Finish the file. Does nothing the second time."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- generating -----------------------------------------------------------------------------------------------------


def _draw(source: random.Random, lengths: Sequence[int]) -> int:
    """Draw a length from a quantile table, log-linear between its points."""
    percentile = 100 * source.random()
    upper = min(bisect_right(_PERCENTILES, percentile), len(_PERCENTILES) - 1)
    low, high = _PERCENTILES[upper - 1], _PERCENTILES[upper]
    share = (percentile - low) / (high - low)
    return round(math.exp(math.log(lengths[upper - 1]) * (1 - share) + math.log(lengths[upper]) * share))


def draw_lengths(source: random.Random, sort: Literal["short", "long"]) -> tuple[int, int]:
    """Draw input and output tokens of a request like the Azure conversations (short) or long Mooncake ones."""
    inputs, outputs = _LENGTHS[sort]
    return _draw(source, inputs), _draw(source, outputs)


def generate_trace(
    requests: int,
    *,
    seed: int = 0,
    rate: float = 3.0,
    long_share: float = 0.25,
    turns: float = 4.0,
    think_s: float = 30.0,
    system_prompts: int = 8,
    system_tokens: int = 1024,
) -> Trace:
    """Generate chat sessions: shared system prompts, turns that continue each other, short and long messages.

    Args:
        requests: how many.
        seed: equal seeds give equal traces.
        rate: requests a second on the mean.
        long_share: share of sessions whose first message is a long document.
        turns: mean turns of a session; think_s: mean seconds between them.
        system_prompts: distinct ones, the n-th used 1/n as often; system_tokens: their length.

    Raises:
        InvalidArgumentError: a number out of range.
    """
    for what, value, least in (("requests", requests, 1), ("system_prompts", system_prompts, 1), ("turns", turns, 1)):
        if value < least:
            raise InvalidArgumentError(f"{what} is {value}; it must be at least {least}")
    if not (rate > 0 and 0 <= long_share <= 1 and think_s >= 0 and system_tokens >= 0):
        raise InvalidArgumentError("rate must be above 0, long_share from 0 to 1, think_s and system_tokens at least 0")
    source = random.Random(seed)
    block = MOONCAKE_BLOCK_TOKENS
    unused = system_prompts * (system_tokens // block)
    shares = [1 / (n + 1) for n in range(system_prompts)]
    made: list[TraceRequest] = []
    start = 0.0
    while len(made) < 2 * requests:  # sessions overlap: twice as many leave a whole beginning
        start += source.expovariate(rate / turns)
        prompt = source.choices(range(system_prompts), shares)[0]
        keys = list(range(prompt * (system_tokens // block), (prompt + 1) * (system_tokens // block)))
        length, now = system_tokens // block * block, start
        sort: Literal["short", "long"] = "long" if source.random() < long_share else "short"
        for _ in range(1 + int(source.expovariate(1 / max(turns - 1, 1e-9)))):
            message, output = draw_lengths(source, sort)
            sort = "short"
            total = length + message + output
            if total > 1 << 18:
                break
            new = total // block - len(keys)
            keys += range(unused, unused + new)
            unused += new
            made.append(TraceRequest(now, length + message, output, tuple(keys)))
            length, now = total, now + source.expovariate(1 / think_s) if think_s else now
    made.sort(key=lambda request: request.arrival_s)
    chosen = made[:requests]
    first = chosen[0].arrival_s
    ordered = tuple(replace(request, arrival_s=request.arrival_s - first) for request in chosen)
    return Trace(f"generated, seed {seed}", "jsonl", ordered, block, keys_cover_output=True)
