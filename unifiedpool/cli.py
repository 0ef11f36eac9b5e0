"""The `unifiedpool` command: what a model's caches cost, how many requests fit, and what a trace would gain.

Exit codes: 0 done; 1 refused (what was asked cannot be done, or a trace is damaged and `--strict`); 2 wrong usage;
3 done, but damaged lines or impossible requests were left out; 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ModuleNotFoundError as error:  # pragma: no cover - depends on the installation
    raise SystemExit(f"the command needs {error.name}: pip install 'unifiedpool[cli]'") from None

from .errors import InvalidArgumentError, UnifiedPoolError, format_bytes
from .layout import PaddingWarning
from .prefix_cache.tracking import STRATEGIES
from .replay import (
    DEFAULT_HARDWARE,
    DEFAULT_POLICIES,
    DEFAULT_RATIOS,
    Costs,
    Hardware,
    Options,
    best_static,
    compare,
    default_costs,
    run_replay,
)
from .replay.plots import check_plots, plot_report
from .sizing import DEFAULT_LENGTHS, Server, StaticSplit, load_model, plot_concurrency
from .traces import FORMATS, Trace, generate_trace, read_trace, write_trace

__all__ = ["app", "main", "parse_size"]

EXIT_REFUSED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="unifiedpool",
    help="One byte buffer for the KV pages, window pages and recurrent states of hybrid LLMs.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {unit: 1024**i for i, p in enumerate("kmgt", 1) for unit in (p, f"{p}i", f"{p}ib")}


def parse_size(text: str) -> int:
    """Read a number of bytes.

    >>> parse_size("60GiB") == parse_size("60g") == 60 * 2**30, parse_size("141GB"), parse_size("1.5e9")
    (True, 141000000000, 1500000000)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write 60GiB, 141GB or a number of bytes")
    try:
        return int(float(match[1]) * _UNITS[match[2]])
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size; write 60GiB, 141GB or a number of bytes") from None


def _parse_lengths(text: str) -> list[int]:
    """Read context lengths: 4096,128k,1m."""
    lengths = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([km]?)\s*", part.lower())
        if match is None or int(match[1]) < 1:
            raise typer.BadParameter(f"{part!r} is no context length; write 4096,128k,1m")
        lengths.append(int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2]])
    return sorted(set(lengths))


def _tokens(count: int) -> str:
    for power, unit in ((20, "M"), (10, "k")):
        if count >= 1 << power and not count % (1 << power):
            return f"{count >> power}{unit}"
    return f"{count:,}"


