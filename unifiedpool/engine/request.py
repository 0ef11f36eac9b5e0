"""What a caller asks for, and what the engine remembers about it while it runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from unifiedpool.errors import InvalidArgumentError
from unifiedpool.integrations.sequences import ArenaSequence
from unifiedpool.planner import Reservation
from unifiedpool.prefix_cache import Lock, TrackSlots

__all__ = ["PrefixUse", "Request", "SamplingParams", "Status", "TokenEvent"]


class Status(enum.Enum):
    """Stage of a request; only ``PREFILL`` and ``DECODE`` hold memory."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token.

    Args:
        temperature: 0 is greedy; above 0 the logits are divided by it.
        top_k: keep the *k* most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        seed: a draw depends on (seed, request id, position) and on nothing else, so neither batching nor a
            retraction changes it.
        stop_tokens: a sampled token in this set ends the request (and is delivered).

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidArgumentError(f"temperature {self.temperature}: must be finite and at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise InvalidArgumentError(f"top_k {self.top_k}: must be 0 (keep all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(f"top_p {self.top_p}: must be above 0 and at most 1")
        object.__setattr__(self, "stop_tokens", frozenset(self.stop_tokens))


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token handed to the caller, or the end of a request (``token`` None: it was aborted)."""

    request_id: int
    token: int | None
    position: int
    finished: bool


@dataclass(slots=True, eq=False)
class PrefixUse:
    """What a running request has to do with the prefix cache.

    Attributes:
        lock: holds the path that the request reads.
        hit: tokens that it started from.
        saved: the deepest depth on its path where a state was saved, as far as it knows.
        shared: its pages that are the cache's.
        checkpoints: depth -> role of the states that its prefill is still to save; forwards are cut there.
        track: slots of decode checkpoints, once there are any.
        has_state: its slot came with the checkpoint in it.
    """

    lock: Lock
    hit: int
    saved: int
    shared: set[int]
    checkpoints: dict[int, str]
    track: TrackSlots | None = None
    has_state: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine.

    ``sequence`` names its cells; ``sequence.length`` tokens of ``prompt + outputs`` are in the cache. ``spare[kind]``
    are pages that slid out of a window and wait for their next use. ``promised[kind]`` cells are left in the
    reservation that admission made. ``cached_tokens`` of the prompt were found in the prefix cache when it was first
    admitted, None before; ``use`` is there while it runs with the cache.
    """

    request_id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    on_token: Callable[[TokenEvent], None] | None = None
    status: Status = Status.WAITING
    outputs: list[int] = field(default_factory=list)
    sequence: ArenaSequence = field(default_factory=ArenaSequence)
    prefill_target: int = 0
    spare: dict[str, list[int]] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    reservation: Reservation | None = None
    retractions: int = 0
    namespace: Hashable = None
    uses_cache: bool = True
    cached_tokens: int | None = None
    use: PrefixUse | None = None

    @property
    def computed(self) -> int:
        """Tokens in the cache."""
        return self.sequence.length

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.prompt) + len(self.outputs)

    @property
    def done(self) -> bool:
        """Whether the request has reached its end, either way."""
        return self.status in (Status.FINISHED, Status.ABORTED)

    def token_slice(self, start: int, end: int) -> list[int]:
        """Return tokens ``start`` to ``end`` of prompt and outputs."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return self.prompt[start:] + self.outputs[max(0, start - split) : end - split]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, prompt={len(self.prompt)}, "
            f"outputs={len(self.outputs)}/{self.max_new_tokens}, computed={self.computed})"
        )
