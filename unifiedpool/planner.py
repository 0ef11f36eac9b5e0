"""The planner: who owns which cell, decided on the host, without torch and without a byte of the arena.

Every decision is the C core's (csrc/grids.h states the invariants and the capacity formula). This module gives it
Python's manners: names, messages, receipts.
"""

from __future__ import annotations

import json
import operator
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ._native import ffi, lib, raise_for_planner
from .errors import (
    CapacityError,
    ConcurrentCallError,
    InvalidArgumentError,
    InvalidHandleError,
    ReservationError,
    format_bytes,
    refuse_copy,
)
from .layout import Layout
from .plan import StepPlan

__all__ = [
    "Demand",
    "DemandLike",
    "Handles",
    "HandlesLike",
    "KindStats",
    "Pin",
    "Planner",
    "PlannerStats",
    "Reservation",
]

DUMP_SCHEMA_VERSION = 1
_INT32_MAX = 2**31 - 1
_MAX_KINDS = int(lib.UP_MAX_KINDS)
_FORBID_MOVES = int(lib.UP_FORBID_MOVES)
_ZERO_POLICY = {"never": lib.UP_ZERO_NEVER, "dirty": lib.UP_ZERO_IF_DIRTY, "always": lib.UP_ZERO_ALWAYS}


class Handles:
    """A caller-owned int32 buffer of handles, reusable from call to call.

    It keeps its own pointer, so that a hot call converts nothing. `len` is what the last call wrote. It belongs to the
    first planner that uses it: another one refuses it, so handles of one pool never free those of another.

    >>> handles = Handles.of([3, 5, 8])
    >>> len(handles), handles[0], handles[1:].tolist()
    (3, 3, [5, 8])
    """

    __slots__ = ("_data", "_native", "_planner", "capacity")
    __reduce__ = refuse_copy

    def __init__(self, capacity: int) -> None:
        """Make an empty buffer for up to `capacity` handles.

        Raises:
            InvalidArgumentError: capacity is negative or no integer.
        """
        if not isinstance(capacity, int) or not 0 <= capacity <= _INT32_MAX:
            raise InvalidArgumentError(f"capacity is {capacity!r}; it must be an integer from 0 to {_INT32_MAX}")
        self._data: Any = ffi.new("int32_t[]", max(capacity, 1))
        self._native: Any = ffi.new("up_handles *", (ffi.NULL, capacity, 0, self._data))
        self._planner: Planner | None = None
        self.capacity = capacity

    @classmethod
    def of(cls, values: HandlesLike) -> Handles:
        """Copy handles from a list, an int32 or int64 array, or a memoryview.

        Raises:
            InvalidHandleError: a value is no integer or does not fit int32.
        """
        view = _host_handles(values)
        made = cls(len(view))
        made._native.length = len(view)
        made.view[:] = view
        return made

    def _bind(self, planner: Planner) -> None:
        if self._planner is None:
            self._planner, self._native.grids = planner, planner._grids
        elif self._planner is not planner:
            raise InvalidHandleError("these Handles belong to another planner; give each planner buffers of its own")

    @property
    def view(self) -> memoryview:
        """`[len]` int32 over the same memory, writable."""
        return memoryview(ffi.buffer(self._data)).cast("B").cast("i")[: len(self)]

    def numpy(self) -> npt.NDArray[np.int32]:
        """`[len]` int32 array over the same memory."""
        return np.frombuffer(self.view, np.int32) if len(self) else np.empty(0, np.int32)

    def tolist(self) -> list[int]:
        """Return the handles as Python integers."""
        return self.view.tolist()

    def __len__(self) -> int:
        return int(self._native.length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        """An int for an index, a copy for a slice."""
        return Handles.of(self.view[index]) if isinstance(index, slice) else self.view[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handles) and self.tolist() == other.tolist()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.view[:8]))
        return f"Handles([{shown}{', ...' if len(self) > 8 else ''}], capacity={self.capacity})"


HandlesLike: TypeAlias = "Handles | Sequence[int] | npt.NDArray[np.integer[Any]] | memoryview | array[int]"


