"""Greedy and seeded sampling. A draw is keyed by (seed, request, position), never by the batch it ran in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from unifiedpool.engine.request import SamplingParams

__all__ = ["draw", "sample"]


def draw(seed: int, request_id: int, position: int) -> float:
    """Return the uniform number in [0, 1) that belongs to (seed, request, position).

    >>> draw(0, 1, 2) == draw(0, 1, 2), draw(0, 1, 2) == draw(0, 2, 1)
    (True, False)
    """
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, request_id], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=words, counter=position)).random())


def sample(logits: torch.Tensor, params: SamplingParams, request_id: int, position: int) -> int:
    """Choose the next token of one row.

    Args:
        logits: [vocab], any float dtype.
        params: greedy when ``temperature`` is 0 (the lowest id among equals).
        request_id: key of the draw.
        position: index that the chosen token will have in the sequence; key of the draw.

    Returns:
        The token id.
    """
    if params.temperature == 0.0:
        return int(torch.argmax(logits))
    scores: npt.NDArray[np.float64] = logits.detach().to("cpu", torch.float64).numpy() / params.temperature
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    cumulative = np.cumsum(weights[order])
    if params.top_p < 1.0:
        keep = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        order, cumulative = order[:keep], cumulative[:keep]
    point = draw(params.seed, request_id, position) * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, point, side="right")), len(order) - 1)])
