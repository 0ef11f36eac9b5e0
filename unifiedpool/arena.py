"""The arena: one `torch.uint8` buffer, views over it, and the device tables from handles to cells.

One per worker. It holds bytes and decides nothing: a planner elsewhere writes step plans, `Arena.apply` carries them
out at the head of a step, on the stream that runs the forward. Later kernels then see the new tables, earlier ones are
done with the old bytes, and no event is needed.

Views span the whole arena with `as_strided`, so no move ever makes one stale; only a resize does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from ._native import ffi, lib, raise_for_plan
from .errors import (
    CapacityError,
    InvalidArgumentError,
    InvalidHandleError,
    LayoutMismatchError,
    PlanOrderError,
    format_bytes,
    refuse_copy,
)
from .kernels import backend
from .kernels._support import upload
from .layout import Kind, Layout, ViewSpec
from .plan import OPERATION_NAMES, StepPlan

__all__ = ["BASE_ALIGNMENT", "TORCH_DTYPES", "Arena"]

BASE_ALIGNMENT = 256

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}

ViewForm = Literal["paged", "rows", "state"]


class Arena:
    """One byte buffer under every kind of a layout.

    Args:
        layout: the kinds and strides.
        arena_bytes: size; need not be a multiple of anything.
        device: "cpu", "cuda", ...
        max_handles: rows of the tables, handle 0 not counted. Default: one per cell of the smallest kind, as the
            planner's.
        buffer: memory to use, uint8 `[n >= arena_bytes]`, contiguous, 256-byte aligned; own memory by default. The
            arena can grow within it without a copy.

    Attributes:
        buffer: uint8 `[arena_bytes]`, 256-byte aligned.
        table: int32 `[kinds, max_handles + 1]` on the device, at a fixed address: handle -> cell, -1 none. Handle 0
            is the null cell (0) for page kinds when the layout has one, else -1.
        tables: kind name -> its row of `table`.
        sequence: number of the next plan.

    Raises:
        InvalidArgumentError: a size that is no positive integer or below the null cell, a buffer of the wrong dtype,
            device, shape or alignment.
        CapacityError: the device has no memory for it.

    >>> arena = Arena(Layout.simple({"state": 4096, "full": 256}), 1 << 20)
    >>> arena.view("full", 0, "bytes").shape, arena.tables["state"].shape
    (torch.Size([4096, 256]), torch.Size([4097]))
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        layout: Layout,
        arena_bytes: int,
        *,
        device: str | torch.device = "cpu",
        max_handles: int | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        _check_size(layout, arena_bytes)
        if max_handles is not None and (type(max_handles) is not int or not 1 <= max_handles < 1 << 31):
            raise InvalidArgumentError(f"max_handles is {max_handles!r}; it must be an integer from 1 to 2^31 - 1")
        self.layout = layout
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgumentError(f"device {device!r}: {str(error).splitlines()[0]}") from error
        self.sequence = 0
        self._digest = layout.digest()
        self._is_own = buffer is None
        if buffer is None:
            self._memory = _allocate(arena_bytes, self.device)
        else:
            self._memory = _check_buffer(buffer, arena_bytes, self.device)
        self.buffer = self._memory[:arena_bytes]
        # Named "cuda:0" where "cuda" was asked for: every later device check compares with tensors.
        self.device = self.buffer.device
        self.buffer[: layout.null_bytes].zero_()
        self.max_handles = max_handles or max(1, arena_bytes // layout.strides[-1])
        self._new_tables()
        self._views: dict[tuple[str, int, str], Tensor] = {}
        self._fills = {
            index: filled
            for index, kind in enumerate(layout.kinds)
            if (filled := [(s.name, layer, s.fill) for s in kind.segments if s.fill for layer in s.layers])
        }

    # -- views ---------------------------------------------------------------------------------------------------

    @property
    def arena_bytes(self) -> int:
        """Size of the arena in bytes."""
        return self.buffer.shape[0]

    def num_cells(self, kind: str | int) -> int:
        """Return how many whole cells of a kind the arena spans, the null cell included."""
        return self.arena_bytes // self.layout.kind(kind).stride_bytes

    def view(self, kind: str | int, layer: int, segment: str) -> Tensor:
        """View one layer of one segment over the whole arena.

        Returns:
            `[cells, page_size, *shape]` for pages ("HND": `[cells, heads, page_size, dim]`), `[cells, *shape]` for
            slots and per-page segments. Only the strides of the first axes are large; the last one is 1. The same
            tensor each time, until a resize.

        Raises:
            InvalidArgumentError: no such kind, layer or segment.

        Complexity: O(1) after the first call.
        """
        found = self.layout.kind(kind)
        key = (found.name, layer, segment)
        if key not in self._views:
            # Made inside inference mode, the cached view could never be written outside of it.
            with torch.inference_mode(False):
                self._views[key] = self._strided(found, found.view_spec(layer, segment))
        return self._views[key]

    @overload
    def views(self, kind: str | int, *, layer: int, form: ViewForm | None = None) -> dict[str, Tensor]: ...

    @overload
    def views(
        self, kind: str | int, *, layer: None = None, form: ViewForm | None = None
    ) -> dict[int, dict[str, Tensor]]: ...

    def views(
        self, kind: str | int, *, layer: int | None = None, form: ViewForm | None = None
    ) -> dict[str, Tensor] | dict[int, dict[str, Tensor]]:
        """View every segment of a layer, or of each layer.

        Args:
            kind: name or id.
            layer: model layer; None: all of the kind.
            form: "paged" `[cells, page_size, ...]`, "rows" `[cells * page_size, ...]` addressed by flat token ids
                (needs token-major order or one-token pages) or "state" `[cells, ...]`. Default: "paged" for pages,
                "state" for slots.

        Returns:
            segment name -> tensor; with `layer=None` layer -> segment name -> tensor.

        Raises:
            InvalidArgumentError: no such kind or layer, or a form that the kind's order cannot give.
        """
        found = self.layout.kind(kind)
        wanted = form or ("paged" if found.page_size else "state")
        if wanted not in ("paged", "rows", "state"):
            raise InvalidArgumentError(f"form {wanted!r}; choose 'paged', 'rows' or 'state'")
        if (wanted == "state") == bool(found.page_size):
            fitting = "'paged' or 'rows'" if found.page_size else "'state'"
            raise InvalidArgumentError(f"kind {found.name!r} has no {wanted!r} views; use {fitting}")
        if layer is None:
            return {each: self._layer_views(found, each, wanted) for each in found.layers}
        return self._layer_views(found, layer, wanted)

    def _layer_views(self, kind: Kind, layer: int, form: ViewForm) -> dict[str, Tensor]:
        names = [segment.name for segment in kind.segments if layer in segment.layers]
        if not names:
            raise InvalidArgumentError(f"kind {kind.name!r} has no layer {layer}; it has {list(kind.layers)}")
        if form != "rows":
            return {name: self.view(kind.name, layer, name) for name in names}
        return {name: self._rows(kind, layer, name) for name in names if kind.segment(name, layer).scope == "token"}

    def _rows(self, kind: Kind, layer: int, segment: str) -> Tensor:
        spec = kind.view_spec(layer, segment)
        row_bytes = spec.strides_bytes[0] if kind.page_size > 1 else kind.stride_bytes
        if row_bytes * kind.page_size != kind.stride_bytes or kind.format != "NHD":
            raise InvalidArgumentError(
                f"kind {kind.name!r} is {kind.order}-major {kind.format} with {kind.page_size}-token pages: its tokens "
                "are not evenly spaced; build the layout with order='token' or page_size=1"
            )
        base, size = self._typed(spec.dtype)
        return torch.as_strided(
            base,
            (self.num_cells(kind.name) * kind.page_size, *spec.shape[1:]),
            tuple(stride // size for stride in (row_bytes, *spec.strides_bytes[1:])),
            base.storage_offset() + spec.offset_bytes // size,
        )

    def _strided(self, kind: Kind, spec: ViewSpec) -> Tensor:
        base, size = self._typed(spec.dtype)
        return torch.as_strided(
            base,
            (self.num_cells(kind.name), *spec.shape),
            tuple(stride // size for stride in (kind.stride_bytes, *spec.strides_bytes)),
            base.storage_offset() + spec.offset_bytes // size,
        )

    def _typed(self, dtype: str) -> tuple[Tensor, int]:
        """The buffer as elements of `dtype`; bytes past the last whole element belong to no cell."""
        torch_dtype = TORCH_DTYPES[dtype]
        size = torch_dtype.itemsize
        return self.buffer[: self.arena_bytes // size * size].view(torch_dtype), size

    def cell_bytes(self, kind: str | int, cell: int) -> Tensor:
        """View the bytes of one cell, uint8 `[stride]`.

        Raises:
            InvalidArgumentError: the cell is outside the arena.
        """
        found = self.layout.kind(kind)
        if not hasattr(cell, "__index__") or not 0 <= cell < self.num_cells(kind):
            raise InvalidArgumentError(
                f"cell {cell} of kind {found.name!r}: the arena has cells 0 to {self.num_cells(kind) - 1}"
            )
        return self.buffer[cell * found.stride_bytes : (cell + 1) * found.stride_bytes]

    # -- steps ---------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan | None, *, stream: Any = None) -> None:
        """Carry out a step plan: moves, copies and zeroes phase by phase, then the table changes.

        Call it at the head of the step, on the stream that runs the forward. None (nothing to do) is fine. A plan
        that changes the arena's size resizes it: views taken before are stale then.

        Args:
            plan: from `Planner.seal`, or `StepPlan.from_bytes`.
            stream: a `torch.cuda.Stream`; the current one by default.

        Raises:
            PlanOrderError: not the next plan of the sequence, or for an arena of another size. Nothing is changed.
            LayoutMismatchError: made for another layout. Nothing is changed.
            InvalidArgumentError: the plan needs more memory than the buffer given at construction, or more table
                rows than `max_handles`; a stream for an arena that is not on a CUDA device. Nothing is changed.

        Complexity: O(bytes moved + changes). Mutates the buffer and the tables.
        """
        if stream is not None and self.device.type != "cuda":
            raise InvalidArgumentError(f"a stream was given, but the arena is on {self.device}; leave it out")
        if plan is None:
            return
        if not isinstance(plan, StepPlan):
            raise InvalidArgumentError(
                f"a plan is a StepPlan, not {type(plan).__name__}; StepPlan.from_bytes reads one"
            )
        self._check_plan(plan)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            # Operations may use bytes on both sides of a resize: grow before them, shrink after them.
            if plan.arena_bytes > self.arena_bytes:
                self._resize(plan.arena_bytes, plan.max_handles)
            self._run_operations(plan)
            if plan.arena_bytes < self.arena_bytes:
                self._resize(plan.arena_bytes, plan.max_handles)
            self._change_tables(plan)
        self.sequence += 1

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.layout_digest != self._digest:
            raise LayoutMismatchError(
                f"the plan is for layout {plan.layout_digest:016x}, this arena has {self._digest:016x}; "
                "build both from the same Layout"
            )
        if plan.sequence != self.sequence:
            raise PlanOrderError(
                f"plan {plan.sequence} does not follow: this arena waits for plan {self.sequence}; "
                "apply every sealed plan once, in order"
            )
        if plan.arena_bytes_before != self.arena_bytes:
            raise PlanOrderError(
                f"the plan starts from {plan.arena_bytes_before:,} bytes, this arena has {self.arena_bytes:,}; "
                "give planner and arena the same arena_bytes"
            )
        if not self._is_own and plan.arena_bytes > self._memory.shape[0]:
            raise InvalidArgumentError(
                f"the plan grows the arena to {format_bytes(plan.arena_bytes)}, the buffer given holds "
                f"{format_bytes(self._memory.shape[0])}; give a larger one"
            )
        rows = int(plan.changes[:, 0].max()) if len(plan.changes) else 0
        if rows > self.max_handles and plan.arena_bytes <= self.arena_bytes:
            raise InvalidArgumentError(
                f"the plan names handle {rows}, the tables end at {self.max_handles}; make the arena with the "
                "planner's max_handles"
            )

    def _run_operations(self, plan: StepPlan) -> None:
        if self.device.type == "cpu" and not self._fills and backend.current() == "auto":
            data = plan.to_bytes()
            base = ffi.cast("uint8_t *", self.buffer.data_ptr())
            code = lib.up_apply(base, self.arena_bytes, ffi.from_buffer("uint8_t[]", data), len(data))
            if code:
                raise_for_plan(code)
            return
        run = self._operation("copy_cells", "run_operations")
        if not self._fills:
            run(self.buffer, plan.operations, plan.strides)
            return
        table = plan.operations
        for rows in np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1):
            run(self.buffer, rows, plan.strides)
            for kind_id, fills in self._fills.items():
                cells = rows[rows[:, 1] == (OPERATION_NAMES.index("zero") | kind_id << 8), 3]
                if len(cells):
                    fresh = upload(cells.astype(np.int64), self.device)
                    for segment, layer, fill in fills:
                        self.view(kind_id, layer, segment).index_fill_(0, fresh, fill)

    def _change_tables(self, plan: StepPlan) -> None:
        if len(plan.changes):
            # A copy: a plan's arrays may be read-only.
            changes = upload(plan.changes.copy(), self.device)
            self._operation("page_tables", "update_tables")(self.table, changes)

    def _operation(self, module: str, name: str) -> Any:
        """A kernel's wrapper or its reference, by the one switch; Triton is not imported before it is needed."""
        home = module if backend.uses_kernels(self.device) else "naive"
        return getattr(importlib.import_module(f".kernels.{home}", __package__), name)

    def _new_tables(self) -> None:
        shape = len(self.layout.kinds), self.max_handles + 1
        self.table = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        for index, kind in enumerate(self.layout.kinds):
            self.table[index, 0] = self._null(kind)
        self.tables = dict(zip(self.layout.names, self.table, strict=True))

    def _null(self, kind: Kind) -> int:
        """What padding becomes in tables of this kind."""
        return 0 if kind.page_size and self.layout.null_bytes else -1

    def _resize(self, arena_bytes: int, max_handles: int) -> None:
        if self._is_own:
            kept = min(arena_bytes, self.arena_bytes)
            memory = _allocate(arena_bytes, self.device)
            memory[:kept].copy_(self.buffer[:kept])
            self._memory = memory
        self.buffer = self._memory[:arena_bytes]
        self._views.clear()
        if max_handles > self.max_handles:
            self.max_handles = max_handles
            old = self.table
            self._new_tables()
            self.table[:, : old.shape[1]] = old

    # -- tables for kernels --------------------------------------------------------------------------------------

    def block_table(self, handles: Tensor, kind: str | int, out: Tensor) -> Tensor:
        """Translate handles to cells.

        Args:
            handles: int32 `[rows, width]`, padded with 0 or -1.
            kind: page kind, or slot kind for state indices.
            out: int32 `[rows, width]`; padding and handles without a cell become the null cell 0 (page kinds of a
                layout that has one), else -1.

        Returns:
            `out`.

        Raises:
            InvalidArgumentError: wrong dtype, shape or device.
            InvalidHandleError: a handle past the tables (checked on the CPU only: reading back would stall a device).
        """
        found = self.layout.kind(kind)
        self._check_tensor("handles", handles, torch.int32, None)
        self._check_tensor("out", out, torch.int32, handles.shape)
        self._check_handles(handles)
        self._operation("page_tables", "translate")(handles, self.tables[found.name], out, self._null(found))
        return out

    def slot_mapping(self, handles: Tensor, positions: Tensor, kind: str | int, out: Tensor) -> Tensor:
        """Translate token positions to flat rows, `cell * page_size + position % page_size`.

        Args:
            handles: int32 `[tokens]`, the page of each token, or `[rows, width]`, the pages of each row, padded with
                0 or -1.
            positions: int32 or int64, `[tokens]` or `[rows, tokens]`; below 0: padding.
            kind: a page kind.
            out: int64, shaped as `positions`; -1 for padding and for null or dead pages.

        Returns:
            `out`.

        Raises:
            InvalidArgumentError: wrong dtype, shape, device, or a slot kind.
            InvalidHandleError: as `block_table`.
        """
        found = self.layout.kind(kind)
        if not found.page_size:
            raise InvalidArgumentError(f"kind {found.name!r} holds slots, not tokens; slot_mapping needs a page kind")
        self._check_tensor("handles", handles, torch.int32, None)
        if not isinstance(positions, Tensor):
            raise InvalidArgumentError(f"positions are {type(positions).__name__}; they must be a tensor")
        axes = handles.dim()
        if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != axes or axes not in (1, 2):
            raise InvalidArgumentError(
                f"positions are {positions.dtype} {tuple(positions.shape)}; need int32 or int64 with as many axes as "
                f"handles {tuple(handles.shape)}, one or two"
            )
        self._check_tensor("positions", positions, positions.dtype, None)
        self._check_tensor("out", out, torch.int64, positions.shape)
        self._check_handles(handles)
        if len(handles) != len(positions):
            unit = "rows of handles" if handles.dim() == 2 else "handles"
            raise InvalidArgumentError(f"{len(handles)} {unit} for {len(positions)} of positions")
        if handles.dim() == 2 and self.device.type == "cpu" and positions.numel():
            last = int(positions.max())
            if last // found.page_size >= handles.shape[1]:
                raise InvalidArgumentError(
                    f"position {last} needs page {last // found.page_size}; the rows have {handles.shape[1]} pages"
                )
        self._operation("page_tables", "map_slots")(handles, positions, self.tables[found.name], found.page_size, out)
        return out

    def _check_tensor(self, what: str, tensor: Tensor, dtype: torch.dtype, shape: torch.Size | None) -> None:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"{what} is {type(tensor).__name__}; it must be a {dtype} tensor")
        if tensor.dtype != dtype:
            raise InvalidArgumentError(f"{what} is {tensor.dtype}; it must be {dtype}")
        if tensor.device != self.device:
            raise InvalidArgumentError(f"{what} is on {tensor.device}; the arena is on {self.device}")
        if shape is not None and tensor.shape != shape:
            raise InvalidArgumentError(f"{what} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}")

    def _check_handles(self, handles: Tensor) -> None:
        if self.device.type == "cpu" and handles.numel() and int(handles.max()) > self.max_handles:
            raise InvalidHandleError(f"handle {int(handles.max())}: the tables end at {self.max_handles}")

    def __repr__(self) -> str:
        return f"Arena({format_bytes(self.arena_bytes)} on {self.device}, {', '.join(self.layout.names)})"


def _check_size(layout: Layout, arena_bytes: object) -> None:
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout is {type(layout).__name__}; it must be a Layout, such as Layout.simple")
    if isinstance(arena_bytes, bool) or not isinstance(arena_bytes, int) or not 0 < arena_bytes < 1 << 62:
        raise InvalidArgumentError(f"arena_bytes is {arena_bytes!r}; it must be an integer from 1 to 2^62 - 1")
    if arena_bytes < layout.null_bytes:
        raise InvalidArgumentError(
            f"an arena of {format_bytes(arena_bytes)} cannot hold the null cell of {format_bytes(layout.null_bytes)}; "
            "give more bytes, smaller pages or null_cell=False"
        )


def _allocate(size: int, device: torch.device) -> Tensor:
    """Uninitialised bytes at a 256-byte aligned address, which a CPU allocator does not give by itself."""
    try:
        raw = torch.empty(size + BASE_ALIGNMENT, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, AssertionError) as error:  # torch built without CUDA asserts
        raise CapacityError(f"no memory for {format_bytes(size)} on {device}: {error}") from error
    start = -raw.data_ptr() % BASE_ALIGNMENT
    return raw[start : start + size]


def _check_buffer(buffer: Tensor, arena_bytes: int, device: torch.device) -> Tensor:
    if not isinstance(buffer, Tensor):
        raise InvalidArgumentError(f"buffer is {type(buffer).__name__}; it must be a torch.uint8 tensor")
    checks: list[tuple[bool, Callable[[], str]]] = [
        (buffer.dtype == torch.uint8, lambda: f"is {buffer.dtype}; it must be torch.uint8"),
        (
            buffer.dim() == 1 and buffer.is_contiguous(),
            lambda: f"is {tuple(buffer.shape)}; it must be flat, contiguous",
        ),
        (buffer.device.type == device.type, lambda: f"is on {buffer.device}; the arena is on {device}"),
        (buffer.numel() >= arena_bytes, lambda: f"has {buffer.numel():,} bytes; the arena needs {arena_bytes:,}"),
        (buffer.data_ptr() % BASE_ALIGNMENT == 0, lambda: f"must start at a multiple of {BASE_ALIGNMENT} bytes"),
    ]
    for fits, message in checks:
        if not fits:
            raise InvalidArgumentError(f"buffer {message()}")
    return buffer
