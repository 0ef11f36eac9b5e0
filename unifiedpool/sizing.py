"""How many requests fit: the arithmetic of `unifiedpool plan`.

Four ways to share the same bytes between KV pages and states, at one context length:

    static   the arena is split once: states get `ratio / (1 + ratio)` of it, pages the rest; a running request is
             charged 3, 4 or 5 slots (`Tracker.static_divisor`), whether it uses them or not
    best     the same with the ratio that is best for this very length
    blocks   one pool of equal blocks, an attention block grown to the size of a state (vLLM's rule)
    unified  nested grids without a split, charged what a running request really allocates

The static numbers use bare bytes (no padding, no null cell, no pad slot); the unified ones pay all three. Pure
arithmetic: no planner is built, so a 141 GB arena costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import CapacityError, InvalidArgumentError, UnsupportedModelError, format_bytes
from .layout import Kind, Layout
from .model_spec import PRESETS, ModelSpec
from .prefix_cache.tracking import Tracker, checkpoint_grid

__all__ = [
    "DEFAULT_LENGTHS",
    "BlockRule",
    "LengthRow",
    "Server",
    "StaticSplit",
    "load_model",
    "plot_concurrency",
]

DEFAULT_LENGTHS = tuple(1 << power for power in range(7, 21))
SCHEMA_VERSION = 1

# SGLang's --swa-full-tokens-ratio: window tokens per token of the full kind in a static split.
_STATIC_WINDOW_RATIO = 0.8
# Tokens that vLLM's block sizes are multiples of: MLA kernels want 64.
_BLOCK_ALIGNMENT, _MLA_BLOCK_ALIGNMENT = 16, 64


def load_model(model: str, **options: Any) -> ModelSpec:
    """Return the spec of a preset, a `config.json` or the folder that holds one.

    Args:
        model: preset name (any case) or path.
        options: as for `ModelSpec.from_config`.

    Raises:
        UnsupportedModelError: neither a preset nor a path, or an architecture that is not known.
        ConfigFieldError: the config lacks a field.
    """
    name = model.lower()
    if name in PRESETS:
        return ModelSpec.preset(name, **options)
    if not Path(model).exists():
        raise UnsupportedModelError(f"{model!r} is neither a file nor a preset; presets are {', '.join(PRESETS)}")
    return ModelSpec.from_config(model, **options)


@dataclass(frozen=True, slots=True)
class StaticSplit:
    """One arena split once: `slots` states, `tokens` of KV, `window_tokens` of window KV.

    `running` is the cap that the slots put on running requests; None for a model without states.
    """

    slots: int
    running: int | None
    tokens: int
    window_tokens: int
    state_bytes: int
    kv_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes of states over bytes of KV (`--mamba-full-memory-ratio`)."""
        return self.state_bytes / self.kv_bytes if self.kv_bytes else math.inf