def _table(*headings: str, title: str, numbers: int) -> Table:
    """Make a table whose first `numbers` columns are aligned right."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index < numbers else "left", no_wrap=True)
    return table


def _say(text: str, *, wrap: bool = True) -> None:
    """Print plain text."""
    out.print(text, highlight=False, markup=False, soft_wrap=not wrap)


def _refuse(error: Exception) -> NoReturn:
    err.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_REFUSED) from None


def _write_json(report: dict[str, Any], path: str) -> None:
    text = json.dumps(report, indent=2)
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _refuse(InvalidArgumentError(f"cannot write {path!r}: {error.strerror}"))


def _check_json(path: str) -> None:
    """Refuse, before a long run, a path that `_write_json` could not write; leave what is there as it is."""
    target = Path(path)
    try:
        missing = not target.exists()
        if path == "-" or not (missing or target.is_file() or target.is_dir()):
            return  # a pipe or a device: opening it twice is not the same as once
        with target.open("a"):
            pass
        if missing:
            Path(os.path.realpath(path)).unlink()  # a link to what is not there yet stays
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path!r}: {error.strerror}") from None


# -- options shared by plan and replay ------------------------------------------------------------------------------

Model = Annotated[str, typer.Argument(help="A preset (see `unifiedpool env`), a config.json, or its folder.")]
Cache = Annotated[
    str | None, typer.Option("--cache", help="Memory for caches per GPU, such as 60GiB. Or --memory and --weights.")
]
Memory = Annotated[str | None, typer.Option("--memory", help="Memory of a GPU, such as 141GB.")]
Weights = Annotated[str | None, typer.Option("--weights", help="Weights per GPU, activations and graphs included.")]
Tp = Annotated[int, typer.Option(help="Tensor-parallel degree.")]
Dcp = Annotated[int, typer.Option(help="Decode context parallelism: ranks that share a request's KV.")]
KvDtype = Annotated[str | None, typer.Option(help="KV dtype, such as bfloat16 or float8_e4m3fn.")]
StateDtype = Annotated[str | None, typer.Option(help="State dtype; default: the config's, else float32.")]
ConvDtype = Annotated[str | None, typer.Option(help="Conv window dtype; default: the config's, else bfloat16.")]
Page = Annotated[int | None, typer.Option("--page", help="Tokens per page; default: the size that pads least.")]
Strategy = Annotated[str, typer.Option(help=f"Tracking of checkpoints: {', '.join(STRATEGIES)}.")]
Overlap = Annotated[bool, typer.Option(help="Whether the scheduler works ahead of the forward.")]
Draft = Annotated[int, typer.Option("--draft-tokens", help="Tokens verified at once by speculative decoding.")]
Ring = Annotated[int, typer.Option("--ring-length", help="Steps of ReplaySSM rings; a power of two.")]
Json = Annotated[str | None, typer.Option("--json", help="Write the report as JSON to this path; - for stdout.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a plot; the ending chooses the format.")]


def _cache_bytes(cache: str | None, memory: str | None, weights: str | None) -> int:
    if cache is not None:
        if memory is not None or weights is not None:
            raise typer.BadParameter("give either --cache, or --memory and --weights")
        return parse_size(cache)
    if memory is None or weights is None:
        raise typer.BadParameter("how much memory is there? Give --cache 60GiB, or --memory 141GB --weights 70GiB")
    left = parse_size(memory) - parse_size(weights)
    if left <= 0:
        _refuse(InvalidArgumentError(f"the weights ({weights}) leave nothing of the memory ({memory})"))
    return left


def _server(model: str, cache_bytes: int, spec_options: dict[str, Any], options: dict[str, Any]) -> Server:
    with warnings.catch_warnings():
        # The padding is printed in a table of its own.
        warnings.simplefilter("ignore", PaddingWarning)
        return Server.make(load_model(model, **spec_options), cache_bytes, **options)


# -- plan -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n  unifiedpool plan kimi-k3 --tp 8 --cache 60GiB --state-dtype bfloat16\n\n"
    "  unifiedpool plan ./config.json --memory 141GB --weights 70GiB --lengths 4k,128k --plot fit.svg\n\n"
    "  unifiedpool plan qwen3-next-80b --cache 40GiB --ratio 0.5 --json -"
)
def plan(
    model: Model,
    cache: Cache = None,
    memory: Memory = None,
    weights: Weights = None,
    tp: Tp = 1,
    dcp: Dcp = 1,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    conv_dtype: ConvDtype = None,
    page: Page = None,
    strategy: Strategy = "auto",
    overlap: Overlap = True,
    draft_tokens: Draft = 0,
    ring_length: Ring = 0,
    ratio: Annotated[float, typer.Option(help="Static split: bytes of states over bytes of KV.")] = 0.9,
    slots: Annotated[int | None, typer.Option(help="Static split: state slots, instead of a ratio.")] = None,
    lengths: Annotated[str, typer.Option(help="Context lengths, such as 4096,128k,1m.")] = "",
    context: Annotated[int, typer.Option(help="Longest context, for the start-up lines.")] = 131_072,
    json_path: Json = None,
    plot: Plot = None,
) -> None:
    """Say what a model's caches cost and how many requests fit, by context length."""
    spec_options = {"tp": tp, "kv_dtype": kv_dtype, "state_dtype": state_dtype, "conv_dtype": conv_dtype}
    options = {"page_size": page, "strategy": strategy, "overlap": overlap, "dcp": dcp}
    options |= {"draft_tokens": draft_tokens, "ring_length": ring_length}
    counted = _parse_lengths(lengths) if lengths else list(DEFAULT_LENGTHS)
    try:
        server = _server(model, _cache_bytes(cache, memory, weights), spec_options, options)
        split = server.static_split(slots=slots) if slots is not None else server.static_split(ratio)
        if json_path is not None:
            _write_json(server.report(counted, ratio=ratio, slots=slots, context=context), json_path)
        if plot is not None:
            plot_concurrency(server, counted, split, plot)
    except UnifiedPoolError as error:
        _refuse(error)
    if json_path != "-":
        _print_plan(server, split, counted, context)
        if plot is not None:
            out.print(f"plot: {plot}")


