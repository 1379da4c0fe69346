"""MInference's vertical-slash pattern, from the last queries of a chunk.

Source: MInference 1.0 (arXiv 2407.02490), section 3.2, and
https://github.com/microsoft/MInference/tree/fb56c91; the published sizes for heads without a
pattern of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from backends.base import ConfigurationError
from backends.engine.policy.base import BLOCK_TOKENS, Model, Place
from backends.engine.policy.mass import fixed_point, keep_most, keep_share
from backends.engine.settings import require_count

LAST_QUERIES = 64
FORCED_COLUMNS = 30
FORCED_DIAGONALS = 100
VERTICAL = 1000
SLASH = 6096


class MInferencePolicy:
    """Reads the blocks that hold the heaviest columns and diagonals of the last queries' attention.

    The attention of the chunk's last 64 queries is summed up by columns (verticals) and by
    diagonals (slashes), for each query head. The heaviest are kept, the first 30 columns and the
    nearest 100 diagonals among them. A block is read where a kept column lies in it or a kept
    diagonal crosses it.

    Departures: the published kernel reads slashes by blocks of 64 x 64, and columns one by one;
    here both fill blocks of BLOCK_TOKENS, so that more is read for the same lines. A prompt in
    several chunks is judged by the last queries of each, which the paper does not have, so that
    other chunks read other blocks.

    Args:
        model: its heads.
        vertical: columns to keep, the forced ones included; None is 1000.
        slash: diagonals to keep, the forced ones included; None is 6096.
        budget: instead of these, the share of attention that the columns are to hold, and likewise
            the diagonals: the fewest that do are kept. Above 0 and at most 1; 1 is dense.

    Raises:
        ConfigurationError: a setting is not as said here.
    """

    name = "minference"
    sparse = True
    reads_keys = True

    def __init__(
        self,
        model: Model,
        *,
        vertical: int | None = None,
        slash: int | None = None,
        budget: float | None = None,
    ) -> None:
        for key, value in (("vertical", vertical), ("slash", slash)):
            if value is None:
                continue
            require_count(f"backend.policy.{key}", value)
            if budget is not None:
                raise ConfigurationError(
                    f"backend.policy.{key}={value} has no effect with "
                    f"backend.policy.budget={budget}: leave one of them null."
                )
        if budget is not None:
            _check_budget(budget)
        self._model = model
        self._budget = budget
        self._vertical = vertical or VERTICAL
        self._slash = slash or SLASH

    def known(self, layer: int, place: Place) -> None:
        """Return None: queries and keys decide."""
        del layer, place

    def select(
        self, query: torch.Tensor, keys: torch.Tensor, layer: int, place: Place
    ) -> torch.Tensor | None:
        """See `Policy.select`; None with budget 1."""
        del layer
        if self._budget == 1:
            return None
        columns, diagonals = line_mass(query[-LAST_QUERIES:], keys)
        near = torch.arange(place.keys, device=query.device)
        verticals = self._keep(columns, near < FORCED_COLUMNS, self._vertical)
        slashes = self._keep(diagonals, near < FORCED_DIAGONALS, self._slash)
        return blocks_of_lines(verticals, slashes, place)

    def _keep(self, mass: torch.Tensor, forced: torch.Tensor, count: int) -> torch.Tensor:
        if self._budget is None:
            return keep_most(mass, forced, count)
        share = torch.full((1,), self._budget, dtype=torch.float64, device=mass.device)
        return keep_share(mass, forced, share)

    def scratch_bytes(self, queries: int, keys: int) -> int:
        """See `Policy.scratch_bytes`."""
        _, heads, kv_heads, head_dim = self._model
        blocks = Place(0, queries, keys)
        # A group's keys in float32 and its scores, at most twice; the masses of lines, and what
        # ranks them, with room for a sort out of place; blocks, and how far they are apart.
        scores = 4 * (heads // kv_heads) * LAST_QUERIES * (keys + LAST_QUERIES)
        group = 4 * head_dim * (keys + LAST_QUERIES * heads) + 2 * scores + LAST_QUERIES**2
        lines = heads * keys * (2 * 8 + 112)
        places = blocks.query_blocks * blocks.key_blocks
        return group + lines + places * (3 * heads + 24)

    def describe(self) -> dict[str, Any]:
        """Return the settings in force: the sizes, or the budget."""
        fixed = self._budget is None
        return {
            "name": self.name,
            "vertical": self._vertical if fixed else None,
            "slash": self._slash if fixed else None,
            "budget": self._budget,
        }


def line_mass(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up the attention of some queries by columns and by diagonals.

    A group of heads that share their keys is looked at at a time, to bound memory.

    Args:
        query: [queries, heads, head_dim], those of the last positions.
        keys: [keys, kv_heads, head_dim].

    Returns:
        For columns by position, and for diagonals by the distance from query to key: units of
        `mass.fixed_point`, int64 [heads, keys].
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    group = heads // kv_heads
    mass = torch.empty((2, heads, keys.shape[0]), dtype=torch.int64, device=query.device)
    for kv_head in range(kv_heads):
        of_group = slice(kv_head * group, (kv_head + 1) * group)
        columns, diagonals = _sums_of_lines(query[:, of_group], keys[:, kv_head])
        mass[0, of_group] = fixed_point(columns)
        mass[1, of_group] = fixed_point(diagonals)
    return mass[0], mass[1]


def _sums_of_lines(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do so for the query heads of one key head, of which `keys` has [keys, head_dim]."""
    (count, group, head_dim), length = query.shape, keys.shape[0]
    rows = query.float().transpose(0, 1).reshape(-1, head_dim) / math.sqrt(head_dim)
    scores = (rows @ keys.float().T).view(group, count, length)
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    scores[:, :, length - count :].masked_fill_(later, -torch.inf)
    shares = scores.softmax(-1)
    del scores
    columns = shares.sum(1)
    # With one column less in front of each row than of the one before, diagonals are columns.
    padded = F.pad(shares, (count - 1, 0))
    width = padded.shape[2]
    sheared = padded.as_strided((group, count, length), (count * width, width + 1, 1))
    return columns, sheared.sum(1).flip(-1)


