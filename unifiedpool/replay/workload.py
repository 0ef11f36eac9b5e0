"""What a trace's requests look like to a prefix cache: tokens, made of block ids.

Every token of a block is the block's id, so two requests share exactly the blocks that the trace says they share. What
nobody shares (the part of a prompt past its last whole block, outputs) gets a number of its own.

Mooncake's keys cover prompts alone. Whether a request is continued is read from the later ones: the first later request
that contains all its whole prompt blocks and extends past input + output is taken for the next turn, and the output
then consists of that request's blocks. Nearly every prompt ends in a partial block whose id never recurs, so nothing
beyond the last whole block can be matched in a prompt, and in an output only where a next turn is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..traces import Trace

__all__ = ["Job", "Workload"]

Tokens = npt.NDArray[np.int32]
# Numbers from here on belong to one request each; block ids lie below.
_PRIVATE = 1 << 30


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the replay sees it.

    Attributes:
        index: position in the trace.
        prompt_keys: ids of whole prompt blocks; output_keys: of the whole blocks after them.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    prompt_keys: tuple[int, ...]
    output_keys: tuple[int, ...]


class Workload:
    """The jobs of a trace, in order of arrival. Making it is O(blocks)."""

    def __init__(self, trace: Trace) -> None:
        self.name = trace.name
        self.block_tokens = trace.block_tokens
        # Traces may use any integers for ids; the tree wants small ones.
        numbers: dict[int, int] = {}
        keys = [tuple(numbers.setdefault(key, len(numbers)) for key in request.keys) for request in trace.requests]
        continued = {} if trace.keys_cover_output else self._continuations(trace, keys)
        self.jobs: list[Job] = []
        for index, request in enumerate(trace.requests):
            whole = request.input_tokens // trace.block_tokens if trace.block_tokens else 0
            last = (request.input_tokens + request.output_tokens) // trace.block_tokens if trace.block_tokens else 0
            source = keys[index] if trace.keys_cover_output else keys[continued.get(index, index)]
            outputs = source[whole:last] if trace.keys_cover_output or index in continued else ()
            self.jobs.append(
                Job(
                    index,
                    request.arrival_s,
                    request.input_tokens,
                    request.output_tokens,
                    keys[index][:whole],
                    outputs,
                )
            )

    @staticmethod
    def _continuations(trace: Trace, keys: list[tuple[int, ...]]) -> dict[int, int]:
        """Find the next turn of each request, by its last whole prompt block."""
        block = trace.block_tokens
        found: dict[int, int] = {}
        later: dict[tuple[int, int], list[int]] = defaultdict(list)  # (position, id) -> later requests, latest first
        for index in range(len(keys) - 1, -1, -1):
            request = trace.requests[index]
            whole = request.input_tokens // block if block else 0
            last = (request.input_tokens + request.output_tokens) // block if block else 0
            if whole:
                for other in reversed(later[whole - 1, keys[index][whole - 1]]):
                    if trace.requests[other].input_tokens // block >= last:
                        found[index] = other
                        break
            for position in range(whole):
                later[position, keys[index][position]].append(index)
        return found

    def matchable(self, job: Job, tokens: int) -> int:
        """Return the depth up to which the first `tokens` tokens of a job consist of whole blocks with an id."""
        block = self.block_tokens
        return min(tokens // block, len(job.prompt_keys) + len(job.output_keys)) * block if block else 0

    def tokens(self, job: Job) -> Tokens:
        """Return prompt and output as `[input + output]` int32: for inserting."""
        return self._fill(job, (*job.prompt_keys, *job.output_keys), job.input_tokens + job.output_tokens)

    def prompt(self, job: Job) -> Tokens:
        """Return the prompt as `[input]` int32: for matching."""
        return self._fill(job, job.prompt_keys, job.input_tokens)

    def _fill(self, job: Job, keys: tuple[int, ...], count: int) -> Tokens:
        tokens = np.full(count, _PRIVATE + job.index, np.int32)
        if keys:
            blocks = np.repeat(np.array(keys, np.int32), self.block_tokens)
            tokens[: len(blocks)] = blocks
        return tokens
