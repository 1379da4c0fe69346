# ruff: noqa: PLR0917  (the arguments are those of `Ops`)
"""The operations as Triton kernels, each with one fixed configuration for a shape of model.

Nothing is tuned by timing and nothing is chosen by the number of rows, so that equal inputs give
equal bits in every process. Kernels are compiled at their first launch; further launches compile
nothing as long as the model's sizes, the dtypes, the strides of rows and which arguments are None
stay the same. Launches go to the current stream of the current device, which must be that of the
tensors. Runs on CPU tensors too where TRITON_INTERPRET=1 was set before the import.
"""

from __future__ import annotations

import torch
import triton

from backends.engine.ops.base import SPLIT_TOKENS, require_split_start, splits_for
from backends.engine.ops.triton_decode import (
    attend_kernel,
    combine_kernel,
    gated_kernel,
    project_kernel,
)
from backends.engine.ops.triton_rows import (
    merge_kernel,
    rms_norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
)

_LOAD_BYTES = 16  # the widest load of a thread
_SILU_BLOCK = 2048
# Pairs of cells in a program. One warp handles them: the more heads a thread turns by the same
# angles, the fewer sines are worked out twice.
_ROTATE_PAIRS = 1024
_MERGE_CELLS = 2048
_PROJECT_ROWS = 4
_GATED_ROWS = 2
_PROJECT_BLOCK = 1024  # inputs: with four warps, one or two loads a thread
# Cells of keys in a step, and as many of values, and steps in flight: those of 16-bit floats fill
# memory's pipeline; float32 has no tensor cores of full precision and needs registers instead.
_ATTEND_CELLS = {2: 8192, 4: 1024}
_ATTEND_STAGES = {2: 3, 4: 2}
_MIN_GROUP = 16  # rows of the smallest tensor core product
_MIN_KEYS = 16  # its length
# One step merges 131072 keys; each row of it is two sectors of memory.
_COMBINE_SPLITS = 512
_COMBINE_DIMS = 16


