# ruff: noqa: PLR0917  (the arguments are those of `Ops`)
"""The operations through PyTorch: for CPUs, and for GPUs without Triton.

Written to be read; temporaries are allocated freely. Attention and its merge wait for the device
where `stop` lies on one.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from backends.engine.ops.base import SPLIT_TOKENS, require_split_start, splits_for


class TorchOps:
    """See `backends.engine.ops.base.Ops`."""

    name = "torch"

    def rms_norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """See `Ops.rms_norm`."""
        out.copy_(_normalised(rows, weight, epsilon))

    def rotate(
        self,
        projected: torch.Tensor,
        start: torch.Tensor,
        offset: int,
        frequencies: torch.Tensor,
        scaling: float,
        norm: torch.Tensor | None,
        epsilon: float,
        query_out: torch.Tensor | None,
        key_out: torch.Tensor,
        value_out: torch.Tensor,
        row: torch.Tensor | None,
    ) -> None:
        """See `Ops.rotate`."""
        count = torch.arange(projected.shape[0], device=projected.device)
        kv_heads = key_out.shape[1]
        rotated = projected[:, :-kv_heads].float()
        if norm is not None:
            rotated = F.rms_norm(rotated, (projected.shape[2],), eps=epsilon) * norm
        angles = ((start + offset + count).float()[:, None] * frequencies)[:, None]
        rotated = _rotate(rotated, angles.cos() * scaling, angles.sin() * scaling)
        if query_out is not None:
            query_out.copy_(rotated[:, :-kv_heads])
        target = count if row is None else row + count
        key_out.index_copy_(0, target, rotated[:, -kv_heads:].to(key_out.dtype))
        value_out.index_copy_(0, target, projected[:, -kv_heads:])

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(F.silu(gate).mul_(up))

    def merge_into(
        self,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        part_output: torch.Tensor,
        part_log_sum_exp: torch.Tensor,
    ) -> None:
        """See `Ops.merge_into`."""
        total = torch.logaddexp(log_sum_exp, part_log_sum_exp)
        merged = _weighted(output, log_sum_exp, total)
        output.copy_(merged.add_(_weighted(part_output, part_log_sum_exp, total)))
        log_sum_exp.copy_(total)

    def project_one(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None,
        epsilon: float,
        add: bool,
    ) -> None:
        """See `Ops.project_one`; the product itself has inputs and output in the weights' dtype."""
        product = _projected(rows, weight, bias, norm, epsilon)
        out.copy_(product + out.float() if add else product)

    def gated_one(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        """See `Ops.gated_one`; the product itself has inputs and output in the weights' dtype."""
        self.silu_mul(_projected(rows, weight, bias, norm, epsilon), out)

    def attend_splits(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        stop: torch.Tensor,
        tail_keys: torch.Tensor | None,
        tail_values: torch.Tensor | None,
        tail_start: torch.Tensor | None,
        max_keys: int,
        scale: float,
        partial_output: torch.Tensor,
        partial_log_sum_exp: torch.Tensor,
    ) -> None:
        """See `Ops.attend_splits`."""
        require_split_start(first)
        limit = min(int(stop), first + max_keys)
        tail_first = limit if tail_start is None else int(tail_start)
        for begin in range(first, limit, SPLIT_TOKENS):
            end = min(begin + SPLIT_TOKENS, limit)
            span = (begin - first, end - first)
            split = begin // SPLIT_TOKENS
            partial_output[split], partial_log_sum_exp[split] = _attend(
                query,
                _read(keys, tail_keys, tail_first - first, *span),
                _read(values, tail_values, tail_first - first, *span),
                scale,
            )

    def combine_splits(
        self,
        partial_output: torch.Tensor,
        partial_log_sum_exp: torch.Tensor,
        stop: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Ops.combine_splits`."""
        splits = splits_for(int(stop))
        shares = partial_log_sum_exp[:splits].softmax(0).unsqueeze(-1)
        out.copy_((partial_output[:splits] * shares).sum(0))


def _normalised(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(rows.float(), (rows.shape[-1],), weight.float(), epsilon)


def _projected(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Return the float32 product [1, outputs] of one row, normalised where `norm` is given."""
    if norm is not None:
        rows = _normalised(rows, norm, epsilon)
    return F.linear(rows.to(weight.dtype), weight, bias).float()


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (j, j + head_dim / 2) of every head [rows, heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _weighted(output: torch.Tensor, log_sum_exp: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the float32 output times its share of `total`; zero where there were no keys."""
    nothing = log_sum_exp.isneginf()
    share = torch.where(nothing, log_sum_exp, log_sum_exp - total).exp_()
    return (output.float() * share.unsqueeze(-1)).masked_fill_(nothing.unsqueeze(-1), 0)


def _read(
    rows: torch.Tensor, tail: torch.Tensor | None, tail_row: int, begin: int, end: int
) -> torch.Tensor:
    """Return rows `begin` to `end`, where row `tail_row` and on are those of the tail."""
    if tail is None or end <= tail_row:
        return rows[begin:end]
    late = tail[max(begin - tail_row, 0) : end - tail_row]
    return late if begin >= tail_row else torch.cat((rows[begin:tail_row], late))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 output [heads, head_dim] and log-sum-exp [heads] of one query."""
    kv_heads, head_dim = keys.shape[1:]
    queries = query.reshape(kv_heads, -1, head_dim).float()
    scores = queries @ _packed(keys).transpose(1, 2) * scale
    output = scores.softmax(-1) @ _packed(values)
    return output.reshape(-1, head_dim), scores.logsumexp(-1).flatten()


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy [kv_heads, rows, head_dim].

    Always a copy: a product's bits may depend on how its factors lie in memory.
    """
    heads_first = rows.transpose(0, 1)
    return heads_first.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
