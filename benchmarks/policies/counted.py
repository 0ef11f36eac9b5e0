"""Policies that never move a cell: for them counts are enough, positions do not matter or follow from groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm

from .base import Counters, Model, Policy

__all__ = ["LcmPages", "PaddedSlab", "StaticRatio", "VllmBlocks"]


class StaticRatio(Policy):
    """The arena is split once: states get ratio / (1 + ratio) of it, pages the rest.

    With window pages the rest is split so that the window kind has `window_ratio` tokens for each token of the full
    kind (SGLang's --swa-full-tokens-ratio, .8 by default).
    """

    def __init__(self, model: Model, *, ratio: float = 0.9, window_ratio: float = 0.8) -> None:
        state_bytes = model.arena_bytes * ratio / (1 + ratio)
        rest = model.arena_bytes - state_bytes
        per_token = [size / tokens for size, tokens in zip(model.cell_bytes[1:], model.page_tokens[1:], strict=True)]
        shares = [window_ratio] * (len(per_token) - 1) + [1.0]
        tokens = rest / sum(share * size for share, size in zip(shares, per_token, strict=True))
        pages = [int(share * tokens // size) for share, size in zip(shares, model.page_tokens[1:], strict=True)]
        self._free = [int(state_bytes // model.cell_bytes[0]), *pages]
        self._held: dict[int, list[int]] = {}

    def fits(self, counts: Sequence[int]) -> bool:
        return all(count <= free for count, free in zip(counts, self._free, strict=True))

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        self._held[request] = [0] * len(counts)
        if self.grow(request, counts):
            return True
        del self._held[request]
        return False

    def grow(self, request: int, counts: Sequence[int]) -> bool:
        if not self.fits(counts):
            return False
        held = self._held[request]
        for kind, count in enumerate(counts):
            self._free[kind] -= count
            held[kind] += count
        return True

    def shrink(self, request: int, kind: int, count: int) -> None:
        self._held[request][kind] -= count
        self._free[kind] += count

    def finish(self, request: int) -> None:
        for kind, count in enumerate(self._held.pop(request)):
            self._free[kind] += count

    def counters(self) -> Counters:
        return Counters()


class VllmBlocks(Policy):
    """vLLM's hybrid rule: the attention block grows until it is as large as a layer's state; all blocks are equal.

    Layers form groups of equal size; a block holds one group's share of `block_tokens` tokens or of a state. A running
    request keeps two states when finished ones are cached, else one.
    """

    def __init__(self, model: Model, *, caching: bool) -> None:
        self._page_tokens = model.page_tokens
        state_per_layer = model.cell_bytes[0] / model.linear_layers
        per_token = model.cell_bytes[-1] / model.page_tokens[-1] / model.page_layers[-1]
        align = model.block_tokens
        self.block_tokens = align * ceil(state_per_layer / (align * per_token))
        group = min(model.linear_layers, *model.page_layers)
        self.block_bytes = int(group * self.block_tokens * per_token)
        self.state_blocks = ceil(model.linear_layers / group)
        self._page_groups = [0, *(ceil(layers / group) for layers in model.page_layers)]
        self._states = 2 if caching else 1
        self._free = model.arena_bytes // self.block_bytes
        self._held: dict[int, list[int]] = {}  # cells of each kind, then states kept per state cell
        self._blocks: dict[int, int] = {}

    def fits(self, counts: Sequence[int]) -> bool:
        return self._need([*counts, self._states]) <= self._free

    def _need(self, held: Sequence[int]) -> int:
        *cells, states = held
        blocks = cells[0] * states * self.state_blocks
        for kind in range(1, len(cells)):
            blocks += ceil(cells[kind] * self._page_tokens[kind] / self.block_tokens) * self._page_groups[kind]
        return blocks

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        self._held[request] = [0] * len(counts) + [self._states]
        self._blocks[request] = 0
        if self.grow(request, counts):
            return True
        del self._held[request], self._blocks[request]
        return False

    def grow(self, request: int, counts: Sequence[int]) -> bool:
        old = self._held[request]
        new = [*(have + more for have, more in zip(old[:-1], counts, strict=True)), old[-1]]
        more = self._need(new) - self._blocks[request]
        if more > self._free:
            return False
        self._settle(request, new)
        return True

    def _settle(self, request: int, held: list[int]) -> None:
        blocks = self._need(held)
        self._free -= blocks - self._blocks[request]
        self._blocks[request] = blocks
        self._held[request] = held

    def shrink(self, request: int, kind: int, count: int) -> None:
        held = list(self._held[request])
        held[kind] -= count
        self._settle(request, held)

    def retire(self, request: int) -> None:
        self._settle(request, [*self._held[request][:-1], 1])

    def finish(self, request: int) -> None:
        self._free += self._blocks.pop(request)
        del self._held[request]

    def counters(self) -> Counters:
        return Counters()


class _Groups(Policy):
    """Large pages of equal size, each given to one kind while any of its cells is live. Nothing moves."""

    def __init__(self, model: Model, large_bytes: int, cell_bytes: Sequence[int], *, by_request: bool) -> None:
        self._per_page = [large_bytes // size for size in cell_bytes]
        pages = model.arena_bytes // large_bytes
        self._free_pages = list(range(pages - 1, -1, -1))
        self._room = [0] * len(cell_bytes)  # free cells inside pages that the kind owns
        self._partial: list[dict[int, int]] = [{} for _ in cell_bytes]  # page -> free cells, where there are any
        self._used = [0] * pages
        self._by_request = by_request
        self._held: dict[int, list[list[list[int]]]] = {}  # request -> kind -> [page, cells], oldest first

    def _missing(self, counts: Sequence[int]) -> int:
        """Free large pages that `counts` need beside the room in the kinds' own."""
        return sum(
            ceil(max(0, count - room) / per)
            for count, room, per in zip(counts, self._room, self._per_page, strict=True)
        )

    def fits(self, counts: Sequence[int]) -> bool:
        return self._missing(counts) <= len(self._free_pages)

    def admit(self, request: int, counts: Sequence[int]) -> bool:
        self._held[request] = [[] for _ in counts]
        if self.grow(request, counts):
            return True
        del self._held[request]
        return False

    def grow(self, request: int, counts: Sequence[int]) -> bool:
        spare = len(self._free_pages) - self._missing(counts)
        if spare < 0:
            return False
        # A request-aware choice takes free pages before other requests' partial ones, so what the next kind needs is
        # set aside first.
        for kind, count in enumerate(counts):
            spare = self._place(request, kind, count, spare)
        return True

    def _place(self, request: int, kind: int, count: int, spare: int) -> int:
        held, partial = self._held[request][kind], self._partial[kind]
        while count:
            if self._by_request and held and held[-1][0] in partial:
                page = held[-1][0]
            elif partial and not (self._by_request and spare > 0):
                page = next(iter(partial))
            else:
                spare -= self._room[kind] >= count
                page = self._free_pages.pop()
                partial[page] = self._per_page[kind]
                self._room[kind] += self._per_page[kind]
            taken = min(count, partial[page])
            self._used[page] += taken
            self._room[kind] -= taken
            count -= taken
            if partial[page] == taken:
                del partial[page]
            else:
                partial[page] -= taken
            if held and held[-1][0] == page:
                held[-1][1] += taken
            else:
                held.append([page, taken])
        return spare

    def _give_back(self, kind: int, page: int, count: int) -> None:
        self._used[page] -= count
        self._room[kind] += count
        self._partial[kind][page] = self._partial[kind].get(page, 0) + count
        if self._used[page] == 0:
            del self._partial[kind][page]
            self._room[kind] -= self._per_page[kind]
            self._free_pages.append(page)

    def shrink(self, request: int, kind: int, count: int) -> None:
        held = self._held[request][kind]
        while count:
            taken = min(count, held[0][1])
            self._give_back(kind, held[0][0], taken)
            held[0][1] -= taken
            count -= taken
            if not held[0][1]:
                held.pop(0)

    def finish(self, request: int) -> None:
        for kind, held in enumerate(self._held.pop(request)):
            for page, count in held:
                self._give_back(kind, page, count)

    def counters(self) -> Counters:
        return Counters()


class PaddedSlab(_Groups):
    """Slabs as large as a padded state; a slab of pages is filled before the next one is taken."""

    def __init__(self, model: Model) -> None:
        strides = model.layout.strides
        super().__init__(model, strides[0], strides, by_request=False)


class LcmPages(_Groups):
    """Jenga: large pages of the least common multiple of the bare sizes; a request's cells stay together."""

    def __init__(self, model: Model) -> None:
        self.large_bytes = lcm(*model.cell_bytes)
        super().__init__(model, self.large_bytes, model.cell_bytes, by_request=True)