def _print_plan(server: Server, split: StaticSplit, lengths: list[int], context: int) -> None:
    spec = server.spec
    out.print(
        f"[bold]{spec.name}[/], tp {spec.tp}, {format_bytes(server.cache_bytes)} of caches per GPU"
        + (f", strategy {server.strategy}{'' if server.overlap else ', no overlap'}" if server.slot_bytes else "")
    )
    table = _table("bytes", "padded", "padding", "what", "of each", title="Where each byte goes (one GPU)", numbers=3)
    for what, bare, padded, unit in server.byte_rows():
        table.add_row(f"{bare:,}", f"{padded:,}", f"{padded / bare - 1:.2%}", what, unit)
    out.print(table)
    tokens = (("KV", server.token_bytes), ("window KV", server.window_token_bytes))
    facts = [f"{name} {size:,} B a token" for name, size in tokens if size]
    if server.slot_bytes:
        state, everywhere = server.slot_bytes / 2**20, server.slot_bytes * spec.tp / 2**20
        facts.append(f"state {state:.1f} MiB, {everywhere:.1f} MiB on all GPUs")
        facts.append(
            f"a running request holds {server.running_states} states; a static pool sets {server.static_slots} aside"
        )
    _say("; ".join(facts))

    given = f"static {split.ratio:.2g}" if server.slot_bytes and split.kv_bytes else "static"
    headings = ("context", "request", given, "best", "its ratio", "blocks", "unified/2", "unified")
    table = _table(*headings, title="Requests that fit", numbers=len(headings))
    for row in server.rows(lengths, split=split):
        table.add_row(
            _tokens(row.tokens),
            format_bytes(row.request_bytes),
            f"{row.static:,}",
            f"{row.best_static:,}",
            "-" if row.best_ratio is None else f"{row.best_ratio:.3g}",
            f"{row.blocks:,}",
            f"{row.unified_two_states:,}",
            f"[bold]{row.unified:,}[/]",
        )
    out.print(table)
    if server.slot_bytes:
        rule = server.block_rule
        _say(
            "best: the static ratio that is best for this one length. "
            f"blocks: equal blocks of {rule.block_tokens:,} tokens ({format_bytes(rule.block_bytes)}), two states a "
            "request. unified/2: unified with two states a request, as blocks."
        )
    recommended = server.recommended_ratio(lengths)
    if recommended is not None:
        out.print(f"If it must be static, over these lengths: ratio [bold]{recommended:.3g}[/]")
    out.print("\nWhat a static engine prints when it starts:")
    for line in server.log_lines(split, context=context):
        _say(f"  {line}", wrap=False)


# -- env ------------------------------------------------------------------------------------------------------------

_PACKAGES = ("unifiedpool", "torch", "triton", "transformers", "numpy", "cffi", "matplotlib", "rich", "typer")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _environment() -> dict[str, Any]:
    import torch

    from .model_spec import PRESETS

    native: dict[str, Any] = {"built": False}
    try:
        from ._native import lib
    except ImportError as error:
        native["why"] = str(error)
    else:
        native = {"built": True, "functions": sum(name.startswith("up_") for name in dir(lib))}
    devices = [
        {"name": torch.cuda.get_device_name(i), "bytes": torch.cuda.get_device_properties(i).total_memory}
        for i in range(torch.cuda.device_count())
    ]
    return {
        "schema": 1,
        "versions": _versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "native": native,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": devices,
        "presets": list(PRESETS),
    }


