"""Delta-rule states from a ring of steps: fold accepted steps into the state, or get outputs without forming it.

Speculative decoding keeps, per step, what entered it: rawv, rawk, the log gates g and beta. After verification the
accepted steps are folded into the state exactly, one after another, in float32:

    k = rawk / sqrt(|rawk|^2 + eps);  S <- S diag(exp(g));  d = beta (v - S k);  S <- S + d k^T

with one gate per head (GDN) or one per key channel (KDA). Unrolled over m steps, with a_i = exp(g_i),

    S_m = S_0 diag(prod a_i) + sum_j d_j (k_j * prod_{i>j} a_i)^T

so an output S_m q needs S_0 once and, for each step, d_j, k_j and g_j: walking the ring backwards keeps the product of
the gates in one vector.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidArgumentError
from . import naive
from ._support import cdiv, check_index, check_tensor, next_power_of_2, on_device
from .backend import uses_kernels

__all__ = ["replay_outputs", "replay_outputs_kernel", "replay_states", "replay_states_kernel"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
V_BLOCK = 16


@triton.jit
def replay_states_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    rawv_ptr,
    rawk_ptr,
    g_ptr,
    beta_ptr,
    slots_ptr,
    rows_ptr,
    start_ptr,
    count_ptr,
    num_slots,
    num_rows,
    state_slot,
    state_head,
    state_v,
    state_k,
    v_row,
    v_step,
    v_head,
    k_row,
    k_step,
    k_head,
    g_row,
    g_step,
    g_head,
    beta_row,
    beta_step,
    beta_head,
    v_dim,
    k_dim,
    length,
    group,
    eps,
    PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
):
    """Fold the steps of one request into V rows of one head's state. Strides in elements."""
    request = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    steps = tl.minimum(tl.load(count_ptr + request).to(tl.int32), length)
    begin = tl.load(start_ptr + request).to(tl.int32)
    valid = (slot >= 0) & (slot < num_slots) & (row >= 0) & (row < num_rows)
    if valid & (steps > 0) & (begin >= 0):
        v = tl.program_id(2) * V + tl.arange(0, V)
        k = tl.arange(0, K)
        v_inside = v < v_dim
        k_inside = k < k_dim
        v_at = v.to(tl.int64)
        k_at = k.to(tl.int64)
        tile = state_ptr + slot * state_slot + head * state_head + v_at[:, None] * state_v + k_at[None, :] * state_k
        inside = v_inside[:, None] & k_inside[None, :]
        state = tl.load(tile, mask=inside, other=0).to(tl.float32)
        for step in range(steps):
            at = ((begin + step) % length).to(tl.int64)
            key_ptr = rawk_ptr + row * k_row + at * k_step + (head // group) * k_head
            key = tl.load(key_ptr + k, mask=k_inside, other=0).to(tl.float32)
            if NORMALIZE:
                key = key / tl.sqrt(tl.sum(key * key, 0) + eps)
            gate_ptr = g_ptr + row * g_row + at * g_step + head * g_head
            if PER_CHANNEL:
                gate = tl.load(gate_ptr + k, mask=k_inside, other=0).to(tl.float32)
                state = state * tl.exp(gate)[None, :]
            else:
                state = state * tl.exp(tl.load(gate_ptr).to(tl.float32))
            value_ptr = rawv_ptr + row * v_row + at * v_step + head * v_head
            value = tl.load(value_ptr + v, mask=v_inside, other=0).to(tl.float32)
            beta = tl.load(beta_ptr + row * beta_row + at * beta_step + head * beta_head).to(tl.float32)
            delta = beta * (value - tl.sum(state * key[None, :], 1))
            state = state + delta[:, None] * key[None, :]
        tl.store(tile, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit
def replay_outputs_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    d_ptr,
    k_ptr,
    g_ptr,
    query_ptr,
    out_ptr,
    slots_ptr,
    rows_ptr,
    start_ptr,
    count_ptr,
    num_slots,
    num_rows,
    state_slot,
    state_head,
    state_v,
    state_k,
    d_row,
    d_step,
    d_head,
    k_row,
    k_step,
    k_head,
    g_row,
    g_step,
    g_head,
    query_lane,
    query_head,
    out_lane,
    out_head,
    v_dim,
    k_dim,
    length,
    key_group,
    query_group,
    scale,
    PER_CHANNEL: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
):
    """Output rows of one head of one lane, from the state before the ring's steps. Strides in elements."""
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + lane).to(tl.int64)
    row = tl.load(rows_ptr + lane).to(tl.int64)
    steps = tl.minimum(tl.load(count_ptr + lane).to(tl.int32), length)
    begin = tl.load(start_ptr + lane).to(tl.int32)
    valid = (slot >= 0) & (slot < num_slots) & (row >= 0) & (row < num_rows)
    v = tl.program_id(2) * V + tl.arange(0, V)
    k = tl.arange(0, K)
    v_inside = v < v_dim
    k_inside = k < k_dim
    total = tl.zeros([V], tl.float32)
    if valid & (begin >= 0):
        query_at = query_ptr + lane * query_lane + (head // query_group) * query_head
        # The query times the gates of the steps already walked, newest first.
        query = tl.load(query_at + k, mask=k_inside, other=0).to(tl.float32) * scale
        for back in range(steps):
            at = ((begin + steps - 1 - back) % length).to(tl.int64)
            key_at = k_ptr + row * k_row + at * k_step + (head // key_group) * k_head
            key = tl.load(key_at + k, mask=k_inside, other=0).to(tl.float32)
            delta = tl.load(d_ptr + row * d_row + at * d_step + head * d_head + v, mask=v_inside, other=0)
            total += delta.to(tl.float32) * tl.sum(key * query, 0)
            gate_at = g_ptr + row * g_row + at * g_step + head * g_head
            if PER_CHANNEL:
                query = query * tl.exp(tl.load(gate_at + k, mask=k_inside, other=0).to(tl.float32))
            else:
                query = query * tl.exp(tl.load(gate_at).to(tl.float32))
        v_at = v.to(tl.int64)
        k_at = k.to(tl.int64)
        tile = state_ptr + slot * state_slot + head * state_head + v_at[:, None] * state_v + k_at[None, :] * state_k
        state = tl.load(tile, mask=v_inside[:, None] & k_inside[None, :], other=0).to(tl.float32)
        total += tl.sum(state * query[None, :], 1)
    tl.store(out_ptr + lane * out_lane + head * out_head + v, total.to(out_ptr.dtype.element_ty), mask=v_inside)


def replay_states(
    state: Tensor,
    rawv: Tensor,
    rawk: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    slots: Tensor,
    start: Tensor,
    count: Tensor,
    rows: Tensor | None = None,
    eps: float = 1e-6,
    normalize: bool = True,
) -> None:
    """Fold the accepted steps of each request into its state, exactly.

    Args:
        state: `[slots, heads, v_dim, k_dim]`, any strides (`state.transpose(-1, -2)` for states kept `[k, v]`);
            float32, bfloat16 or float16, computed in float32.
        rawv: `[rows, length, heads, v_dim]`: the values as they came; last stride 1, as all rings.
        rawk: `[rows, length, key_heads, k_dim]`, key_heads dividing heads.
        g: `[rows, length, heads]` log gates (GDN), or `[rows, length, heads, k_dim]` (KDA).
        beta: `[rows, length, heads]`.
        slots: int32 or int64 `[requests]`: distinct state slots; negative: no request.
        start: int32 or int64 `[requests]`: ring position of the first step, 0 to length - 1.
        count: int32 or int64 `[requests]`: accepted steps, 0 to length; 0 leaves the state alone.
        rows: int32 or int64 `[requests]`: ring rows, where they are not the slots; negative: no request.
        eps: added to the squared norm of a key.
        normalize: False when rawk is normalised already.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device. On the CPU also: a slot twice, an index out of range.

    Mutates `state`.
    """
    heads, v_dim, k_dim, length = _check_rings(state, "rawv", rawv, "rawk", rawk, g)
    shape = (rawv.shape[0], length, heads)
    check_tensor("beta", beta, dtype=FLOATS, shape=shape, device=state.device)
    rows = slots if rows is None else rows
    _check_requests(state, rawv, slots, rows, start, count, is_written=True)
    kernel = uses_kernels(state.device)
    if not len(slots) or not state.numel():
        return
    if not kernel:
        naive.replay_states(state, rawv, rawk, g, beta, slots, rows, start, count, eps=eps, normalize=normalize)
        return
    with on_device(state):
        replay_states_kernel[(len(slots), heads, cdiv(v_dim, V_BLOCK))](
            state,
            rawv,
            rawk,
            g,
            beta,
            slots,
            rows,
            start,
            count,
            state.shape[0],
            rawv.shape[0],
            *state.stride(),
            *rawv.stride()[:3],
            *rawk.stride()[:3],
            *g.stride()[:3],
            *beta.stride(),
            v_dim,
            k_dim,
            length,
            heads // rawk.shape[2],
            eps,
            PER_CHANNEL=g.dim() == 4,
            NORMALIZE=normalize,
            V=V_BLOCK,
            K=next_power_of_2(k_dim),
            num_warps=4,
            num_stages=1,
        )


def replay_outputs(
    state: Tensor,
    d: Tensor,
    k: Tensor,
    g: Tensor,
    query: Tensor,
    out: Tensor,
    *,
    slots: Tensor,
    start: Tensor,
    count: Tensor,
    rows: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Compute `scale * S q` for the state S after `count` steps of the ring, without forming it.

    Args:
        state: `[slots, heads, v_dim, k_dim]` before the steps, as in `replay_states`.
        d: `[rows, length, heads, v_dim]`: the rank-1 updates' left sides, `beta (v - S k)`.
        k: `[rows, length, key_heads, k_dim]`: keys, normalised.
        g: `[rows, length, heads]` or `[rows, length, heads, k_dim]`.
        query: `[lanes, query_heads, k_dim]`, query_heads dividing heads.
        out: `[lanes, heads, v_dim]`.
        slots, start, count, rows: as in `replay_states`, `[lanes]`; a slot may come twice here. Lanes with a negative
            slot get zeros.
        scale: of the query.

    Returns:
        `out`.

    Raises:
        InvalidArgumentError: as `replay_states`.

    >>> state, ring = torch.eye(2)[None, None], torch.ones(1, 4, 1, 2)
    >>> lane = torch.zeros(1, dtype=torch.int32)
    >>> out = torch.empty(1, 1, 2)
    >>> replay_outputs(state, ring, ring, torch.zeros(1, 4, 1), torch.ones(1, 1, 2), out, slots=lane, start=lane,
    ...     count=lane + 3)
    tensor([[[7., 7.]]])
    """
    heads, v_dim, k_dim, length = _check_rings(state, "d", d, "k", k, g)
    lanes = len(slots)
    check_tensor("query", query, dtype=FLOATS, shape=(lanes, None, k_dim), device=state.device)
    check_tensor("out", out, dtype=FLOATS, shape=(lanes, heads, v_dim), device=state.device)
    if not query.shape[1] or heads % query.shape[1]:
        raise InvalidArgumentError(f"query has {query.shape[1]} heads; they must divide the state's {heads}")
    for what, tensor in (("query", query), ("out", out)):
        if tensor.numel() and tensor.stride(-1) != 1:
            raise InvalidArgumentError(f"{what} has last stride {tensor.stride(-1)}; it must be 1")
    rows = slots if rows is None else rows
    _check_requests(state, d, slots, rows, start, count, is_written=False)
    kernel = uses_kernels(state.device)
    if not lanes or not out.numel():
        return out
    if not kernel:
        naive.replay_outputs(state, d, k, g, query, out, slots, rows, start, count, scale=scale)
        return out
    with on_device(state):
        replay_outputs_kernel[(lanes, heads, cdiv(v_dim, V_BLOCK))](
            state,
            d,
            k,
            g,
            query,
            out,
            slots,
            rows,
            start,
            count,
            state.shape[0],
            d.shape[0],
            *state.stride(),
            *d.stride()[:3],
            *k.stride()[:3],
            *g.stride()[:3],
            *query.stride()[:2],
            *out.stride()[:2],
            v_dim,
            k_dim,
            length,
            heads // k.shape[2],
            heads // query.shape[1],
            scale,
            PER_CHANNEL=g.dim() == 4,
            V=V_BLOCK,
            K=next_power_of_2(k_dim),
            num_warps=4,
            num_stages=1,
        )
    return out


def _check_rings(
    state: Tensor, v_name: str, values: Tensor, k_name: str, keys: Tensor, g: Tensor
) -> tuple[int, int, int, int]:
    check_tensor("state", state, dtype=FLOATS, shape=(None,) * 4)
    _, heads, v_dim, k_dim = state.shape
    check_tensor(v_name, values, dtype=FLOATS, shape=(None, None, heads, v_dim), device=state.device)
    rows, length = values.shape[:2]
    check_tensor(k_name, keys, dtype=FLOATS, shape=(rows, length, None, k_dim), device=state.device)
    if not keys.shape[2] or heads % keys.shape[2]:
        raise InvalidArgumentError(f"{k_name} has {keys.shape[2]} heads; they must divide the state's {heads}")
    shape = (rows, length, heads) if g.dim() == 3 else (rows, length, heads, k_dim)
    check_tensor("g", g, dtype=FLOATS, shape=shape, device=state.device)
    for what, tensor in ((v_name, values), (k_name, keys), ("g", g)):
        if tensor.dim() == 4 and tensor.numel() and tensor.stride(-1) != 1:
            raise InvalidArgumentError(f"{what} has last stride {tensor.stride(-1)}; it must be 1")
    return heads, v_dim, k_dim, length


def _check_requests(
    state: Tensor, ring: Tensor, slots: Tensor, rows: Tensor, start: Tensor, count: Tensor, *, is_written: bool
) -> None:
    check_tensor("slots", slots, shape=(None,))
    for what, index in (("slots", slots), ("rows", rows), ("start", start), ("count", count)):
        check_index(what, index, len(slots), state.device)
    if state.device.type != "cpu":
        return
    for what, index, limit in (
        ("slots", slots, state.shape[0] - 1),
        ("rows", rows, ring.shape[0] - 1),
        ("start", start, ring.shape[1] - 1),
        ("count", count, ring.shape[1]),
    ):
        if len(index) and int(index.max()) > limit:
            raise InvalidArgumentError(f"{what} holds {int(index.max())}; the largest is {limit}")
    used = [slot for slot, steps in zip(slots.tolist(), count.tolist(), strict=True) if slot >= 0 and steps > 0]
    if is_written and len(set(used)) < len(used):
        raise InvalidArgumentError(f"slots {used} holds a slot twice; destinations overlap")
