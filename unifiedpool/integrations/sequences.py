"""What a model reads and writes of its sequences during one forward: through an arena, or in plain tensors.

`UnifiedCache` (one request or an equal-length batch) and the engine (rows of different lengths) stand on the same
mechanism:

* a *sequence* names the bytes of one request: `ArenaSequence` by handles, `PlainSequence` by tensors of its own;
* a *batch* is a list of sequences during one forward: `ArenaBatch`, `PlainBatch`, both a `ForwardBatch`.

    batch = ArenaBatch(pool, windows, [sequence, ...])
    batch.grow(new_tokens)                       # cells for the next tokens, and the step plan applied
    keys, values = batch.attend(layer, k, v)     # every attention layer: store the new rows, get what they attend to
    state = batch.state(layer, "conv")           # every state layer: a tensor to change in place, or
    batch.set_state(layer, "conv", value)        # to set
    batch.finish()                               # states back, lengths advanced, pages left of the windows dropped

Cells are looked up through their handles in each call, so anything may move between two forwards, and states may move
inside one. The same batches give the same shapes and strides in both kinds, so their results are bit-equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from unifiedpool.errors import InvalidArgumentError, InvalidHandleError, LayoutMismatchError
from unifiedpool.layout import Layout

__all__ = [
    "ArenaBatch",
    "ArenaSequence",
    "ForwardBatch",
    "PageRun",
    "PlainBatch",
    "PlainSequence",
    "PoolLike",
    "release",
]

Tensor = torch.Tensor


class PoolLike(Protocol):
    """What is needed of a pool: `Pool` and `StaticPool` have it.

    Of the planner: `allocate`, `free`, `detach` and `cells`; of the arena: `view`.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def planner(self) -> Any: ...

    @property
    def arena(self) -> Any: ...

    def step(self) -> Any: ...


@dataclass(slots=True)
class PageRun:
    """Consecutive pages of one sequence in one kind.

    Attributes:
        first: page number (token position // page size) of the first handle.
        handles: one handle per page; 0 where a window kind never stored a page because one long forward passed it.
    """

    first: int = 0
    handles: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ArenaSequence:
    """One sequence whose cache lies in an arena.

    Attributes:
        length: tokens in the cache.
        pages: kind -> its pages.
        slots: kind -> handle of its slot.
    """

    length: int = 0
    pages: dict[str, PageRun] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)

    def handles(self) -> list[int]:
        """List every handle once."""
        owned = [handle for run in self.pages.values() for handle in run.handles if handle]
        return list(dict.fromkeys([*owned, *self.slots.values()]))


