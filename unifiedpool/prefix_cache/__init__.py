"""The prefix cache: a radix tree of pages and states over one arena, with one policy for all of its bytes."""

from .tree import Match, PrefixTree

__all__ = ["Match", "PrefixTree"]