@app.command(epilog="Example:\n\n  unifiedpool env --json -")
def env(json_path: Json = None) -> None:
    """Print versions, devices, what is compiled, and the model presets."""
    report = _environment()
    if json_path is not None:
        _write_json(report, json_path)
    if json_path == "-":
        return
    table = Table("what", "value", show_header=False)
    table.add_row("python", f"{report['python']}, {report['system']}")
    for name, version in report["versions"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    native = report["native"]
    table.add_row(
        "C core", f"built, {native['functions']} functions" if native["built"] else f"[red]{native['why']}[/]"
    )
    for device in report["devices"]:
        table.add_row("device", f"{device['name']}, {format_bytes(device['bytes'])}")
    if not report["devices"]:
        table.add_row("device", "CPU only")
    table.add_row("presets", ", ".join(report["presets"]))
    out.print(table)


# -- trace ----------------------------------------------------------------------------------------------------------

trace_app = typer.Typer(help="Describe, generate and convert request traces.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")

TracePath = Annotated[Path, typer.Argument(help="Mooncake JSONL, Azure CSV or our JSONL; gzip too.")]
FormatOption = Annotated[str | None, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a damaged file instead of leaving lines out.")]


def _open_trace(path: Path, format: str | None, strict: bool) -> Trace:
    """Read a trace and say on stderr what was wrong with it."""
    if format is not None and format not in FORMATS:
        raise typer.BadParameter(f"{format!r}; choose one of {', '.join(FORMATS)}")
    try:
        trace = read_trace(path, format=format, strict=strict)
    except UnifiedPoolError as error:
        _refuse(error)
    for problem in trace.problems[:10]:
        err.print(f"[yellow]warning:[/] {escape(f'{path}: {problem}')}", highlight=False, soft_wrap=True)
    if len(trace.problems) > 10:
        err.print(f"[yellow]warning:[/] {len(trace.problems) - 10} more", highlight=False)
    return trace


def _finish(trace: Trace) -> None:
    """Let the exit code tell that lines were damaged."""
    if trace.problems:
        raise typer.Exit(EXIT_PARTIAL)


@trace_app.command(epilog="Example:\n\n  unifiedpool trace describe requests.jsonl.gz")
def describe(path: TracePath, format: FormatOption = None, strict: Strict = False, json_path: Json = None) -> None:
    """Count requests, lengths, and what an endless prefix cache could reuse."""
    trace = _open_trace(path, format, strict)
    summary = trace.summary()
    if json_path is not None:
        problems = [asdict(problem) for problem in trace.problems]
        _write_json({"schema": 1, "format": trace.format, **asdict(summary), "problems": problems}, json_path)
    if json_path != "-":
        _say(f"{trace.name}: {trace.format}, {summary.requests:,} requests in {summary.duration_s:,.1f} s")
        table = _table("total", "least", "p50", "p90", "p99", "most", "tokens", title="", numbers=6)
        for what, total, percentiles in (
            ("input", summary.input_tokens, summary.input_percentiles),
            ("output", summary.output_tokens, summary.output_percentiles),
        ):
            table.add_row(f"{total:,}", *(f"{value:,}" for value in percentiles), what)
        out.print(table)
        if summary.block_tokens:
            _say(
                f"{summary.blocks:,} blocks of {summary.block_tokens} tokens, {summary.distinct_blocks:,} distinct; an "
                f"endless cache of pages would reuse {summary.reusable_share:.1%} of the prompt tokens"
            )
        else:
            _say("no keys: no prefix can be shared")
    _finish(trace)


@trace_app.command(epilog="Example:\n\n  unifiedpool trace generate chat.jsonl.gz --requests 5000 --rate 4 --seed 1")
def generate(
    path: Annotated[Path, typer.Argument(help="Where to; .gz compresses.")],
    requests: Annotated[int, typer.Option(help="How many.")] = 5000,
    rate: Annotated[float, typer.Option(help="Mean requests a second.")] = 3.0,
    long_share: Annotated[float, typer.Option(help="Share of sessions that begin with a long document.")] = 0.25,
    turns: Annotated[float, typer.Option(help="Mean turns of a session.")] = 4.0,
    think: Annotated[float, typer.Option(help="Mean seconds between turns.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
) -> None:
    """Generate chat sessions with shared system prompts and write them in our format."""
    try:
        made = generate_trace(requests, seed=seed, rate=rate, long_share=long_share, turns=turns, think_s=think)
        write_trace(made, path)
    except UnifiedPoolError as error:
        _refuse(error)
    _say(f"{path}: {len(made.requests):,} requests in {made.requests[-1].arrival_s:,.1f} s")


@trace_app.command(epilog="Example:\n\n  unifiedpool trace convert azure.csv requests.jsonl --to jsonl")
def convert(
    path: TracePath,
    target: Annotated[Path, typer.Argument(help="Where to; .gz compresses.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "jsonl",
    format: FormatOption = None,
    strict: Strict = False,
) -> None:
    """Write a trace in another format."""
    trace = _open_trace(path, format, strict)
    try:
        write_trace(trace, target, format=to)  # type: ignore[arg-type]
    except UnifiedPoolError as error:
        _refuse(error)
    _say(f"{target}: {len(trace.requests):,} requests, {to}")
    _finish(trace)


# -- replay ---------------------------------------------------------------------------------------------------------


def _progress_bars(title: str, total: int) -> tuple[Progress, Callable[[Any, int], None]]:
    """Make one bar a task; they appear as tasks report."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    known: dict[Any, Any] = {}

    def report(task: Any, done: int) -> None:
        if task not in known:
            known[task] = bars.add_task(f"{title}{task}", total=total)
        bars.update(known[task], completed=done)

    return bars, report


def _policies(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, what: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: {what} are numbers with commas between them") from None


@app.command(
    epilog="Examples:\n\n  unifiedpool replay t.jsonl --model kimi-k3 --tp 8 --cache 60GiB --state-dtype bfloat16\n\n"
    "  unifiedpool replay azure.csv --model qwen3-next-80b --cache 40GiB --policies static:0.9,unified --clients 64\n\n"
    "  unifiedpool replay t.jsonl.gz --model ./config.json --cache 40GiB --budgets 20GiB,80GiB --plots out"
)
def replay(
    path: TracePath,
    model: Annotated[str, typer.Option(help="A preset, a config.json, or its folder.")],
    cache: Cache = None,
    memory: Memory = None,
    weights: Weights = None,
    tp: Tp = 1,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    conv_dtype: ConvDtype = None,
    page: Page = None,
    strategy: Strategy = "auto",
    overlap: Overlap = True,
    policies: Annotated[str, typer.Option(help="Commas between them.")] = ",".join(DEFAULT_POLICIES),
    ratios: Annotated[str, typer.Option(help="Ratios that the policy 'static' tries.")] = ",".join(
        map(str, DEFAULT_RATIOS)
    ),
    budgets: Annotated[str, typer.Option(help="More memory sizes, for hit rate against memory.")] = "",
    requests: Annotated[int, typer.Option(help="Only the first so many; 0: all.")] = 0,
    speed: Annotated[float, typer.Option(help="Let them arrive so many times as fast.")] = 1.0,
    clients: Annotated[int, typer.Option(help="Closed loop: so many requests in the system; 0: arrival times.")] = 0,
    chunk: Annotated[int, typer.Option(help="Prefill tokens of a step.")] = 6144,
    max_running: Annotated[int, typer.Option(help="Most running requests, under every policy.")] = 512,
    headroom: Annotated[int, typer.Option(help="Output tokens that admission wants room for.")] = 256,
    flops: Annotated[float, typer.Option(help="FLOP/s that a GPU reaches.")] = DEFAULT_HARDWARE.flops,
    bandwidth: Annotated[float, typer.Option(help="Bytes/s that a GPU reaches.")] = DEFAULT_HARDWARE.bandwidth,
    step_overhead: Annotated[float, typer.Option(help="Seconds of a step beside compute and memory.")] = 0.002,
    flops_per_token: Annotated[float | None, typer.Option(help="Of the model; default: by preset.")] = None,
    flops_per_token_context: Annotated[float | None, typer.Option(help="Per token and token of context.")] = None,
    weight_bytes: Annotated[str | None, typer.Option(help="Weights that a GPU reads in a step.")] = None,
    format: FormatOption = None,
    strict: Strict = False,
    jobs: Annotated[int, typer.Option(help="Processes; 0: as many as there are cores.")] = 0,
    plots: Annotated[Path | None, typer.Option(help="Write plots into this folder.")] = None,
    json_path: Json = None,
) -> None:
    """Run a trace through the planner, the prefix cache and other engines' policies, and compare.

    Policies: static (tries --ratios, shows the best), static:R, two-ended, two-ended:pack, blocks, lcm, unified:NAME.

    NAME is how the prefix cache evicts: value (the default), lru, sglang, path_cap, marconi.

    Ctrl-C reports what there is.
    """
    chosen, tried = _policies(policies), _numbers(ratios, "ratios")
    sizes = [parse_size(part) for part in budgets.split(",") if part.strip()]
    try:
        if json_path is not None:
            _check_json(json_path)
        if plots is not None:
            check_plots(plots)
    except UnifiedPoolError as error:
        _refuse(error)
    trace = _open_trace(path, format, strict)
    spec_options = {"tp": tp, "kv_dtype": kv_dtype, "state_dtype": state_dtype, "conv_dtype": conv_dtype}
    options = {"page_size": page, "strategy": strategy, "overlap": overlap}
    try:
        server = _server(model, _cache_bytes(cache, memory, weights), spec_options, options)
        costs = default_costs(server)
        changes = {"flops_per_token": flops_per_token, "flops_per_token_context": flops_per_token_context}
        changes["weight_bytes"] = None if weight_bytes is None else float(parse_size(weight_bytes))
        given = {name: value for name, value in changes.items() if value is not None}
        if given:
            costs = replace(costs, **given, source="given")
        trace = trace.faster(speed) if speed != 1.0 else trace
        trace = trace.head(requests) if requests > 0 else trace
        bars, progress = _progress_bars("", len(trace.requests))
        with bars:
            report = run_replay(
                trace,
                server,
                costs,
                Hardware(flops, bandwidth, step_overhead),
                Options(chunk, max_running, headroom, clients),
                policies=chosen,
                ratios=tried,
                budgets=sizes,
                jobs=jobs if jobs > 0 else os.cpu_count() or 1,
                progress=progress,
            )
        if json_path is not None:
            _write_json(report, json_path)
        if plots is not None and report["runs"]:
            for file in plot_report(report, plots):
                err.print(f"plot: {file}", highlight=False)
    except UnifiedPoolError as error:
        _refuse(error)
    if json_path != "-":
        _print_replay(report, server, costs)
    _finish_replay(report, trace, strict)


def _finish_replay(report: dict[str, Any], trace: Trace, strict: bool) -> None:
    """Say what was left out and set the exit code."""
    for failure in report["failed"]:
        err.print(f"[yellow]warning:[/] {failure['policy']}: {escape(failure['why'])}", highlight=False, soft_wrap=True)
    too_large = {line for run in report["runs"] for line in run["requests"]["too_large_lines"]}
    for run in report["runs"]:
        lines = run["requests"]["too_large_lines"]
        if lines:
            shown = ", ".join(map(str, lines[:10])) + (", ..." if len(lines) > 10 else "")
            text = f"{run['policy']}: {len(lines)} requests are larger than its memory and were refused: lines {shown}"
            err.print(f"[yellow]warning:[/] {text}", highlight=False, soft_wrap=True)
    if not report["complete"]:
        err.print("[yellow]interrupted:[/] this is what there was", highlight=False)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not report["runs"] or (strict and too_large):
        raise typer.Exit(EXIT_REFUSED)
    if trace.problems or too_large or report["failed"]:
        raise typer.Exit(EXIT_PARTIAL)


def _print_replay(report: dict[str, Any], server: Server, costs: Costs) -> None:
    size = server.cache_bytes
    runs = [run for run in report["runs"] if run["cache_bytes"] == size]
    if not runs:
        return
    best = best_static(runs)
    shown = [run for run in runs if run is best or not run["policy"].startswith("static") or best is None]
    swept = [run for run in runs if run["policy"].startswith("static")]
    _say(
        f"{report['trace']['name']}: {report['trace']['requests']:,} requests; {server.spec.name}, "
        f"tp {server.spec.tp}, {format_bytes(size)} of caches per GPU; costs: {costs.source}"
    )
    headings = ("req/s", "tok/s", "running", "p50", "p95", "p99", "hits", "retr.", "policy")
    table = _table(*headings, title="What requests see (p: time to the first token)", numbers=8)
    for run in shown:
        seen, ttft = run["throughput"], run["ttft_s"]
        table.add_row(
            f"{seen['requests_per_s']:.3f}",
            f"{seen['output_tokens_per_s']:,.0f}",
            f"{run['concurrency']['mean']:.1f}",
            _seconds(ttft["p50"]),
            _seconds(ttft["p95"]),
            _seconds(ttft["p99"]),
            f"{run['tokens']['hit_rate']:.1%}",
            f"{run['retractions']:,}",
            run["policy"],
        )
    out.print(table)
    headings = ("useful", "tails", "padding", "free", "moved", "worst", "stalls", "host", "policy")
    table = _table(*headings, title="What memory does", numbers=8)
    for run in shown:
        memory, moves, host = run["memory"], run["movement"], run["host"]
        table.add_row(
            *(f"{memory[part]:.1%}" for part in ("useful", "page_tails", "padding", "free")),
            f"{moves['moved_share']:.2%}",
            format_bytes(moves["worst_window"]),
            f"{moves['stalls']:,}",
            _seconds(host["allocator_s"] + host["cache_s"]),
            run["policy"],
        )
    out.print(table)
    _say("moved: bytes moved over bytes allocated; worst: bytes moved to open room once; host: allocator and tree")
    if len(swept) > 1 and best is not None:
        tried = ", ".join(f"{run['policy'][7:]}: {run['throughput']['requests_per_s']:.3f}" for run in swept)
        _say(f"static ratios and their requests a second: {tried}; best {best['policy'][7:]}")
    for run in shown:
        # What was interrupted has seen other parts of the trace.
        if best is not None and best["requests"]["done"] and run is not best and report["complete"]:
            found = compare(run, best)
            _say(
                f"{run['policy']} against {best['policy']}: throughput x{found['throughput']:.3f}, TTFT p95 "
                f"x{found['ttft_p95']:.3f}, hit rate {found['hit_rate']:+.2%}, running x{found['concurrency']:.2f}"
            )
    if best is not None and not best["requests"]["done"]:
        _say(f"{best['policy']} finished no request: nothing to compare with")
    wrong = sum(run["refusals_against_formula"] for run in runs)
    if wrong:
        err.print(f"[red]{wrong} refusals that the capacity formula denies: please report this[/]")
    if any(run["cache_bytes"] != size for run in report["runs"]):
        sizes = sorted({run["cache_bytes"] for run in report["runs"]})
        table = _table("policy", *(format_bytes(each) for each in sizes), title="Hit rate by memory", numbers=0)
        for policy in dict.fromkeys(run["policy"] for run in report["runs"]):
            found_rates = {r["cache_bytes"]: r["tokens"]["hit_rate"] for r in report["runs"] if r["policy"] == policy}
            table.add_row(policy, *(f"{found_rates[each]:.1%}" if each in found_rates else "-" for each in sizes))
        out.print(table)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


# -- demo -----------------------------------------------------------------------------------------------------------


@app.command(epilog="Example:\n\n  unifiedpool demo")
def demo(
    requests: Annotated[int, typer.Option(help="Requests of generated chat sessions.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
) -> None:
    """Show in half a minute what the unified pool is for: generated chat traffic, Qwen3-Next on one small GPU."""
    try:
        trace = generate_trace(requests, seed=seed, rate=4.0)
        server = Server.make(load_model("qwen3-next-80b"), 16 << 30, page_size=64)
        _say("Chat sessions with shared system prompts; a quarter of them begin with a long document.")
        bars, progress = _progress_bars("", requests)
        with bars:
            report = run_replay(
                trace,
                server,
                default_costs(server),
                DEFAULT_HARDWARE,
                Options(),
                policies=("static:0.9", "static:0.3", "two-ended", "unified"),
                progress=progress,
            )
    except UnifiedPoolError as error:
        _refuse(error)
    _print_replay(report, server, default_costs(server))
    _finish_replay(report, trace, False)


def main() -> None:
    """Run the command."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
