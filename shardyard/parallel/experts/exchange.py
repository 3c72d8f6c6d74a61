"""Tokens to the ranks that own their experts, and back: three all-to-alls forward, two backward.

N tokens choose K experts each, so N K rows travel. On the sender they are sorted by expert, which sorts them
by owner, since each rank owns consecutive experts. There is no capacity: a rank receives what it is sent,
from nothing to every row of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [S, H], expert [S, 1], weight [S, 1]) -> [S, H]"""


def exchange_tokens(
    experts: Experts,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    local_experts: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The weighted sum of what its experts make of each token, [N, H] in the dtype of ``hidden``.

    ``hidden`` [N, H]; ``index`` [N, K] int64, experts of the whole group; ``weights`` [N, K]. ``experts``
    runs this rank's own, numbered from 0. The weights never travel: the sender applies them, in their own
    precision.
    """
    ranks = dist.get_world_size(group)
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    # How many rows each expert gets, by where its stretch of the sorted rows ends.
    numbers = torch.arange(ranks * local_experts, device=index.device)
    ends = torch.searchsorted(chosen, numbers, right=True)
    send = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks, local_experts)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    # The only wait for the device: how long the two buffers are.
    send_rows, receive_rows = torch.stack([send.sum(1), receive.sum(1)]).tolist()

    rows = _Spread.apply(hidden, order, index.shape[1])
    rows = _Exchange.apply(rows, send_rows, receive_rows, group)
    expert = numbers[:local_experts].repeat(ranks)
    expert = expert.repeat_interleave(receive.view(-1), output_size=sum(receive_rows))[:, None]
    rows = experts(rows, expert, rows.new_ones(len(rows), 1))
    rows = _Exchange.apply(rows, receive_rows, send_rows, group)
    rows = _Unsort.apply(rows, order).view(*index.shape, -1)
    return (rows * weights[..., None]).sum(1).to(hidden.dtype)


class _Spread(torch.autograd.Function):
    """[N, H] -> [N K, H]: each token once for each of its experts, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.order, ctx.top_k = order, top_k
        return hidden[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        # A sum over the slots of a token, in fp32 and one order; an index_add would add in any.
        slots = _unsort(grad, ctx.order).view(-1, ctx.top_k, grad.shape[-1])
        return slots.sum(1, dtype=torch.float32).to(grad.dtype), None, None


class _Unsort(torch.autograd.Function):
    """[N K, H] in the order of experts -> in the order of tokens and their slots."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.order = order
        return _unsort(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad[ctx.order], None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of the group, ``send[r]`` to rank r; gradients go the same ways back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


def _unsort(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out