def _host_handles(values: object) -> memoryview:
    """Return the values as a contiguous int32 memoryview, copying when they are not one already."""
    if isinstance(values, Handles):
        return values.view
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise InvalidHandleError(
                f"handles are an array of dtype {values.dtype} and shape {values.shape}; give [n] int32"
            )
        if values.dtype != np.int32:
            if values.size and (values.min() < -_INT32_MAX - 1 or values.max() > _INT32_MAX):
                raise InvalidHandleError(f"handles hold {values.min()}..{values.max()}; they are int32")
            values = values.astype(np.int32)
        return memoryview(np.ascontiguousarray(values))  # type: ignore[arg-type]
    if isinstance(values, memoryview | array):
        view = memoryview(values)
        if view.ndim == 1 and view.format == "i":
            return view if view.c_contiguous else memoryview(array("i", view.tolist()))
        raise InvalidHandleError(f"handles are a buffer of format {view.format!r}; give [n] int32")
    # An array would read the bytes of bytes as its own: four of them as one handle.
    is_text = isinstance(values, str | bytes | bytearray)
    if is_text or not isinstance(values, Iterable) or hasattr(values, "is_cuda"):
        raise InvalidHandleError(f"handles are {type(values).__name__}; give host int32 values, such as [handle]")
    try:
        return memoryview(array("i", values))
    except (TypeError, OverflowError) as error:
        raise InvalidHandleError(f"handles must be int32 integers: {error}") from None


_NOWHERE = Handles(0)
# A mapping's key type is invariant: without the first two, a variable of type dict[str, int] would be refused.
DemandMapping: TypeAlias = "Mapping[str, int] | Mapping[tuple[str, ...], int] | Mapping[str | tuple[str, ...], int]"
DemandLike: TypeAlias = "Demand | DemandMapping"


class Demand:
    """A joint demand, compiled for one planner: how many handles of which kinds.

    Made by `Planner.demand`. Reuse it: a hot call takes it as it is, and `set` changes a count in place.
    """

    __slots__ = ("_counts", "_items", "_native", "_out", "_planner", "keys")
    __reduce__ = refuse_copy

    def __init__(self, planner: Planner, demand: DemandMapping) -> None:
        """Compile `demand` (see `Planner.demand`)."""
        if not isinstance(demand, Mapping):
            raise InvalidArgumentError(f"a demand is a mapping such as {{'full': 3, 'state': 1}}, not {demand!r}")
        self._planner = planner
        self.keys = tuple(demand)
        self._items: Any = ffi.new("up_item[]", len(demand))
        self._native: Any = ffi.new("up_demand *", (planner._grids, 0, len(demand), 0, self._items, ffi.NULL))
        self._out = _NOWHERE  # where the native demand points
        self._counts = [0] * len(demand)
        for index, (key, count) in enumerate(demand.items()):
            names = (key,) if isinstance(key, str) else key
            if not names or not isinstance(names, tuple | frozenset):
                raise InvalidArgumentError(
                    f"{key!r} in demand {dict(demand)!r}: give a kind's name or a tuple of names"
                )
            for name in names:
                self._items[index].kind_mask |= 1 << planner.layout.kind_id(name)
            self.set(index, count)

    def set(self, index: int, count: int) -> None:
        """Change the count of item `index` (in the mapping's order). O(1).

        Raises:
            InvalidArgumentError: no such item, or count is negative, above 2^31 - 1 or no integer.
        """
        try:
            if type(count) is not int:
                count = self._as_int(index, count)
            if not 0 <= count <= _INT32_MAX:
                self._bad_count(index, count)
            self._items[index].count = count
        except (TypeError, IndexError):
            self._bad_index(index)
        self._native.total += count - self._counts[index]
        self._counts[index] = count

    def _as_int(self, index: int, count: object) -> int:
        """The count of a numpy integer and the like; what only rounds to an integer is refused."""
        try:
            return operator.index(count)  # type: ignore[arg-type]
        except TypeError:
            self._bad_count(index, count)

    def _bad_count(self, index: int, count: object) -> NoReturn:
        raise InvalidArgumentError(
            f"count of {self.keys[index]!r} is {count!r}; it must be an integer from 0 to {_INT32_MAX}"
        )

    def _bad_index(self, index: object) -> NoReturn:
        raise InvalidArgumentError(f"no item {index!r} in {self!r}; the items are 0 to {len(self.keys) - 1}")

    def _aim(self, out: Handles) -> None:
        """Make `out` the buffer that the native demand writes to."""
        if not isinstance(out, Handles):
            raise InvalidArgumentError(f"out is {type(out).__name__}; it must be Handles, such as Handles(capacity)")
        out._bind(self._planner)
        self._out, self._native.out = out, out._native

    @property
    def total(self) -> int:
        """Handles that the demand is for."""
        return int(self._native.total)

    def per_kind(self) -> list[int]:
        """Return the number of cells of each kind, by kind id."""
        counts = [0] * len(self._planner.layout.kinds)
        for index, count in enumerate(self._counts):
            mask = self._items[index].kind_mask
            for kind in range(len(counts)):
                counts[kind] += count if mask >> kind & 1 else 0
        return counts

    def __repr__(self) -> str:
        return f"Demand({dict(zip(self.keys, self._counts, strict=True))})"


