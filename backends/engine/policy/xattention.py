"""XAttention: blocks by the antidiagonals of their scores.

Source: XAttention (arXiv 2503.16428), algorithm 1, and
https://github.com/mit-han-lab/x-attention/tree/e379887.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backends.base import ConfigurationError
from backends.engine.policy import estimate
from backends.engine.policy.base import BLOCK_TOKENS, Model, Place
from backends.engine.settings import require_count

Thresholds = float | str | Sequence[Sequence[float]]
_KEY = "backend.policy.threshold"
_RANGE = "a number above 0 and at most 1"


class XAttentionPolicy:
    """Reads the blocks that hold a share of the attention, as a cheap estimate has it.

    The estimate (`backends.engine.policy.estimate`) takes every `stride`-th antidiagonal of the
    scores. Of each block of queries, the first block of keys and its own are always read; of the
    others the heaviest, while those read before them hold less than `threshold` of the whole. The
    decision is made for each query head.

    Departure: the published rule leaves a block out at threshold 1 now and then; here 1 is dense.

    Args:
        model: its heads, and the layers that a table has to cover.
        stride: tokens reduced to one, a divisor of BLOCK_TOKENS; published are 8 and 16.
        threshold: a number above 0 and at most 1; or a table of them, [layers][heads]; or the
            path of a JSON file with either.
        norm: divides the scores before the softmax.

    Raises:
        ConfigurationError: a setting is not as said here.
    """

    name = "xattention"
    sparse = True
    reads_keys = True

    def __init__(
        self, model: Model, *, stride: int = 8, threshold: Thresholds = 0.9, norm: float = 1.0
    ) -> None:
        require_count("backend.policy.stride", stride)
        if BLOCK_TOKENS % stride:
            raise ConfigurationError(
                f"backend.policy.stride={stride} does not divide a block of {BLOCK_TOKENS} "
                "tokens; published are 8 and 16."
            )
        if not _is_number(norm) or not 0 < norm < math.inf:
            raise ConfigurationError(f"backend.policy.norm={norm!r}: allowed are numbers above 0.")
        self._model = model
        self._stride = stride
        self._norm = norm
        self._threshold = _read_thresholds(threshold, model)
        self._scale = 1.0 / (math.sqrt(model.head_dim) * stride * norm)
        table = torch.tensor(self._threshold, dtype=torch.float64)
        self._shares = table.masked_fill(table == 1, torch.inf).expand(model.layers, model.heads)

    def known(self, layer: int, place: Place) -> None:
        """Return None: queries and keys decide."""
        del layer, place

    def select(
        self, query: torch.Tensor, keys: torch.Tensor, layer: int, place: Place
    ) -> torch.Tensor | None:
        """See `Policy.select`; None where every head of the layer has threshold 1."""
        share = self._shares[layer]
        if share.isinf().all():
            return None
        # From pageable memory the copy is staged at once, so nothing has to wait for it.
        share = share.to(query.device, non_blocking=True)
        rule = estimate.Rule(self._stride, self._scale, share)
        return estimate.find_select_blocks(query.device)(query, keys, place, rule)

    def scratch_bytes(self, queries: int, keys: int) -> int:
        """See `Policy.scratch_bytes`."""
        return estimate.scratch_bytes(queries, keys, self._model, self._stride)

    def describe(self) -> dict[str, Any]:
        """Return the settings in force; thresholds from a file as numbers."""
        return {
            "name": self.name,
            "stride": self._stride,
            "threshold": self._threshold,
            "norm": self._norm,
        }


def _read_thresholds(value: Any, model: Model) -> float | list[list[float]]:
    """Return a threshold, or one for each layer and head, in plain numbers."""
    where = f"{_KEY}={value!r}"
    if isinstance(value, str):
        value = _read_file(value)
    if _is_number(value):
        return _checked(where, value)
    if not _is_list(value) or not all(_is_list(row) for row in value):
        raise ConfigurationError(
            f"{where}: allowed are {_RANGE}, a table of them ({model.layers} layers of "
            f"{model.heads} heads), and the path of a JSON file with either."
        )
    if len(value) != model.layers:
        raise ConfigurationError(
            f"{_KEY}: the table is for {len(value)} layers, but the model has {model.layers}."
        )
    for layer, row in enumerate(value):
        if len(row) != model.heads:
            raise ConfigurationError(
                f"{_KEY}: layer {layer} of the table has {len(row)} numbers, but the model has "
                f"{model.heads} query heads."
            )
    return [
        [_checked(f"{_KEY}[{layer}][{head}]={item!r}", item) for head, item in enumerate(row)]
        for layer, row in enumerate(value)
    ]


def _read_file(path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError) as error:
        raise ConfigurationError(
            f"{_KEY}={path}: cannot be read as a JSON file ({error}); allowed are {_RANGE}, a "
            "table of them, and the path of a JSON file with either."
        ) from error


def _checked(where: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= 1:
        raise ConfigurationError(f"{where}: allowed is {_RANGE}.")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
