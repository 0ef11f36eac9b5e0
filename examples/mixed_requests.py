"""Serve a mix of long and short requests from one byte buffer, beside the static split that it replaces.

The same requests run four times on one model: each alone through transformers' own cache (the reference), through a
static pool at the engines' default ratio of 0.9, through a static pool at its best ratio, and through the unified pool,
the last three with equal bytes. The tokens must agree; the unified pool must hold more requests at once.

    python examples/mixed_requests.py                       # a tiny, randomly initialised Qwen3-Next
    python examples/mixed_requests.py --model kimi_linear   # another tiny architecture
    python examples/mixed_requests.py --model ~/models/Qwen3-Next-80B-A3B --dtype bfloat16

Exit status: 0; 1 when a token differs from the reference where its two best logits are not a near-tie; 2 for what
cannot run; 130 after ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Tiny operations: a second thread costs more than it saves. A real model is told otherwise with --threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from unifiedpool.engine import Engine, EngineConfig, ModelRunner, SamplingParams, StaticPool, StepStats, StubRunner
from unifiedpool.engine.reference import Comparison, Reference, compare, generate_alone
from unifiedpool.errors import UnifiedPoolError, format_bytes
from unifiedpool.integrations import tiny_models
from unifiedpool.layout import Layout
from unifiedpool.model_spec import ModelSpec
from unifiedpool.pool import Pool

# Log-normal lengths through the median and the 95th percentile of the Azure LLM inference trace of 2023, conversations
# (19,366 requests), and of Mooncake's conversation trace (12,031 requests); cut at the longest request in each.
#            prompt: median, sigma, longest     outputs: median, sigma, longest
CONVERSATION = ((1020, 0.843, 14050), (129, 0.761, 1000))
LONG = ((6909, 1.060, 126195), (350, 0.420, 2000))
LONG_EVERY = 20  # one request in twenty, at a random place in each twenty

# Lengths are divided by one number, so that the bytes of a state are worth as many tokens as in Nemotron 3 Nano with an
# fp8 KV cache (47 MiB against 3 KiB a token); a tiny model then meets the proportions of a large one.
TOKENS_PER_STATE = 16000
LONGEST = 1 / 6  # no request takes more of the arena than this, or some static splits could not serve it at all


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    outputs: int


@dataclass
class Run:
    """One way to serve the requests, in numbers."""

    name: str
    ratio: float | None = None
    state_share: float | None = None
    seconds: float = 0.0
    steps: int = 0
    mean_running: float = 0.0
    mean_running_queued: float = 0.0
    peak_running: int = 0
    utilisation: float = 0.0
    retractions: int = 0
    moved_bytes: int = 0
    identical: int = 0
    near_ties: int = 0
    different: int = 0
    history: list[StepStats] = field(default_factory=list)


def draw_lengths(count: int, seed: int, scale: float, longest: int) -> list[Lengths]:
    """Draw the mix.

    Args:
        count: requests.
        seed: the same seed gives the same mix.
        scale: real lengths are divided by this.
        longest: most tokens of a request.
    """
    generator = random.Random(seed)
    mix = []
    place = 0
    for index in range(count):
        if index % LONG_EVERY == 0:
            place = index + generator.randrange(LONG_EVERY)
        parts = []
        for median, sigma, most in LONG if index == place else CONVERSATION:
            tokens = min(median * math.exp(sigma * generator.gauss(0, 1)), most) / scale
            parts.append(max(1, round(tokens)))
        outputs = min(parts[1], max(1, longest // 4))
        mix.append(Lengths(max(1, min(parts[0], longest - outputs)), outputs))
    return mix


def read_text() -> tuple[bytes, str]:
    """Return real text that lies on any machine, and where it came from."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    for folder, pattern in (
        (standard / "pydoc_data", "topics.py"),
        (Path("/usr/share/common-licenses"), "*"),
        (Path(__file__).parent.parent / "unifiedpool", "*.py"),
    ):
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        text = b"\n".join(path.read_bytes() for path in files)
        if len(text) > 20_000:
            return text, str(folder)
    return Path(__file__).read_bytes(), __file__