def blocks_of_lines(verticals: torch.Tensor, slashes: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the blocks in which a kept column lies, or which a kept diagonal crosses.

    Args:
        verticals: by position, bool [heads, keys].
        slashes: by the distance from query to key, bool [heads, keys].
        place: where the chunk stands.

    Returns:
        bool [heads, query_blocks, key_blocks].
    """
    device = verticals.device
    padding = place.key_blocks * BLOCK_TOKENS - place.keys
    in_columns = F.pad(verticals, (0, padding)).view(-1, place.key_blocks, BLOCK_TOKENS).any(-1)
    # Kept diagonals nearer than each distance, so that a difference counts those in a range.
    nearer = F.pad(slashes.cumsum(-1), (1, 0))
    first_query = BLOCK_TOKENS * torch.arange(place.key_blocks, device=device)
    nearest = (first_query - BLOCK_TOKENS + 1).clamp(min=0)

    def crossed(queries: int) -> torch.Tensor:
        """By how many blocks the keys lie before a block of so many queries: bool [heads, keys]."""
        beyond = (first_query + queries).clamp(max=place.keys)
        return nearer[:, beyond] > nearer[:, nearest]

    query_block = place.first_block + torch.arange(place.query_blocks, device=device)
    apart = query_block[:, None] - torch.arange(place.key_blocks, device=device)
    kept = crossed(BLOCK_TOKENS)[:, apart.clamp(min=0)]
    last = place.queries - BLOCK_TOKENS * (place.query_blocks - 1)
    kept[:, -1] = crossed(last)[:, apart[-1].clamp(min=0)]
    return (kept | in_columns[:, None]) & (apart >= 0)


def _check_budget(budget: object) -> None:
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not 0 < budget <= 1:  # type: ignore[operator]
        raise ConfigurationError(
            f"backend.policy.budget={budget!r}: allowed are null and a number above 0 and at most "
            "1."
        )