@dataclass(frozen=True, slots=True)
class KindStats:
    """Counts of one kind, in cells of that kind unless the name says bytes (csrc/grids.h, up_kind_stats)."""

    cells: int
    live: int
    pinned: int
    available: int
    pin_free: int
    reserved: int
    placeable: int
    held_by_pins: int
    evacuations: int
    moved_cells: int
    allocated_cells: int
    zeroed_cells: int
    worst_window_bytes: int


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """What a planner can say in O(kinds) (csrc/grids.h, up_stats)."""

    arena_bytes: int
    live_bytes: int
    free_bytes: int
    reserved_bytes: int
    tail_bytes: int
    live_handles: int
    max_handles: int
    moved_bytes: int
    allocated_bytes: int
    worst_call_bytes: int
    refusals: int
    sequence: int
    unsealed_operations: int
    kinds: dict[str, KindStats]

    @property
    def utilisation(self) -> float:
        """Live bytes as a share of the bytes that could ever be live."""
        return self.live_bytes / max(1, self.arena_bytes - self.reserved_bytes)

    @property
    def moved_share(self) -> float:
        """Bytes moved per byte allocated."""
        return self.moved_bytes / max(1, self.allocated_bytes)


class Planner:
    """Allocates cells of every kind of a layout out of one arena, on the host alone.

    Largest kind first, states lowest and pages highest; a window is evacuated only when no cell is available; the
    capacity formula makes `can_allocate` exact. Not for two threads at once: the second gets `ConcurrentCallError`.

    >>> planner = Planner(Layout.simple({"state": 4096, "full": 512}), 1 << 16)
    >>> handles = planner.allocate({"full": 3, "state": 1})
    >>> planner.cell(handles[0], "full"), planner.cell(handles[3], "state")
    (7, 1)
    >>> planner.free(handles)
    >>> planner.free_extents()
    [(512, 65024)]
    """

    __slots__ = (
        "__weakref__",
        "_allocate",
        "_can_allocate",
        "_free",
        "_grids",
        "_pins",
        "_sealing",
        "arena_bytes",
        "layout",
    )
    __reduce__ = refuse_copy

    def __init__(self, layout: Layout, arena_bytes: int) -> None:
        """Plan `arena_bytes` bytes.

        Raises:
            InvalidArgumentError: the arena is not a positive number of bytes, smaller than the null cell, or has 2^31
                cells of a kind or more.
            MemoryError: host memory ran out. Complexity: O(cells).
        """
        if not isinstance(layout, Layout):
            raise InvalidArgumentError(f"layout is {type(layout).__name__}; it must be a Layout, such as Layout.simple")
        if len(layout.kinds) > _MAX_KINDS:
            raise InvalidArgumentError(
                f"the layout has {len(layout.kinds)} kinds; a planner takes {_MAX_KINDS} at most"
            )
        arena_bytes = _arena_size(layout, arena_bytes)
        kinds = ffi.new("up_kind[]", len(layout.kinds))
        for native, kind in zip(kinds, layout.kinds, strict=True):
            native.stride_bytes = kind.stride_bytes
            native.low_end = kind.end == "low"
            native.zero_policy = _ZERO_POLICY[kind.zero]
        out, error = ffi.new("up_grids **"), ffi.new("up_error *")
        code = lib.up_create(arena_bytes, layout.null_bytes, kinds, len(layout.kinds), layout.digest(), out, error)
        if code != lib.UP_OK:
            raise_for_planner(code, error, layout.names, f"Planner({layout!r}, {arena_bytes})")
        self.layout = layout
        self.arena_bytes = arena_bytes
        self._grids: Any = ffi.gc(out[0], lib.up_destroy)
        self._pins: dict[int, Pin] = {}
        self._sealing = threading.Lock()
        # Bound once: a module attribute costs as much as the C work of a one-page call.
        self._allocate, self._free, self._can_allocate = (
            lib.up_allocate_demand,
            lib.up_free_handles,
            lib.up_can_allocate_demand,
        )

    # -- errors --------------------------------------------------------------------------------------------------

    def _raise(self, code: int, what: str, demand: Demand | None = None) -> NoReturn:
        error = lib.up_last_error(self._grids)
        if code == lib.UP_NO_CAPACITY:
            raise CapacityError(self._capacity_message(what, demand, error))
        raise_for_planner(code, error, self.layout.names, what)

    def _capacity_message(self, what: str, demand: Demand | None, error: Any) -> str:
        need, have = int(error.need), int(error.have)
        kind = self.layout.kinds[error.kind]
        stats = self.stats()
        asked = ""
        if demand is not None:
            parts = [
                f"{count} {k.name} ({format_bytes(count * k.stride_bytes)})"
                for k, count in zip(self.layout.kinds, demand.per_kind(), strict=True)
                if count
            ]
            asked = f"need {' and '.join(parts) or 'nothing'}; "
        strides = dict(zip(self.layout.names, self.layout.strides, strict=True))
        pinned = sum(kind_stats.pinned * strides[name] for name, kind_stats in stats.kinds.items())
        reserved = sum(kind_stats.reserved * strides[name] for name, kind_stats in stats.kinds.items())
        return (
            f"{what}: {asked}{format_bytes(stats.free_bytes)} free, {format_bytes(pinned)} pinned, "
            f"{format_bytes(reserved)} reserved; the {kind.name} grid would need {need} cells of {have}. "
            f"Free at least {format_bytes((need - have) * kind.stride_bytes)}"
            f"{', or release pins' if pinned else ''}{', or cancel reservations' if reserved else ''}."
        )

    def _host_handles(self, handles: HandlesLike) -> memoryview:
        if isinstance(handles, Handles):
            handles._bind(self)
        return _host_handles(handles)

    def _kind_id(self, kind: str | int) -> int:
        if isinstance(kind, str):
            return self.layout.kind_id(kind)
        self.layout.kind(kind)
        return kind

    # -- demand --------------------------------------------------------------------------------------------------

    def demand(self, demand: DemandMapping) -> Demand:
        """Compile a joint demand for hot calls.

        Args:
            demand: kind name, or a tuple of names for handles that own a cell in each, to a count:
                `{"full": 3, "state": 1, ("full", "swa"): 12}`.

        Raises:
            InvalidArgumentError: an unknown kind, or a count that is not an integer of at least 0.
        """
        return Demand(self, demand)

    def _compiled(self, demand: DemandLike) -> Demand:
        if not isinstance(demand, Demand):
            return Demand(self, demand)
        if demand._planner is not self:
            raise InvalidArgumentError(f"{demand!r} was compiled for another planner; use this planner's demand()")
        return demand

    # Hot calls have positional defaults: keyword-only ones double what a call in Python costs.

    def can_allocate(self, demand: DemandLike, moves: bool = True) -> bool:
        """Say whether `allocate(demand)` would succeed. Exact (I11). O(kinds + items).

        Args:
            demand: a mapping or a compiled `Demand`.
            moves: False asks whether it fits without moving a cell.
        """
        if type(demand) is Demand and demand._planner is self and moves:
            code = self._can_allocate(demand._native)
        else:
            code = self._fits(self._compiled(demand), 0 if moves else _FORBID_MOVES)
        if code < 0:
            self._raise(code, "can_allocate")
        return code == 1  # type: ignore[no-any-return]

    def _fits(self, demand: Demand, flags: int) -> int:
        return lib.up_can_allocate(self._grids, demand._items, len(demand.keys), flags)  # type: ignore[no-any-return]

    def shortfall(self, demand: DemandLike) -> int:
        """Return the bytes to free before `demand` fits; 0 when it fits. A lower bound while pins hold cells."""
        compiled, out = self._compiled(demand), ffi.new("int64_t *")
        code = lib.up_shortfall(self._grids, compiled._items, len(compiled.keys), out)
        if code != lib.UP_OK:
            self._raise(code, "shortfall", compiled)
        return int(out[0])

    def allocate(
        self,
        demand: DemandLike,
        out: Handles | None = None,
        moves: bool = True,
        overwrite: bool = False,
        pinned: bool = False,
    ) -> Handles:
        """Allocate a joint demand, all or nothing.

        Args:
            demand: a mapping or a compiled `Demand`.
            out: buffer for the handles, returned; a new one by default.
            moves: False refuses rather than evacuate.
            overwrite: the caller writes every byte before any read, so nothing is zeroed.
            pinned: the handles will be pinned; they go where pinned cells lie already.

        Returns:
            Handles in the order of the demand's items.

        Raises:
            CapacityError: the demand does not fit (exactly when `can_allocate` says so).
            InvalidArgumentError: `out` is too small, or the demand names an unknown kind.
            ConcurrentCallError: another thread is inside this planner.

        Complexity: O(cells) of the demand, plus O(windows / 64 + cells moved) for each window opened.
        """
        try:
            is_bound = demand._out is out and demand._planner is self  # type: ignore[union-attr]
        except AttributeError:
            is_bound = False  # a mapping; asking for its type first costs more than this whole line
        if not is_bound or overwrite or pinned or not moves:
            return self._allocate_with(self._compiled(demand), out, _flags(moves, overwrite, pinned))
        code = self._allocate(demand._native)  # type: ignore[union-attr]
        if code:
            self._raise(code, "allocate", demand)  # type: ignore[arg-type]
        return out  # type: ignore[return-value]

    def _allocate_with(self, demand: Demand, out: Handles | None, flags: int) -> Handles:
        if out is None:
            # Before a buffer is made for it: what cannot be had may be too large for one.
            code = self._fits(demand, flags)
            if code != 1:
                self._raise(code or lib.up_last_error(self._grids).code, "allocate", demand)
            out = Handles(demand.total)
        elif isinstance(out, Handles) and out.capacity < demand.total:
            raise InvalidArgumentError(f"out holds {out.capacity} handles; the demand is for {demand.total}")
        demand._aim(out)
        demand._native.flags = flags
        try:
            code = self._allocate(demand._native)
        finally:
            demand._native.flags = 0
        if code:
            self._raise(code, "allocate", demand)
        return out

    def free(self, handles: HandlesLike) -> None:
        """Free every cell of each handle, all or nothing. O(handles).

        Raises:
            InvalidHandleError: a handle is null, negative, out of range, dead, or occurs twice.
            PinnedError: a handle is pinned.
            ConcurrentCallError: another thread is inside this planner.
        """
        if type(handles) is Handles and handles._planner is self:
            code = self._free(handles._native)
        else:
            view = self._host_handles(handles)
            code = lib.up_free(self._grids, ffi.from_buffer("int32_t[]", view), len(view))
        if code:
            self._raise(code, "free")

    # -- cells of single kinds -----------------------------------------------------------------------------------

    def attach(self, handles: HandlesLike, kind: str | int, *, moves: bool = True, overwrite: bool = False) -> None:
        """Give each live handle a cell of `kind`, all or nothing.

        Raises:
            InvalidHandleError: a handle is dead, occurs twice or has such a cell already.
            CapacityError, PinnedError: as in `allocate`; a pinned handle cannot take a further cell.
        """
        kind_id, view = self._kind_id(kind), self._host_handles(handles)
        flags = _flags(moves, overwrite, False)
        code = lib.up_attach(self._grids, ffi.from_buffer("int32_t[]", view), len(view), kind_id, flags)
        if code:
            wanted = Demand(self, {self.layout.names[kind_id]: len(view)})
            self._raise(code, f"attach {self.layout.names[kind_id]}", wanted)

    def detach(self, handles: HandlesLike, kind: str | int) -> None:
        """Drop each handle's cell of `kind`, all or nothing. A handle that loses its last cell is dead.

        Raises:
            InvalidHandleError: a handle is dead, occurs twice or has no such cell.
            PinnedError: a handle is pinned.
        """
        kind_id, view = self._kind_id(kind), self._host_handles(handles)
        code = lib.up_detach(self._grids, ffi.from_buffer("int32_t[]", view), len(view), kind_id)
        if code:
            self._raise(code, f"detach {self.layout.names[kind_id]}")

    def copy(self, src: HandlesLike, dst: HandlesLike, *, kind: str | int) -> None:
        """Record a copy of each source's cell to its destination's, in program order with the moves.

        Raises:
            InvalidHandleError: a handle is dead, lacks the cell, or is copied onto itself.
            InvalidArgumentError: the two have different lengths.
        """
        kind_id, source, destination = self._kind_id(kind), self._host_handles(src), self._host_handles(dst)
        if len(source) != len(destination):
            raise InvalidArgumentError(f"copy of {len(source)} handles to {len(destination)}")
        code = lib.up_copy(
            self._grids,
            ffi.from_buffer("int32_t[]", source),
            ffi.from_buffer("int32_t[]", destination),
            len(source),
            kind_id,
        )
        if code:
            self._raise(code, "copy")

    def zero(self, handles: HandlesLike, kind: str | int) -> None:
        """Record zeroing each handle's cell of `kind`, in program order.

        Raises:
            InvalidHandleError: a handle is dead or lacks the cell.
        """
        kind_id, view = self._kind_id(kind), self._host_handles(handles)
        code = lib.up_zero(self._grids, ffi.from_buffer("int32_t[]", view), len(view), kind_id)
        if code:
            self._raise(code, "zero")

    def relocate(self, handle: int, kind: str | int, cell: int) -> None:
        """Move one handle's cell of `kind` to the available cell `cell`.

        Raises:
            InvalidHandleError, PinnedError: the handle is dead, lacks the cell or is pinned.
            InvalidArgumentError: `cell` is not available.
        """
        code = lib.up_relocate(self._grids, _int32("handle", handle), self._kind_id(kind), _int32("cell", cell))
        if code == lib.UP_BAD_ARGUMENT:
            raise InvalidArgumentError(
                f"relocate to {self.layout.kind(kind).name} cell {cell}: it is not available; it is past the arena's "
                "end, reserved, or overlaps something live"
            )
        if code:
            self._raise(code, "relocate")

    # -- promises and pins ---------------------------------------------------------------------------------------

    def reserve(self, demand: DemandLike) -> Reservation:
        """Promise room for `demand`: until it is committed or cancelled, nobody else can take it.

        Raises:
            CapacityError: the demand does not fit.
        """
        compiled = self._compiled(demand)
        counts = compiled.per_kind()
        code = lib.up_reserve(self._grids, counts)
        if code:
            self._raise(code, "reserve", compiled)
        return Reservation(self, compiled, counts)

    def pin(self, handles: HandlesLike, *, reason: str) -> Pin:
        """Keep the handles' cells from moving and from being freed, until the pin is released. Pins nest.

        Args:
            reason: shown by `pins()` and `dump()`.

        Raises:
            InvalidHandleError: a handle is dead or occurs twice.
            CapacityError: a reservation could not be kept any more.
            InvalidArgumentError: a handle has 65,535 pins already.
        """
        kept = Handles.of(self._host_handles(handles))
        code = lib.up_pin(self._grids, kept._data, len(kept))
        if code == lib.UP_BAD_ARGUMENT:
            raise InvalidArgumentError(
                f"pin for {reason}: a handle has 65,535 pins already, the most there can be; release some"
            )
        if code:
            self._raise(code, f"pin for {reason}")
        made = Pin(self, kept, reason)
        self._pins[id(made)] = made
        return made

    def pins(self) -> list[Pin]:
        """Return the pins that are held, oldest first."""
        return list(self._pins.values())

    def prepare(self, kind: str | int, n: int, *, max_bytes: int) -> int:
        """Open windows ahead of need, while the engine is idle.

        Args:
            kind: the kind that wants cells.
            n: stop when so many are available.
            max_bytes: move at most so many bytes.

        Returns:
            Cells of the kind now available.
        """
        kind_id = self._kind_id(kind)
        available, moved = ffi.new("int64_t *"), ffi.new("int64_t *")
        code = lib.up_prepare(self._grids, kind_id, _int64("n", n), _int64("max_bytes", max_bytes), available, moved)
        if code:
            self._raise(code, "prepare")
        return int(available[0])

    def next_open_cost(self, kind: str | int) -> int | None:
        """Return the bytes the next cell of `kind` will move: 0 when one is available, None when none can be had."""
        out = ffi.new("int64_t *")
        code = lib.up_next_open_cost(self._grids, self._kind_id(kind), out)
        if code:
            self._raise(code, "next_open_cost")
        return None if out[0] < 0 else int(out[0])

    def resize(self, arena_bytes: int) -> None:
        """Grow or shrink the arena; shrinking moves what lies past the new end. At most once a step. O(cells).

        Raises:
            CapacityError: what is live does not fit the new size.
            PinnedError: a pinned cell lies past the new end.
            InvalidArgumentError: not a size that an arena can have, or the step was resized already.
        """
        arena_bytes = _arena_size(self.layout, arena_bytes)
        code = lib.up_resize(self._grids, arena_bytes)
        if code == lib.UP_BAD_ARGUMENT:  # the size itself is checked above
            raise InvalidArgumentError(
                f"resize to {format_bytes(arena_bytes)}: this step was resized to {format_bytes(self.arena_bytes)} "
                "already; seal it first"
            )
        if code:
            self._raise(code, f"resize to {format_bytes(arena_bytes)}")
        self.arena_bytes = arena_bytes

    def seal(self, step: int = 0) -> StepPlan | None:
        """Close the step: return everything since the last seal as one plan, or None when there is nothing.

        Args:
            step: the engine's own number, carried along.

        Complexity: O(operations * cells of the smallest kind in each + changed handles).
        """
        data, size = ffi.new("uint8_t **"), ffi.new("int64_t *")
        number = _int64("step", step)
        # The core's own guard ends before the plan is copied out of it, and the next seal writes over it.
        if not self._sealing.acquire(blocking=False):
            raise ConcurrentCallError("seal: another thread is sealing this planner; give each its own, or take a lock")
        try:
            code = lib.up_seal(self._grids, number, data, size)
            if code:
                self._raise(code, "seal")
            plan = bytes(ffi.buffer(data[0], size[0])) if size[0] else None
        finally:
            self._sealing.release()
        return None if plan is None else StepPlan._parse(plan)

    # -- looking -------------------------------------------------------------------------------------------------

    def cells(self, kind: str | int) -> memoryview:
        """Return the host's table of a kind: `[max_handles + 1]` int32, read-only, -1 for no cell.

        It is live: later calls show in it, up to a resize, after which a new one must be asked for.
        """
        grids = self._grids
        size = 4 * (self._counters().max_handles + 1)  # before the pointer: tables only grow, also in another thread
        # The view keeps the C object alive through its destructor's closure.
        pointer = ffi.gc(lib.up_cells(grids, self._kind_id(kind)), lambda _: grids)
        return memoryview(ffi.buffer(pointer, size)).cast("B").cast("i").toreadonly()

    def cell(self, handle: int, kind: str | int) -> int:
        """Return the cell of a handle, -1 when it has none of that kind.

        Raises:
            InvalidHandleError: the handle is out of range.
        """
        cells = self.cells(kind)
        if not 0 < _int32("handle", handle) < len(cells):
            raise InvalidHandleError(f"handle {handle} is out of range 1..{len(cells) - 1}")
        return cells[handle]

    def generation(self, handle: int) -> int:
        """Return how often a handle was recycled: changed means that it is another owner's now.

        Raises:
            InvalidHandleError: the handle is out of range.
        """
        out = ffi.new("int64_t *")
        code = lib.up_generation(self._grids, _int32("handle", handle), out)
        if code:
            self._raise(code, "generation")
        return int(out[0])

    def is_live(self, handle: int) -> bool:
        """Say whether a handle is live; False for anything that is no handle."""
        if not isinstance(handle, int | np.integer) or not 0 < handle <= _INT32_MAX:
            return False
        code = lib.up_is_live(self._grids, handle)
        if code < 0:
            self._raise(code, "is_live")
        return bool(code)

    def free_extents(self) -> list[tuple[int, int]]:
        """Return the maximal byte ranges that no live or reserved byte touches, as (offset, length). O(live cells)."""
        count = ffi.new("int64_t *")
        capacity = 64
        while True:
            pairs = ffi.new("int64_t[]", 2 * capacity)
            code = lib.up_free_extents(self._grids, pairs, capacity, count)
            if code:
                self._raise(code, "free_extents")
            if count[0] <= capacity:
                return [(int(pairs[2 * i]), int(pairs[2 * i + 1])) for i in range(count[0])]
            capacity = count[0]

    def live_cells(self, kind: str | int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the live cells of a kind in increasing order, and their handles, as `[n]` int32 arrays."""
        kind_id = self._kind_id(kind)
        capacity = int(self._counters().kinds[kind_id].live)
        cells, handles = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
        count = ffi.new("int64_t *")
        pointers = (ffi.from_buffer("int32_t[]", cells), ffi.from_buffer("int32_t[]", handles))
        code = lib.up_live_cells(self._grids, kind_id, *pointers, capacity, count)
        if code:
            self._raise(code, "live_cells")
        if count[0] != capacity:
            raise ConcurrentCallError("live_cells: another thread changed this planner meanwhile; give each its own")
        return cells, handles

    def _counters(self) -> Any:
        """The counters as the core gives them: an `up_stats *`, for callers that want one of them."""
        native = ffi.new("up_stats *")
        code = lib.up_get_stats(self._grids, native)
        if code:
            self._raise(code, "stats")
        return native

    def stats(self) -> PlannerStats:
        """Return the counters. O(kinds^2)."""
        native = self._counters()
        kinds = {
            name: KindStats(*(int(getattr(native.kinds[k], field)) for field in KindStats.__dataclass_fields__))
            for k, name in enumerate(self.layout.names)
        }
        fields = {name: int(getattr(native, name)) for name in PlannerStats.__dataclass_fields__ if name != "kinds"}
        return PlannerStats(**fields, kinds=kinds)

    def digest(self) -> int:
        """Return a uint64 hash of every decision so far: equal on two ranks that made the same calls. O(handles)."""
        out = ffi.new("uint64_t *")
        code = lib.up_digest(self._grids, out)
        if code:
            self._raise(code, "digest")
        return int(out[0])

    def validate(self) -> None:
        """Walk everything and check the invariants of csrc/grids.h. O(arena / smallest stride).

        Raises:
            AssertionError: with the number of the first one that is broken.
        """
        broken = lib.up_validate(self._grids)
        if broken < 0:
            self._raise(broken, "validate")
        if broken:
            raise AssertionError(f"invariant I{broken} is broken; please report this with planner.dump()")

    def dump(self) -> dict[str, Any]:
        """Return the whole state as JSON-ready data, with a schema version. O(live cells)."""
        live = {}
        for name in self.layout.names:
            cells, handles = self.live_cells(name)
            live[name] = {"cells": cells.tolist(), "handles": handles.tolist()}
        return {
            "schema": DUMP_SCHEMA_VERSION,
            "layout": json.loads(self.layout.to_json()),
            "stats": asdict(self.stats()),
            "digest": f"{self.digest():016x}",
            "live": live,
            "free_extents": self.free_extents(),
            "pins": [{"reason": pin.reason, "handles": pin.handles.tolist()} for pin in self.pins()],
        }

    def __repr__(self) -> str:
        stats = self.stats()
        kinds = ", ".join(f"{name} {kind.live}/{kind.live + kind.placeable}" for name, kind in stats.kinds.items())
        return f"Planner({format_bytes(stats.arena_bytes)}: {kinds}, {format_bytes(stats.free_bytes)} free)"


def _flags(moves: bool, overwrite: bool, pinned: bool) -> int:
    return (
        (0 if moves else _FORBID_MOVES)
        | (int(lib.UP_WILL_OVERWRITE) if overwrite else 0)
        | (int(lib.UP_WILL_PIN) if pinned else 0)
    )


def _arena_size(layout: Layout, arena_bytes: int) -> int:
    """Return the size as an int when an arena can have it."""
    if isinstance(arena_bytes, bool) or not isinstance(arena_bytes, int | np.integer) or not 0 < arena_bytes < 1 << 62:
        raise InvalidArgumentError(f"arena_bytes is {arena_bytes!r}; it must be an integer from 1 to 2^62 - 1")
    if arena_bytes < layout.null_bytes + layout.strides[-1]:
        raise InvalidArgumentError(
            f"an arena of {format_bytes(arena_bytes)} holds no cell beside the null cell of "
            f"{format_bytes(layout.null_bytes)}; the smallest stride is {format_bytes(layout.strides[-1])}"
        )
    for kind in layout.kinds:
        if arena_bytes // kind.stride_bytes >= _INT32_MAX:
            raise InvalidArgumentError(
                f"{format_bytes(arena_bytes)} are {arena_bytes // kind.stride_bytes} cells of kind {kind.name!r}; "
                f"at most {_INT32_MAX - 1} can be numbered: use larger pages or a smaller arena"
            )
    return int(arena_bytes)


def _int32(what: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or not -_INT32_MAX <= value <= _INT32_MAX:
        raise InvalidHandleError(f"{what} {value!r} is no int32")
    return int(value)


def _int64(what: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or not -(1 << 62) <= value <= 1 << 62:
        raise InvalidArgumentError(f"{what} is {value!r}; it must be an integer below 2^62")
    return int(value)


class Reservation:
    """A receipt for promised room. Leaving its `with` block cancels what was not committed."""

    __slots__ = ("_demand", "_left", "_planner")
    __reduce__ = refuse_copy

    def __init__(self, planner: Planner, demand: Demand, counts: list[int]) -> None:
        """Made by `Planner.reserve`."""
        self._planner = planner
        self._demand = {key: count for key, count in zip(demand.keys, demand._counts, strict=True) if count}
        self._left = counts

    @property
    def left(self) -> dict[str, int]:
        """Cells still promised, per kind."""
        return dict(zip(self._planner.layout.names, self._left, strict=True))

    def commit(
        self,
        demand: DemandLike | None = None,
        out: Handles | None = None,
        *,
        overwrite: bool = False,
        pinned: bool = False,
    ) -> Handles:
        """Allocate out of the promise; cannot lack room.

        Args:
            demand: a part of what was reserved; all of the original demand by default.
            out, overwrite, pinned: as in `Planner.allocate`.

        Raises:
            ReservationError: more is asked than is left.
        """
        planner = self._planner
        compiled = planner._compiled(self._demand if demand is None else demand)
        counts = compiled.per_kind()
        if any(count > left for count, left in zip(counts, self._left, strict=True)):
            raise ReservationError(f"commit of {compiled!r}: the reservation has {self.left} left")
        out = planner._allocate_with(compiled, out, _flags(True, overwrite, pinned) | int(lib.UP_FROM_RESERVATION))
        self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        return out

    def cancel(self) -> None:
        """Give back what is left. Does nothing the second time."""
        code = lib.up_unreserve(self._planner._grids, self._left)
        if code:
            self._planner._raise(code, "cancel")
        self._left = [0] * len(self._left)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"Reservation({self.left})"


class Pin:
    """A receipt for pinned handles; released once, by `release` or by leaving its `with` block."""

    __slots__ = ("_planner", "handles", "reason")
    __reduce__ = refuse_copy

    def __init__(self, planner: Planner, handles: Handles, reason: str) -> None:
        """Made by `Planner.pin`."""
        self._planner = planner
        self.handles = handles
        self.reason = reason

    def release(self) -> None:
        """Unpin the handles.

        Raises:
            InvalidHandleError: the pin was released already.
        """
        if id(self) not in self._planner._pins:
            raise InvalidHandleError(f"pin for {self.reason!r} was released already")
        code = lib.up_unpin(self._planner._grids, self.handles._data, len(self.handles))
        if code:
            self._planner._raise(code, "release")
        del self._planner._pins[id(self)]

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if id(self) in self._planner._pins:
            self.release()

    def __repr__(self) -> str:
        return f"Pin({len(self.handles)} handles, {self.reason!r})"