@dataclass(frozen=True, slots=True)
class BlockRule:
    """vLLM's hybrid rule: all blocks are equal, `block_tokens` tokens of one group of layers or a group's states."""

    block_tokens: int
    block_bytes: int
    state_blocks: int
    full_blocks: int
    window_blocks: int

    def blocks(self, *, states: int, tokens: int, window_tokens: int) -> int:
        """Return the blocks of one request."""
        return (
            states * self.state_blocks
            + self.full_blocks * -(-tokens // self.block_tokens)
            + self.window_blocks * -(-window_tokens // self.block_tokens)
        )


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Requests that fit at one context length, and the ratio that makes static best there.

    `unified` holds the states that the tracking strategy allocates, `unified_two_states` two as `blocks` does.
    """

    tokens: int
    request_bytes: int
    static: int
    best_static: int
    best_ratio: float | None
    blocks: int
    unified_two_states: int
    unified: int


@dataclass(frozen=True)
class Server:
    """One GPU's cache memory and how requests use it.

    Args:
        spec: the model, as one rank keeps it.
        layout: page sizes and padded strides.
        cache_bytes: memory for caches on this GPU.
        strategy: how checkpoints of states are tracked; "auto" is resolved by `Server.make`.
        overlap: whether the scheduler works ahead of the forward.
        dcp: decode context parallelism: each rank keeps one of `dcp` shares of a request's KV tokens.
        draft_tokens: tokens that speculative decoding verifies at once; 0 for none.
        ring_length: steps of ReplaySSM rings; 0 for none.
    """

    spec: ModelSpec
    layout: Layout
    cache_bytes: int
    strategy: str
    overlap: bool = True
    dcp: int = 1
    draft_tokens: int = 0
    ring_length: int = 0

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        cache_bytes: int,
        *,
        page_size: int | None = None,
        strategy: str = "auto",
        overlap: bool = True,
        dcp: int = 1,
        draft_tokens: int = 0,
        ring_length: int = 0,
    ) -> Server:
        """Choose the layout and check the options.

        Raises:
            InvalidArgumentError: a number out of range, an unknown strategy, speculation for a model without states.
            CapacityError: the memory does not hold one page and the states of one request.
        """
        for what, value, least in (
            ("cache_bytes", cache_bytes, 1),
            ("dcp", dcp, 1),
            ("draft_tokens", draft_tokens, 0),
            ("ring_length", ring_length, 0),
        ):
            if value < least:
                raise InvalidArgumentError(f"{what} is {value}; it must be at least {least}")
        layout = spec.layout(page_size)
        server = cls(spec, layout, cache_bytes, strategy, overlap, dcp, draft_tokens, ring_length)
        server = replace(server, strategy=server.tracker.resolved)
        if "state" not in spec.names and (draft_tokens or ring_length):
            raise InvalidArgumentError(f"{spec.name!r} has no states: leave out draft_tokens and ring_length")
        if server.unified_requests(1) < 1:
            raise CapacityError(
                f"{format_bytes(cache_bytes)} do not hold one request: {server.running_states} states of "
                f"{format_bytes(server.slot_bytes)} and one page; give more memory"
            )
        return server

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _kind(self, name: str) -> Kind | None:
        return self.layout.kind(name) if name in self.layout.names else None

    @cached_property
    def slot_bytes(self) -> int:
        """Bare bytes of one state on this rank; 0 without states."""
        return self.spec.bytes_per_slot()

    @cached_property
    def token_bytes(self) -> int:
        """Bare KV bytes of one token in the full kind on this rank."""
        return self.spec.bytes_per_token("full")

    @cached_property
    def window_token_bytes(self) -> int:
        """Bare KV bytes of one token in the window kind on this rank."""
        return self.spec.bytes_per_token("swa")

    @cached_property
    def segment_bytes(self) -> dict[str, int]:
        """Bare bytes of one state, by conv windows and temporal states."""
        conv = self.spec.bytes_per_slot(segments=self.spec.conv_names)
        return {"conv": conv, "temporal": self.slot_bytes - conv} if self.slot_bytes else {}

    @cached_property
    def window_row_bytes(self) -> int:
        """One running request's conv windows of speculative steps."""
        if not self.draft_tokens:
            return 0
        return sum(segment.total_bytes for segment in self.spec.intermediate_windows(self.draft_tokens))

    @cached_property
    def ring_bytes(self) -> dict[str, int]:
        """Bytes of one slot's ReplaySSM rings, by name."""
        if not self.ring_length:
            return {}
        rings = self.spec.replay_rings(self.ring_length, draft_tokens=max(1, self.draft_tokens))
        return {segment.name.removeprefix("replay_"): segment.total_bytes for segment in rings}

    @property
    def tracker(self) -> Tracker:
        """How a request saves states while it runs."""
        page = max((kind.page_size for kind in self.layout.kinds if kind.page_size), default=1)
        chunk = checkpoint_grid(page)
        return Tracker(self.strategy, page_size=page, overlap=self.overlap, chunk_tokens=chunk, track_interval=0)

    @property
    def running_states(self) -> int:
        """States that a running request holds in the unified pool: its live one and its track slots."""
        return self.tracker.slots_per_request() if self.slot_bytes else 0

    @property
    def static_slots(self) -> int:
        """Slots that a static pool sets aside for a running request."""
        return self.tracker.static_divisor() if self.slot_bytes else 0

    def window_tokens(self, tokens: int) -> int:
        """Return the tokens whose window KV a request of `tokens` tokens keeps."""
        return min(tokens, self.spec.window)

    def _pages(self, kind: Kind, tokens: int) -> int:
        own = -(-tokens // self.dcp)
        if kind.name != "swa":
            return -(-own // kind.page_size)
        # A window that is not aligned to pages touches one page more than its length needs.
        return min(-(-own // kind.page_size), -(-self.spec.window // kind.page_size) + 1)

    def request_cells(self, tokens: int, *, states: int | None = None) -> list[int]:
        """Return the cells of each kind of the layout that a running request of `tokens` tokens holds."""
        held = self.running_states if states is None else states
        return [self._pages(kind, tokens) if kind.page_size else held for kind in self.layout.kinds]

    def request_bytes(self, tokens: int, *, states: int | None = None) -> int:
        """Return the padded bytes of a running request of `tokens` tokens."""
        cells = self.request_cells(tokens, states=states)
        return sum(count * stride for count, stride in zip(cells, self.layout.strides, strict=True))

    def _bare_pages_bytes(self, tokens: int) -> int:
        return sum(self._pages(kind, tokens) * kind.bare_bytes for kind in self.layout.kinds if kind.page_size)

    # -- requests ------------------------------------------------------------------------------------------------

    def static_split(self, ratio: float | None = None, *, slots: int | None = None) -> StaticSplit:
        """Split the arena once.

        Args:
            ratio: bytes of states over bytes of KV; scratch for speculation comes out of the states' part.
            slots: the number of slots instead of a ratio.

        Raises:
            InvalidArgumentError: neither or both are given, or what is given leaves no room for the other part.
        """
        if (ratio is None) == (slots is None):
            raise InvalidArgumentError("give either a ratio or a number of slots")
        unit = self.slot_bytes + sum(self.ring_bytes.values())
        total = self.cache_bytes
        if not unit:
            slots, states = 0, 0
        elif slots is None:
            assert ratio is not None
            if not ratio > 0:
                raise InvalidArgumentError(f"ratio is {ratio}; it must be above 0")
            # Without pages there is nothing to share with.
            states = int(total * ratio / (1 + ratio)) if self.token_bytes or self.window_token_bytes else total
            # Every running request has a row of windows, and so does the pad.
            slots = max(0, states - self.window_row_bytes) * self.static_slots
            slots //= unit * self.static_slots + self.window_row_bytes
            states = slots * unit + (slots // self.static_slots + 1) * self.window_row_bytes
        else:
            states = slots * unit + (slots // self.static_slots + 1) * self.window_row_bytes
        kv = total - states
        if kv < 0 or slots < 0:
            raise InvalidArgumentError(f"{slots} slots are {format_bytes(states)}; there are {format_bytes(total)}")
        running = slots // self.static_slots if unit else None
        full, window = self._kind("full"), self._kind("swa")
        share = _STATIC_WINDOW_RATIO if full else 1.0
        per_token = (full is not None) * self.token_bytes + (window is not None) * share * self.window_token_bytes
        tokens = kv / per_token if per_token else 0.0
        full_tokens = int(tokens) // full.page_size * full.page_size if full else 0
        window_tokens = int(tokens * share) // window.page_size * window.page_size if window else 0
        used = full_tokens * self.token_bytes + window_tokens * self.window_token_bytes
        return StaticSplit(slots, running, full_tokens * self.dcp, window_tokens * self.dcp, states, used)

    def static_requests(self, split: StaticSplit, tokens: int) -> int:
        """Return the requests of `tokens` tokens that a split runs at once."""
        fits = [] if split.running is None else [split.running]
        for kind, held in (("full", split.tokens), ("swa", split.window_tokens)):
            found = self._kind(kind)
            if found is not None:
                fits.append(held // self.dcp // (self._pages(found, tokens) * found.page_size))
        return min(fits)

    def best_static(self, tokens: int) -> tuple[int, float | None]:
        """Return the requests and the ratio of the split that is best for exactly this length; None: no split."""
        unit = self.static_slots * (self.slot_bytes + sum(self.ring_bytes.values())) + self.window_row_bytes
        pages = self._bare_pages_bytes(tokens)
        requests = (self.cache_bytes - self.window_row_bytes) // (unit + pages)
        if not self.slot_bytes or not pages or requests < 1:
            return max(0, requests), None
        states = requests * unit + self.window_row_bytes
        return requests, states / (self.cache_bytes - states)

    @cached_property
    def block_rule(self) -> BlockRule:
        """Return the equal blocks that vLLM would make; a running request keeps two states when prefixes are cached."""
        layers = {name: len(self.spec.layers(name)) for name in ("full", "swa", "state")}
        present = [count for count in layers.values() if count]
        group = min(present)
        pages = "full" if layers["full"] else "swa"
        per_token = self.spec.bytes_per_token(pages) / layers[pages] if layers[pages] else 0.0
        latent = "full" in self.spec.names and self.spec.kind("full").segments[0].name == "latent"
        tokens = _MLA_BLOCK_ALIGNMENT if latent else _BLOCK_ALIGNMENT
        if layers["state"]:
            state = self.slot_bytes / layers["state"]
            if not per_token:
                return BlockRule(1, math.ceil(group * state), -(-layers["state"] // group), 0, 0)
            tokens *= math.ceil(state / (tokens * per_token))
        groups = {name: -(-count // group) for name, count in layers.items()}
        size = int(group * tokens * per_token)
        return BlockRule(tokens, size, groups["state"], groups["full"], groups["swa"])

    def block_requests(self, tokens: int) -> int:
        """Return the requests of `tokens` tokens that equal blocks run at once."""
        rule = self.block_rule
        own = -(-tokens // self.dcp)
        scratch = self.window_row_bytes + sum(self.ring_bytes.values())
        blocks = rule.blocks(states=2, tokens=own, window_tokens=self.window_tokens(own))
        return max(0, self.cache_bytes - scratch) // (blocks * rule.block_bytes + scratch)

    def unified_requests(self, tokens: int, *, states: int | None = None) -> int:
        """Return the requests of `tokens` tokens that nested grids run at once, by the exact capacity formula.

        Args:
            states: per request, instead of what the strategy really allocates.

        Complexity: O(kinds * log(requests)).
        """
        cells = self.request_cells(tokens, states=states)
        row = self.window_row_bytes + sum(self.ring_bytes.values())
        low, high = 0, self.cache_bytes // max(1, self.request_bytes(tokens, states=states) + row)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(self.cache_bytes - (middle + 1) * row, [middle * count for count in cells]):
                low = middle
            else:
                high = middle - 1
        return low

    def _fits(self, arena_bytes: int, counts: Sequence[int]) -> bool:
        """m_k <= E_k for every kind (docs/design.md), without pins."""
        need, larger = 0, 0
        for kind, count in zip(self.layout.kinds, counts, strict=True):
            ratio = larger // kind.stride_bytes if larger else 1
            need, larger = need * ratio + count, kind.stride_bytes
            cells = max(0, arena_bytes) // kind.stride_bytes - -(-self.layout.null_bytes // kind.stride_bytes)
            if need > cells:
                return False
        return True

    def rows(
        self, lengths: Sequence[int] = DEFAULT_LENGTHS, *, ratio: float = 0.9, split: StaticSplit | None = None
    ) -> list[LengthRow]:
        """Compare the four ways at each context length."""
        fixed = split or self.static_split(ratio)
        made = []
        for tokens in lengths:
            best, best_ratio = self.best_static(tokens)
            made.append(
                LengthRow(
                    tokens,
                    self.request_bytes(tokens),
                    self.static_requests(fixed, tokens),
                    best,
                    best_ratio,
                    self.block_requests(tokens),
                    self.unified_requests(tokens, states=min(2, self.static_slots)),
                    self.unified_requests(tokens),
                )
            )
        return made

    def recommended_ratio(self, lengths: Sequence[int]) -> float | None:
        """Return the ratio that loses least, on the mean over these lengths, against each length's own best ratio.

        Lengths at which fewer than two requests fit do not count. None: there is nothing to split.
        """
        found = {tokens: self.best_static(tokens) for tokens in lengths}
        best = {tokens: (requests, ratio) for tokens, (requests, ratio) in found.items() if ratio and requests > 1}
        ratios = [ratio for _, ratio in best.values() if ratio]
        if not ratios:
            return None

        def mean_share(ratio: float) -> float:
            split = self.static_split(ratio)
            return sum(self.static_requests(split, tokens) / most for tokens, (most, _) in best.items()) / len(best)

        # The mean is a step function of the ratio: a fine geometric grid finds it to two digits.
        low, high = math.log(min(ratios)), math.log(max(ratios))
        steps = 200
        return max((math.exp(low + (high - low) * step / steps) for step in range(steps + 1)), key=mean_share)

    # -- text ----------------------------------------------------------------------------------------------------

    def log_lines(self, split: StaticSplit, *, context: int) -> list[str]:
        """Return what engines with this split print when they start; sizes in GiB, pad slot included.

        Args:
            context: the longest context that the server accepts.
        """
        lines = []
        if self.slot_bytes:
            rows = split.slots + 1
            sizes = {name: rows * size for name, size in self.segment_bytes.items()}
            line = (
                f"Mamba Cache is allocated. max_mamba_cache_size: {split.slots}, conv_state size: "
                f"{_gib(sizes['conv'])}GB, ssm_state size: {_gib(sizes['temporal'])}GB"
            )
            if self.window_row_bytes:
                size = (split.slots // self.static_slots + 1) * self.window_row_bytes
                line += f", intermediate_conv_window_cache size: {_gib(size)}GB"
            lines.append(line)
            if self.ring_bytes:
                parts = ", ".join(f"{name}: {rows * size / 2**30:.3f}GB" for name, size in self.ring_bytes.items())
                lines.append(f"ReplaySSM rings are allocated. length: {self.ring_length}, {parts}")
        for name, tokens, size in (
            ("full", split.tokens, self.token_bytes),
            ("swa", split.window_tokens, self.window_token_bytes),
        ):
            kind = self._kind(name)
            if kind is not None:
                dtype = kind.segments[0].dtype
                label = "KV Cache" if name == "full" else "SWA KV Cache"
                lines.append(
                    f"{label} is allocated. dtype: torch.{dtype}, #tokens: {tokens}, "
                    f"KV size: {_gib(tokens // self.dcp * size)} GB"
                )
        if self.slot_bytes:
            lines.append(f"max_total_num_tokens={split.tokens}, max_running_requests={split.running}")
        if split.tokens:
            lines.append(f"GPU KV cache size: {split.tokens:,} tokens")
            times = split.tokens / context
            lines.append(f"Maximum concurrency for {context:,} tokens per request: {times:.2f}x")
        return lines

    def byte_rows(self) -> list[tuple[str, int, int, str]]:
        """Return where each byte goes: (what, bare bytes, padded bytes, unit)."""
        rows = []
        for kind in self.layout.kinds:
            if kind.page_size:
                unit = f"page of {kind.page_size} tokens"
                rows.append((f"{kind.name} KV", kind.bare_bytes, kind.stride_bytes, unit))
            else:
                rows += [(f"state: {name}", size, size, "slot") for name, size in self.segment_bytes.items()]
                rows.append(("state", kind.bare_bytes, kind.stride_bytes, "slot"))
        if self.window_row_bytes:
            rows.append(("draft conv windows", self.window_row_bytes, self.window_row_bytes, "running request"))
        rows += [(f"ring {name}", size, size, "slot or running request") for name, size in self.ring_bytes.items()]
        if self.layout.null_bytes:
            rows.append(("null cell", self.layout.null_bytes, self.layout.null_bytes, "arena"))
        return rows

    def report(
        self, lengths: Sequence[int], *, ratio: float = 0.9, slots: int | None = None, context: int = 131_072
    ) -> dict[str, Any]:
        """Return everything as JSON-ready data with a schema version."""
        split = self.static_split(slots=slots) if slots is not None else self.static_split(ratio)
        return {
            "schema": SCHEMA_VERSION,
            "model": {
                "name": self.spec.name,
                "tp": self.spec.tp,
                "layers": {name: len(self.spec.layers(name)) for name in self.spec.names},
                "window": self.spec.window,
            },
            "server": {
                "cache_bytes": self.cache_bytes,
                "page_size": {kind.name: kind.page_size for kind in self.layout.kinds if kind.page_size},
                "strides": dict(zip(self.layout.names, self.layout.strides, strict=True)),
                "padding": self.layout.padding,
                "strategy": self.strategy,
                "overlap": self.overlap,
                "dcp": self.dcp,
                "draft_tokens": self.draft_tokens,
                "ring_length": self.ring_length,
                "running_states": self.running_states,
                "static_slots_per_request": self.static_slots,
            },
            "bytes": {
                "kv_token": self.token_bytes,
                "window_token": self.window_token_bytes,
                "state": self.slot_bytes,
                "state_segments": self.segment_bytes,
                "state_all_ranks": self.slot_bytes * self.spec.tp,
                "draft_windows": self.window_row_bytes,
                "rings": self.ring_bytes,
            },
            "static": {**asdict(split), "ratio": split.ratio if split.kv_bytes else None},
            "blocks": asdict(self.block_rule),
            "lengths": [asdict(row) for row in self.rows(lengths, split=split)],
            "recommended_ratio": self.recommended_ratio(lengths),
            "log": self.log_lines(split, context=context),
        }


def plot_concurrency(server: Server, lengths: Sequence[int], split: StaticSplit, path: Path) -> None:
    """Draw requests that fit against context length. Needs matplotlib.

    Raises:
        InvalidArgumentError: matplotlib is missing, or the path cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError("a plot needs matplotlib: pip install 'unifiedpool[plots]'") from None
    rows = server.rows(lengths, split=split)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    given = f"static, ratio {split.ratio:.2g}" if server.slot_bytes else "static"
    for label, style, counts in (
        (given, "--", [row.static for row in rows]),
        ("static, best ratio for each length", ":", [row.best_static for row in rows]),
        ("equal blocks, two states a request", "-.", [row.blocks for row in rows]),
        ("unified", "-", [row.unified for row in rows]),
        ("unified, two states a request", "-", [row.unified_two_states for row in rows]),
    ):
        # A logarithmic axis has no place for none.
        axes.plot(lengths, [count or math.nan for count in counts], style, marker=".", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("requests that fit")
    axes.set_title(f"{server.spec.name}, tp {server.spec.tp}, {format_bytes(server.cache_bytes)} per GPU")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot write the plot {str(path)!r}: {error}") from None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
