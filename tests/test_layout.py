"""Layout: envelopes, byte maps, the stride chain, padding, exchange."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest

from unifiedpool.errors import InvalidArgumentError, LayoutMismatchError
from unifiedpool.layout import (
    STRIDE_GRANULE,
    Kind,
    Layout,
    PaddingWarning,
    Segment,
    find_chain,
)

pytestmark = pytest.mark.filterwarnings("ignore::unifiedpool.layout.PaddingWarning")


def page_kind(name: str = "full", *, heads: int = 4, dims: tuple[int, int] = (24, 16), **options: object) -> Kind:
    layers = (1, 3, 4)
    segments = (
        Segment("key", layers, (heads, dims[0]), "bfloat16", "token"),
        Segment("value", layers, (heads, dims[1]), "bfloat16", "token"),
    )
    return Kind(name, segments, **{"page_size": 16, **options})  # type: ignore[arg-type]


def state_kind(order: str = "grouped") -> Kind:
    segments = (
        Segment("conv_q", (0, 2), (10, 3), "bfloat16", "slot"),
        Segment("conv_k", (0, 2), (6, 3), "bfloat16", "slot"),
        Segment("temporal", (0, 2, 5), (2, 5, 7), "float32", "slot"),
    )
    return Kind("state", segments, order=order)  # type: ignore[arg-type]


def bytes_of(kind: Kind, layer: int, name: str) -> list[int]:
    """Every byte of a cell that a view reaches, by walking its index space."""
    spec = kind.view_spec(layer, name)
    size = kind.segment(name, layer).element_bytes
    starts = (
        spec.offset_bytes + sum(i * s for i, s in zip(index, spec.strides_bytes, strict=True))
        for index in itertools.product(*map(range, spec.shape))
    )
    return [start + byte for start in starts for byte in range(size)]


VARIANTS = [
    page_kind(),
    page_kind(format="HND"),
    page_kind(order="token"),
    page_kind(order="head"),
    page_kind(page_size=1),
    page_kind(page_size=1, order="token"),
    page_kind(heads=3, dims=(5, 7)),
    page_kind(heads=3, dims=(5, 7), order="head"),
    page_kind(heads=3, dims=(5, 7), format="HND"),
    page_kind(heads=3, dims=(5, 7), order="token"),
    Kind("full", (Segment("latent", (0, 1), (576,), "float8_e4m3fn", "token"),), page_size=4),
    Kind(
        "full",
        (
            Segment("latent", (0, 1), (37,), "uint8", "token"),
            Segment("scale", (0, 1), (3,), "float32", "page"),
        ),
        page_size=4,
    ),
    state_kind(),
    state_kind("layered"),
]


@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: f"{kind.order}-{kind.format}-{kind.page_size}")
def test_view_spec_every_layer_and_segment_covers_its_own_bytes(kind: Kind) -> None:
    layout = Layout.build([kind])
    placed = layout.kinds[0]
    seen: set[int] = set()
    for segment in placed.segments:
        for layer in segment.layers:
            mine = bytes_of(placed, layer, segment.name)
            assert len(set(mine)) == len(mine) and not seen & set(mine)
            seen.update(mine)
    assert len(seen) == placed.bare_bytes
    assert max(seen) < placed.stride_bytes and placed.stride_bytes % STRIDE_GRANULE == 0
    assert placed.padding_bytes == placed.stride_bytes - len(seen)


@pytest.mark.parametrize("kind", VARIANTS, ids=lambda kind: f"{kind.order}-{kind.format}-{kind.page_size}")
def test_view_spec_rows_and_blocks_are_aligned(kind: Kind) -> None:
    placed = Layout.build([kind]).kinds[0]
    for segment in placed.segments:
        for layer in segment.layers:
            spec = placed.view_spec(layer, segment.name)
            assert spec.offset_bytes % (16 if placed.page_size else 128) == 0
            assert spec.strides_bytes[-1] == segment.element_bytes
            if segment.scope == "token":
                token_axis = 1 if placed.format == "HND" else 0
                assert spec.shape[token_axis] == placed.page_size
                assert spec.strides_bytes[token_axis] % 16 == 0
            assert all(stride % segment.element_bytes == 0 for stride in spec.strides_bytes)


def test_view_spec_page_major_matches_the_documented_order() -> None:
    kind = Layout.build([page_kind()]).kinds[0]
    key, value = 4 * 24 * 2, 4 * 16 * 2
    for position, layer in enumerate((1, 3, 4)):
        start = position * 16 * (key + value)
        assert kind.view_spec(layer, "key").offset_bytes == start
        assert kind.view_spec(layer, "value").offset_bytes == start + 16 * key
    assert kind.view_spec(1, "key").shape == (16, 4, 24)
    assert kind.view_spec(1, "key").strides_bytes == (key, 48, 2)


def test_view_spec_hnd_puts_heads_before_tokens() -> None:
    spec = Layout.build([page_kind(format="HND")]).kinds[0].view_spec(1, "key")
    assert spec.shape == (4, 16, 24)
    assert spec.strides_bytes == (16 * 48, 48, 2)


def test_view_spec_token_major_pads_the_row_not_the_end() -> None:
    # A state that must not be padded makes the page pay.
    state = Kind("state", (Segment("temporal", (0,), (9 * 199_680 + 4096,), "uint8", "slot"),))
    layout = Layout.build([page_kind(heads=13, order="token", page_size=64), state], weights={"state": 1000.0})
    kind = layout.kind("full")
    assert kind.bare_bytes == 199_680 < kind.stride_bytes
    assert kind.row_bytes * kind.page_size == kind.stride_bytes
    assert kind.row_bytes % 16 == 0
    assert kind.view_spec(3, "key").strides_bytes[0] == kind.row_bytes


def test_view_spec_head_major_keeps_each_head_contiguous() -> None:
    kind = Layout.build([page_kind(order="head")]).kinds[0]
    part = kind.envelope_bytes_per_head
    assert kind.view_spec(1, "key").strides_bytes == (48, part, 2)
    assert part == 3 * 16 * (48 + 32)


@pytest.mark.parametrize("order", ["page", "token", "head"])
def test_view_spec_wider_alignment_holds_for_every_token_and_head(order: str) -> None:
    segments = (
        Segment("scale", (0, 1), (3, 8), "uint8", "token"),
        Segment("key", (0, 1), (3, 24), "bfloat16", "token", alignment=64),
    )
    kind = Layout.build([Kind("full", segments, page_size=4, order=order)]).kinds[0]  # type: ignore[arg-type]
    for layer in (0, 1):
        spec = kind.view_spec(layer, "key")
        far = {"page": (), "token": spec.strides_bytes[:1], "head": spec.strides_bytes[1:2]}[order]
        assert all(start % 64 == 0 for start in (spec.offset_bytes, *far))


def test_view_spec_grouped_states_put_all_convs_before_the_temporal_states() -> None:
    grouped, layered = Layout.build([state_kind()]).kinds[0], Layout.build([state_kind("layered")]).kinds[0]
    convs = [grouped.view_spec(layer, name).offset_bytes for name in ("conv_q", "conv_k") for layer in (0, 2)]
    assert convs == [0, 128, 256, 384]
    assert grouped.view_spec(0, "temporal").offset_bytes == 512
    assert layered.view_spec(0, "temporal").offset_bytes == 256
    assert layered.view_spec(2, "conv_q").offset_bytes == 256 + 384
    assert layered.view_spec(5, "temporal").strides_bytes == (140, 28, 4)


def test_view_spec_unknown_layer_or_segment_says_what_there_is() -> None:
    layout = Layout.build([page_kind()])
    with pytest.raises(InvalidArgumentError, match=r"no segment 'query' in layer 1.*\['key', 'value'\]"):
        layout.view_spec("full", 1, "query")
    with pytest.raises(InvalidArgumentError, match=r"layer 2"):
        layout.view_spec("full", 2, "key")
    with pytest.raises(InvalidArgumentError, match="no kind 'swa'; the kinds are full"):
        layout.view_spec("swa", 1, "key")
    with pytest.raises(InvalidArgumentError, match="no kind 1"):
        layout.kind(1)


def test_segment_same_name_in_layers_of_other_shape_is_found_by_layer() -> None:
    segments = (
        Segment("key", (0, 2), (2, 8), "bfloat16", "token"),
        Segment("key", (1,), (4, 16), "bfloat16", "token"),
    )
    kind = Layout.build([Kind("full", segments, page_size=8)]).kinds[0]
    assert kind.view_spec(0, "key").shape == (8, 2, 8)
    assert kind.view_spec(1, "key").shape == (8, 4, 16)
    assert kind.view_spec(2, "key").offset_bytes == 8 * (32 + 128)


# -- the chain -----------------------------------------------------------------------------------------------------


def cheapest_by_brute_force(sizes: Sequence[int], granules: Sequence[int], weights: Sequence[float]) -> float:
    """The least cost over every chain, by trying all strides up to twice the largest size."""
    limit = 2 * max(sizes) + 2 * math.lcm(*granules)
    best = math.inf

    def extend(index: int, last: int, cost: float) -> None:
        nonlocal best
        if cost >= best:
            return
        if index < 0:
            best = cost
            return
        for stride in range(last, limit, last):
            if stride >= sizes[index] and stride % granules[index] == 0:
                extend(index - 1, stride, cost + weights[index] * (stride - sizes[index]) / sizes[index])

    for smallest in range(granules[-1], limit, granules[-1]):
        if smallest >= sizes[-1]:
            extend(len(sizes) - 2, smallest, weights[-1] * (smallest - sizes[-1]) / sizes[-1])
    return best / sum(weights)


def test_find_chain_random_sizes_is_never_beaten_by_brute_force(rng: random.Random) -> None:
    for _ in range(300):
        count = rng.choice([1, 2, 2, 3, 3, 4])
        granules = [rng.choice([1, 1, 2, 4]) for _ in range(count)]
        sizes = sorted((rng.randint(1, 40 if count < 4 else 20) for _ in range(count)), reverse=True)
        weights = [rng.choice([1.0, 1.0, 4.0, 0.25]) for _ in range(count)]
        strides, cost = find_chain(sizes, granules, weights)
        assert all(stride >= size for stride, size in zip(strides, sizes, strict=True))
        assert all(stride % granule == 0 for stride, granule in zip(strides, granules, strict=True))
        assert all(larger % smaller == 0 for larger, smaller in itertools.pairwise(strides))
        assert cost == pytest.approx(cheapest_by_brute_force(sizes, granules, weights), abs=1e-12)


def test_find_chain_weights_decide_which_side_is_padded() -> None:
    sizes = (29_039_616, 1_769_472)  # Kimi K3 TP8: a bf16 state and a 64-token page
    pages_dear, _ = find_chain(sizes, (256, 256), (1.0, 100.0))
    states_dear, _ = find_chain(sizes, (256, 256), (100.0, 1.0))
    assert pages_dear == (17 * 1_769_472, 1_769_472)
    assert states_dear == (16 * 1_815_040, 1_815_040)


def test_find_chain_large_ratio_is_found_at_once() -> None:
    strides, cost = find_chain((1 << 34, 12_345 << 8, 256), (256, 256, 256))
    assert strides[0] % strides[1] == 0 and strides[1] % strides[2] == 0
    assert cost < 0.001


def test_build_strides_13_12_11_are_padded_into_a_chain_with_the_padding_shown() -> None:
    with pytest.warns(PaddingWarning, match=r"b 8\.3%, c 18\.2%"):
        layout = Layout.simple({"a": 13 * 256, "b": 12 * 256, "c": 11 * 256})
    assert layout.strides == (3328, 3328, 3328)
    assert layout.padding == {"a": 0.0, "b": pytest.approx(1 / 12), "c": pytest.approx(2 / 11)}
    text = layout.explain()
    assert "8.33%" in text and "18.18%" in text and "3,072" in text


def test_build_little_padding_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layout.simple({"state": 1000 * 256 - 1, "full": 256})


def test_build_candidate_page_sizes_take_the_least_padding() -> None:
    state = Kind("state", (Segment("temporal", (0,), (99_000 * 256,), "uint8", "slot"),))
    page = Kind("full", (Segment("key", (0,), (1, 1024), "bfloat16", "token"),), page_size=1)
    sizes = (16, 64, 256, 1024)
    layout = Layout.build([state, page], page_sizes={"full": sizes})
    every = [Layout.build([state, replace(page, page_size=size)]).weighted_padding for size in sizes]
    assert round(layout.weighted_padding, 4) == round(min(every), 4)
    listed = Layout.candidates([state, page], page_sizes={"full": sizes})
    assert [c.weighted_padding for c in listed] == sorted(every)
    assert listed[0].page_sizes == {"full": layout.kind("full").page_size}


def test_build_equal_strides_keep_the_order_given() -> None:
    layout = Layout.build([page_kind("full"), page_kind("swa")])
    assert layout.names == ("full", "swa")
    assert (layout.kind("full").end, layout.kind("swa").end) == ("high", "low")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strides": {}}, "at least one kind"),
        ({"strides": {"full": 0}}, "bytes of kind 'full' is 0"),
        ({"strides": {"full": -256}}, "is -256"),
        ({"strides": {"full": 1.5}}, "is 1.5"),
        ({"strides": {"full": True}}, "is True"),
        ({"strides": {"full": 256}, "ends": {"swa": "low"}}, "'swa' is not one of the kinds"),
        ({"strides": {"full": 256}, "ends": {"full": "left"}}, "end is 'left'; choose one of low, high"),
        ({"strides": {"full": 256}, "zero": {"full": "maybe"}}, "zero is 'maybe'"),
        ({"strides": {"full": 256}, "weights": {"full": 0}}, "weights are above 0"),
        ({"strides": {"full": 256}, "page_sizes": {"full": -1}}, "page_size is -1"),
    ],
)
def test_simple_bad_arguments_are_refused_at_construction(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Layout.simple(**arguments)  # type: ignore[arg-type]


def test_build_kind_added_twice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'full' is added twice"):
        Layout.build([page_kind(), page_kind()])


def test_constructor_refuses_strides_that_are_no_chain() -> None:
    kinds = Layout.simple({"state": 1024, "full": 256}).kinds
    with pytest.raises(InvalidArgumentError, match="no chain: 1280 of 'state'"):
        Layout((replace(kinds[0], stride_bytes=1280), replace(kinds[1], stride_bytes=512)))
    with pytest.raises(InvalidArgumentError, match="at least 1024"):
        Layout((replace(kinds[0], stride_bytes=512), kinds[1]))
    with pytest.raises(InvalidArgumentError, match="null_bytes is 512"):
        Layout(kinds, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"layers": ()}, "no layers"),
        ({"layers": (2, 1)}, "ascend"),
        ({"layers": (-1,)}, "layer is -1"),
        ({"shape": (0, 4)}, "is 0"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"scope": "row"}, "scope is 'row'"),
        ({"shard_axis": 2}, "shard_axis 2 is outside"),
        ({"alignment": 48}, "alignment 48"),
    ],
)
def test_segment_bad_field_is_refused(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"name": "key", "layers": (0,), "shape": (2, 4), "dtype": "bfloat16", "scope": "token"}
    with pytest.raises(InvalidArgumentError, match=message):
        Segment(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "scope 'token', but page_size is 0"),
        ({"order": "layered"}, "order is 'layered'"),
        ({"format": "HND", "order": "token"}, "HND is page-major only"),
        ({"format": "HND", "order": "head"}, "HND is page-major only"),
        ({"segments": ()}, "no segments"),
        ({"segments": (Segment("key", (0,), (8,), "uint8", "token"),) * 2}, "listed twice"),
        ({"segments": (Segment("latent", (0,), (8,), "uint8", "token"),), "order": "head"}, "equal heads"),
        ({"segments": (Segment("scale", (0,), (8,), "uint8", "page"),), "order": "token"}, "per-page segment"),
    ],
)
def test_kind_that_cannot_be_laid_out_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(page_kind(), **options)  # type: ignore[arg-type]


# -- null cell, capacity, exchange ---------------------------------------------------------------------------------


def test_null_bytes_is_the_largest_page_stride_or_nothing() -> None:
    sizes = {"state": 4096, "swa": 1024, "full": 256}
    assert Layout.simple(sizes).null_bytes == 1024
    assert Layout.simple(sizes, null_cell=False).null_bytes == 0
    assert Layout.simple({"state": 4096}).null_bytes == 0


def test_capacity_counts_whole_cells_beside_the_null_cell() -> None:
    layout = Layout.simple({"state": 4096, "full": 256})
    assert layout.capacity(4 * 4096) == {"state": 3, "full": 63}
    assert layout.capacity(4 * 4096 + 4095) == {"state": 3, "full": 78}
    assert layout.capacity(0) == {"state": 0, "full": 0}
    assert Layout.simple({"state": 4096, "full": 256}, null_cell=False).capacity(4 * 4096)["state"] == 4
    with pytest.raises(InvalidArgumentError, match="arena_bytes is -1"):
        layout.capacity(-1)


def test_json_round_trip_keeps_layout_and_digest() -> None:
    layout = Layout.build([page_kind(order="token"), state_kind()])
    again = Layout.from_json(layout.to_json())
    assert again == layout and again.digest() == layout.digest()
    assert again.view_spec("full", 3, "value") == layout.view_spec("full", 3, "value")


def test_digest_is_stable_and_tells_layouts_apart() -> None:
    base = Layout.simple({"state": 4096, "full": 256})
    assert base.digest() == 0x4BD42BE2B62331B0  # a changed digest breaks plans across versions: raise the schema
    others = [
        Layout.simple({"state": 4096, "full": 512}),
        Layout.simple({"state": 4096, "full": 256}, null_cell=False),
        Layout.simple({"state": 4096, "full": 256}, ends={"full": "low"}),
        Layout.simple({"state": 4096, "swa": 256}),
    ]
    assert len({layout.digest() for layout in (base, *others)}) == 5
    assert all(0 <= layout.digest() < 1 << 64 for layout in others)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "kinds": [{}], "null_bytes": 0}'])
def test_from_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(LayoutMismatchError):
        Layout.from_json(text)


def test_to_json_names_its_schema() -> None:
    assert json.loads(Layout.simple({"full": 256}).to_json())["schema"] == 1
