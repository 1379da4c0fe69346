"""Which blocks, or lines, to keep by the share of attention they hold.

Shares are counted in fixed point: sums of integers are exact, so that what is kept does not depend
on the order in which a device adds, nor on how many rows are looked at in one call.
"""

from __future__ import annotations

import torch

FIXED_POINT = 2.0**40
"""Units in the attention of one query row. Sums of up to 8192 rows are exact in float64 too."""


def fixed_point(shares: torch.Tensor) -> torch.Tensor:
    """Return shares of attention as whole units, int64, rounded down; NaN is 0."""
    return shares.nan_to_num(0.0).mul(FIXED_POINT).to(torch.int64)


def keep_share(mass: torch.Tensor, forced: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Keep what is forced, then the largest, until what is kept holds a share of the whole.

    One is kept while those kept before it, the forced ones included, hold less than the share. Of
    equals the first in the row comes first. Where the whole is 0, all are kept: that is what NaN
    among queries or keys leaves, and who attends to all finds the NaN.

    Args:
        mass: int64 [..., items], at least 0.
        forced: bool, of a shape that broadcasts to it.
        share: float64 [..., 1], of a shape that broadcasts to it; infinity keeps all.

    Returns:
        bool [..., items].
    """
    total = mass.sum(-1, keepdim=True)
    first = mass.masked_fill(~forced, 0).sum(-1, keepdim=True)
    ranked, order = mass.masked_fill(forced, 0).sort(dim=-1, descending=True, stable=True)
    before = first + ranked.cumsum(-1) - ranked
    kept = (before < share * total) | (total == 0)
    return torch.zeros_like(kept).scatter(-1, order, kept) | forced


def keep_most(mass: torch.Tensor, forced: torch.Tensor, count: int) -> torch.Tensor:
    """Keep what is forced, then the largest, until `count` are kept in all.

    Equals and a whole of 0 are treated as by `keep_share`.

    Args:
        mass: int64 [..., items], at least 0.
        forced: bool [items].
        count: how many.

    Returns:
        bool [..., items].
    """
    others = max(count - int(forced.sum()), 0)
    order = mass.masked_fill(forced, -1).argsort(dim=-1, descending=True, stable=True)
    kept = torch.arange(mass.shape[-1], device=mass.device) < others
    kept = kept | (mass.sum(-1, keepdim=True) == 0)
    return torch.zeros_like(kept).scatter(-1, order, kept) | forced