@dataclass(slots=True, eq=False)
class PlainSequence:
    """One sequence whose cache is plain tensors: the reference that the arena is compared with.

    Attributes:
        length: tokens in the cache.
        keys, values: layer -> `[heads, tokens, dim]`; a window layer keeps its last window - 1 tokens.
        states: (layer, name) -> tensor.
    """

    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    states: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class ForwardBatch(ABC):
    """Sequences during one forward. See the module's head for the order of calls.

    Args:
        windows: layer -> sliding window in tokens, the new token included; other layers attend to everything.
        sequences: the rows, in order. More than one new token at a time needs equal lengths.
    """

    def __init__(self, windows: Mapping[int, int], sequences: Sequence[Any]) -> None:
        self.windows = dict(windows)
        self.sequences = list(sequences)
        self.lengths = [int(sequence.length) for sequence in self.sequences]
        self.new_tokens = 0
        self._has_attended = False
        if not self.sequences:
            raise InvalidArgumentError("a batch needs at least one sequence")
        if 0 in self.lengths and any(self.lengths):
            raise InvalidArgumentError(f"lengths {self.lengths}: empty sequences cannot share a forward with others")

    @property
    def is_ragged(self) -> bool:
        """Whether the rows differ in length."""
        return len(set(self.lengths)) > 1

    @staticmethod
    def first_position(window: int | None, length: int) -> int:
        """Return the first position that the next token attends to when `length` tokens are in the cache.

        >>> [ForwardBatch.first_position(window, 100) for window in (None, 8, 200)]
        [0, 93, 0]
        """
        return 0 if window is None else max(0, length - window + 1)

    def attended(self, layer: int) -> list[int]:
        """Return how many rows of each sequence `attend` gives back; the rest of a row is padding."""
        window = self.windows.get(layer)
        return [length + self.new_tokens - self.first_position(window, length) for length in self.lengths]

    def grow(self, new_tokens: int) -> None:
        """Make room for the tokens of this forward, all or nothing.

        May be called again: with the same number it is free, with a larger one it adds to it until the first `attend`.

        Raises:
            InvalidArgumentError: not positive, fewer than before, or several tokens for rows of unequal lengths.
            CapacityError: the arena has no room; nothing changed.
        """
        if new_tokens == self.new_tokens > 0:
            return
        if new_tokens < max(1, self.new_tokens) or self._has_attended:
            raise InvalidArgumentError(f"{new_tokens} new tokens asked for, {self.new_tokens} expected in this forward")
        if new_tokens > 1 and self.is_ragged:
            raise InvalidArgumentError(
                f"{new_tokens} new tokens for rows of lengths {self.lengths}; prefill unequal rows one by one"
            )
        self._grow(new_tokens)
        self.new_tokens = new_tokens

    def finish(self) -> None:
        """Write states back, advance the lengths, drop pages that left their window. The batch is used up."""
        self._finish()
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            sequence.length = length + self.new_tokens

    def masks(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> dict[int | None, Tensor]:
        """Make the attention masks of a forward of one new token per row.

        Args:
            dtype: None gives booleans (True: attend), for sdpa; a floating dtype gives what eager attention adds.
            device: where the masks go.

        Returns:
            window (None: full attention) -> mask `[rows, 1, 1, longest row]`.
        """
        masks: dict[int | None, Tensor] = {}
        for window in (None, *dict.fromkeys(self.windows.values())):
            counts = [length + 1 - self.first_position(window, length) for length in self.lengths]
            valid = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
            if dtype is not None:
                valid = torch.where(valid, 0.0, torch.finfo(dtype).min).to(dtype)
            masks[window] = valid[:, None, None, :].to(device)
        return masks

    @abstractmethod
    def _grow(self, new_tokens: int) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    @abstractmethod
    def attend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows and return all rows that they attend to (after `grow`).

        Args:
            layer: model layer number.
            keys: `[rows, heads, new tokens, dim]`.
            values: the same; heads and dim may differ.

        Returns:
            Keys and values `[rows, heads, tokens, dim]`, contiguous, padded on the right with zeros; `attended` says
            how many tokens of each row are valid.

        Raises:
            LayoutMismatchError: the cells hold another shape or dtype.
        """

    @abstractmethod
    def state(self, layer: int, name: str) -> Tensor | None:
        """Return the states `[rows, *shape]` to read or to change in place, or None when the rows are empty."""

    @abstractmethod
    def set_state(self, layer: int, name: str, value: Tensor) -> Tensor:
        """Set the states `[rows, *shape]`, and return them as `state` would."""


def _index(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


@dataclass(slots=True)
class _Access:
    """Index tensors of one kind in one forward."""

    write_cells: Tensor  # [written tokens] cell of each
    write_offsets: Tensor  # [written tokens] token number in its page
    write_rows: Tensor | None  # [written tokens] which of the new rows are stored; None: all
    read_cells: Tensor  # [rows * pages] cells of every row, padded with its last page
    first_row: int  # where the rows begin in the gathered pages, equal for all
    row_index: Tensor | None  # [rows * tokens] where they lie, when not
    tokens: int  # tokens per row to return
    padding: Tensor | None  # [rows, tokens, 1, 1] True past a row's end; None: all rows are equally long
    appends: bool  # new rows were not all stored: return the gathered ones and then the new ones


class ArenaBatch(ForwardBatch):
    """A batch of `ArenaSequence` over the arena of a pool.

    `grow` allocates what the sequences still lack, as one joint demand, and applies the step plan; an engine that
    allocates by itself puts the handles into `sequence.pages` and `sequence.slots` first and calls `pool.step()`.
    A batch of one changes the state's bytes in place; several rows work on gathered copies, which `finish` writes
    back.

    Args:
        pool: where the sequences live.
        windows, sequences: as in `ForwardBatch`.
    """

    def __init__(self, pool: PoolLike, windows: Mapping[int, int], sequences: Sequence[ArenaSequence]) -> None:
        super().__init__(windows, sequences)
        self.pool = pool
        self.layout = pool.layout
        self._kind_of: dict[tuple[int, bool], str] = {}
        self._window_of: dict[str, int | None] = {}
        for kind in self.layout.kinds:
            of_layers = [self.windows.get(layer) for layer in kind.layers]
            bounded = [window for window in of_layers if window is not None]
            self._window_of[kind.name] = max(bounded) if len(bounded) == len(of_layers) and kind.page_size else None
            for layer in kind.layers:
                self._kind_of[layer, kind.page_size > 0] = kind.name
        self._access: dict[tuple[str, int | None], _Access] = {}
        self._gathered: dict[tuple[int, str], Tensor] = {}

    # -- cells ---------------------------------------------------------------------------------------------------

    @staticmethod
    def demand(layout: Layout, windows: Mapping[str, int], sequence: ArenaSequence, new_tokens: int) -> dict[str, int]:
        """Count the cells of each kind that `sequence` lacks for a forward of `new_tokens`.

        Args:
            windows: kind -> largest window of its layers, for kinds all of whose layers have one.
        """
        lacking: dict[str, int] = {}
        end = sequence.length + new_tokens
        for kind in layout.kinds:
            if not kind.page_size:
                lacking[kind.name] = 0 if sequence.slots.get(kind.name) else 1
                continue
            start, stop = _missing_pages(sequence, kind.name, kind.page_size, windows.get(kind.name), end)
            lacking[kind.name] = stop - start
        return {name: count for name, count in lacking.items() if count}

    def _grow(self, new_tokens: int) -> None:
        windows = {name: window for name, window in self._window_of.items() if window is not None}
        lacking = [self.demand(self.layout, windows, sequence, new_tokens) for sequence in self.sequences]
        self._take(lacking, new_tokens)
        self.pool.step()

    def _take(self, lacking: Sequence[Mapping[str, int]], new_tokens: int) -> None:
        totals: dict[str, int] = {}
        for counts in lacking:
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
        if not totals:
            return
        handles = [int(handle) for handle in self.pool.planner.allocate(totals)]
        position = 0
        for name in totals:
            page_size, window = self.layout.kind(name).page_size, self._window_of[name]
            for sequence, counts in zip(self.sequences, lacking, strict=True):
                taken = handles[position : position + counts.get(name, 0)]
                position += len(taken)
                if not taken:
                    continue
                if not page_size:
                    sequence.slots[name] = taken[0]
                    continue
                run = sequence.pages.setdefault(name, PageRun())
                start, _ = _missing_pages(sequence, name, page_size, window, sequence.length + new_tokens)
                if not run.handles:
                    run.first = start
                run.handles.extend([0] * (start - run.first - len(run.handles)))
                run.handles.extend(taken)

    def _cells(self, kind: str, handles: Sequence[int]) -> Any:
        """Look handles up; the null handle gives cell -1."""
        cells = np.asarray(self.pool.planner.cells(kind))[np.array(handles, dtype=np.int64)].astype(np.int64)
        for handle, cell in zip(handles, cells, strict=True) if (cells < 0).any() else ():
            if handle and cell < 0:
                raise InvalidHandleError(f"handle {handle} has no {kind!r} cell; it was freed or detached meanwhile")
        return cells

    # -- attention -----------------------------------------------------------------------------------------------

    def _plan_access(self, kind: str, window: int | None, device: torch.device) -> _Access:
        page_size, new = self.layout.kind(kind).page_size, self.new_tokens
        write_cells, write_offsets, write_rows, tables, offsets = [], [], [], [], []
        complete = True
        for row, (sequence, length) in enumerate(zip(self.sequences, self.lengths, strict=True)):
            run = sequence.pages.get(kind, PageRun())
            cells = self._cells(kind, run.handles)
            positions = np.arange(length, length + new)
            pages = positions // page_size - run.first
            if pages[-1] >= len(cells):
                raise InvalidArgumentError(
                    f"sequence {row} has pages for {(run.first + len(cells)) * page_size} tokens in kind {kind!r}; "
                    f"this forward needs {length + new}; call grow() first"
                )
            stored = (pages >= 0) & (cells[np.maximum(pages, 0)] >= 0)
            complete = complete and bool(stored.all())
            write_cells.append(cells[pages[stored]])
            write_offsets.append(positions[stored] % page_size)
            write_rows.append(np.flatnonzero(stored) + row * new)
            start = self.first_position(window, length)
            first_page = start // page_size
            offsets.append(start - first_page * page_size)
            tables.append((cells, first_page - run.first))
        if not complete and self.is_ragged:
            raise InvalidArgumentError(
                f"kind {kind!r} lacks pages for rows of lengths {self.lengths}; call grow() first"
            )
        # With pages missing (passed by this very forward) only the older rows are gathered.
        counts = [n + (new if complete else 0) - self.first_position(window, n) for n in self.lengths]
        tokens = max(counts)
        used_pages = [
            -(-(offset + count) // page_size) if count else 0 for offset, count in zip(offsets, counts, strict=True)
        ]
        width = max(used_pages)
        table = np.empty((len(tables), width), dtype=np.int64)
        for row, ((cells, first), used) in enumerate(zip(tables, used_pages, strict=True)):
            if used and (first < 0 or (cells[first : first + used] < 0).any()):
                raise InvalidArgumentError(f"sequence {row} no longer has the pages of its window in kind {kind!r}")
            table[row, :used] = cells[first : first + used]
            table[row, used:] = cells[first + used - 1] if used else 0
        row_index = None
        if len(set(offsets)) > 1:
            index = np.array(offsets)[:, None] + np.arange(tokens)
            index = np.minimum(index, width * page_size - 1) + np.arange(len(tables))[:, None] * width * page_size
            row_index = _index(index.reshape(-1), device)
        padding = None
        if len(set(counts)) > 1:
            padding = torch.from_numpy(np.arange(tokens) >= np.array(counts)[:, None])[:, :, None, None].to(device)
        return _Access(
            write_cells=_index(np.concatenate(write_cells), device),
            write_offsets=_index(np.concatenate(write_offsets), device),
            write_rows=None if complete else _index(np.concatenate(write_rows), device),
            read_cells=_index(table.reshape(-1), device),
            first_row=offsets[0],
            row_index=row_index,
            tokens=tokens,
            padding=padding,
            appends=not complete,
        )

    def _page_view(self, kind: str, layer: int, segment: str) -> Tensor:
        """View a segment of a page kind as `[cells, page_size, heads, dim]`."""
        view: Tensor = self.pool.arena.view(kind, layer, segment)
        return view.transpose(1, 2) if self.layout.kind(kind).format == "HND" and view.dim() == 4 else view

    def _key_value_views(self, kind: str, layer: int, key_dim: int) -> tuple[Tensor, Tensor]:
        names = {segment.name for segment in self.layout.kind(kind).segments if layer in segment.layers}
        if "latent" in names:
            # MLA: the latent serves as the keys of one head, the rope part behind it as the values.
            rows = self._page_view(kind, layer, "latent").unsqueeze(2)
            return rows[..., :key_dim], rows[..., key_dim:]
        return self._page_view(kind, layer, "key"), self._page_view(kind, layer, "value")

    def attend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kind = self._kind_of.get((layer, True))
        if kind is None:
            raise LayoutMismatchError(f"layer {layer} attends, but no page kind of {self.layout!r} has it")
        if keys.shape[0] != len(self.sequences) or keys.shape[2] != self.new_tokens:
            raise InvalidArgumentError(
                f"keys of layer {layer} are {tuple(keys.shape)}; expected {len(self.sequences)} rows of "
                f"{self.new_tokens} tokens"
            )
        self._has_attended = True
        window = self.windows.get(layer)
        if (kind, window) not in self._access:
            self._access[kind, window] = self._plan_access(kind, window, keys.device)
        access = self._access[kind, window]
        views = self._key_value_views(kind, layer, keys.shape[-1])
        return (
            self._attend_one(access, layer, "keys", views[0], keys),
            self._attend_one(access, layer, "values", views[1], values),
        )

    def _attend_one(self, access: _Access, layer: int, what: str, view: Tensor, new: Tensor) -> Tensor:
        rows, heads, tokens, dim = new.shape
        if view.shape[2:] != (heads, dim) or view.dtype != new.dtype:
            raise LayoutMismatchError(
                f"{what} of layer {layer} are {(heads, dim)} per token in {new.dtype}, the cells hold "
                f"{tuple(view.shape[2:])} in {view.dtype}; build the layout from this model's config, with "
                "convention='transformers' and the model's dtype"
            )
        flat = new.transpose(1, 2).reshape(rows * tokens, heads, dim)
        stored = flat if access.write_rows is None else flat.index_select(0, access.write_rows)
        view.index_put_((access.write_cells, access.write_offsets), stored)
        # Whole pages first: one memory copy each. The table has the same width in every row.
        pages = view.index_select(0, access.read_cells)
        if access.row_index is not None:
            picked = pages.reshape(-1, heads, dim).index_select(0, access.row_index)
            gathered = picked.view(rows, access.tokens, heads, dim)
        else:
            width = pages.shape[0] // rows * pages.shape[1]
            gathered = pages.reshape(rows, width, heads, dim)[:, access.first_row : access.first_row + access.tokens]
        if access.padding is not None:
            gathered.masked_fill_(access.padding, 0)  # a mask does not stop NaN: nought times NaN is NaN
        gathered = gathered.transpose(1, 2)
        return torch.cat((gathered, new), dim=2) if access.appends else gathered.contiguous()

    # -- states --------------------------------------------------------------------------------------------------

    def _slot_view(self, layer: int, name: str) -> tuple[str, Tensor]:
        kind = self._kind_of.get((layer, False))
        if kind is None:
            raise LayoutMismatchError(f"layer {layer} keeps a state, but no slot kind of {self.layout!r} has it")
        return kind, self.pool.arena.view(kind, layer, name)

    def _slot_cells(self, kind: str) -> Any:
        if not all(sequence.slots.get(kind) for sequence in self.sequences):
            raise InvalidArgumentError(f"a row has no slot in kind {kind!r} yet; call grow() first")
        return self._cells(kind, [sequence.slots[kind] for sequence in self.sequences])

    def state(self, layer: int, name: str) -> Tensor | None:
        return self._buffer(layer, name) if self.lengths[0] else None

    def _buffer(self, layer: int, name: str) -> Tensor:
        kind, view = self._slot_view(layer, name)
        if len(self.sequences) == 1:
            cell = int(self._slot_cells(kind)[0])
            return view[cell : cell + 1]
        if (layer, name) not in self._gathered:
            cells = _index(self._slot_cells(kind), view.device)
            self._gathered[layer, name] = view.index_select(0, cells)
        return self._gathered[layer, name]

    def set_state(self, layer: int, name: str, value: Tensor) -> Tensor:
        buffer = self._buffer(layer, name)
        if buffer.shape != value.shape or buffer.dtype != value.dtype:
            raise LayoutMismatchError(
                f"state {name!r} of layer {layer} is {tuple(value.shape)} in {value.dtype}, the slots hold "
                f"{tuple(buffer.shape)} in {buffer.dtype}; build the layout from this model's config, with "
                "convention='transformers' and the model's dtypes"
            )
        return buffer.copy_(value)

    def _finish(self) -> None:
        if self._gathered:
            self.pool.step()  # bytes lie where the host's tables say only when everything planned is applied
        for (layer, name), states in self._gathered.items():
            kind, view = self._slot_view(layer, name)
            view.index_copy_(0, _index(self._slot_cells(kind), view.device), states)
        self._gathered.clear()
        for kind, window in self._window_of.items():
            if window is not None:
                self._drop_passed_pages(kind, window)

    def _drop_passed_pages(self, kind: str, window: int) -> None:
        page_size = self.layout.kind(kind).page_size
        passed: list[tuple[PageRun, int]] = []
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            run = sequence.pages.get(kind, PageRun())
            keep = self.first_position(window, length + self.new_tokens) // page_size
            passed.append((run, min(max(0, keep - run.first), len(run.handles))))
        handles = [handle for run, count in passed for handle in run.handles[:count] if handle]
        if handles:
            self.pool.planner.detach(handles, kind)
        for run, count in passed:
            del run.handles[:count]
            run.first += count


def release(pool: PoolLike, sequence: ArenaSequence) -> None:
    """Give every cell of `sequence` back and make it empty."""
    handles = sequence.handles()
    if handles:
        pool.planner.free(handles)
    sequence.length = 0
    sequence.pages.clear()
    sequence.slots.clear()


def _missing_pages(sequence: ArenaSequence, kind: str, page_size: int, window: int | None, end: int) -> tuple[int, int]:
    """Return the page numbers [start, stop) that must be added before `end` tokens fit."""
    run = sequence.pages.get(kind, PageRun())
    after = run.first + len(run.handles)
    stop = -(-end // page_size)
    # Pages that this forward itself passes are never read again: not stored.
    oldest_kept = 0 if window is None else max(0, end - window + 1) // page_size
    return min(max(after, oldest_kept), stop), stop


class PlainBatch(ForwardBatch):
    """A batch of `PlainSequence`: the same calls on tensors of their own, without pages or slots."""

    def __init__(self, windows: Mapping[int, int], sequences: Sequence[PlainSequence]) -> None:
        super().__init__(windows, sequences)
        self._stacked: dict[tuple[int, str], Tensor] = {}

    def _grow(self, new_tokens: int) -> None:
        pass

    def attend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._has_attended = True
        return (
            self._attend_one(layer, [sequence.keys for sequence in self.sequences], keys),
            self._attend_one(layer, [sequence.values for sequence in self.sequences], values),
        )

    def _attend_one(self, layer: int, stores: Sequence[dict[int, Tensor]], new: Tensor) -> Tensor:
        window = self.windows.get(layer)
        rows = []
        for store, fresh in zip(stores, new, strict=True):
            row = torch.cat((store[layer], fresh), dim=1) if layer in store else fresh.clone()
            rows.append(row)
            store[layer] = row if window is None else row[:, max(0, row.shape[1] - window + 1) :].clone()
        tokens = max(row.shape[1] for row in rows)
        padded = new.new_zeros((len(rows), new.shape[1], tokens, new.shape[3]))
        for target, row in zip(padded, rows, strict=True):
            target[:, : row.shape[1]] = row
        return padded

    def state(self, layer: int, name: str) -> Tensor | None:
        if not self.lengths[0]:
            return None
        if (layer, name) not in self._stacked:
            self._stacked[layer, name] = torch.stack([sequence.states[layer, name] for sequence in self.sequences])
        return self._stacked[layer, name]

    def set_state(self, layer: int, name: str, value: Tensor) -> Tensor:
        if (layer, name) in self._stacked:
            return self._stacked[layer, name].copy_(value)
        self._stacked[layer, name] = value.clone(memory_format=torch.contiguous_format)
        return self._stacked[layer, name]

    def _finish(self) -> None:
        for (layer, name), states in self._stacked.items():
            for sequence, state in zip(self.sequences, states, strict=True):
                sequence.states[layer, name] = state.clone()
        self._stacked.clear()
