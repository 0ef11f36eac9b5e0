"""Layouts: what a cell of each kind holds, and strides that nest.

A *kind* is one sort of cell (a KV page, a window page, a state slot). A cell is an *envelope*: all layers of one page
or of one state, contiguous. An envelope is a list of *segments* (keys, values, conv windows, temporal states, scales).
A `Layout` pads the envelopes to strides that form a divisibility chain, so that a cell of a larger kind is exactly a
whole number of cells of each smaller one, and says where each layer of each segment lies.

Envelope orders (`[a][b]` = b varies faster):

    page     [layer][segment][token][head][dim]      format "HND": [layer][segment][head][token][dim]
    token    [token][layer][segment][head][dim]      stride = page_size * row, so flat token ids address rows
    head     [head][layer][segment][token][dim]      cheap to re-shard
    grouped  [segment][layer][shape]                 every layer's conv, then every layer's temporal state
    layered  [layer][segment][shape]

Rows (one token of one segment) start at multiples of 16 B, state blocks at multiples of 128 B, cells at multiples of
256 B. Pure data: nothing here imports torch or touches bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from .errors import InvalidArgumentError, LayoutMismatchError, format_bytes

__all__ = [
    "DTYPE_BYTES",
    "PADDING_WARNING",
    "STRIDE_GRANULE",
    "Candidate",
    "Kind",
    "Layout",
    "PaddingWarning",
    "Segment",
    "ViewSpec",
    "find_chain",
]

DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
ROW_ALIGNMENT = 16
STATE_ALIGNMENT = 128
STRIDE_GRANULE = 256
PADDING_WARNING = 0.015
DEFAULT_PAGE_SIZES = (16, 32, 64, 128, 256)
SCHEMA_VERSION = 1

Scope = Literal["token", "page", "slot"]
Order = Literal["page", "token", "head", "grouped", "layered"]
Format = Literal["NHD", "HND"]
End = Literal["low", "high"]
Zero = Literal["never", "dirty", "always"]


class PaddingWarning(UserWarning):
    """A kind is padded by more than `PADDING_WARNING` to fit the stride chain."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_int(what: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgumentError(f"{what} is {value!r}; it must be an integer of at least {minimum}")


