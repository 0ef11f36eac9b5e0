"""What the prefix cache must agree with: a dictionary of prefixes, searched the obvious way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Given", "Key", "PrefixModel"]

Key = tuple[Hashable, tuple[int, ...]]


class Given(NamedTuple):
    """What an insert gives back."""

    duplicates: list[int]
    state_rejected: int | None
    depth: int


@dataclass
class PrefixModel:
    """Every cached page and state under the tokens that lead to it.

    A page is known by all tokens up to its end, so two paths share a page exactly when they share those tokens.
    """

    page: int
    grid: int
    window: int
    has_window: Callable[[int], bool]
    pages: dict[Key, int] = field(default_factory=dict)  # ends on a page boundary, or is a tail
    states: dict[Key, int] = field(default_factory=dict)
    locks: list[Key] = field(default_factory=list)

    def ends(self, length: int) -> list[int]:
        """Where the pages of so many tokens end."""
        return [*range(self.page, length + 1, self.page), *([length] if length % self.page else [])]

    def locked(self, key: Key) -> bool:
        """A page is locked by every lock that passes it, a tail only by those that end in it."""
        name, path = key
        if len(path) % self.page:
            return key in self.locks
        return any(lock[0] == name and lock[1][: len(path)] == path for lock in self.locks)

    def match(self, name: Hashable, tokens: Sequence[int], limit: int) -> tuple[int, int, int | None]:
        """Return (hit, full_hit, branch)."""
        most = tuple(tokens[:limit])
        full = 0
        while full + self.page <= len(most) and (name, most[: full + self.page]) in self.pages:
            full += self.page
        tails = [d for d in range(full + 1, min(full + self.page, len(most) + 1)) if (name, most[:d]) in self.pages]
        full = max([full, *tails])
        fits = [d for d in range(1, full + 1) if (name, most[:d]) in self.states and self.window_there(name, most[:d])]
        hit = max([0, *fits])
        branch = full - full % self.grid
        return hit, full, branch if branch > hit else None

    def window_there(self, name: Hashable, tokens: tuple[int, ...]) -> bool:
        if not self.window:
            return True
        low = len(tokens) - self.window
        return all(self.has_window(self.pages[name, tokens[:end]]) for end in self.ends(len(tokens)) if end > low)

    def insert(
        self, name: Hashable, tokens: Sequence[int], handles: Sequence[int], state: int | None, own: Key | None = None
    ) -> Given:
        """Insert; `own` is the lock that moves along."""
        kept = len(tokens) if state else len(tokens) - len(tokens) % self.page
        path, back = tuple(tokens), []
        if own is not None:
            self.locks.remove(own)
        self.take_over(name, path, kept, back)
        for end, handle in zip(self.ends(len(tokens)), handles, strict=True):
            key = (name, path[:end])
            if end > kept:
                back.append(handle)
            elif key not in self.pages:
                self.pages[key] = handle
            elif handle not in (0, self.pages[key]):
                known = self.pages[key]
                swap = self.window and not self.locked(key) and self.has_window(handle) and not self.has_window(known)
                back.append(known if swap else handle)
                self.pages[key] = handle if swap else known
        rejected = None
        if state:
            rejected = state if self.states.setdefault((name, path), state) != state else None
        if own is not None:
            self.locks.append((name, path[:kept]))
        return Given(back, rejected, kept)

    def take_over(self, name: Hashable, path: tuple[int, ...], kept: int, back: list[int]) -> None:
        """The longest unlocked tail that the new tokens extend goes."""
        whole = kept - kept % self.page
        known = 0
        while known < whole and (name, path[: known + self.page]) in self.pages:
            known += self.page
        if known == kept or (kept > whole == known and (name, path[:kept]) in self.pages):
            return
        for end in range(min(known + self.page - 1, kept), known, -1):
            key = (name, path[:end])
            if key in self.pages:
                if end < kept and not self.locked(key):
                    back.append(self.pages.pop(key))
                    self.states.pop(key, None)
                return

    def forget(self, is_live: Callable[[int], bool]) -> list[Key]:
        """Drop what the cache has freed; return its keys."""
        gone = [key for key, handle in self.pages.items() if not is_live(handle)]
        gone += [key for key, handle in self.states.items() if not is_live(handle)]
        self.pages = {key: handle for key, handle in self.pages.items() if is_live(handle)}
        self.states = {key: handle for key, handle in self.states.items() if is_live(handle)}
        return gone

    def check(self) -> None:
        """A page has its predecessor, a state all its pages, a locked path is whole."""
        for name, tokens in self.pages:
            before = len(tokens) - 1 - (len(tokens) - 1) % self.page
            assert not before or (name, tokens[:before]) in self.pages, "a page without the one before it"
        for name, tokens in [*self.states, *self.locks]:
            assert not tokens or (name, tokens) in self.pages, "a state or a lock without its last page"
