"""The Python face of the C prefix tree: token buffers, namespaces, errors. No policy and no planner.

`csrc/prefix_tree.h` says what the tree is and keeps. Tokens are read in place from int32 and int64 buffers (numpy
arrays, `array.array`, memoryviews); lists and tuples work too and are copied first, which costs about 70 times a match.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .._native import ffi, lib
from ..errors import (
    ConcurrentCallError,
    InvalidArgumentError,
    InvalidHandleError,
    PinnedError,
    UnifiedPoolError,
)
from ..planner import Handles

__all__ = ["Match", "PrefixTree", "TokensLike"]

TokensLike: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | memoryview | array[int]"

REASONS = {
    int(lib.UP_HIT_COMPLETE): "every token up to the limit is cached",
    int(lib.UP_HIT_UNKNOWN): "the next page is not cached",
    int(lib.UP_HIT_NO_STATE): "pages go on, but no state was saved beyond the hit",
    int(lib.UP_HIT_STATE_EVICTED): "a deeper state was saved and has been evicted",
    int(lib.UP_HIT_NO_WINDOW): "window pages before a deeper hit have been evicted",
    int(lib.UP_HIT_LIMIT): "the next state lies past the limit: the last token is always computed",
}
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_NO_LIMIT = 2**31 - 1


def token_buffer(tokens: TokensLike) -> tuple[Any, int, bool]:
    """Return (buffer that C can read, number of tokens, whether they are int64).

    Raises:
        InvalidArgumentError: not one-dimensional integers.
    """
    if isinstance(tokens, np.ndarray):
        # numpy shares one dtype object for each native width, so identity is the cheap test that nearly always decides.
        wide = tokens.dtype is not _INT32
        if (not wide or tokens.dtype in (_INT64, _INT32)) and tokens.ndim == 1:
            if wide:
                wide = tokens.dtype == _INT64
            try:
                return ffi.from_buffer(tokens), len(tokens), wide
            except ValueError:  # not contiguous
                return ffi.from_buffer(tokens.copy()), len(tokens), wide
        raise InvalidArgumentError(
            f"tokens are an array of dtype {tokens.dtype} and shape {tokens.shape}; give [n] int32 or int64"
        )
    if isinstance(tokens, array | memoryview):
        view = memoryview(tokens)
        if view.ndim == 1 and view.c_contiguous and view.format in "ilq" and view.itemsize in (4, 8):
            return ffi.from_buffer(view), len(view), view.itemsize == 8
        raise InvalidArgumentError(f"tokens are a buffer of format {view.format!r}; give [n] int32 or int64")
    if isinstance(tokens, str | bytes) or hasattr(tokens, "is_cuda"):
        raise InvalidArgumentError(f"tokens are {type(tokens).__name__}; give host token ids, such as a list of int")
    try:
        return ffi.from_buffer(array("q", tokens)), len(tokens), True
    except (TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"tokens must be integers: {error}") from None


class Match:
    """What a prefix tree knows of some tokens. Made by `match`; it holds nothing: lock it before using its handles."""

    __slots__ = ("_native", "_tree", "limit", "namespace")

    def __init__(self, tree: PrefixTree, native: Any, limit: int, namespace: Hashable) -> None:
        self._tree = tree
        self._native = native
        self.limit = limit
        self.namespace = namespace

    @property
    def hit(self) -> int:
        """Tokens that need not be computed: the deepest depth where every kind agrees."""
        return int(self._native.hit)

    @property
    def full_hit(self) -> int:
        """Tokens whose pages are cached without a gap."""
        return int(self._native.full_hit)

    @property
    def branch(self) -> int | None:
        """Depth at which to save a state so that the next request on this path hits deeper, None for nowhere."""
        return int(self._native.branch) if self._native.branch >= 0 else None

    @property
    def seen(self) -> int:
        """Tokens whose path is cached, or was and is remembered as a ghost."""
        return int(self._native.seen)

    @property
    def reason(self) -> str:
        """Why the hit is not longer, in words."""
        return REASONS[self._native.reason]

    @property
    def node(self) -> int:
        """Id of the node where the hit ends; 0 when the namespace is unknown."""
        return int(self._native.node)

    @property
    def state(self) -> int | None:
        """Handle of the state slot to copy, None when there is none."""
        return int(self._native.state) or None

    @property
    def tail_page(self) -> int | None:
        """Handle of the partly filled page that ends the hit and has to be copied, None when the hit ends on a page."""
        return int(self._native.tail_page) or None

    @property
    def handles(self) -> Handles:
        """Handles of the pages of the hit, in order; the last one is `tail_page` when there is one.

        Raises:
            InvalidHandleError: the node was evicted since, which a lock prevents.
        """
        return self._tree.path(self)

    def ages(self) -> list[int]:
        """Tokens seen before, by log2 of 1 + requests since."""
        return list(self._native.ages)

    def __repr__(self) -> str:
        return f"Match(hit={self.hit}, full_hit={self.full_hit}, branch={self.branch}, {self.reason!r})"


class PrefixTree:
    """A radix tree over token sequences whose nodes own page and state handles.

    >>> tree = PrefixTree(page_size=2)
    >>> _ = tree.insert([1, 2, 3, 4], [11, 12], state=90)
    >>> tree.match([1, 2, 3, 4, 5])
    Match(hit=4, full_hit=4, branch=None, 'the next page is not cached')
    >>> tree.match([1, 2, 9]).branch
    2
    """

    __slots__ = (
        "_evict",
        "_find_unit",
        "_inserted",
        "_match",
        "_native",
        "_receipt",
        "_roots",
        "_unit",
        "grid",
        "namespaces",
        "needs_state",
        "page_size",
        "window",
    )

    def __init__(
        self,
        *,
        page_size: int = 1,
        grid: int | None = None,
        window: int = 0,
        needs_state: bool = True,
        ghost_factor: int = 0,
        max_ghosts: int = 1 << 20,
    ) -> None:
        """Make an empty tree.

        Args:
            page_size: tokens per page.
            grid: branch checkpoints lie at multiples of it; a multiple of the page size. Default: the page size.
            window: sliding window in tokens, 0 for none.
            needs_state: whether a hit ends only where a state was saved.
            ghost_factor: ghosts kept per resident page; 0 keeps none.
            max_ghosts: most ghosts (40 to 80 bytes each).

        Raises:
            InvalidArgumentError: one of them is out of range.
        """
        chosen = page_size if grid is None else grid
        out = ffi.new("up_tree **")
        try:
            code = lib.up_tree_create(page_size, chosen, window, needs_state, ghost_factor, max_ghosts, out)
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"PrefixTree: {error}") from None
        if code == lib.UP_TREE_BAD_ARGUMENT:
            raise InvalidArgumentError(
                f"PrefixTree(page_size={page_size}, grid={grid}, window={window}): page_size is at least 1, grid a "
                "multiple of it, the others at least 0"
            )
        if code:
            raise MemoryError("PrefixTree: host memory ran out")
        self._native: Any = ffi.gc(out[0], lib.up_tree_destroy)
        self.page_size, self.grid, self.window, self.needs_state = page_size, chosen, window, needs_state
        # Bound once: a module attribute costs as much as some of the calls.
        self._match, self._find_unit, self._evict = lib.up_tree_match, lib.up_tree_unit, lib.up_tree_evict
        self._inserted: Any = ffi.new("up_inserted *")
        self._unit: Any = ffi.new("up_unit *")
        self._receipt: Any = ffi.new("int64_t *")
        self.namespaces: dict[int, Hashable] = {}
        self._roots: dict[Hashable, int] = {}
        self.root(None)

    # -- errors and roots ----------------------------------------------------------------------------------------

    def raise_for(self, code: int, what: str) -> NoReturn:
        """Raise for a code of csrc/prefix_tree.h; nothing was changed."""
        at = lib.up_tree_error_index(self._native)
        if code == lib.UP_TREE_BUSY:
            raise ConcurrentCallError(f"{what}: another thread is inside this tree; give each its own, or take a lock")
        if code == lib.UP_TREE_NO_MEMORY:
            raise MemoryError(f"{what}: host memory ran out; nothing was changed")
        if code == lib.UP_TREE_BAD_TOKEN:
            raise InvalidArgumentError(f"{what}: token {at} is negative or needs more than 31 bits")
        if code == lib.UP_TREE_BAD_HANDLE:
            raise InvalidHandleError(f"{what}: page {at} is new and has no live handle with a page")
        if code == lib.UP_TREE_BAD_STATE:
            raise InvalidHandleError(f"{what}: the state's handle is not live, or has no slot in this planner")
        if code == lib.UP_TREE_BAD_NODE:
            raise InvalidHandleError(f"{what}: the node was evicted or never was; match again and lock the match")
        if code == lib.UP_TREE_BAD_RECEIPT:
            raise InvalidHandleError(f"{what}: the lock was released already, or is another tree's")
        if code == lib.UP_TREE_LOCKED:
            raise PinnedError(f"{what}: somebody holds a lock on it")
        if code == lib.UP_TREE_BAD_ARGUMENT:
            raise InvalidArgumentError(f"{what}: an argument is out of range")
        raise UnifiedPoolError(f"{what}: unexpected code {code} from the C core")

    def root(self, namespace: Hashable) -> int:
        """Return the root of a namespace, made when it is new."""
        root = self._roots.get(namespace)
        if root is None:
            out = ffi.new("int32_t *")
            code = lib.up_tree_new_root(self._native, out)
            if code:
                self.raise_for(code, "namespace")
            root = self._roots[namespace] = int(out[0])
            self.namespaces[root] = namespace
        return root

    def tidy(self, root: int) -> None:
        """Forget a namespace that holds nothing any more; the default one stays."""
        if self.namespaces.get(root) is None or lib.up_tree_drop_root(self._native, root):
            return
        del self._roots[self.namespaces.pop(root)]

    # -- match, lock, insert -------------------------------------------------------------------------------------

    def match(self, tokens: TokensLike, limit: int | None = None, namespace: Hashable = None, now: int = 0) -> Match:
        """Find the longest usable prefix. Read-only. O(tokens of the hit).

        Args:
            tokens: `[n]` int32 or int64, not negative.
            limit: deepest depth at which a hit may end; n by default.
            namespace: matches only what was inserted under an equal one.
            now: count of requests, for the ages.

        Raises:
            InvalidArgumentError: a token that is reached is negative or too wide; tokens that are no integers.
        """
        buffer, count, wide = token_buffer(tokens)
        native = ffi.new("up_match *")
        root = self._roots.get(namespace)
        most = _NO_LIMIT if limit is None else limit
        if root is None:
            native.branch = -1
            native.reason = lib.UP_HIT_UNKNOWN if count and most > 0 else lib.UP_HIT_COMPLETE
        else:
            code = self._match(self._native, root, buffer, count, wide, most, now, native)
            if code:
                self.raise_for(code, "match")
        return Match(self, native, count if count < most else most, namespace)

    def path(self, match: Match) -> Handles:
        """Return the page handles of a match's hit. O(pages)."""
        hit = match.hit
        handles = Handles(-(-hit // self.page_size))
        if hit:
            native = match._native
            code = lib.up_tree_path(self._native, native.node, native.generation, hit, handles._data)
            if code:
                self.raise_for(code, "handles of a match")
            handles._native.length = handles.capacity
        return handles

    def lock(self, node: int, generation: int, depth: int) -> int:
        """Lock the path to a node; return the receipt. O(nodes of the path)."""
        code = lib.up_tree_lock(self._native, node, generation, depth, self._receipt)
        if code:
            self.raise_for(code, "lock")
        return int(self._receipt[0])

    def unlock(self, receipt: int) -> None:
        """Give a receipt back. O(nodes of the path)."""
        code = lib.up_tree_unlock(self._native, receipt)
        if code:
            self.raise_for(code, "unlock")

    def insert(
        self,
        tokens: TokensLike,
        handles: Any,
        state: int = 0,
        namespace: Hashable = None,
        receipt: int = 0,
        now: int = 0,
        role: int = 0,
    ) -> tuple[Any, Handles]:
        """Insert tokens; see `up_tree_insert` for what goes where.

        Args:
            tokens: `[n]`, at least one.
            handles: `[ceil(n / page_size)]` int32; 0 for pages that the tree has already.
            state: slot of the state at the end, 0 for none.
            namespace: as in `match`.
            receipt: a lock that moves along.
            now: count of requests.
            role: `UP_ROLE_*` of the state.

        Returns:
            `up_inserted *` (valid until the next insert) and the duplicate pages.
        """
        buffer, count, wide = token_buffer(tokens)
        if not isinstance(handles, Handles):
            handles = Handles.of(handles)
        pages = -(-count // self.page_size)
        if count == 0 or len(handles) != pages:
            raise InvalidArgumentError(
                f"insert of {count} tokens with {len(handles)} page handles; "
                + ("give at least one token" if count == 0 else f"pages of {self.page_size} tokens need {pages}")
            )
        duplicates = Handles(pages + 1)
        root, out = self.root(namespace), self._inserted
        code = lib.up_tree_insert(
            self._native,
            root,
            buffer,
            count,
            wide,
            handles._data,
            pages,
            state,
            role,
            receipt,
            now,
            duplicates._data,
            out,
        )
        if code:
            self.tidy(root)
            self.raise_for(code, "insert")
        duplicates._native.length = out.num_duplicates
        return out, duplicates

    # -- units ---------------------------------------------------------------------------------------------------

    def unit(self, node: int, handles: Handles | None = None) -> Any:
        """Return what would be evicted at a node as `up_unit *` (valid until the next call), None when nothing can be.

        Args:
            node: a node's id.
            handles: gets the unit's handles, pages first; it has to be large enough.
        """
        unit = self._unit
        if handles is None:
            code = self._find_unit(self._native, node, unit, ffi.NULL, 0)
        else:
            code = self._find_unit(self._native, node, unit, handles._data, handles.capacity)
        if code:
            if code in (lib.UP_TREE_NO_UNIT, lib.UP_TREE_LOCKED, lib.UP_TREE_BAD_NODE):
                return None
            self.raise_for(code, "unit")
        if handles is not None:
            handles._native.length = unit.num_pages + (1 if unit.state else 0)
        return unit

    def evict(self, node: int) -> Any:
        """Evict a node's unit and return it; the handles that it held are the caller's to free."""
        unit = self._unit
        code = self._evict(self._native, node, unit)
        if code:
            self.raise_for(code, "evict")
        if unit.parent_is_root:
            self.tidy(unit.parent)
        return unit

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Any:
        """`up_node[]` by id, read-only, valid until the next insert."""
        return lib.up_tree_nodes(self._native)

    def stats(self) -> dict[str, int]:
        """Return the counters of `up_tree_stats`. O(1)."""
        native = lib.up_tree_get_stats(self._native)
        return {name: int(getattr(native, name)) for name, _ in ffi.typeof("up_tree_stats").fields}

    def walk(self) -> list[int]:
        """List every live node that is not a root, by id. O(nodes ever)."""
        found, stack = [], list(self.namespaces)
        nodes = self.nodes
        while stack:
            child = nodes[stack.pop()].first_child
            while child:
                found.append(child)
                stack.append(child)
                child = nodes[child].next_sibling
        return sorted(found)

    def tokens(self, node: int) -> list[int]:
        """Return the tokens from the root to the end of a node."""
        parts: list[list[int]] = []
        nodes = self.nodes
        while nodes[node].length:
            parts.append(ffi.unpack(nodes[node].tokens, nodes[node].length))
            node = nodes[node].parent
        return [token for part in reversed(parts) for token in part]

    def handles(self, node: int) -> list[int]:
        """Return the page handles that one node owns."""
        x = self.nodes[node]
        return list(ffi.unpack(x.tokens + x.length, -(-x.length // self.page_size))) if x.length else []

    def validate(self) -> None:
        """Check every invariant of csrc/prefix_tree.h. O(everything).

        Raises:
            AssertionError: with the number of the first one that is broken.
        """
        broken = lib.up_tree_validate(self._native)
        if broken < 0:
            self.raise_for(broken, "validate")
        if broken:
            raise AssertionError(f"invariant T{broken} of the prefix tree is broken; please report this")

    def __repr__(self) -> str:
        stats = self.stats()
        return f"PrefixTree({stats['nodes'] - stats['roots']} nodes, {stats['pages']} pages, {stats['states']} states)"
