"""One request alone, through the model and transformers' own cache: what every answer of the engine is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unifiedpool.engine.request import SamplingParams
from unifiedpool.engine.sampling import sample

__all__ = ["Comparison", "Reference", "compare", "generate_alone"]

NEAR_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class Reference:
    """Tokens of one request, the logits that chose each of them ([outputs, vocab]), and their top-2 gaps."""

    tokens: list[int]
    logits: torch.Tensor
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an engine's tokens compare with the reference's.

    ``identical``: every token equal. ``near_tie``: the first difference is at a position where the reference's two
    best logits are closer than 1e-5; what follows it is another text and is not compared.
    """

    identical: bool
    near_tie: bool
    first_difference: int | None


@torch.inference_mode()
def generate_alone(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    chunk_tokens: int,
    sampling: SamplingParams | None = None,
    request_id: int = 0,
    cache: Any = None,
    forced: Sequence[int] | None = None,
) -> Reference:
    """Generate for one prompt with a batch of one.

    Args:
        model: a transformers causal language model in eval mode.
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        chunk_tokens: prefill pieces, as the engine cuts them.
        sampling: greedy unless given.
        request_id: key of the draws.
        cache: a transformers cache; a fresh `DynamicCache` unless given.
        forced: feed these output tokens instead of the chosen ones.

    Returns:
        The chosen tokens with logits and top-2 gaps.
    """
    from transformers import DynamicCache

    sampling = sampling or SamplingParams()
    cache = DynamicCache(config=model.config) if cache is None else cache
    feed = list(prompt)
    done = 0
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    while len(tokens) < max_new_tokens:
        piece = feed[done : done + chunk_tokens]
        output = model(
            input_ids=torch.tensor([piece], device=model.device),
            position_ids=torch.arange(done, done + len(piece), device=model.device)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        done += len(piece)
        if done < len(feed):
            continue
        logits = output.logits[0, -1]
        rows.append(logits)
        token = sample(logits, sampling, request_id, done)
        tokens.append(token)
        if token in sampling.stop_tokens:
            break
        feed.append(token if forced is None else forced[len(tokens) - 1])
    stacked = torch.stack(rows)
    top = stacked.float().topk(2, dim=-1).values
    return Reference(tokens, stacked, (top[:, 0] - top[:, 1]).tolist())


def compare(tokens: Sequence[int], reference: Reference) -> Comparison:
    """Compare an engine's tokens with the reference's."""
    for position, (ours, theirs) in enumerate(zip(tokens, reference.tokens, strict=False)):
        if ours != theirs:
            return Comparison(False, reference.gaps[position] < NEAR_TIE, position)
    if len(tokens) != len(reference.tokens):
        return Comparison(False, False, min(len(tokens), len(reference.tokens)))
    return Comparison(True, False, None)
