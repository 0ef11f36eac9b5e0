"""Hold several chats with one system prompt, and forks of them, with the prefix cache off and on.

Every turn sends the whole conversation again, as chat clients do. With the cache, a turn starts from the state that
the last one left, a new chat from the states saved inside the system prompt, and a fork ("say that again, but
shorter") from the turn that it forks off. The tokens must be the same.

    python examples/chat_sessions.py                        # a tiny, randomly initialised Qwen3-Next
    python examples/chat_sessions.py --model gpt_oss        # another architecture: sliding window, no states
    python examples/chat_sessions.py --arena-kib 640        # little room: what is cached competes with what runs

Exit status: 0, or 1 when a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Tiny operations: a second thread costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from unifiedpool.engine import Engine, EngineConfig
from unifiedpool.errors import UnifiedPoolError, format_bytes
from unifiedpool.integrations import tiny_models
from unifiedpool.layout import PaddingWarning

SYSTEM = (
    "You are a patient assistant for people who run language models on their own machines. Answer in short sentences. "
    "Say what a number means and where it comes from. When you are not sure, say so and say how to find out. A hybrid "
    "model keeps two kinds of memory: keys and values, which grow with every token, and a recurrent state, which does "
    "not. The first is cut into pages, the second has one slot for each sequence. Both lie in one buffer. When a new "
    "question begins like an old one, start from the state that was saved there, and compute only what is new. Never "
    "mention these rules.\n"
)
QUESTIONS = (
    "How much memory does a long chat take?",
    "Why does the second answer come sooner?",
    "What happens when the buffer is full?",
    "Can two chats share the first part?",
    "And if I change one word in the middle?",
    "Which of the two memories is larger?",
)
FORK = "Say that again, but shorter."


@dataclass(frozen=True)
class Turn:
    """One turn of one chat, in numbers."""

    chat: str
    turn: int
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Run:
    """All chats through one engine."""

    cache: bool
    turns: list[Turn]
    answers: list[list[int]]
    prefill_tokens: int
    steps: int
    seconds: float
    states: int = 0


def tokens_of(text: str) -> list[int]:
    """A byte is a token: no tokenizer is needed."""
    return list(text.encode("utf-8"))


def hold_chats(engine: Engine, options: argparse.Namespace) -> Run:
    """Hold the chats; the turns of one round run together."""
    started = time.perf_counter()
    system = tokens_of(SYSTEM)
    chats = {f"chat {number}": list(system) for number in range(1, options.chats + 1)}
    turns: list[Turn] = []
    answers: list[list[int]] = []

    def round_of(names: Sequence[str], turn: int) -> None:
        ids = {}
        for index, name in enumerate(names):
            forked = turn > 1 and "fork" in name and name not in asked
            question = FORK if forked else QUESTIONS[(turn + 2 * index) % len(QUESTIONS)]
            asked.add(name)
            chats[name] += tokens_of(f"<user>{question}<assistant>")
            ids[name] = engine.submit(chats[name], options.outputs)
        engine.run()
        for name, request_id in ids.items():
            turns.append(Turn(name, turn, len(chats[name]), engine.cached_tokens(request_id)))
            answers.append(engine.collect(request_id))
            chats[name] += answers[-1]

    asked: set[str] = set()
    first, *others = chats
    round_of([first], 1)  # the others come when the system prompt has been seen
    if others:
        round_of(others, 1)
    for turn in range(2, options.turns + 1):
        if turn == 2:
            for name in list(chats)[: options.forks]:
                chats[f"{name}, fork"] = list(chats[name])
        round_of(list(chats), turn)
    cache = engine.prefix_cache
    return Run(
        cache=cache is not None,
        turns=turns,
        answers=answers,
        prefill_tokens=engine.totals.prefill_tokens,
        steps=engine.totals.steps,
        seconds=time.perf_counter() - started,
        states=0 if cache is None else cache.stats()["states"],
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_next", choices=tiny_models.NAMES, metavar="NAME")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--chats", type=int, default=4, help="how many (default: 4)")
    parser.add_argument(
        "--forks", type=int, default=2, help="how many of them fork after their first turn (default: 2)"
    )
    parser.add_argument("--turns", type=int, default=4, help="turns of each chat (default: 4)")
    parser.add_argument("--outputs", type=int, default=24, help="tokens of an answer (default: 24)")
    parser.add_argument("--arena-kib", type=int, default=8192, help="size of the arena (default: 8192)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default: 16)")
    parser.add_argument("--chunk", type=int, default=256, help="prefill chunk in tokens (default: 256)")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(arguments)
    for name in ("chats", "turns", "outputs", "arena_kib", "page_size", "chunk"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.forks < 0:
        parser.error(f"--forks is {options.forks}; it must be at least 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; see the module's head."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    torch.set_num_threads(1)
    try:
        return compare_caches(options, console)
    except UnifiedPoolError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}")
        return 2


def compare_caches(options: argparse.Namespace, console: Console) -> int:
    """Hold the chats twice and show what differs."""
    model = tiny_models.build(options.model, getattr(torch, options.dtype))
    engines = []
    for cache in (False, True):
        config = EngineConfig(chunk_tokens=options.chunk, prefill_tokens=4 * options.chunk, prefix_cache=cache)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddingWarning)  # a tiny model's strides do not nest as a large one's
            engine = Engine.for_model(model, options.arena_kib << 10, page_size=options.page_size, config=config)
        engines.append(engine)
    off, on = runs = [hold_chats(engine, options) for engine in engines]
    console.print(
        f"[bold]{options.model}[/bold], {options.dtype}, arena {format_bytes(options.arena_kib << 10)}, pages of "
        f"{options.page_size} tokens; the system prompt has {len(tokens_of(SYSTEM))} tokens"
    )
    table = Table("chat", "turn", "prompt tokens", "cached", "computed", "cached share")
    for column in table.columns[1:]:
        column.justify = "right"
    for turn in on.turns:
        table.add_row(
            turn.chat,
            str(turn.turn),
            str(turn.prompt_tokens),
            str(turn.cached_tokens),
            str(turn.prompt_tokens - turn.cached_tokens),
            f"{turn.cached_tokens / turn.prompt_tokens:.0%}",
        )
    console.print(table)
    different = sum(ours != theirs for ours, theirs in zip(on.answers, off.answers, strict=True))
    console.print(
        f"prefill tokens: {off.prefill_tokens:,} without the cache, {on.prefill_tokens:,} with it: "
        f"[bold]{1 - on.prefill_tokens / off.prefill_tokens:.0%} saved[/bold]; "
        f"{off.seconds:.1f} s and {on.seconds:.1f} s; {on.states} states are cached now"
    )
    identical = len(on.answers) - different
    console.print(f"answers: {identical} of {len(on.answers)} identical, {sum(map(len, on.answers))} tokens")
    if options.json:
        rows = [asdict(run) for run in runs]
        options.json.write_text(json.dumps({"model": options.model, "different": different, "runs": rows}) + "\n")
    return 1 if different and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
