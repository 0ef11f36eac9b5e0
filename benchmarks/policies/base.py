"""What every placement policy is: something that says yes or no to a request's pages and states, and counts moves.

A policy keeps memory only as positions; no byte exists. Requests are numbers. A request holds cells of every kind of
the model (`counts` by kind, largest kind first) until it is finished; one kept as a cache entry is `retired` first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from unifiedpool.layout import Layout

__all__ = ["Counters", "Model", "Policy"]


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one accelerator, in the bytes that placement cares about.

    Attributes:
        kinds: names, largest kind first: ("state", "full") or ("state", "swa", "full").
        cell_bytes: bare bytes of a cell of each kind, before any padding.
        page_tokens: tokens in a cell of each kind; 0 for the state.
        window_tokens: of the window layers; 0 without.
        linear_layers, page_layers: how many layers keep a state, and a page of each further kind.
        block_tokens: what the attention kernel wants a block to be a multiple of (64 for MLA).
        layout: the padded chain that unifiedpool uses.
    """

    name: str
    arena_bytes: int
    kinds: tuple[str, ...]
    cell_bytes: tuple[int, ...]
    page_tokens: tuple[int, ...]
    window_tokens: int
    linear_layers: int
    page_layers: tuple[int, ...]
    block_tokens: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes since the policy was made; `worst_window` is per opening of room, `worst_call` per admit or grow."""

    moved: int = 0
    allocated: int = 0
    worst_window: int = 0
    worst_call: int = 0
    wrong_answers: int = 0


class Policy(ABC):
    """Base of the policies."""

    @abstractmethod
    def fits(self, counts: Sequence[int]) -> bool:
        """Say whether `counts` more cells of each kind could be had, by one request or by several. Changes nothing."""

    @abstractmethod
    def admit(self, request: int, counts: Sequence[int]) -> bool:
        """Give a new request `counts` cells of each kind, all or nothing; say whether it was done."""

    @abstractmethod
    def grow(self, request: int, counts: Sequence[int]) -> bool:
        """Give a live request `counts` more cells, all or nothing."""

    @abstractmethod
    def shrink(self, request: int, kind: int, count: int) -> None:
        """Drop the request's `count` oldest cells of `kind`."""

    def retire(self, request: int) -> None:  # noqa: B027 most policies have nothing to do
        """The request has finished and stays as a cache entry."""

    @abstractmethod
    def finish(self, request: int) -> None:
        """Drop everything the request holds."""

    @abstractmethod
    def counters(self) -> Counters:
        """Return what was moved and allocated so far."""