def make_prompts(mix: Sequence[Lengths], seed: int, tokenizer: Any) -> list[list[int]]:
    """Cut one prompt per request out of real text: bytes are tokens unless there is a tokenizer."""
    text, _ = read_text()
    tokens: Sequence[int] = text if tokenizer is None else tokenizer.encode(text.decode("utf-8", "replace"))
    generator = random.Random(seed + 1)
    prompts = []
    for lengths in mix:
        start = generator.randrange(max(1, len(tokens) - lengths.prompt))
        prompt = list(tokens[start : start + lengths.prompt])
        prompts.append((prompt * (lengths.prompt // len(prompt) + 1))[: lengths.prompt])
    return prompts


def load_model(name: str, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """Return a model in eval mode, and its tokenizer (None: bytes are tokens)."""
    import transformers

    transformers.logging.set_verbosity_error()
    if Path(name).is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        try:
            return model, transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError):
            return model, None  # a folder of weights alone
    config = tiny_models.config(name)
    config.initializer_range = 0.05  # logits about 1 in size: rounding stays far below the distance between tokens
    if name == "qwen3_next":
        # A state worth 960 tokens instead of 72: prompts of tens to hundreds of tokens instead of a handful.
        config.linear_key_head_dim = config.linear_value_head_dim = 32
        config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
        config.num_key_value_heads = 1
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), None


def make_layout(model: Any, page_size: int) -> Layout:
    """Lay the model's caches out as transformers keeps them."""
    dtype = str(model.dtype).removeprefix("torch.")
    spec = ModelSpec.from_config(model.config, kv_dtype=dtype, conv_dtype=dtype, convention="transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # padding is printed with the layout
        return spec.layout(page_size=page_size)


@dataclass(frozen=True)
class Setting:
    """What runs in how many bytes."""

    arena_bytes: int
    slot_bytes: int
    tokens_per_state: float
    scale: float
    mix: list[Lengths]
    config: EngineConfig


def token_bytes_of(layout: Layout) -> float:
    """Return the bytes of a token over all page kinds."""
    return sum(kind.stride_bytes / kind.page_size for kind in layout.kinds if kind.page_size)


def size_up(model: Any, layout: Layout, options: argparse.Namespace, count: int) -> Setting:
    """Choose the arena, and scale the lengths to the model."""
    slot_bytes = sum(kind.stride_bytes for kind in layout.kinds if not kind.page_size)
    token_bytes = token_bytes_of(layout)
    # Without states (gemma3, gpt-oss) a state's place is taken by as many bytes of KV.
    unit_bytes = slot_bytes or int(64 * token_bytes)
    arena_bytes = options.states * unit_bytes + (0 if slot_bytes else layout.null_bytes)
    tokens_per_state = unit_bytes / token_bytes if token_bytes else 64.0
    scale = options.scale or max(1.0, TOKENS_PER_STATE / tokens_per_state)
    longest = max(8, int(LONGEST * arena_bytes / token_bytes)) if token_bytes else 1 << 20
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    mix = draw_lengths(count, options.seed, scale, min(longest, limit))
    config = EngineConfig(chunk_tokens=options.chunk, prefill_tokens=4 * options.chunk, headroom=8, prefix_cache=False)
    return Setting(arena_bytes, slot_bytes, tokens_per_state, scale, mix, config)


def serve(
    pool: Pool,
    runner: Any,
    requests: Sequence[tuple[list[int], Lengths]],
    config: EngineConfig,
    sampling: SamplingParams,
    on_step: Callable[[StepStats], None] | None = None,
) -> tuple[Engine, Run]:
    """Submit everything at once and step until all is done."""
    engine = Engine(runner, pool, config)
    for prompt, lengths in requests:
        engine.submit(prompt, lengths.outputs, sampling)
    run = Run(repr(pool))
    started = time.perf_counter()

    def note(stats: StepStats) -> None:
        run.history.append(stats)
        if on_step is not None:
            on_step(stats)

    engine.run(note)
    run.seconds = time.perf_counter() - started
    totals = engine.totals
    run.steps, run.peak_running, run.mean_running = totals.steps, totals.peak_running, totals.mean_running
    run.retractions, run.moved_bytes = totals.retractions, totals.moved_bytes
    queued = [stats for stats in run.history if stats.waiting] or run.history
    run.mean_running_queued = sum(stats.running for stats in queued) / len(queued)
    live = sum(sum(stats.live_bytes.values()) for stats in queued) / len(queued)
    run.utilisation = live / (pool.planner.arena_bytes - pool.layout.null_bytes)
    return engine, run


def best_ratio(
    layout: Layout, arena_bytes: int, windows: dict[str, int], mix: Sequence[Lengths], config: EngineConfig
) -> float | None:
    """Try every split on the schedule alone, which depends on lengths and not on tokens."""
    slot_bytes = sum(kind.stride_bytes for kind in layout.kinds if not kind.page_size)
    requests = [([0] * lengths.prompt, lengths) for lengths in mix]
    best: tuple[float, float] | None = None
    for slots in range(1, arena_bytes // slot_bytes):
        ratio = (slots + 0.001) * slot_bytes / (arena_bytes - (slots + 0.001) * slot_bytes)
        try:
            pool = StaticPool(layout, arena_bytes, ratio=ratio)
            _, run = serve(pool, StubRunner(2, windows), requests, config, SamplingParams())
        except UnifiedPoolError:
            continue  # a request does not fit its part of this split at all
        if best is None or run.mean_running > best[0]:
            best = (run.mean_running, ratio)
    return best[1] if best else None


def judge(run: Run, answers: Sequence[list[int]], references: Sequence[Reference]) -> None:
    """Count identical answers, near-ties and true differences."""
    found: list[Comparison] = [compare(*pair) for pair in zip(answers, references, strict=True)]
    run.identical = sum(comparison.identical for comparison in found)
    run.near_ties = sum(comparison.near_tie for comparison in found)
    run.different = len(found) - run.identical - run.near_ties


def show_table(console: Console, runs: Sequence[Run], count: int) -> None:
    """Print the comparison."""
    table = Table(title=f"{count} requests", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("memory", no_wrap=True)
    for heading in (
        "mean\nrunning",
        "while\nqueued",
        "peak",
        "steps",
        "retrac-\ntions",
        "utili-\nsation",
        "bytes\nmoved",
    ):
        table.add_column(heading, justify="right")
    table.add_column("tokens\nidentical", justify="right")
    table.add_column("seconds", justify="right")
    for run in runs:
        ties = f" (+{run.near_ties} near-ties)" if run.near_ties else ""
        wrong = f" [red]{run.different} differ[/red]" if run.different else ""
        table.add_row(
            f"[bold green]{run.name}[/bold green]" if run.name == "unified" else run.name,
            f"{run.mean_running:.2f}",
            f"{run.mean_running_queued:.2f}" if run.history else "-",
            str(run.peak_running),
            str(run.steps),
            str(run.retractions) if run.history else "-",
            f"{run.utilisation:.1%}" if run.history else "-",
            format_bytes(run.moved_bytes) if run.history else "-",
            f"{run.identical}/{count}{ties}{wrong}" if run.history else "reference",
            f"{run.seconds:.1f}",
        )
    console.print(table)
    console.print(
        "mean running: requests that hold memory, over all steps; while queued: over the steps with requests waiting; "
        "utilisation: live bytes over usable bytes, over the same steps.",
        style="dim",
    )


def plot(path: Path, runs: Sequence[Run], layout: Layout, arena_bytes: int, title: str) -> None:
    """Draw the memory of every run over time, and the requests that they held."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    colours = {"state": "#d1495b", "full": "#00798c", "swa": "#edae49"}
    lines = ("#8d99ae", "#f4a261", "#1b4332")
    names = {"state": "state slots", "full": "KV pages", "swa": "window pages"}
    steps = max(run.steps for run in runs)
    figure, axes = pyplot.subplots(
        len(runs) + 1,
        1,
        figsize=(10, 2.1 * len(runs) + 3),
        sharex=True,
        layout="constrained",
        height_ratios=[1] * len(runs) + [1.25],
    )
    for axis, run in zip(axes, runs, strict=False):
        shares = [[stats.live_bytes[kind] / arena_bytes for stats in run.history] for kind in layout.names]
        shares.append([stats.promised_bytes / arena_bytes for stats in run.history])
        areas = axis.stackplot(
            range(len(run.history)),
            shares,
            step="post",
            linewidth=0,
            colors=[*(colours.get(kind, "#7a5195") for kind in layout.names), "#d9dee3"],
        )
        axis.axhline(1, color="#333333", linewidth=0.8)
        if run.state_share is not None:
            axis.axhline(run.state_share, color="#333333", linewidth=1, linestyle="--")
            axis.annotate(
                "split", (steps, run.state_share), xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=9
            )
        axis.set_ylim(0, 1.04)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.set_ylabel("share of arena")
        axis.set_title(
            f"{run.name}: {run.mean_running:.1f} requests at once, {run.utilisation:.0%} of the bytes in use while "
            "requests wait",
            loc="left",
            fontsize=10,
        )
    labels = [*(names.get(kind, kind) for kind in layout.names), "promised to running prompts"]
    figure.legend(areas, labels, loc="upper right", ncols=len(labels), frameon=False, fontsize=9)
    last = axes[-1]
    for run, colour in zip(runs, lines, strict=False):
        last.step(
            range(run.steps),
            [stats.running for stats in run.history],
            where="post",
            color=colour,
            linewidth=1.6,
            label=f"{run.name} ({run.steps} steps)",
        )
    last.set_ylabel("requests running")
    last.set_xlabel("engine step")
    last.set_ylim(bottom=0)
    last.set_xlim(0, steps)
    last.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    last.set_title("requests that hold memory", loc="left", fontsize=10)
    last.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(runs), frameon=False, fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3_next", help=f"a transformers folder, or one of {', '.join(tiny_models.NAMES)}"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--requests", type=int, default=240, help="how many (default: 240)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and random weights (default: 0)")
    parser.add_argument("--states", type=int, default=24, help="size of the arena in states (default: 24)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default: 16)")
    parser.add_argument("--chunk", type=int, default=256, help="prefill chunk in tokens (default: 256)")
    parser.add_argument("--ratio", type=float, default=0.9, help="of the first static pool (default: 0.9)")
    parser.add_argument("--scale", type=float, help="divide real lengths by this (default: fitted to the model)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default); else seeded sampling")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model (default: 1)")
    parser.add_argument("--plot", type=Path, default=Path("out/mixed_requests.png"), help="where to draw the memories")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--quick", action="store_true", help="a sixth of the requests")
    options = parser.parse_args(arguments)
    for name in ("requests", "states", "page_size", "chunk", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.scale is not None and not options.scale > 0:
        parser.error(f"--scale is {options.scale}; it must be above 0")
    if not 0 < options.ratio < math.inf:
        parser.error(f"--ratio is {options.ratio}; it must be a finite number above 0")
    if not Path(options.model).is_dir() and options.model not in tiny_models.NAMES:
        parser.error(f"--model {options.model!r} is no folder and none of {', '.join(tiny_models.NAMES)}")
    for path in filter(None, (options.plot, options.json)):  # written last: minutes of work would be lost
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot write {path}: {error.strerror}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; see the module's head."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120, soft_wrap=False)
    torch.set_num_threads(options.threads)
    count = max(1, options.requests // 6) if options.quick else options.requests
    try:
        return compare_pools(options, console, count)
    except UnifiedPoolError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}")
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


def compare_pools(options: argparse.Namespace, console: Console, count: int) -> int:
    """Do what the module's head says for `count` requests."""
    model, tokenizer = load_model(options.model, getattr(torch, options.dtype), options.seed)
    layout = make_layout(model, options.page_size)
    setting = size_up(model, layout, options, count)
    arena_bytes, mix, config = setting.arena_bytes, setting.mix, setting.config
    prompts = make_prompts(mix, options.seed, tokenizer)
    requests = list(zip(prompts, mix, strict=True))
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)

    console.print(f"[bold]{options.model}[/bold] in {options.dtype}, prompts from {read_text()[1]}")
    console.print(layout.explain(), style="dim", highlight=False)
    console.print(
        f"arena {format_bytes(arena_bytes)} = {options.states} states; a state is worth {setting.tokens_per_state:.0f} "
        f"tokens; real lengths / {setting.scale:.1f}: {sum(m.prompt for m in mix):,} prompt and "
        f"{sum(m.outputs for m in mix):,} output tokens, longest prompt {max(m.prompt for m in mix):,}"
    )
    bar = Progress(
        TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    outputs = sum(lengths.outputs for lengths in mix)
    with bar:
        task = bar.add_task("one by one (reference)", total=outputs)
        started = time.perf_counter()
        references = []
        for index, (prompt, lengths) in enumerate(requests):
            references.append(
                generate_alone(
                    model, prompt, lengths.outputs, chunk_tokens=options.chunk, sampling=sampling, request_id=index
                )
            )
            bar.advance(task, lengths.outputs)
        alone = Run(
            "one by one",
            seconds=time.perf_counter() - started,
            steps=sum(math.ceil(lengths.prompt / options.chunk) + lengths.outputs - 1 for lengths in mix),
            mean_running=1.0,
            peak_running=1,
        )
        runs = []
        windows = dict(ModelRunner(model, Pool(layout, arena_bytes)).windows)
        plans: list[tuple[str, float | None]] = [("unified", None)]
        if setting.slot_bytes and token_bytes_of(layout):
            task = bar.add_task("splits tried on the schedule", total=1)
            best = best_ratio(layout, arena_bytes, windows, mix, config)
            bar.advance(task)
            if best is not None:
                plans.insert(0, (f"static, best ratio {best:.2g}", best))
            plans.insert(0, (f"static, ratio {options.ratio:g}", options.ratio))
        for name, ratio in plans:
            pool = Pool(layout, arena_bytes) if ratio is None else StaticPool(layout, arena_bytes, ratio=ratio)
            task = bar.add_task(name, total=outputs)
            progress = _advance(bar, task)
            engine, run = serve(pool, ModelRunner(model, pool), requests, config, sampling, progress)
            run.name, run.ratio = name, ratio
            if isinstance(pool, StaticPool):
                run.state_share = pool.planner.num_slots * setting.slot_bytes / arena_bytes
            judge(run, [engine.outputs(index) for index in range(count)], references)
            runs.append(run)
    show_table(console, [alone, *runs], count)
    unified = runs[-1]
    for run in runs[:-1]:
        console.print(
            f"unified holds [bold]{unified.mean_running / run.mean_running:.2f}x[/bold] the requests of {run.name} at "
            f"equal bytes, and is done in {unified.steps / run.steps:.2f} of the steps"
        )
    plot(options.plot, runs, layout, arena_bytes, f"{options.model}: {count} requests in {format_bytes(arena_bytes)}")
    console.print(f"memories over time: {options.plot}")
    if options.json:
        rows = [{k: v for k, v in asdict(run).items() if k != "history"} for run in (alone, *runs)]
        options.json.write_text(json.dumps({"model": options.model, "requests": count, "runs": rows}, indent=2) + "\n")
    return 1 if options.dtype == "float32" and any(run.different for run in runs) else 0


def _advance(bar: Progress, task: Any) -> Callable[[StepStats], None]:
    done = 0

    def advance(stats: StepStats) -> None:
        # Tokens finished so far cannot fall, retractions or not: a retracted request keeps its outputs.
        nonlocal done
        done += stats.sampled_tokens
        bar.update(task, completed=done)

    return advance


if __name__ == "__main__":
    sys.exit(main())
