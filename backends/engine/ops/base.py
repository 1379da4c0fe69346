# ruff: noqa: PLR0917  (callers may name the arguments)
"""What the decoder computes besides matrix products and attention over many queries.

All arithmetic is float32, whatever the dtype of the tensors, and is rounded once, into the
output. Outputs are allocated by the caller. The result for a row depends on that row, its
position and the weights alone, never on how many rows there are or on earlier calls.
"""

from __future__ import annotations

from typing import Protocol

import torch

SPLIT_TOKENS = 256
"""Keys that decode attention reads in one program, cut at absolute multiples of it.

With 8 key heads, 32768 keys make 1024 programs, near 8 for each of the 132 processors of an H200,
and 4096 keys still nearly one each. The float32 partial results of 4 query heads a key head are
1.6% of the bfloat16 keys and values read for them.
"""


def splits_for(tokens: int) -> int:
    """Return the number of splits that so many keys are cut into."""
    return -(-tokens // SPLIT_TOKENS)


class Ops(Protocol):
    """The operations, each into tensors that the caller has allocated.

    Tensors are bfloat16, float16 or float32 where nothing else is said, and the last dimension is
    contiguous. The heads of a row lie one after the other; rows may have any stride.
    Single integers that lie on the device (`start`, `row`, `stop`, `tail_start`) are int64 [1].
    Triton's implementation allocates nothing and never waits for the device, so that all of it can
    be captured in a graph.
    """

    @property
    def name(self) -> str:
        """The implementation: "triton" or "torch"."""
        ...

    def rms_norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """Divide each row by its root mean square and multiply by `weight` (arXiv 1910.07467).

        Args:
            rows: [rows, hidden].
            weight: [hidden].
            epsilon: added to the mean square.
            out: [rows, hidden]; may be `rows` itself.
        """
        ...

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
        """Rotate queries and keys by position (RoPE, arXiv 2104.09864) and lay all three out.

        Row i has position start + offset + i. Pairs (j, j + head_dim / 2) turn by position times
        frequency j. With `norm`, each head is divided by its root mean square and multiplied by
        its factors first (Qwen3).

        Args:
            projected: [rows, heads + 2 * kv_heads, head_dim], contiguous: queries, keys, values.
            start: on the device.
            offset: added to it.
            frequencies: float32 [head_dim / 2], in radians a position.
            scaling: of cosines and sines.
            norm: [heads + kv_heads, head_dim], contiguous, or None.
            epsilon: of the norm.
            query_out: [rows, heads, head_dim]; None where only keys and values are wanted.
            key_out: [capacity, kv_heads, head_dim].
            value_out: like `key_out`.
            row: on the device: the row of `key_out` and `value_out` that takes the first; None
                stands for 0.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Compute silu(gate) * up (SwiGLU, arXiv 2002.05202).

        Args:
            gate_up: [rows, 2 * intermediate].
            out: [rows, intermediate].
        """
        ...

    def merge_into(
        self,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        part_output: torch.Tensor,
        part_log_sum_exp: torch.Tensor,
    ) -> None:
        """Merge the attention to further keys into `output` and `log_sum_exp`, in place.

        Online softmax (arXiv 1805.02867). Where a log-sum-exp is minus infinity, there were no
        keys and the output beside it is not looked at.

        Args:
            output: float32 [rows, heads, head_dim], contiguous heads.
            log_sum_exp: float32 [rows, heads], any strides.
            part_output: [rows, heads, head_dim], any strides of rows and heads.
            part_log_sum_exp: float32 [rows, heads], any strides.
        """
        ...

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
        """Multiply one row by a matrix: weight @ rms_norm(row) + bias.

        Args:
            rows: [1, inputs].
            weight: [outputs, inputs], contiguous.
            bias: [outputs] or None.
            out: [1, outputs]; must not overlap `rows`.
            norm: factors [inputs] of a norm of the row before the product; None: no norm.
            epsilon: of the norm.
            add: add to what is in `out` instead of overwriting it.
        """
        ...

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
        """Compute silu(gate) * up of one row, both projected from the norm of the row.

        Args:
            rows: [1, inputs].
            weight: [2 * intermediate, inputs], contiguous: the rows of gate, then those of up.
            bias: [2 * intermediate] or None.
            out: [1, intermediate]; must not overlap `rows`.
            norm: factors [inputs] of a norm of the row before the product; None: no norm.
            epsilon: of the norm.
        """
        ...

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
        """Attend one query to a span of positions, each split apart (arXiv 2311.01282).

        The span is positions `first` to `first + max_keys`, but none from `stop` on. Split s is
        positions s * SPLIT_TOKENS and on and fills row s of the partial results. Its bits depend
        on its keys alone, wherever they lie; so every span but the sequence's last must be whole
        splits. Position p lies at tail_keys[p - tail_start] from `tail_start` on, and before at
        keys[p - first]. Nothing else is read; positions that the tensors do not hold are left out.

        Args:
            query: [heads, head_dim]; head h reads key head h // (heads / kv_heads).
            keys: [rows, kv_heads, head_dim].
            values: like `keys`.
            first: the position of keys[0], a multiple of SPLIT_TOKENS.
            stop: on the device: keys in the whole sequence.
            tail_keys: [tail rows, kv_heads, head_dim], or None.
            tail_values: like `tail_keys`.
            tail_start: on the device: the position of tail_keys[0]; None without a tail.
            max_keys: bound on the positions to cover; no more than splits_for(max_keys) splits
                are visited.
            scale: of the scores.
            partial_output: float32 [splits, heads, head_dim], contiguous.
            partial_log_sum_exp: float32 [splits, heads], contiguous, of the scaled scores.

        Raises:
            ValueError: `first` is inside a split.
        """
        ...

    def combine_splits(
        self,
        partial_output: torch.Tensor,
        partial_log_sum_exp: torch.Tensor,
        stop: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Merge the splits of `stop` keys, always in the same order.

        Args:
            partial_output: float32 [splits, heads, head_dim], contiguous.
            partial_log_sum_exp: float32 [splits, heads], contiguous.
            stop: on the device: keys in the whole sequence, at least 1.
            out: [heads, head_dim].
        """
        ...


def require_split_start(first: int) -> None:
    """Raise ValueError unless a split begins at this position."""
    if first % SPLIT_TOKENS:
        raise ValueError(f"keys from position {first}, which is inside a split of {SPLIT_TOKENS}")