class TritonOps:
    """See `backends.engine.ops.base.Ops`."""

    name = "triton"

    def rms_norm(
        self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """See `Ops.rms_norm`."""
        count, hidden = rows.shape
        if not count:
            return
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(count,)](
            rows,
            weight,
            out,
            _row_stride(rows),
            _row_stride(out),
            epsilon,
            hidden=hidden,
            block=block,
            num_warps=min(max(block // 512, 1), 16),
        )

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
        count, all_heads, head_dim = projected.shape
        if not count:
            return
        kv_heads = key_out.shape[1]
        heads = all_heads - 2 * kv_heads
        half_block = triton.next_power_of_2(head_dim // 2)
        head_block = max(_ROTATE_PAIRS // half_block, 1)
        query_tiles = 0 if query_out is None else triton.cdiv(heads, head_block)
        tiles = query_tiles + 2 * triton.cdiv(kv_heads, head_block)
        rotate_kernel[(count * tiles,)](
            projected,
            start,
            offset,
            frequencies,
            scaling,
            norm,
            epsilon,
            query_out,
            key_out,
            value_out,
            row,
            0 if query_out is None else _row_stride(query_out),
            _row_stride(key_out),
            _row_stride(value_out),
            heads=heads,
            kv_heads=kv_heads,
            half=head_dim // 2,
            head_block=head_block,
            half_block=half_block,
            num_warps=1,
            enable_fp_fusion=False,  # so that keys have the same bits without queries
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `Ops.silu_mul`."""
        count, intermediate = out.shape
        if not count:
            return
        silu_mul_kernel[(count * triton.cdiv(intermediate, _SILU_BLOCK),)](
            gate_up,
            out,
            _row_stride(gate_up),
            _row_stride(out),
            intermediate=intermediate,
            block=_SILU_BLOCK,
            num_warps=4,
        )

    def merge_into(
        self,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        part_output: torch.Tensor,
        part_log_sum_exp: torch.Tensor,
    ) -> None:
        """See `Ops.merge_into`."""
        count, heads, head_dim = output.shape
        if not count:
            return
        dim_block = triton.next_power_of_2(head_dim)
        pair_block = max(_MERGE_CELLS // dim_block, 1)
        pairs = count * heads
        merge_kernel[(triton.cdiv(pairs, pair_block),)](
            output,
            log_sum_exp,
            part_output,
            part_log_sum_exp,
            pairs,
            _row_stride(output),
            *log_sum_exp.stride(),
            _row_stride(part_output),
            part_output.stride(1) if heads > 1 else head_dim,
            *part_log_sum_exp.stride(),
            heads=heads,
            head_dim=head_dim,
            pair_block=pair_block,
            dim_block=dim_block,
            num_warps=4,
        )

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
        """See `Ops.project_one`."""
        outputs, hidden = weight.shape
        project_kernel[(triton.cdiv(outputs, _PROJECT_ROWS),)](
            rows,
            weight,
            bias,
            out,
            norm,
            epsilon,
            add=add,
            hidden=hidden,
            outputs=outputs,
            row_block=_PROJECT_ROWS,
            block=_PROJECT_BLOCK,
            vector=_LOAD_BYTES // weight.element_size(),
            num_warps=4,
        )

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
        """See `Ops.gated_one`."""
        outputs, hidden = weight.shape[0] // 2, weight.shape[1]
        gated_kernel[(triton.cdiv(outputs, _GATED_ROWS),)](
            rows,
            weight,
            bias,
            out,
            norm,
            epsilon,
            hidden=hidden,
            outputs=outputs,
            row_block=_GATED_ROWS,
            block=_PROJECT_BLOCK,
            vector=_LOAD_BYTES // weight.element_size(),
            num_warps=4,
        )

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
        if max_keys < 1:
            return
        heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        size = keys.element_size()
        dim_block = triton.next_power_of_2(head_dim)
        if tail_keys is None or tail_values is None or tail_start is None:
            # One compiled kernel for both cases, so that they give the same bits: no position
            # below `stop` lies in this tail.
            tail_keys, tail_values, tail_start = keys, values, stop
        attend_kernel[(splits_for(max_keys) * kv_heads,)](
            query,
            keys,
            values,
            tail_keys,
            tail_values,
            partial_output,
            partial_log_sum_exp,
            stop,
            tail_start,
            first,
            max_keys,
            keys.shape[0],
            tail_keys.shape[0],
            scale,
            _row_stride(keys),
            _row_stride(values),
            _row_stride(tail_keys),
            _row_stride(tail_values),
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            group_block=max(triton.next_power_of_2(group), _MIN_GROUP),
            key_block=min(max(_ATTEND_CELLS[size] // dim_block, _MIN_KEYS), SPLIT_TOKENS),
            dim_block=dim_block,
            split_tokens=SPLIT_TOKENS,
            num_warps=4,
            num_stages=_ATTEND_STAGES[size],
        )

    def combine_splits(
        self,
        partial_output: torch.Tensor,
        partial_log_sum_exp: torch.Tensor,
        stop: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Ops.combine_splits`."""
        heads, head_dim = out.shape
        combine_kernel[(heads * triton.cdiv(head_dim, _COMBINE_DIMS),)](
            partial_output,
            partial_log_sum_exp,
            stop,
            out,
            heads=heads,
            head_dim=head_dim,
            split_block=_COMBINE_SPLITS,
            dim_block=_COMBINE_DIMS,
            split_tokens=SPLIT_TOKENS,
            num_warps=8,
        )


def _row_stride(tensor: torch.Tensor) -> int:
    """Return the stride of rows; of one row, which may have any, that of a contiguous tensor.

    Triton compiles anew when a stride is no longer a multiple of 16.
    """
    return tensor.stride(0) if tensor.shape[0] != 1 else tensor.numel()