def _check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{what} is {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor per layer inside a cell.

    Args:
        name: the tensor's name, for instance "key", "value", "latent", "conv", "temporal".
        layers: model layer numbers that have it, ascending.
        shape: extent per layer and per token, page or slot; the token axis is not in it.
        dtype: a key of `DTYPE_BYTES`.
        scope: "token": one per token of a page; "page": one per page (scales); "slot": one per state slot.
        shard_axis: the axis of `shape` that tensor parallelism splits; None: every rank holds all of it.
        shard_range: [start, stop) of this rank on that axis of the whole model, where that is one range.
        shard_parts: the ranges, in the order they lie here, where a rank holds several (fused q, k, v channels).
        transient: scratch that is never offloaded or sent.
        fill: the value of a fresh cell (after zeroing).
        alignment: bytes; 0 means the default, 16 in pages and 128 in slots.

    Raises:
        InvalidArgumentError: no name, no layers, layers not ascending, an extent below 1, unknown dtype or scope, a
            shard axis outside the shape, an alignment that is not a power of two from 16 to 256.
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    scope: Scope
    shard_axis: int | None = None
    shard_range: tuple[int, int] | None = None
    shard_parts: tuple[tuple[int, int], ...] = ()
    transient: bool = False
    fill: float = 0.0
    alignment: int = 0

    def __post_init__(self) -> None:
        what = f"segment {self.name!r}"
        if not self.name:
            raise InvalidArgumentError("a segment needs a name")
        if not self.layers:
            raise InvalidArgumentError(f"{what} has no layers; leave it out instead")
        for layer in self.layers:
            _check_int(f"{what}: layer", layer, 0)
        if list(self.layers) != sorted(set(self.layers)):
            raise InvalidArgumentError(f"{what}: layers {self.layers} must ascend without repeats")
        for extent in self.shape:
            _check_int(f"{what}: an extent of shape {self.shape}", extent, 1)
        _check_choice(f"{what}: dtype", self.dtype, tuple(DTYPE_BYTES))
        _check_choice(f"{what}: scope", self.scope, ("token", "page", "slot"))
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            raise InvalidArgumentError(f"{what}: shard_axis {self.shard_axis} is outside shape {self.shape}")
        if self.alignment == 0:
            object.__setattr__(self, "alignment", STATE_ALIGNMENT if self.scope == "slot" else ROW_ALIGNMENT)
        _check_int(f"{what}: alignment", self.alignment, ROW_ALIGNMENT)
        if self.alignment & (self.alignment - 1) or self.alignment > STRIDE_GRANULE:
            raise InvalidArgumentError(
                f"{what}: alignment {self.alignment} must be a power of two from {ROW_ALIGNMENT} to {STRIDE_GRANULE}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_layer(self) -> int:
        """Bare bytes of one layer, per token, page or slot."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def total_bytes(self) -> int:
        """Bare bytes of all layers, per token, page or slot."""
        return self.bytes_per_layer * len(self.layers)


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """Where one layer of one segment lies inside every cell of a kind.

    `offset_bytes` from the cell's start; `shape` and `strides_bytes` without the leading cell axis. `dtype` as in
    `Segment`. With the kind's stride in front this is one `as_strided` over the whole arena.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str


def _compact_strides(shape: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    strides = [element_bytes] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of cell: its segments, their order, and how cells of it are placed.

    Args:
        name: "full", "swa", "state", "draft", ...
        segments: in envelope order. A name may come twice when the layers differ (layers of unequal shape).
        page_size: tokens of a page; 0 for a state slot.
        order: see the module's head. Default: "page" for pages, "grouped" for slots.
        format: "NHD" or "HND"; HND is page-major only.
        end: the end of the arena that cells are taken from. Default: low for slots and window pages, else high.
        zero: when a fresh cell is zeroed: "dirty" (its bytes last belonged to another kind, the default of pages),
            "always" (the default of slots: a new state is zero) or "never".
        stride_bytes: set by `Layout`; 0 before.

    Raises:
        InvalidArgumentError: no name or segments, a segment listed twice for a layer, a scope that the kind cannot
            hold, an order or format that does not fit (head-major needs equal head counts everywhere).
    """

    name: str
    segments: tuple[Segment, ...]
    page_size: int = 0
    order: Order = ""  # type: ignore[assignment]
    format: Format = "NHD"
    end: End = ""  # type: ignore[assignment]
    zero: Zero = ""  # type: ignore[assignment]
    stride_bytes: int = 0

    def __post_init__(self) -> None:
        what = f"kind {self.name!r}"
        if not self.name:
            raise InvalidArgumentError("a kind needs a name")
        if not self.segments:
            raise InvalidArgumentError(f"{what} has no segments")
        _check_int(f"{what}: page_size", self.page_size, 0)
        _check_int(f"{what}: stride_bytes", self.stride_bytes, 0)
        if not self.order:
            object.__setattr__(self, "order", "page" if self.page_size else "grouped")
        if not self.end:
            low = not self.page_size or self.name.startswith("swa")
            object.__setattr__(self, "end", "low" if low else "high")
        if not self.zero:
            object.__setattr__(self, "zero", "dirty" if self.page_size else "always")
        seen: set[tuple[str, int]] = set()
        for segment in self.segments:
            if (segment.scope == "slot") != (self.page_size == 0):
                raise InvalidArgumentError(
                    f"{what}: segment {segment.name!r} has scope {segment.scope!r}, but page_size is {self.page_size}; "
                    "slots have page_size 0 and hold scope 'slot' only"
                )
            for layer in segment.layers:
                if (segment.name, layer) in seen:
                    raise InvalidArgumentError(f"{what}: segment {segment.name!r} of layer {layer} is listed twice")
                seen.add((segment.name, layer))
        orders = ("page", "token", "head") if self.page_size else ("grouped", "layered")
        _check_choice(f"{what}: order", self.order, orders)
        _check_choice(f"{what}: format", self.format, ("NHD", "HND"))
        _check_choice(f"{what}: end", self.end, ("low", "high"))
        _check_choice(f"{what}: zero", self.zero, ("never", "dirty", "always"))
        self._check_order(what)

    def _check_order(self, what: str) -> None:
        if self.format == "HND" and self.order != "page":
            raise InvalidArgumentError(f"{what}: HND is page-major only; order is {self.order!r}")
        if self.order in ("token", "head"):
            for segment in self.segments:
                if segment.scope == "page":
                    raise InvalidArgumentError(
                        f"{what}: {self.order}-major cannot hold the per-page segment {segment.name!r}; "
                        "use order='page'"
                    )
        if self.order == "head":
            heads = {segment.shape[0] if len(segment.shape) == 2 else 0 for segment in self.segments}
            if len(heads) != 1 or 0 in heads:
                raise InvalidArgumentError(
                    f"{what}: head-major needs shape (heads, dim) with equal heads in every segment; "
                    f"shapes are {[segment.shape for segment in self.segments]}"
                )

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layers that have a segment here, ascending."""
        return tuple(sorted({layer for segment in self.segments for layer in segment.layers}))

    @property
    def bytes_per_token(self) -> int:
        """Bare bytes of one token over all layers; 0 for a slot."""
        return sum(segment.total_bytes for segment in self.segments if segment.scope == "token")

    @property
    def bare_bytes(self) -> int:
        """Bytes of the data of one cell, without any alignment."""
        once = sum(segment.total_bytes for segment in self.segments if segment.scope != "token")
        return self.bytes_per_token * self.page_size + once

    @property
    def granule_bytes(self) -> int:
        """The stride is a multiple of this: 256 B, and for token-major also page_size aligned rows."""
        if self.order == "token":
            return math.lcm(STRIDE_GRANULE, self._alignment * self.page_size)
        return STRIDE_GRANULE

    @property
    def envelope_bytes(self) -> int:
        """Bytes of one cell with rows and blocks aligned, a multiple of `granule_bytes`: the least stride."""
        end = max((place.offset_bytes + place.block_bytes for place in self._places()), default=0)
        if self.order == "token":
            end = self.page_size * _round_up(end, self._alignment)
        elif self.order == "head":
            end = self.segments[0].shape[0] * self.envelope_bytes_per_head
        return _round_up(end, self.granule_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes from one token to the next in token-major order; 0 in other orders."""
        return (self.stride_bytes or self.envelope_bytes) // self.page_size if self.order == "token" else 0

    @property
    def padding_bytes(self) -> int:
        """Bytes of one cell that hold no data."""
        return (self.stride_bytes or self.envelope_bytes) - self.bare_bytes

    @property
    def padding(self) -> float:
        """Padding as a fraction of the bare bytes."""
        return self.padding_bytes / self.bare_bytes

    # -- byte map ------------------------------------------------------------------------------------------------

    @property
    def _alignment(self) -> int:
        return max(segment.alignment for segment in self.segments)

    def _places(self) -> Iterator[_Place]:
        """Each (segment, layer) with its offset and extent: in the cell, in the token row, or in one head's part."""
        if self.order == "grouped":
            pairs = [(segment, layer) for segment in self.segments for layer in segment.layers]
        else:
            pairs = [(segment, layer) for layer in self.layers for segment in self.segments if layer in segment.layers]
        offset = 0
        for segment, layer in pairs:
            offset = _round_up(offset, segment.alignment)
            block = self._block_bytes(segment)
            yield _Place(segment, layer, offset, block)
            offset += block

    def _block_bytes(self, segment: Segment) -> int:
        token_bytes = segment.bytes_per_layer
        if segment.scope == "slot":
            return _round_up(token_bytes, STATE_ALIGNMENT)
        if segment.scope == "page":
            return _round_up(token_bytes, ROW_ALIGNMENT)
        if self.order == "token":
            return _round_up(token_bytes, ROW_ALIGNMENT)
        if self.order == "head":
            return self.page_size * _round_up(segment.shape[-1] * segment.element_bytes, ROW_ALIGNMENT)
        if self.format == "HND" and len(segment.shape) == 2:
            row = _round_up(segment.shape[-1] * segment.element_bytes, ROW_ALIGNMENT)
            return segment.shape[0] * self.page_size * row
        return self.page_size * _round_up(token_bytes, ROW_ALIGNMENT)

    def view_spec(self, layer: int, segment: str) -> ViewSpec:
        """Say where `segment` of model layer `layer` lies in a cell.

        Returns:
            For pages `(page_size, *shape)` ("HND": `(heads, page_size, dim)`); for per-page and slot segments `shape`.

        Raises:
            InvalidArgumentError: the kind has no such segment in that layer.
        """
        for place in self._places():
            if place.layer == layer and place.segment.name == segment:
                return self._spec(place)
        names = sorted({s.name for s in self.segments if layer in s.layers})
        raise InvalidArgumentError(
            f"kind {self.name!r} has no segment {segment!r} in layer {layer}; "
            f"layers {list(self.layers)}, segments of this layer {names}"
        )

    def _spec(self, place: _Place) -> ViewSpec:
        segment, size = place.segment, place.segment.element_bytes
        inner = _compact_strides(segment.shape, size)
        if segment.scope != "token":
            return ViewSpec(place.offset_bytes, segment.shape, inner, segment.dtype)
        if self.order == "token":
            shape = (self.page_size, *segment.shape)
            return ViewSpec(place.offset_bytes, shape, (self.row_bytes, *inner), segment.dtype)
        row = _round_up(segment.shape[-1] * size, ROW_ALIGNMENT) if segment.shape else 0
        if self.order == "head":
            part = self.envelope_bytes_per_head
            return ViewSpec(place.offset_bytes, (self.page_size, *segment.shape), (row, part, size), segment.dtype)
        if self.format == "HND" and len(segment.shape) == 2:
            heads, dim = segment.shape
            return ViewSpec(
                place.offset_bytes, (heads, self.page_size, dim), (self.page_size * row, row, size), segment.dtype
            )
        token = _round_up(segment.bytes_per_layer, ROW_ALIGNMENT)
        return ViewSpec(place.offset_bytes, (self.page_size, *segment.shape), (token, *inner), segment.dtype)

    @property
    def envelope_bytes_per_head(self) -> int:
        """Bytes from one head to the next in head-major order; 0 in other orders."""
        if self.order != "head":
            return 0
        return _round_up(max(place.offset_bytes + place.block_bytes for place in self._places()), self._alignment)

    def segment(self, name: str, layer: int | None = None) -> Segment:
        """Return the segment called `name` (of `layer`, where a name comes twice).

        Raises:
            InvalidArgumentError: there is none.
        """
        for segment in self.segments:
            if segment.name == name and (layer is None or layer in segment.layers):
                return segment
        raise InvalidArgumentError(
            f"kind {self.name!r} has no segment {name!r}; there are {sorted({s.name for s in self.segments})}"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    segment: Segment
    layer: int
    offset_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of page sizes: the strides it leads to and the weighted padding (a fraction)."""

    page_sizes: dict[str, int]
    strides: tuple[int, ...]
    weighted_padding: float


def find_chain(
    sizes: Sequence[int], granules: Sequence[int], weights: Sequence[float] | None = None
) -> tuple[tuple[int, ...], float]:
    """Find the cheapest stride chain: each stride a multiple of the next, none below its size.

    The cost is `sum(w * (stride - size) / size) / sum(w)`. Exact: for given ratios between the strides the cheapest
    smallest stride is tight for some kind, so those strides are tried in ascending order, and for each one every
    affordable multiple for the kinds above it.

    Args:
        sizes: least bytes per cell, largest first.
        granules: stride i must be a multiple of granules[i].
        weights: share of the arena's bytes per kind; equal by default.

    Returns:
        The strides in the order of `sizes`, and the cost.

    Complexity: O(largest / smallest size) tries at worst; the running best cuts nearly all of them.

    >>> find_chain([13, 12, 11], [1, 1, 1])[0]
    (13, 13, 13)
    >>> find_chain([1_000_000, 60_000], [256, 256])[0]
    (1022720, 60160)
    """
    count = len(sizes)
    shares = [1.0] * count if weights is None else list(weights)
    total = sum(shares)
    cost_per_byte = [shares[i] / (total * sizes[i]) for i in range(count)]
    best_cost = math.inf
    best: tuple[int, ...] = ()

    def extend(index: int, chain: tuple[int, ...], cost: float) -> None:
        """Try the multiples of the last stride for kind `index`, cheapest first."""
        nonlocal best_cost, best
        if index < 0:
            if cost < best_cost:
                best_cost, best = cost, chain
            return
        base = math.lcm(chain[0], granules[index])
        stride = _round_up(sizes[index], base)
        while True:
            extra = cost + (stride - sizes[index]) * cost_per_byte[index]
            if extra >= best_cost:
                return
            extend(index - 1, (stride, *chain), extra)
            if index == 0:
                return
            stride += base

    # The chain over the unpadded smallest kind bounds how far that kind is worth padding at all.
    first = _round_up(sizes[-1], granules[-1])
    extend(count - 2, (first,), (first - sizes[-1]) * cost_per_byte[-1])
    affordable = sizes[-1] + best_cost / cost_per_byte[-1]
    for smallest in _smallest_strides(sizes, granules, affordable):
        cost = (smallest - sizes[-1]) * cost_per_byte[-1]
        if cost >= best_cost:
            break
        extend(count - 2, (smallest,), cost)
    return best, best_cost


def _smallest_strides(sizes: Sequence[int], granules: Sequence[int], affordable: float) -> list[int]:
    """Strides of the smallest kind that are tight for some kind and not above `affordable`, ascending."""
    common = math.lcm(*granules)
    units = [granules[-1] * d for d in range(1, common // granules[-1] + 1) if common % (granules[-1] * d) == 0]
    found: set[int] = set()
    for size in sizes:
        for ratio in range(max(1, math.floor(size / affordable)), size // sizes[-1] + 2):
            tight = max(sizes[-1], -(-size // ratio))
            found.update(_round_up(tight, unit) for unit in units)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Layout:
    """The kinds of one arena, largest stride first, with strides that form a divisibility chain.

    Build it with `Layout.build`, `Layout.simple` or `ModelSpec.layout`; the constructor checks finished strides.

    >>> layout = Layout.simple({"state": 4096, "full": 512})
    >>> layout.names, layout.strides, layout.null_bytes
    (('state', 'full'), (4096, 512), 512)
    """

    kinds: tuple[Kind, ...]
    null_bytes: int = 0
    weights: dict[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InvalidArgumentError("a layout needs at least one kind")
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgumentError(f"kind {name!r} is added twice; give each kind its own name")
        for larger, smaller in itertools.pairwise(self.kinds):
            if smaller.stride_bytes <= 0 or larger.stride_bytes % smaller.stride_bytes:
                raise InvalidArgumentError(
                    f"strides {self.strides} are no chain: {larger.stride_bytes} of {larger.name!r} is not a multiple "
                    f"of {smaller.stride_bytes} of {smaller.name!r}; use Layout.build"
                )
        for kind in self.kinds:
            if kind.stride_bytes < kind.envelope_bytes or kind.stride_bytes % kind.granule_bytes:
                raise InvalidArgumentError(
                    f"stride {kind.stride_bytes} of kind {kind.name!r} must be a multiple of {kind.granule_bytes} and "
                    f"at least {kind.envelope_bytes}"
                )
        pages = [kind.stride_bytes for kind in self.kinds if kind.page_size]
        if self.null_bytes not in (0, max(pages, default=0)):
            raise InvalidArgumentError(
                f"null_bytes is {self.null_bytes}; it is 0 or the largest page stride, {max(pages, default=0)}"
            )

    # -- construction --------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        kinds: Iterable[Kind],
        *,
        null_cell: bool = True,
        page_sizes: Mapping[str, Sequence[int]] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Layout:
        """Pad the kinds into the cheapest stride chain.

        Args:
            kinds: in any order; stride_bytes is ignored.
            null_cell: keep bytes [0, largest page stride) as the null cell for padding lanes.
            page_sizes: candidates per page kind; the combination with the least weighted padding is taken, the
                first listed on a tie. Kinds that are not named keep their page size.
            weights: expected share of the arena's bytes per kind; equal by default.

        Raises:
            InvalidArgumentError: no kinds, a kind twice, an unknown name in `page_sizes` or `weights`.

        Warns:
            PaddingWarning: a kind is padded by more than 1.5 %.
        """
        given = tuple(kinds)
        candidates = cls.candidates(given, page_sizes=page_sizes, weights=weights)
        chosen = candidates[0]
        ordered = _ordered(_with_page_sizes(given, chosen.page_sizes))
        placed = tuple(replace(kind, stride_bytes=s) for kind, s in zip(ordered, chosen.strides, strict=True))
        null_bytes = max((kind.stride_bytes for kind in placed if kind.page_size), default=0) if null_cell else 0
        layout = cls(placed, null_bytes, dict(weights or {}))
        layout._warn_about_padding()
        return layout

    @staticmethod
    def candidates(
        kinds: Iterable[Kind],
        *,
        page_sizes: Mapping[str, Sequence[int]] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> list[Candidate]:
        """List the combinations of candidate page sizes, least weighted padding first.

        Args and errors as `build`.
        """
        given = tuple(kinds)
        names = [kind.name for kind in given]
        if not given:
            raise InvalidArgumentError("a layout needs at least one kind")
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgumentError(f"kind {name!r} is added twice; give each kind its own name")
        choices = {name: tuple(sizes) for name, sizes in (page_sizes or {}).items()}
        for name, sizes in choices.items():
            if name not in names or not given[names.index(name)].page_size:
                raise InvalidArgumentError(f"page_sizes names {name!r}; the page kinds are {names}")
            if not sizes:
                raise InvalidArgumentError(f"page_sizes of {name!r} is empty; give at least one size")
            for size in sizes:
                _check_int(f"page_sizes of {name!r}: a size", size, 1)
        for name, weight in (weights or {}).items():
            if name not in names or not weight > 0:
                raise InvalidArgumentError(f"weight {weight!r} of {name!r}: weights are above 0, the kinds are {names}")
        found = []
        for combination in itertools.product(*choices.values()):
            sizes_of = dict(zip(choices, combination, strict=True))
            ordered = _ordered(_with_page_sizes(given, sizes_of))
            strides, _ = find_chain(
                [kind.envelope_bytes for kind in ordered],
                [kind.granule_bytes for kind in ordered],
                [(weights or {}).get(kind.name, 1.0) for kind in ordered],
            )
            found.append(Candidate(sizes_of, strides, _weighted_padding(ordered, strides, weights or {})))
        return sorted(found, key=lambda candidate: round(candidate.weighted_padding, 4))

    @classmethod
    def simple(
        cls,
        strides: Mapping[str, int],
        *,
        slots: Iterable[str] | None = None,
        page_sizes: Mapping[str, int] | None = None,
        ends: Mapping[str, End] | None = None,
        zero: Mapping[str, Zero] | None = None,
        null_cell: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> Layout:
        """Make a layout of bare kinds from byte sizes, for tests and for planning without a model.

        Args:
            strides: bytes per cell of each kind; padded into a chain of multiples of 256 like any other.
            slots: the kinds that are state slots. Default: those whose name begins with "state".
            page_sizes: tokens per page of the page kinds; 1 by default.
            ends, zero: as in `Kind`.
            null_cell, weights: as in `build`.

        Raises:
            InvalidArgumentError: a size that is not a positive integer, or a name that `strides` lacks.

        >>> Layout.simple({"state": 13 * 256, "full": 256}).capacity(1 << 20)
        {'state': 314, 'full': 4095}
        """
        if not isinstance(strides, Mapping) or not all(isinstance(name, str) for name in strides):
            raise InvalidArgumentError(f"strides are {strides!r}; give names and bytes, such as {{'full': 512}}")
        slot_names = {name for name in strides if name.startswith("state")} if slots is None else set(slots)
        for name in (*slot_names, *(page_sizes or {}), *(ends or {}), *(zero or {})):
            if name not in strides:
                raise InvalidArgumentError(f"{name!r} is not one of the kinds {list(strides)}")
        kinds = []
        for name, size in strides.items():
            _check_int(f"bytes of kind {name!r}", size, 1)
            slot = name in slot_names
            segment = Segment("bytes", (0,), (size,), "uint8", "slot" if slot else "page")
            kinds.append(
                Kind(
                    name,
                    (segment,),
                    page_size=0 if slot else (page_sizes or {}).get(name, 1),
                    end=(ends or {}).get(name, ""),  # type: ignore[arg-type]
                    zero=(zero or {}).get(name, ""),  # type: ignore[arg-type]
                )
            )
        return cls.build(kinds, null_cell=null_cell, weights=weights)

    # -- lookup --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Kind names, largest stride first; the position is the kind id."""
        return tuple(kind.name for kind in self.kinds)

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride of each kind in bytes, largest first."""
        return tuple(kind.stride_bytes for kind in self.kinds)

    def kind_id(self, name: str) -> int:
        """Return the id of the kind called `name`.

        Raises:
            InvalidArgumentError: there is none.
        """
        for index, kind in enumerate(self.kinds):
            if kind.name == name:
                return index
        raise InvalidArgumentError(f"no kind {name!r}; the kinds are {', '.join(self.names)}")

    def kind(self, name: str | int) -> Kind:
        """Return a kind by name or id.

        Raises:
            InvalidArgumentError: there is none.
        """
        if isinstance(name, str):
            return self.kinds[self.kind_id(name)]
        # Numpy integers index too; a float or None does not.
        if not hasattr(name, "__index__") or not 0 <= name < len(self.kinds):
            raise InvalidArgumentError(
                f"no kind {name!r}; ids are 0 to {len(self.kinds) - 1}, the names {', '.join(self.names)}"
            )
        return self.kinds[name]

    def view_spec(self, kind: str | int, layer: int, segment: str) -> ViewSpec:
        """Say where `segment` of model layer `layer` lies in a cell of `kind` (see `Kind.view_spec`)."""
        return self.kind(kind).view_spec(layer, segment)

    def capacity(self, arena_bytes: int) -> dict[str, int]:
        """Return how many cells of each kind an arena holds when it holds nothing else (null cell left out).

        Raises:
            InvalidArgumentError: arena_bytes is negative or no integer.
        """
        _check_int("arena_bytes", arena_bytes, 0)
        return {
            kind.name: max(0, arena_bytes // kind.stride_bytes - -(-self.null_bytes // kind.stride_bytes))
            for kind in self.kinds
        }

    # -- padding -------------------------------------------------------------------------------------------------

    @property
    def padding(self) -> dict[str, float]:
        """Padding of each kind as a fraction of its bare bytes."""
        return {kind.name: kind.padding for kind in self.kinds}

    @property
    def weighted_padding(self) -> float:
        """Mean padding, weighted by the shares given to `build`."""
        return _weighted_padding(self.kinds, self.strides, self.weights)

    def _warn_about_padding(self) -> None:
        padded = [f"{name} {share:.1%}" for name, share in self.padding.items() if share > PADDING_WARNING]
        if padded:
            warnings.warn(
                f"padding above {PADDING_WARNING:.1%} to nest the strides: {', '.join(padded)}; "
                "try other page sizes (page_size=None proposes some)",
                PaddingWarning,
                stacklevel=3,
            )

    def explain(self) -> str:
        """Return a table of kinds, bytes, strides and padding, and what the chain means."""
        rows = [("kind", "page", "order", "bare", "aligned", "stride", "padding", "cells per larger")]
        above: Kind | None = None
        for kind in self.kinds:
            order = f"{kind.order} {kind.format}" if kind.order == "page" else kind.order
            rows.append(
                (
                    kind.name,
                    str(kind.page_size) if kind.page_size else "-",
                    order,
                    f"{kind.bare_bytes:,}",
                    f"{kind.envelope_bytes:,}",
                    f"{kind.stride_bytes:,}",
                    f"{kind.padding:.2%}",
                    str(above.stride_bytes // kind.stride_bytes) if above else "-",
                )
            )
            above = kind
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 2) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        null = format_bytes(self.null_bytes) if self.null_bytes else "none"
        lines.append(f"weighted padding {self.weighted_padding:.2%}; null cell {null}; digest {self.digest():016x}")
        return "\n".join(lines)

    # -- exchange ------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the layout as canonical JSON: equal layouts give equal text."""
        data = {"schema": SCHEMA_VERSION, "null_bytes": self.null_bytes, "kinds": [asdict(kind) for kind in self.kinds]}
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            LayoutMismatchError: not JSON, another schema version, or fields that are no layout.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA_VERSION:
                raise LayoutMismatchError(f"layout schema {data['schema']!r}; this version reads {SCHEMA_VERSION}")
            kinds = tuple(_kind_from_dict(kind) for kind in data["kinds"])
            return cls(kinds, data["null_bytes"])
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise LayoutMismatchError(f"not a layout: {error!r}") from error

    def digest(self) -> int:
        """Return a stable uint64 of everything that decides where bytes lie."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "little")

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind.name}={kind.stride_bytes}" for kind in self.kinds)
        return f"Layout({kinds}, null_bytes={self.null_bytes})"


def _ordered(kinds: Iterable[Kind]) -> list[Kind]:
    """Largest first; equal sizes in the order given, so that kind ids do not depend on hashing."""
    return sorted(kinds, key=lambda kind: -kind.envelope_bytes)


def _with_page_sizes(kinds: Iterable[Kind], page_sizes: Mapping[str, int]) -> list[Kind]:
    return [replace(kind, page_size=page_sizes.get(kind.name, kind.page_size), stride_bytes=0) for kind in kinds]


def _weighted_padding(kinds: Sequence[Kind], strides: Sequence[int], weights: Mapping[str, float]) -> float:
    shares = [weights.get(kind.name, 1.0) for kind in kinds]
    parts = [w * (s / kind.bare_bytes - 1) for w, s, kind in zip(shares, strides, kinds, strict=True)]
    return sum(parts) / sum(shares)


def _kind_from_dict(data: dict[str, Any]) -> Kind:
    segments = []
    for item in data["segments"]:
        fields = dict(item)
        for name in ("layers", "shape"):
            fields[name] = tuple(fields[name])
        fields["shard_range"] = tuple(fields["shard_range"]) if fields["shard_range"] is not None else None
        fields["shard_parts"] = tuple(tuple(part) for part in fields["shard_parts"])
        segments.append(Segment(**fields))
    return Kind(**{**data, "segments": tuple(segments)})
